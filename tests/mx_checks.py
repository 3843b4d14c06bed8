"""The MXFP4 kernels against their twins, bit for bit: plain functions for the tests, the benchmark and the interpreter.

A `Runner` is how a kernel is reached: through the public op on a CUDA device, or, without a GPU, through Triton's
interpreter, which runs the same device code in NumPy (`run_interpreted`, in a process started with TRITON_INTERPRET=1).
"""

import math
from collections.abc import Iterator
from typing import Protocol

import torch
import triton
from cases import CODE_VALUES, MODES, ScaleMode
from tolerances import assert_equal
from torch import Tensor

from kilotok.kernels.mx import (
    MAX_EXACT_SCALE,
    MX_BLOCK_SIZE,
    dequantize_mxfp4,
    dequantize_mxfp4_ref,
    fake_quant_mxfp4,
    fake_quant_mxfp4_ref,
    pack_codes_ref,
    quantize_mxfp4,
    quantize_mxfp4_ref,
)
from kilotok.kernels.mx.dequantize import _dequantize_kernel
from kilotok.kernels.mx.fake_quant import _fake_quant_columns_kernel, _fake_quant_rows_kernel
from kilotok.kernels.mx.launch import bits_of
from kilotok.kernels.mx.quantize import _quantize_columns_kernel, _quantize_rows_kernel


class Runner(Protocol):
    """Tensors in and out are on the CPU; `fault` says whether the kernel raised its flag."""

    def fake_quant(self, w: Tensor, *, mode: ScaleMode, dim: int, out_dtype: torch.dtype) -> tuple[Tensor, bool]: ...
    def quantize(self, w: Tensor, *, mode: ScaleMode, dim: int) -> tuple[Tensor, Tensor, bool]: ...
    def dequantize(self, blocks: Tensor, scales: Tensor, *, dtype: torch.dtype) -> Tensor: ...


class OnDevice:
    """The public ops on a CUDA device. Memory that results land in held NaN bits before."""

    def __init__(self, device: str = "cuda") -> None:
        self.device = torch.device(device, torch.cuda.current_device())

    def fake_quant(self, w: Tensor, *, mode: ScaleMode, dim: int, out_dtype: torch.dtype) -> tuple[Tensor, bool]:
        source, faults = self._poison(w), torch.zeros(1, dtype=torch.int32, device=self.device)
        out = fake_quant_mxfp4(source, scale_mode=mode, dim=dim, out_dtype=out_dtype, faults=faults)
        return out.cpu(), bool(faults)

    def quantize(self, w: Tensor, *, mode: ScaleMode, dim: int) -> tuple[Tensor, Tensor, bool]:
        source, faults = self._poison(w), torch.zeros(1, dtype=torch.int32, device=self.device)
        blocks, scales = quantize_mxfp4(source, scale_mode=mode, dim=dim, faults=faults)
        return blocks.cpu(), scales.cpu(), bool(faults)

    def dequantize(self, blocks: Tensor, scales: Tensor, *, dtype: torch.dtype) -> Tensor:
        self._poison(blocks)
        return dequantize_mxfp4(blocks.to(self.device), scales.to(self.device), dtype=dtype).cpu()

    def _poison(self, w: Tensor) -> Tensor:
        """`w` there; and blocks of the sizes of every result, filled with ones and freed, are what the allocator hands out next."""
        source = w.to(self.device)
        for num_bytes in (4 * w.numel(), 2 * w.numel(), w.numel() // 2, w.numel() // MX_BLOCK_SIZE, 32 * w.numel()):
            torch.full((max(num_bytes, 1),), 0xFF, dtype=torch.uint8, device=self.device)
        return source


class Interpreted:
    """The kernels in Triton's interpreter. Its conversion of fp32 to bf16 is not exact, so weights are bf16."""

    BLOCKS, COLUMNS = 512, 64

    def fake_quant(self, w: Tensor, *, mode: ScaleMode, dim: int, out_dtype: torch.dtype) -> tuple[Tensor, bool]:
        out, flag = torch.full_like(w, math.nan, dtype=out_dtype), torch.zeros(1, dtype=torch.int32)
        if dim == -1:
            self._rows(_fake_quant_rows_kernel, w.numel() // 32, bits_of(w), bits_of(out), flag, MODE=mode)
        else:
            self._columns(_fake_quant_columns_kernel, w, bits_of(w), bits_of(out), flag, MODE=mode)
        return out, bool(flag)

    def quantize(self, w: Tensor, *, mode: ScaleMode, dim: int) -> tuple[Tensor, Tensor, bool]:
        *leading, depth = w.shape if dim == -1 else w.mT.shape
        blocks = torch.full((*leading, depth // 32, 16), 0xFF, dtype=torch.uint8)
        scales = torch.full((*leading, depth // 32), 0xFF, dtype=torch.uint8)
        flag = torch.zeros(1, dtype=torch.int32)
        if dim == -1:
            self._rows(_quantize_rows_kernel, scales.numel(), bits_of(w), blocks, scales, flag, MODE=mode)
        else:
            self._columns(_quantize_columns_kernel, w, bits_of(w), blocks, scales, flag, depth // 32, MODE=mode)
        return blocks, scales, bool(flag)

    def dequantize(self, blocks: Tensor, scales: Tensor, *, dtype: torch.dtype) -> Tensor:
        out = torch.full((*scales.shape[:-1], scales.shape[-1] * 32), math.nan, dtype=dtype)
        self._rows(_dequantize_kernel, scales.numel(), blocks.view(torch.int32), scales, bits_of(out))
        return out

    def _rows(self, kernel: object, num_blocks: int, *tensors: Tensor, **constants: str) -> None:
        kernel[(triton.cdiv(num_blocks, self.BLOCKS),)](*tensors, num_blocks, BLOCKS=self.BLOCKS, **constants)   # type: ignore[index]

    def _columns(self, kernel: object, w: Tensor, *arguments: Tensor | int, **constants: str) -> None:
        columns = w.shape[-1]
        grid = (w.shape[:-1].numel() // 32 * triton.cdiv(columns, self.COLUMNS),)
        kernel[grid](*arguments, columns, COLUMNS=self.COLUMNS, **constants)   # type: ignore[index]


DISTRIBUTIONS = ("any_bits", "close_to_amax", "gauss", "heavy", "wide", "subnormal", "ties", "crowded", "sparse")


def weights(name: str, shape: tuple[int, ...], *, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Finite weights that have scales up to 252 under every rule; `shape` [..., D] with MX blocks along D."""
    g = torch.Generator().manual_seed(seed)
    uniform, normal, ones = torch.rand(shape, generator=g), torch.randn(shape, generator=g), (*shape[:-1], 1)
    if name in ("any_bits", "close_to_amax"):   # 0x7EBF: below 6 * 2**125
        bits = torch.randint(0x7EC0, shape if name == "any_bits" else ones, generator=g)
        bits = (bits - (uniform * 1024 * torch.rand(ones, generator=g)).int()).clamp_min(0) if name == "close_to_amax" else bits
        w = (bits | torch.randint(2, shape, generator=g) << 15).to(torch.int16).view(torch.bfloat16).float()
    elif name == "gauss":
        w = normal * 0.02
    elif name == "heavy":
        w = normal / uniform.clamp_min(1e-3)
    elif name == "wide":
        w = normal * 2.0 ** torch.randint(-120, 120, shape, generator=g)
    elif name == "subnormal":
        w = normal * 2.0 ** torch.randint(-135, -118, ones, generator=g)
    elif name == "ties":
        steps = torch.tensor([*CODE_VALUES, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, 8.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0])
        w = steps[torch.randint(len(steps), shape, generator=g)] * 2.0 ** torch.randint(-134, 120, ones, generator=g)
    elif name == "crowded":
        w = torch.where(uniform < 1 / 32, 4.1, 0.75 + 0.05 * normal) * normal.sign()
    else:
        w = torch.where(uniform < 1 / 64, normal, torch.where(uniform < 0.5, 0.0, -0.0))
    return w.to(dtype)


def check_weights(runner: Runner, w: Tensor, *, modes: tuple[ScaleMode, ...] = MODES, out_dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)) -> None:
    """Both ops, both dims, against the twin on w read as bf16; w [..., D], its last two dims both multiples of 32 or it is 1-D."""
    for mode in modes:
        for dim in (-1, -2) if w.dim() > 1 and w.shape[-2] % MX_BLOCK_SIZE == 0 else (-1,):
            source = w.to(torch.bfloat16) if dim == -1 else w.to(torch.bfloat16).mT.contiguous()
            what = f"{mode} dim {dim} {w.dtype} {tuple(w.shape)}"
            codes, scales = quantize_mxfp4_ref(source, scale_mode=mode)
            got_blocks, got_scales, fault = runner.quantize(w, mode=mode, dim=dim)
            assert not fault, what
            assert_equal(got_scales, scales, what=f"scales, {what}")
            assert_equal(got_blocks, pack_codes_ref(codes), what=f"blocks, {what}")
            expected = dequantize_mxfp4_ref(pack_codes_ref(codes), scales)
            assert_equal(runner.dequantize(got_blocks, got_scales, dtype=torch.bfloat16), expected, what=f"dequantize, {what}", bits=True)
            expected = (expected + 0.0) if dim == -1 else (expected + 0.0).mT
            for out_dtype in out_dtypes:
                got, fault = runner.fake_quant(w, mode=mode, dim=dim, out_dtype=out_dtype)
                assert not fault, what
                assert_equal(got, expected.to(out_dtype), what=f"fake_quant, {what}", bits=True)


def check_every_byte(runner: Runner) -> None:
    """256 code bytes under each of 253 scales, in both dtypes."""
    blocks = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 16).repeat(MAX_EXACT_SCALE + 1, 1, 1)
    scales = torch.arange(MAX_EXACT_SCALE + 1).to(torch.uint8)[:, None].repeat(1, 16)
    for dtype in (torch.bfloat16, torch.float32):
        expected = dequantize_mxfp4_ref(blocks, scales, dtype=dtype)
        assert_equal(runner.dequantize(blocks, scales, dtype=dtype), expected, what=f"dequantize to {dtype}", bits=True)


def check_faults(runner: Runner) -> None:
    """The flag is raised for each weight that the twin refuses, and for no other: NaNs, infinities, and where scale 253 begins."""
    edge = torch.tensor([0x7F81, 0xFFFF, 0x7F80, 0xFF80, 0x7F00, 0x7EE1, 0xFEE0, 0x7EDF, 0x7EC1, 0xFEC0], dtype=torch.int32)
    for bits in edge.to(torch.int16).view(torch.bfloat16):
        for mode in MODES:
            for dim in (-1, -2):
                w = torch.ones(32, 64, dtype=torch.bfloat16)
                w[17, 61] = bits
                try:
                    fake_quant_mxfp4_ref(w if dim == -1 else w.mT, scale_mode=mode)
                    refused = False
                except ValueError:
                    refused = True
                what = f"{float(bits)} under {mode}, dim {dim}: the twin {'refuses' if refused else 'takes'} it"
                assert runner.fake_quant(w, mode=mode, dim=dim, out_dtype=torch.bfloat16)[1] == refused, what
                assert runner.quantize(w, mode=mode, dim=dim)[2] == refused, what


def interpreted_checks() -> Iterator[str]:
    """Everything above that the interpreter can do, on few weights; yields what passed."""
    runner = Interpreted()
    for number, name in enumerate(DISTRIBUTIONS):
        w = weights(name, (64, 64), seed=100 + number)
        check_weights(runner, w)
        yield name
    check_weights(runner, weights("heavy", (2, 64, 96), seed=1))
    yield "several experts"
    check_every_byte(runner)
    yield "every byte"
    check_faults(runner)
    yield "faults"


def run_interpreted() -> None:
    """Print one line a check, then `all`."""
    for name in interpreted_checks():
        print(name)
    print("all")
