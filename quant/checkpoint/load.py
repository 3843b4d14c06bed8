"""Reading a directory with packed experts back: its experts, and a model that computes with them."""

import json
from pathlib import Path

import torch
from torch import nn

from ..archs import MoEArch, find_arch, load_config, model_from_state
from ..tensor import MXFP4Tensor
from .packed import PackedCheckpoint


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
    """Fused expert weights in MXFP4 by in-memory name, canonical [E, out, in], from the packed tensors of a directory in any layout.

    Errors: ValueError when an expert or a projection is missing, or the directory holds no packed expert.
    """
    return PackedCheckpoint(directory, arch=arch).experts()


def load_exported_model(directory: Path, *, dtype: torch.dtype) -> nn.Module:
    """The transformers model of a directory in any layout, packed weights dequantized (exact), by our own reader.

    Errors: ValueError for missing, unexpected or damaged tensors, and for values that `dtype` cannot hold, with their names.
    """
    config = load_config(directory)
    arch = find_arch(config.model_type, where=str(directory))
    if hasattr(config, "quantization_config"):
        del config.quantization_config   # the values are dequantized here; transformers must not do it again
    state = PackedCheckpoint(directory, arch=arch).dense_state(dtype=dtype)
    return model_from_state(config, state, dtype=dtype, where=str(directory))
