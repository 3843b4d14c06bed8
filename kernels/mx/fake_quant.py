"""Quantize and dequantize in one step: what training sees of a weight that will be packed."""

import torch
from torch import Tensor

from .dequantize import MAX_EXACT_SCALE
from .quantize import ScaleMode, _round_blocks_ref


def fake_quant_mxfp4_ref(w: Tensor, *, scale_mode: ScaleMode) -> Tensor:
    """The values that `w` has after packing to MXFP4 and reading back; bit-equal to that round trip.

    Shapes: w bf16, fp32 or fp64 [..., D], D a multiple of 32. Returns the same shape and dtype.
    Numerics: exact; negative zero becomes zero; NaN or infinity raises ValueError with its index.
    """
    if not w.is_floating_point():
        raise TypeError(f"fake_quant_mxfp4: weights must be a floating-point tensor; got {w.dtype}.")
    if w.dtype not in (torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f"fake_quant_mxfp4: {w.dtype} cannot hold every MXFP4 value. Use bfloat16 or float32.")
    values, exponents = _round_blocks_ref(w, scale_mode=scale_mode)
    if exponents.numel() and int(exponents.max()) > MAX_EXACT_SCALE - 127:
        raise ValueError(f"fake_quant_mxfp4: a block needs scale byte {int(exponents.max()) + 127}, whose values bf16 and fp32 cannot hold; the largest is "
                         f"{MAX_EXACT_SCALE}. The weight has diverged: repair it before quantizing.")
    # + 0.0 turns the -0.0 of a small negative weight into 0.0, as code 0 reads back
    return (torch.ldexp(values, exponents[..., None]).flatten(-2) + 0.0).to(w.dtype)
