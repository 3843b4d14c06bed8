"""Reading an exported directory back: its packed experts, and a model that computes with them."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...kernels.mx import ScaleMode
from ..archs import MoEArch, build_model, find_arch, load_config
from ..tensor import MXFP4Tensor
from . import compressed_tensors
from .reader import CheckpointReader

METADATA = "kilotok.json"


def read_export_metadata(out: Path) -> dict[str, Any] | None:
    """kilotok.json of an exported directory; None for a directory of another tool. Errors: ValueError when it is damaged."""
    path = out / METADATA
    if not path.is_file():
        return None
    try:
        metadata = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: not readable as JSON ({error}). Restore it, or export the run again.") from error
    if not isinstance(metadata, dict):
        raise ValueError(f"{path}: must be a JSON object; got {type(metadata).__name__}. Restore it, or export the run again.")
    return metadata


def read_scale_mode(directory: Path) -> ScaleMode | None:
    """The scale rule our metadata file records; None for a directory of another tool. Errors: as `read_export_metadata`."""
    metadata = read_export_metadata(directory)
    if metadata is None:
        return None
    if "scale_mode" not in metadata:
        raise ValueError(f"{directory / METADATA}: has no scale_mode. Restore it, or export the run again.")
    mode: ScaleMode = metadata["scale_mode"]
    return mode


def end_token_ids(directory: Path) -> frozenset[int]:
    """End-of-sequence tokens: those of generation_config.json, else those of config.json; empty when neither names one."""
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        if path.is_file():
            try:
                value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            except (ValueError, AttributeError) as error:
                raise ValueError(f"{path}: not readable as a JSON object ({error}). Restore it.") from error
            if value is not None:
                return frozenset(value if isinstance(value, list) else [value])
    return frozenset()


def read_exported_experts(directory: Path, *, arch: MoEArch) -> dict[str, MXFP4Tensor]:
    """Fused expert weights by in-memory name, [E, out, in], from the packed tensors of a directory.

    Errors: ValueError when an expert or a projection is missing, or the directory holds no packed expert.
    """
    reader = CheckpointReader(directory)
    scale_mode = read_scale_mode(directory)
    parts: dict[str, dict[tuple[int, int], MXFP4Tensor]] = {}
    rows: dict[str, int] = {}
    for name in reader.names:
        if not name.endswith(f".{compressed_tensors.PACKED}"):
            continue
        stem = name.removesuffix(f".{compressed_tensors.PACKED}")
        place = arch.expert_slice(f"{stem}.weight")
        if place is None:
            raise ValueError(f"{directory}: {name} is packed but is no routed expert of a {arch.name} model. Only experts may be MXFP4 here.")
        scale = reader.get(f"{stem}.{compressed_tensors.SCALE}")
        parts.setdefault(place.fused, {})[place.expert, place.part] = compressed_tensors.from_disk(reader.get(name), scale, scale_mode=scale_mode)
        rows[place.fused] = place.parts
    if not parts:
        raise ValueError(f"{directory}: no packed expert found. Give a directory written by `kilotok export`.")
    fused = {}
    for name, pieces in parts.items():
        num_experts = 1 + max(e for e, _ in pieces)
        grid = [(e, p) for e in range(num_experts) for p in range(rows[name])]
        missing = [g for g in grid if g not in pieces]
        if missing:
            raise ValueError(f"{directory}: {name}: expert {missing[0][0]}, part {missing[0][1]} is not in the files. The export is incomplete.")
        ordered = [pieces[g] for g in grid]
        fused[name] = MXFP4Tensor(
            blocks=torch.stack([t.blocks for t in ordered]).unflatten(0, (num_experts, -1)).flatten(1, 2),
            scales=torch.stack([t.scales for t in ordered]).unflatten(0, (num_experts, -1)).flatten(1, 2), scale_mode=scale_mode)
    return fused


def load_exported_model(directory: Path, *, dtype: torch.dtype) -> nn.Module:
    """The transformers model of an exported directory, experts dequantized (exact), by our own reader.

    Errors: ValueError for missing or unexpected tensors, with their names.
    """
    config = load_config(directory)
    arch = find_arch(config.model_type, where=str(directory))
    if hasattr(config, "quantization_config"):
        del config.quantization_config   # the values are dequantized here; transformers must not do it again
    reader = CheckpointReader(directory)
    state = {name: t.dequantize(dtype=dtype) for name, t in read_exported_experts(directory, arch=arch).items()}
    for name in reader.names:
        if not name.endswith((f".{compressed_tensors.PACKED}", f".{compressed_tensors.SCALE}")):
            state[name] = reader.get(name).to(dtype)
    model = build_model(config, device="cpu").to(dtype)
    missing, unexpected = model.load_state_dict(state, strict=False)
    if config.tie_word_embeddings and "lm_head.weight" in missing:
        missing.remove("lm_head.weight")   # the head is the embedding
    if missing or unexpected:
        raise ValueError(f"{directory}: tensors do not fit the config: missing {missing[:3]}, unexpected {unexpected[:3]}.")
    return model.eval()
