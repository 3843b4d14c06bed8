# Device code has no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Which expert reads which tokens, as a list of column tiles that a product walks through.

A product streams an expert's weights once for a tile of 8 token columns. So the (token, expert) pairs of a step are grouped by
expert, experts in ascending order, tokens of one in ascending order, and cut into tiles of 8; an expert with nine tokens has two
tiles. A column of a tile is computed from its token alone, so where a pair lands changes none of its bits.

A pair is named `token * K + rank`, rank being the place of its expert among the token's own experts in ascending order of expert:
the down products of a token are added by rank, an order that does not depend on its neighbours. A token with an expert id outside
0..E-1 in place k has no pair there (a dead column has none at all), and the ranks of the others close up.

Legend: T tokens, K experts per token, E experts, M column tiles (an upper bound; `num_tiles` are used), C the 8 columns of a tile.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_COLUMNS = 8
MAX_EXPERTS = 512
MAX_TOKENS = 64
MAX_EXPERTS_PER_TOKEN = 16
_COLUMNS = tl.constexpr(TILE_COLUMNS)
_COMPARED = 16384   # elements of one comparison table; two fit the registers of 256 threads with room


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Column tiles of one step, on the device. Entries from `num_tiles` on are -1 (pairs, experts) and 0 (weights)."""

    num_tiles: Tensor       # int32 [1]
    experts_M: Tensor       # int32 [M]: ascending
    pairs_MC: Tensor        # int32 [M, 8]: token * K + rank, or -1
    weights_MC: Tensor      # fp32 [M, 8]
    num_experts_T: Tensor   # int32 [T]: how many ranks a token has
    num_experts_per_token: int
    num_experts: int

    def tensors(self) -> tuple[Tensor, ...]:
        return self.num_tiles, self.experts_M, self.pairs_MC, self.weights_MC, self.num_experts_T


def stack_routings(routings: Sequence[Routing]) -> Routing:
    """The routings of several layers, of one number of tokens and experts, with a leading dimension of layers.

    Errors: ValueError if there are none, or if they are not of the same numbers.
    """
    kinds = {(r.num_experts, r.num_experts_per_token, len(r.num_experts_T), r.pairs_MC.device) for r in routings}
    if len(kinds) != 1:
        raise ValueError("stack_routings: needs one routing or more, all of the same experts, experts per token, tokens and device; got "
                         f"{sorted(map(str, kinds)) or 'none'}.")
    tensors = [torch.stack(parts) for parts in zip(*(r.tensors() for r in routings), strict=True)]
    return Routing(num_tiles=tensors[0], experts_M=tensors[1], pairs_MC=tensors[2], weights_MC=tensors[3], num_experts_T=tensors[4],
                   num_experts_per_token=routings[0].num_experts_per_token, num_experts=routings[0].num_experts)


def max_tiles(num_tokens: int, num_experts_per_token: int, num_experts: int) -> int:
    """The most column tiles that so many pairs can make."""
    pairs = num_tokens * num_experts_per_token
    live = min(pairs, num_experts)
    return live + (pairs - live) // TILE_COLUMNS


def _check(expert_ids_TK: Tensor, expert_weights_TK: Tensor, *, num_experts: int) -> tuple[int, int]:
    where = "route"
    if expert_ids_TK.dtype not in (torch.int32, torch.int64) or expert_weights_TK.dtype != torch.float32:
        raise TypeError(f"{where}: expert ids must be int32 or int64 and weights float32; got {expert_ids_TK.dtype} and {expert_weights_TK.dtype}.")
    if expert_ids_TK.dim() != 2 or expert_ids_TK.shape != expert_weights_TK.shape:
        raise ValueError(f"{where}: expert ids and weights must be [T, K]; got {tuple(expert_ids_TK.shape)} and {tuple(expert_weights_TK.shape)}.")
    num_tokens, num_experts_per_token = expert_ids_TK.shape
    for name, value, largest in (("experts", num_experts, MAX_EXPERTS), ("tokens", num_tokens, MAX_TOKENS),
                                 ("experts per token", num_experts_per_token, MAX_EXPERTS_PER_TOKEN)):
        if value < (0 if name == "tokens" else 1):
            raise ValueError(f"{where}: needs one of the {name} at least; got {value}.")
        if value > largest:
            raise NotImplementedError(f"{where}: takes up to {largest} {name}; got {value}. More tokens are for the prefill product.")
    return num_tokens, num_experts_per_token


def _empty(num_tokens: int, num_experts_per_token: int, num_experts: int, *, device: torch.device) -> Routing:
    tiles = max_tiles(num_tokens, num_experts_per_token, num_experts)
    return Routing(num_tiles=torch.zeros(1, dtype=torch.int32, device=device), experts_M=torch.full((tiles,), -1, dtype=torch.int32, device=device),
                   pairs_MC=torch.full((tiles, TILE_COLUMNS), -1, dtype=torch.int32, device=device),
                   weights_MC=torch.zeros(tiles, TILE_COLUMNS, dtype=torch.float32, device=device),
                   num_experts_T=torch.zeros(num_tokens, dtype=torch.int32, device=device), num_experts_per_token=num_experts_per_token,
                   num_experts=num_experts)


def route_ref(expert_ids_TK: Tensor, expert_weights_TK: Tensor, *, num_experts: int) -> Routing:
    """The column tiles of one step, one pair at a time.

    Shapes: expert_ids_TK int32 or int64, distinct within a token; ids outside 0..num_experts-1 route nowhere. expert_weights_TK fp32.
    """
    num_tokens, num_experts_per_token = _check(expert_ids_TK, expert_weights_TK, num_experts=num_experts)
    routing = _empty(num_tokens, num_experts_per_token, num_experts, device=expert_ids_TK.device)
    pairs: dict[int, list[tuple[int, float]]] = {}
    for token, (ids, weights) in enumerate(zip(expert_ids_TK.tolist(), expert_weights_TK.tolist(), strict=True)):
        live = sorted((expert, weight) for expert, weight in zip(ids, weights, strict=True) if 0 <= expert < num_experts)
        routing.num_experts_T[token] = len(live)
        for rank, (expert, weight) in enumerate(live):
            pairs.setdefault(expert, []).append((token * num_experts_per_token + rank, weight))
    tile = 0
    for expert in sorted(pairs):
        for start in range(0, len(pairs[expert]), TILE_COLUMNS):
            routing.experts_M[tile] = expert
            for column, (pair, weight) in enumerate(pairs[expert][start:start + TILE_COLUMNS]):
                routing.pairs_MC[tile, column], routing.weights_MC[tile, column] = pair, weight
            tile += 1
    routing.num_tiles[0] = tile
    return routing


def route(expert_ids_TK: Tensor, expert_weights_TK: Tensor, *, num_experts: int) -> Routing:
    """`route_ref` on the CPU; on CUDA one launch of one program, without a copy to the host."""
    if expert_ids_TK.device.type == "cpu":
        return route_ref(expert_ids_TK, expert_weights_TK, num_experts=num_experts)
    num_tokens, num_experts_per_token = _check(expert_ids_TK, expert_weights_TK, num_experts=num_experts)
    tiles = max_tiles(num_tokens, num_experts_per_token, num_experts)
    device = expert_ids_TK.device
    routing = Routing(num_tiles=torch.empty(1, dtype=torch.int32, device=device), experts_M=torch.empty(tiles, dtype=torch.int32, device=device),
                      pairs_MC=torch.empty(tiles, TILE_COLUMNS, dtype=torch.int32, device=device),
                      weights_MC=torch.empty(tiles, TILE_COLUMNS, dtype=torch.float32, device=device),
                      num_experts_T=torch.empty(num_tokens, dtype=torch.int32, device=device), num_experts_per_token=num_experts_per_token,
                      num_experts=num_experts)
    with torch.cuda.device(device):
        _route_kernel[(1,)](expert_ids_TK.contiguous(), expert_weights_TK.contiguous(), *routing.tensors(), num_tokens, tiles, K=num_experts_per_token,
                            E=num_experts, **route_constants(num_tokens, num_experts_per_token, num_experts), num_warps=8)
    return routing


def route_constants(num_tokens: int, num_experts_per_token: int, num_experts: int) -> dict[str, int]:
    """The sizes of the kernel's tables: powers of two that hold the pairs, experts and tiles, and the rows compared at once."""
    pairs = triton.next_power_of_2(max(1, num_tokens * num_experts_per_token))
    experts = triton.next_power_of_2(num_experts)
    tiles = triton.next_power_of_2(max(1, max_tiles(num_tokens, num_experts_per_token, num_experts)))
    rows = max(1, min(_COMPARED // max(pairs, experts), pairs))
    return {"PAIRS": pairs, "EXPERTS": experts, "TILES": tiles, "RANKS": triton.next_power_of_2(num_experts_per_token), "ROWS": rows}


@triton.jit
def _ids_of(ids_ptr, pairs, num_pairs, E: tl.constexpr):
    """Expert of each pair, -1 where it has none."""
    ids = tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=-1)
    return tl.where((ids >= 0) & (ids < E), ids, -1).to(tl.int32)


@triton.jit(do_not_specialize=["num_tokens", "max_num_tiles"])
def _route_kernel(ids_ptr, weights_ptr, num_tiles_ptr, experts_ptr, pairs_ptr, tile_weights_ptr, num_experts_ptr, num_tokens, max_num_tiles,
                  K: tl.constexpr, E: tl.constexpr, PAIRS: tl.constexpr, EXPERTS: tl.constexpr, TILES: tl.constexpr, RANKS: tl.constexpr,
                  ROWS: tl.constexpr):
    """One program, by comparing everything with everything: counts are sums over comparisons, so no atomics and no order to lose."""
    num_pairs = num_tokens * K
    pair = tl.arange(0, PAIRS)
    ids = _ids_of(ids_ptr, pair, num_pairs, E)
    slot = tl.arange(0, TILES * _COLUMNS)
    tl.store(pairs_ptr + slot, tl.full((TILES * _COLUMNS,), -1, tl.int32), mask=slot < max_num_tiles * _COLUMNS)
    tl.store(tile_weights_ptr + slot, tl.zeros((TILES * _COLUMNS,), tl.float32), mask=slot < max_num_tiles * _COLUMNS)
    tl.store(experts_ptr + tl.arange(0, TILES), tl.full((TILES,), -1, tl.int32), mask=tl.arange(0, TILES) < max_num_tiles)
    tl.debug_barrier()   # the cells above are written again below, by other threads

    expert = tl.arange(0, EXPERTS)
    tokens_E = tl.zeros((EXPERTS,), tl.int32)
    for start in range(0, PAIRS, ROWS):
        some = _ids_of(ids_ptr, start + tl.arange(0, ROWS), num_pairs, E)
        tokens_E += tl.sum((expert[:, None] == some[None, :]).to(tl.int32), 1)
    tiles_E = (tokens_E + (_COLUMNS - 1)) // _COLUMNS
    tl.store(num_tiles_ptr, tl.sum(tiles_E, 0))

    for start in range(0, PAIRS, ROWS):   # where the pairs of these rows land
        mine = start + tl.arange(0, ROWS)
        my_id = _ids_of(ids_ptr, mine, num_pairs, E)
        place = tl.sum(((my_id[:, None] == ids[None, :]) & (pair[None, :] < mine[:, None])).to(tl.int32), 1)
        before = tl.sum(tl.where(expert[None, :] < my_id[:, None], tiles_E[None, :], 0), 1)
        tile = before + place // _COLUMNS
        token = mine // K
        rank_of = tl.arange(0, RANKS)[None, :]
        sibling = tl.where(rank_of < K, _ids_of(ids_ptr, token[:, None] * K + rank_of, num_pairs, E), -1)
        earlier = (sibling < my_id[:, None]) | ((sibling == my_id[:, None]) & (rank_of < (mine % K)[:, None]))
        rank = tl.sum(((sibling >= 0) & earlier).to(tl.int32), 1)
        live = my_id >= 0
        cell = tile * _COLUMNS + place % _COLUMNS
        tl.store(pairs_ptr + cell, token * K + rank, mask=live)
        tl.store(tile_weights_ptr + cell, tl.load(weights_ptr + mine, mask=live, other=0.0), mask=live)
        tl.store(experts_ptr + tile, my_id, mask=live & (place % _COLUMNS == 0))
        count = tl.sum((sibling >= 0).to(tl.int32), 1)
        tl.store(num_experts_ptr + token, count, mask=(mine < num_pairs) & (mine % K == 0))
