"""Which context the slots of a draft's blocks see, and the tiles of it that have to be looked at.

A block starts at its anchor, row index p. Its N slots sit at p .. p + N - 1; they see their own block, all of it or (causal) the slots
before them, and the context strictly before the anchor, from the first token of the anchor's document on. With a window W, the slot at q sees
context at k when q - k < W: the window slides with the slot. All of this is by row index: inside a document it differs from the position
by a constant.

On a GPU the rule is FlexAttention's mask over [context | slots of all blocks], and what a tile of 128 rows needs is worked out from its
anchors: the context tiles that one of its blocks sees, and the tiles with its own slots. The largest tensors are one flag per pair of tiles, and
per block of a row tile and context tile: 4096 anchors of 8 in a row of 4096 tokens cost 256 x 288 and 256 x 17 x 32 of them. Anchors should be
ascending, or a tile's blocks see many different tiles.

Legend: B rows, A anchors a row, N draft block length, S context tokens, Q row tiles, T key tiles.
Source: FlexAttention, arXiv 2412.05496, for block masks.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

TILE = 128


@dataclass(frozen=True)
class BlockPlan:
    """Blocks of a batch of rows for layers of one kind.

    anchors_BA: row index of the anchor; firsts_BA: first row index its slots may see; an anchor at its own `first` sees no context.
    mask: FlexAttention's block mask, on a GPU; None: attention is computed densely.
    """

    anchors_BA: Tensor
    firsts_BA: Tensor
    block_size: int
    window: int | None
    causal: bool
    mask: Any = None

    def context_visible(self, length: int) -> Tensor:
        """bool [B, A, N, S]: what every slot sees of a context of `length` tokens."""
        index_S = torch.arange(length, device=self.anchors_BA.device)
        visible_BAS = (index_S < self.anchors_BA.unsqueeze(-1)) & (index_S >= self.firsts_BA.unsqueeze(-1))
        if self.window is None:
            return visible_BAS.unsqueeze(2).expand(-1, -1, self.block_size, -1)
        slots_N = torch.arange(self.block_size, device=index_S.device)
        place_BAN = self.anchors_BA.unsqueeze(-1) + slots_N
        return visible_BAS.unsqueeze(2) & (place_BAN.unsqueeze(-1) - index_S < self.window)

    def block_visible(self) -> Tensor:
        """bool [N, N]: what every slot sees of its own block."""
        every = torch.ones(self.block_size, self.block_size, dtype=torch.bool, device=self.anchors_BA.device)
        return every.tril() if self.causal else every


def block_plan(anchors_BA: Tensor, *, firsts_BA: Tensor, block_size: int, length: int, window: int | None, causal: bool, flex: bool) -> BlockPlan:
    """The plan of a batch.

    Shapes: anchors_BA, firsts_BA int64 in 0..length. flex: with the block mask for a GPU, made there without waiting for the device.
    Errors: ValueError for rows that do not fill whole tiles with `flex`: length and A * block_size must be multiples of 128.
    """
    if not flex:
        return BlockPlan(anchors_BA=anchors_BA, firsts_BA=firsts_BA, block_size=block_size, window=window, causal=causal)
    rows = anchors_BA.shape[1] * block_size
    if length % TILE or rows % TILE:
        raise ValueError(f"block_plan: rows of context and of slots must be multiples of {TILE}; got {length} and {rows}. Pad the row and the anchors.")
    mask = _block_mask(anchors_BA, firsts_BA=firsts_BA, block_size=block_size, length=length, window=window, causal=causal)
    return BlockPlan(anchors_BA=anchors_BA, firsts_BA=firsts_BA, block_size=block_size, window=window, causal=causal, mask=mask)


def padded_anchors(count: int, *, block_size: int) -> int:
    """The least number of anchors from `count` on whose slots fill whole tiles."""
    step = TILE
    while step % 2 == 0 and (step // 2 * block_size) % TILE == 0:
        step //= 2
    return -(-count // step) * step


def tile_runs(anchors_BA: Tensor, *, firsts_BA: Tensor, block_size: int, length: int, window: int | None) -> tuple[Tensor, Tensor]:
    """(partial, whole): bool [B, Q, T], the key tiles of which a row tile sees something, and those of which every row sees everything.

    Key tiles: those of the context, then those of all slots.
    """
    batch, anchors = anchors_BA.shape
    device = anchors_BA.device
    row_tiles, context_tiles = anchors * block_size // TILE, length // TILE
    start_Q = torch.arange(row_tiles, device=device) * TILE
    first_Q, last_Q = start_Q // block_size, (start_Q + TILE - 1) // block_size          # blocks with a slot in the tile
    span = -(-TILE // block_size) + 1
    member_QM = (first_Q[:, None] + torch.arange(span, device=device)).clamp(max=last_Q[:, None])
    anchor = anchors_BA[:, member_QM]                                                     # B Q M
    widest = firsts_BA[:, member_QM]
    narrowest = widest
    if window is not None:
        widest = torch.maximum(widest, anchor - window + 1)
        narrowest = torch.maximum(firsts_BA[:, member_QM], anchor + block_size - window)
    begin_T = torch.arange(context_tiles, device=device) * TILE
    sees_BQMT = (begin_T < anchor.unsqueeze(-1)) & (begin_T + TILE > widest.unsqueeze(-1)) & (anchor > widest).unsqueeze(-1)
    partial = sees_BQMT.any(2)
    whole = (begin_T >= narrowest.amax(-1, keepdim=True)) & (begin_T + TILE <= anchor.amin(-1, keepdim=True))
    slot_T = torch.arange(row_tiles, device=device) * TILE
    own = (slot_T < (last_Q[:, None] + 1) * block_size) & (slot_T + TILE > first_Q[:, None] * block_size)
    own = own.expand(batch, -1, -1)
    return torch.cat((partial & ~whole, own), dim=-1), torch.cat((whole, torch.zeros_like(own)), dim=-1)


def _block_mask(anchors_BA: Tensor, *, firsts_BA: Tensor, block_size: int, length: int, window: int | None, causal: bool) -> Any:
    partial, whole = tile_runs(anchors_BA, firsts_BA=firsts_BA, block_size=block_size, length=length, window=window)
    anchors, firsts = anchors_BA.int().contiguous(), firsts_BA.int().contiguous()

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        block, slot = q // block_size, q % block_size
        anchor = anchors[b, block]
        context = (k < anchor) & (k >= firsts[b, block])   # k < anchor <= length: no slot is taken for context
        if window is not None:
            context = context & (anchor + slot - k < window)
        own = (k >= length) & ((k - length) // block_size == block)
        if causal:
            own = own & ((k - length) % block_size <= slot)
        return context | own

    rows = anchors_BA.shape[1] * block_size
    return BlockMask.from_kv_blocks(*_ordered(partial), *_ordered(whole), BLOCK_SIZE=TILE, mask_mod=sees, seq_lengths=(rows, length + rows))


def _ordered(tiles_BQT: Tensor) -> tuple[Tensor, Tensor]:
    """(how many, which first), as FlexAttention wants them: int32 [B, 1, Q] and [B, 1, Q, T]."""
    which = (~tiles_BQT).to(torch.int8).argsort(dim=-1, stable=True).int()
    return tiles_BQT.sum(-1, dtype=torch.int32).unsqueeze(1).contiguous(), which.unsqueeze(1).contiguous()
