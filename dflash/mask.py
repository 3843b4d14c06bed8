"""Which context a slot sees: the one definition that training, drafting and serving share.

A block starts at its anchor, at position p. Its slots sit at p .. p + N - 1 and see each other, all of them, and the context
strictly before the anchor: the anchor's own features do not exist yet when the block is drafted. With a sliding window W,
the slot at q sees context at k when q - k < W, so the window slides with the slot. In a packed row a block sees its own
document alone.

Legend: A anchors, N draft block length, S context tokens.
"""

import torch
from torch import Tensor


def context_visible(anchors_A: Tensor, *, block_size: int, context_positions_S: Tensor, window: int | None) -> Tensor:
    """bool [..., A, N, S]: slot n of the block at an anchor sees a context token, both by position inside their document.

    Shapes: anchors_A [..., A] and context_positions_S [..., S], with the same leading dimensions.
    """
    distance_AS = anchors_A.unsqueeze(-1) - context_positions_S.unsqueeze(-2)
    visible_AS = distance_AS > 0
    if window is None:
        return visible_AS.unsqueeze(-2).expand(*visible_AS.shape[:-1], block_size, visible_AS.shape[-1])
    slots_N = torch.arange(block_size, device=anchors_A.device)
    return visible_AS.unsqueeze(-2) & (distance_AS.unsqueeze(-2) + slots_N.unsqueeze(-1) < window)
