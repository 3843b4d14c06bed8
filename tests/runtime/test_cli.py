"""The `kilotok` command itself."""

import subprocess
import sys
from pathlib import Path

import pytest

from kilotok.runtime.cli import main as kilotok


def test_train_is_reached_through_kilotok(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "kilotok.runtime.cli", "train", "qat", str(tmp_path / "none.yaml")], capture_output=True, text=True)
    assert done.returncode == 2
    assert f"recipe: no file at {tmp_path / 'none.yaml'}" in done.stderr


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for option, expected in (("--version", "kilotok 0.1.0"), ("--help", "{export,inspect,train}")):
        with pytest.raises(SystemExit) as left:
            kilotok([option])
        assert left.value.code == 0
        assert expected in capsys.readouterr().out


def test_an_unexpected_argument_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        kilotok(["export", "run"])
    assert left.value.code == 2 and "out" in capsys.readouterr().err
