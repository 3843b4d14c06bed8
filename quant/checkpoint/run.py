"""A QAT run directory as the export sees it: metadata and the newest weights. No Lightning needed."""

import contextlib
import json
import pickle
import warnings
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_shards

from ...kernels.mx import ScaleMode
from ..plan import PlanOptions
from .masters import Masters
from .reader import sha256_of_files

WEIGHTS_PREFIX = "student."   # of the trained module inside a Lightning checkpoint
RUN_METADATA = "meta.json"


@dataclass(frozen=True, kw_only=True)
class Run:
    """RUN/meta.json and RUN/checkpoints/, opened for reading."""

    directory: Path
    checkpoint: Path
    step: int
    meta: dict[str, Any]

    @classmethod
    def open(cls, directory: Path) -> "Run":
        """Errors: FileNotFoundError for a directory that is no run or has no checkpoint yet."""
        if not (directory / RUN_METADATA).is_file():
            raise FileNotFoundError(f"{directory.absolute()}: no {RUN_METADATA}. Give the run directory that `train qat` wrote.")
        checkpoint = newest_checkpoint(directory)
        if checkpoint is None:
            raise FileNotFoundError(f"{directory}: no checkpoint yet. Finish the run with `train qat RECIPE --resume` first.")
        meta = read_meta(directory)
        if meta["kind"] != "qat":
            raise ValueError(f"{directory}: is a run of kind {meta['kind']!r}. Export takes a run of `train qat`.")
        return cls(directory=directory, checkpoint=checkpoint, step=step_of(checkpoint), meta=meta)

    @property
    def parent(self) -> Path:
        return Path(self.meta["parent"]["path"])

    @property
    def parent_sha256(self) -> str:
        return str(self.meta["parent"]["sha256"])

    @property
    def scale_mode(self) -> ScaleMode:
        mode: ScaleMode = self.meta["quant"]["scale_mode"]
        return mode

    @property
    def plan_options(self) -> PlanOptions:
        return PlanOptions.from_json(self.meta["quant"])

    @property
    def is_complete(self) -> bool:
        return self.step >= int(self.meta["max_steps"])

    def load_trained_weights(self) -> dict[str, Tensor]:
        """Trained parameters by in-memory name.

        Errors: ValueError for a checkpoint that cannot be read.
        """
        state = read_checkpoint(self.checkpoint)
        return {k.removeprefix(WEIGHTS_PREFIX): v for k, v in state.items() if k.startswith(WEIGHTS_PREFIX)}

    def open_masters(self) -> Masters:
        """Trained parameters by in-memory name, read when they are used.

        Errors: ValueError for a checkpoint that cannot be read.
        """
        if not self.checkpoint.is_dir():
            return Masters.of_tensors(self.load_trained_weights())   # mapped
        with reading(self.checkpoint):
            return Masters.of_shards(self.checkpoint, prefix=WEIGHTS_PREFIX)

    def checkpoint_sha256(self, *, jobs: int = 1) -> str:
        """One hash over the files of the checkpoint, in name order."""
        files = sorted(p for p in self.checkpoint.iterdir() if p.is_file()) if self.checkpoint.is_dir() else [self.checkpoint]
        return sha256_of_files(files, jobs=jobs)

    def export_metadata(self, *, layout: str, checkpoint_sha256: str) -> dict[str, Any]:
        """What kilotok.json of the export says: how its numbers were made, and from what."""
        return {
            "layout": layout,
            "format": "mxfp4", "scale_mode": self.scale_mode, "rounding": "ties to even",
            "source_dtype": "bfloat16", "parent": self.meta["parent"], "quant": self.meta["quant"],
            "run": {"step": self.step, "max_steps": self.meta["max_steps"], "checkpoint_sha256": checkpoint_sha256,
                    "results": {k: self.meta.get(k) for k in ("round_to_nearest", "round_to_nearest_modes", "control", "qat")}},
            "versions": self.meta["versions"],
        }


def read_meta(directory: Path) -> dict[str, Any]:
    """RUN/meta.json. Errors: ValueError when it is damaged."""
    path = directory / RUN_METADATA
    try:
        meta: dict[str, Any] = json.loads(path.read_text())
        missing = {"kind", "status", "max_steps", "versions"} | ({"parent", "quant"} if meta.get("kind") == "qat" else set())
        missing -= set(meta)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not readable as JSON ({error}). Restore it, or start a new run.") from error
    if missing:
        raise ValueError(f"{path}: has no {', '.join(sorted(missing))}. Restore it, or start a new run.")
    return meta


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """The tensors of a training checkpoint, by their names there: a file, or a folder of shards, which is put together without a process group.

    Errors: ValueError when it is truncated or damaged.
    """
    with reading(path):
        if path.is_dir():
            return _read_shards(path)
        state: dict[str, Tensor] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)["state_dict"]
    return state


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """What goes wrong in a checkpoint, as one error that names it."""
    try:
        yield
    except (RuntimeError, pickle.UnpicklingError, zipfile.BadZipFile, KeyError, EOFError, ValueError, OSError, CheckpointException) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path}: cannot be read as a checkpoint ({reason}). Remove it and continue the run with --resume.") from error


def _read_shards(path: Path) -> dict[str, Tensor]:
    """The weights of a sharded checkpoint; the optimizer's state is left on the disk."""
    prefix = "state_dict."
    described = FileSystemReader(path).read_metadata().state_dict_metadata
    state = {name.removeprefix(prefix): torch.empty(tensor.size, dtype=tensor.properties.dtype)
             for name, tensor in described.items() if name.startswith(prefix) and isinstance(tensor, TensorStorageMetadata)}
    if not state:
        raise ValueError("no weights in its metadata")
    with warnings.catch_warnings():   # of being alone, which is the intent
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load_shards({"state_dict": state}, checkpoint_id=path, no_dist=True)
    return state


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.stem.removeprefix("step-"))


def newest_checkpoint(directory: Path) -> Path | None:
    """The checkpoint with the highest step, or None."""
    found = sorted((directory / "checkpoints").glob("step-[0-9]*.ckpt"), key=step_of)
    return found[-1] if found else None
