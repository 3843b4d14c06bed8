"""Random models that many tests start from, made once a process."""

import atexit
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

_made: dict[str, tuple[Path, Tensor]] = {}   # of a key, the folder and torch's generator after it was made


def saved_once(directory: Path, key: object, *, save: Callable[[Path], None]) -> Path:
    """`directory`, as `save(directory)` writes it; the second time a copy of the first. key: all that the files depend on.

    The copy is the test's own, and torch's generator is left where `save` leaves it, so that what a test draws does not depend on who came first.
    """
    name = repr(key)
    if name not in _made:
        first = _root() / str(len(_made))
        save(first)
        _made[name] = (first, torch.get_rng_state())
    first, state = _made[name]
    shutil.copytree(first, directory, dirs_exist_ok=True)
    torch.set_rng_state(state)
    return directory


@cache
def _root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="kilotok-tests-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root
