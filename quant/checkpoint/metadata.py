"""kilotok.json: what no engine's config carries. How the numbers of a directory were made, and from what."""

import json
from pathlib import Path
from typing import Any

from ...kernels.mx import ScaleMode

METADATA = "kilotok.json"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; FileNotFoundError, or ValueError for a damaged file."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: not there. Give a directory written by `kilotok export`.")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not readable as JSON ({error}). Restore it.") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: must be a JSON object; got {type(raw).__name__}. Restore it.")
    return raw


def read_export_metadata(out: Path) -> dict[str, Any] | None:
    """kilotok.json of an exported directory; None for a directory of another tool. Errors: ValueError when it is damaged."""
    path = out / METADATA
    return read_json(path) if path.is_file() else None


def values_of(directory: Path, *, sha256: str) -> list[str]:
    """Hashes of the weights that a converted directory has the values of, the newest first; none if its own are no longer `sha256`."""
    converted = (read_export_metadata(directory) or {}).get("converted_from")
    if not isinstance(converted, dict) or converted.get("into") != sha256:
        return []
    return [converted["sha256"], *converted.get("values_of", [])]


def read_scale_mode(directory: Path) -> ScaleMode | None:
    """The scale rule our metadata file records; None for a directory of another tool. Errors: as `read_export_metadata`."""
    metadata = read_export_metadata(directory)
    if metadata is None:
        return None
    if "scale_mode" not in metadata:
        raise ValueError(f"{directory / METADATA}: has no scale_mode. Restore it, or export the run again.")
    mode: ScaleMode = metadata["scale_mode"]
    return mode
