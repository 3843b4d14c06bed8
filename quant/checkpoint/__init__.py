"""Checkpoints: read and written in every layout, exported from a run, converted, re-read and compared, inspected."""

from .check import require_fitting_parent, stored_dtypes
from .convert import ConvertResult, convert_directory
from .disk import new_directory, require_free_space, write_atomically
from .export import ExportOptions, ExportResult, RankResult, export_run
from .inspect import inspect_directory
from .layouts import LAYOUTS, find_layout
from .load import end_token_ids, load_exported_model, read_exported_experts
from .packed import PackedCheckpoint
from .reader import CheckpointReader, sha256_of_weights

__all__ = [
    "LAYOUTS",
    "CheckpointReader",
    "ConvertResult",
    "ExportOptions",
    "ExportResult",
    "PackedCheckpoint",
    "RankResult",
    "convert_directory",
    "end_token_ids",
    "export_run",
    "find_layout",
    "inspect_directory",
    "load_exported_model",
    "new_directory",
    "read_exported_experts",
    "require_fitting_parent",
    "require_free_space",
    "sha256_of_weights",
    "stored_dtypes",
    "write_atomically",
]
