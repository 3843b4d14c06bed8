"""Work on files that several processes share: each makes every n-th file, and all read all of them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.5
STALLED_S = 3600.0   # without a new file; longer than any batch or shard takes


@dataclass(frozen=True, kw_only=True)
class Share:
    """One of `count` equal shares, from 0: files index, index + count, ..."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str, *, where: str) -> "Share":
        """From "2/8", the second of eight. Errors: ValueError for anything else."""
        parts = text.split("/")
        if len(parts) != 2 or not all(p.isascii() and p.isdigit() for p in parts) or not 1 <= int(parts[0]) <= int(parts[1]):
            raise ValueError(f"{where}: must be K/N with 1 <= K <= N, such as 2/8 for the second of eight shares; got {text!r}.")
        return cls(index=int(parts[0]) - 1, count=int(parts[1]))

    def holds(self, number: int) -> bool:
        return number % self.count == self.index


def wait_for(paths: Sequence[Path], *, what: str, say: Callable[[str], None], stalled_s: float | None = None) -> None:
    """Returns when all paths exist. Errors: TimeoutError when none has come for `stalled_s` (null: an hour)."""
    limit = STALLED_S if stalled_s is None else stalled_s
    missing = [p for p in paths if not p.is_file()]
    if missing:
        say(f"{what}: waiting for {len(missing)} of {len(paths)}")
    last = time.monotonic()
    while missing:
        time.sleep(min(POLL_S, limit))
        left = [p for p in missing if not p.is_file()]
        if len(left) < len(missing):
            missing, last = left, time.monotonic()
        elif time.monotonic() - last > limit:
            raise TimeoutError(f"{what}: {missing[0]} and {len(missing) - 1} more have not come for {limit:.0f} s. "
                               "Look at the other processes' output, and start again with --resume.")
