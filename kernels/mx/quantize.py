# Device code has no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""From weights to E2M1 codes and E8M0 scales.

A block is 32 consecutive weights along the last dim. Its scale is a power of two, 2**(s - 127), chosen from the
block's largest magnitude (amax) by a rule, `scale_mode`:

    floor   floor(log2(amax)) - 2                               the conversion of OCP MX v1.0 section 6.3
    even    floor(log2(amax rounded to one mantissa bit)) - 2   least weight error of the three rules that read amax only
    rceil   ceil(log2(amax / 6))                                never clips
    mse     the best of floor, floor + 1 and floor - 1          least squared error over the block

An element is then rounded to the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 times the scale, ties to the even mantissa, and
saturates at 6. Everything is read off fp32 bits: log2() in floating point picks the wrong scale one ulp from a power
of two. No step below rounds except the one that is meant to, so the result is exact; a zero block has scale byte 0,
and negative zero becomes code 0, so that equal values have equal bytes.

`mse` must not depend on the order of a sum, so its error is an integer. In units of 2**floor a weight is |x| < 8 and its
rounding q, whichever candidate's grid it is on, an exact fp32 number; d = |x - q| is exact too and at most 5 (floor - 1
saturates at 3). An element's error is d * d, rounded to fp32, in units of 2**-20 cut to an integer: 32 of them stay
below 2**30. On a tie floor wins, then floor + 1. Candidates below -127 are -127, and so tie with it.
`floor`, `even` and `mse` return their own bytes when what they gave is quantized again; `rceil` may lower the scale.
For `mse`: a candidate c can err by 0 the second time, so c returns if it is then the floor, that is, if the largest code
is 4 or 6. For floor it is, as amax is at least 4; for floor - 1 it is 6, as amax is at least 8. For floor + 1 it could be
2 or 3, but only if every |x| is below 7, and up to there each value of that grid (0, 1, 2, 3, 4, 6) is one of floor's, so
that floor errs no more in any element and wins. At -127 the second floor is -127 again, whatever the codes.

Legend: Q MX blocks along the input (input dim / 32).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .cpu import quantize_mxfp4_cpu
from .device import choose_scale, encode, read_source, round_elements
from .format import E2M1_MAGNITUDES, MAX_EXACT_SCALE, MX_BLOCK_SIZE, SCALE_MODES, ScaleMode
from .launch import bits_of, blocks_last, flag_of, launch_columns, launch_rows, source_of
from .pack import pack_codes_ref

_E2M1_MAX_EXPONENT = 2   # 6 = 1.5 * 2**2
_E8M0_BIAS = 127


def _scale_exponents_ref(blocks: Tensor, amax_Q: Tensor, *, scale_mode: ScaleMode) -> Tensor:
    """Unbiased exponents, int32, in -127..127, of blocks [..., Q, 32] whose largest magnitudes are amax_Q, finite."""
    # frexp is exact for subnormals too, where the exponent field alone is not the exponent.
    mantissa_Q, exponent_Q = torch.frexp(amax_Q)   # amax = mantissa * 2**exponent, mantissa in [0.5, 1)
    exponent_Q = exponent_Q - 1                    # floor(log2(amax))
    if scale_mode in ("floor", "mse"):
        shift_Q = torch.zeros_like(exponent_Q)
    elif scale_mode == "even":   # 1.75 and above round up to 2 at one mantissa bit
        shift_Q = (mantissa_Q >= 0.875).to(torch.int32)
    elif scale_mode == "rceil":  # amax / 6 > 2**(e - 2) exactly when the mantissa exceeds 1.5
        shift_Q = (mantissa_Q > 0.75).to(torch.int32)
    else:
        raise ValueError(f"quantize_mxfp4: scale_mode must be one of {', '.join(SCALE_MODES)}; got {scale_mode!r}.")
    exponents_Q = (exponent_Q + shift_Q - _E2M1_MAX_EXPONENT).clamp(-_E8M0_BIAS, _E8M0_BIAS)
    exponents_Q = torch.where(amax_Q == 0, -_E8M0_BIAS, exponents_Q).to(torch.int32)
    return _least_error_ref(blocks, exponents_Q) if scale_mode == "mse" else exponents_Q


def _least_error_ref(blocks: Tensor, floor_Q: Tensor) -> Tensor:
    """The exponent of least error of floor, floor + 1 and floor - 1, in the order in which they win ties."""
    x = torch.ldexp(blocks, -floor_Q[..., None])
    best_Q, least_Q = floor_Q, _squared_error_ref(x, torch.zeros_like(floor_Q))
    for step in (1, -1):
        candidate_Q = (floor_Q + step).clamp(-_E8M0_BIAS, _E8M0_BIAS)
        error_Q = _squared_error_ref(x, candidate_Q - floor_Q)
        best_Q = torch.where(error_Q < least_Q, candidate_Q, best_Q)
        least_Q = torch.minimum(error_Q, least_Q)
    return best_Q


def _squared_error_ref(x: Tensor, shift_Q: Tensor) -> Tensor:
    """Sum over each block of (x - rounding of x under the scale 2**shift)**2, in units of 2**-20, each term cut to an integer."""
    shift = shift_Q[..., None]
    d = (x - torch.ldexp(_round_elements_ref(torch.ldexp(x, -shift)), shift)).float()
    return (d * d * 2.0**20).to(torch.int32).sum(-1)


def _round_elements_ref(scaled: Tensor) -> Tensor:
    """To the nearest E2M1 value, ties to the even mantissa, saturating."""
    # The grid's step is 0.5 below 2, 1 below 4 and 2 above: 2**(clamp(floor(log2), 0, 2) - 1).
    step_exponents = (torch.frexp(scaled).exponent - 1).clamp(0, _E2M1_MAX_EXPONENT) - 1
    values = torch.ldexp(torch.round(torch.ldexp(scaled, -step_exponents)), step_exponents)   # round() ties to even
    return values.clamp(-6.0, 6.0)


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
    exponents_Q = _scale_exponents_ref(blocks, amax_Q, scale_mode=scale_mode)
    scaled = torch.ldexp(blocks, -exponents_Q[..., None])   # exact: below 16, except where the exponent was clamped
    return _round_elements_ref(scaled), exponents_Q


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
    bounds = torch.tensor([2 * m for m in E2M1_MAGNITUDES[1:]], dtype=torch.int32, device=w.device)
    codes = torch.bucketize(twice.contiguous(), bounds, right=True)
    codes = codes + 8 * (values < 0)
    return codes.to(torch.uint8), (exponents_Q + _E8M0_BIAS).to(torch.uint8)


def check_scales_ref(scales: Tensor, *, where: str) -> None:
    """ValueError for scale bytes (any integer dtype) that no reader in bf16 or fp32 can use."""
    if scales.numel() and int(scales.max()) > MAX_EXACT_SCALE:
        raise ValueError(f"{where}: a block needs scale byte {int(scales.max())}, whose values bf16 and fp32 cannot hold; the largest is "
                         f"{MAX_EXACT_SCALE}. The weight has diverged: repair it before quantizing.")


def quantize_mxfp4(w: Tensor, *, scale_mode: ScaleMode, dim: int = -1, faults: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Weights to packed codes and scales: bytes whose `dequantize_mxfp4` is `fake_quant_mxfp4` of the same weights.

    Shapes: w bf16 or fp32, D = w.shape[dim] a multiple of 32. Returns blocks uint8 [..., D/32, 16] (low nibble: the even
        element) and scales uint8 [..., D/32]. MX blocks run along `dim`, -1 or -2; w [E, D, F] with dim -2 gives the order
        of checkpoints, blocks [E, F, D/32, 16].
    Numerics: exact on w rounded to bf16. The result is detached.
    Cost: on CUDA one kernel; on the CPU `cpu.py`. A w that is neither contiguous nor a contiguous tensor with its last two
        dimensions exchanged is copied first. Without `faults` one flag is read back, which waits for the device.
    Errors: ValueError with index (counted with D last) for NaN, infinity and scales beyond 252. Given `faults`, int32 [1] on
        the device of w, a CUDA call stores 1 there instead and returns; its result is then undefined.
    """
    where = "quantize_mxfp4"
    source, dim = source_of(w, dim=dim, scale_mode=scale_mode, where=where)
    if source.device.type == "cpu":
        return _quantize_on_cpu(blocks_last(source, dim=dim), scale_mode=scale_mode)
    depth, columns = source.shape[dim], source.shape[-1]
    leading = source.shape[:-1] if dim == -1 else (*source.shape[:-2], columns)
    num_Q = depth // MX_BLOCK_SIZE
    blocks = torch.empty((*leading, num_Q, MX_BLOCK_SIZE // 2), dtype=torch.uint8, device=w.device)
    scales = torch.empty((*leading, num_Q), dtype=torch.uint8, device=w.device)
    flag = flag_of(faults, device=w.device, where=where)
    if dim == -1:
        launch_rows(_quantize_rows_kernel, scales.numel(), bits_of(source), blocks, scales, flag, MODE=scale_mode)
    else:
        num_rows = source.shape[:-2].numel() * num_Q
        launch_columns(_quantize_columns_kernel, num_rows, columns, bits_of(source), blocks, scales, flag, num_Q, MODE=scale_mode, where=where)
    if faults is None and int(flag):
        _quantize_packed_ref(blocks_last(source, dim=dim), scale_mode=scale_mode)   # finds and names the weight
        raise RuntimeError(f"{where}: the kernel met a weight without a code, and its twin met none. Report this with the weight.")
    return blocks, scales


def _quantize_on_cpu(w: Tensor, *, scale_mode: ScaleMode) -> tuple[Tensor, Tensor]:
    packed = quantize_mxfp4_cpu(w, scale_mode=scale_mode)
    if packed is None:
        return _quantize_packed_ref(w, scale_mode=scale_mode)
    check_scales_ref(packed[1], where="quantize_mxfp4")
    return packed


def _quantize_packed_ref(w: Tensor, *, scale_mode: ScaleMode) -> tuple[Tensor, Tensor]:
    codes, scales = quantize_mxfp4_ref(w, scale_mode=scale_mode)
    check_scales_ref(scales, where="quantize_mxfp4")
    return pack_codes_ref(codes), scales


@triton.jit
def _quantize_rows_kernel(w_ptr, blocks_ptr, scales_ptr, faults_ptr, num_blocks, MODE: tl.constexpr, BLOCKS: tl.constexpr):
    """BLOCKS consecutive MX blocks of 32 consecutive weights."""
    first = tl.program_id(0) * BLOCKS
    row = tl.arange(0, BLOCKS)[:, None]
    mask = row < num_blocks - first
    x = read_source(w_ptr + first.to(tl.int64) * 32 + (row * 32 + tl.arange(0, 32)[None, :]), mask)
    scale_byte, fault = choose_scale(x, MODE, 1)
    low, high = tl.split(tl.reshape(encode(round_elements(x, scale_byte)), [BLOCKS, 16, 2]))
    tl.store(blocks_ptr + first.to(tl.int64) * 16 + (row * 16 + tl.arange(0, 16)[None, :]), (low | (high << 4)).to(tl.uint8), mask=mask)
    tl.store(scales_ptr + first + row, scale_byte.to(tl.uint8), mask=mask)
    tl.store(faults_ptr + row * 0, 1, mask=mask & fault)


@triton.jit
def _quantize_columns_kernel(w_ptr, blocks_ptr, scales_ptr, faults_ptr, num_Q, columns, MODE: tl.constexpr, COLUMNS: tl.constexpr):
    """One row of MX blocks, each 32 rows high: weights [E * num_Q * 32, columns], blocks [E, columns, num_Q, 16]."""
    tiles = tl.cdiv(columns, COLUMNS)
    row = tl.program_id(0) // tiles
    first = tl.program_id(0) % tiles * COLUMNS
    column = tl.arange(0, COLUMNS)[None, :]
    mask = column < columns - first
    x = read_source(w_ptr + row.to(tl.int64) * 32 * columns + first + (tl.arange(0, 32)[:, None] * columns + column), mask)
    scale_byte, fault = choose_scale(x, MODE, 0)
    pairs = tl.permute(tl.reshape(encode(round_elements(x, scale_byte)), [16, 2, COLUMNS]), (0, 2, 1))
    low, high = tl.split(pairs)
    block = (row // num_Q * columns + first).to(tl.int64) * num_Q + row % num_Q   # of the tile's first column
    tl.store(blocks_ptr + block * 16 + (column * num_Q * 16 + tl.arange(0, 16)[:, None]), (low | (high << 4)).to(tl.uint8), mask=mask)
    tl.store(scales_ptr + block + column * num_Q, scale_byte.to(tl.uint8), mask=mask)
    tl.store(faults_ptr + column * 0, 1, mask=mask & fault)
