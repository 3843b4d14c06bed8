"""Device code run by Triton's interpreter, which has to be chosen before Triton is imported: in a process of its own, one for all modules."""

import contextlib
import functools
import importlib
import io
import json
import os
import subprocess
import sys
import threading
import traceback
from pathlib import Path


def run_in_interpreter(module: str) -> list[str]:
    """`run_interpreted` of a test module where TRITON_INTERPRET=1; returns the lines that it printed. Fails with its traceback."""
    process = _interpreter()
    assert process.stdin is not None and process.stdout is not None, "both were asked for"
    watchdog = threading.Timer(600, process.kill)   # a kernel that hangs in it must not hang the test
    watchdog.start()
    process.stdin.write(f"{module}\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    watchdog.cancel()
    assert answer, f"the interpreter ended with status {process.wait()}"
    printed, error = json.loads(answer)
    assert not error, error
    lines: list[str] = printed.splitlines()
    return lines


@functools.cache
def _interpreter() -> subprocess.Popen[str]:
    """It ends with the pipe to it. Tests that use it are of one group, so that torch is imported for them once."""
    tests = Path(__file__).parent
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1",
           "PYTHONPATH": os.pathsep.join([str(tests), str(tests / "kernels"), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-W", "ignore", "-c", "from interpreted import answer; answer()"]
    return subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def answer() -> None:
    """What the process does: for every module named on stdin a line of JSON with what it printed and its traceback, if it failed."""
    for line in sys.stdin:
        error = ""
        with contextlib.redirect_stdout(io.StringIO()) as out:
            try:
                importlib.import_module(line.strip()).run_interpreted()
            except Exception:
                error = traceback.format_exc()[-2000:]
        print(json.dumps([out.getvalue(), error]), flush=True)
