"""How far a long command is: a line on a terminal that renews itself, elsewhere a line now and then."""

import sys
import threading
import time
from types import TracebackType


class Progress:
    """Bytes done of a total, from any thread."""

    def __init__(self, label: str, *, total_bytes: int) -> None:
        self.label, self.total, self.done = label, total_bytes, 0
        self._lock, self._began, self._is_terminal = threading.Lock(), time.monotonic(), sys.stderr.isatty()
        self._every_s = 0.2 if self._is_terminal else 15.0
        self._said = self._began
        self._width = 0

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._width and self._is_terminal:
            print(file=sys.stderr, flush=True)

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self.done += num_bytes
            now = time.monotonic()
            if now - self._said < self._every_s and not (self._width and self.done == self.total):
                return
            self._said = now
            text = self.text(now - self._began)
            padded, self._width = text.ljust(self._width), len(text)
            print(f"\r{padded}" if self._is_terminal else text, end="" if self._is_terminal else "\n", file=sys.stderr, flush=True)

    def text(self, seconds: float) -> str:
        """`export: writing: 3.10 of 12.00 GB (26 %), 0.52 GB/s, 17 s left`"""
        rate = self.done / max(seconds, 1e-9)
        left = (self.total - self.done) / rate if rate else 0.0
        share = self.done / self.total if self.total else 1.0
        return f"{self.label}: {self.done / 1e9:.2f} of {self.total / 1e9:.2f} GB ({share:.0%}), {rate / 1e9:.2f} GB/s, {left:.0f} s left"
