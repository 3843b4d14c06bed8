"""The tensors of a Hugging Face directory, read one at a time from its safetensors files."""

import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class CheckpointReader:
    """Names, shapes and tensors of a checkpoint of one or many shards.

    Errors: FileNotFoundError when a file is missing, ValueError when one is truncated or damaged, each naming the file.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        if (directory / INDEX).is_file() and (directory / SINGLE).is_file():
            raise ValueError(f"{directory}: holds both {SINGLE} and {INDEX}, and readers differ about which counts. Remove the stale one.")
        if (directory / INDEX).is_file():
            weight_map: dict[str, str] = json.loads((directory / INDEX).read_text())["weight_map"]
            files = sorted(set(weight_map.values()))
        elif (directory / SINGLE).is_file():
            files = [SINGLE]
        else:
            raise FileNotFoundError(f"{directory}: no {SINGLE} and no {INDEX}. Give a Hugging Face directory with safetensors weights.")
        self.files = [directory / f for f in files]
        self._file_of: dict[str, Path] = {}
        self._info: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._open: dict[Path, Any] = {}   # opening a file parses its header, 28 ms with 18,432 tensors: once, not for each of them
        for path in self.files:
            if not path.is_file():
                raise FileNotFoundError(f"{path}: named by {INDEX} but not there. The copy is incomplete: fetch this shard.")
            try:
                file = self._open[path] = safe_open(path, framework="pt")
                for name in file.keys():   # noqa: SIM118 - not a dict
                    part = file.get_slice(name)
                    self._file_of[name], self._info[name] = path, (part.get_dtype(), tuple(part.get_shape()))
            except SafetensorError as error:
                raise ValueError(f"{path}: cannot be read as safetensors ({error}). It is truncated or damaged: copy or download it again.") from error
        if (directory / INDEX).is_file() and set(weight_map) != set(self._file_of):
            missing = sorted(set(weight_map) ^ set(self._file_of))[0]
            raise ValueError(f"{directory / INDEX}: disagrees with the shards about {missing}. Fetch the checkpoint again.")

    @property
    def names(self) -> list[str]:
        return list(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def get(self, name: str) -> Tensor:
        if name not in self._file_of:
            raise ValueError(f"{self.directory}: no tensor named {name}. The checkpoint is incomplete or of another family.")
        tensor: Tensor = self._open[self._file_of[name]].get_tensor(name)
        return tensor

    def rows(self, name: str, *, start: int, stop: int) -> Tensor:
        """Part of a tensor along dim 0; only that part is read."""
        if not self.info(name)[1]:
            return self.get(name)
        tensor: Tensor = self._open[self._file_of[name]].get_slice(name)[start:stop]
        return tensor

    def info(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(safetensors dtype, shape) without reading the values."""
        return self._info[name]

    @property
    def num_bytes(self) -> int:
        return sum(f.stat().st_size for f in self.files)


def sha256_of_weights(directory: Path) -> str:
    """One hash over the weight files of a directory, in name order."""
    digest = hashlib.sha256()
    for path in CheckpointReader(directory).files:
        with path.open("rb") as f:
            digest.update(hashlib.file_digest(f, "sha256").digest())
    return digest.hexdigest()
