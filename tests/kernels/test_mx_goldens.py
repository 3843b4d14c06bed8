"""MXFP4 against golden vectors: an independent float64 model, and what five public implementations do."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import MODES, MX_BLOCK_SIZE, ScaleMode
from tolerances import assert_equal
from torch import Tensor

from kilotok.kernels.mx import (
    MAX_EXACT_SCALE,
    dequantize_mxfp4_ref,
    fake_quant_mxfp4_ref,
    pack_codes_ref,
    quantize_mxfp4_ref,
    unpack_codes_ref,
)

GOLDENS: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "goldens" / "mxfp4_golden.json").read_text())["vectors"]


def golden_input(vector: dict[str, Any]) -> Tensor:
    raw = bytearray(bytes.fromhex(vector["input_f32_hex"]))
    return torch.frombuffer(raw, dtype=torch.float32).reshape(vector["shape"])


def golden_codes(result: dict[str, Any]) -> Tensor:
    return torch.tensor(result["codes"], dtype=torch.uint8).reshape(-1, MX_BLOCK_SIZE)


def without_minus_zero(codes_: Tensor) -> Tensor:
    return torch.where(codes_ == 8, 0, codes_)


FINITE = [v for v in GOLDENS if bool(torch.isfinite(golden_input(v)).all())]
NOT_FINITE = [v for v in GOLDENS if not bool(torch.isfinite(golden_input(v)).all())]


def by_name(vector: dict[str, Any]) -> str:
    return str(vector["name"])

# --- golden vectors: an independent float64 model, and other implementations ---


@pytest.mark.parametrize("mode", [m for m in MODES if m != "mse"])   # the float64 model of mse is in test_mx_mse.py
@pytest.mark.parametrize("vector", FINITE, ids=by_name)
def test_golden(vector: dict[str, Any], mode: ScaleMode) -> None:
    model = vector["results"][f"model_spec_{mode}"]
    codes_, scales = quantize_mxfp4_ref(golden_input(vector), scale_mode=mode)
    assert_equal(scales.flatten(), torch.tensor(model["scales_e8m0"], dtype=torch.uint8), what="scales")
    assert_equal(codes_.reshape(-1, MX_BLOCK_SIZE), without_minus_zero(golden_codes(model)), what="codes")
    if int(scales.max()) > MAX_EXACT_SCALE:   # huge_*: the value 2**128 is in no float format of ours
        with pytest.raises(ValueError, match="beyond float32"):
            dequantize_mxfp4_ref(pack_codes_ref(codes_), scales)
        return
    weights = dequantize_mxfp4_ref(pack_codes_ref(codes_), scales, dtype=torch.float32)
    assert_equal(weights.double(), torch.tensor([float(x) for x in model["dequant"]], dtype=torch.float64).reshape(vector["shape"]), what="weights")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("vector", NOT_FINITE, ids=by_name)
def test_golden_with_nan_or_infinity_raises(vector: dict[str, Any], mode: ScaleMode) -> None:
    w = golden_input(vector)
    index = next(i for i, x in enumerate(w.flatten().tolist()) if not math.isfinite(x))
    row, column = divmod(index, w.shape[-1])
    value = {"one_inf": "inf", "neg_inf": "-inf", "one_nan": "nan", "inf_and_nan": str(float(w[row, column]))}[vector["name"]]
    for function in (quantize_mxfp4_ref, fake_quant_mxfp4_ref):
        with pytest.raises(ValueError, match=rf"got {value} at index \({row}, {column}\)"):
            function(w, scale_mode=mode)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn], ids=str)
def test_nan_deep_in_a_tensor_is_named(dtype: torch.dtype) -> None:
    w = torch.ones(2, 3, 96)
    w[1, 2, 70] = float("nan")
    with pytest.raises(ValueError, match=r"got nan at index \(1, 2, 70\) of shape \(2, 3, 96\)"):
        quantize_mxfp4_ref(w.to(dtype), scale_mode="even")


@pytest.mark.parametrize("function", [quantize_mxfp4_ref, fake_quant_mxfp4_ref])
def test_fp64_beyond_fp32_raises_as_not_representable(function: Any) -> None:
    """1e300 is finite, but no E8M0 scale reaches it."""
    w = torch.ones(MX_BLOCK_SIZE, dtype=torch.float64)
    w[7] = 1e300
    with pytest.raises(ValueError, match=r"1e\+?300|inf"):
        function(w, scale_mode="even")


# Where another implementation gives a different scale, or different codes once its minus zeros are zeros. All other
# finite vectors must agree byte for byte, and these must differ: else the reason given here is wrong.
SCALE_STOPS_AT_2M126 = {"tiny_2m126", "tiny_2m125x6"}   # its scale is at least 2**-126, where E8M0 goes to 2**-127
WIPES_HUGE_BLOCKS = {"huge_bf16max", "huge_f32max"}     # amax rounds up to infinity: scale 127 and all codes zero
FP32_LOG2 = {"log2_below_8", "log2_below_2p13"}         # floor(log2()) in fp32 is one too high an ulp below a power of two
DIFFERENT: dict[tuple[ScaleMode, str], set[str]] = {
    ("floor", "torchao_FLOOR"): SCALE_STOPS_AT_2M126,
    ("even", "torchao_EVEN"): SCALE_STOPS_AT_2M126,
    # ceil(log2()) in fp32 is one too low an ulp above 6 * 2**10
    ("rceil", "torchao_RCEIL"): SCALE_STOPS_AT_2M126 | {"log2_above_6x2p10"},
    ("even", "compressed_tensors_f32"): WIPES_HUGE_BLOCKS,
    # its scale byte is at least 1; denorm_f32 has all-zero codes under it all the same
    ("rceil", "triton_kernels_ROUND_UP"): SCALE_STOPS_AT_2M126 | {"denorm_f32"},
    # fp32 log2, which also makes fp32's largest value 2**128; ties_amax6: the value just below 0.25 becomes 0.5
    ("floor", "microxcaling_round_even"): FP32_LOG2 | {"huge_f32max", "ties_amax6"},
}
# Implementations that write minus zero as code 8, as ours never does: on these vectors the raw bytes differ and the values do not.
MINUS_ZERO_ALSO_FOR_ZEROS = {"grid_exact", "neg_zeros"}   # these hold -0.0 itself; the next ones, small negatives that round to zero
ONLY_ROUNDED_TO_ZERO = {
    "ties_amax6", "outlier", "denorm_f32", "small_neg_underflow", "randn_0p02_0", "randn_0p02_1", "randn_0p02_2", "randn_0p02_3", "randn_scales", "student_t3"}


@pytest.mark.parametrize(("mode", "other"), DIFFERENT, ids="-".join)
def test_other_implementations_differ_only_where_known(mode: ScaleMode, other: str) -> None:
    different = set()
    for vector in FINITE:
        theirs = vector["results"][other]
        codes_, scales = quantize_mxfp4_ref(golden_input(vector), scale_mode=mode)
        same_scales = scales.flatten().tolist() == theirs["scales_e8m0"]
        if not same_scales or not torch.equal(codes_.reshape(-1, MX_BLOCK_SIZE), without_minus_zero(golden_codes(theirs))):
            different.add(vector["name"])
    assert different == DIFFERENT[mode, other]


@pytest.mark.parametrize("other", ["torchao_FLOOR", "torchao_EVEN", "torchao_RCEIL", "compressed_tensors_f32", "triton_kernels_ROUND_UP"])
def test_other_implementations_write_minus_zero_where_known(other: str) -> None:
    with_code_8 = {v["name"] for v in FINITE if bool((golden_codes(v["results"][other]) == 8).any())}
    keeps_sign_of_zero = other != "compressed_tensors_f32"   # it turns -0.0 into 0.0 first, and rounds small negatives to code 8
    assert with_code_8 >= ONLY_ROUNDED_TO_ZERO
    assert (with_code_8 & MINUS_ZERO_ALSO_FOR_ZEROS) == (MINUS_ZERO_ALSO_FOR_ZEROS if keeps_sign_of_zero else set())


@pytest.mark.parametrize("mode", MODES)
def test_minus_zero_is_never_written(mode: ScaleMode) -> None:
    for vector in FINITE:
        codes_, _ = quantize_mxfp4_ref(golden_input(vector), scale_mode=mode)
        assert not bool((codes_ == 8).any()), f"{vector['name']}: code 8"

@pytest.mark.parametrize("vector", FINITE, ids=by_name)
def test_golden_bytes_unpack_to_golden_codes(vector: dict[str, Any]) -> None:
    for name, result in vector["results"].items():
        if "packed_hex" in result:   # microxcaling gives values only, and none where they are infinite
            packed = torch.tensor(list(bytes.fromhex(result["packed_hex"])), dtype=torch.uint8)
            assert_equal(unpack_codes_ref(packed), golden_codes(result).flatten(), what=name)
            assert_equal(pack_codes_ref(golden_codes(result)).flatten(), packed, what=name)
