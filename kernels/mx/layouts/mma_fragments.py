"""MXFP4 weights in the order in which the tensor core's lanes hold them, so that a product loads and never shuffles.

The product reads a weight [rows, depth] as A fragments of mma.m16n8k16. A step is 64 input columns (two MX blocks) of a row
tile of 16 rows: 512 bytes of codes and 32 of scales, of which lane 4g + t (g 0..7, t 0..3) owns four words. Word 2b + q holds,
of MX block b of the step, columns k = 32b + 8t + 4q + {0, 1, 2, 3} of rows g and g + 8:

    register   rows    columns      sign bit   magnitude bits     in each 16-bit half: the lower one has the even column
    a0         g       k, k + 1     15         8:6
    a1         g + 8   k, k + 1     12         5:3
    a2         g       k + 2, + 3   14         2:0
    a3         g + 8   k + 2, + 3   13         11:9

so that one mask and a shift bring each register's code into bits 15, 8:6 of both halves: a bf16 number, code * 2**-126. With this
order of k the B fragment of an MX block is 16 contiguous bytes of a row-major bf16 activation.

Scales: one word a step and quad of lanes, the bytes [row g block 0 | row g + 8 block 0 | row g block 1 | row g + 8 block 1] with
the first on top, rotated right by one, so that the first byte lies where fp32 has its exponent.

The `num_warps` warps that share a stage are split two ways: `depth_warps` along the input, each with `num_steps` consecutive
steps, and the rest along the rows, one row tile each. A unit is one step of every warp; a group is all steps of its row tiles:

    codes    [group][step][row warp][depth warp][lane][4 words]
    scales   [group][step / n][row warp][depth warp][g][n words], n the greatest common divisor of num_steps and 4

Rows and input that do not fill the last group or the last warp are padded with code 0 and scale 0. The pad is memory that a
product reads: `pad_bytes` counts it. Everything here is a permutation of bits in plain torch, on any device.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..format import MAX_EXACT_SCALE, MX_BLOCK_SIZE
from ..pack import pack_codes_ref, unpack_codes_ref

RowPairs = Literal["none", "split", "interleaved"]

TILE_ROWS = 16
STEP_DEPTH = 64
NUM_WARPS = 8                        # eight consumer warps and a producer are what an H200 SM was measured to want
MAX_STEPS = 12                       # a warp keeps the activations of its steps in registers, 8 each
_WORDS_PER_LANE = 4
_SIGN_BITS = (15, 12, 14, 13)        # of a0..a3; see the table above
_MAGNITUDE_BITS = (6, 3, 0, 9)


@dataclass(frozen=True, kw_only=True)
class FragmentLayout:
    """Where every code and scale of one weight lies."""

    rows: int
    depth: int                       # input dimension, a multiple of 32
    depth_warps: int                 # warps that share a row tile, each with a part of the input
    num_steps: int                   # k64 steps of one warp
    num_warps: int = NUM_WARPS

    def __post_init__(self) -> None:
        where = "FragmentLayout"
        if self.rows < 0 or self.depth < 0 or self.depth % MX_BLOCK_SIZE:
            raise ValueError(f"{where}: depth must be a multiple of {MX_BLOCK_SIZE}, one MX block, and rows not negative; got {self.rows} x {self.depth}.")
        for name, value in (("num_warps", self.num_warps), ("depth_warps", self.depth_warps)):
            if value < 1 or value & (value - 1):
                raise ValueError(f"{where}: {name} must be a power of two; got {value}.")
        if self.num_warps < 2 or self.num_warps % self.depth_warps:
            raise ValueError(f"{where}: depth_warps must divide num_warps, which is at least 2; got {self.depth_warps} of {self.num_warps}.")
        if not 1 <= self.num_steps <= MAX_STEPS:
            raise NotImplementedError(f"{where}: a warp holds 1 to {MAX_STEPS} steps of activations in registers; got {self.num_steps}. "
                                      "Split the input over more warps.")
        if self.depth_warps * self.num_steps * STEP_DEPTH < self.depth:
            raise ValueError(f"{where}: depth_warps * num_steps * {STEP_DEPTH} must cover depth; got "
                             f"{self.depth_warps} * {self.num_steps} * {STEP_DEPTH} < {self.depth}.")

    @property
    def row_warps(self) -> int:
        return self.num_warps // self.depth_warps

    @property
    def group_rows(self) -> int:
        return TILE_ROWS * self.row_warps

    @property
    def num_groups(self) -> int:
        return -(-self.rows // self.group_rows)

    @property
    def padded_depth(self) -> int:
        return self.depth_warps * self.num_steps * STEP_DEPTH

    @property
    def scale_words(self) -> int:
        """Steps whose scales one lane loads at once."""
        return math.gcd(self.num_steps, 4)

    @property
    def num_units(self) -> int:
        return self.num_groups * self.num_steps

    @property
    def unit_code_words(self) -> int:
        return self.num_warps * 32 * _WORDS_PER_LANE

    @property
    def unit_scale_words(self) -> int:
        return self.num_warps * 8

    @property
    def num_bytes(self) -> int:
        """What a product of all rows reads."""
        return 4 * self.num_units * (self.unit_code_words + self.unit_scale_words)

    @property
    def pad_bytes(self) -> int:
        """The part of `num_bytes` that no weight needs."""
        return self.num_bytes - self.rows * self.depth // MX_BLOCK_SIZE * (MX_BLOCK_SIZE // 2 + 1)


def choose_layout(rows: int, depth: int, *, num_warps: int = NUM_WARPS, max_steps: int = MAX_STEPS) -> FragmentLayout:
    """The layout of least bytes; among equals the fewest warps along the input that leave each at most 4 steps, else the fewest steps.

    Fewer warps along the input mean fewer partial sums; more than 4 steps cost registers. max_steps: what the kernel has registers for.
    """
    depth_steps = max(1, -(-depth // STEP_DEPTH))
    candidates = []
    for power in range(num_warps.bit_length()):
        num_steps = -(-depth_steps // (1 << power))
        if num_steps <= max_steps:
            candidates.append(FragmentLayout(rows=rows, depth=depth, depth_warps=1 << power, num_steps=num_steps, num_warps=num_warps))
    if not candidates:
        raise NotImplementedError(f"choose_layout: the input of {num_warps} warps is at most {num_warps * max_steps * STEP_DEPTH} columns; got {depth}. "
                                  "Use more warps.")
    return min(candidates, key=lambda c: (c.num_bytes, c.num_steps > 4, c.depth_warps if c.num_steps <= 4 else -c.depth_warps))


@dataclass(frozen=True, kw_only=True)
class FragmentWeight:
    """Packed weights of one layout: codes_LW int32 [..., units * unit_code_words], scales_LW int32 [..., units * unit_scale_words]."""

    codes: Tensor
    scales: Tensor
    layout: FragmentLayout
    pairs: RowPairs = "none"


def row_order(rows: int, *, pairs: RowPairs, device: torch.device | str = "cpu") -> Tensor:
    """The checkpoint row that each packed row holds, int64 [rows].

    In a pair of gate and up, row r < 8 of tile i is gate channel 8i + r and row r + 8 the up channel of the same number, so that
    the two sums of a channel are in one lane. `split` has all gate rows first, `interleaved` (gpt-oss) gate and up in turn.
    """
    order = torch.arange(rows, device=device)
    if pairs == "none":
        return order
    if pairs not in ("split", "interleaved"):
        raise ValueError(f"row_order: pairs must be none, split or interleaved; got {pairs!r}.")
    if rows % TILE_ROWS:
        raise ValueError(f"row_order: gate and up rows must fill tiles of {TILE_ROWS}; got {rows} rows. Expert channels must be a multiple of 8.")
    channel, is_up = order // TILE_ROWS * 8 + order % 8, order % TILE_ROWS // 8
    return channel + is_up * (rows // 2) if pairs == "split" else 2 * channel + is_up


def pack_fragments(blocks: Tensor, scales: Tensor, *, layout: FragmentLayout, pairs: RowPairs = "none") -> FragmentWeight:
    """Checkpoint order to fragment order.

    Shapes: blocks uint8 [..., rows, Q, 16], scales uint8 [..., rows, Q], Q = depth / 32. Leading dimensions (experts) are kept.
    Errors: ValueError for shapes that are not the layout's and for a scale byte above 252 (255 is NaN, and a product would read it
        as infinity). A block of scale byte 0 is read by a product as zeros: 2**-127 is no normal fp32 number.
    Cost: one expert at a time; the temporaries are about twenty times its packed bytes.
    """
    where = "pack_fragments"
    expected = (layout.rows, layout.depth // MX_BLOCK_SIZE)
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise TypeError(f"{where}: blocks and scales must be uint8; got {blocks.dtype} and {scales.dtype}.")
    if blocks.shape != (*scales.shape, 16) or tuple(scales.shape[-2:]) != expected:
        raise ValueError(f"{where}: blocks must be [..., {expected[0]}, {expected[1]}, 16] with scales of the same leading shape; "
                         f"got {tuple(blocks.shape)} and {tuple(scales.shape)}.")
    if scales.numel() and int(scales.max()) > MAX_EXACT_SCALE:
        index = tuple(int(i) for i in (scales > MAX_EXACT_SCALE).nonzero()[0])
        raise ValueError(f"{where}: scale bytes must be at most {MAX_EXACT_SCALE}; got {int(scales[index])} at index {index}. "
                         "The checkpoint is damaged or not MXFP4.")
    order = row_order(layout.rows, pairs=pairs, device=blocks.device)
    leading = scales.shape[:-2]
    num = leading.numel()
    codes = torch.empty(num, layout.num_units * layout.unit_code_words, dtype=torch.int32, device=blocks.device)
    words = torch.empty(num, layout.num_units * layout.unit_scale_words, dtype=torch.int32, device=blocks.device)
    flat_blocks, flat_scales = blocks.reshape(num, *expected, 16), scales.reshape(num, *expected)
    for i in range(num):
        codes[i] = _pack_codes(unpack_codes_ref(flat_blocks[i, order]).flatten(-2), layout)
        words[i] = _pack_scales(flat_scales[i, order], layout)
    return FragmentWeight(codes=codes.view(*leading, -1) if num else codes.view(*leading, codes.shape[1]),
                          scales=words.view(*leading, -1) if num else words.view(*leading, words.shape[1]), layout=layout, pairs=pairs)


def unpack_fragments(weight: FragmentWeight) -> tuple[Tensor, Tensor]:
    """Fragment order to checkpoint order: the exact inverse of `pack_fragments`; returns blocks and scales."""
    layout = weight.layout
    leading = weight.codes.shape[:-1]
    num, mx_blocks = leading.numel(), layout.depth // MX_BLOCK_SIZE
    order = row_order(layout.rows, pairs=weight.pairs, device=weight.codes.device)
    blocks = torch.empty(num, layout.rows, mx_blocks, 16, dtype=torch.uint8, device=weight.codes.device)
    scales = torch.empty(num, layout.rows, mx_blocks, dtype=torch.uint8, device=weight.codes.device)
    flat_codes, flat_scales = weight.codes.reshape(num, weight.codes.shape[-1]), weight.scales.reshape(num, weight.scales.shape[-1])
    for i in range(num):
        codes = _unpack_codes(flat_codes[i], layout)[: layout.rows, : layout.depth]
        blocks[i, order] = pack_codes_ref(codes.reshape(layout.rows, mx_blocks, MX_BLOCK_SIZE))
        scales[i, order] = _unpack_scales(flat_scales[i], layout)[: layout.rows, :mx_blocks]
    return blocks.view(*leading, layout.rows, mx_blocks, 16), scales.view(*leading, layout.rows, mx_blocks)


def _pad(matrix: Tensor, rows: int, columns: int) -> Tensor:
    padded = matrix.new_zeros(rows, columns)
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix
    return padded


# Axes of a padded weight: group, row warp, half (rows g, g + 8), g, depth warp, step, MX block of the step, and, of codes only, t, q,
# pair of columns (a0/a1 or a2/a3), column of the pair (16-bit half).
def _pack_codes(codes: Tensor, layout: FragmentLayout) -> Tensor:
    padded = _pad(codes, layout.num_groups * layout.group_rows, layout.padded_depth)
    axes = padded.view(layout.num_groups, layout.row_warps, 2, 8, layout.depth_warps, layout.num_steps, 2, 4, 2, 2, 2).to(torch.int32)
    words = torch.zeros_like(axes[:, :, 0, ..., 0, 0])
    for half, pair, column, sign_bit, magnitude_bit in _places():
        code = axes[:, :, half, ..., pair, column]
        words |= ((code >> 3) << sign_bit) | ((code & 7) << magnitude_bit)
    return words.permute(0, 4, 1, 3, 2, 6, 5, 7).reshape(-1)   # group, step, row warp, depth warp, g, t, block, q


def _unpack_codes(words: Tensor, layout: FragmentLayout) -> Tensor:
    axes = words.view(layout.num_groups, layout.num_steps, layout.row_warps, layout.depth_warps, 8, 4, 2, 2).permute(0, 2, 4, 3, 1, 6, 5, 7)
    codes = words.new_empty(layout.num_groups, layout.row_warps, 2, 8, layout.depth_warps, layout.num_steps, 2, 4, 2, 2, 2, dtype=torch.uint8)
    for half, pair, column, sign_bit, magnitude_bit in _places():
        codes[:, :, half, ..., pair, column] = (((axes >> sign_bit) & 1) << 3 | ((axes >> magnitude_bit) & 7)).to(torch.uint8)
    return codes.view(layout.num_groups * layout.group_rows, layout.padded_depth)


def _places() -> list[tuple[int, int, int, int, int]]:
    """Half, pair and column of each of a word's eight codes, and the bits of its sign and of its magnitude's lowest bit."""
    return [(half, pair, column, _SIGN_BITS[half + 2 * pair] + 16 * column, _MAGNITUDE_BITS[half + 2 * pair] + 16 * column)
            for half in range(2) for pair in range(2) for column in range(2)]


def _pack_scales(scales: Tensor, layout: FragmentLayout) -> Tensor:
    padded = _pad(scales, layout.num_groups * layout.group_rows, layout.padded_depth // MX_BLOCK_SIZE)
    axes = padded.view(layout.num_groups, layout.row_warps, 2, 8, layout.depth_warps, layout.num_steps, 2).to(torch.int32)
    words = (axes[:, :, 0, ..., 0] << 24) | (axes[:, :, 1, ..., 0] << 16) | (axes[:, :, 0, ..., 1] << 8) | axes[:, :, 1, ..., 1]
    words = ((words >> 1) & 0x7FFFFFFF) | (words << 31)
    steps: Tensor = words.unflatten(-1, (layout.num_steps // layout.scale_words, layout.scale_words))
    return steps.permute(0, 4, 1, 3, 2, 5).reshape(-1)         # group, step group, row warp, depth warp, g, step of the group


def _unpack_scales(words: Tensor, layout: FragmentLayout) -> Tensor:
    axes = words.view(layout.num_groups, layout.num_steps // layout.scale_words, layout.row_warps, layout.depth_warps, 8, layout.scale_words)
    axes = axes.permute(0, 2, 4, 3, 1, 5).flatten(-2)          # group, row warp, g, depth warp, step
    axes = (axes << 1) | ((axes >> 31) & 1)
    top = torch.stack([(axes >> 24) & 255, (axes >> 8) & 255], dim=-1)
    bottom = torch.stack([(axes >> 16) & 255, axes & 255], dim=-1)
    return torch.stack([top, bottom], dim=2).to(torch.uint8).view(layout.num_groups * layout.group_rows, layout.padded_depth // MX_BLOCK_SIZE)
