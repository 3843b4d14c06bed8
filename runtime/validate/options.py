"""What `kilotok validate` is asked to do."""

import math
from dataclasses import dataclass
from pathlib import Path

from ..executors import DEVICES, EXECUTORS
from ..pacing import AUTO, MAX_DRAFT_LENGTH, DraftLength


@dataclass(frozen=True, kw_only=True)
class ValidateOptions:
    """One validation of one exported directory."""

    out: Path                              # directory that `kilotok export` wrote; its dflash/ holds the draft head
    prompts: Path | None = None            # held-out prompts, JSONL; None: out/dflash/heldout.jsonl
    parent: Path | None = None             # bf16 parent; None: the path in kilotok.json, if it is still there
    report: Path | None = None             # directory of the report; None: out/validation
    prompts_per_domain: int = 13           # at most so many, spread evenly over the domain
    max_tokens: int = 64                   # of each answer
    quality_tokens: int = 1024             # predicted tokens a domain contributes to perplexity and KL, at most
    temperature: float = 0.8               # of the sampled requests
    price_per_hour: float | None = None    # of the machine, any currency; None: no cost is printed
    threads: int | None = None             # of torch, in the server and for the quality; None: torch decides
    device: str = "auto"                   # cpu, cuda, or auto: cuda where the persistent executor runs
    executor: str = "auto"                 # of the server: reference, persistent, or auto
    draft_length: DraftLength = AUTO       # "auto": full drafts, and adaptive ones beside them; a number: proposals of a draft at most

    def __post_init__(self) -> None:
        for name, least in (("prompts_per_domain", 1), ("max_tokens", 2), ("quality_tokens", 1)):   # one token has no decode speed
            if getattr(self, name) < least:
                raise ValueError(f"validate.{name}: must be at least {least}; got {getattr(self, name)}.")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"validate.threads: must be at least 1; got {self.threads}. Leave it out to let torch decide.")
        if not 0 < self.temperature <= 100:
            raise ValueError(f"validate.temperature: must lie in (0, 100]; got {self.temperature}. Greedy decoding is measured in any case.")
        if self.price_per_hour is not None and not 0 <= self.price_per_hour < math.inf:
            raise ValueError(f"validate.price_per_hour: must be a price; got {self.price_per_hour}.")
        if self.draft_length != AUTO and not (isinstance(self.draft_length, int) and 1 <= self.draft_length <= MAX_DRAFT_LENGTH):
            raise ValueError(f"validate.draft_length: must be 'auto' or lie in 1..{MAX_DRAFT_LENGTH}; got {self.draft_length!r}. "
                             "Decoding without a draft is measured in any case.")
        for name, known in (("device", DEVICES), ("executor", EXECUTORS)):
            if getattr(self, name) not in known:
                raise ValueError(f"validate.{name}: must be one of {', '.join(known)}; got {getattr(self, name)!r}.")
