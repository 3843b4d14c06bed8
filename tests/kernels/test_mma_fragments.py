"""MMA fragment order: exact round trips, and packed words read by the rules of the instruction, one weight at a time."""

import struct

import pytest
import torch
from cases import CODE_VALUES
from tolerances import assert_equal
from torch import Tensor

from kilotok.kernels.mx import dequantize_mxfp4_ref
from kilotok.kernels.mx.layouts import FragmentLayout, RowPairs, choose_layout, pack_fragments, row_order, unpack_fragments

# rows, depth, depth_warps, num_steps, num_warps; the comment says what the shape stands for
LAYOUTS = [
    (64, 2048, 8, 4, 8),     # Qwen3 gate and up: scales four steps a word
    (96, 768, 4, 3, 8),      # its down: two row warps
    (128, 256, 1, 4, 8),     # a tensor-parallel slice: no partial sums
    (32, 2880, 8, 6, 8),     # gpt-oss: 45 steps padded to 48
    (576, 384, 2, 3, 8),     # SmolLM2-MoE down: rows that fill 9 groups
    (48, 576, 1, 9, 8),      # rows padded to 128
    (16, 32, 1, 1, 2),       # half a step
    (17, 96, 2, 1, 4),       # a row more than a tile
]
PAIRS: tuple[RowPairs, ...] = ("none", "split", "interleaved")


def packed_bytes(*shape: int, seed: int, largest: int = 252) -> tuple[Tensor, Tensor]:
    """Random blocks [*shape, 16] and scales, every code and the edges of the scales among them."""
    g = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=g)
    scales = torch.randint(0, largest + 1, shape, dtype=torch.uint8, generator=g)
    flat = scales.view(-1)
    flat[: 3] = torch.tensor([0, 1, largest], dtype=torch.uint8)[: flat.numel()]
    return blocks, scales


@pytest.mark.parametrize("pairs", PAIRS)
@pytest.mark.parametrize("shape", LAYOUTS, ids=str)
def test_round_trip(shape: tuple[int, ...], pairs: RowPairs) -> None:
    rows, depth, depth_warps, num_steps, num_warps = shape
    rows = rows if pairs == "none" else -(-rows // 16) * 16
    layout = FragmentLayout(rows=rows, depth=depth, depth_warps=depth_warps, num_steps=num_steps, num_warps=num_warps)
    blocks, scales = packed_bytes(2, rows, depth // 32, seed=rows + depth)
    weight = pack_fragments(blocks, scales, layout=layout, pairs=pairs)
    assert 2 * layout.num_bytes == 4 * (weight.codes.numel() + weight.scales.numel())
    back_blocks, back_scales = unpack_fragments(weight)
    assert_equal(back_blocks, blocks)
    assert_equal(back_scales, scales)


@pytest.mark.parametrize("byte", [0x00, 0xFF, 0x88, 0x77, 0x0F, 0xF0])
def test_round_trip_of_edge_bytes(byte: int) -> None:
    layout = choose_layout(32, 96)
    blocks = torch.full((32, 3, 16), byte, dtype=torch.uint8)
    scales = torch.arange(96, dtype=torch.uint8).view(32, 3) + 157   # up to 252
    back = unpack_fragments(pack_fragments(blocks, scales, layout=layout))
    assert_equal(back[0], blocks)
    assert_equal(back[1], scales)


def unsigned32(word: int) -> int:
    """The word as the lane has it: 32 bits."""
    return word & 0xFFFFFFFF


def fp32(bits: int) -> float:
    """The number that 32 bits mean; bf16 is the upper half of one."""
    value: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return value


def decoded(layout: FragmentLayout, codes: Tensor, scales: Tensor) -> Tensor:
    """Weights [padded rows, padded depth] from packed words, by the masks and shifts of a lane, in Python integers."""
    out = torch.zeros(layout.num_groups * layout.group_rows, layout.padded_depth, dtype=torch.float64)
    code_words, scale_words = codes.tolist(), scales.tolist()
    for group in range(layout.num_groups):
        n = 4 if layout.num_steps % 4 == 0 else 2 if layout.num_steps % 2 == 0 else 1   # steps whose scales lie together
        for step in range(layout.num_steps):
            for warp in range(layout.num_warps):
                for lane in range(32):
                    g, t = lane // 4, lane % 4
                    first = (((group * layout.num_steps + step) * layout.num_warps + warp) * 32 + lane) * 4
                    at = (((group * layout.num_steps // n + step // n) * layout.num_warps + warp) * 8 + g) * n + step % n
                    s = unsigned32(scale_words[at])
                    rotated = unsigned32(s << 24) | s >> 8
                    factors = [unsigned32(v) & 0x7F800000 for v in (s, s << 8, s << 16, rotated)]
                    for j in range(4):
                        w = unsigned32(code_words[first + j])
                        registers = (w & 0x81C081C0, w << 3 & 0x81C081C0, (w << 6 & 0x01C001C0) | (w << 1 & 0x80008000),
                                     (w >> 3 & 0x01C001C0) | (w << 2 & 0x80008000))
                        for i, register in enumerate(registers):
                            row = (group * layout.row_warps + warp // layout.depth_warps) * 16 + g + 8 * (i % 2)
                            for half in range(2):
                                k = ((warp % layout.depth_warps) * layout.num_steps + step) * 64 + 32 * (j // 2) + 8 * t + 4 * (j % 2) + 2 * (i // 2) + half
                                out[row, k] = fp32((register >> 16 * half & 0xFFFF) << 16) * 2.0**126 * fp32(factors[2 * (j // 2) + i % 2])
    return out


@pytest.mark.parametrize("pairs", PAIRS)
@pytest.mark.parametrize("shape", [(16, 64, 1, 1, 2), (32, 256, 1, 4, 2), (16, 128, 2, 1, 2), (32, 96, 1, 2, 2), (48, 320, 2, 3, 4)], ids=str)
def test_a_lane_reads_the_dequantized_weights(shape: tuple[int, ...], pairs: RowPairs) -> None:
    rows, depth, depth_warps, num_steps, num_warps = shape
    layout = FragmentLayout(rows=rows, depth=depth, depth_warps=depth_warps, num_steps=num_steps, num_warps=num_warps)
    blocks, scales = packed_bytes(rows, depth // 32, seed=depth)
    scales = scales.clamp(min=1)   # 0 is read as zeros, below
    weight = pack_fragments(blocks, scales, layout=layout, pairs=pairs)
    got = decoded(layout, weight.codes, weight.scales)
    expected = torch.zeros_like(got)
    expected[:rows, :depth] = dequantize_mxfp4_ref(blocks, scales, dtype=torch.float64)[row_order(rows, pairs=pairs)]
    assert_equal(got, expected)


def test_every_code_and_scale_byte_as_a_lane_reads_it() -> None:
    layout = FragmentLayout(rows=256, depth=32, depth_warps=1, num_steps=1, num_warps=2)
    nibbles = torch.arange(32, dtype=torch.uint8) % 16
    blocks = (nibbles[0::2] | nibbles[1::2] << 4).expand(256, 1, 16)
    scales = torch.arange(256, dtype=torch.uint8).clamp(max=252).view(256, 1)
    weight = pack_fragments(blocks, scales, layout=layout)
    got = decoded(layout, weight.codes, weight.scales)[:, :32]
    expected = torch.tensor(CODE_VALUES * 2, dtype=torch.float64) * torch.exp2(scales.double() - 127)
    expected[0] = 0.0
    assert_equal(got, expected)


def test_gate_and_up_of_a_channel_are_in_one_lane() -> None:
    assert row_order(32, pairs="split").tolist() == [*range(8), *range(16, 24), *range(8, 16), *range(24, 32)]
    assert row_order(32, pairs="interleaved").tolist() == [*range(0, 16, 2), *range(1, 16, 2), *range(16, 32, 2), *range(17, 32, 2)]


# rows, depth -> depth_warps, num_steps, bytes, of which pad
CHOSEN = [
    ((1536, 2048), (8, 4, 1671168, 0)),           # Qwen3-30B-A3B gate and up, 768 channels
    ((2048, 768), (4, 3, 835584, 0)),
    ((512, 6144), (8, 12, 1671168, 0)),           # MiMo-V2.5-Pro, one of 8 ranks
    ((6144, 256), (1, 4, 835584, 0)),
    ((5760, 2880), (8, 6, 9400320, 587520)),      # gpt-oss-20b: 48 steps for 45
    ((2880, 2880), (8, 6, 4700160, 293760)),
    ((768, 576), (1, 9, 235008, 0)),              # SmolLM2-MoE
    ((576, 384), (2, 3, 117504, 0)),
    ((256, 256), (1, 4, 34816, 0)),               # pocket
    ((256, 128), (1, 2, 17408, 0)),
    ((64, 64), (1, 1, 4352, 2176)),           # half of the row warps idle
    ((16, 32), (1, 1, 4352, 4080)),
]


@pytest.mark.parametrize(("shape", "expected"), CHOSEN, ids=str)
def test_the_chosen_layout_and_its_bytes(shape: tuple[int, int], expected: tuple[int, ...]) -> None:
    layout = choose_layout(*shape)
    assert (layout.depth_warps, layout.num_steps, layout.num_bytes, layout.pad_bytes) == expected


@pytest.mark.parametrize("leading", [(0,), (3, 0), ()], ids=str)
def test_zero_sizes(leading: tuple[int, ...]) -> None:
    for rows, depth in ((0, 64), (32, 0), (32, 64)):
        layout = choose_layout(rows, depth)
        blocks, scales = torch.zeros(*leading, rows, depth // 32, 16, dtype=torch.uint8), torch.zeros(*leading, rows, depth // 32, dtype=torch.uint8)
        weight = pack_fragments(blocks, scales, layout=layout)
        back = unpack_fragments(weight)
        assert_equal(back[0], blocks)
        assert_equal(back[1], scales)


def test_refusals() -> None:
    layout = choose_layout(16, 64)
    blocks, scales = torch.zeros(16, 2, 16, dtype=torch.uint8), torch.zeros(16, 2, dtype=torch.uint8)
    for byte in (253, 254, 255):
        bad = scales.clone()
        bad[5, 1] = byte
        with pytest.raises(ValueError, match=rf"at most 252; got {byte} at index \(5, 1\)"):
            pack_fragments(blocks, bad, layout=layout)
    with pytest.raises(TypeError, match="must be uint8; got torch"):
        pack_fragments(blocks, scales.int(), layout=layout)
    with pytest.raises(ValueError, match=r"must be \[..., 16, 2, 16\]"):
        pack_fragments(blocks[:8], scales[:8], layout=layout)
    with pytest.raises(ValueError, match="fill tiles of 16; got 24 rows"):
        row_order(24, pairs="split")
    with pytest.raises(ValueError, match="must be none, split or interleaved"):
        row_order(32, pairs="both")   # type: ignore[arg-type]
    with pytest.raises(ValueError, match="multiple of 32"):
        choose_layout(16, 40)
    with pytest.raises(NotImplementedError, match=r"at most 6144 columns; got 8192"):
        choose_layout(16, 8192)
    for how, words in (({"num_steps": 13}, "1 to 12 steps"), ({"depth_warps": 3}, "power of two; got 3"), ({"depth_warps": 16}, "must divide num_warps"),
                       ({"depth": 2048}, "must cover depth")):
        with pytest.raises((ValueError, NotImplementedError), match=words):
            FragmentLayout(**({"rows": 16, "depth": 64, "depth_warps": 1, "num_steps": 1} | how))
