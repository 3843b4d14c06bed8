"""Picking tokens: greedy, and sampled against a reference in plain Python and against the distribution it should follow."""

import dataclasses
import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from kilotok.dflash.sampling import NOISE_POSITIONS, Sampling, choose_tokens
from kilotok.kernels.sampling import gumbel_noise_ref

SIGMAS = 5
SETTINGS = {
    "plain": Sampling(temperature=1.0, seed=3), "warm": Sampling(temperature=0.6, seed=4), "hot": Sampling(temperature=3.0, seed=5),
    "top_k": Sampling(temperature=1.2, top_k=3, seed=6), "top_p": Sampling(temperature=0.9, top_p=0.7, seed=7),
    "both": Sampling(temperature=1.0, top_p=0.8, top_k=5, seed=2**63 - 1), "more than all": Sampling(temperature=1.0, top_k=1000, seed=8),
}


def logits_of(*shape: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def kept_probabilities(row: list[float], sampling: Sampling) -> dict[int, float]:
    """Token -> probability after temperature, top_k and top_p, by the book: sort, keep, normalise, keep until the sum is reached."""
    order = sorted(range(len(row)), key=lambda v: (-row[v], v))[:sampling.top_k]
    weights = {v: math.exp((row[v] - row[order[0]]) / sampling.temperature) for v in order}
    total, kept, reached = sum(weights.values()), {}, 0.0
    for v in order:
        if reached >= sampling.top_p and kept:
            break
        kept[v] = weights[v] / total
        reached += kept[v]
    return {v: p / sum(kept.values()) for v, p in kept.items()}


# --- greedy ---


def test_greedy_is_the_largest_logit_and_ties_go_to_the_lowest_id() -> None:
    rows = torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0], [-1.0, -2.0, -1.0, -1.0]])
    assert choose_tokens(rows, first_position=0, sampling=Sampling()) == [1, 0, 0]
    draw = random.Random(0)
    for size in (1, 2, 15, 16, 17, 4096, 151_937):   # vectors and remainders of vectors
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            row = torch.zeros(size, dtype=dtype)
            tied = [draw.randrange(size) for _ in range(3)]
            row[tied] = 1.0
            assert choose_tokens(row[None], first_position=0, sampling=Sampling()) == [min(tied)], f"{size} {dtype}"


def test_greedy_compares_the_logits_as_they_are() -> None:
    """Two float64 logits that are one number in fp32."""
    assert choose_tokens(torch.tensor([[1.0, 1.0 + 2.0**-40]], dtype=torch.float64), first_position=0, sampling=Sampling()) == [1]


def test_greedy_looks_at_nothing_else() -> None:
    logits = logits_of(20, 50)
    expected = logits.argmax(-1).tolist()
    for sampling in (Sampling(), Sampling(top_k=1), Sampling(top_p=0.01, seed=99), Sampling(temperature=0)):
        assert choose_tokens(logits, first_position=11, sampling=sampling) == expected


def test_no_rows_give_no_tokens() -> None:
    for sampling in (Sampling(), Sampling(temperature=1.0)):
        assert choose_tokens(torch.zeros(0, 9), first_position=4, sampling=sampling) == []


# --- sampled ---


@pytest.mark.parametrize("sampling", SETTINGS.values(), ids=SETTINGS)
def test_the_pick_is_the_largest_kept_logit_plus_noise(sampling: Sampling) -> None:
    first, logits = 5, logits_of(200, 37)
    noise = gumbel_noise_ref(seed=sampling.seed, positions=range(first, first + 200), vocab_size=37).tolist()
    expected = []
    for row, of_row in zip(logits.tolist(), noise, strict=True):
        kept = kept_probabilities(row, sampling)
        expected.append(max(kept, key=lambda v: row[v] / sampling.temperature + of_row[v]))
    assert choose_tokens(logits, first_position=first, sampling=sampling) == expected
    assert expected != logits.argmax(-1).tolist()


@pytest.mark.parametrize("sampling", [Sampling(), *SETTINGS.values()], ids=["greedy", *SETTINGS])
def test_a_row_is_picked_alike_in_any_company(sampling: Sampling) -> None:
    """However the rows are cut, across the borders at which noise is made, and wherever the first one is."""
    for first in (0, 13, NOISE_POSITIONS - 1, NOISE_POSITIONS, 10 * NOISE_POSITIONS + 3):
        logits = logits_of(2 * NOISE_POSITIONS + 5, 64, seed=first)
        together = choose_tokens(logits, first_position=first, sampling=sampling)
        for size in (1, 2, 7, 8, NOISE_POSITIONS):
            parts = [t for s in range(0, len(logits), size) for t in choose_tokens(logits[s:s + size], first_position=first + s, sampling=sampling)]
            assert parts == together, f"{size} rows at a time from position {first}"


def test_position_and_seed_matter() -> None:
    logits = torch.zeros(100, 50)
    keys = ((0, 1), (1, 1), (0, 2), (0, 2**32 + 1))
    picks = {(first, seed): choose_tokens(logits, first_position=first, sampling=Sampling(temperature=1.0, seed=seed)) for first, seed in keys}
    assert picks[0, 1][1:] == picks[1, 1][:-1]   # the same positions, one row later
    for other in keys[1:]:
        assert sum(a == b for a, b in zip(picks[0, 1], picks[other], strict=True)) < 12   # 2 of 100 by chance, 5 sigma is 9


def test_the_logits_are_left_alone_and_may_be_bf16() -> None:
    logits = logits_of(30, 20).bfloat16()
    before = logits.clone()
    for sampling in (Sampling(), *SETTINGS.values()):
        assert choose_tokens(logits, first_position=0, sampling=sampling) == choose_tokens(logits.float(), first_position=0, sampling=sampling)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("sampling", SETTINGS.values(), ids=SETTINGS)
def test_picks_follow_the_target_distribution(sampling: Sampling) -> None:
    trials, row = 6000, [0.0, 1.5, -1.0, 0.3, 2.0, -0.5, 0.7, 1.4]
    picks = choose_tokens(torch.tensor([row]).expand(trials, -1), first_position=0, sampling=sampling)
    probabilities = kept_probabilities(row, sampling)
    assert set(picks) <= set(probabilities)
    freedom = len(probabilities) - 1

    def chi_square(expected: dict[int, float]) -> float:
        return sum((picks.count(v) - trials * p) ** 2 / (trials * p) for v, p in expected.items())

    assert chi_square(probabilities) < freedom + SIGMAS * math.sqrt(2 * freedom)
    warmer = kept_probabilities(row, dataclasses.replace(sampling, temperature=1.25 * sampling.temperature, top_p=1.0, top_k=len(probabilities)))
    assert chi_square(warmer) > freedom + SIGMAS * math.sqrt(2 * freedom)   # the trials suffice to see another temperature


def picked(probabilities: list[float], **numbers: Any) -> set[int]:
    """Tokens that come up in 400 draws."""
    logits = torch.tensor(probabilities).log().expand(400, -1)
    return set(choose_tokens(logits, first_position=0, sampling=Sampling(temperature=1.0, **numbers)))


def test_what_top_k_and_top_p_keep_by_hand() -> None:
    p = [0.1, 0.4, 0.2, 0.3]
    assert picked(p) == {0, 1, 2, 3}
    assert picked(p, top_k=2) == {1, 3}
    assert picked(p, top_k=1) == {1} == picked(p, top_p=0.39) == picked(p, top_p=1e-9)   # the likeliest is always kept
    assert picked(p, top_p=0.41) == {1, 3} == picked(p, top_p=0.69)                        # the one that reaches the sum is kept
    assert picked(p, top_p=0.71) == {1, 2, 3} and picked(p, top_p=0.91) == {0, 1, 2, 3}
    # top_p counts what top_k left: of 0.57 and 0.43 the first reaches 0.5, of 0.4 and 0.3 it would take both
    assert picked(p, top_k=2, top_p=0.5) == {1} and picked(p, top_p=0.5) == {1, 3}


def test_of_equal_logits_the_lowest_ids_are_kept() -> None:
    equal = [0.2] * 5
    assert picked(equal, top_k=2) == {0, 1} and picked(equal, top_p=0.5) == {0, 1, 2}
    assert picked([0.1, 0.3, 0.3, 0.3], top_k=2) == {1, 2}


# --- refusals ---


TEMPERATURE = "temperature: must be 0 (greedy) or lie in 1e-06..100; got"


@pytest.mark.parametrize(("numbers", "message"), [
    ({"temperature": -0.1}, f"{TEMPERATURE} -0.1."), ({"temperature": 100.5}, f"{TEMPERATURE} 100.5."),
    ({"temperature": math.nan}, f"{TEMPERATURE} nan."), ({"temperature": math.inf}, f"{TEMPERATURE} inf."),
    ({"top_p": 0.0}, "top_p: must lie in (0, 1]; got 0.0."), ({"top_p": 1.01}, "top_p: must lie in (0, 1]; got 1.01."),
    ({"top_p": math.nan}, "top_p: must lie in (0, 1]; got nan."), ({"top_k": 0}, "top_k: must be at least 1, or null for all tokens; got 0."),
    ({"top_k": -1}, "top_k: must be at least 1, or null for all tokens; got -1."), ({"seed": -1}, "seed: must lie in 0..2**63 - 1; got -1."),
    ({"seed": 2**63}, f"seed: must lie in 0..2**63 - 1; got {2**63}."),
])
def test_numbers_out_of_range_are_refused(numbers: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        Sampling(**numbers)
    assert str(error.value) == message


def test_the_ends_of_the_ranges_are_allowed() -> None:
    for numbers in ({"temperature": 0.0}, {"temperature": 100.0}, {"top_p": 1.0}, {"top_p": 1e-6}, {"top_k": 1}, {"seed": 0}, {"seed": 2**63 - 1}):
        sampling = dataclasses.replace(Sampling(temperature=1.0), **numbers)
        assert 0 <= choose_tokens(logits_of(1, 9), first_position=2, sampling=sampling)[0] < 9
