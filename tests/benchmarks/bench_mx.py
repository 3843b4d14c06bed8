"""MXFP4 kernels in GB/s and in percent of a copy's: python tests/benchmarks/bench_mx.py [--check] [--sweep] [--shape E D F].

Each timed call takes the next of several input sets, so that what it reads is not in L2; the copy is timed the same way, in
the same run. Bytes are what an op must read and write once. `eager` is the plain-torch twin on the same GPU. With --check the
bit-for-bit checks of tests/kernels/test_mx_triton.py run first; with --sweep, fake-quantization over launch sizes.
"""

import argparse
import itertools
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from machine import environment
from torch import Tensor
from triton.testing import do_bench

from kilotok.kernels.mx import (
    SCALE_MODES,
    dequantize_mxfp4,
    dequantize_mxfp4_ref,
    fake_quant_mxfp4,
    fake_quant_mxfp4_ref,
    launch,
    quantize_mxfp4,
    quantize_mxfp4_ref,
)

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "kernels")]   # mx_checks, test_mx_triton
L2_BYTES = 256 * 2**20   # more than any; the input sets together exceed it


def timed(call: Callable[[Tensor], object], inputs: list[Tensor], *, rep: int) -> tuple[float, float, float]:
    """Median, p20 and p80 of one call in ms, over the inputs in turn."""
    turn = itertools.cycle(inputs)
    median, p20, p80 = do_bench(lambda: call(next(turn)), warmup=50, rep=rep, quantiles=[0.5, 0.2, 0.8])
    return median, p20, p80


class Table:
    """Prints a line an op; the copy comes first."""

    def __init__(self) -> None:
        self.copy: float | None = None

    def line(self, name: str, call: Callable[[Tensor], object], inputs: list[Tensor], *, num_bytes: float, rep: int = 200) -> None:
        median, p20, p80 = timed(call, inputs, rep=rep)
        rate = num_bytes / median / 1e6
        self.copy = self.copy or rate
        print(f"{name:42s} {median * 1e3:10.1f} us  p20 {p20 * 1e3:9.1f}  p80 {p80 * 1e3:9.1f}  {num_bytes / 1e6:9.1f} MB  {rate:7.0f} GB/s  "
              f"{100 * rate / self.copy:5.1f} % of copy", flush=True)


def bench(shape: tuple[int, int, int]) -> None:
    """Every op on w [E, D, F]."""
    n = math.prod(shape)
    sets = max(2, -(-L2_BYTES // (2 * n)))
    print(f"shape {shape}, {n / 1e6:.0f} M weights, {sets} input sets")
    bf16 = [torch.randn(shape, device="cuda").bfloat16() * 0.02 for _ in range(sets)]
    out = torch.empty_like(bf16[0])
    faults = torch.zeros(1, dtype=torch.int32, device="cuda")
    table = Table()
    table.line("copy bf16", out.copy_, bf16, num_bytes=4 * n)
    for mode in SCALE_MODES:
        for dim in (-1, -2):
            table.line(f"fake_quant bf16->bf16 {mode} dim {dim}", lambda w, m=mode, d=dim: fake_quant_mxfp4(w, scale_mode=m, dim=d, faults=faults), bf16,
                       num_bytes=4 * n)
    for mode in SCALE_MODES:
        for dim in (-1, -2):
            table.line(f"quantize bf16 {mode} dim {dim}", lambda w, m=mode, d=dim: quantize_mxfp4(w, scale_mode=m, dim=d, faults=faults), bf16,
                       num_bytes=n * (2 + 17 / 32))
    table.line("eager fake_quant even", lambda w: fake_quant_mxfp4_ref(w, scale_mode="even"), bf16[:1], num_bytes=4 * n, rep=100)
    table.line("eager fake_quant mse", lambda w: fake_quant_mxfp4_ref(w, scale_mode="mse"), bf16[:1], num_bytes=4 * n, rep=100)
    table.line("eager quantize even (unpacked)", lambda w: quantize_mxfp4_ref(w, scale_mode="even"), bf16[:1], num_bytes=n * (2 + 17 / 32), rep=100)

    blocks, scales = quantize_mxfp4(bf16[0], scale_mode="even")
    packed = [blocks.clone() for _ in range(max(2, -(-L2_BYTES // blocks.numel())))]
    # the check of the scales, which reads a maximum back, is part of the op and of its time
    table.line("dequantize to bf16", lambda b: dequantize_mxfp4(b, scales), packed, num_bytes=n * (2 + 17 / 32))
    table.line("dequantize to fp32", lambda b: dequantize_mxfp4(b, scales, dtype=torch.float32), packed, num_bytes=n * (4 + 17 / 32))
    table.line("eager dequantize to bf16", lambda b: dequantize_mxfp4_ref(b, scales), packed[:1], num_bytes=n * (2 + 17 / 32), rep=100)
    del packed

    fp32 = [w.float() * 1.001 for w in bf16]
    del bf16
    for mode in SCALE_MODES:
        for dim in (-1, -2):
            table.line(f"fake_quant fp32->bf16 {mode} dim {dim}", lambda w, m=mode, d=dim: fake_quant_mxfp4(w, scale_mode=m, dim=d, faults=faults), fp32,
                       num_bytes=6 * n)
    assert int(faults) == 0, "a benchmark input had no code"


def sweep(shape: tuple[int, int, int]) -> None:
    """fake_quant even and mse, bf16, over what `launch` fixes; the shipped sizes come first."""
    n = math.prod(shape)
    bf16 = [torch.randn(shape, device="cuda").bfloat16() for _ in range(max(2, -(-L2_BYTES // (2 * n))))]
    out, faults, table = torch.empty_like(bf16[0]), torch.zeros(1, dtype=torch.int32, device="cuda"), Table()
    table.line("copy bf16", out.copy_, bf16, num_bytes=4 * n)
    rows, columns = (launch.BLOCKS, launch.ROW_WARPS), (launch.COLUMNS, launch.COLUMN_WARPS)
    for mode in ("even", "mse"):
        for size in (rows, (32, 4), (64, 4), (256, 4), (512, 4), (64, 2), (256, 8), (512, 8), (32, 1)):
            launch.BLOCKS, launch.ROW_WARPS = size
            table.line(f"dim -1 {mode} BLOCKS, warps {size}", lambda w, m=mode: fake_quant_mxfp4(w, scale_mode=m, faults=faults), bf16,
                       num_bytes=4 * n, rep=100)
        for size in (columns, (32, 1), (128, 1), (64, 2), (128, 2), (128, 4), (256, 4), (256, 8)):
            launch.COLUMNS, launch.COLUMN_WARPS = size
            table.line(f"dim -2 {mode} COLUMNS, warps {size}", lambda w, m=mode: fake_quant_mxfp4(w, scale_mode=m, dim=-2, faults=faults), bf16,
                       num_bytes=4 * n, rep=100)
    (launch.BLOCKS, launch.ROW_WARPS), (launch.COLUMNS, launch.COLUMN_WARPS) = rows, columns


def check() -> None:
    """The GPU tests of test_mx_triton.py, as functions."""
    # needs pytest, and the path set above
    import test_mx_triton as tests

    start = time.perf_counter()
    for name, dtype in itertools.product(tests.DISTRIBUTIONS, (torch.bfloat16, torch.float32)):
        tests.test_gpu_equals_the_twin(name, dtype)
        print(f"equal: {name} {dtype} ({time.perf_counter() - start:.0f} s)", flush=True)
    for shape in tests.ODD_SHAPES:
        tests.test_gpu_odd_shapes(shape)
    tests.test_gpu_every_byte_and_every_fault()
    for op, bad in itertools.product(tests.OPS, tests.BAD_WEIGHTS):
        tests.test_gpu_raises_the_error_of_the_twin(op, bad)
    for shape in tests.ZERO_SIZES:
        tests.test_gpu_zero_sizes(shape)
    tests.test_gpu_views_equal_their_copies()
    print(f"equal: shapes, bytes, faults, errors, views ({time.perf_counter() - start:.0f} s)", flush=True)
    for dim in (-1, -2):
        tests.test_gpu_offsets_beyond_int32(dim)
    print(f"equal: more than 2**31 weights ({time.perf_counter() - start:.0f} s)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the twin first")
    parser.add_argument("--sweep", action="store_true", help="time launch sizes instead of ops")
    parser.add_argument("--shape", type=int, nargs=3, default=(32, 2880, 5760), metavar=("E", "D", "F"), help="weights (default: gpt-oss-20b gate_up_proj)")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_mx: needs a CUDA GPU; torch sees none.")
    print(environment(), flush=True)
    if arguments.check:
        check()
    (sweep if arguments.sweep else bench)(tuple(arguments.shape))


if __name__ == "__main__":
    main()
