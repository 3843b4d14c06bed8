"""The routing list: its twin against the pairs themselves, its kernel in Triton's interpreter, compiled, and on a GPU."""


import pytest
import torch
import triton
from interpreted import run_in_interpreter
from tolerances import assert_equal
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kilotok.kernels.moe.routing import Routing, _route_kernel, max_tiles, route, route_constants, route_ref, stack_routings

# T, K, E: one token, a draft block, many tokens on few experts (several tiles an expert), the largest
SIZES = [(1, 8, 128), (8, 8, 128), (8, 4, 32), (3, 2, 5), (64, 8, 128), (64, 4, 4), (40, 1, 1), (64, 16, 512), (16, 10, 384)]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def pairs_of(num_tokens: int, num_experts_per_token: int, num_experts: int, *, seed: int, dead: bool = True) -> tuple[Tensor, Tensor]:
    """Distinct random experts of each token; some tokens dead, some places empty."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.rand(num_tokens, num_experts, generator=g).argsort(dim=-1)[:, :num_experts_per_token].to(torch.int32)
    if dead and num_tokens > 2:
        ids[1] = -1
        ids[2, ::2] = num_experts + 3
    return ids, torch.rand(num_tokens, num_experts_per_token, generator=g) + 0.01


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_pair_is_in_the_list_once_and_in_order(size: tuple[int, int, int]) -> None:
    num_tokens, num_experts_per_token, num_experts = size
    ids, weights = pairs_of(*size, seed=sum(size))
    routing = route_ref(ids, weights, num_experts=num_experts)
    tiles = int(routing.num_tiles)
    assert tiles <= max_tiles(num_tokens, num_experts_per_token, num_experts) == len(routing.experts_M)
    seen = []
    for expert, pairs, tile_weights in zip(routing.experts_M[:tiles].tolist(), routing.pairs_MC[:tiles].tolist(), routing.weights_MC[:tiles].tolist(),
                                           strict=True):
        assert pairs[0] >= 0, "a tile without a token"
        live = [p for p in pairs if p >= 0]
        assert pairs == live + [-1] * (8 - len(live)) and live == sorted(live)
        assert tile_weights[len(live):] == [0.0] * (8 - len(live))
        seen += [(expert, p // num_experts_per_token, p % num_experts_per_token, w) for p, w in zip(live, tile_weights, strict=False)]
    assert seen == sorted(seen, key=lambda s: s[:2])
    expected = []
    for token in range(num_tokens):
        live = sorted((int(e), float(w)) for e, w in zip(ids[token], weights[token], strict=True) if 0 <= e < num_experts)
        expected += [(e, token, rank, w) for rank, (e, w) in enumerate(live)]
        assert int(routing.num_experts_T[token]) == len(live)
    assert sorted(seen) == sorted(expected)
    for rest in (routing.experts_M[tiles:], routing.pairs_MC[tiles:]):
        assert bool((rest == -1).all())


def test_the_bound_on_tiles_is_reached() -> None:
    assert max_tiles(8, 8, 128) == 64 and max_tiles(1, 8, 128) == 8 and max_tiles(0, 8, 128) == 0
    # 9 tokens of expert 0 and one of expert 1: 2 + 1
    ids = torch.tensor([[0]] * 9 + [[1]])
    assert int(route_ref(ids, torch.ones(10, 1), num_experts=2).num_tiles) == 3 == max_tiles(10, 1, 2)


def test_refusals() -> None:
    ids, weights = torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, 2)
    with pytest.raises(TypeError, match="int32 or int64 and weights float32"):
        route(ids, weights.double(), num_experts=4)
    with pytest.raises(ValueError, match=r"must be \[T, K\]"):
        route(ids, weights[:1], num_experts=4)
    for bad_ids, experts, words in ((ids, 513, "512 experts; got 513"), (ids.new_zeros(65, 2), 4, "64 tokens; got 65"),
                                    (ids.new_zeros(2, 17), 4, "16 experts per token; got 17")):
        with pytest.raises(NotImplementedError, match=words):
            route(bad_ids, torch.zeros(bad_ids.shape), num_experts=experts)
    for bad_ids, experts, words in ((ids, 0, "one of the experts at least; got 0"), (ids[:, :0], 4, "one of the experts per token at least; got 0")):
        with pytest.raises(ValueError, match=words):
            route(bad_ids, torch.zeros(bad_ids.shape), num_experts=experts)


def test_an_id_beyond_32_bits_routes_nowhere() -> None:
    routing = route(torch.tensor([[2**32 + 1, 2]]), torch.ones(1, 2), num_experts=4)
    assert int(routing.num_tiles) == 1 and int(routing.experts_M[0]) == 2


def test_no_tokens() -> None:
    routing = route(torch.zeros(0, 8, dtype=torch.int32), torch.zeros(0, 8), num_experts=128)
    assert int(routing.num_tiles) == 0 and routing.experts_M.shape == (0,)


def test_only_routings_of_one_kind_stack() -> None:
    one, other = (route_ref(torch.tensor([[0, 1]], dtype=torch.int32), torch.ones(1, 2), num_experts=e) for e in (4, 8))
    assert stack_routings([one, one]).pairs_MC.shape == (2, *one.pairs_MC.shape)
    for routings in ([], [one, other]):
        with pytest.raises(ValueError, match="stack_routings: needs one routing or more, all of the same experts"):
            stack_routings(routings)


# --- the kernel ---


def run_kernel(ids: Tensor, weights: Tensor, *, num_experts: int) -> Routing:
    """One launch on poisoned memory, on the device of `ids` (the CPU under the interpreter)."""
    tokens, per_token = ids.shape
    tiles = max_tiles(tokens, per_token, num_experts)

    def poison(*shape: int) -> Tensor:
        return torch.full(shape, 0x7F7F7F7F, dtype=torch.int32, device=ids.device)

    routing = Routing(num_tiles=poison(1), experts_M=poison(tiles), pairs_MC=poison(tiles, 8), weights_MC=poison(tiles, 8).view(torch.float32),
                      num_experts_T=poison(tokens), num_experts_per_token=per_token, num_experts=num_experts)
    _route_kernel[(1,)](ids, weights, *routing.tensors(), tokens, tiles, K=per_token, E=num_experts, **route_constants(tokens, per_token, num_experts),
                        num_warps=8)
    return routing


def assert_same(got: Routing, expected: Routing) -> None:
    for name in ("num_tiles", "experts_M", "pairs_MC", "weights_MC", "num_experts_T"):
        assert_equal(getattr(got, name).cpu(), getattr(expected, name), what=name)


def run_interpreted() -> None:
    """Every size, called in a process of its own with TRITON_INTERPRET=1."""
    for size in SIZES:
        for dtype in (torch.int32, torch.int64):
            ids, weights = pairs_of(*size, seed=sum(size) + 1)
            assert_same(run_kernel(ids.to(dtype), weights, num_experts=size[2]), route_ref(ids, weights, num_experts=size[2]))
        print(size)
    ids, weights = pairs_of(8, 8, 128, seed=1)
    far = ids.long()
    far[:, ::2] += 2**32
    assert_same(run_kernel(far, weights, num_experts=128), route_ref(far, weights, num_experts=128))
    print("beyond 32 bits")


@pytest.mark.xdist_group("interpreter")
def test_the_interpreted_kernel_equals_its_twin() -> None:
    assert run_in_interpreter("test_moe_routing") == [*map(str, SIZES), "beyond 32 bits"]


@pytest.mark.parametrize("size", [(8, 8, 128), (8, 4, 32), (64, 16, 512)], ids=str)
def test_the_kernel_compiles_for_sm_90(size: tuple[int, int, int]) -> None:
    constants = {"K": size[1], "E": size[2], **route_constants(*size)}
    names = list(_route_kernel.arg_names)
    types = {"weights_ptr": "*fp32", "tile_weights_ptr": "*fp32", "num_tokens": "i32", "max_num_tiles": "i32"}
    source = ASTSource(fn=_route_kernel, signature={n: "constexpr" if n in constants else types.get(n, "*i32") for n in names}, constexprs=constants)
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    assert "atom" not in kernel.asm["ptx"] and ".local" not in kernel.asm["ptx"]
    assert kernel.metadata.shared <= 227 * 1024


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_gpu_equals_the_twin(size: tuple[int, int, int]) -> None:
    for _ in range(20):
        ids, weights = pairs_of(*size, seed=torch.seed() % 2**31, dead=size[0] % 2 == 0)
        expected = route_ref(ids, weights, num_experts=size[2])
        assert_same(run_kernel(ids.cuda(), weights.cuda(), num_experts=size[2]), expected)
        assert_same(route(ids.cuda(), weights.cuda(), num_experts=size[2]), expected)
