"""What a server serves."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...dflash.generate import Drafter
from ..engine import DecodeMode, Executor
from ..pacing import DraftLength


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
    tree_budget: int | None = None                  # nodes of draft trees, which then are the default; None: chains are, and trees have as many nodes
    draft_length: DraftLength | None = None         # of a request that does not say; None: all that the head drafts

    @property
    def decode(self) -> DecodeMode:
        """Of a request that does not say."""
        return "plain" if self.make_drafter is None else "draft" if self.tree_budget is None else "tree"
