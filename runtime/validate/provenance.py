"""What was measured, on what, with which versions: everything a figure needs to be checked again."""

import datetime
import importlib.metadata
import json
import math
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from ...dflash.checkpoint import DRAFT_DIRECTORY, read_metadata
from ...quant.archs import find_arch
from ...quant.checkpoint import CheckpointReader, PackedCheckpoint, sha256_of_weights
from ...quant.checkpoint.metadata import METADATA, read_export_metadata
from .stats import not_measured

PACKAGES = ("kilotok", "torch", "transformers", "openai")


def find_parent(out: Path, *, given: Path | None) -> Path | str:
    """The bf16 parent's directory, or why there is none to measure.

    Errors: ValueError, naming both hashes, for a parent that is not the one this directory was made from; FileNotFoundError
        for a given one that is not there.
    """
    recorded = (read_export_metadata(out) or {}).get("parent") or {}
    if given is None:
        if not recorded.get("path"):
            return f"{out.name} has no {METADATA} that names its parent; --parent DIR was not given"
        if not Path(recorded["path"]).is_dir():
            return f"the parent is no longer at {recorded['path']}; --parent DIR was not given"
    parent = given or Path(recorded["path"])
    found = sha256_of_weights(parent)
    if recorded.get("sha256") not in (None, found):
        raise ValueError(f"{parent}: is not the parent of {out}: its weights hash to {found[:12]}, {out.name} was made from {recorded['sha256'][:12]}. "
                         "Give the right one with --parent.")
    return parent


def sizes(out: Path, *, no_draft: str | None) -> dict[str, Any]:
    """Bytes on disk: weight files, packed experts inside them, draft head."""
    files = CheckpointReader(out).files
    config = json.loads((out / "config.json").read_text())
    experts = PackedCheckpoint(out, arch=find_arch(config.get("model_type"), where=str(out))).num_bytes("mxfp4")
    draft = sum(path.stat().st_size for path in (out / DRAFT_DIRECTORY).glob("*.safetensors"))
    return {"weight_files_bytes": sum(path.stat().st_size for path in files),
            "packed_experts_bytes": experts or not_measured("no packed expert in the files"),
            "draft_files_bytes": draft if no_draft is None else not_measured(no_draft)}


def describe(out: Path, *, device: str, threads: int | None, health: Any) -> dict[str, Any]:
    """Model, machine, versions, command and date."""
    return {
        "model": out.resolve().name, "weights_sha256": sha256_of_weights(out), "export": _json_safe(read_export_metadata(out)),
        "draft": _json_safe(read_metadata(out / DRAFT_DIRECTORY)), "server": _json_safe(health),
        "device": _cuda_name() if device == "cuda" else cpu_name(), "system": platform.platform(),
        "threads": threads if threads is not None else f"chosen by torch ({torch.get_num_threads()} in this process)",
        "versions": {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in PACKAGES}},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "command": shlex.join(sys.argv)}


def _json_safe(value: Any) -> Any:
    """NaN and infinity as text: JSON has no numbers for them, though Python reads and writes some."""
    if isinstance(value, dict):
        return {k: _json_safe(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_json_safe(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def cpu_name() -> str:
    """The CPU as Linux names it, else what Python knows."""
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")] if info.is_file() else []
    return f"{names[0]}, {len(names)} logical processors" if names else platform.processor() or platform.machine()


def _cuda_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cuda asked for, none visible here"
