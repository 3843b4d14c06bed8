"""Where the blocks of a training step start: random anchors, drawn on the device that needs them.

The generator is keyed by (seed, data-parallel rank, micro-batch index of the run): ranks draw different anchors without a
word between them, a resumed run draws what the uninterrupted one would have, and there is no state to save.

Legend: B rows, S tokens a row, A anchors a row.
"""

import hashlib

import torch
from torch import Tensor


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


def draw_anchors(valid_BS: Tensor, *, num_anchors: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random anchors of each row, without replacement.

    Shapes: valid_BS bool. Returns indices int64 [B, A], ascending where valid, and bool [B, A]: False where the row had fewer valid
        tokens than A (the index is then 0, and its block must not count). A is at most num_anchors and at least 1.
    """
    count = min(num_anchors, valid_BS.shape[1])
    scores = torch.rand(valid_BS.shape, generator=generator, device=valid_BS.device)
    chosen = scores.masked_fill(~valid_BS, -1.0).topk(count, dim=1).indices.sort(dim=1).values
    is_valid = valid_BS.gather(1, chosen)
    return chosen.masked_fill(~is_valid, 0), is_valid
