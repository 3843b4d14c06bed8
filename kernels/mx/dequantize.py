# Device code has no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""From packed E2M1 codes and E8M0 scales to weights."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .cpu import dequantize_mxfp4_cpu
from .device import decode, write_result
from .format import E2M1_MAGNITUDES, MAX_EXACT_SCALE, MX_BLOCK_SIZE
from .launch import bits_of, launch_rows
from .pack import unpack_codes_ref


def _check_packed(blocks: Tensor, scales: Tensor, *, dtype: torch.dtype) -> None:
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


def dequantize_mxfp4_ref(blocks: Tensor, scales: Tensor, *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The weights that packed MXFP4 bytes stand for.

    Shapes: blocks uint8 [..., Q, 16], scales uint8 [..., Q]. Returns `dtype` [..., 32 * Q].
    Numerics: exact in bf16 and fp32 for scales 0..252. A scale of 255 is NaN and 253, 254 overflow: both raise
        ValueError, as does a dtype with fewer exponent bits (fp16 holds scales 104..140 only).
    Source: OCP MX v1.0 section 5.4.1.
    """
    _check_packed(blocks, scales, dtype=dtype)
    table = torch.tensor([*E2M1_MAGNITUDES, *(-m for m in E2M1_MAGNITUDES)], dtype=torch.float32, device=blocks.device)
    values = table[unpack_codes_ref(blocks).int()]
    weights = torch.ldexp(values, scales[..., None].int() - 127)
    return weights.flatten(-2).to(dtype)


def dequantize_mxfp4(blocks: Tensor, scales: Tensor, *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The weights that packed MXFP4 bytes stand for: `cpu.py` on the CPU, a kernel on CUDA.

    Shapes: blocks uint8 [..., Q, 16], scales uint8 [..., Q]. Returns `dtype`, bf16 or fp32, [..., 32 * Q].
    Cost: on CUDA the largest scale is read back first, which waits for the device; tensors that are not contiguous are copied.
    """
    if blocks.device.type not in ("cpu", "cuda") or scales.device != blocks.device:
        raise NotImplementedError(f"dequantize_mxfp4: runs on cpu and cuda, with both tensors there; got {blocks.device} and {scales.device}.")
    if dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"dequantize_mxfp4: dtype must be bfloat16 or float32; got {dtype}.")
    if blocks.device.type == "cpu":
        _check_packed(blocks, scales, dtype=dtype)
        return dequantize_mxfp4_cpu(blocks, scales).to(dtype)
    _check_packed(blocks, scales, dtype=dtype)
    out = torch.empty((*scales.shape[:-1], scales.shape[-1] * MX_BLOCK_SIZE), dtype=dtype, device=blocks.device)
    words = _words(blocks)
    launch_rows(_dequantize_kernel, scales.numel(), words, scales.contiguous(), bits_of(out))
    return out


def _words(blocks: Tensor) -> Tensor:
    """Blocks as int32, eight codes a word; copied where they do not lie on a word boundary."""
    blocks = blocks.contiguous()
    return (blocks if blocks.storage_offset() % 4 == 0 else blocks.clone()).view(torch.int32)


@triton.jit
def _dequantize_kernel(words_ptr, scales_ptr, out_ptr, num_blocks, BLOCKS: tl.constexpr):
    """BLOCKS MX blocks; a word of eight codes becomes eight neighbouring weights of one thread."""
    first = tl.program_id(0) * BLOCKS
    word = tl.arange(0, BLOCKS * 4)[:, None]   # four words a block
    mask = word // 4 < num_blocks - first
    packed = tl.load(words_ptr + first.to(tl.int64) * 4 + word, mask=mask, other=0)
    scale_byte = tl.load(scales_ptr + first + word // 4, mask=mask, other=0).to(tl.int32)
    element = tl.arange(0, 8)[None, :]
    write_result(out_ptr + first.to(tl.int64) * 32 + (word * 8 + element), decode(packed >> (element * 4), scale_byte), mask)
