"""Text sampled through the engine with a draft follows the target's distribution: chi-square against the exact probabilities.

The target is a Markov chain over a few tokens whose rows of logits are known, so the exact probability of every token after every other is. Each seed is
a request of its own, drafted by a head that knows other logits (so proposals are accepted at times and rejected at others, which is the case that a wrong
rule would bias), as chains and trees, at full length and with adaptive lengths (under a clock that ticks at every look, so that they are the same ones in
every run). Counted are all transitions, from the prompt's last token on.

Sample: 200 requests of 41 tokens, 8,200 transitions a case, split by the token before. Noise is keyed by (seed, position), so they are independent given
the token before. Significance: a case fails above the 0.1 % point of chi-square with its degrees of freedom (Wilson and Hilferty's approximation). Seeds are
fixed, so the outcome is too; that the sample is large enough to see an error is tested with the wrong temperature and without the filters.
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from lossless_cases import run_all
from torch import Tensor

from kilotok.dflash.generate import TargetStep
from kilotok.dflash.sampling import Sampling, candidate_scores, choose_tokens, confidences
from kilotok.dflash.tree import ANCHOR, DraftTree, build_tree, chain
from kilotok.runtime.engine import DecodeMode, Request
from kilotok.runtime.pacing import AUTO, DraftLength

VOCAB_SIZE = 12
LOGITS_VV = 1.5 * torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))    # of the token after each token
DRAFT_VV = LOGITS_VV + 0.7 * torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
NUM_REQUESTS, MAX_TOKENS = 200, 41
Z_999 = 3.0902      # one-sided 0.1 % point of the normal distribution
MIN_EXPECTED = 5    # of a cell; smaller ones of a row are pooled
CASES: dict[str, tuple[Sampling, DecodeMode, DraftLength | None]] = {
    "0.7, top-p, chain": (Sampling(temperature=0.7, top_p=0.9), "draft", None),
    "0.7, top-k, tree": (Sampling(temperature=0.7, top_k=5), "tree", None),
    "0.7, both, adaptive chain": (Sampling(temperature=0.7, top_p=0.85, top_k=6), "draft", AUTO),
    "1.0, top-p, tree": (Sampling(temperature=1.0, top_p=0.8), "tree", None),
    "1.0, top-k, chain": (Sampling(temperature=1.0, top_k=4), "draft", None),
    "1.0, both, adaptive tree": (Sampling(temperature=1.0, top_p=0.9, top_k=7), "tree", AUTO),
    "1.0, all tokens, chain": (Sampling(temperature=1.0), "draft", None)}


class MarkovTarget:
    max_length = 256

    def __init__(self) -> None:
        self.tokens: list[int] = []

    @property
    def length(self) -> int:
        return len(self.tokens)

    def read(self, ids: Sequence[int], *, last_logits_only: bool = False) -> TargetStep:
        self.tokens += ids
        rows = LOGITS_VV[list(ids)]
        return TargetStep(logits_TV=rows[-1:] if last_logits_only else rows, features_TF=torch.tensor(list(ids), dtype=torch.float32)[:, None])

    def rewind(self, length: int) -> None:
        del self.tokens[length:]

    def read_tree(self, anchor: int, tree: DraftTree) -> TargetStep:
        self.tree = (anchor, *tree.token_ids)
        return TargetStep(logits_TV=LOGITS_VV[list(self.tree)], features_TF=torch.tensor(self.tree, dtype=torch.float32)[:, None])

    def keep(self, path: Sequence[int]) -> None:
        self.tokens += [self.tree[node + 1] for node in (ANCHOR, *path)]


class MarkovExecutor:
    max_length = 256

    def open(self, *, one_column: bool = False) -> MarkovTarget:
        return MarkovTarget()


class MarkovDrafter:
    """Draws from its own logits, with the target's noise."""

    num_drafts = 7

    def __init__(self) -> None:
        self.observed = 0

    def observe(self, features_TF: Tensor) -> None:
        self.observed += features_TF.shape[0]

    def propose(self, anchor: int, *, count: int, sampling: Sampling) -> list[int]:
        return list(self.propose_chain(anchor, count=count, sampling=sampling).token_ids)

    def propose_chain(self, anchor: int, *, count: int, sampling: Sampling) -> DraftTree:
        tokens: list[int] = []
        told: list[float] = []
        for k in range(count):
            row = DRAFT_VV[[tokens[-1] if tokens else anchor]]
            picked = choose_tokens(row, first_position=self.observed + 1 + k, sampling=sampling)
            tokens += picked
            told += confidences(row, picked, sampling=sampling)
        return chain(tokens, confidences=told)

    def propose_tree(self, anchor: int, *, count: int, budget: int, sampling: Sampling) -> DraftTree:
        rows = DRAFT_VV[[anchor, *self.propose(anchor, count=count, sampling=sampling)[:-1]]]
        return build_tree(candidate_scores(rows, first_position=self.observed + 1, sampling=sampling), budget=budget)


def exact(row: Tensor, sampling: Sampling) -> list[float]:
    """Temperature, then top-k, then top-p of what is left, by the book and in float64."""
    weights = (row.double() / sampling.temperature).softmax(0).tolist()
    order = sorted(range(VOCAB_SIZE), key=lambda v: (-weights[v], v))[:sampling.top_k]
    total, kept, reached = sum(weights[v] for v in order), set[int](), 0.0
    for v in order:
        if reached >= sampling.top_p and kept:
            break
        kept.add(v)
        reached += weights[v] / total
    left = sum(weights[v] for v in kept)
    return [weights[v] / left if v in kept else 0.0 for v in range(VOCAB_SIZE)]


def chi_square(transitions: Counter[tuple[int, int]], sampling: Sampling) -> tuple[float, float]:
    """(statistic, its 0.1 % point); infinite for a token that cannot be."""
    statistic, freedom = 0.0, 0
    for before in range(VOCAB_SIZE):
        probabilities = exact(LOGITS_VV[before], sampling)
        counts = [transitions[before, v] for v in range(VOCAB_SIZE)]
        if any(count for count, p in zip(counts, probabilities, strict=True) if p == 0):
            return math.inf, 0.0
        cells, rest = [], [0.0, 0.0]
        for count, p in zip(counts, probabilities, strict=True):
            if sum(counts) * p >= MIN_EXPECTED:
                cells.append((float(count), sum(counts) * p))
            else:
                rest = [rest[0] + count, rest[1] + sum(counts) * p]
        if rest[1] >= MIN_EXPECTED:
            cells.append((rest[0], rest[1]))
        elif rest[1] and cells:
            cells[-1] = (cells[-1][0] + rest[0], cells[-1][1] + rest[1])
        statistic += sum((seen - expected) ** 2 / expected for seen, expected in cells)
        freedom += max(0, len(cells) - 1)
    spread = 2 / (9 * freedom)
    return statistic, freedom * (1 - spread + Z_999 * math.sqrt(spread)) ** 3


@pytest.mark.parametrize(("sampling", "decode", "length"), CASES.values(), ids=CASES)
def test_sampled_text_has_the_exact_distribution(sampling: Sampling, decode: DecodeMode, length: DraftLength | None) -> None:
    asked = [Request(prompt=(seed % VOCAB_SIZE,), max_tokens=MAX_TOKENS, sampling=replace(sampling, seed=seed), eos_ids=frozenset(), decode=decode,
                     draft_length=length, domain="all") for seed in range(NUM_REQUESTS)]
    texts, rounds, _ = run_all(MarkovExecutor(), asked, make_drafter=MarkovDrafter, max_running=8, clock=itertools.count().__next__)
    drafted = [r for of_text in rounds for r in of_text if r.num_drafted]
    accepted = sum(r.num_accepted for r in drafted)
    assert len(drafted) > 500 and 0.1 * accepted < sum(r.num_accepted < r.max_accepted for r in drafted)   # neither all nor nothing was accepted
    transitions = Counter((a, b) for request, text in zip(asked, texts, strict=True) for a, b in zip((*request.prompt, *text), text, strict=False))
    assert transitions.total() == NUM_REQUESTS * MAX_TOKENS
    statistic, limit = chi_square(transitions, sampling)
    assert statistic < limit
    warmer = replace(sampling, temperature=1.2 * sampling.temperature)
    assert chi_square(transitions, warmer)[0] > chi_square(transitions, warmer)[1]     # the sample shows a temperature that is a fifth off
    if sampling.top_k is not None or sampling.top_p < 1:
        everything = Sampling(temperature=sampling.temperature)
        assert chi_square(transitions, everything)[0] > chi_square(transitions, everything)[1]
