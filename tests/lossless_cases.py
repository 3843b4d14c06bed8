"""Drafters, shapes and lengths under which a text must be the one without a draft, and requests that run under them in one engine."""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tree_drafters import TreeOracle

from kilotok.dflash.generate import Drafter, Round
from kilotok.dflash.sampling import Sampling
from kilotok.dflash.tree import DraftTree, chain
from kilotok.runtime.engine import Engine, Event, Executor, Finished, Request
from kilotok.runtime.pacing import AUTO, DraftLength, DraftState

DRAFTERS = ("trained", "random", "wrong", "right")
SHAPES = ("chain", "tree")
LENGTHS: tuple[DraftLength, ...] = (3, 7, AUTO)
SAMPLINGS = ("greedy", "sampled")
TREE_BUDGET = 10
WAIT_S = 3600


class SureOracle(TreeOracle):
    """Right or wrong always, in chains too, and as sure of itself in either case."""

    def propose(self, anchor: int, *, count: int, sampling: Sampling) -> list[int]:
        return list(self.propose_chain(anchor, count=count, sampling=sampling).token_ids)

    def propose_chain(self, anchor: int, *, count: int, sampling: Sampling) -> DraftTree:
        done = self.position - self.prompt_length + 1   # tokens of the text up to the anchor
        assert self.text[done - 1] == anchor, "the text is another one already"
        following = self.text[done:done + count]
        tokens = [token if self.kind == "right" else (token + 1 + i) % self.vocab_size for i, token in enumerate(following)]
        return chain(tokens, confidences=[0.8] * len(tokens))

    def propose_tree(self, anchor: int, *, count: int, budget: int, sampling: Sampling) -> DraftTree:
        tree = super().propose_tree(anchor, count=count, budget=budget, sampling=sampling)
        children = [sum(other == parent for other in tree.parents) for parent in tree.parents]
        return replace(tree, confidences=tuple(0.9 / n for n in children))


def sampling_of(name: str, number: int) -> Sampling:
    """temperature: what a kernel's rounds can draft."""
    return {"greedy": Sampling(), "sampled": Sampling(temperature=0.8, top_p=0.95, seed=number), "temperature": Sampling(temperature=0.8, seed=number)}[name]


def requests_for(prompts: Sequence[tuple[int, ...]], *, sampling: str, max_tokens: int, **how: Any) -> list[Request]:
    given = {"max_tokens": max_tokens, "eos_ids": frozenset(), "decode": "plain", **how}
    return [Request(prompt=prompt, sampling=sampling_of(sampling, n), **given) for n, prompt in enumerate(prompts)]


def how_to_draft(shape: str, length: DraftLength) -> dict[str, Any]:
    """Of a request; adaptive ones share a domain, so that what one learns serves the next."""
    tree = {"decode": "tree", "tree_budget": TREE_BUDGET} if shape == "tree" else {"decode": "draft"}
    return {**tree, "draft_length": length, "domain": "all" if length == AUTO else None}


def drafter_factory(kind: str, *, prompts: Sequence[tuple[int, ...]], texts: Sequence[Sequence[int]], vocab_size: int, heads: dict[str, Callable[[], Drafter]]
                    ) -> Callable[[], Drafter]:
    """Makes the drafters of these requests, in the order in which they are opened, which is that of their submission."""
    if kind in heads:
        return heads[kind]
    waiting: Iterator[tuple[tuple[int, ...], Sequence[int]]] = iter(zip(prompts, texts, strict=True))

    def make() -> Drafter:
        prompt, text = next(waiting)
        return SureOracle(text, prompt_length=len(prompt), kind=kind, vocab_size=vocab_size)

    return make


@dataclass
class Heard:
    rounds: list[Round] = field(default_factory=list)
    end: Finished | None = None
    finished: threading.Event = field(default_factory=threading.Event)

    def __call__(self, event: Event) -> None:
        if isinstance(event, Finished):
            self.end = event
            self.finished.set()
        else:
            self.rounds.append(event)


def run_all(executor: Executor, requests: Sequence[Request], *, make_drafter: Callable[[], Drafter] | None, max_running: int,
            clock: Callable[[], float] | None = None) -> tuple[list[list[int]], list[list[Round]], DraftState]:
    """(texts, rounds) of every request, and what the engine knows of its drafts at the end. clock: by which lengths are chosen.

    Errors: RuntimeError for a request that failed.
    """
    engine = Engine(executor, make_drafter=make_drafter, max_running=max_running)
    if clock is not None:
        engine.speculation.clock = clock
    try:
        heard = [Heard() for _ in requests]
        for request, listener in zip(requests, heard, strict=True):
            engine.submit(request, listener)
        for number, one in enumerate(heard):
            if not one.finished.wait(WAIT_S) or one.end is None or one.end.reason == "error":
                raise RuntimeError(f"request {number}: must end; {one.end}")
        state = engine.speculation.state()
    finally:
        engine.close()
    return [[t for r in one.rounds for t in r.tokens] for one in heard], [one.rounds for one in heard], state
