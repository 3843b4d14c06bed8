"""Device code run by Triton's interpreter, which has to be chosen before Triton is imported."""

import os
import subprocess
import sys
from pathlib import Path


def run_in_interpreter(module: str) -> list[str]:
    """`run_interpreted` of a test module in a process of its own with TRITON_INTERPRET=1; returns the lines that it printed."""
    tests = Path(__file__).parent
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1",
           "PYTHONPATH": os.pathsep.join([str(tests), str(tests / "kernels"), os.environ.get("PYTHONPATH", "")])}
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", f"from {module} import run_interpreted; run_interpreted()"], env=env, capture_output=True,
                         text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout.splitlines()
