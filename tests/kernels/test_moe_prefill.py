"""The experts for many tokens: the twin against dequantized weights, the kernel in Triton's interpreter, compiled, and on a GPU."""

import re
from dataclasses import replace

import pytest
import torch
import triton
from interpreted import run_in_interpreter
from moe_checks import activations, checkpoint_of, dense_reference, routed
from moe_compile import Shape
from tolerances import FP32_EPS, Bound, assert_equal, assert_within
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kilotok.kernels.moe.prefill import BLOCK_K, BLOCK_M, BLOCK_N, PrefillWeights, _grouped, _grouped_kernel, group_pairs, prefill, prefill_ref
from kilotok.kernels.mx import dequantize_mxfp4_ref

FP64 = Bound(maximum=1e-12, rms=1e-13, reason="float64 sums of a few hundred terms in another order")
PRODUCT = Bound(maximum=64 * FP32_EPS, rms=8 * FP32_EPS, reason="fp32 sums of up to 2880 exact products of bf16")
# 17 and 18 eps of RMS were seen on an H200.
TENSOR_CORE = Bound(maximum=96 * FP32_EPS, rms=32 * FP32_EPS, reason="wgmma cuts off low bits of the products that it adds, where fp32 would round the sum")
# Channels that lie next to a tie of bf16 round the other way: 2**-9 of one channel in some thousands.
LAYER = Bound(maximum=2e-3, rms=3e-4, reason="fp32 sums, and channels rounded to bf16 from them")
SHAPES = (
    Shape(name="silu", hidden=96, channels=64, experts=6, per_token=2),
    Shape(name="gpt-oss family", hidden=128, channels=96, experts=5, per_token=3, activation="clamped_swiglu", bias=True),
)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def inputs(shape: Shape, num_tokens: int, *, seed: int, device: str = "cpu") -> tuple[Tensor, PrefillWeights, Tensor, Tensor]:
    """Of more than two tokens one is dead, one has an empty place; the last expert gets no token."""
    weights = checkpoint_of(shape, seed=seed, device=device)
    ids, token_weights = routed(num_tokens, shape, seed=seed + 1, experts=shape.experts - 1)
    if num_tokens > 2:
        ids[0], ids[-1, 0] = -1, shape.experts
    return activations(num_tokens, shape.hidden, seed=seed + 2, device=device), weights, ids.to(device), token_weights.to(device)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 37])
def test_the_twin_equals_dequantized_experts(shape: Shape, num_tokens: int) -> None:
    x, weights, ids, token_weights = inputs(shape, num_tokens, seed=num_tokens)
    expected = dense_reference(x, checkpoint_of(shape, seed=num_tokens), ids, token_weights, round_channels=True)
    assert_within(prefill_ref(x, weights, ids, token_weights), expected, bound=FP64)


def test_pairs_are_sorted_by_expert_and_stable() -> None:
    grouping = group_pairs(torch.tensor([[2, 0], [-1, 2], [0, 7]]), num_experts=4)
    assert grouping.pairs_R.tolist() == [1, 4, 0, 3, 2, 5] and grouping.offsets_E.tolist() == [2, 2, 4, 4]


def test_refusals() -> None:
    x, weights, ids, token_weights = inputs(SHAPES[0], 3, seed=1)
    with pytest.raises(ValueError, match=r"contiguous bfloat16; got torch\.int32 and torch\.float32"):
        prefill(x.float(), weights, ids, token_weights)


def test_a_dead_pair_adds_nothing_whatever_its_weight() -> None:
    x, weights, _, _ = inputs(SHAPES[0], 2, seed=1)
    ids = torch.tensor([[-1, 2], [-1, -1]], dtype=torch.int32)
    y = prefill(x, weights, ids, torch.tensor([[float("nan"), 1.0], [float("nan"), float("inf")]]))
    assert_equal(y, prefill(x, weights, ids, torch.tensor([[0.0, 1.0], [0.0, 0.0]])))
    assert prefill(x[:0], weights, ids[:0], torch.zeros(0, 2)).shape == (0, x.shape[1])
    for call, words in ((lambda: prefill(x, weights, ids, torch.ones(2, 1)), "expert weights must be"),
                        (lambda: prefill(x, replace(weights, order="interleave"), ids, torch.ones(2, 2)), "order split or interleaved; got"),
                        (lambda: prefill(x, replace(weights, activation="SiLU"), ids, torch.ones(2, 2)), "activation must be one of"),
                        (lambda: prefill(x, weights, ids.float(), torch.ones(2, 2)), "int32"),
                        (lambda: prefill(x[:, :32].contiguous(), weights, ids, torch.ones(2, 2)), "x must be")):
        with pytest.raises(ValueError, match=words):
            call()


# --- the kernel ---


def check_grouped(*, device: str, shape: Shape, num_tokens: int, seed: int) -> None:
    """Gate and up of every pair against float64, in poisoned memory; pairs without an expert keep it."""
    x, weights, ids, _ = inputs(shape, num_tokens, seed=seed, device=device)
    grouping = group_pairs(ids, num_experts=shape.experts)
    out = torch.full((ids.numel(), 2 * shape.channels), float("nan"), device=device)
    source = x if device == "cuda" else x.float()   # the interpreter multiplies the bits of bf16
    _grouped(source, weights.gate_up_blocks, weights.gate_up_scales, weights.gate_up_bias_EG, grouping, out=out, rows_per_source=shape.per_token)
    dense = dequantize_mxfp4_ref(weights.gate_up_blocks, weights.gate_up_scales, dtype=torch.float32).double()
    flat = ids.flatten().long()
    live = (flat >= 0) & (flat < shape.experts)
    rows = x.double().repeat_interleave(shape.per_token, 0)
    expected = torch.zeros(out.shape, dtype=torch.float64, device=device)
    for expert in range(shape.experts):   # one at a time: all of them gathered by row would be 130 GB
        mine = flat == expert
        expected[mine] = rows[mine] @ dense[expert].mT
        if weights.gate_up_bias_EG is not None:
            expected[mine] += weights.gate_up_bias_EG[expert].double()
    assert_within(out[live].cpu(), expected[live].cpu(), bound=TENSOR_CORE if device == "cuda" else PRODUCT)
    assert bool(out[~live].isnan().all())


def run_interpreted() -> None:
    """Called in a process of its own with TRITON_INTERPRET=1."""
    torch.cuda.device = lambda device: torch.device("cpu")   # type: ignore[assignment,misc]
    for shape in SHAPES:
        for num_tokens in (1, 37, 150):
            check_grouped(device="cpu", shape=shape, num_tokens=num_tokens, seed=num_tokens)
        print(shape)


@pytest.mark.xdist_group("interpreter")
def test_the_interpreted_kernel_equals_dequantized_experts() -> None:
    assert run_in_interpreter("test_moe_prefill") == [s.name for s in SHAPES]


@pytest.mark.parametrize("depth", [2048, 2880, 768])
def test_the_kernel_compiles_for_sm_90(depth: int) -> None:
    constants = {"DEPTH": depth, "EXPERTS": 128, "EXPERTS_POW2": 128, "ROWS_PER_SOURCE": 8, "HAS_BIAS": True, "BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N,
                 "BLOCK_K": BLOCK_K}
    types = {"source_ptr": "*bf16", "blocks_ptr": "*u8", "scales_ptr": "*u8", "bias_ptr": "*fp32", "out_ptr": "*fp32", "num_rows": "i32"}
    names = list(_grouped_kernel.arg_names)
    source = ASTSource(fn=_grouped_kernel, signature={n: "constexpr" if n in constants else types.get(n, "*i32") for n in names}, constexprs=constants,
                       attrs={(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n not in constants})
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": 3})
    assert kernel.metadata.shared <= 227 * 1024
    assert re.search(r"wgmma|mma\.sync", kernel.asm["ptx"]), "no tensor core"


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("num_tokens", [1, 65, 1000])
def test_gpu_equals_the_twin(num_tokens: int) -> None:
    seed = torch.seed() % 2**31
    for shape in (*SHAPES, Shape(name="large", hidden=2880, channels=768, experts=16, per_token=4, activation="clamped_swiglu", bias=True)):
        check_grouped(device="cuda", shape=shape, num_tokens=num_tokens, seed=seed)
        x, weights, ids, token_weights = inputs(shape, num_tokens, seed=seed, device="cuda")
        assert_within(prefill(x, weights, ids, token_weights).cpu(), prefill_ref(x, weights, ids, token_weights).cpu(), bound=LAYER)
