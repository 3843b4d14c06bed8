"""The catalogue of model families whose experts we know how to find, and the doors to transformers."""

from .base import ExpertSlice, MoEArch
from .catalogue import ARCHS, find_arch
from .hf import (
    GROUPED,
    build_model,
    check_model_dir,
    empty_model,
    grouped_while_decoding,
    load_config,
    load_model,
    load_tokenizer,
    memory_names,
    model_from_state,
    to_disk_state,
)

__all__ = [
    "ARCHS",
    "GROUPED",
    "ExpertSlice",
    "MoEArch",
    "build_model",
    "check_model_dir",
    "empty_model",
    "find_arch",
    "grouped_while_decoding",
    "load_config",
    "load_model",
    "load_tokenizer",
    "memory_names",
    "model_from_state",
    "to_disk_state",
]
