"""What a slot sees, and where blocks start: against the rules written out one element at a time."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from kilotok.dflash.anchors import anchor_generator, draw_anchors, valid_anchors
from kilotok.kernels.attention import BlockPlan

SIGMAS = 5
CPU = torch.device("cpu")


# --- the mask ---


def seen_by(anchors: list[int], *, block_size: int, length: int, window: int | None, firsts: list[int] | None = None) -> Tensor:
    """bool [A, N, S]"""
    plan = BlockPlan(anchors_BA=torch.tensor([anchors]), firsts_BA=torch.tensor([firsts or [0] * len(anchors)]), block_size=block_size, window=window,
                     causal=False)
    return plan.context_visible(length)[0]


@pytest.mark.parametrize("window", [None, 1, 2, 4, 7, 8, 9, 50])
@pytest.mark.parametrize("block_size", [2, 4, 8])
def test_a_slot_sees_what_the_rule_says(block_size: int, window: int | None) -> None:
    anchors, firsts = [0, 1, 3, 7, 8, 9, 20, 20, 20], [0, 0, 0, 0, 0, 8, 0, 15, 20]   # as in a packed row: documents begin later
    got = seen_by(anchors, firsts=firsts, block_size=block_size, length=30, window=window)
    assert got.shape == (len(anchors), block_size, 30) and got.dtype == torch.bool
    for a, (anchor, first) in enumerate(zip(anchors, firsts, strict=True)):
        for n in range(block_size):
            for k in range(30):
                expected = first <= k < anchor and (window is None or (anchor + n) - k < window)
                assert bool(got[a, n, k]) == expected, f"anchor {anchor}, slot {n}, context {k}"


def test_how_much_a_slot_sees_by_hand() -> None:
    """Window 8, anchor at 20: slot 0 sees 13..19, seven tokens, and each later slot one less; the last of eight none."""
    seen = seen_by([20, 3], block_size=8, length=30, window=8)
    assert seen.sum(-1).tolist() == [[7, 6, 5, 4, 3, 2, 1, 0], [3, 3, 3, 3, 3, 3 - 1, 1, 0]]
    assert seen[0, 2].nonzero().flatten().tolist() == [15, 16, 17, 18, 19]
    full = seen_by([20, 3], block_size=8, length=30, window=None)
    assert full.sum(-1).tolist() == [[20] * 8, [3] * 8]
    packed = seen_by([20, 20], firsts=[17, 20], block_size=8, length=30, window=8)
    assert packed.sum(-1).tolist() == [[3, 3, 3, 3, 3, 2, 1, 0], [0] * 8]


def test_no_context_and_no_anchors() -> None:
    for window in (None, 4):
        assert seen_by([0], block_size=4, length=0, window=window).shape == (1, 4, 0)
        assert not seen_by([0], block_size=4, length=5, window=window).any()
        none = torch.zeros(1, 0, dtype=torch.int64)
        plan = BlockPlan(anchors_BA=none, firsts_BA=none, block_size=4, window=window, causal=False)
        assert plan.context_visible(5).shape == (1, 0, 4, 5)


def test_the_own_block_is_seen_whole_or_up_to_the_slot() -> None:
    none = torch.zeros(1, 1, dtype=torch.int64)
    for causal in (False, True):
        plan = BlockPlan(anchors_BA=none, firsts_BA=none, block_size=3, window=None, causal=causal)
        assert plan.block_visible().tolist() == [[True, not causal, not causal], [True, True, not causal], [True, True, True]]


# --- which tokens can be anchors ---


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    documents: Tensor
    supervised: Tensor
    positions: Tensor


def random_row(seed: int, *, length: int = 60) -> Row:
    """Documents of 1 to 12 tokens, some without a prompt, supervision with gaps, padding at the end."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    documents, positions, supervised, number = [], [], [], 0
    while len(documents) < length - 8:
        size, prompt = draw(1, 13), draw(0, 5)
        documents += [number] * size
        positions += range(size)
        supervised += [i >= prompt and draw(0, 6) > 0 for i in range(size)]
        number += 1
    padding = length - len(documents)
    return Row(documents=torch.tensor([documents + [-1] * padding])[:, :length], positions=torch.tensor([positions + [0] * padding])[:, :length],
               supervised=torch.tensor([supervised + [False] * padding])[:, :length])


@pytest.mark.parametrize("seed", range(20))
def test_valid_anchors_are_those_of_the_rule(seed: int) -> None:
    row = random_row(seed)
    got = valid_anchors(row.documents, supervised_BS=row.supervised, positions_BS=row.positions)[0].tolist()
    d, s, p = (t[0].tolist() for t in (row.documents, row.supervised, row.positions))
    expected = [s[i] and p[i] > 0 and i + 1 < len(d) and d[i + 1] == d[i] and s[i + 1] for i in range(len(d))]
    assert got == expected
    assert any(expected) and not all(expected)


def test_valid_anchors_by_hand() -> None:
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2, 2, 3, -1, -1]])
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1, 0, 0, 0]])
    supervised = torch.tensor([[False, True, True, True, True, True, True, False, True, True, False, False]])
    got = valid_anchors(documents, supervised_BS=supervised, positions_BS=positions)
    # 3, 6 and 8 end their document, 4 begins one, 9 is alone
    assert got.nonzero()[:, 1].tolist() == [1, 2, 5]
    assert not valid_anchors(documents[:, :2], supervised_BS=supervised[:, :2], positions_BS=positions[:, :2]).any()   # the row ends


def test_rows_do_not_reach_into_each_other() -> None:
    rows = [random_row(s) for s in range(6)]
    d, s, p = (torch.cat([getattr(r, name) for r in rows]) for name in ("documents", "supervised", "positions"))
    together = valid_anchors(d, supervised_BS=s, positions_BS=p)
    for i, r in enumerate(rows):
        assert torch.equal(together[i:i + 1], valid_anchors(r.documents, supervised_BS=r.supervised, positions_BS=r.positions))


# --- drawing them ---


def generator_of(seed: int = 1, rank: int = 0, index: int = 0) -> torch.Generator:
    return anchor_generator(seed=seed, rank=rank, index=index, device=CPU)


@pytest.mark.parametrize("num_anchors", [1, 3, 8, 50, 51, 200])
def test_draws_are_valid_different_and_as_many_as_there_are(num_anchors: int) -> None:
    valid = torch.zeros(4, 50, dtype=torch.bool)
    valid[0, ::3] = True      # 17
    valid[1, 7] = True
    valid[3] = True           # and none in row 2
    for index in range(20):
        chosen, is_valid = draw_anchors(valid, num_anchors=num_anchors, generator=generator_of(index=index))
        assert chosen.shape == is_valid.shape == (4, min(num_anchors, 50)) and chosen.dtype == torch.int64 and is_valid.dtype == torch.bool
        for row, row_valid, of_row, count in zip(valid, is_valid, chosen, (17, 1, 0, 50), strict=True):
            good = of_row[row_valid].tolist()
            assert len(good) == min(count, num_anchors) == len(set(good))
            assert good == sorted(good) and all(bool(row[i]) for i in good)
            assert not of_row[~row_valid].any()   # index 0, so that gathering stays inside the row


def test_draws_are_those_of_their_key() -> None:
    valid = torch.ones(2, 300, dtype=torch.bool)
    keys = [(1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1), (0, 1, 0), (0, 0, 1), (10, 0, 0), (1, 10, 0), (11, 0, 0), (1, 1, 1), (2**62, 3, 10**9)]
    draws = {}
    for key in keys:
        draws[key], _ = draw_anchors(valid, num_anchors=64, generator=generator_of(*key))
        again, _ = draw_anchors(valid, num_anchors=64, generator=generator_of(*key))
        assert torch.equal(draws[key], again), key
    for i, a in enumerate(keys):
        for b in keys[:i]:
            shared = len(set(draws[a][0].tolist()) & set(draws[b][0].tolist()))
            # 64 of 300 twice: 13.7 shared by chance, standard deviation 2.9
            assert abs(shared - 13.7) < SIGMAS * 2.9, f"{a} and {b}"
    assert set(draws[keys[0]][0].tolist()) != set(draws[keys[0]][1].tolist())   # nor are the rows of one draw alike


def test_nothing_else_moves_the_draw_and_the_draw_moves_nothing_else() -> None:
    valid = torch.ones(1, 100, dtype=torch.bool)
    torch.manual_seed(0)
    first, _ = draw_anchors(valid, num_anchors=10, generator=generator_of())
    after = torch.rand(3)
    torch.manual_seed(1)
    torch.rand(17)
    assert torch.equal(draw_anchors(valid, num_anchors=10, generator=generator_of())[0], first)
    torch.manual_seed(0)
    assert torch.equal(torch.rand(3), after)


def test_every_valid_token_is_drawn_equally_often() -> None:
    valid = torch.zeros(50, 24, dtype=torch.bool)
    places = [1, 2, 3, 7, 8, 11, 15, 19, 22, 23]
    valid[:, places] = True
    num_anchors, draws = 4, 60
    counts = torch.zeros(24)
    for index in range(draws):
        chosen, is_valid = draw_anchors(valid, num_anchors=num_anchors, generator=generator_of(seed=5, index=index))
        assert is_valid.all()
        counts += chosen.flatten().bincount(minlength=24)
    trials, share = 50 * draws, num_anchors / len(places)
    assert int(counts.sum()) == trials * num_anchors == int(counts[places].sum())
    # counts of draws without replacement: variance of each is trials * share * (1 - share), and they sum to a constant
    freedom = len(places) - 1
    statistic = float(((counts[places] - trials * share) ** 2).sum()) / (trials * share * (1 - share)) * freedom / len(places)
    assert statistic < freedom + SIGMAS * math.sqrt(2 * freedom)
    pairs = torch.zeros(24, 24)
    for index in range(draws):
        hot = torch.zeros(50, 24).scatter(1, draw_anchors(valid, num_anchors=num_anchors, generator=generator_of(seed=6, index=index))[0], 1.0)
        pairs += hot.T @ hot
    expected = trials * share * (num_anchors - 1) / (len(places) - 1)   # of any two places
    for i, a in enumerate(places):
        for b in places[:i]:
            assert abs(float(pairs[a, b]) - expected) < SIGMAS * math.sqrt(expected), f"{a} and {b}"
