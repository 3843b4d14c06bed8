"""The draft head on disk: config.json and model.safetensors as other engines read them, and what it was made for.

    OUT/dflash/config.json             the published keys (config.py)
    OUT/dflash/model.safetensors       the published tensors, bf16, no embedding and no head
    OUT/dflash/kilotok_draft.json      the target it was distilled from (weight hash, scale mode), taps, how, results
    OUT/dflash/heldout.jsonl           prompts it never saw, by domain
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ..quant.checkpoint import sha256_of_weights
from ..quant.checkpoint.disk import share
from ..quant.checkpoint.load import read_scale_mode
from .config import DraftConfig
from .model import DraftModel

DRAFT_DIRECTORY = "dflash"
DRAFT_METADATA = "kilotok_draft.json"
HELDOUT_PROMPTS = "heldout.jsonl"
WEIGHTS = "model.safetensors"
MASK_EMBEDDING = "mask_embedding.pt"   # of drafts that were trained with a mask vector of their own


def target_record(directory: Path) -> dict[str, Any]:
    """What identifies a target: its name, the hash over its weight files, the rule its scales were chosen by."""
    return {"name": directory.resolve().name, "sha256": sha256_of_weights(directory), "scale_mode": read_scale_mode(directory)}


def write_draft(directory: Path, model: DraftModel, *, metadata: dict[str, Any]) -> None:
    """Write a draft into an existing (temporary) directory. Weights are rounded to bf16.

    metadata: must hold `target` (target_record). Errors: OSError from a full disk, ValueError for weights that are not finite.
    """
    state = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    for name, tensor in state.items():
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"draft: {name} holds NaN or infinity: the run has diverged. Start a new one with a lower rate.")
    c = model.config
    try:
        save_file(state, directory / WEIGHTS, metadata={"format": "pt"})
    except SafetensorError as error:
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
    return DraftConfig.from_json(raw, where=str(path))


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
    model = DraftModel(read_config(directory))
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{directory}: no safetensors file. Give the directory of a DFlash draft head.")
    if (directory / MASK_EMBEDDING).exists():
        raise NotImplementedError(f"{directory}: has a trained {MASK_EMBEDDING}, which is not supported yet; without it the draft would hardly be accepted.")
    state: dict[str, torch.Tensor] = {}
    for path in files:
        try:
            tensors = load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path}: cannot be read as safetensors ({error}). It is truncated or damaged: copy it again.") from error
        for name, tensor in tensors.items():
            short = name.removeprefix("model.")
            if short in state:
                raise ValueError(f"{directory}: tensor {short} is there twice, with and without `model.` or in two files. Keep one.")
            if tensor.dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
                raise NotImplementedError(f"{directory}: {name} is {tensor.dtype}; bf16, fp16, fp32 and fp64 drafts are supported.")
            state[short] = tensor
    expected = model.state_dict()
    wrong = sorted(set(expected) ^ set(state))
    if wrong:
        kind = "missing" if wrong[0] in expected else "unknown"
        raise ValueError(f"{directory}: tensor {wrong[0]} is {kind} ({len(wrong)} such). A DFlash draft of {model.config.num_hidden_layers} layers has "
                         f"{len(expected)} tensors and nothing else; this one is incomplete or of another kind.")
    for name, tensor in state.items():
        if tensor.shape != expected[name].shape:
            raise ValueError(f"{directory}: {name} has shape {tuple(tensor.shape)}; its config.json asks for {tuple(expected[name].shape)}. "
                             "fc.weight is [hidden_size, taps * hidden_size].")
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{directory}: {name} holds NaN or infinity. The draft is damaged: restore it or distill it again.")
    model.load_state_dict(state)
    return model.to(dtype).eval()


def require_fitting_draft(directory: Path, *, target: Path, target_config: dict[str, Any], record: dict[str, Any] | None = None) -> str:
    """A line that says what the draft was made for; ValueError, naming both sides, when it was made for another target.

    target_config: config.json of the target; record: its target_record, if the caller has it (hashing a large model takes minutes).
    A draft without our metadata is checked by its shapes only, and the line says so.
    """
    c, metadata = read_config(directory), read_metadata(directory)
    for name, mine, theirs in (
            ("hidden_size", c.hidden_size, target_config.get("hidden_size")), ("vocab_size", c.vocab_size, target_config.get("vocab_size")),
            ("num_target_layers", c.num_target_layers, target_config.get("num_hidden_layers"))):
        if mine != theirs:
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
    if mine.get("sha256") != theirs["sha256"]:
        raise ValueError(f"draft: {directory} was distilled from {mine.get('name')} (weights {str(mine.get('sha256'))[:12]}); {target} has weights "
                         f"{theirs['sha256'][:12]}. Distill a draft for this target: train dflash-distill.")
    return f"draft {directory}: distilled from these weights ({theirs['sha256'][:12]}, scale_mode {theirs['scale_mode']})"
