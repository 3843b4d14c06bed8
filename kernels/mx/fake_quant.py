# Device code has no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Quantize and dequantize in one step: what training sees of a weight that will be packed."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .cpu import dequantize_mxfp4_cpu, quantize_mxfp4_cpu
from .device import choose_scale, read_back, read_source, round_elements, write_result
from .format import MX_BLOCK_SIZE, ScaleMode
from .launch import bits_of, blocks_last, flag_of, launch_columns, launch_rows, source_of
from .quantize import _round_blocks_ref, check_scales_ref


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
    check_scales_ref(exponents + 127, where="fake_quant_mxfp4")
    # + 0.0 turns the -0.0 of a small negative weight into 0.0, as code 0 reads back
    return (torch.ldexp(values, exponents[..., None]).flatten(-2) + 0.0).to(w.dtype)


def fake_quant_mxfp4(
    w: Tensor, *, scale_mode: ScaleMode, dim: int = -1, out_dtype: torch.dtype = torch.bfloat16, faults: Tensor | None = None,
) -> Tensor:
    """The values that `w`, read as bf16, has after packing to MXFP4 and reading back.

    Shapes: w bf16 or fp32, w.shape[dim] a multiple of 32. Returns the shape of w in `out_dtype`, bf16 or fp32. MX blocks run
        along `dim`, -1 or -2.
    Numerics: exact on w rounded to bf16; negative zero becomes zero. The result is detached.
    Cost and errors: as `quantize_mxfp4`.
    """
    where = "fake_quant_mxfp4"
    if out_dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"{where}: out_dtype must be bfloat16 or float32; got {out_dtype}.")
    source, inner_dim = source_of(w, dim=dim, scale_mode=scale_mode, where=where)
    if source.device.type == "cpu":
        result = _fake_quant_on_cpu(blocks_last(source, dim=inner_dim), scale_mode=scale_mode).to(out_dtype)
        out = result if inner_dim == -1 else result.mT.contiguous()   # laid out as w: a product's last bits depend on it
        return out if inner_dim == dim else out.mT
    out = torch.empty_like(source, dtype=out_dtype)
    flag = flag_of(faults, device=w.device, where=where)
    if inner_dim == -1:
        launch_rows(_fake_quant_rows_kernel, source.numel() // MX_BLOCK_SIZE, bits_of(source), bits_of(out), flag, MODE=scale_mode)
    else:
        num_rows = source.shape[:-1].numel() // MX_BLOCK_SIZE
        launch_columns(_fake_quant_columns_kernel, num_rows, source.shape[-1], bits_of(source), bits_of(out), flag, MODE=scale_mode, where=where)
    if faults is None and int(flag):
        fake_quant_mxfp4_ref(blocks_last(source, dim=inner_dim), scale_mode=scale_mode)   # finds and names the weight
        raise RuntimeError(f"{where}: the kernel met a weight without a code, and its twin met none. Report this with the weight.")
    return out if inner_dim == dim else out.mT


def _fake_quant_on_cpu(w: Tensor, *, scale_mode: ScaleMode) -> Tensor:
    packed = quantize_mxfp4_cpu(w, scale_mode=scale_mode)
    if packed is None:
        return fake_quant_mxfp4_ref(w, scale_mode=scale_mode)
    check_scales_ref(packed[1], where="fake_quant_mxfp4")
    return dequantize_mxfp4_cpu(*packed)


@triton.jit
def _fake_quant_rows_kernel(w_ptr, out_ptr, faults_ptr, num_blocks, MODE: tl.constexpr, BLOCKS: tl.constexpr):
    """BLOCKS consecutive MX blocks of 32 consecutive weights."""
    first = tl.program_id(0) * BLOCKS
    row = tl.arange(0, BLOCKS)[:, None]
    mask = row < num_blocks - first
    offset = row * 32 + tl.arange(0, 32)[None, :]
    base = first.to(tl.int64) * 32
    x = read_source(w_ptr + base + offset, mask)
    scale_byte, fault = choose_scale(x, MODE, 1)
    write_result(out_ptr + base + offset, read_back(round_elements(x, scale_byte), scale_byte), mask)
    tl.store(faults_ptr + row * 0, 1, mask=mask & fault)


@triton.jit
def _fake_quant_columns_kernel(w_ptr, out_ptr, faults_ptr, columns, MODE: tl.constexpr, COLUMNS: tl.constexpr):
    """One row of MX blocks, each 32 rows high: weights [R * 32, columns]."""
    tiles = tl.cdiv(columns, COLUMNS)
    row = tl.program_id(0) // tiles
    first = tl.program_id(0) % tiles * COLUMNS
    column = tl.arange(0, COLUMNS)[None, :]
    mask = column < columns - first
    offset = tl.arange(0, 32)[:, None] * columns + column
    base = row.to(tl.int64) * 32 * columns + first
    x = read_source(w_ptr + base + offset, mask)
    scale_byte, fault = choose_scale(x, MODE, 0)
    write_result(out_ptr + base + offset, read_back(round_elements(x, scale_byte), scale_byte), mask)
    tl.store(faults_ptr + column * 0, 1, mask=mask & fault)
