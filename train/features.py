"""The target's states of all packed rows on disk, so that training does not run the target at every step.

A store is worth its bytes when the rows are read many times: (taps + 1) * D numbers a token, in the target's dtype (an 8B target with five
taps: 49 KB a token, 49 GB a million). It is made once, in shards that appear whole; a killed run goes on behind the last. features.json
says of which weights, taps, dtype and rows it is, and a store of anything else is refused.

Reading is by row, through the memory map: a loader that yields row i yields its states with it. They are what the target gives at training
time to the bit where both run it on the same rows at once (trainer.batch_size of them, in the rows' order), else up to rounding.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

from ..quant.checkpoint import require_free_space, write_atomically
from ..quant.checkpoint.disk import share
from .shares import Share, wait_for

RECORD = "features.json"
SHARD_BYTES = 2**29


@dataclass(frozen=True, kw_only=True)
class StoreRecord:
    """What a store holds."""

    target_sha256: str
    layer_ids: tuple[int, ...]
    dtype: str                # of the states
    precision: str            # trainer.precision, in which the target ran
    rows_sha256: str
    num_rows: int
    sequence_length: int
    hidden_size: int
    rows_a_shard: int         # a multiple of the rows that the target reads at once, the last shard's aside

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.row_bytes

    @property
    def row_bytes(self) -> int:
        dtype: torch.dtype = getattr(torch, self.dtype.removeprefix("torch."))
        return self.sequence_length * (len(self.layer_ids) + 1) * self.hidden_size * dtype.itemsize

    @property
    def num_shards(self) -> int:
        return -(-self.num_rows // self.rows_a_shard)


def describe_store(
    rows: Sequence[Tensor], *, target_sha256: str, layer_ids: Sequence[int], dtype: torch.dtype, precision: str, hidden_size: int, batch_size: int,
) -> StoreRecord:
    """The record of a store of these rows (int64 [4, S] each); batch_size: rows that the target reads at once."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(row.numpy().tobytes())
    length = rows[0].shape[1]
    row_bytes = length * (len(layer_ids) + 1) * hidden_size * dtype.itemsize
    return StoreRecord(target_sha256=target_sha256, layer_ids=tuple(layer_ids), dtype=str(dtype), precision=precision, rows_sha256=digest.hexdigest(),
                       num_rows=len(rows), sequence_length=length, hidden_size=hidden_size,
                       rows_a_shard=batch_size * max(1, SHARD_BYTES // (row_bytes * batch_size)))


def write_features(
    directory: Path, rows: Sequence[Tensor], *, record: StoreRecord, read: Callable[[Tensor], tuple[Tensor, Tensor]], batch_size: int,
    say: Callable[[str], None], part: Share | None = None,
) -> None:
    """Make what is missing of a store, the shards of one share; the others are waited for.

    read: rows [B, 4, S] -> features [B, S, taps * D], final states [B, S, D].
    Errors: ValueError for a directory that holds another store, OSError when the disk has no room for what is missing.
    """
    if part is not None and part.index > 0:   # the record comes first, by the first rank
        wait_for([directory / RECORD], what=f"{directory}: the first rank's record", say=say)
    check_store(directory, known=asdict(record))
    paths = [_shard(directory, n) for n in range(record.num_shards)]
    missing = [n for n, path in enumerate(paths) if not path.is_file()]
    say(f"{directory}: the target's states of {record.num_rows} rows of {record.sequence_length} tokens, {record.num_bytes / 1e9:.3f} GB; "
        f"{len(missing)} of {len(paths)} shards are missing")
    if missing:
        require_free_space(directory, num_bytes=min(record.num_bytes, len(missing) * record.rows_a_shard * record.row_bytes), what="data.features")
    if part is None or part.index == 0:
        directory.mkdir(parents=True, exist_ok=True)
        write_atomically(directory / RECORD, text=json.dumps(asdict(record), indent=2) + "\n")
    for n in missing:
        if part is None or part.holds(n):
            mine = rows[n * record.rows_a_shard:(n + 1) * record.rows_a_shard]
            _write_shard(paths[n], [read(torch.stack(list(mine[i:i + batch_size]))) for i in range(0, len(mine), batch_size)])
            say(f"{directory}: shard {n + 1} of {len(paths)}")
    wait_for(paths, what=f"{directory}: shards of the other ranks", say=say)


def check_store(directory: Path, *, known: dict[str, Any]) -> None:
    """ValueError for a directory that holds something else than what is `known` of a record; it names what differs.

    Nothing for one that is not there, or empty but for what a killed run left half-written.
    """
    path = directory / RECORD
    if not path.is_file():
        if directory.exists() and not all(p.name.startswith(".") and p.name.endswith(".partial") for p in directory.iterdir()):
            raise ValueError(f"data.features: {directory} holds something, and no {RECORD}. Choose another directory.")
        return
    try:
        found = json.loads(path.read_text())
        different = {k: (found.get(k), v) for k, v in json.loads(json.dumps(known)).items() if found.get(k) != v}
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path}: not readable as the record of a store ({type(error).__name__}: {error}). Remove the directory: it is made again.") from error
    if different:
        said = "; ".join(f"{k}: it has {theirs}, this run {mine}" for k, (theirs, mine) in different.items())
        raise ValueError(f"data.features: {directory} is a store of something else: {said}. Choose another directory.")


class StoredRows:
    """Rows `first`, first + 1, ... of a store, each (row [4, S], features [S, taps * D], final states [S, D]).

    Errors: ValueError for a shard that cannot be read.
    """

    def __init__(self, directory: Path, rows: Sequence[Tensor], *, record: StoreRecord, first: int) -> None:
        self.directory, self.rows, self.record, self.first = directory, rows, record, first
        self._open: dict[int, tuple[Any, Any]] = {}   # shard -> slices of its memory map

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        shard, row = divmod(self.first + index, self.record.rows_a_shard)
        features, hidden = self._slices(shard)
        return self.rows[index], features[row], hidden[row]

    def _slices(self, shard: int) -> tuple[Any, Any]:
        if shard not in self._open:
            path = _shard(self.directory, shard)
            try:
                file = safetensors.safe_open(path, framework="pt")
                self._open[shard] = file.get_slice("features"), file.get_slice("hidden")
            except (OSError, safetensors.SafetensorError) as error:
                raise ValueError(f"{path}: not readable as a shard of states ({error}). Remove it and resume: it is made again.") from error
        return self._open[shard]


def _write_shard(path: Path, parts: list[tuple[Tensor, Tensor]]) -> None:
    partial = path.with_name(f".{path.name}.partial")
    try:
        save_file({"features": torch.cat([f for f, _ in parts]).contiguous(), "hidden": torch.cat([h for _, h in parts]).contiguous()}, partial)
        share(partial)
        partial.replace(path)
    except (OSError, safetensors.SafetensorError) as error:   # the second is what safetensors makes of a full disk
        partial.unlink(missing_ok=True)
        raise OSError(f"data.features: writing {path} failed ({error}). Free some space and continue with --resume: the shards before it are kept.") from error
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _shard(directory: Path, number: int) -> Path:
    return directory / f"{number:06d}.safetensors"
