"""What a server serves."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...dflash.generate import Drafter
from ..engine import Executor


@dataclass(frozen=True, kw_only=True)
class Served:
    """A loaded model and what clients are told of it."""

    name: str                                       # the `model` of requests
    executor: Executor
    make_drafter: Callable[[], Drafter] | None      # None: no draft head
    tokenizer: Any                                  # of transformers
    eos_ids: frozenset[int]
    max_length: int                                 # tokens of prompt and answer together
    fingerprint: str                                # system_fingerprint of the answers
    description: dict[str, Any]                     # shown by /health
