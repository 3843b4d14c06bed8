"""Reading an exported directory back: its packed experts, and a model that computes with them."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.mx import ScaleMode
from ..archs import MoEArch, find_arch, load_config, model_from_state
from ..formats.mxfp4 import unpack
from ..tensor import MXFP4Tensor
from .packing import dense_state, join_experts, packed_stems, tensors_of
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
    """Fused expert weights in MXFP4 by in-memory name, canonical [E, out, in], from the packed tensors of a directory.

    Errors: ValueError when an expert or a projection is missing, or the directory holds no packed expert.
    """
    reader = CheckpointReader(directory)
    scale_mode = read_scale_mode(directory)
    fused: dict[str, MXFP4Tensor] = {}
    blocks: dict[str, dict[tuple[int, int], Tensor]] = {}
    scales: dict[str, dict[tuple[int, int], Tensor]] = {}
    for stem, fmt in packed_stems(reader).items():
        names = tensors_of(stem, fmt=fmt)
        place = arch.packed_slice(stem)
        if fmt == "gpt-oss":
            fused[stem] = MXFP4Tensor(blocks=reader.get(names[0]), scales=reader.get(names[1]), scale_mode=scale_mode)
        elif place is not None and fmt == "mxfp4":
            assert place.expert is not None
            part = unpack(reader.get(names[0]), reader.get(names[1]), scale_mode=scale_mode)
            blocks.setdefault(place.fused, {})[place.expert, place.part] = part.blocks
            scales.setdefault(place.fused, {})[place.expert, place.part] = part.scales
        elif fmt == "mxfp4" and not re.fullmatch(arch.shared, f"{arch.memory_module(stem)}.weight"):
            raise ValueError(f"{directory}: {stem} is packed but is no routed expert of a {arch.name} model. Only experts may be MXFP4 here.")
    for name in blocks:
        fused[name] = MXFP4Tensor(blocks=join_experts(blocks[name], arch=arch, fused=name, where=str(directory)),
                                  scales=join_experts(scales[name], arch=arch, fused=name, where=str(directory)), scale_mode=scale_mode)
    if not fused:
        raise ValueError(f"{directory}: no packed expert found. Give a directory written by `kilotok export`.")
    return fused


def load_exported_model(directory: Path, *, dtype: torch.dtype) -> nn.Module:
    """The transformers model of an exported directory, experts dequantized (exact), by our own reader.

    Errors: ValueError for missing or unexpected tensors, with their names.
    """
    config = load_config(directory)
    arch = find_arch(config.model_type, where=str(directory))
    if hasattr(config, "quantization_config"):
        del config.quantization_config   # the values are dequantized here; transformers must not do it again
    state = dense_state(CheckpointReader(directory), arch=arch, dtype=dtype)
    return model_from_state(config, state, dtype=dtype, where=str(directory))
