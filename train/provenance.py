"""What a run was made from and with: versions, command, commit, the parent's hash."""

import importlib.metadata
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from ..quant.checkpoint import sha256_of_weights


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide numbers."""
    found = {"python": platform.python_version()}
    for package in ("kilotok", "torch", "transformers", "lightning", "safetensors"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed as a package"
    return found


def source_commit() -> str | None:
    """Commit of the checkout this code runs from, with `+changes` when it was edited; None outside a checkout."""
    here = Path(__file__).resolve().parent
    try:
        commit = subprocess.run(["git", "-C", str(here), "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run(["git", "-C", str(here), "status", "--porcelain"], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+changes" if changed else "")


def parent_record(path: Path) -> dict[str, Any]:
    """Absolute path and weight hash of the model a run starts from."""
    return {"path": str(path.absolute()), "sha256": sha256_of_weights(path)}


def run_record() -> dict[str, Any]:
    """Command, commit, versions and device of this process."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    return {"command": ["train", *sys.argv[1:]], "commit": source_commit(), "versions": versions(), "device": device}
