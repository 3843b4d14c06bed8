"""A target and a drafter in simulated time: what a round costs and how often a proposal is right are the test's choice."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kilotok.dflash.generate import Round, TargetStep, generate
from kilotok.dflash.sampling import Sampling
from kilotok.dflash.tree import DraftTree, chain
from kilotok.runtime.pacing import DraftLength, Speculation

VOCAB_SIZE = 16
DRAW = random.Random(0)
CHANCE = [DRAW.random() for _ in range(8192)]     # of a position
PROMPT = (1, 2, 3)


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class Counting:
    """Every next token is the last plus one; reading takes `cost(columns)` seconds."""

    max_length = 1 << 20

    def __init__(self, clock: Clock, cost: Callable[[int], float]) -> None:
        self.clock, self.cost, self.length = clock, cost, 0
        self.columns: list[int] = []

    def read(self, ids: Sequence[int], *, last_logits_only: bool = False) -> TargetStep:
        self.clock.now += self.cost(len(ids))
        self.columns.append(len(ids))
        features = torch.arange(self.length, self.length + len(ids), dtype=torch.float32)[:, None]
        self.length += len(ids)
        logits = torch.zeros(len(ids), VOCAB_SIZE)
        logits[torch.arange(len(ids)), [(token + 1) % VOCAB_SIZE for token in ids]] = 1.0
        return TargetStep(logits_TV=logits[-1:] if last_logits_only else logits, features_TF=features)

    def rewind(self, length: int) -> None:
        self.length = length


@dataclass
class Guessing:
    """Right at a position with the chance `share(position)`, and says so; its features are the positions it was shown."""

    clock: Clock
    share: Callable[[int], float]
    draft_s: float = 0.0
    num_drafts: int = 7
    bias: float = 1.0           # of the confidence it tells
    num_read: Callable[[], int] = lambda: 0     # by the target
    seen: list[int] = field(default_factory=list)
    pieces: list[int] = field(default_factory=list)     # rows of each observation
    num_proposals: int = 0

    def observe(self, features_TF: Tensor) -> None:
        shown = [int(x) for x in features_TF[:, 0]]
        assert shown == list(range(len(self.seen), len(self.seen) + len(shown))), "the context has a hole"
        self.seen += shown
        self.pieces.append(features_TF.shape[0])

    def propose_chain(self, anchor: int, *, count: int, sampling: Sampling) -> DraftTree:
        assert len(self.seen) == self.num_read(), "the context is not complete"
        self.clock.now += self.draft_s
        self.num_proposals += 1
        tokens, shares = [], []
        for k in range(1, count + 1):
            shares.append(self.share(len(self.seen) + k))
            is_right = CHANCE[(len(self.seen) + k) % len(CHANCE)] < shares[-1]
            tokens.append((anchor + k + (not is_right)) % VOCAB_SIZE)
        return chain(tokens, confidences=[min(1.0, self.bias * share) for share in shares])

    def propose(self, anchor: int, *, count: int, sampling: Sampling) -> list[int]:
        return list(self.propose_chain(anchor, count=count, sampling=sampling).token_ids)


@dataclass(frozen=True, kw_only=True)
class Told:
    """A decoded text in simulated time."""

    rounds: list[Round]
    seconds: float          # without the prompt
    drafter: Guessing
    target: Counting

    @property
    def tokens_per_s(self) -> float:
        return sum(len(r.tokens) for r in self.rounds[1:]) / self.seconds


def tell(*, length: DraftLength | None, tokens: int, cost: Callable[[int], float], share: Callable[[int], float], draft_s: float = 0.0,
         speculation: Speculation | None = None, domain: str | None = None, bias: float = 1.0) -> Told:
    """One request as the engine runs it; the text is checked. length 0: no drafter at all."""
    clock = Clock()
    told = speculation or Speculation()
    told.clock = clock
    target, drafter = Counting(clock, cost), Guessing(clock, share, draft_s=draft_s, bias=bias, num_read=lambda: target.length)
    paced = None if length == 0 else told.pace(drafter, length=length, domain=domain, is_tree=False, is_sampled=False)
    rounds: list[Round] = []
    begun = start = drafting_s = 0.0
    for done in generate(target, prompt=PROMPT, drafter=paced, sampling=Sampling(), max_tokens=tokens, eos_ids=()):
        rounds.append(done)
        if done.is_prefill:
            begun = clock.now
        elif paced is not None:
            told.learn(paced, done, step_s=clock.now - start - (told.drafting_s - drafting_s))
        start, drafting_s = clock.now, told.drafting_s
    assert [t for r in rounds for t in r.tokens] == [(PROMPT[-1] + 1 + i) % VOCAB_SIZE for i in range(tokens)]
    return Told(rounds=rounds, seconds=clock.now - begun, drafter=drafter, target=target)
