"""The trained tensors of a run, read in slices of dim 0 so that no fused expert weight need be in memory whole.

A checkpoint of one file is mapped. Of a sharded one (torch.distributed.checkpoint) each rank's file holds its rows of every tensor, as a
torch.save archive inside the file; archives are stored uncompressed, so rows of one are bytes at a known place, and only they are read.
Rank r of W holds rows r * ceil(N / W) and on of a tensor of N rows: an export by W processes reads each its own file alone.
"""

import io
import math
import zipfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from .reader import read_tensor

STATE_PREFIX = "state_dict."


class Masters:
    """Trained tensors by in-memory name."""

    def __init__(self, sources: "dict[str, _Whole | _Pieces]") -> None:
        self._sources = dict(sources)

    @classmethod
    def of_tensors(cls, tensors: dict[str, Tensor]) -> "Masters":
        return cls({name: _Whole(tensor) for name, tensor in tensors.items()})

    @classmethod
    def of_shards(cls, path: Path, *, prefix: str) -> "Masters":
        """Those of a sharded checkpoint whose names begin with `prefix`. Errors: ValueError for one without weights or in another storage format."""
        reader = FileSystemReader(path)
        metadata = reader.read_metadata()
        start = STATE_PREFIX + prefix
        storage: dict[str, dict[tuple[int, ...], Any]] = {}
        for index, info in (metadata.storage_data or {}).items():
            storage.setdefault(index.fqn, {})[tuple(index.offset or ())] = info
        found: dict[str, _Whole | _Pieces] = {}
        for name, described in metadata.state_dict_metadata.items():
            if name.startswith(start) and isinstance(described, TensorStorageMetadata):
                found[name.removeprefix(start)] = _Pieces(path, name=name, described=described, archives=storage.get(name, {}))
        if not found:
            raise ValueError("no weights in its metadata")
        return cls(found)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __contains__(self, name: str) -> bool:
        return name in self._sources

    def shape(self, name: str) -> tuple[int, ...]:
        return self._sources[name].shape

    def rename(self, old: str, new: str) -> None:
        self._sources.setdefault(new, self._sources.pop(old))

    def alias(self, name: str, of: str) -> None:
        """A second name of one tensor."""
        self._sources[name] = self._sources[of]

    def rows(self, name: str, *, start: int, stop: int) -> Tensor:
        return self._sources[name].rows(start, stop)

    def get(self, name: str) -> Tensor:
        shape = self.shape(name)
        return self._sources[name].rows(0, shape[0]) if shape else self._sources[name].rows(0, 1).view(())

    def owner(self, name: str, *, row: int, ranks: int) -> int:
        """The rank whose file holds a row, of as many ranks as the export has."""
        return row // -(-self.shape(name)[0] // ranks)


class _Whole:
    """A tensor in memory, or mapped."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape = tuple(tensor.shape)
        self._tensor = tensor

    def rows(self, start: int, stop: int) -> Tensor:
        return self._tensor[start:stop] if self.shape else self._tensor


class _Pieces:
    """A tensor in pieces of consecutive rows."""

    def __init__(self, path: Path, *, name: str, described: TensorStorageMetadata, archives: dict[tuple[int, ...], Any]) -> None:
        self.shape, self.dtype = tuple(described.size), described.properties.dtype
        self._path, self._name = path, name
        self._chunks = []   # first row, rows, place of the archive
        for chunk in described.chunks:
            offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
            if any(offsets[1:]) or sizes[1:] != self.shape[1:]:
                raise ValueError(f"{name} is cut along another dim than its first")
            if math.prod(sizes):
                if getattr(archives[offsets], "transform_descriptors", None):
                    raise ValueError(f"{name} is stored compressed")
                self._chunks.append((offsets[0] if offsets else 0, sizes[0] if sizes else 1, archives[offsets]))
        self._chunks.sort(key=lambda c: c[0])

    def rows(self, start: int, stop: int) -> Tensor:
        row_shape = self.shape[1:]
        stride = math.prod(row_shape) * self.dtype.itemsize
        pieces = []
        for first, rows, info in self._chunks:
            low, high = max(start, first), min(stop, first + rows)
            if low < high:
                data = _data_offset(self._path / info.relative_path, archive=info.offset, length=info.length, num_bytes=rows * stride)
                pieces.append(read_tensor(self._path / info.relative_path, offset=data + (low - first) * stride, dtype=self.dtype,
                                          shape=(high - low, *row_shape)))
        result = pieces[0] if len(pieces) == 1 else torch.cat([torch.empty(0, *row_shape, dtype=self.dtype), *pieces])
        if len(result) != (min(stop, self.shape[0]) - start if self.shape else 1):
            raise ValueError(f"{self._path}: {self._name}: rows {start} to {stop} are not all in its files")
        return result


@lru_cache(maxsize=65536)
def _data_offset(path: Path, *, archive: int, length: int, num_bytes: int) -> int:
    """Where the raw values begin of a tensor that was saved with torch.save at byte `archive` of a file."""
    with path.open("rb") as f:
        try:
            with zipfile.ZipFile(_Window(f, start=archive, length=length)) as z:
                (record,) = [i for i in z.infolist() if "/data/" in i.filename]
        except (zipfile.BadZipFile, ValueError, EOFError) as error:
            raise ValueError(f"{path}: cannot be read as a checkpoint ({error}): no tensor at byte {archive}. Remove the checkpoint and continue the run "
                             "with --resume.") from error
        if record.compress_type != zipfile.ZIP_STORED or record.file_size != num_bytes:
            raise ValueError(f"{path}: a tensor's archive at byte {archive} holds {record.file_size} bytes; {num_bytes} were expected")
        f.seek(archive + record.header_offset + 26)
        name_and_extra = f.read(4)
        skipped = int.from_bytes(name_and_extra[:2], "little") + int.from_bytes(name_and_extra[2:], "little")
        return archive + record.header_offset + 30 + skipped


class _Window(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, file: Any, *, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        self._file.seek(self._start + self._at)
        data = self._file.read(min(len(view), self._length - self._at))
        view[:len(data)] = data
        self._at += len(data)
        return len(data)
