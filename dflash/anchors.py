"""Where the blocks of a training step start: random anchors, drawn on the device that needs them.

The generator is keyed by (seed, data-parallel rank, micro-batch index of the run): ranks draw different anchors without a
word between them, a resumed run draws what the uninterrupted one would have, and there is no state to save.

Legend: B rows, S tokens a row, A anchors a row.
"""

import hashlib

import torch
from torch import Tensor
from torch.nn import functional as F

from ..kernels.attention import padded_anchors


def valid_anchors(documents_BS: Tensor, *, supervised_BS: Tensor, positions_BS: Tensor) -> Tensor:
    """bool [B, S]: tokens a block can start at, as serving starts one.

    A response token with context before it, whose next token is in the same document and supervised.
    """
    following = torch.zeros_like(supervised_BS)
    following[:, :-1] = supervised_BS[:, 1:] & (documents_BS[:, 1:] == documents_BS[:, :-1])
    return supervised_BS & following & (positions_BS > 0)


def anchor_generator(*, seed: int, rank: int, index: int, device: torch.device) -> torch.Generator:
    """A generator that depends on nothing but its key."""
    key = hashlib.sha256(f"anchors {seed} {rank} {index}".encode()).digest()
    generator = torch.Generator(device=device)
    generator.manual_seed(int.from_bytes(key[:8], "little") % 2**63)
    return generator


def draw_anchors(valid_BS: Tensor, *, num_anchors: int, generator: torch.Generator, documents_BS: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Random anchors of each row, without replacement and without waiting for the device.

    Shapes: valid_BS bool; documents_BS int64. With documents every document of a row gets the same number of anchors, as far as it has so
        many valid tokens, and what short ones leave goes to the others: in a row of one long and many short documents an equal chance for every
        token would leave most of the short ones without any. Without documents every valid token has the same chance.
    Returns indices int64 [B, A], ascending where valid and the invalid ones last, and bool [B, A]: False where the row had fewer valid
        tokens than A (the index is then 0, and its block must not count). A is at most num_anchors and at least 1.
    """
    length = valid_BS.shape[1]
    count = min(num_anchors, length)
    scores = torch.rand(valid_BS.shape, generator=generator, device=valid_BS.device, dtype=torch.float64)
    if documents_BS is not None:
        scores = scores + _turn_in_document(valid_BS, documents_BS=documents_BS, scores_BS=scores)
    scores = scores.masked_fill(~valid_BS, torch.inf)
    chosen = scores.topk(count, dim=1, largest=False).indices
    chosen = chosen.masked_fill(~valid_BS.gather(1, chosen), length).sort(dim=1).values   # what is not valid goes behind
    is_valid = chosen < length
    return chosen.masked_fill(~is_valid, 0), is_valid


def _turn_in_document(valid_BS: Tensor, *, documents_BS: Tensor, scores_BS: Tensor) -> Tensor:
    """[B, S]: 0 for the valid token of each document that would be drawn first, 1 for the second, ..."""
    order = scores_BS.masked_fill(~valid_BS, 2.0).argsort(dim=1)
    by_document = documents_BS.gather(1, order).argsort(dim=1, stable=True)
    order = order.gather(1, by_document)                       # by document, and in it by score, with what is not valid last
    documents = documents_BS.gather(1, order)
    place = torch.arange(order.shape[1], device=order.device).expand_as(order)
    is_first = torch.ones_like(documents, dtype=torch.bool)
    is_first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    first = torch.where(is_first, place, 0).cummax(dim=1).values
    return torch.zeros_like(order).scatter_(1, order, place - first)


def fill_tiles(anchors_BA: Tensor, is_valid_BA: Tensor, *, block_size: int) -> tuple[Tensor, Tensor]:
    """Anchors and their validity with invalid ones added up to whole tiles, which the block mask wants; what is added counts for nothing."""
    more = padded_anchors(anchors_BA.shape[1], block_size=block_size) - anchors_BA.shape[1]
    return F.pad(anchors_BA, (0, more)), F.pad(is_valid_BA, (0, more))
