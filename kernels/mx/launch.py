"""What the ops of this folder share around their kernels: which tensors they take, and grids.

Two shapes of kernel cover both directions of MX blocks. Along the last dimension a weight is a flat run of blocks,
whatever its shape. Along the second last it is [R * 32, columns], a row of blocks being 32 rows high; leading dimensions
only add rows. A program of the first kind takes BLOCKS blocks, eight weights (16 bytes of bf16) a thread and load, four
threads a block. One of the second kind is a single warp with a tile of 32 rows and COLUMNS columns, so that the reduction
over rows stays inside the warp and each row is a full 128-byte line.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from .format import MX_BLOCK_SIZE, SCALE_MODES, ScaleMode

BLOCKS, ROW_WARPS = 64, 4
COLUMNS, COLUMN_WARPS = 64, 1
_MAX_COLUMNS = 2**25   # 31 * columns + COLUMNS, the offset inside a tile, is an int32


def source_of(w: Tensor, *, dim: int, scale_mode: ScaleMode, where: str) -> tuple[Tensor, int]:
    """`w` as a contiguous tensor and the dimension its MX blocks run along there: -1, or -2 where that saves a copy.

    Errors: TypeError, ValueError and NotImplementedError for what the ops do not take; `where` opens the message.
    """
    if not w.is_floating_point():
        raise TypeError(f"{where}: weights must be a floating-point tensor; got {w.dtype}.")
    if w.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"{where}: weights must be bfloat16 or float32; got {w.dtype}. Convert them first.")
    if w.device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"{where}: runs on cpu and cuda; got a tensor on {w.device}.")
    if scale_mode not in SCALE_MODES:
        raise ValueError(f"{where}: scale_mode must be one of {', '.join(SCALE_MODES)}; got {scale_mode!r}.")
    if dim not in (-1, -2):
        raise ValueError(f"{where}: MX blocks run along dim -1 or -2; got {dim}.")
    if w.dim() < -dim or w.shape[dim] % MX_BLOCK_SIZE:
        raise ValueError(f"{where}: dimension {dim} (input) must be a multiple of {MX_BLOCK_SIZE}, one MX block; "
                         f"got shape {tuple(w.shape)}. Keep this tensor at its precision, or pad it before quantizing.")
    w = w.detach()
    if w.dim() > 1 and not w.is_contiguous() and w.mT.is_contiguous():
        return w.mT, -3 - dim
    return w.contiguous(), dim


def blocks_last(source: Tensor, *, dim: int) -> Tensor:
    """The bf16 tensor that the twin reads: MX blocks along the last dimension."""
    return (source.mT if dim == -2 else source).to(torch.bfloat16)


def flag_of(faults: Tensor | None, *, device: torch.device, where: str) -> Tensor:
    """The caller's fault flag, or a new one."""
    if faults is None:
        return torch.zeros(1, dtype=torch.int32, device=device)
    if faults.dtype != torch.int32 or faults.numel() != 1 or faults.device != device:
        raise ValueError(f"{where}: faults must be one int32 on {device}; got {faults.dtype} {tuple(faults.shape)} on {faults.device}.")
    return faults


def bits_of(tensor: Tensor) -> Tensor:
    """bf16 as int16, which is how kernels take it; fp32 as it is."""
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


def launch_rows(kernel: Any, num_blocks: int, *tensors: Tensor, **constants: Any) -> None:
    """Run a kernel over `num_blocks` MX blocks that lie one after the other."""
    if num_blocks:
        with torch.cuda.device(tensors[0].device):
            kernel[(triton.cdiv(num_blocks, BLOCKS),)](*tensors, num_blocks, BLOCKS=BLOCKS, num_warps=ROW_WARPS, **constants)


def launch_columns(kernel: Any, num_rows: int, columns: int, *arguments: Tensor | int, where: str, **constants: Any) -> None:
    """Run a kernel over `num_rows` rows of MX blocks, each `columns` wide."""
    if columns > _MAX_COLUMNS:
        raise NotImplementedError(f"{where}: blocks along dim -2 take at most {_MAX_COLUMNS} columns; got {columns}. Split the tensor.")
    if num_rows and columns:
        assert isinstance(arguments[0], Tensor), "the weights come first"
        grid = (num_rows * triton.cdiv(columns, COLUMNS),)
        with torch.cuda.device(arguments[0].device):
            kernel[grid](*arguments, columns, COLUMNS=COLUMNS, num_warps=COLUMN_WARPS, **constants)
