# Device code has no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""MXFP4 rounding in registers: the device functions that the kernels of this folder share.

Each is the bit-for-bit counterpart of a step of the twin in quantize.py, cheap enough to hide behind memory: a kernel at
the speed of a copy has about 30 instructions an element on an H200, half of them integer, and this takes about a dozen.

    amax      largest magnitude as fp32 bits: for non-negative floats the order of the bits is the order of the values
    scale     byte s = exponent field of (amax, bumped by the rule) - 2, at least 0: one add, one shift, one max a block.
              A subnormal amax has field 0 or 1, and the twin's scale for it is the clamped one as well
    scaling   x * 2**(127 - s): the field of that power is 254 - s, never subnormal, so one product is exact. What it loses
              below 2**-149 rounds to zero anyway
    element   a = min(|x|, 6); with b = 2**floor(log2(max(a, 1))), adding and subtracting 1.5 * 2**22 * b rounds a to a
              multiple of b / 2, ties to even: the adder does the work. Clamping first or last is the same
    result    2**(s - 127) is subnormal for s = 0, which fp32 multiplies exactly; x * y + 0 turns -0 into 0

None of it survives fast-math or flushed subnormals; contraction into FMA changes nothing, as every product is exact.
bf16 travels as int16 bits: its value in fp32 is those bits above 16 zeros, and results, exact in bf16, are cut back so.
"""

import triton
import triton.language as tl

_MAX_SCALE_BYTE = tl.constexpr(252)         # MAX_EXACT_SCALE
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_SIGN = tl.constexpr(-0x80000000)
_INFINITY = tl.constexpr(0x7F800000)        # also the mask of the exponent field
_SUBNORMAL_SCALE = tl.constexpr(0x400000)   # 2**-127
_ROUND = tl.constexpr(1.5 * 2**22)
_ERROR_UNIT = tl.constexpr(1024.0)          # its square is the 2**20 of the twin's integer error


@triton.jit
def read_source(pointers, mask):
    """Weights as fp32 values that bf16 holds: from the bits of bf16 (int16 pointers), or fp32 rounded to nearest even."""
    if pointers.dtype.element_ty == tl.int16:
        x = (tl.load(pointers, mask=mask, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        x = tl.load(pointers, mask=mask, other=0.0).to(tl.bfloat16).to(tl.float32)
    return x


@triton.jit
def write_result(pointers, values, mask):
    """fp32 as it is, or the upper half of its bits to int16 pointers (bf16); `values` must be exact in bf16."""
    if pointers.dtype.element_ty == tl.int16:
        tl.store(pointers, (values.to(tl.int32, bitcast=True) >> 16).to(tl.int16), mask=mask)
    else:
        tl.store(pointers, values, mask=mask)


@triton.jit
def power_of_two(scale_byte):
    """2**(scale_byte - 127), fp32; int32 in 0..254."""
    return tl.maximum(scale_byte << 23, _SUBNORMAL_SCALE).to(tl.float32, bitcast=True)


@triton.jit
def inverse_power_of_two(scale_byte):
    """2**(127 - scale_byte), fp32; int32 in 0..253."""
    return ((254 - scale_byte) << 23).to(tl.float32, bitcast=True)


@triton.jit
def binade_of(a, LOWEST: tl.constexpr):
    """2**floor(log2(max(a, LOWEST))), fp32; LOWEST a power of two."""
    return (tl.maximum(a, LOWEST).to(tl.int32, bitcast=True) & _INFINITY).to(tl.float32, bitcast=True)


@triton.jit
def round_to_half(a, binade):
    """a to a multiple of half its binade, ties to even."""
    shifter = binade * _ROUND
    return (a + shifter) - shifter


@triton.jit
def sum_of_squares(d, AXIS: tl.constexpr):
    return tl.sum((d * d).to(tl.int32), axis=AXIS, keep_dims=True)


@triton.jit
def least_error(a, lowest, AXIS: tl.constexpr):
    """The scale byte of least error of lowest, lowest + 1 and lowest - 1; a = |x| * 2**(127 - lowest)."""
    a = a * _ERROR_UNIT
    binade = binade_of(a, 0.5 * _ERROR_UNIT)
    least = sum_of_squares(a - tl.minimum(round_to_half(a, tl.maximum(binade, _ERROR_UNIT)), 6.0 * _ERROR_UNIT), AXIS)
    up = sum_of_squares(a - round_to_half(a, tl.maximum(binade, 2.0 * _ERROR_UNIT)), AXIS)   # its largest, 12, is out of reach
    down = sum_of_squares(a - tl.minimum(round_to_half(a, binade), 3.0 * _ERROR_UNIT), AXIS)
    best = tl.where(up < least, lowest + 1, lowest)
    return tl.where((down < tl.minimum(least, up)) & (lowest > 0), lowest - 1, best)


@triton.jit
def choose_scale(x, MODE: tl.constexpr, AXIS: tl.constexpr):
    """Scale bytes of the MX blocks along AXIS (kept, of size 1), and whether a block has no readable scale."""
    magnitude = x.to(tl.int32, bitcast=True) & _MAGNITUDE
    amax = tl.minimum(tl.max(magnitude, axis=AXIS, keep_dims=True), _INFINITY)   # NaN has bits above infinity's
    lowest = tl.maximum((amax >> 23) - 2, 0)
    scale_byte = lowest
    if MODE == "even":
        scale_byte = tl.maximum(((amax + 0x200000) >> 23) - 2, 0)   # from 1.75 on, the sum carries into the exponent
    elif MODE == "rceil":
        scale_byte = tl.maximum(((amax + 0x3FFFFF) >> 23) - 2, 0)   # above 1.5
    elif MODE == "mse":
        scale_byte = least_error(tl.abs(x) * inverse_power_of_two(lowest), lowest, AXIS)
    else:
        tl.static_assert(MODE == "floor")
    return scale_byte, tl.maximum(lowest, scale_byte) > _MAX_SCALE_BYTE


@triton.jit
def round_elements(x, scale_byte):
    """E2M1 values in units of the scale, fp32 with the sign of x: small negatives give -0.0."""
    a = tl.minimum(tl.abs(x) * inverse_power_of_two(scale_byte), 6.0)
    r = round_to_half(a, binade_of(a, 1.0))
    return (r.to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & _SIGN)).to(tl.float32, bitcast=True)


@triton.jit
def read_back(values, scale_byte):
    """The weights that E2M1 values stand for, without negative zeros."""
    return tl.fma(values, power_of_two(scale_byte), 0.0)


@triton.jit
def encode(values):
    """Codes 0..15, never 8, int32: 2**-126 times an E2M1 value has E2M1's own exponent and mantissa above bit 22."""
    bits = tl.fma(values, power_of_two(1), 0.0).to(tl.int32, bitcast=True)
    return ((bits >> 28) & 8) | ((bits >> 22) & 7)


@triton.jit
def decode(codes, scale_byte):
    """Weights from codes, int32 of which the low 4 bits count; code 8 gives -0.0. The inverse of `encode`, then the scale."""
    tiny = (((codes & 7) << 22) | ((codes & 8) << 28)).to(tl.float32, bitcast=True)
    return (tiny * 8.507059173023462e37) * power_of_two(scale_byte)   # 2**126 first: 2**(scale - 1) would overflow
