"""Anchors of packed rows: every document gets its share."""

import pytest
import torch
from torch import Tensor

from kilotok.dflash.anchors import anchor_generator, draw_anchors

SIGMAS = 5


def generator_of(index: int = 0) -> torch.Generator:
    return anchor_generator(seed=1, rank=0, index=index, device=torch.device("cpu"))


def packed(*sizes: int, padding: int) -> Tensor:
    return torch.tensor([[number for number, size in enumerate(sizes) for _ in range(size)] + [-1] * padding])


@pytest.mark.parametrize(("num_anchors", "shares"), [(3, (1, 1, 1)), (9, (3, 3, 3)), (12, (4, 4, 4)), (30, (15, 5, 10)), (55, (40, 5, 10)), (64, (40, 5, 10))])
def test_documents_of_a_row_get_the_same_share_as_far_as_they_reach(num_anchors: int, shares: tuple[int, ...]) -> None:
    """speculators#1071: drawn by token, long documents leave short ones without anchors."""
    documents = packed(40, 6, 10, padding=8)
    valid = documents >= 0
    valid[0, 45] = False
    chosen, is_valid = draw_anchors(valid, num_anchors=num_anchors, generator=generator_of(), documents_BS=documents)
    assert tuple(documents[0, chosen[0][is_valid[0]]].bincount(minlength=3).tolist()) == shares
    assert len(set(chosen[0][is_valid[0]].tolist())) == sum(shares) and bool(valid[0, chosen[0][is_valid[0]]].all())


def test_inside_a_document_every_token_has_the_same_chance() -> None:
    documents = packed(12, 3, padding=1).expand(200, -1)
    counts = torch.zeros(16)
    for index in range(20):
        chosen, is_valid = draw_anchors(documents >= 0, num_anchors=6, generator=generator_of(index=index), documents_BS=documents)
        counts += chosen[is_valid].bincount(minlength=16)
    assert counts[12:15].tolist() == [4000.0] * 3 and int(counts[:12].sum()) == 3 * 4000
    # 3 of 12 in 4,000 draws: 1,000 each, standard deviation 27
    assert all(abs(float(c) - 1000) < SIGMAS * 27.4 for c in counts[:12])


def test_what_is_not_valid_comes_last_and_stays_inside_the_row() -> None:
    documents = packed(5, padding=11)
    chosen, is_valid = draw_anchors(documents >= 0, num_anchors=8, generator=generator_of(), documents_BS=documents)
    assert is_valid[0].tolist() == [True] * 5 + [False] * 3 and chosen[0].tolist() == [0, 1, 2, 3, 4, 0, 0, 0]
