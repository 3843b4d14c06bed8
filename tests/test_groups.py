"""How the tests are dealt out to processes."""

import subprocess
import sys
from pathlib import Path

GROUPED = """\
import os
import pytest

@pytest.mark.xdist_group("one")
@pytest.mark.parametrize("number", range(4))
def test_where(number):
    with open({file!r}, "a") as f:
        f.write(os.environ["PYTEST_XDIST_WORKER"] + "\\n")
"""


def test_tests_of_a_group_run_in_one_process(tmp_path: Path) -> None:
    """Else ranks of two tests meet on a port, and what is costly to make is made in every process. Releases of pytest and pytest-xdist may not fit."""
    ran = tmp_path / "ran"
    for name in ("a", "b"):
        (tmp_path / f"test_{name}.py").write_text(GROUPED.format(file=str(ran)))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", "--dist", "loadgroup", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    workers = ran.read_text().split()
    assert len(workers) == 8 and len(set(workers)) == 1, "mind the versions of pytest and pytest-xdist in constraints.txt"
