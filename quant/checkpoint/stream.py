"""Writing a checkpoint shard by shard: what goes where is known before a value is read, and each shard is whole or absent.

A unit is a few tensors that are made together, such as one expert's codes and scales. Units are dealt into shards by name, dtype and shape
alone, so the index and every byte offset are fixed beforehand: shards are written in any order, by several threads or by several machines
on one file system, and those that a killed run has finished are not written again. Memory: one unit a thread.
"""

import json
import math
import os
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from .disk import share
from .layouts import natural
from .packed import PackedCheckpoint
from .progress import Progress
from .reader import DTYPE_NAMES, DTYPES, INDEX, SINGLE, bytes_of

T = TypeVar("T")
MAX_SHARD_BYTES = 5_000_000_000   # the shard size Hugging Face tools write


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """A tensor that will be written; dtype by its safetensors name."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Tensors made together.

    make: their values, in the order of `tensors`. check: compares what was read back with what there must be and returns the number of packed
        weights compared. owner: the rank whose piece of a sharded training checkpoint holds what it is made from.
    """

    tensors: tuple[TensorSpec, ...]
    make: Callable[[], Iterable[Tensor]]
    check: Callable[[PackedCheckpoint], int]
    owner: int = 0

    @property
    def num_bytes(self) -> int:
        return sum(t.num_bytes for t in self.tensors)


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One file."""

    file: str
    units: tuple[Unit, ...]

    @property
    def owner(self) -> int:
        return self.units[0].owner

    @property
    def num_bytes(self) -> int:
        return sum(u.num_bytes for u in self.units)

    def layout(self) -> tuple[bytes, dict[str, int]]:
        """The file's header and every tensor's byte offset in the file. In the order of safetensors: wide dtypes first, then by name."""
        tensors = sorted((t for u in self.units for t in u.tensors), key=lambda t: (-DTYPES[t.dtype].itemsize, t.name))
        described: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offsets, end = {}, 0
        for t in tensors:
            offsets[t.name] = end
            end += t.num_bytes
            described[t.name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [offsets[t.name], end]}
        text = json.dumps(described, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        header = struct.pack("<Q", len(text)) + text
        return header, {name: len(header) + offset for name, offset in offsets.items()}

    def is_complete(self, directory: Path) -> bool:
        """A shard has its name only when it is whole; the size is compared all the same."""
        path = directory / self.file
        return path.is_file() and path.stat().st_size == len(self.layout()[0]) + self.num_bytes


def plan_shards(units: Sequence[Unit], *, max_bytes: int | None = None) -> list[Shard]:
    """Units by name into files of at most `max_bytes` (or one unit), owner by owner. Errors: ValueError for a name that is written twice."""
    limit = MAX_SHARD_BYTES if max_bytes is None else max_bytes
    twice = [n for n, count in Counter(t.name for u in units for t in u.tensors).items() if count > 1]
    if twice:
        raise ValueError(f"export: {twice[0]} would be written twice ({len(twice)} such names). The parent's names and its family's disagree.")
    groups: list[list[Unit]] = []
    size = 0
    for unit in sorted(units, key=lambda u: (u.owner, natural(u.tensors[0].name))):
        if not groups or size + unit.num_bytes > limit or groups[-1][0].owner != unit.owner:
            groups.append([])
            size = 0
        groups[-1].append(unit)
        size += unit.num_bytes
    files = [SINGLE] if len(groups) == 1 else [f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
    return [Shard(file=file, units=tuple(group)) for file, group in zip(files, groups, strict=True)]


def write_shards(directory: Path, shards: Sequence[Shard], *, jobs: int, label: str) -> None:
    """Write the shards that are not there yet. Errors: whatever making a tensor raises; OSError for a full disk."""
    missing = [s for s in shards if not s.is_complete(directory)]
    done = sum(s.num_bytes for s in shards) - sum(s.num_bytes for s in missing)
    if done:
        print(f"{label}: {len(shards) - len(missing)} of {len(shards)} shards are there already, from a run that was stopped", flush=True)
    with Progress(f"{label}: writing", total_bytes=sum(s.num_bytes for s in missing)) as progress:
        in_parallel([lambda s=s: _write_shard(directory, s, progress=progress) for s in missing], jobs=jobs)   # type: ignore[misc]


def write_index(directory: Path, shards: Sequence[Shard]) -> None:
    """The index of a checkpoint of several files."""
    if len(shards) > 1:
        weight_map = {t.name: s.file for s in shards for u in s.units for t in u.tensors}
        index = {"metadata": {"total_size": sum(s.num_bytes for s in shards)}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def check_shards(written: PackedCheckpoint, shards: Sequence[Shard], *, jobs: int, label: str) -> int:
    """Re-read everything; the number of packed weights compared, all equal.

    Errors: ValueError for a missing, unexpected or misdescribed tensor, an index with a wrong total, and whatever a unit finds.
    """
    wanted = {t.name: t for s in shards for u in s.units for t in u.tensors}
    for name in sorted(set(wanted) ^ set(written.reader.names)):
        kind = "missing in" if name in wanted else "unexpected in"
        raise ValueError(f"{label}: {name} is {kind} the re-read files. This is a bug of the export: please report it.")
    for name, spec in wanted.items():
        if written.reader.info(name) != (spec.dtype, spec.shape):
            raise ValueError(f"{label}: {name} reads back as {written.reader.info(name)}; written was {(spec.dtype, spec.shape)}. Please report this.")
    with Progress(f"{label}: re-reading", total_bytes=sum(s.num_bytes for s in shards)) as progress:
        def check(units: Sequence[Unit]) -> int:
            compared = 0
            for unit in units:
                compared += unit.check(written)
                progress.add(unit.num_bytes)
            return compared

        units = [u for s in shards for u in s.units]
        parts = [units[i: i + 64] for i in range(0, len(units), 64)]
        return sum(in_parallel([lambda p=p: check(p) for p in parts], jobs=jobs))   # type: ignore[misc]


def dtype_counts(shards: Sequence[Shard]) -> dict[str, int]:
    """Number of tensors by safetensors dtype."""
    return dict(sorted(Counter(t.dtype for s in shards for u in s.units for t in u.tensors).items()))


def in_parallel(tasks: Sequence[Callable[[], T]], *, jobs: int) -> list[T]:
    """Results in order. With the first error no task is begun any more, and it is raised."""
    if jobs == 1 or len(tasks) < 2:
        return [task() for task in tasks]
    threads = max(1, torch.get_num_threads() // jobs)
    with ThreadPoolExecutor(jobs, initializer=lambda: torch.set_num_threads(threads)) as pool:
        futures: list[Future[T]] = [pool.submit(task) for task in tasks]
        try:
            return [f.result() for f in futures]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _write_shard(directory: Path, shard: Shard, *, progress: Progress) -> None:
    path, partial = directory / shard.file, directory / f".{shard.file}.{os.getpid()}"
    header, offsets = shard.layout()
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            _write_at(descriptor, memoryview(header), offset=0)
            for unit in shard.units:
                for spec, tensor in zip(unit.tensors, unit.make(), strict=True):
                    made = (DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))
                    assert made == (spec.dtype, spec.shape), f"{spec} is made as {made}"
                    _write_at(descriptor, bytes_of(tensor), offset=offsets[spec.name])
                progress.add(unit.num_bytes)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        share(partial)
        partial.rename(path)
    except OSError as error:
        raise OSError(f"writing {path} failed ({error}). Free some space or write elsewhere.") from error
    finally:
        partial.unlink(missing_ok=True)


def _write_at(descriptor: int, data: memoryview, *, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done: done + 2**30], offset + done)
