"""From weights to E2M1 codes and E8M0 scales.

A block is 32 consecutive weights along the last dim. Its scale is a power of two, 2**(s - 127), chosen from the
block's largest magnitude (amax) by a rule, `scale_mode`:

    floor   floor(log2(amax)) - 2                               the conversion of OCP MX v1.0 section 6.3
    even    floor(log2(amax rounded to one mantissa bit)) - 2   least weight error of the three
    rceil   ceil(log2(amax / 6))                                never clips

An element is then rounded to the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 times the scale, ties to the even mantissa, and
saturates at 6. Everything is read off fp32 bits: log2() in floating point picks the wrong scale one ulp from a power
of two. No step below rounds except the one that is meant to, so the result is exact; a zero block has scale byte 0,
and negative zero becomes code 0, so that equal values have equal bytes.

Legend: Q MX blocks along the input (input dim / 32).
"""

from typing import Literal, get_args

import torch
from torch import Tensor

ScaleMode = Literal["even", "floor", "rceil"]
SCALE_MODES: tuple[ScaleMode, ...] = get_args(ScaleMode)
MX_BLOCK_SIZE = 32
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MANTISSA_BITS = 23   # of fp32, whose bits all rules below read
_MANTISSA = (1 << _MANTISSA_BITS) - 1
_E2M1_MAX_EXPONENT = 2   # 6 = 1.5 * 2**2
_E8M0_BIAS = 127


def _scale_exponents_ref(amax_Q: Tensor, *, scale_mode: ScaleMode) -> Tensor:
    """Unbiased block exponents, int32, in -127..127; amax fp32, finite and not negative."""
    # frexp is exact for subnormals too, where the exponent field alone is not the exponent.
    mantissa_Q, exponent_Q = torch.frexp(amax_Q)   # amax = mantissa * 2**exponent, mantissa in [0.5, 1)
    exponent_Q = exponent_Q - 1                    # floor(log2(amax))
    if scale_mode == "floor":
        shift_Q = torch.zeros_like(exponent_Q)
    elif scale_mode == "even":   # 1.75 and above round up to 2 at one mantissa bit
        shift_Q = (mantissa_Q >= 0.875).to(torch.int32)
    elif scale_mode == "rceil":  # amax / 6 > 2**(e - 2) exactly when the mantissa exceeds 1.5
        shift_Q = (mantissa_Q > 0.75).to(torch.int32)
    else:
        raise ValueError(f"quantize_mxfp4: scale_mode must be one of {', '.join(SCALE_MODES)}; got {scale_mode!r}.")
    exponents_Q = (exponent_Q + shift_Q - _E2M1_MAX_EXPONENT).clamp(-_E8M0_BIAS, _E8M0_BIAS)
    return torch.where(amax_Q == 0, -_E8M0_BIAS, exponents_Q).to(torch.int32)


def _check_input(w: Tensor) -> None:
    if not w.is_floating_point():
        raise TypeError(f"quantize_mxfp4: weights must be a floating-point tensor; got {w.dtype}.")
    if w.dim() == 0 or w.shape[-1] % MX_BLOCK_SIZE:
        raise ValueError(
            f"quantize_mxfp4: the last (input) dimension must be a multiple of {MX_BLOCK_SIZE}, one MX block; "
            f"got shape {tuple(w.shape)}. Keep this tensor at its precision, or pad it before quantizing.")


def _round_blocks_ref(w: Tensor, *, scale_mode: ScaleMode) -> tuple[Tensor, Tensor]:
    """E2M1 values in units of the scale, fp32 [..., Q, 32], and the unbiased exponents, int32 [..., Q]."""
    _check_input(w)
    # fp64 stays: widening is exact, narrowing would round twice
    blocks = (w if w.dtype == torch.float64 else w.float()).unflatten(-1, (w.shape[-1] // MX_BLOCK_SIZE, MX_BLOCK_SIZE))
    amax_Q = blocks.abs().amax(-1) if w.numel() else blocks.new_zeros(blocks.shape[:-1])
    largest = torch.finfo(torch.float32).max
    if not bool((amax_Q <= largest).all()):   # false for NaN too
        index = tuple(int(i) for i in (~(blocks.flatten(-2).abs() <= largest)).nonzero()[0])
        raise ValueError(
            f"quantize_mxfp4: weights must be finite; got {float(w[index])} at index {index} of shape {tuple(w.shape)}. "
            "NaN, infinity and what float32 cannot hold have no MXFP4 code: repair the weight before quantizing.")
    exponents_Q = _scale_exponents_ref(amax_Q, scale_mode=scale_mode)
    scaled = torch.ldexp(blocks, -exponents_Q[..., None])   # exact: at most 8, except where the exponent was clamped
    # The grid's step is 0.5 below 2, 1 below 4 and 2 above: 2**(clamp(floor(log2), 0, 2) - 1).
    step_exponents = (torch.frexp(scaled).exponent - 1).clamp(0, _E2M1_MAX_EXPONENT) - 1
    values = torch.ldexp(torch.round(torch.ldexp(scaled, -step_exponents)), step_exponents)   # round() ties to even
    return values.clamp(-6.0, 6.0), exponents_Q


def quantize_mxfp4_ref(w: Tensor, *, scale_mode: ScaleMode) -> tuple[Tensor, Tensor]:
    """Round each run of 32 weights along the last dim to E2M1 codes under one shared E8M0 scale.

    Shapes: w [..., D], D a multiple of 32, any float dtype. Returns codes uint8 [..., D/32, 32] in 0..15, never 8,
        and scales uint8 [..., D/32].
    Units: a scale s means 2**(s - 127); a code is sign << 3 | index into E2M1_MAGNITUDES.
    Numerics: exact; ties to even; saturates at 6 * scale; NaN or infinity raises ValueError with its index.
    Source: OCP MX v1.0 sections 5.3.3 (E2M1), 5.4.1 (E8M0), 6.3 (conversion).
    """
    values, exponents_Q = _round_blocks_ref(w, scale_mode=scale_mode)
    # Twice the magnitude is 0, 1, 2, 3, 4, 6, 8, 12: the index is the number of bounds it reaches.
    twice = (values.abs() * 2).to(torch.int32)
    bounds = torch.tensor([1, 2, 3, 4, 6, 8, 12], dtype=torch.int32, device=w.device)
    codes = torch.bucketize(twice.contiguous(), bounds, right=True)
    codes = codes + 8 * (values < 0)
    return codes.to(torch.uint8), (exponents_Q + _E8M0_BIAS).to(torch.uint8)
