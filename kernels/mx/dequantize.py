"""From packed E2M1 codes and E8M0 scales to weights."""

import torch
from torch import Tensor

from .pack import unpack_codes_ref
from .quantize import E2M1_MAGNITUDES

# 6 * 2**(252 - 127) is the largest value bf16 and fp32 hold; 4 * 2**126 and above overflow both.
MAX_EXACT_SCALE = 252


def dequantize_mxfp4_ref(blocks: Tensor, scales: Tensor, *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The weights that packed MXFP4 bytes stand for.

    Shapes: blocks uint8 [..., Q, 16], scales uint8 [..., Q]. Returns `dtype` [..., 32 * Q].
    Numerics: exact in bf16 and fp32 for scales 0..252. A scale of 255 is NaN and 253, 254 overflow: both raise
        ValueError, as does a dtype with fewer exponent bits (fp16 holds scales 104..140 only).
    Source: OCP MX v1.0 section 5.4.1.
    """
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise TypeError(f"dequantize_mxfp4: blocks and scales must be uint8; got {blocks.dtype} and {scales.dtype}.")
    if blocks.dim() < 2 or blocks.shape[-1] != 16 or blocks.shape[:-1] != scales.shape:
        raise ValueError(f"dequantize_mxfp4: blocks must be [..., Q, 16] with scales [..., Q]; got {tuple(blocks.shape)} and {tuple(scales.shape)}.")
    if dtype not in (torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f"dequantize_mxfp4: {dtype} cannot hold every MXFP4 value. Use bfloat16 or float32.")
    if scales.numel() and int(scales.max()) > MAX_EXACT_SCALE:
        index = tuple(int(i) for i in (scales > MAX_EXACT_SCALE).nonzero()[0])
        raise ValueError(
            f"dequantize_mxfp4: scale byte {int(scales[index])} at index {index} is {'NaN' if int(scales[index]) == 255 else 'beyond float32'}; "
            f"the largest that weights can use is {MAX_EXACT_SCALE}. The checkpoint is damaged or not MXFP4.")
    table = torch.tensor([*E2M1_MAGNITUDES, *(-m for m in E2M1_MAGNITUDES)], dtype=torch.float32, device=blocks.device)
    values = table[unpack_codes_ref(blocks).int()]
    weights = torch.ldexp(values, scales[..., None].int() - 127)
    return weights.flatten(-2).to(dtype)
