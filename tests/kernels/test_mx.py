"""MXFP4 rounding, packing and reading back: exact, over the whole code space, against hand-made cases and other implementations."""

from typing import Any

import pytest
import torch
from cases import CASES, CODE_VALUES, MODES, MX_BLOCK_SIZE, RoundingCase, ScaleMode, codes, values
from tolerances import assert_equal
from torch import Tensor

from kilotok.kernels.mx import (
    E2M1_MAGNITUDES,
    MAX_EXACT_SCALE,
    SCALE_MODES,
    dequantize_mxfp4_ref,
    fake_quant_mxfp4_ref,
    pack_codes_ref,
    quantize_mxfp4_ref,
    unpack_codes_ref,
)

DTYPES = [torch.bfloat16, torch.float32]


def random_weights(*shape: int, seed: int, exponent: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2.0**exponent).to(dtype)


def read_back(w: Tensor, *, scale_mode: ScaleMode, dtype: torch.dtype) -> Tensor:
    codes_, scales = quantize_mxfp4_ref(w, scale_mode=scale_mode)
    return dequantize_mxfp4_ref(pack_codes_ref(codes_), scales, dtype=dtype)


def all_bytes(scales: list[int]) -> tuple[Tensor, Tensor]:
    """Every byte under each scale: blocks uint8 [scales, 16, 16], scales uint8 [scales, 16]."""
    blocks = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 16).expand(len(scales), 16, 16)
    return blocks, torch.tensor(scales, dtype=torch.uint8)[:, None].expand(len(scales), 16)


# --- the table of cases ---


def test_the_table_covers_every_rule_and_every_code() -> None:
    assert MODES == SCALE_MODES
    names = [str(c) for c in CASES]
    assert len(set(names)) == len(names)
    assert {code for c in CASES for code in c.codes} == set(range(16)) - {8}
    assert tuple(CODE_VALUES[:8]) == E2M1_MAGNITUDES


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case: RoundingCase) -> None:
    codes_, scales = quantize_mxfp4_ref(case.tensor(), scale_mode=case.scale_mode)
    assert_equal(scales, torch.tensor([case.scale], dtype=torch.uint8), what="scale")
    assert_equal(codes_, torch.tensor([case.codes], dtype=torch.uint8), what="codes")


@pytest.mark.parametrize("case", [c for c in CASES if c.scale <= MAX_EXACT_SCALE], ids=str)
def test_case_reads_back(case: RoundingCase) -> None:
    """fp32 holds 0.5 * 2**-127, so the fake-quantized case is exactly code value times scale."""
    expected = torch.tensor([CODE_VALUES[c] for c in case.codes], dtype=torch.float64) * 2.0 ** (case.scale - 127)
    assert_equal(fake_quant_mxfp4_ref(case.tensor(), scale_mode=case.scale_mode).double(), expected, bits=True)


@pytest.mark.parametrize("mode", MODES)
def test_every_bf16_element_rounds_to_the_nearest_value(mode: ScaleMode) -> None:
    """All bf16 numbers from 0 to 6 under scale 1, against the nearest of eight values in float64, ties by hand."""
    element = torch.arange(0x40C0 + 1, dtype=torch.int16).view(torch.bfloat16)
    blocks = torch.zeros(element.numel(), MX_BLOCK_SIZE, dtype=torch.bfloat16)
    blocks[:, 0], blocks[:, 1], blocks[:, 2] = 6.0, element, -element
    codes_, scales = quantize_mxfp4_ref(blocks, scale_mode=mode)
    assert_equal(scales, torch.full_like(scales, 127), what="scales")
    distance = (element.double()[:, None] - torch.tensor(CODE_VALUES[:8], dtype=torch.float64)).abs()
    nearest = distance.amin(-1, keepdim=True) == distance
    even = torch.tensor([0, 2, 4, 6])
    odd_code = nearest.int().argmax(-1)
    tied = nearest.sum(-1) == 2
    expected = torch.where(tied, even[nearest[:, even].int().argmax(-1)], odd_code)
    assert int(tied.sum()) == 7
    assert_equal(codes_[:, 0, 1].long(), expected, what="codes of positive elements")
    assert_equal(codes_[:, 0, 2].long(), torch.where(expected == 0, 0, expected + 8), what="codes of negative elements")


@pytest.mark.parametrize("mode", MODES)
def test_every_bf16_amax_gets_the_scale_of_its_rule(mode: ScaleMode) -> None:
    """All positive finite bf16 numbers: amax / scale lies in the rule's interval, checked in float64."""
    amax = torch.arange(1, 0x7F80, dtype=torch.int16).view(torch.bfloat16)
    blocks = torch.zeros(amax.numel(), MX_BLOCK_SIZE, dtype=torch.bfloat16)
    blocks[:, 5] = amax
    _, scales = quantize_mxfp4_ref(blocks, scale_mode=mode)
    ratio = amax.double() / 2.0 ** (scales[:, 0].double() - 127)
    inside = {"floor": (ratio >= 4) & (ratio < 8), "even": (ratio >= 3.5) & (ratio < 7), "rceil": (ratio > 3) & (ratio <= 6),
              "mse": (ratio > 3.5) & (ratio <= 7)}[mode]   # alone, it errs by less than 1 under the floor scale up to 7, where the two tie
    lower = {"floor": 8.0, "even": 7.0, "rceil": 6.0, "mse": 7.0}[mode]
    clamped = (scales[:, 0] == 0) & ((ratio <= lower) if mode in ("rceil", "mse") else (ratio < lower))   # 2**-127 is the smallest scale
    wrong = ~(inside | clamped)
    assert not bool(wrong.any()), f"{int(wrong.sum())} amax have a scale outside the rule; first {amax[wrong][0].item()!r}: byte {int(scales[wrong][0])}"
    assert int(clamped.sum()) > 0 and int(inside.sum()) > 30_000


# --- packing ---


def test_unpack_then_pack_is_identity_for_every_byte() -> None:
    packed = torch.arange(256, dtype=torch.uint8)
    unpacked = unpack_codes_ref(packed)
    assert unpacked.tolist() == [nibble for byte in range(256) for nibble in (byte % 16, byte // 16)]   # low nibble: the even element
    assert_equal(pack_codes_ref(unpacked), packed)


def test_pack_then_unpack_is_identity_for_every_pair() -> None:
    pairs = torch.cartesian_prod(torch.arange(16), torch.arange(16)).to(torch.uint8)
    assert_equal(pack_codes_ref(pairs)[:, 0].int(), pairs[:, 0].int() + 16 * pairs[:, 1].int())
    assert_equal(unpack_codes_ref(pack_codes_ref(pairs)), pairs)


@pytest.mark.parametrize("codes_", [torch.zeros(3, dtype=torch.uint8), torch.zeros(2, 5, dtype=torch.uint8)], ids=["3", "2x5"])
def test_pack_needs_an_even_last_dimension(codes_: Tensor) -> None:
    with pytest.raises(ValueError, match="even last dimension"):
        pack_codes_ref(codes_)


@pytest.mark.parametrize("function", [pack_codes_ref, unpack_codes_ref])
@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.float32], ids=str)
def test_pack_and_unpack_take_uint8_only(function: Any, dtype: torch.dtype) -> None:
    with pytest.raises((TypeError, ValueError), match="must be uint8"):
        function(torch.zeros(4, dtype=dtype))


# --- reading back: 256 code bytes under every scale byte ---


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_byte_under_every_scale_reads_exactly(dtype: torch.dtype) -> None:
    blocks, scales = all_bytes(list(range(MAX_EXACT_SCALE + 1)))
    table = torch.tensor(CODE_VALUES, dtype=torch.float64)
    code = torch.stack((torch.arange(256) % 16, torch.arange(256) // 16), dim=-1).flatten()
    expected = table[code] * 2.0 ** (scales[:, :1].double() - 127)
    got = dequantize_mxfp4_ref(blocks, scales, dtype=dtype)
    assert got.dtype == dtype
    assert_equal(got.double(), expected)
    assert bool(torch.isfinite(got).all()) and float(got.abs().max()) == 6 * 2.0**125


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize(("scale", "word"), [(253, "beyond float32"), (254, "beyond float32"), (255, "NaN")])
def test_scales_beyond_the_format_raise(dtype: torch.dtype, scale: int, word: str) -> None:
    blocks, scales = all_bytes([0, 252, 252])
    scales = scales.clone()
    scales[1, 9] = scale
    with pytest.raises(ValueError, match=rf"scale byte {scale} at index \(1, 9\) is {word}"):
        dequantize_mxfp4_ref(blocks, scales, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_quantizing_what_was_read_back_gives_the_same_values(mode: ScaleMode, dtype: torch.dtype) -> None:
    """Values, not bytes: a block that uses only small codes may get a smaller scale."""
    blocks, scales = all_bytes(list(range(MAX_EXACT_SCALE + 1)))
    weights = dequantize_mxfp4_ref(blocks, scales, dtype=dtype)
    assert_equal(read_back(weights, scale_mode=mode, dtype=dtype), weights)
    assert_equal(fake_quant_mxfp4_ref(weights, scale_mode=mode), weights)


@pytest.mark.parametrize("dtype", [torch.float16, torch.uint8, torch.float8_e4m3fn], ids=str)
def test_dequantize_refuses_formats_with_less_range(dtype: torch.dtype) -> None:
    blocks, scales = all_bytes([127])
    with pytest.raises(ValueError, match="cannot hold every MXFP4 value"):
        dequantize_mxfp4_ref(blocks, scales, dtype=dtype)


@pytest.mark.parametrize(
    ("blocks", "scales"), [((4, 15), (4,)), ((4, 32), (4,)), ((4, 16), (3,)), ((4, 16), (4, 1)), ((2, 4, 16), (4, 2)), ((16,), ())], ids=str)
def test_dequantize_checks_shapes(blocks: tuple[int, ...], scales: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"blocks must be \[..., Q, 16\]"):
        dequantize_mxfp4_ref(torch.zeros(blocks, dtype=torch.uint8), torch.zeros(scales, dtype=torch.uint8))


@pytest.mark.parametrize(("blocks", "scales"), [(torch.int8, torch.uint8), (torch.uint8, torch.int32), (torch.float32, torch.float32)], ids=str)
def test_dequantize_takes_bytes_only(blocks: torch.dtype, scales: torch.dtype) -> None:
    with pytest.raises(TypeError, match="must be uint8"):
        dequantize_mxfp4_ref(torch.zeros(2, 16, dtype=blocks), torch.zeros(2, dtype=scales))


# --- fake quantization is the round trip ---


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("exponent", [-130, -126, -120, -60, -6, 0, 7, 60, 120])
def test_fake_quant_is_the_round_trip_bit_for_bit(exponent: int, mode: ScaleMode, dtype: torch.dtype) -> None:
    w = random_weights(64, 128, seed=exponent + 200, exponent=exponent, dtype=dtype)
    w[3, 40:44] = torch.tensor([0.0, -0.0, -(2.0**-133), 2.0**-133], dtype=dtype)
    w[5, 32:64] = -0.0
    got = fake_quant_mxfp4_ref(w, scale_mode=mode)
    assert_equal(got, read_back(w, scale_mode=mode, dtype=dtype), bits=True)
    assert not bool((torch.signbit(got) & (got == 0)).any()), "a minus zero"
    assert not torch.equal(got, w), "nothing was rounded"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", ["even", "rceil"])
def test_fake_quant_raises_where_reading_back_raises(mode: ScaleMode, dtype: torch.dtype) -> None:
    """7 * 2**125 is finite, but its scale byte would be 253, which does not read back: training must not compute with infinity."""
    w = torch.ones(MX_BLOCK_SIZE, dtype=dtype)
    w[2] = 7 * 2.0**125
    with pytest.raises(ValueError):
        read_back(w, scale_mode=mode, dtype=dtype)
    with pytest.raises(ValueError):
        fake_quant_mxfp4_ref(w, scale_mode=mode)


def test_fp64_is_rounded_once() -> None:
    """0.25 + 2**-40 is above the tie, so 0.5; going through fp32 it would be the tie, so 0."""
    w = torch.tensor(values(6.0, 0.25 + 2.0**-40), dtype=torch.float64)
    got = fake_quant_mxfp4_ref(w, scale_mode="even")
    assert_equal(got, torch.tensor(values(6.0, 0.5), dtype=torch.float64))


def test_input_is_not_changed() -> None:
    w = random_weights(4, 64, seed=1)
    before = w.clone()
    quantize_mxfp4_ref(w, scale_mode="even")
    fake_quant_mxfp4_ref(w, scale_mode="even")
    assert_equal(w, before, bits=True)


# --- shapes, strides, dtypes ---


@pytest.mark.parametrize("mode", MODES)
def test_result_does_not_depend_on_leading_shape(mode: ScaleMode) -> None:
    w = random_weights(24, 96, seed=2)
    codes_, scales = quantize_mxfp4_ref(w, scale_mode=mode)
    fake = fake_quant_mxfp4_ref(w, scale_mode=mode)
    for shape in ((2, 3, 4, 96), (24, 1, 96), (1, 8, 3, 96)):
        got_codes, got_scales = quantize_mxfp4_ref(w.reshape(shape), scale_mode=mode)
        assert_equal(got_codes, codes_.reshape(*shape[:-1], 3, 32))
        assert_equal(got_scales, scales.reshape(*shape[:-1], 3))
        assert_equal(fake_quant_mxfp4_ref(w.reshape(shape), scale_mode=mode), fake.reshape(shape))
    one_codes, one_scales = quantize_mxfp4_ref(w[7], scale_mode=mode)   # 1-D
    assert_equal(one_codes, codes_[7])
    assert_equal(one_scales, scales[7])


@pytest.mark.parametrize("mode", MODES)
def test_result_does_not_depend_on_strides(mode: ScaleMode) -> None:
    w = random_weights(64, 3, 96, seed=3)
    views = {"transposed": w.transpose(0, 2), "strided": random_weights(8, 256, seed=4)[::2, ::2], "expanded": w[:1, :1].expand(5, 2, 96)}
    for name, view in views.items():
        assert not view.is_contiguous()
        codes_, scales = quantize_mxfp4_ref(view, scale_mode=mode)
        want_codes, want_scales = quantize_mxfp4_ref(view.contiguous(), scale_mode=mode)
        assert_equal(codes_, want_codes, what=name)
        assert_equal(scales, want_scales, what=name)
        assert_equal(fake_quant_mxfp4_ref(view, scale_mode=mode), fake_quant_mxfp4_ref(view.contiguous(), scale_mode=mode), what=name)
    codes_, scales = quantize_mxfp4_ref(w, scale_mode=mode)
    packed = pack_codes_ref(codes_)
    back = dequantize_mxfp4_ref(packed.transpose(0, 1), scales.transpose(0, 1))
    assert_equal(back, dequantize_mxfp4_ref(packed, scales).transpose(0, 1), what="dequantize of a transposed view")


@pytest.mark.parametrize("mode", MODES)
def test_blocks_do_not_influence_each_other(mode: ScaleMode) -> None:
    w = random_weights(6, 160, seed=5) * torch.tensor([1e-20, 1.0, 1e20, 1e-3, 1e3]).repeat_interleave(32)
    codes_, scales = quantize_mxfp4_ref(w, scale_mode=mode)
    for q in range(5):
        alone_codes, alone_scales = quantize_mxfp4_ref(w[:, 32 * q: 32 * (q + 1)], scale_mode=mode)
        assert_equal(codes_[:, q: q + 1], alone_codes, what=f"block {q}")
        assert_equal(scales[:, q: q + 1], alone_scales, what=f"block {q}")


@pytest.mark.parametrize("mode", MODES)
def test_result_does_not_depend_on_dtype(mode: ScaleMode) -> None:
    """The same values in bf16, fp32, fp64 and (they are small integers / 256) fp16."""
    w = (random_weights(32, 64, seed=6) * 32).round().clamp(-128, 128) / 256
    assert torch.equal(w.bfloat16().float(), w) and torch.equal(w.half().float(), w)
    codes_, scales = quantize_mxfp4_ref(w, scale_mode=mode)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        got_codes, got_scales = quantize_mxfp4_ref(w.to(dtype), scale_mode=mode)
        assert_equal(got_codes, codes_, what=str(dtype))
        assert_equal(got_scales, scales, what=str(dtype))
    fake = fake_quant_mxfp4_ref(w, scale_mode=mode)
    for dtype in (torch.bfloat16, torch.float64):
        got = fake_quant_mxfp4_ref(w.to(dtype), scale_mode=mode)
        assert got.dtype == dtype
        assert_equal(got.double(), fake.double(), what=str(dtype), bits=True)


@pytest.mark.parametrize("shape", [(0,), (0, 64), (3, 0), (2, 0, 96), (0, 5, 32)], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_zero_sizes(shape: tuple[int, ...], mode: ScaleMode) -> None:
    w = torch.zeros(shape, dtype=torch.bfloat16)
    codes_, scales = quantize_mxfp4_ref(w, scale_mode=mode)
    assert codes_.shape == (*shape[:-1], shape[-1] // 32, 32) and codes_.dtype == torch.uint8
    assert scales.shape == (*shape[:-1], shape[-1] // 32) and scales.dtype == torch.uint8
    assert_equal(dequantize_mxfp4_ref(pack_codes_ref(codes_), scales), w)
    assert_equal(fake_quant_mxfp4_ref(w, scale_mode=mode), w)


# --- wrong arguments ---


@pytest.mark.parametrize("function", [quantize_mxfp4_ref, fake_quant_mxfp4_ref])
@pytest.mark.parametrize("shape", [(), (31,), (33,), (48,), (32, 1), (2, 32, 40)], ids=str)
def test_last_dimension_must_be_whole_blocks(function: Any, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"multiple of 32.*got shape \({', '.join(map(str, shape))}"):
        function(torch.ones(shape), scale_mode="even")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.bool, torch.complex64], ids=str)
def test_only_floats_are_weights(dtype: torch.dtype) -> None:
    w = torch.ones(64, dtype=dtype)
    with pytest.raises(TypeError, match="floating-point"):
        quantize_mxfp4_ref(w, scale_mode="even")
    with pytest.raises((TypeError, ValueError), match=str(dtype)):
        fake_quant_mxfp4_ref(w, scale_mode="even")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn], ids=str)
def test_fake_quant_refuses_formats_with_less_range(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="cannot hold every MXFP4 value"):
        fake_quant_mxfp4_ref(torch.ones(32).to(dtype), scale_mode="even")


@pytest.mark.parametrize("function", [quantize_mxfp4_ref, fake_quant_mxfp4_ref])
@pytest.mark.parametrize("w", [torch.ones(32), torch.zeros(32), torch.ones(0, 32)], ids=["ones", "zeros", "empty"])
@pytest.mark.parametrize("mode", ["EVEN", "MSE", "best", "", None])
def test_unknown_scale_mode(function: Any, w: Tensor, mode: Any) -> None:
    with pytest.raises(ValueError, match="scale_mode must be one of even, floor, rceil, mse; got"):
        function(w, scale_mode=mode)


def test_result_of_one_named_block_by_hand() -> None:
    """The whole path on one block: weights 12, -1, 0.5, 3 under scale 2 are codes 7, 9 and two ties, to 0 (even) and to 2 (1.5 is on the grid)."""
    codes_, scales = quantize_mxfp4_ref(torch.tensor(values(12.0, -1.0, 0.5, 3.0)), scale_mode="even")
    assert scales.tolist() == [128]
    assert_equal(codes_[0], torch.tensor(codes(7, 9, 0, 3), dtype=torch.uint8))
    packed = pack_codes_ref(codes_)
    assert packed[0, :3].tolist() == [0x97, 0x30, 0x00]
    assert dequantize_mxfp4_ref(packed, scales)[:5].tolist() == [12.0, -1.0, 0.0, 3.0, 0.0]
