"""The fast path of a CPU against the twins, bit for bit: every bf16 weight against every scale it can meet, and what is left to the twin."""

import math

import pytest
import torch
from cases import MODES, ScaleMode
from torch import Tensor

from kilotok.kernels.mx import (
    cpu,
    dequantize_mxfp4,
    dequantize_mxfp4_ref,
    fake_quant_mxfp4,
    fake_quant_mxfp4_ref,
    pack_codes_ref,
    quantize_mxfp4,
    quantize_mxfp4_ref,
)

FAST = [m for m in MODES if m != "mse"]


def twin(w: Tensor, *, mode: ScaleMode) -> tuple[Tensor, Tensor]:
    codes, scales = quantize_mxfp4_ref(w, scale_mode=mode)
    return pack_codes_ref(codes), scales


def require_equal(w: Tensor, *, mode: ScaleMode) -> None:
    blocks, scales = quantize_mxfp4(w, scale_mode=mode)
    expected = twin(w, mode=mode)
    assert torch.equal(blocks, expected[0]) and torch.equal(scales, expected[1])
    assert torch.equal(fake_quant_mxfp4(w, scale_mode=mode).view(torch.int16), fake_quant_mxfp4_ref(w, scale_mode=mode).view(torch.int16))


@pytest.mark.parametrize("mode", FAST)
@pytest.mark.parametrize("exponent", [5, 6, 127, 128, 251, 252])
def test_every_mantissa_of_the_largest_against_every_weight_that_matters(mode: ScaleMode, exponent: int) -> None:
    """For each largest magnitude of a binade: all 1,500 magnitudes from it down, past the last that is not code 0, with both signs."""
    below = torch.arange(1504, dtype=torch.int32)
    for mantissa in range(0, 128, 1 if exponent == 127 else 9):
        amax = (exponent << 7) + mantissa
        weights = (amax - below).clamp(min=0).view(-1, 16).to(torch.int16)
        both = torch.cat((weights, weights | torch.tensor(-32768, dtype=torch.int16)), 1)
        both[:, 0] = amax
        w = both.view(torch.bfloat16)
        assert cpu.quantize_mxfp4_cpu(w, scale_mode=mode) is not None
        require_equal(w, mode=mode)


@pytest.mark.parametrize("mode", FAST)
def test_every_largest_magnitude_there_is(mode: ScaleMode) -> None:
    """All of them from 0 to the largest that may be packed, each with weights spread over ten binades below."""
    amax = torch.arange(0x7E00, dtype=torch.int32)
    drops = torch.randint(0, 1300, (len(amax), 31), generator=torch.Generator().manual_seed(1))
    bits = torch.cat((amax[:, None], (amax[:, None] - drops).clamp(min=0)), 1).to(torch.int16)
    signs = torch.randint(0, 2, bits.shape, generator=torch.Generator().manual_seed(2)).to(torch.int16) * -32768
    require_equal((bits | signs).view(torch.bfloat16), mode=mode)           # one tensor with tiny blocks among them: the twin's
    usual = (bits | signs)[0x280:].contiguous().view(torch.bfloat16)
    assert cpu.quantize_mxfp4_cpu(usual, scale_mode=mode) is not None
    require_equal(usual, mode=mode)


def test_zero_blocks_and_negative_zeros_are_code_0() -> None:
    w = torch.tensor([[0.0, -0.0] * 16, [1.0, -0.01] * 16]).to(torch.bfloat16)
    blocks, scales = quantize_mxfp4(w, scale_mode="even")
    assert not blocks[0].any() and int(scales[0, 0]) == 0
    assert set(blocks[1].flatten().tolist()) == {6} and int(scales[1, 0]) == 125   # 1 = 4 * 2**-2, and -0.01 vanishes without its sign


def test_what_the_fast_path_does_not_take() -> None:
    usual = torch.ones(4, 64, dtype=torch.bfloat16)
    assert cpu.quantize_mxfp4_cpu(usual, scale_mode="mse") is None
    for value in (math.inf, -math.inf, math.nan, 2.0**-123, 2.0**-133):
        w = usual.clone()
        w[2, 32:] = value
        assert cpu.quantize_mxfp4_cpu(w, scale_mode="even") is None
        if math.isfinite(value):
            require_equal(w, mode="even")
        else:
            with pytest.raises(ValueError, match=r"must be finite; got .* at index \(2, 32\)"):
                quantize_mxfp4(w, scale_mode="even")


def test_a_scale_that_no_reader_can_use_is_refused() -> None:
    w = torch.full((1, 32), 3.3e38).to(torch.bfloat16)
    for call in (quantize_mxfp4, fake_quant_mxfp4):
        with pytest.raises(ValueError, match="a block needs scale byte 253"):
            call(w, scale_mode="even")


def test_reading_back_every_byte_under_every_scale() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).expand(253, 16, 16).contiguous()
    scales = torch.arange(253, dtype=torch.uint8)[:, None].expand(253, 16).contiguous()
    for dtype in (torch.bfloat16, torch.float32):
        got, expected = dequantize_mxfp4(blocks, scales, dtype=dtype), dequantize_mxfp4_ref(blocks, scales, dtype=dtype)
        bits = torch.int16 if dtype == torch.bfloat16 else torch.int32
        assert torch.equal(got.view(bits), expected.view(bits))


@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 32), (1, 32), (5, 3, 96), (2, 2**13, 64)], ids=str)
def test_shapes_and_pieces(shape: tuple[int, ...]) -> None:
    w = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    require_equal(w, mode="even")
    if len(shape) == 2 and shape[0] and shape[0] % 32 == 0:
        assert torch.equal(quantize_mxfp4(w, scale_mode="even", dim=-2)[0], quantize_mxfp4(w.mT.contiguous(), scale_mode="even")[0])
