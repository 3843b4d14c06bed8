"""The draft head on disk: config.json and model.safetensors as other engines read them, and what it was made for.

    OUT/dflash/config.json             the published keys (config.py)
    OUT/dflash/model.safetensors       the published tensors, bf16, no embedding and no head; with a reduced vocabulary also d2t, t2d and its head rows
    OUT/dflash/mask_embedding.pt       a trained mask vector, if it has one: {"embedding": [D], "mask_token_id": id}, as vLLM and SGLang read it
    OUT/dflash/kilotok_draft.json      the target it was distilled from (weight hash, scale mode), taps, how, results
    OUT/dflash/heldout.jsonl           prompts it never saw, by domain
"""

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..quant.checkpoint import sha256_of_weights
from ..quant.checkpoint.disk import share
from ..quant.checkpoint.metadata import read_scale_mode, values_of
from .config import DraftConfig
from .model import DraftModel

DRAFT_DIRECTORY = "dflash"
DRAFT_METADATA = "kilotok_draft.json"
HELDOUT_PROMPTS = "heldout.jsonl"
WEIGHTS = "model.safetensors"
MASK_EMBEDDING = "mask_embedding.pt"   # of drafts that were trained with a mask vector of their own
_OWN = ("mask_embedding", "draft_ids", "own_head", "own_embedding")   # of the model's state, what is stored in another form
_TABLES = ("d2t", "t2d")
_ALIASES = (("encoder.fc.", "fc."), ("encoder.output_norm_enc.", "hidden_norm."), ("midlayer.", "layers.0."))   # other names that engines read


def target_record(directory: Path) -> dict[str, Any]:
    """What identifies a target: its name, the hash over its weight files, the rule its scales were chosen by."""
    return {"name": directory.resolve().name, "sha256": sha256_of_weights(directory), "scale_mode": read_scale_mode(directory)}


def write_draft(directory: Path, model: DraftModel, *, metadata: dict[str, Any], head_VD: Tensor | None = None) -> None:
    """Write a draft into an existing (temporary) directory. Weights are rounded to bf16.

    metadata: must hold `target` (target_record). head_VD: the target's head, of which a reduced vocabulary's rows go with the draft.
    Errors: OSError from a full disk, ValueError for weights that are not finite or a reduced vocabulary without head_VD.
    """
    c = model.config
    state = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in model.state_dict().items() if name not in _OWN}
    if model.own_head is not None:
        state["lm_head.weight"] = model.own_head.detach().to("cpu", torch.bfloat16).contiguous()
    if model.own_embedding is not None:
        state["embed_tokens.weight"] = model.own_embedding.detach().to("cpu", torch.bfloat16).contiguous()
    if model.draft_ids is not None and model.own_head is None:
        if head_VD is None:
            raise ValueError("draft: with a reduced vocabulary the target's head is needed, whose rows go with the draft; got none.")
        state["lm_head.weight"] = head_VD.detach()[model.draft_ids.to(head_VD.device)].to("cpu", torch.bfloat16).contiguous()
    mask = None if model.mask_embedding is None else model.mask_embedding.detach().to("cpu", torch.bfloat16)
    for name, tensor in (*state.items(), *([] if mask is None else [(MASK_EMBEDDING, mask)])):
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"draft: {name} holds NaN or infinity: the run has diverged. Start a new one with a lower rate.")
    if model.draft_ids is not None:
        ids = model.draft_ids.cpu()
        state["d2t"] = ids - torch.arange(len(ids))   # offsets: target id = draft id + d2t[draft id]
        state["t2d"] = torch.zeros(c.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    try:
        save_file(state, directory / WEIGHTS, metadata={"format": "pt"})
        if mask is not None:
            torch.save({"embedding": mask, "mask_token_id": c.mask_token_id}, directory / MASK_EMBEDDING)
    except (SafetensorError, RuntimeError) as error:
        raise OSError(f"draft: writing to {directory} failed ({error}). Free some space or write elsewhere.") from error
    share(directory / WEIGHTS)
    (directory / "config.json").write_text(json.dumps(c.to_json(), indent=2) + "\n")
    (directory / DRAFT_METADATA).write_text(json.dumps(draft_metadata(c, metadata), indent=2) + "\n")


def draft_metadata(config: DraftConfig, metadata: dict[str, Any]) -> dict[str, Any]:
    """What kilotok_draft.json holds."""
    return {"format": "dflash", "target_layer_ids": list(config.target_layer_ids), "mask_token_id": config.mask_token_id, "block_size": config.block_size,
            **metadata}


def read_config(directory: Path) -> DraftConfig:
    """Errors: FileNotFoundError without a config.json, ValueError for one that is damaged or incomplete."""
    path = directory / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{directory}: no config.json. Give the directory of a DFlash draft head.")
    try:
        raw = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: not readable as JSON ({error}). Restore it.") from error
    config = DraftConfig.from_json(raw, where=str(path))
    has_mask = (directory / MASK_EMBEDDING).is_file()
    if config.mask_embedding and not has_mask:
        raise FileNotFoundError(f"{directory}: config.json names a trained mask embedding, and {MASK_EMBEDDING} is missing: without it hardly a draft would be "
                                "accepted. Copy it again.")
    return dataclasses.replace(config, mask_embedding=has_mask)


def read_metadata(directory: Path) -> dict[str, Any] | None:
    """What the draft was made for; None for a draft of another tool. Errors: ValueError for a damaged file."""
    path = directory / DRAFT_METADATA
    if not path.is_file():
        return None
    try:
        metadata: dict[str, Any] = json.loads(path.read_text())
        if not {"target", "target_layer_ids"} <= set(metadata):
            raise ValueError("no target or target_layer_ids")
        if not isinstance(metadata["target"], dict):
            raise ValueError(f"target must be an object; got {type(metadata['target']).__name__}")
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: not readable ({error}). Restore it, or distill the draft again.") from error
    return metadata


def read_draft(directory: Path, *, dtype: torch.dtype) -> DraftModel:
    """The draft head of a directory, in evaluation mode.

    Errors: ValueError for a missing, unknown or misshapen tensor, or one that is not finite, with its name.
    """
    config = read_config(directory)
    model = DraftModel(config)
    state = _read_tensors(directory)
    if config.mask_embedding:
        state["mask_embedding"] = _read_mask_embedding(directory / MASK_EMBEDDING, config=config)
    if config.draft_vocab_size is not None:
        state["draft_ids"] = _draft_ids(state, config=config, where=directory)
    elif "d2t" in state or "t2d" in state:
        raise ValueError(f"{directory}: has a table for a reduced vocabulary (d2t, t2d), but config.json has no draft_vocab_size. Restore config.json.")
    own_head, own_embedding = state.pop("lm_head.weight", None), state.pop("embed_tokens.weight", None)
    expected = model.state_dict()
    wrong = sorted(set(expected) ^ set(state))
    if wrong:
        kind = "missing" if wrong[0] in expected else "unknown"
        raise ValueError(f"{directory}: tensor {wrong[0]} is {kind} ({len(wrong)} such). A DFlash draft of {config.num_hidden_layers} layers like this one has "
                         f"{len(expected)} tensors and nothing else; this one is incomplete or of another kind.")
    shapes = {name: tensor.shape for name, tensor in expected.items()}
    rows = config.draft_vocab_size or config.vocab_size
    optional = {name: tensor for name, tensor in (("lm_head.weight", own_head), ("embed_tokens.weight", own_embedding)) if tensor is not None}
    shapes |= {"lm_head.weight": torch.Size((rows, config.hidden_size)), "embed_tokens.weight": torch.Size((config.vocab_size, config.hidden_size))}
    for name, tensor in {**state, **optional}.items():
        if tensor.shape != shapes[name]:
            raise ValueError(f"{directory}: {name} has shape {tuple(tensor.shape)}; its config.json asks for {tuple(shapes[name])}. "
                             "fc.weight is [hidden_size, taps * hidden_size].")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{directory}: {name} holds NaN or infinity. The draft is damaged: restore it or distill it again.")
    model.load_state_dict(state)
    model.own_head, model.own_embedding = own_head, own_embedding
    return model.to(dtype).eval()


def _read_tensors(directory: Path) -> dict[str, Tensor]:
    """All tensors of a directory under the published names."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{directory}: no safetensors file. Give the directory of a DFlash draft head.")
    state: dict[str, Tensor] = {}
    for path in files:
        try:
            tensors = load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path}: cannot be read as safetensors ({error}). It is truncated or damaged: copy it again.") from error
        for name, tensor in tensors.items():
            short = name.removeprefix("model.")
            for alias, published in _ALIASES:
                if short.startswith(alias):
                    short = published + short[len(alias):]
            if short in state:
                raise ValueError(f"{directory}: tensor {short} is there twice, with and without `model.` or in two files. Keep one.")
            if tensor.dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64) and short not in _TABLES:
                raise NotImplementedError(f"{directory}: {name} is {tensor.dtype}; bf16, fp16, fp32 and fp64 drafts are supported.")
            state[short] = tensor
    return state


def _read_mask_embedding(path: Path, *, config: DraftConfig) -> Tensor:
    """Errors: ValueError for a file that is damaged, or made for another mask token or another width."""
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path}: cannot be read ({str(error).splitlines()[0]}). It is damaged: copy it again.") from error
    vector, token = (stored.get("embedding"), stored.get("mask_token_id")) if isinstance(stored, dict) else (stored, config.mask_token_id)
    if token != config.mask_token_id:
        raise ValueError(f"{path}: is for mask token {token}; config.json has {config.mask_token_id}. They do not belong together.")
    if not isinstance(vector, Tensor) or vector.numel() != config.hidden_size:
        shape = tuple(vector.shape) if isinstance(vector, Tensor) else type(vector).__name__
        raise ValueError(f"{path}: must hold one vector of {config.hidden_size}; got {shape}. One vector a position is not supported.")
    return vector.flatten()


def _draft_ids(state: dict[str, Tensor], *, config: DraftConfig, where: Path) -> Tensor:
    """Target ids of a reduced vocabulary, from its two tables, which must agree."""
    offsets, is_drafted = state.pop("d2t", None), state.pop("t2d", None)
    if offsets is None or offsets.shape != (config.draft_vocab_size,):
        raise ValueError(f"{where}: draft_vocab_size {config.draft_vocab_size} needs a tensor d2t of that length; got "
                         f"{'none' if offsets is None else tuple(offsets.shape)}.")
    ids = offsets.long() + torch.arange(len(offsets))
    is_in_order = bool((ids[1:] > ids[:-1]).all()) and int(ids[0]) >= 0 and int(ids[-1]) < config.vocab_size
    if not is_in_order or (is_drafted is not None and is_drafted.bool().nonzero().flatten().tolist() != ids.tolist()):
        raise ValueError(f"{where}: d2t must give different target ids in ascending order, those that t2d marks. The draft is damaged: restore it.")
    if "lm_head.weight" not in state:
        raise ValueError(f"{where}: a draft with a reduced vocabulary brings its head rows; lm_head.weight is missing.")
    return ids


def misfit(config: DraftConfig, target_config: dict[str, Any]) -> tuple[str, Any, Any] | None:
    """(what, the draft's, the target's) of the first shape in which a draft and a target's config.json differ; None when it fits.

    A target's embedding may have more rows than the draft's vocab_size says (MiMo's is padded), and another tool's draft may not say how many
    layers its target has.
    """
    layers, vocab = target_config.get("num_hidden_layers"), target_config.get("vocab_size")
    for name, mine, theirs, fits in (
            ("hidden_size", config.hidden_size, target_config.get("hidden_size"), config.hidden_size == target_config.get("hidden_size")),
            ("hidden_size", config.target_hidden_size, target_config.get("hidden_size"),
             config.target_hidden_size in (None, target_config.get("hidden_size"))),
            ("vocab_size", config.vocab_size, vocab, isinstance(vocab, int) and config.vocab_size <= vocab),
            ("num_target_layers", config.num_target_layers, layers, config.num_target_layers in (None, layers)),
            ("a layer to tap", max(config.target_layer_ids), f"layers 0..{(layers or 0) - 1}", max(config.target_layer_ids) < (layers or 0))):
        if not fits:
            return name, mine, theirs
    return None


def require_fitting_draft(directory: Path, *, target: Path, target_config: dict[str, Any], record: dict[str, Any] | None = None) -> str:
    """A line that says what the draft was made for; ValueError, naming both sides, when it was made for another target.

    target_config: config.json of the target; record: its target_record, if the caller has it (hashing a large model takes minutes).
    A draft without our metadata is checked by its shapes only, and the line says so.
    """
    c, metadata = read_config(directory), read_metadata(directory)
    difference = misfit(c, target_config)
    if difference is not None:
        name, mine, theirs = difference
        raise ValueError(f"draft: {directory} is for a target with {name} {mine}; {target} has {theirs}. Distill a draft for this target.")
    if metadata is None:
        return f"draft {directory}: no {DRAFT_METADATA}, so whether it was made for this target is not known; its shapes fit"
    if list(c.target_layer_ids) != metadata["target_layer_ids"]:
        raise ValueError(f"draft: {directory}: config.json taps layers {list(c.target_layer_ids)}, the draft was trained on {metadata['target_layer_ids']} "
                         f"({DRAFT_METADATA}). Restore config.json.")
    for name in ("mask_token_id", "block_size"):
        if name in metadata and metadata[name] != getattr(c, name):
            raise ValueError(f"draft: {directory}: config.json has {name} {getattr(c, name)}, the draft was trained with {metadata[name]} "
                             f"({DRAFT_METADATA}). Restore config.json.")
    mine, theirs = metadata["target"], record or target_record(target)
    if mine.get("scale_mode") != theirs["scale_mode"]:
        raise ValueError(f"draft: {directory} was distilled from a target with scale_mode {mine.get('scale_mode')}; {target} has {theirs['scale_mode']}. "
                         "Distill a draft for this target: train dflash-distill.")
    if mine.get("sha256") != theirs["sha256"] and mine.get("sha256") in values_of(target, sha256=theirs["sha256"]):
        return (f"draft {directory}: distilled from weights of the same values in another layout ({str(mine['sha256'])[:12]}, converted to "
                f"{theirs['sha256'][:12]}, scale_mode {theirs['scale_mode']})")
    if mine.get("sha256") != theirs["sha256"]:
        raise ValueError(f"draft: {directory} was distilled from {mine.get('name')} (weights {str(mine.get('sha256'))[:12]}); {target} has weights "
                         f"{theirs['sha256'][:12]}. Distill a draft for this target: train dflash-distill.")
    return f"draft {directory}: distilled from these weights ({theirs['sha256'][:12]}, scale_mode {theirs['scale_mode']})"
