"""bf16 weights in the order in which the tensor core's lanes hold them: a dense product loads 16 bytes a lane and multiplies.

The product reads a weight [rows, depth] as A fragments of mma.m16n8k16. A block is 32 input columns of a row tile of 16 rows, two
MMAs, each 512 bytes of weights, of which lane 4g + t (g 0..7, t 0..3) owns 16 contiguous bytes, its four registers. MMA q of a block holds

    register   rows    columns of the block        the lower half of a register has the even column
    a0         g       8t + 4q,     8t + 4q + 1
    a1         g + 8   8t + 4q,     8t + 4q + 1
    a2         g       8t + 4q + 2, 8t + 4q + 3
    a3         g + 8   8t + 4q + 2, 8t + 4q + 3

With this order of columns the B fragment of a block is 16 contiguous bytes of a row-major bf16 activation, x[g][32 * block + 8t .. + 7]:
words 0 and 1 are MMA 0's, words 2 and 3 MMA 1's. It is the order of `mx/layouts/mma_fragments.py`, so both kinds of weights take the same x.

The input is cut three times: into `splits`, whose sums leave the product apart and are added by whoever reads them; into `pairs`, the
halves that the two consumers of an SM take, and that one of them adds; and over `depth_warps` of a consumer's eight warps, each with
`num_blocks` consecutive blocks. The other warps are row tiles. A unit is one MMA of every warp, 4096 bytes, as large as a unit of
expert codes, so that one ring of slots can hold either:

    [split][group of rows][pair][block][q][row warp][depth warp][lane][4 words]

Rows and input that do not fill the last group or warp are padded with zeros. The pad is memory that a product reads: `pad_bytes`
counts it. Everything here is a permutation in plain torch, on any device.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

TILE_ROWS = 16
BLOCK_DEPTH = 32
NUM_WARPS = 8
UNIT_BYTES = NUM_WARPS * 512
MAX_BLOCKS = 12            # a warp keeps the activations of its blocks in registers, 4 each
H200_SMS = 132


@dataclass(frozen=True, kw_only=True)
class DenseLayout:
    """Where every weight of a matrix lies."""

    rows: int
    depth: int             # input dimension, a multiple of 32
    depth_warps: int       # warps of a consumer that share a row tile, each with a part of the input
    num_blocks: int        # blocks of one warp
    pairs: int = 1         # 2: the two consumers of an SM share a row tile
    splits: int = 1        # parts of the input whose sums are stored apart
    rolled: bool = False   # for rolled_dense.py, which keeps activations in shared memory

    def __post_init__(self) -> None:
        where = "DenseLayout"
        if self.rows < 1 or self.depth < 1 or self.depth % BLOCK_DEPTH:
            raise ValueError(f"{where}: depth must be a multiple of {BLOCK_DEPTH} and rows positive; got {self.rows} x {self.depth}.")
        if self.depth_warps not in (1, 2, 4, 8):
            raise ValueError(f"{where}: depth_warps must be 1, 2, 4 or 8; got {self.depth_warps}.")
        if self.pairs not in (1, 2) or self.splits < 1:
            raise ValueError(f"{where}: pairs must be 1 or 2 and splits at least 1; got {self.pairs} and {self.splits}.")
        if self.rolled and (self.depth_warps != NUM_WARPS or self.pairs != 1):
            raise ValueError(f"{where}: rolled products have all warps along the input and no pairs; got {self.depth_warps} and {self.pairs}.")
        if self.num_blocks < 1 or (self.num_blocks > MAX_BLOCKS and not self.rolled):
            raise NotImplementedError(f"{where}: a warp holds 1 to {MAX_BLOCKS} blocks of activations in registers; got {self.num_blocks}. "
                                      "Split the input over more warps, or in pairs.")
        if self.padded_depth < self.depth:
            raise ValueError(f"{where}: splits * pairs * depth_warps * num_blocks * {BLOCK_DEPTH} must cover depth; got {self.padded_depth} < {self.depth}.")

    @property
    def row_warps(self) -> int:
        return NUM_WARPS // self.depth_warps

    @property
    def group_rows(self) -> int:
        return TILE_ROWS * self.row_warps

    @property
    def num_groups(self) -> int:
        return -(-self.rows // self.group_rows)

    @property
    def padded_depth(self) -> int:
        return self.splits * self.pairs * self.depth_warps * self.num_blocks * BLOCK_DEPTH

    @property
    def num_items(self) -> int:
        """What is dealt out: groups of rows with a split of the input. A pair of consumers works on one together."""
        return self.splits * self.num_groups

    @property
    def item_bytes(self) -> int:
        """What one consumer reads for one item."""
        return 2 * self.num_blocks * UNIT_BYTES

    @property
    def num_units(self) -> int:
        return self.num_items * self.pairs * self.num_blocks * 2

    @property
    def num_bytes(self) -> int:
        """What a product reads."""
        return self.num_units * UNIT_BYTES

    @property
    def pad_bytes(self) -> int:
        """The part of `num_bytes` that no weight needs."""
        return self.num_bytes - 2 * self.rows * self.depth

    def busiest_bytes(self, programs: int) -> tuple[int, int]:
        """What the SM with the most reads, and the consumer with the most."""
        items = -(-self.num_items // programs)
        if self.pairs == 2:
            return items * 2 * self.item_bytes, items * self.item_bytes
        return items * self.item_bytes, -(-self.num_items // (2 * programs)) * self.item_bytes


def choose_dense_layout(rows: int, depth: int, *, max_splits: int = 1, min_splits: int = 1, programs: int = H200_SMS) -> DenseLayout:
    """The layout whose busiest SM reads least, with `min_splits` to `max_splits` sums that the reader adds.

    Among equals: no consumer with more than two thirds of its SM's bytes, the fewest bytes in all, each consumer with rows of its own, the fewest
    splits, the most warps along the input. Errors: NotImplementedError for an input that does not fit the registers of a pair.
    """
    blocks = -(-depth // BLOCK_DEPTH)
    candidates = []
    for splits in range(min_splits, max_splits + 1):
        for pairs in (1, 2):
            for depth_warps in (1, 2, 4, 8):
                num_blocks = max(1, -(-blocks // (splits * pairs * depth_warps)))
                if num_blocks <= MAX_BLOCKS:
                    candidates.append(DenseLayout(rows=rows, depth=depth, depth_warps=depth_warps, num_blocks=num_blocks, pairs=pairs, splits=splits))
    if not candidates:
        raise NotImplementedError(f"choose_dense_layout: the input of a pair of consumers is at most {2 * NUM_WARPS * MAX_BLOCKS * BLOCK_DEPTH} columns "
                                  f"a split; got {depth} with max_splits={max_splits}. Allow more splits.")

    def cost(layout: DenseLayout) -> tuple[int, bool, int, int, int, int]:
        sm, consumer = layout.busiest_bytes(programs)
        return sm, 3 * consumer > 2 * sm, layout.num_bytes, layout.pairs, layout.splits, -layout.depth_warps

    return min(candidates, key=cost)


def choose_rolled_layout(rows: int, depth: int, *, max_splits: int = 1, programs: int = H200_SMS) -> DenseLayout:
    """The same for rolled_dense.py and two consumers an SM: the busiest consumer reads least, then the fewest splits.

    A split has two blocks a warp or more, and takes no more pad than the whole.
    """
    whole = -(-depth // (BLOCK_DEPTH * NUM_WARPS))
    candidates = [DenseLayout(rows=rows, depth=depth, depth_warps=NUM_WARPS, num_blocks=num_blocks, splits=splits, rolled=True)
                  for splits in range(1, max_splits + 1) if whole % splits == 0 and ((num_blocks := whole // splits) >= 2 or splits == 1)]
    return min(candidates, key=lambda layout: (-(-layout.num_items // (2 * programs)) * layout.item_bytes, layout.num_bytes, layout.splits))


@dataclass(frozen=True, kw_only=True)
class DenseWeight:
    """Packed weights of one layout: words int32 [..., units * 1024]. Matrices of one layout, such as those of all layers, lie one after the other."""

    words: Tensor
    layout: DenseLayout

    def matrix(self, number: int) -> "DenseWeight":
        """One of those that lie one after the other: the same memory."""
        return DenseWeight(words=self.words.view(-1, self.layout.num_bytes // 4)[number], layout=self.layout)


# Axes of a padded weight: group, row warp, half (rows g, g + 8), g, split, pair, depth warp, block, t, q, pair of columns, column of the pair.
# In memory: split, group, pair, block, q, row warp, depth warp, g, t, pair of columns, half, column of the pair.
_ORDER = (4, 0, 5, 7, 9, 1, 6, 3, 8, 10, 2, 11)
_INVERSE = tuple(_ORDER.index(i) for i in range(len(_ORDER)))


def _axes(layout: DenseLayout) -> tuple[int, ...]:
    return (layout.num_groups, layout.row_warps, 2, 8, layout.splits, layout.pairs, layout.depth_warps, layout.num_blocks, 4, 2, 2, 2)


def pack_dense(weight: Tensor, *, layout: DenseLayout) -> DenseWeight:
    """Checkpoint order to fragment order.

    Shapes: weight bf16 [..., rows, depth]. Leading dimensions (layers) are kept.
    Errors: TypeError for another dtype (a packed weight is exact: convert before), ValueError for a shape that is not the layout's.
    Cost: one matrix at a time, with a temporary of its packed size.
    """
    where = "pack_dense"
    if weight.dtype != torch.bfloat16:
        raise TypeError(f"{where}: weight must be bf16; got {weight.dtype}. Round it first.")
    if weight.dim() < 2 or tuple(weight.shape[-2:]) != (layout.rows, layout.depth):
        raise ValueError(f"{where}: weight must be [..., {layout.rows}, {layout.depth}]; got {tuple(weight.shape)}.")
    leading = weight.shape[:-2]
    num = leading.numel()
    words = torch.empty(num, layout.num_bytes // 4, dtype=torch.int32, device=weight.device)
    for i, matrix in enumerate(weight.reshape(num, layout.rows, layout.depth)):
        padded = matrix.new_zeros(layout.num_groups * layout.group_rows, layout.padded_depth)
        padded[: layout.rows, : layout.depth] = matrix
        words[i] = padded.view(_axes(layout)).permute(_ORDER).reshape(-1).view(torch.int32)
    return DenseWeight(words=words.view(*leading, layout.num_bytes // 4), layout=layout)


def unpack_dense(weight: DenseWeight) -> Tensor:
    """Fragment order to checkpoint order: the exact inverse of `pack_dense`."""
    layout = weight.layout
    leading = weight.words.shape[:-1]
    flat = weight.words.reshape(leading.numel(), layout.num_bytes // 4)
    axes = _axes(layout)
    matrices = flat.new_empty(len(flat), layout.rows, layout.depth, dtype=torch.bfloat16)
    for i, words in enumerate(flat):
        padded = words.view(torch.bfloat16).view([axes[a] for a in _ORDER]).permute(_INVERSE).reshape(layout.num_groups * layout.group_rows, -1)
        matrices[i] = padded[: layout.rows, : layout.depth]
    return matrices.view(*leading, layout.rows, layout.depth)
