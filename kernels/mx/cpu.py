"""The ops on a CPU, ten times as fast as their twins and bit-equal to them: bf16 is 16 bits, and so are all the steps.

A bf16 magnitude is exponent << 7 | mantissa, so the numbers are in the order of their bits, and dividing by 2**(s - 127) subtracts
(s - 127) << 7. With t = bits - (s << 7), |y| = |w| / scale is 1 at t = 0, 0.75 at -64, 0.25 at -256, and one binade wide every 128:

    index into E2M1_MAGNITUDES = (t > -256) + (t >= -64) + clamp(round_half_even(t / 64), 0, 5)

The first two terms are 0, 0.5 and 1 with their ties (0.25 to 0, 0.75 to 1); from 1 on one mantissa bit is left, a step of 64, and the
sixth step above 1 is 6, where it saturates. t fits int16 since s is at most two below the block's largest exponent and 252 at most.
Blocks whose largest magnitude is tiny (below 2**-122) or not finite, and scale mode `mse`, are left to the twin.

Cost: some fifteen passes over pieces that stay in the cache; 7 ns a weight and thread to quantize and 2 to read back, where the twins take 92 and 17.
"""

import torch
from torch import Tensor

from .format import E2M1_MAGNITUDES, MX_BLOCK_SIZE, ScaleMode

_PIECE = 2**18              # weights at a time: 512 KB of bf16
_SMALLEST = 5 << 7          # bits of 2**-122: from here on a subnormal weight is less than a quarter of the scale, and so code 0
_INFINITY = 0x7F80
# Added to the bits of the largest magnitude, what carries into the exponent: 1.75 for even, more than 1.5 for rceil.
_CARRY: dict[str, int] = {"floor": 0, "even": 0x20, "rceil": 0x3F}


def quantize_mxfp4_cpu(w: Tensor, *, scale_mode: ScaleMode) -> tuple[Tensor, Tensor] | None:
    """Blocks and scales of a bf16 weight [..., D], D a multiple of 32, scales not checked; None for what is left to the twin."""
    bits = w.contiguous().view(torch.int16)
    rows = bits.reshape(-1, MX_BLOCK_SIZE)
    amax = _amax(rows)
    usual = scale_mode in _CARRY and bool(((amax == 0) | ((amax >= _SMALLEST) & (amax < _INFINITY))).all())
    if not usual:
        return None
    scales = torch.where(amax == 0, 0, ((amax + _CARRY[scale_mode]) >> 7) - 2)
    blocks = torch.empty(rows.shape[0], MX_BLOCK_SIZE // 2, dtype=torch.uint8)
    step = _PIECE // MX_BLOCK_SIZE
    for start in range(0, rows.shape[0], step):
        _encode(rows[start: start + step], scales[start: start + step], out=blocks[start: start + step])
    leading = (*w.shape[:-1], w.shape[-1] // MX_BLOCK_SIZE)
    return blocks.view(*leading, MX_BLOCK_SIZE // 2), scales.to(torch.uint8).view(leading)


def dequantize_mxfp4_cpu(blocks: Tensor, scales: Tensor) -> Tensor:
    """bf16 weights of blocks [..., Q, 16] and scales [..., Q] that were checked: 0 to 252."""
    flat, exponents = blocks.reshape(-1, MX_BLOCK_SIZE // 2), scales.reshape(-1).to(torch.int16)
    # 2**(s - 127) as bf16: s << 7, and for s = 0 the subnormal 2**-127
    factors = torch.where(exponents == 0, 0x40, exponents << 7).view(torch.bfloat16)
    out = torch.empty(flat.shape[0], MX_BLOCK_SIZE, dtype=torch.bfloat16)
    step = _PIECE // MX_BLOCK_SIZE
    for start in range(0, flat.shape[0], step):
        piece = flat[start: start + step]
        pairs = torch.index_select(_PAIRS, 0, piece.reshape(-1).int())   # two bf16 values a byte
        torch.mul(pairs.view(torch.bfloat16).view(-1, MX_BLOCK_SIZE), factors[start: start + step, None], out=out[start: start + step])
    return out.view(*scales.shape[:-1], scales.shape[-1] * MX_BLOCK_SIZE)


def _amax(rows: Tensor) -> Tensor:
    """Bits of the largest magnitude of each row, int16; NaN and infinity are the largest there are."""
    result = torch.empty(rows.shape[0], dtype=torch.int16)
    step = _PIECE // MX_BLOCK_SIZE
    for start in range(0, rows.shape[0], step):
        torch.amax(rows[start: start + step] & 0x7FFF, 1, out=result[start: start + step])
    return result


def _encode(bits: Tensor, scales: Tensor, *, out: Tensor) -> None:
    """Codes of blocks [N, 32], packed into out [N, 16]."""
    t = (bits & 0x7FFF).sub_((scales.clamp(min=3) << 7)[:, None])   # 3 is the least of a block that is not zero
    codes = t >> 6
    codes &= 1
    codes += t
    codes += 31
    codes >>= 6
    codes.clamp_(0, 5)
    codes += (t + 65).clamp_(0, 1)                       # t >= -64; comparisons to bool take six times as long
    sign = (bits >> 12).bitwise_and_(8).bitwise_or_(1)   # with the 0.5 that only a weight which is not zero has: no negative zero
    sign *= t.add_(256).clamp_(0, 1)                     # t > -256
    codes += sign
    pairs = codes.view(torch.int32)                      # the even element in the low half
    out.copy_((pairs | (pairs >> 12)).bitwise_and_(0xFF))


def _pairs() -> Tensor:
    """The two values of each byte as bf16 side by side in an int32, the low nibble's first in memory."""
    values = torch.tensor([*E2M1_MAGNITUDES, *(-m for m in E2M1_MAGNITUDES)], dtype=torch.bfloat16)
    byte = torch.arange(256)
    return torch.stack((values[byte & 15], values[byte >> 4]), 1).contiguous().view(torch.int32).flatten()


_PAIRS = _pairs()
