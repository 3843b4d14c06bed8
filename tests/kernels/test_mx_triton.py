"""The MXFP4 kernels: their device code in Triton's interpreter, what the compiler makes of it, and, on a GPU, the ops."""

import re
import subprocess
import tempfile
from typing import Any

import pytest
import torch
import triton
from cases import MODES, ScaleMode
from interpreted import run_in_interpreter
from mx_checks import DISTRIBUTIONS, OnDevice, check_every_byte, check_faults, check_weights, weights
from tolerances import assert_equal
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kilotok.kernels.mx import (
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
from kilotok.kernels.mx.launch import BLOCKS, COLUMN_WARPS, COLUMNS, ROW_WARPS
from kilotok.kernels.mx.quantize import _quantize_columns_kernel, _quantize_rows_kernel

BF16, FP32 = torch.bfloat16, torch.float32
# Every rule is compiled for sm_90; floor and rceil differ from even by one constant, which sm_100 need not prove again.
COMPILED = [*((m, 90) for m in MODES), ("even", 100), ("mse", 100)]
ODD_SHAPES = [(32,), (1, 32), (129 * 32,), (127, 96), (5, 96, 70), (3, 64, 1), (2, 32, 65), (2, 3, 32, 33), (1, 2880, 2880)]
ZERO_SIZES = [(0,), (0, 64), (32, 0), (2, 0, 96), (0, 32, 32)]
BAD_WEIGHTS = [float("nan"), float("-inf"), 3e38]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


# --- the device code, without a GPU ---


@pytest.mark.slow
@pytest.mark.xdist_group("interpreter")
def test_the_interpreted_kernels_equal_their_twins() -> None:
    """The kernels' own source on bf16 weights, every rule and both dims."""
    assert run_in_interpreter("mx_checks") == [*DISTRIBUTIONS, "several experts", "every byte", "faults", "all"]


def compiled(kernel: Any, *, capability: int, num_warps: int, pointers: dict[str, str], **constants: str | int) -> Any:
    """A kernel built for tensors on 16-byte boundaries whose sizes are multiples of 16."""
    names = list(kernel.arg_names)
    signature = {n: "constexpr" if n in constants else pointers.get(n, "i32") for n in names}
    attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n not in constants}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": num_warps})


def vectors(ptx: str, what: str) -> int:
    """How many 128-bit global loads ("ld") or stores ("st") there are."""
    return len(re.findall(rf"{what}\.global\S*\.v4\.b32", ptx))


def assert_no_spills(kernel: Any) -> None:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run([triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"STACK:(\d+).*?LOCAL:(\d+)", usage)
    assert found is not None, usage
    assert found.groups() == ("0", "0"), usage


POINTERS = {"faults_ptr": "*i32", "blocks_ptr": "*u8", "scales_ptr": "*u8", "words_ptr": "*i32"}
TYPES = {BF16: "*i16", FP32: "*fp32"}


@pytest.mark.parametrize(("mode", "capability"), COMPILED)
@pytest.mark.parametrize(("source", "out"), [(BF16, BF16), (FP32, BF16), (BF16, FP32), (FP32, FP32)], ids=str)
def test_fake_quant_compiles_to_wide_accesses(source: torch.dtype, out: torch.dtype, mode: ScaleMode, capability: int) -> None:
    pointers = POINTERS | {"w_ptr": TYPES[source], "out_ptr": TYPES[out]}
    rows = compiled(_fake_quant_rows_kernel, capability=capability, num_warps=ROW_WARPS, pointers=pointers, MODE=mode, BLOCKS=BLOCKS)
    columns = compiled(_fake_quant_columns_kernel, capability=capability, num_warps=COLUMN_WARPS, pointers=pointers, MODE=mode, COLUMNS=COLUMNS)
    for kernel, elements in ((rows, BLOCKS * 32 // (32 * ROW_WARPS)), (columns, COLUMNS * 32 // (32 * COLUMN_WARPS))):
        assert vectors(kernel.asm["ptx"], "ld") == elements * source.itemsize // 16
        assert vectors(kernel.asm["ptx"], "st") == elements * out.itemsize // 16
        assert ".ftz" not in kernel.asm["ptx"] and ".approx" not in kernel.asm["ptx"]
        assert_no_spills(kernel)
    assert columns.metadata.num_warps == 1 and "bar.sync" not in columns.asm["ptx"]   # the reduction stays in the warp


@pytest.mark.parametrize(("mode", "capability"), COMPILED)
@pytest.mark.parametrize("source", [BF16, FP32], ids=str)
def test_quantize_compiles_to_wide_loads(source: torch.dtype, mode: ScaleMode, capability: int) -> None:
    pointers = POINTERS | {"w_ptr": TYPES[source]}
    rows = compiled(_quantize_rows_kernel, capability=capability, num_warps=ROW_WARPS, pointers=pointers, MODE=mode, BLOCKS=BLOCKS)
    columns = compiled(_quantize_columns_kernel, capability=capability, num_warps=COLUMN_WARPS, pointers=pointers, MODE=mode, COLUMNS=COLUMNS)
    for kernel, elements in ((rows, BLOCKS * 32 // (32 * ROW_WARPS)), (columns, COLUMNS * 32 // (32 * COLUMN_WARPS))):
        assert vectors(kernel.asm["ptx"], "ld") == elements * source.itemsize // 16
        assert ".ftz" not in kernel.asm["ptx"] and ".approx" not in kernel.asm["ptx"]
        assert_no_spills(kernel)


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("out", [BF16, FP32], ids=str)
def test_dequantize_compiles_to_wide_stores(out: torch.dtype, capability: int) -> None:
    kernel = compiled(_dequantize_kernel, capability=capability, num_warps=ROW_WARPS, pointers=POINTERS | {"out_ptr": TYPES[out]}, BLOCKS=BLOCKS)
    assert vectors(kernel.asm["ptx"], "st") == BLOCKS * 32 // (32 * ROW_WARPS) * out.itemsize // 16
    assert_no_spills(kernel)


# --- the ops on the CPU ---


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_on_the_cpu_an_op_is_its_twin_on_bf16(dtype: torch.dtype, mode: ScaleMode) -> None:
    w = weights("heavy", (3, 96, 64), seed=1, dtype=dtype)
    for dim, source in ((-1, w.bfloat16()), (-2, w.bfloat16().mT)):
        codes, scales = quantize_mxfp4_ref(source, scale_mode=mode)
        blocks, got = quantize_mxfp4(w, scale_mode=mode, dim=dim)
        assert_equal(got, scales)
        assert_equal(blocks, pack_codes_ref(codes))
        assert_equal(dequantize_mxfp4(blocks, got), dequantize_mxfp4_ref(blocks, scales))
        for out_dtype in (BF16, FP32):
            fake = fake_quant_mxfp4(w, scale_mode=mode, dim=dim, out_dtype=out_dtype)
            expected = fake_quant_mxfp4_ref(source, scale_mode=mode).to(out_dtype)
            assert_equal(fake, expected if dim == -1 else expected.mT, bits=True)
    views = {"transposed": (w.mT, w.mT.contiguous()), "strided": (w[:, ::3], w[:, ::3].contiguous())}
    for name, (view, same) in views.items():
        assert_equal(fake_quant_mxfp4(view, scale_mode=mode), fake_quant_mxfp4(same, scale_mode=mode), what=name)
        assert_equal(quantize_mxfp4(view, scale_mode=mode)[0], quantize_mxfp4(same, scale_mode=mode)[0], what=name)
    assert_equal(fake_quant_mxfp4(w.mT, scale_mode=mode, dim=-2), fake_quant_mxfp4(w, scale_mode=mode).mT)


OPS = [fake_quant_mxfp4, quantize_mxfp4]


@pytest.mark.parametrize("op", OPS)
def test_what_the_ops_refuse(op: Any) -> None:
    for w, how, error, words in (
            (torch.ones(64, dtype=torch.int32), {}, TypeError, "floating-point"),
            (torch.ones(64).double(), {}, ValueError, "bfloat16 or float32; got torch.float64"),
            (torch.ones(64).half(), {}, ValueError, "bfloat16 or float32"), (torch.ones(2, 48), {}, ValueError, r"dimension -1 .* multiple of 32.*\(2, 48\)"),
            (torch.ones(48, 32), {"dim": -2}, ValueError, "dimension -2 "), (torch.ones(32), {"dim": -2}, ValueError, "dimension -2 "),
            (torch.ones(32, 32), {"dim": 0}, ValueError, "dim -1 or -2; got 0"), (torch.tensor(1.0), {}, ValueError, "multiple of 32"),
            (torch.ones(32), {"scale_mode": "best"}, ValueError, "one of even, floor, rceil, mse; got 'best'"),
            (torch.ones(32, device="meta"), {}, NotImplementedError, "cpu and cuda; got a tensor on meta")):
        with pytest.raises(error, match=f"^{op.__name__}: .*{words}"):
            op(w, **({"scale_mode": "even"} | how))
    flag = torch.zeros(1, dtype=torch.int32)
    for bad, words in ((float("nan"), r"must be finite; got nan at index \(1, 5\)"), (3e38, "needs scale byte 253"), (3.4e38, "must be finite; got inf")):
        w = torch.ones(2, 32)
        w[1, 5] = bad   # 3.4e38 is finite, but rounds to infinity in bf16
        for faults in (None, flag):
            with pytest.raises(ValueError, match=words):
                op(w, scale_mode="even", faults=faults)


def test_what_dequantize_refuses() -> None:
    blocks, scales = torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(2, dtype=torch.uint8)
    with pytest.raises(ValueError, match="bfloat16 or float32; got torch"):
        dequantize_mxfp4(blocks, scales, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match="cpu and cuda"):
        dequantize_mxfp4(blocks.to("meta"), scales.to("meta"))
    with pytest.raises(ValueError, match="scale byte 253 at index"):
        dequantize_mxfp4(blocks, scales + 253)


def test_results_are_detached() -> None:
    w = torch.ones(2, 32, requires_grad=True)
    assert not fake_quant_mxfp4(w, scale_mode="even").requires_grad


@pytest.mark.parametrize("shape", ZERO_SIZES, ids=str)
def test_zero_sizes_on_the_cpu(shape: tuple[int, ...]) -> None:
    zero_sizes(shape, device="cpu")


def zero_sizes(shape: tuple[int, ...], *, device: str) -> None:
    w = torch.zeros(shape, dtype=BF16, device=device)
    for dim in (-1, -2)[: w.dim()]:
        assert_equal(fake_quant_mxfp4(w, scale_mode="mse", dim=dim), w)
        blocks, scales = quantize_mxfp4(w, scale_mode="mse", dim=dim)
        *leading, depth = shape if dim == -1 else w.mT.shape
        assert blocks.shape == (*leading, depth // 32, 16) and scales.shape == (*leading, depth // 32)
        assert_equal(dequantize_mxfp4(blocks, scales), w if dim == -1 else w.mT.contiguous())


# --- the ops on a GPU ---


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_gpu_equals_the_twin(name: str, dtype: torch.dtype) -> None:
    shape = (2, 2048, 2560) if name in ("any_bits", "close_to_amax") else (2, 512, 1024)
    check_weights(OnDevice(), weights(name, shape, seed=torch.seed() % 2**31, dtype=dtype), out_dtypes=(BF16, FP32))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("shape", ODD_SHAPES, ids=str)
def test_gpu_odd_shapes(shape: tuple[int, ...]) -> None:
    odd_shape(shape)


def odd_shape(shape: tuple[int, ...]) -> None:
    """dim -1 where whole blocks lie there, dim -2 where they stand there."""
    runner, seed = OnDevice(), torch.seed() % 2**31
    if shape[-1] % 32 == 0:
        check_weights(runner, weights("heavy", shape, seed=seed))
        return
    w = weights("heavy", (*shape[:-2], shape[-1], shape[-2]), seed=seed).mT.contiguous()
    for mode in MODES:
        codes, scales = quantize_mxfp4_ref(w.mT, scale_mode=mode)
        blocks, got_scales, fault = runner.quantize(w, mode=mode, dim=-2)
        assert not fault
        assert_equal(got_scales, scales)
        assert_equal(blocks, pack_codes_ref(codes))
        assert_equal(runner.fake_quant(w, mode=mode, dim=-2, out_dtype=BF16)[0], fake_quant_mxfp4_ref(w.mT, scale_mode=mode).mT, bits=True)


@pytest.mark.gpu
@needs_gpu
def test_gpu_every_byte_and_every_fault() -> None:
    check_every_byte(OnDevice())
    check_faults(OnDevice())


def same_error(op: Any, w: Tensor, twin: Tensor) -> None:
    """The op without a flag of the caller's raises what the twin raises."""
    with pytest.raises(ValueError) as expected:
        op(twin, scale_mode="even")
    with pytest.raises(ValueError) as got:
        op(w, scale_mode="even")
    assert str(got.value) == str(expected.value)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("bad", BAD_WEIGHTS)
def test_gpu_raises_the_error_of_the_twin(op: Any, bad: float) -> None:
    w = weights("gauss", (4, 64, 96), seed=1)
    w[2, 40, 70] = bad
    same_error(op, w.cuda(), w)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("shape", ZERO_SIZES, ids=str)
def test_gpu_zero_sizes(shape: tuple[int, ...]) -> None:
    zero_sizes(shape, device="cuda")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dim", [-1, -2])
def test_gpu_offsets_beyond_int32(dim: int) -> None:
    """More than 2**31 weights: the last rows are those of a small tensor with the same rows."""
    rows, columns = 2**20 + 64, 2048
    needed = 3 * 2 * rows * columns
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of free GPU memory")
    tail = weights("heavy", (64, columns), seed=2)
    w = torch.zeros(rows, columns, dtype=BF16, device="cuda")
    w[-64:] = tail.cuda()
    expected = fake_quant_mxfp4(tail, scale_mode="even", dim=dim)
    got = fake_quant_mxfp4(w, scale_mode="even", dim=dim)
    assert_equal(got[-64:].cpu(), expected, bits=True)
    assert not bool(got[:64].any())
    del got
    blocks, scales = quantize_mxfp4(w, scale_mode="even", dim=dim)
    want_blocks, want_scales = quantize_mxfp4(tail, scale_mode="even", dim=dim)
    last = (slice(-64, None),) if dim == -1 else (slice(None), slice(-2, None))
    assert_equal(scales[last].cpu(), want_scales)
    assert_equal(blocks[last].cpu(), want_blocks)
    back = dequantize_mxfp4(blocks, scales)
    assert_equal(back[-64:].cpu() if dim == -1 else back[:, -64:].mT.cpu().contiguous(), expected, bits=True)


@pytest.mark.gpu
@needs_gpu
def test_gpu_views_equal_their_copies() -> None:
    w = weights("heavy", (3, 96, 160), seed=3).cuda()
    unaligned = torch.empty(w.numel() + 1, dtype=BF16, device="cuda")[1:].view_as(w).copy_(w)
    for view in (w.mT, w[:, ::3], w[1], unaligned):
        assert_equal(fake_quant_mxfp4(view, scale_mode="even").cpu(), fake_quant_mxfp4(view.cpu().contiguous(), scale_mode="even"), bits=True)
        got, expected = quantize_mxfp4(view, scale_mode="even"), quantize_mxfp4(view.cpu().contiguous(), scale_mode="even")
        assert_equal(got[0].cpu(), expected[0])
        assert_equal(got[1].cpu(), expected[1])
