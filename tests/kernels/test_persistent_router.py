"""The router phase: the twin against the reference executor, the device code's text on the CPU, the compiler, and a GPU."""

import dataclasses
from typing import Any

import pytest
import torch
from conftest import POCKET
from gluon_on_cpu import Pointer, bitcasts, launch, on_cpu
from persistent_compile import build_router
from tolerances import FP32_EPS, Bound, assert_equal, assert_within
from torch import Tensor
from torch.nn import functional as F

from kilotok.kernels.moe.routing import Routing, route_ref
from kilotok.kernels.persistent.router import choose_ref, empty_routing, router, router_constants, router_ref
from kilotok.runtime.reference import ReferenceSequence
from kilotok.runtime.weights import load_executor

WEIGHTS = Bound(maximum=8 * FP32_EPS, rms=4 * FP32_EPS, reason="exp2 for exp and a sum in another order, in fp32")
FP64 = Bound(maximum=1e-6, rms=1e-7, reason="router weights are fp32; the rest is float64")
SIZES = ((8, 8, 2), (16, 7, 3), (8, 128, 8), (64, 128, 8), (32, 1, 1), (8, 512, 16))    # columns, experts, experts a token
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def test_the_twin_equals_the_reference_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The experts of every layer of the pocket, mixed with the twin's choice and weights."""
    executor = load_executor(POCKET, device="cpu", dtype=torch.float64)
    original, g = ReferenceSequence._experts, executor.graph

    def compare(self: ReferenceSequence, h: Tensor, index: int, step: Any) -> Tensor:
        expected, layer = original(self, h, index, step), executor.weights.layers[index]
        ids, weights = choose_ref(F.linear(h, layer.router), torch.where(step.dead[:, 0], -1, 0), experts_per_token=g.experts_per_token,
                                  normalize=g.normalize_router_weights, dtype=torch.float64)
        assert bool((ids[step.dead[:, 0]] == -1).all())
        got = torch.zeros_like(h)
        for c in range(len(h)):
            for expert, weight in zip(ids[c].tolist(), weights[c].tolist(), strict=True):
                if expert >= 0:
                    gate, up = F.linear(h[c], layer.gate_up[expert]).chunk(2)
                    got[c] += F.linear(F.silu(gate) * up, layer.down[expert]) * weight
        assert_within(got[step.live], expected[step.live], bound=FP64)
        return expected

    monkeypatch.setattr(ReferenceSequence, "_experts", compare)
    executor.open().read(torch.randint(g.vocab_size, (19,), generator=torch.Generator().manual_seed(1)).tolist())


def inputs(columns: int, experts: int, *, seed: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Logits with many ties, NaN where a column is dead."""
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(columns, experts, generator=random) * 3
    logits[::2] = logits[::2].round()
    slots = torch.randint(-1, 4, (columns,), generator=random, dtype=torch.int32)
    logits[slots < 0] = torch.nan
    return logits.to(device), slots.to(device)


def run(logits: Tensor, slots: Tensor, *, per_token: int, normalize: bool) -> Routing:
    """The device code on the CPU or the kernel, into poisoned memory."""
    experts = logits.shape[1]
    routing = empty_routing(num_columns=len(slots), experts_per_token=per_token, num_experts=experts, device=logits.device)
    for tensor in routing.tensors():
        tensor.fill_(-77)
    if logits.device.type == "cuda":
        return router(logits, slots, routing=routing, normalize=normalize)
    constants = router_constants(num_columns=len(slots), experts_per_token=per_token, num_experts=experts)
    launch(on_cpu("router").router_kernel, 1, logits, slots, *routing.tensors(), NORMALIZE=normalize, NUM_WARPS=8, **constants)
    return routing


def check(columns: int, experts: int, per_token: int, *, normalize: bool, device: str, seed: int) -> None:
    """The list is the twin's; from its own pairs `route` makes the same list, bit by bit; a column alone has the same weights."""
    logits, slots = inputs(columns, experts, seed=seed, device=device)
    got, expected = run(logits, slots, per_token=per_token, normalize=normalize), router_ref(logits.cpu(), slots.cpu(), experts_per_token=per_token,
                                                                                             normalize=normalize)
    got = dataclasses.replace(got, **{f.name: getattr(got, f.name).cpu() for f in dataclasses.fields(got) if isinstance(getattr(got, f.name), Tensor)})
    assert_within(got.weights_MC, expected.weights_MC, bound=WEIGHTS)
    for name in ("num_tiles", "experts_M", "pairs_MC", "num_experts_T"):
        assert_equal(getattr(got, name), getattr(expected, name), what=name)
    ids, weights = torch.full((columns, per_token), -1, dtype=torch.int32), torch.zeros(columns, per_token)
    for tile in range(int(got.num_tiles)):
        for pair, weight in zip(got.pairs_MC[tile].tolist(), got.weights_MC[tile], strict=True):
            if pair >= 0:
                ids[pair // per_token, pair % per_token], weights[pair // per_token, pair % per_token] = got.experts_M[tile], weight
    for mine, theirs in zip(got.tensors(), route_ref(ids, weights, num_experts=experts).tensors(), strict=True):
        assert_equal(mine, theirs, bits=True)
    live = (slots >= 0).nonzero().flatten().tolist()
    for c in live[:3]:
        alone_slots = torch.full_like(slots, -1)
        alone_slots[c] = 0
        alone = run(logits.where(alone_slots[:, None] >= 0, torch.nan), alone_slots, per_token=per_token, normalize=normalize)
        tiles = int(alone.num_tiles)
        assert_equal(alone.weights_MC[:tiles, 0].cpu(), weights[c, :tiles], bits=True, what=f"weights of column {c} alone")


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_device_code_makes_the_list_of_route(sizes: tuple[int, int, int], normalize: bool) -> None:
    for seed in range(3):
        check(*sizes, normalize=normalize, device="cpu", seed=seed)


def test_of_equal_logits_the_lowest_ids_are_taken() -> None:
    ids, weights = choose_ref(torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]]), torch.tensor([0]), experts_per_token=2, normalize=True)
    assert_equal(ids, torch.tensor([[1, 2]], dtype=torch.int32))
    assert_equal(weights, torch.tensor([[0.5, 0.5]]))


def test_normalized_is_a_softmax_of_the_chosen_logits() -> None:
    logits, slots = inputs(16, 64, seed=1)
    live = slots >= 0
    _, weights = choose_ref(logits, slots, experts_per_token=4, normalize=True)
    assert_within(weights[live], logits[live].sort(descending=True).values[:, :4].softmax(-1), bound=WEIGHTS)
    _, weights = choose_ref(logits, slots, experts_per_token=4, normalize=False)
    assert_within(weights[live], logits[live].softmax(-1).sort(descending=True).values[:, :4], bound=WEIGHTS)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_where_the_tiles_of_each_expert_end_and_the_columns_of_each(sizes: tuple[int, int, int]) -> None:
    """What is read in shared memory before there is a list: tile m is of the first expert whose tiles end behind m, and of these columns."""
    columns, experts, per_token = sizes
    logits, slots = inputs(columns, experts, seed=5)
    constants = router_constants(num_columns=columns, experts_per_token=per_token, num_experts=experts)
    device = on_cpu("router")
    with bitcasts():
        table, ends = device.make_tables(columns, constants["EXPERTS"])
        num_tiles, distinct, _ = device.choose_experts(Pointer(logits), Pointer(slots), table, ends, columns, experts, per_token, constants["EXPERTS"], 8)
    expected = router_ref(logits, slots, experts_per_token=per_token, normalize=True)
    chosen = expected.experts_M[:int(expected.num_tiles)]
    assert int(num_tiles) == int(expected.num_tiles) and int(distinct) == len(chosen.unique())
    assert_equal((ends.values[0] <= torch.arange(int(num_tiles), dtype=torch.int32)[:, None]).sum(1).to(torch.int32), chosen)
    with bitcasts():
        cells = [device.columns_of_tile(table, ends, tile, torch.arange(8, dtype=torch.int32), None, columns, constants["EXPERTS"], 8)
                 for tile in range(int(num_tiles))]
        device.columns_of_tile(table, ends, int(num_tiles), torch.arange(8, dtype=torch.int32), None, columns, constants["EXPERTS"], 8)    # no error
    pairs = expected.pairs_MC[:int(num_tiles)]
    assert_equal(torch.stack(cells), pairs.div(per_token, rounding_mode="floor").where(pairs >= 0, -1).to(torch.int32), what="columns")


def test_values_that_are_hard_to_order() -> None:
    """Zeros of both signs are equal, minus infinity is a logit like others, and of nothing but ties the lowest ids win."""
    logits = torch.zeros(8, 9)
    logits[1, ::2] = -0.0
    logits[2, 1:] = -torch.inf
    logits[3, :3] = -1e-30
    logits[4] = torch.tensor([-3.0, -2, -2, -2, -1, -2, -2, -5, -2])
    logits[5] = -logits[4]
    logits[6, 8] = 1e-45
    logits[7] = 3e38
    slots = torch.zeros(8, dtype=torch.int32)
    got, expected = run(logits, slots, per_token=4, normalize=True), router_ref(logits, slots, experts_per_token=4, normalize=True)
    assert_equal(got.pairs_MC, expected.pairs_MC)
    assert_equal(got.experts_M, expected.experts_M)
    assert_within(got.weights_MC, expected.weights_MC, bound=WEIGHTS)


def test_no_live_column() -> None:
    got = run(torch.full((8, 8), torch.nan), torch.full((8,), -1, dtype=torch.int32), per_token=2, normalize=True)
    assert int(got.num_tiles) == 0 and bool((got.pairs_MC == -1).all()) and not got.num_experts_T.any()


def test_refusals() -> None:
    logits, slots = inputs(8, 8, seed=1)
    routing = empty_routing(num_columns=8, experts_per_token=2, num_experts=8, device=logits.device)
    with pytest.raises(NotImplementedError, match="router: the kernel is built for a GPU"):
        router(logits, slots, routing=routing, normalize=True)
    with pytest.raises(ValueError, match="logits must be"):
        router(logits.bfloat16(), slots, routing=routing, normalize=True)
    with pytest.raises(ValueError, match=r"routing\.experts_M must be"):
        router(logits, slots, routing=dataclasses.replace(routing, experts_M=routing.experts_M[1:]), normalize=True)
    with pytest.raises(NotImplementedError, match=r"at most 8192 columns times experts .*; got 64, 384 and 8\. Use fewer"):
        router_constants(num_columns=64, experts_per_token=8, num_experts=384)


@pytest.mark.parametrize(("experts", "per_token"), [(128, 8), (8, 2)], ids=["Qwen3-30B-A3B", "pocket, SmolLM2-MoE"])
@pytest.mark.parametrize("num_columns", [8, 64])
def test_compiled_for_sm_90(num_columns: int, experts: int, per_token: int) -> None:
    built = build_router(num_columns=num_columns, num_experts=experts, experts_per_token=per_token)
    assert built.stack_bytes == built.local_bytes == 0, f"spills: {built}"
    assert built.registers <= (112 if num_columns == 8 else 255), str(built)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_gpu_makes_the_list_of_route(sizes: tuple[int, int, int], normalize: bool) -> None:
    check(*sizes, normalize=normalize, device="cuda", seed=torch.seed() % 2**31)
