"""Commands in processes of their own without the seconds that a new interpreter takes to import torch, transformers and Lightning: forked from one
that has imported them and done nothing else, so that no thread or lock of a test is copied.

For what needs a process, such as a signal or a limit, and is not about how the command is started. What a new interpreter does is shown by the
tests that start one: the command line of several devices, `kilotok train`, the demo.
"""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Main = Callable[[list[str]], int]
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["kilotok.train.cli", "kilotok.train.qat_run", "kilotok.train.distill", "kilotok.runtime.cli", "kilotok.runtime.serve"])


@dataclass(frozen=True)
class Forked:
    """A running command; what it prints goes to two files."""

    process: multiprocessing.process.BaseProcess
    stdout: Path
    stderr: Path

    @property
    def pid(self) -> int:
        assert self.process.pid is not None, "started processes have an id"
        return self.process.pid

    def is_running(self) -> bool:
        return self.process.is_alive()

    def first_lines(self, count: int, *, timeout_s: float = 60) -> list[str]:
        """The first lines of stdout, once there are so many. Fails when they do not come, and ends the process."""
        deadline = time.monotonic() + timeout_s
        while self.stdout.read_text().count("\n") < count and self.is_running() and time.monotonic() < deadline:
            time.sleep(0.01)
        lines = self.stdout.read_text().splitlines()[:count]
        if len(lines) < count:
            self.process.kill()
            self.process.join()
        assert len(lines) == count, f"{lines}: {self.stderr.read_text()[-2000:]}"
        return lines

    def wait(self, timeout_s: float = 180) -> int:
        """Exit status; a negative signal number when it was killed. Fails when it does not end in time, and ends it."""
        self.process.join(timeout_s)
        status = self.process.exitcode
        if status is None:
            self.process.kill()
            self.process.join()
        assert status is not None, f"still running after {timeout_s:.0f} s: {self.stderr.read_text()[-2000:]}"
        return status


def do_nothing() -> None:
    """What most processes do first."""


def start(main: Main, args: list[str], *, folder: Path, before: Callable[[], None] = do_nothing) -> Forked:
    """`main(args)` in a forked process. before: what the process does first, a function of a module. folder: of the two files."""
    folder.mkdir(exist_ok=True)
    for name in ("stdout", "stderr"):
        (folder / name).write_text("")
    started = Forked(SERVER.Process(target=_run, args=(main, args, folder, before)), folder / "stdout", folder / "stderr")
    started.process.start()
    return started


def _run(main: Main, args: list[str], folder: Path, before: Callable[[], None]) -> None:
    """What a new interpreter would have: its own streams down to the descriptors, and the usual handlers of signals."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(folder / name, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        setattr(sys, name, os.fdopen(number, "w", buffering=1, closefd=False))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    before()
    status = main(args)
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(status)
