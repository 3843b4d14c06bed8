"""Attention of a draft's blocks: the block mask against the rule written out, FlexAttention against its dense twin, the twin against a loop."""

import math
from typing import Any

import pytest
import torch
from tolerances import Bound, assert_within
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kilotok.kernels.attention import BlockPlan, attend_blocks, attend_blocks_ref, block_plan
from kilotok.kernels.attention.block_plan import TILE, padded_anchors

LENGTH = 256
WINDOWS = [None, 16, 40, 200, 1000]
# one document; documents that begin inside and at the edges of tiles, the last tokens padding (a document each, as pack_row has them)
ROWS = [[0], [0, 5, 50, 128, 129, 190, 250]]
EXACT = Bound(maximum=1e-12, rms=1e-12, reason="the same fp64 terms in another order")
FP32 = Bound(maximum=1e-5, rms=1e-5, reason="fp32 sums of at most 266 terms in another order; gradients sum them over all rows")


def batch(block_size: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(anchors, firsts) [2, A] of random anchors of ROWS, ascending; the last five of the second row are invalid: index 0 after higher ones."""
    generator, count = torch.Generator().manual_seed(seed), padded_anchors(16, block_size=block_size)
    anchors = torch.stack([torch.randperm(LENGTH, generator=generator)[:count].sort().values for _ in ROWS])
    anchors[0, 0], anchors[0, -1], anchors[1, -5:] = 0, LENGTH - 1, 0
    firsts = torch.tensor([[max(f for f in row if f <= a) for a in of_row] for row, of_row in zip(ROWS, anchors.tolist(), strict=True)])
    return anchors, firsts


def visible(anchors: Tensor, firsts: Tensor, *, block_size: int, length: int, window: int | None, causal: bool) -> Tensor:
    """bool [B, A * N, length + A * N], one slot at a time from the rule."""
    count = anchors.shape[1] * block_size
    seen = torch.zeros(len(anchors), count, length + count, dtype=torch.bool)
    for b, of_row in enumerate(anchors.tolist()):
        for a, anchor in enumerate(of_row):
            for n in range(block_size):
                low = int(firsts[b, a]) if window is None else max(int(firsts[b, a]), anchor + n - window + 1)
                own = length + a * block_size
                seen[b, a * block_size + n, low:max(low, anchor)] = True
                seen[b, a * block_size + n, own:own + (n + 1 if causal else block_size)] = True
    return seen


def make(block_size: int, window: int | None, causal: bool, *, flex: bool = True) -> tuple[BlockPlan, Tensor]:
    anchors, firsts = batch(block_size)
    plan = block_plan(anchors, firsts_BA=firsts, block_size=block_size, length=LENGTH, window=window, causal=causal, flex=flex)
    return plan, visible(anchors, firsts, block_size=block_size, length=LENGTH, window=window, causal=causal)


def listed(numbers: Tensor, indices: Tensor) -> Tensor:
    """bool [B, Q, T] of FlexAttention's two tensors."""
    found = torch.zeros(indices.shape[0], *indices.shape[2:], dtype=torch.bool)
    for b, of_row in enumerate(numbers[:, 0].tolist()):
        for q, number in enumerate(of_row):
            which = indices[b, 0, q, :number].long()
            assert len(set(which.tolist())) == number, "a tile is listed twice"
            found[b, q, which] = True
    return found


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("block_size", [8, 16, 10])
class TestPlan:
    def test_the_mask_and_the_dense_flags_are_the_rule(self, block_size: int, window: int | None, causal: bool) -> None:
        plan, expected = make(block_size, window, causal)
        batch_size, rows, keys = expected.shape
        b, q, k = torch.meshgrid(torch.arange(batch_size), torch.arange(rows), torch.arange(keys), indexing="ij")
        assert torch.equal(plan.mask.mask_mod(b, torch.zeros_like(b), q, k), expected)
        assert torch.equal(plan.context_visible(LENGTH).flatten(1, 2), expected[..., :LENGTH])
        own = torch.block_diag(*[plan.block_visible()] * (rows // block_size))
        assert torch.equal(own.bool().expand(batch_size, -1, -1), expected[..., LENGTH:])

    def test_every_tile_that_matters_is_listed_and_whole_ones_are_whole(self, block_size: int, window: int | None, causal: bool) -> None:
        plan, expected = make(block_size, window, causal)
        partial = listed(plan.mask.kv_num_blocks, plan.mask.kv_indices)
        whole = listed(plan.mask.full_kv_num_blocks, plan.mask.full_kv_indices)
        tiles = expected.unflatten(2, (-1, TILE)).unflatten(1, (-1, TILE))   # B Q row T key
        some, every = tiles.any(4).any(2), tiles.all(4).all(2)
        assert not (partial & whole).any()
        assert not (some & ~(partial | whole)).any(), "a visible pair would be left out"
        assert not (whole & ~every).any(), "an invisible pair would be let in"
        if TILE % block_size == 0:
            assert torch.equal(partial | whole, some) and torch.equal(whole, every)


def test_whole_tiles_and_skipped_tiles_exist() -> None:
    """Else the claims above are about nothing."""
    anchors = torch.arange(400, 416)[None].expand(1, -1)
    plan = block_plan(anchors, firsts_BA=torch.zeros_like(anchors), block_size=8, length=512, window=330, causal=False, flex=True)
    assert listed(plan.mask.kv_num_blocks, plan.mask.kv_indices).tolist() == [[[True, False, False, True, True]]]         # 71..127, 384..414, own slots
    assert listed(plan.mask.full_kv_num_blocks, plan.mask.full_kv_indices).tolist() == [[[False, True, True, False, False]]]
    plan = block_plan(anchors, firsts_BA=torch.zeros_like(anchors), block_size=8, length=512, window=20, causal=False, flex=True)
    assert listed(plan.mask.kv_num_blocks, plan.mask.kv_indices).tolist() == [[[False, False, True, True, True]]]         # from 381 on


def test_anchors_far_apart_do_not_list_the_tiles_between() -> None:
    anchors = torch.tensor([[10] * 8 + [1000] * 8])
    plan = block_plan(anchors, firsts_BA=torch.zeros_like(anchors), block_size=8, length=1024, window=16, causal=False, flex=True)
    assert listed(plan.mask.kv_num_blocks, plan.mask.kv_indices)[0, 0].nonzero().flatten().tolist() == [0, 7, 8]


@pytest.mark.parametrize("block_size", [2, 8, 10, 12, 16, 128, 7])
@pytest.mark.parametrize("count", [1, 15, 16, 17, 63, 129])
def test_padded_anchors_fill_whole_tiles_and_no_more(count: int, block_size: int) -> None:
    assert padded_anchors(count, block_size=block_size) == next(a for a in range(count, 10_000) if a * block_size % TILE == 0)


@pytest.mark.parametrize(("length", "anchors"), [(100, 16), (256, 15), (129, 17)])
def test_sizes_that_do_not_fill_tiles_are_refused(length: int, anchors: int) -> None:
    zeros = torch.zeros(1, anchors, dtype=torch.int64)
    with pytest.raises(ValueError, match=rf"^block_plan: rows of context and of slots must be multiples of 128; got {length} and {anchors * 8}\. Pad the row"):
        block_plan(zeros, firsts_BA=zeros, block_size=8, length=length, window=None, causal=False, flex=True)
    assert block_plan(zeros, firsts_BA=zeros, block_size=8, length=length, window=None, causal=False, flex=False).mask is None   # dense takes any


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("window", [None, 1024])
def test_the_block_mask_is_made_without_one_flag_a_pair(window: int | None) -> None:
    anchors = torch.arange(512).mul(8)[None]
    rows, length, firsts = 512 * 8, 4096, torch.zeros_like(anchors)
    with Largest() as largest:
        block_plan(anchors, firsts_BA=firsts, block_size=8, length=length, window=window, causal=False, flex=True)
    assert 0 < largest.elements < rows * length // 500
    with Largest() as largest:
        block_plan(anchors, firsts_BA=firsts, block_size=8, length=length, window=window, causal=False, flex=False).context_visible(length)
    assert largest.elements >= 512 * length   # what the dense twin costs


# --- attention ---


def inputs(plan: BlockPlan, *, length: int, dtype: torch.dtype, device: str = "cpu", heads: int = 4, size: int = 16, seed: int = 1) -> dict[str, Tensor]:
    b, a = plan.anchors_BA.shape
    n, g, generator = plan.block_size, heads // 2, torch.Generator().manual_seed(seed)
    shapes = {"query": (b, a, n, heads, size), "context_keys_BGSK": (b, g, length, size), "context_values_BGSK": (b, g, length, size),
              "keys_BANGK": (b, a, n, g, size), "values_BANGK": (b, a, n, g, size), "sinks_H": (heads,)}
    # sharp enough that a wrong pair shows; sinks of the size of the scores
    return {name: torch.randn(s, generator=generator, dtype=torch.float64).mul(1.5).to(device, dtype).requires_grad_() for name, s in shapes.items()}


def run(attend: Any, tensors: dict[str, Tensor], plan: BlockPlan, *, sinks: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """The output and the gradient of every input, for one fixed random cotangent."""
    used = {name: t for name, t in tensors.items() if sinks or name != "sinks_H"}
    output = attend(used["query"], **{name: t for name, t in used.items() if name != "query"}, plan=plan)
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(output)
    return output.detach(), dict(zip(used, torch.autograd.grad(output, list(used.values()), cotangent), strict=True))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("block_size", "window"), [(8, None), (16, 40), (10, 40)])
def test_flex_and_its_twin_agree_in_values_and_gradients(flex_on_cpu: None, block_size: int, window: int | None, causal: bool, sinks: bool) -> None:
    plan, _ = make(block_size, window, causal)
    tensors = inputs(plan, length=LENGTH, dtype=torch.float32)
    got, got_gradients = run(attend_blocks, tensors, plan, sinks=sinks)
    expected, gradients = run(attend_blocks_ref, tensors, plan, sinks=sinks)
    assert_within(got, expected, bound=FP32)
    for name, gradient in gradients.items():
        assert_within(got_gradients[name], gradient, bound=FP32, what=f"gradient of {name}")


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 40])
def test_the_twin_is_the_rule(window: int | None, causal: bool, sinks: bool) -> None:
    """One row and head at a time: softmax over what is seen and the sink, whose share goes nowhere."""
    plan, seen = make(16, window, causal, flex=False)
    t = {name: tensor.detach() for name, tensor in inputs(plan, length=LENGTH, dtype=torch.float64).items()}
    got = attend_blocks(t["query"], context_keys_BGSK=t["context_keys_BGSK"], context_values_BGSK=t["context_values_BGSK"], keys_BANGK=t["keys_BANGK"],
                        values_BANGK=t["values_BANGK"], plan=plan, sinks_H=t["sinks_H"] if sinks else None)
    query, output = t["query"].flatten(1, 2), torch.zeros_like(got).flatten(1, 2)
    for b in range(2):
        for head in range(4):
            keys = torch.cat((t["context_keys_BGSK"][b, head // 2], t["keys_BANGK"][b, :, :, head // 2].flatten(0, 1)))
            values = torch.cat((t["context_values_BGSK"][b, head // 2], t["values_BANGK"][b, :, :, head // 2].flatten(0, 1)))
            for row in range(query.shape[1]):
                which = seen[b, row].nonzero().flatten()
                weights = (keys[which] @ query[b, row, head] / math.sqrt(16)).exp()
                total = weights.sum() + (t["sinks_H"][head].exp() if sinks else 0)
                output[b, row, head] = weights / total @ values[which]
    assert_within(got, output.view(got.shape), bound=EXACT)


def test_a_low_sink_is_no_sink_and_a_high_one_takes_all() -> None:
    plan, _ = make(8, None, False, flex=False)
    t = {name: tensor.detach() for name, tensor in inputs(plan, length=LENGTH, dtype=torch.float64).items()}
    query, sinks = t.pop("query"), t.pop("sinks_H")
    without = attend_blocks(query, **t, plan=plan)
    assert_within(attend_blocks(query, **t, plan=plan, sinks_H=torch.full_like(sinks, -1e3)), without, bound=EXACT)
    assert float(attend_blocks(query, **t, plan=plan, sinks_H=torch.full_like(sinks, 1e3)).abs().max()) == 0


# --- on a GPU ---


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("window", "causal"), [(None, False), (128, False), (128, True)])
@pytest.mark.parametrize(("dtype", "bound"), [
    (torch.float32, Bound(maximum=1e-4, rms=1e-4, reason="fp32 products without TF32, summed in another order")),
    (torch.bfloat16, Bound(maximum=4e-2, rms=2e-2, reason="bf16 weights and outputs: a few roundings of 2**-8, at other places")),
])
def test_compiled_flex_and_its_twin_agree(dtype: torch.dtype, bound: Bound, window: int | None, causal: bool, sinks: bool) -> None:
    torch.set_float32_matmul_precision("highest")
    generator = torch.Generator().manual_seed(3)
    anchors = torch.stack([torch.randperm(512, generator=generator)[:64].sort().values for _ in range(2)])
    anchors[1, -7:] = 0
    firsts = torch.where(anchors >= 200, 200, 0)
    firsts[1] = 0
    plan = block_plan(anchors.cuda(), firsts_BA=firsts.cuda(), block_size=8, length=512, window=window, causal=causal, flex=True)
    tensors = inputs(plan, length=512, dtype=dtype, device="cuda", heads=8, size=64)
    got, got_gradients = run(attend_blocks, tensors, plan, sinks=sinks)
    # the twin in fp32 from the same (rounded) inputs
    wide = {name: t.detach().float().requires_grad_() for name, t in tensors.items()}
    expected, gradients = run(attend_blocks_ref, wide, plan, sinks=sinks)
    assert_within(got, expected, bound=bound)
    for name, gradient in gradients.items():
        assert_within(got_gradients[name], gradient, bound=bound, what=f"gradient of {name}")
