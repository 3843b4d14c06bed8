"""MXFP4Tensor and the two functions that make its values: packed for a checkpoint, fake-quantized for training."""

from typing import Any

import pytest
import torch
from cases import CASES, MODES, RoundingCase, ScaleMode, values
from tolerances import assert_equal
from torch import Tensor

from kilotok.kernels.mx import MAX_EXACT_SCALE, fake_quant_mxfp4_ref, quantize_mxfp4_ref
from kilotok.quant.tensor import SOURCE_DTYPE, MXFP4Tensor, fake_quant_weight, quantize_weight

NAME = "model.layers.3.mlp.experts.down_proj"


def weights(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.02).to(dtype)


def byte_tensor(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


# --- what is a valid MXFP4Tensor ---


@pytest.mark.parametrize("scale_mode", [*MODES, None])
def test_valid(scale_mode: Any) -> None:
    tensor = MXFP4Tensor(blocks=byte_tensor(2, 3, 5, 16), scales=byte_tensor(2, 3, 5), scale_mode=scale_mode)
    assert tensor.shape == (2, 3, 160)
    assert tensor.num_bytes == 2 * 3 * 5 * 17   # 16 bytes of codes and one of scale a block
    assert tensor.scale_mode == scale_mode


@pytest.mark.parametrize(("blocks", "scales"), [(torch.int8, torch.uint8), (torch.uint8, torch.int8), (torch.float32, torch.uint8)], ids=str)
def test_blocks_and_scales_are_bytes(blocks: torch.dtype, scales: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"must be uint8; got {blocks} and {scales}"):
        MXFP4Tensor(blocks=byte_tensor(3, 16).to(blocks), scales=byte_tensor(3).to(scales), scale_mode=None)


@pytest.mark.parametrize(
    ("blocks", "scales"), [((3, 15), (3,)), ((3, 32), (3,)), ((3, 16), (4,)), ((3, 16), (3, 1)), ((2, 3, 16), (3,)), ((16,), ()), ((3, 16), ())], ids=str)
def test_blocks_and_scales_fit(blocks: tuple[int, ...], scales: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"\[..., Q, 16\] with scales \[..., Q\]; got") as caught:
        MXFP4Tensor(blocks=byte_tensor(*blocks), scales=byte_tensor(*scales), scale_mode=None)
    assert str(blocks) in str(caught.value) and str(scales) in str(caught.value)


@pytest.mark.parametrize("scale_mode", ["EVEN", "nearest", ""])
def test_scale_mode_is_known(scale_mode: Any) -> None:
    with pytest.raises(ValueError, match=f"one of even, floor, rceil, mse; got '{scale_mode}'"):
        MXFP4Tensor(blocks=byte_tensor(3, 16), scales=byte_tensor(3), scale_mode=scale_mode)


@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (2, 0, 32)], ids=str)
def test_zero_sizes(shape: tuple[int, ...]) -> None:
    tensor = quantize_weight(torch.zeros(shape), name=NAME, scale_mode="even")
    assert tensor.shape == shape and tensor.num_bytes == 0
    assert_equal(tensor.dequantize(), torch.zeros(shape, dtype=torch.bfloat16))


# --- packed and fake-quantized are the same numbers ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(96,), (48, 64), (4, 40, 32)], ids=str)
def test_packed_reads_back_to_the_fake_quantized_weight(shape: tuple[int, ...], mode: ScaleMode, dtype: torch.dtype) -> None:
    w = weights(*shape, dtype=dtype)
    packed = quantize_weight(w, name=NAME, scale_mode=mode)
    fake = fake_quant_weight(w, name=NAME, scale_mode=mode)
    assert packed.shape == shape and packed.scale_mode == mode
    assert packed.num_bytes == w.numel() * 17 // 32
    assert_equal(packed.dequantize(), fake, bits=True)
    assert_equal(packed.dequantize(dtype=torch.float32), fake.float(), bits=True)
    assert fake.dtype == SOURCE_DTYPE and not torch.equal(fake.float(), w.float())


@pytest.mark.parametrize("case", [c for c in CASES if c.scale <= MAX_EXACT_SCALE and bool(torch.isfinite(c.tensor().bfloat16()).all())], ids=str)
def test_cases_through_the_bf16_rule(case: RoundingCase) -> None:
    """The same table, each block rounded to bf16 first. Where that changes the block, its answer may be another one."""
    w = case.tensor()
    rounded = w.to(torch.bfloat16)
    codes, scales = quantize_mxfp4_ref(rounded, scale_mode=case.scale_mode)
    if int(scales.max()) > MAX_EXACT_SCALE:   # rounding to bf16 carried the block beyond what can be read back
        with pytest.raises(ValueError, match="needs scale byte 253"):
            quantize_weight(w, name=NAME, scale_mode=case.scale_mode)
        return
    packed = quantize_weight(w, name=NAME, scale_mode=case.scale_mode)
    assert_equal(packed.scales, scales)
    assert_equal(packed.blocks, codes[..., 0::2] + 16 * codes[..., 1::2])
    if torch.equal(rounded.float(), w):
        assert_equal(packed.scales, torch.tensor([case.scale], dtype=torch.uint8))
        assert_equal(codes[0], torch.tensor(case.codes, dtype=torch.uint8))


# --- the source rule: every master is read as bf16 ---


@pytest.mark.parametrize("mode", MODES)
def test_an_fp32_master_and_its_bf16_rounding_give_the_same_bytes(mode: ScaleMode) -> None:
    master = weights(64, 256, seed=1)
    rounded = master.to(torch.bfloat16)
    assert not torch.equal(rounded.float(), master)
    one, two = (quantize_weight(w, name=NAME, scale_mode=mode) for w in (master, rounded))
    assert_equal(one.blocks, two.blocks)
    assert_equal(one.scales, two.scales)
    assert_equal(fake_quant_weight(master, name=NAME, scale_mode=mode), fake_quant_weight(rounded, name=NAME, scale_mode=mode), bits=True)
    # the rule is not void: quantizing these masters as they are gives other values
    assert not torch.equal(fake_quant_mxfp4_ref(master, scale_mode=mode), one.dequantize(dtype=torch.float32))


# fp32 blocks on which reading bf16 first changes the answer: (block, mode) -> (answer without the rule, with it)
SOURCE_RULE = {
    # 0.25 + 2**-20 is above the tie between 0 and 0.5; in bf16 it is the tie, which goes to 0
    "element": (values(6.0, 0.25 + 2.0**-20), "even", (127, 0.5), (127, 0.0)),
    # 7 - 2**-20 has scale 1; in bf16 it is 7, which has scale 2. The element 0.5 then is a tie, which goes to 0
    "scale_even": (values(7.0 - 2.0**-20, 0.5), "even", (127, 0.5), (128, 0.0)),
    "scale_floor": (values(8.0 - 2.0**-20, 0.5), "floor", (127, 0.5), (128, 0.0)),
    # 6 + 2**-20 needs scale 2 not to clip; in bf16 it is 6
    "scale_rceil": (values(6.0 + 2.0**-20, 0.5), "rceil", (128, 0.0), (127, 0.5)),
}


@pytest.mark.parametrize(("block", "mode", "without", "with_rule"), SOURCE_RULE.values(), ids=SOURCE_RULE)
def test_where_the_source_rule_decides(block: tuple[float, ...], mode: ScaleMode, without: tuple[int, float], with_rule: tuple[int, float]) -> None:
    w = torch.tensor(block)
    _, scales = quantize_mxfp4_ref(w, scale_mode=mode)
    assert (int(scales[0]), float(fake_quant_mxfp4_ref(w, scale_mode=mode)[1])) == without
    packed = quantize_weight(w, name=NAME, scale_mode=mode)
    assert (int(packed.scales[0]), float(packed.dequantize()[1])) == with_rule
    assert float(fake_quant_weight(w, name=NAME, scale_mode=mode)[1]) == with_rule[1]


# --- errors name the tensor ---


@pytest.mark.parametrize("function", [quantize_weight, fake_quant_weight])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_name_tensor_and_index(function: Any, value: float) -> None:
    w = weights(4, 8, 64)
    w[3, 7, 33] = value
    with pytest.raises(ValueError, match=rf"^{NAME}: .*got {value} at index \(3, 7, 33\) of shape \(4, 8, 64\)"):
        function(w, name=NAME, scale_mode="even")


@pytest.mark.parametrize("function", [quantize_weight, fake_quant_weight])
def test_a_partial_block_names_the_tensor(function: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{NAME}: .*multiple of 32.*got shape \(2, 48\)"):
        function(weights(2, 48), name=NAME, scale_mode="even")


@pytest.mark.parametrize("function", [quantize_weight, fake_quant_weight])
def test_an_unknown_scale_mode_names_the_tensor(function: Any) -> None:
    with pytest.raises(ValueError, match=f"^{NAME}: .*one of even, floor, rceil, mse; got 'nearest'"):
        function(weights(2, 64), name=NAME, scale_mode="nearest")


@pytest.mark.parametrize("function", [quantize_weight, fake_quant_weight])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64], ids=str)
def test_integers_are_not_weights(function: Any, dtype: torch.dtype) -> None:
    """Packed codes or int8 weights taken for a weight would be packed as numbers, without a word."""
    with pytest.raises(TypeError, match=str(dtype)):
        function(torch.ones(2, 64, dtype=dtype), name=NAME, scale_mode="even")


@pytest.mark.parametrize("mode", ["even", "rceil"])
def test_a_weight_whose_scale_does_not_read_back_is_refused(mode: ScaleMode) -> None:
    """Its bytes would be refused by dequantize as damaged: packing or fake-quantizing it must say so, with the name."""
    w = weights(2, 64, dtype=torch.bfloat16)
    w[1, 40] = 7 * 2.0**125
    with pytest.raises(ValueError, match=NAME):
        quantize_weight(w, name=NAME, scale_mode=mode).dequantize()
    with pytest.raises(ValueError, match=NAME):
        fake_quant_weight(w, name=NAME, scale_mode=mode)


def test_master_is_not_changed() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        w = weights(4, 64, dtype=dtype)
        before = w.clone()
        quantize_weight(w, name=NAME, scale_mode="even")
        fake_quant_weight(w, name=NAME, scale_mode="even")
        assert_equal(w, before, bits=True)
