"""Requests to an engine on the tiny model, what they are told, and a drafter that is right now and then."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from step_models import TINY
from tree_drafters import TreeOracle

from kilotok.dflash.sampling import Sampling
from kilotok.runtime.engine import Engine, Event, Finished, Request

WAIT_S = 120
V = TINY.vocab_size


@dataclass
class Heard:
    """What a request was told; `on_round` may act in between, on the engine's thread."""

    on_round: Callable[[int], None] = lambda tokens: None
    events: list[Event] = field(default_factory=list)
    finished: threading.Event = field(default_factory=threading.Event)

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Finished):
            self.finished.set()
        else:
            self.on_round(len(self.tokens))

    @property
    def tokens(self) -> list[int]:
        return [t for event in self.events if not isinstance(event, Finished) for t in event.tokens]

    def end(self) -> Finished:
        assert self.finished.wait(WAIT_S)
        end = self.events[-1]
        assert isinstance(end, Finished) and sum(isinstance(e, Finished) for e in self.events) == 1
        return end


class Knowing(TreeOracle):
    """A tree oracle that drafts chains too: right up to a number of tokens that changes with the position, then wrong."""

    def propose(self, anchor: int, *, count: int, sampling: Sampling) -> list[int]:
        done = self.position - self.prompt_length + 1
        assert self.text[done - 1] == anchor
        right = self.position * 2654435761 % 2**32 * 9 >> 32
        return [t if i < right else (t + 1 + i) % V for i, t in enumerate(self.text[done:done + count])]


def prompt_of(number: int) -> tuple[int, ...]:
    """Of 2 to 29 tokens."""
    g = torch.Generator().manual_seed(number)
    return tuple(torch.randint(V, (2 + number * 9 % 28,), generator=g).tolist())


def submit_together(engine: Engine, requests: list[Request], heard: list[Heard] | None = None) -> list[Heard]:
    """All are there before the first turn."""
    listeners = heard or [Heard() for _ in requests]
    with engine._changed:
        for one, listener in zip(requests, listeners, strict=True):
            engine.submit(one, listener)
    return listeners
