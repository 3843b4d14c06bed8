"""The catalogue of model families whose experts we know how to find, and the doors to transformers."""

from .base import ExpertSlice, MoEArch
from .catalogue import ARCHS, find_arch
from .hf import build_model, check_model_dir, empty_model, load_config, load_model, load_tokenizer, memory_names, model_from_state, to_disk_state

__all__ = [
    "ARCHS",
    "ExpertSlice",
    "MoEArch",
    "build_model",
    "check_model_dir",
    "empty_model",
    "find_arch",
    "load_config",
    "load_model",
    "load_tokenizer",
    "memory_names",
    "model_from_state",
    "to_disk_state",
]
