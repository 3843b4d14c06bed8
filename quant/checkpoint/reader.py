"""The tensors of a Hugging Face directory, read one at a time from its safetensors files.

Files are read, not mapped: the pages of a mapped file count as memory of the process until it is closed, and a checkpoint may be a
terabyte. A tensor costs its own size, while it is used.
"""

import hashlib
import json
import math
import os
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .metadata import read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16, "F16": torch.float16, "BF16": torch.bfloat16,
    "I32": torch.int32, "U32": torch.uint32, "F32": torch.float32, "I64": torch.int64, "U64": torch.uint64, "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies."""

    path: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]


class CheckpointReader:
    """Names, shapes and tensors of a checkpoint of one or many shards.

    Errors: FileNotFoundError when a file is missing, ValueError when one is truncated or damaged, each naming the file.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        if (directory / INDEX).is_file() and (directory / SINGLE).is_file():
            raise ValueError(f"{directory}: holds both {SINGLE} and {INDEX}, and readers differ about which counts. Remove the stale one.")
        if (directory / INDEX).is_file():
            found = read_json(directory / INDEX).get("weight_map")
            if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
                raise ValueError(f"{directory / INDEX}: has no weight_map from tensors to files. Fetch it again.")
            weight_map: dict[str, str] = found
            files = sorted(set(weight_map.values()))
        elif (directory / SINGLE).is_file():
            files = [SINGLE]
        else:
            raise FileNotFoundError(f"{directory}: no {SINGLE} and no {INDEX}. Give a Hugging Face directory with safetensors weights.")
        self.files = [directory / f for f in files]
        self._places: dict[str, _Place] = {}
        for path in self.files:
            if not path.is_file():
                raise FileNotFoundError(f"{path}: named by {INDEX} but not there. The copy is incomplete: fetch this shard.")
            try:
                self._places.update(read_header(path))
            except (ValueError, KeyError, TypeError, struct.error) as error:
                raise ValueError(f"{path}: cannot be read as safetensors ({error}). It is truncated or damaged: copy or download it again.") from error
        if (directory / INDEX).is_file():
            for name in sorted(set(weight_map) ^ set(self._places)):
                raise ValueError(f"{directory / INDEX}: disagrees with the shards about {name}. Fetch the checkpoint again.")
            for name, file in weight_map.items():
                if self._places[name].path.name != file:
                    raise ValueError(f"{directory / INDEX}: says that {name} is in {file}; it is in {self._places[name].path.name}. "
                                     "Fetch the checkpoint again.")

    @property
    def names(self) -> list[str]:
        return list(self._places)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def get(self, name: str) -> Tensor:
        shape = self.info(name)[1]
        return self._read(name, first=0, shape=shape)

    def rows(self, name: str, *, start: int, stop: int) -> Tensor:
        """Part of a tensor along dim 0; only that part is read."""
        shape = self.info(name)[1]
        if not shape:
            return self.get(name)
        start, stop = (min(max(i, 0), shape[0]) for i in (start, stop))
        return self._read(name, first=start * math.prod(shape[1:]), shape=(max(stop - start, 0), *shape[1:]))

    def info(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(safetensors dtype, shape) without reading the values."""
        if name not in self._places:
            raise ValueError(f"{self.directory}: no tensor named {name}. The checkpoint is incomplete or of another family.")
        place = self._places[name]
        return place.dtype, place.shape

    def file_of(self, name: str) -> Path:
        return self._places[name].path

    def _read(self, name: str, *, first: int, shape: tuple[int, ...]) -> Tensor:
        place = self._places[name]
        dtype = DTYPES[place.dtype]
        return read_tensor(place.path, offset=place.offset + first * dtype.itemsize, dtype=dtype, shape=shape)

    @property
    def num_bytes(self) -> int:
        return sum(f.stat().st_size for f in self.files)


def read_tensor(path: Path, *, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor out of raw bytes. Errors: ValueError when the file ends before it does."""
    data = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8)
    view, done = bytes_of(data), 0
    if len(view):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            while done < len(view):   # one call reads 2 GiB at most
                read = os.preadv(descriptor, [view[done:]], offset + done)
                if not read:
                    raise ValueError(f"{path}: ends at byte {offset + done}, inside a tensor. It was truncated: copy it again.")
                done += read
        finally:
            os.close(descriptor)
    return data.view(dtype).view(shape)


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's memory, of a contiguous copy where it is not contiguous."""
    array: Any = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def read_header(path: Path) -> dict[str, _Place]:
    """The places of a file's tensors, from its header: eight bytes of length, then JSON. Errors: ValueError when they do not cover the file."""
    size = path.stat().st_size
    with path.open("rb") as f:
        (length,) = struct.unpack("<Q", f.read(8))
        if length > size - 8:
            raise ValueError(f"its header says it is {length} bytes long, the file has {size}")
        described: dict[str, Any] = json.loads(f.read(length))
    places, end = {}, 0
    for name, entry in described.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{name} has dtype {entry['dtype']}; dtypes read here are {', '.join(DTYPES)}")
        (start, stop), shape = entry["data_offsets"], tuple(entry["shape"])
        if stop - start != math.prod(shape) * DTYPES[entry["dtype"]].itemsize:
            raise ValueError(f"{name} has {stop - start} bytes for {entry['dtype']} {shape}")
        end = max(end, stop)
        places[name] = _Place(path, 8 + length + start, entry["dtype"], shape)
    if sum(math.prod(p.shape) * DTYPES[p.dtype].itemsize for p in places.values()) != end or 8 + length + end != size:
        raise ValueError(f"its tensors end at byte {8 + length + end}, the file at {size}")
    return places


def sha256_of_weights(directory: Path, *, jobs: int = 1) -> str:
    """One hash over the weight files of a directory, in name order."""
    return sha256_of_files(CheckpointReader(directory).files, jobs=jobs)


def sha256_of_files(files: Sequence[Path], *, jobs: int = 1) -> str:
    """One hash over the contents of files, in the order given."""
    def one(path: Path) -> bytes:
        with path.open("rb") as f:
            return hashlib.file_digest(f, "sha256").digest()

    with ThreadPoolExecutor(jobs) as pool:
        return hashlib.sha256(b"".join(pool.map(one, files))).hexdigest()
