"""Rows, the pick of a row, and the learning-rate curve: pure functions, checked exactly where they can be."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from kilotok.train.packing import cut_rows, pack_documents, pick_row, spread
from kilotok.train.schedule import warmup_cosine


@pytest.mark.parametrize("length", range(1, 10))
def test_cut_rows_predicts_every_token_once(length: int) -> None:
    for count in range(60):
        rows = cut_rows(list(range(count)), length=length)
        assert all(end - start == length + 1 and end <= count for start, end in rows)
        predicted = [i for start, end in rows for i in range(start + 1, end)]
        assert predicted == list(range(1, 1 + len(predicted)))   # token 0 has nothing before it
        left = max(0, count - 1 - len(predicted))
        assert left < length, f"{left} tokens of {count} are left out, a whole row of {length}"


def test_cut_rows_by_hand() -> None:
    assert cut_rows([0] * 3, length=3) == []
    assert cut_rows([0] * 4, length=3) == [(0, 4)]
    assert cut_rows([0] * 6, length=3) == [(0, 4)]
    assert cut_rows([0] * 7, length=3) == [(0, 4), (3, 7)]


def test_spread_is_even() -> None:
    for count in range(50):
        for limit in range(1, 20):
            picked = spread(count, limit=limit)
            assert len(picked) == min(count, limit)
            assert picked == sorted(set(picked)) and all(0 <= i < count for i in picked)
            steps = [b - a for a, b in itertools.pairwise((*picked, count))]   # the last reaches to the end
            assert not picked or (picked[0] == 0 and max(steps) - min(steps) <= 1)


def test_spread_by_hand() -> None:
    assert spread(10, limit=4) == [0, 2, 5, 7]
    assert spread(3, limit=4) == [0, 1, 2]
    assert spread(0, limit=4) == []


def draw(count: int, *, seed: int, weights: list[float], num_rows: list[int]) -> list[tuple[int, int]]:
    return [pick_row(i, seed=seed, weights=weights, num_rows=num_rows) for i in range(count)]


def test_pick_row_is_a_pure_function() -> None:
    one = draw(300, seed=3, weights=[0.7, 0.2, 0.1], num_rows=[5, 7, 3])
    np.random.seed(1)   # a global state it must not read ...
    before = np.random.get_state()[1].copy()
    backwards = [pick_row(i, seed=3, weights=(0.7, 0.2, 0.1), num_rows=(5, 7, 3)) for i in reversed(range(300))]
    assert backwards[::-1] == one
    assert (np.random.get_state()[1] == before).all()   # ... nor move


def test_pick_row_depends_on_seed_and_index() -> None:
    first, other = (draw(300, seed=s, weights=[1.0], num_rows=[1000]) for s in (0, 1))
    # equal by chance at a place: 1 in 1000; ten of 300 would be chance below 1e-9
    assert sum(a == b for a, b in zip(first, other, strict=True)) < 10
    assert len(set(first)) > 200   # 300 draws of 1000 with replacement leave 259 different ones on average, deviation 5


def test_pick_row_needs_ratios_only() -> None:
    assert draw(200, seed=5, weights=[7, 2, 1], num_rows=[5, 7, 3]) == draw(200, seed=5, weights=[0.875, 0.25, 0.125], num_rows=[5, 7, 3])


def test_pick_row_follows_the_weights_and_covers_every_row() -> None:
    weights, num_rows, draws = [0.7, 0.2, 0.1], [5, 7, 3], 20_000
    counts = Counter(draw(draws, seed=11, weights=weights, num_rows=num_rows))
    cells = {(s, r): draws * weights[s] / num_rows[s] for s in range(3) for r in range(num_rows[s])}
    assert set(counts) == set(cells)
    chi_square = sum((counts[c] - expected) ** 2 / expected for c, expected in cells.items())
    # Sum of squares of 14 standard normals (15 cells, one total): exceeds d + 2 sqrt(d t) + 2 t with probability below exp(-t)
    # (Laurent and Massart 2000, lemma 1). t = 14 is one in a million, a bound of 70; shares of 0.67, 0.20, 0.13 would give over 200.
    freedom, t = len(cells) - 1, 14.0
    assert chi_square < freedom + 2 * math.sqrt(freedom * t) + 2 * t


def test_pick_row_of_one_row() -> None:
    assert draw(5, seed=0, weights=[2.0], num_rows=[1]) == [(0, 0)] * 5


def curve(max_steps: int, *, warmup_steps: int, final_ratio: float) -> list[float]:
    return [warmup_cosine(s, warmup_steps=warmup_steps, max_steps=max_steps, final_ratio=final_ratio) for s in range(max_steps + 1)]


def test_warmup_cosine_at_the_ends() -> None:
    lr = curve(20, warmup_steps=4, final_ratio=0.1)
    assert lr[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]   # the first step trains already; the peak is reached at the last of the warm-up
    assert lr[12] == pytest.approx(0.55, rel=1e-12)   # half-way: the mean of 1 and 0.1
    assert lr[20] == pytest.approx(0.1, rel=1e-12)
    assert all(a > b for a, b in itertools.pairwise(lr[4:]))


def test_warmup_cosine_without_a_warm_up() -> None:
    assert curve(10, warmup_steps=0, final_ratio=0.0)[0] == 1.0
    assert curve(10, warmup_steps=0, final_ratio=0.0)[10] == pytest.approx(0.0, abs=1e-16)


def test_warmup_cosine_stays_at_the_end_and_may_be_flat() -> None:
    assert warmup_cosine(999, warmup_steps=4, max_steps=20, final_ratio=0.1) == pytest.approx(0.1, rel=1e-12)
    assert curve(10, warmup_steps=0, final_ratio=1.0) == [1.0] * 11


def test_warmup_cosine_of_nothing_but_warm_up() -> None:
    assert curve(4, warmup_steps=4, final_ratio=0.1) == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert max(curve(4, warmup_steps=8, final_ratio=0.1)) == 0.625   # cut off on its way up


def test_warmup_cosine_equals_torch() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50, eta_min=0.05)
    theirs = []
    for _ in range(51):
        theirs.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    # torch updates the rate from the last one: 50 roundings of fp64, 1e-14; 1e-12 leaves room
    assert curve(50, warmup_steps=0, final_ratio=0.05) == pytest.approx(theirs, rel=1e-12)


def check_packing(lengths: Sequence[int], *, row_length: int) -> list[list[int]]:
    rows = pack_documents(lengths, row_length=row_length)
    assert sorted(i for row in rows for i in row) == [i for i, n in enumerate(lengths) if 0 < n <= row_length]   # each once; empty and too long left out
    assert all(row and sum(lengths[i] for i in row) <= row_length for row in rows)
    return rows


def test_pack_documents_keeps_each_once_and_no_row_over_its_length() -> None:
    rng = np.random.default_rng(7)
    for row_length in range(1, 40):
        for count in (0, 1, 2, 30):
            check_packing(rng.integers(0, row_length + 3, size=count).tolist(), row_length=row_length)


def test_pack_documents_by_hand() -> None:
    assert pack_documents([], row_length=8) == []
    assert pack_documents([0, 9, 10], row_length=8) == []
    assert pack_documents([8, 8], row_length=8) == [[0], [1]]
    assert pack_documents([3, 5, 5, 3], row_length=8) == [[1, 3], [2, 0]]   # longest first, each pair fills a row
    assert pack_documents([6, 5, 2, 3], row_length=8) == [[0, 2], [1, 3]]   # best fit: 3 goes where 3 are free, 2 where 2 are
    assert pack_documents([1] * 5, row_length=2) == [[0, 1], [2, 3], [4]]


def test_pack_documents_wastes_little() -> None:
    """Documents that are short beside a row fill it: on ten seeds all rows but the emptiest were 99.6 % full or more."""
    for seed in range(5):
        lengths = np.random.default_rng(seed).integers(20, 200, size=400).tolist()
        filled = sorted(sum(lengths[i] for i in row) for row in check_packing(lengths, row_length=512))
        assert sum(filled[1:]) / (512 * len(filled[1:])) > 0.99


def test_pack_documents_leaves_no_two_rows_that_fit_in_one() -> None:
    rng = np.random.default_rng(2)
    for _ in range(50):
        lengths = rng.integers(1, 60, size=40).tolist()
        filled = sorted(sum(lengths[i] for i in row) for row in check_packing(lengths, row_length=64))
        assert filled[0] + filled[1] > 64


def test_pack_documents_is_a_pure_function() -> None:
    lengths = np.random.default_rng(3).integers(0, 70, size=200).tolist()
    assert pack_documents(lengths, row_length=64) == pack_documents(tuple(lengths), row_length=64)
