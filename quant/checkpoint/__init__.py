"""Checkpoints: read, export, re-read and compare, inspect."""

from .check import require_fitting_parent, stored_dtypes
from .disk import new_directory, require_free_space, write_atomically
from .export import ExportResult, export_run
from .inspect import inspect_directory
from .load import end_token_ids, load_exported_model, read_exported_experts
from .packing import packed_stems, read_packed
from .reader import CheckpointReader, sha256_of_weights

__all__ = [
    "CheckpointReader",
    "ExportResult",
    "end_token_ids",
    "export_run",
    "inspect_directory",
    "load_exported_model",
    "new_directory",
    "packed_stems",
    "read_exported_experts",
    "read_packed",
    "require_fitting_parent",
    "require_free_space",
    "sha256_of_weights",
    "stored_dtypes",
    "write_atomically",
]
