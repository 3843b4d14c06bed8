"""Waits between the threads of step_on_cpu.py. One that nobody can end is an error that says who waits for what, however slow the machine is."""

import threading
from collections.abc import Callable

from gluon_on_cpu import _state as _here


class Stuck(RuntimeError):
    """A wait without an end."""


class Waits:
    """Who waits for what. When all threads wait and none for what is already true, nobody will ever end a wait."""

    def __init__(self) -> None:
        self.lock, self.failed, self.live = threading.Lock(), threading.Event(), 0
        self.waiting: dict[int, tuple[Callable[[], bool], str]] = {}
        self.bounded = set[int]()     # who polls, and would give up

    def begin(self, threads: int) -> None:
        self.failed.clear()
        self.live, self.waiting, self.bounded = threads, {}, set()

    def add(self, threads: int) -> None:
        with self.lock:
            self.live += threads
            self._check()

    def wait(self, condition: threading.Condition, what: Callable[[], bool], text: str) -> None:
        """Until `what` is true; `condition` is held."""
        self._wait(condition, what, text)

    def poll(self, condition: threading.Condition, what: Callable[[], bool], text: str) -> bool:
        """The same, but where nobody can go on this gives up. Returns whether it did."""
        me = threading.get_ident()
        self.bounded.add(me)
        self._wait(condition, lambda: me not in self.bounded or what(), text)
        gave_up = me not in self.bounded
        self.bounded.discard(me)
        return gave_up

    def _wait(self, condition: threading.Condition, what: Callable[[], bool], text: str) -> None:
        if what():
            return
        me = threading.get_ident()
        with self.lock:
            self.waiting[me] = what, f"program {_here.program}, {threading.current_thread().name}: {text}"
            self._check()
        while not condition.wait_for(what, timeout=0.5):
            if self.failed.is_set():
                raise Stuck(self.waiting[me][1])
        with self.lock:
            del self.waiting[me]

    def _check(self) -> None:
        if self.waiting and len(self.waiting) == self.live and not any(what() for what, _ in self.waiting.values()):
            if self.bounded:
                self.bounded.clear()
            else:
                self.failed.set()


waits = Waits()
