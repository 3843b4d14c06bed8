# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The router of a decode step: from logits to the routing list that the expert products walk through.

Of each live column the K largest logits win, of equal ones the lowest expert id. Weights are exp(logit - largest) in fp32 over a sum: of the chosen
experts (`normalize`), which is both a softmax renormalised over the chosen ones and a softmax of the chosen logits; or of all experts.

The list is that of `moe/routing.py`, from a table of columns and experts instead of pairs: what a pair needs to know is how many columns before
it chose its expert, how many experts before its own its column chose, and how many tiles the experts before it have. Three running sums.

Cost: a column's row of the table lies in one warp, so choosing takes no barrier. Every program can do it for itself, into a list of its own,
which saves a barrier over the grid; or one program does it for all.

Legend: C columns, E experts, K experts per column, M column tiles.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..moe.product import require
from ..moe.routing import MAX_EXPERTS_PER_TOKEN, TILE_COLUMNS, Routing, max_tiles, route_ref
from ..moe.stream import cta_barrier, here
from .merge_device import row_lanes

MAX_TABLE = 8192        # columns times experts, rounded up to powers of two: 32 cells a thread
NUM_WARPS = 8
_COLUMNS = gl.constexpr(TILE_COLUMNS)
_LOG2_E = gl.constexpr(1.4426950408889634)
_AT_ONCE = gl.constexpr(8)


def choose_ref(logits_CE: Tensor, slots_C: Tensor, *, experts_per_token: int, normalize: bool, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """(expert ids int32 [C, K], weights fp32 [C, K]), the largest logit first; -1 and 0 in dead columns, whose slot is below 0."""
    logits = logits_CE.to(dtype)
    top, ids = logits.sort(dim=-1, descending=True, stable=True)   # stable: of equal logits the lowest id comes first
    shares = (top - top[:, :1]).exp()
    chosen = shares[:, :experts_per_token]
    weights = chosen / (chosen if normalize else shares).sum(-1, keepdim=True)
    dead = (slots_C < 0).unsqueeze(1)
    return ids[:, :experts_per_token].masked_fill(dead, -1).to(torch.int32), weights.masked_fill(dead, 0).float()


def router_ref(logits_CE: Tensor, slots_C: Tensor, *, experts_per_token: int, normalize: bool) -> Routing:
    """The routing list of a step. Shapes: logits fp32 [C, E]; slots_C int32, below 0 for a dead column."""
    ids, weights = choose_ref(logits_CE, slots_C, experts_per_token=experts_per_token, normalize=normalize)
    return route_ref(ids, weights, num_experts=logits_CE.shape[1])


def empty_routing(*, num_columns: int, experts_per_token: int, num_experts: int, device: torch.device) -> Routing:
    """Memory for the list of a step."""
    tiles = max_tiles(num_columns, experts_per_token, num_experts)
    return Routing(num_tiles=torch.zeros(1, dtype=torch.int32, device=device), experts_M=torch.empty(tiles, dtype=torch.int32, device=device),
                   pairs_MC=torch.empty(tiles, TILE_COLUMNS, dtype=torch.int32, device=device),
                   weights_MC=torch.empty(tiles, TILE_COLUMNS, device=device), num_experts_T=torch.empty(num_columns, dtype=torch.int32, device=device),
                   num_experts_per_token=experts_per_token, num_experts=num_experts)


def router_constants(*, num_columns: int, experts_per_token: int, num_experts: int) -> dict[str, int]:
    """What the device code must know. Errors: NotImplementedError for a table that one program cannot hold."""
    experts = triton.next_power_of_2(num_experts)
    if num_columns & (num_columns - 1) or num_columns * experts > MAX_TABLE or experts_per_token > min(num_experts, MAX_EXPERTS_PER_TOKEN):
        raise NotImplementedError(f"router: takes a power of two of columns, at most {MAX_TABLE} columns times experts (rounded up to a power of two) and "
                                  f"{MAX_EXPERTS_PER_TOKEN} experts a token; got {num_columns}, {num_experts} and {experts_per_token}. Use fewer columns.")
    tiles = max_tiles(num_columns, experts_per_token, num_experts)
    return {"C": num_columns, "E": num_experts, "K": experts_per_token, "EXPERTS": experts, "TILES": tiles,
            "PADDED_TILES": triton.next_power_of_2(tiles)}


def router(logits_CE: Tensor, slots_C: Tensor, *, routing: Routing, normalize: bool) -> Routing:
    """`router_ref` on a GPU, into `routing`: one launch of one program. Returns it.

    Errors: ValueError for what does not fit; NotImplementedError without a GPU, or for more columns times experts than one program can hold.
    """
    where, columns, experts, per_token = "router", len(slots_C), routing.num_experts, routing.num_experts_per_token
    require(where, "logits", logits_CE, (columns, experts), torch.float32, like=logits_CE)
    require(where, "slots", slots_C, (columns,), torch.int32, like=logits_CE)
    tiles = max_tiles(columns, per_token, experts)
    for name, shape, dtype in (("num_tiles", (1,), torch.int32), ("experts_M", (tiles,), torch.int32), ("pairs_MC", (tiles, TILE_COLUMNS), torch.int32),
                               ("weights_MC", (tiles, TILE_COLUMNS), torch.float32), ("num_experts_T", (columns,), torch.int32)):
        require(where, f"routing.{name}", getattr(routing, name), shape, dtype, like=logits_CE)
    constants = router_constants(num_columns=columns, experts_per_token=per_token, num_experts=experts)
    if logits_CE.device.type != "cuda":
        raise NotImplementedError(f"{where}: the kernel is built for a GPU; got {logits_CE.device}. The twin (router_ref) runs anywhere.")
    router_kernel[(1,)](logits_CE, slots_C, *routing.tensors(), NORMALIZE=normalize, NUM_WARPS=NUM_WARPS, num_warps=NUM_WARPS, **constants)
    return routing


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _choose(logits_ptr, slots_ptr, first_column, COLUMNS: gl.constexpr, E: gl.constexpr, K: gl.constexpr, EXPERTS: gl.constexpr, NORMALIZE: gl.constexpr,
            NUM_WARPS: gl.constexpr):
    """What COLUMNS columns choose: their numbers, the experts' numbers, a table of who chose whom (0 or 1), and of weights."""
    TABLE: gl.constexpr = row_lanes(EXPERTS, NUM_WARPS)
    column = first_column + here(gl.arange(0, COLUMNS, gl.SliceLayout(1, TABLE)))
    expert = here(gl.arange(0, EXPERTS, gl.SliceLayout(0, TABLE)))[None, :]
    live = gl.load(slots_ptr + column) >= 0
    logits = gl.load(logits_ptr + column[:, None] * E + expert, mask=live[:, None] & (expert < E), other=-float("inf"), cache_modifier=".cg")
    free = live[:, None] & (expert < E)
    bits = (logits + 0.0).to(gl.int32, bitcast=True)       # -0 is 0
    left = bits ^ ((bits >> 31) & 0x7FFFFFFF)              # in the order of the logits; a warp finds the largest of integers in one instruction
    for _ in gl.static_range(K):
        best = gl.max(left, 1)
        first = gl.min(gl.where((left == best[:, None]) & free, expert, EXPERTS), 1)
        taken = expert == first[:, None]
        free = free & (expert != first[:, None])
        left = gl.where(taken, -2147483648, left)
    chosen = live[:, None] & (expert < E) & (free == 0)
    shares = gl.exp2((logits - gl.max(logits, 1)[:, None]) * _LOG2_E)
    if NORMALIZE:
        counted = chosen
    else:
        counted = live[:, None] & (expert < E)
    return column, expert, chosen.to(gl.int32), shares / gl.sum(gl.where(counted, shares, 0.0), 1)[:, None]


@gluon.jit
def _clear(experts_ptr, pairs_ptr, weights_ptr, TILES: gl.constexpr, PADDED_TILES: gl.constexpr, NUM_WARPS: gl.constexpr):
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [NUM_WARPS], [0])
    cell = here(gl.arange(0, PADDED_TILES * _COLUMNS, LANES))
    gl.store(pairs_ptr + cell, cell * 0 - 1, mask=cell < TILES * _COLUMNS)
    gl.store(weights_ptr + cell, gl.zeros((PADDED_TILES * _COLUMNS,), gl.float32, LANES), mask=cell < TILES * _COLUMNS)
    tile = here(gl.arange(0, PADDED_TILES, LANES))
    gl.store(experts_ptr + tile, tile * 0 - 1, mask=tile < TILES)


@gluon.jit
def _tiles_before(columns_E, num_tiles_ptr, EXPERTS: gl.constexpr, NUM_WARPS: gl.constexpr):
    """The tiles of the experts before each, from how many columns chose it; stores how many there are in all."""
    tiles = (columns_E + (_COLUMNS - 1)) // _COLUMNS
    tiles = gl.convert_layout(tiles, gl.BlockedLayout([1], [32], [NUM_WARPS], [0]))   # a running sum takes no slice of a layout
    gl.store(num_tiles_ptr, gl.sum(tiles, 0))
    return gl.convert_layout(gl.associative_scan(tiles, 0, _add) - tiles, gl.SliceLayout(0, row_lanes(EXPERTS, NUM_WARPS)))


@gluon.jit
def _store_pairs(experts_ptr, pairs_ptr, weights_ptr, num_experts_ptr, column, expert, ones, weights, before, seen, store, K: gl.constexpr):
    """seen: how many columns of those before these chose each expert."""
    earlier = seen[None, :] + gl.associative_scan(ones, 0, _add) - ones    # columns before this one that chose the expert
    rank = gl.associative_scan(ones, 1, _add) - ones                       # experts before this one that the column chose
    gl.store(num_experts_ptr + column, gl.sum(ones, 1))
    tile = before[None, :] + earlier // _COLUMNS
    place = tile * _COLUMNS + earlier % _COLUMNS
    chosen = (ones != 0) & store
    gl.store(pairs_ptr + place, column[:, None] * K + rank, mask=chosen)
    gl.store(weights_ptr + place, weights, mask=chosen)
    gl.store(experts_ptr + tile, expert + tile * 0, mask=chosen & (earlier % _COLUMNS == 0))


@gluon.jit
def choose_and_route(logits_ptr, slots_ptr, num_tiles_ptr, experts_ptr, pairs_ptr, weights_ptr, num_experts_ptr, C: gl.constexpr, E: gl.constexpr,
                     K: gl.constexpr, EXPERTS: gl.constexpr, TILES: gl.constexpr, PADDED_TILES: gl.constexpr, NORMALIZE: gl.constexpr,
                     NUM_WARPS: gl.constexpr):
    """The whole list by one program (or one partition of NUM_WARPS warps), into memory that no other program writes.

    Up to _AT_ONCE columns are one table; more go through twice, _COLUMNS at a time, first to be counted and then to be placed: a larger table has neither
    registers nor shared memory beside a resident step's.
    """
    if C <= _AT_ONCE:
        column, expert, ones, weights = _choose(logits_ptr, slots_ptr, 0, C, E, K, EXPERTS, NORMALIZE, NUM_WARPS)
        _clear(experts_ptr, pairs_ptr, weights_ptr, TILES, PADDED_TILES, NUM_WARPS)
        columns_E = gl.sum(ones, 0)
        before = _tiles_before(columns_E, num_tiles_ptr, EXPERTS, NUM_WARPS)
        cta_barrier()   # the cells above are written again, by other threads
        _store_pairs(experts_ptr, pairs_ptr, weights_ptr, num_experts_ptr, column, expert, ones, weights, before, columns_E * 0, True, K)
    else:
        _clear(experts_ptr, pairs_ptr, weights_ptr, TILES, PADDED_TILES, NUM_WARPS)
        seen = gl.zeros((EXPERTS,), gl.int32, gl.SliceLayout(0, row_lanes(EXPERTS, NUM_WARPS)))
        before = seen
        for turn in range(2 * (C // _COLUMNS)):
            if turn == C // _COLUMNS:
                before = _tiles_before(seen, num_tiles_ptr, EXPERTS, NUM_WARPS)
                seen = seen * 0
                cta_barrier()
            column, expert, ones, weights = _choose(logits_ptr, slots_ptr, turn % (C // _COLUMNS) * _COLUMNS, _COLUMNS, E, K, EXPERTS, NORMALIZE, NUM_WARPS)
            _store_pairs(experts_ptr, pairs_ptr, weights_ptr, num_experts_ptr, column, expert, ones, weights, before, seen, turn >= C // _COLUMNS, K)
            seen += gl.sum(ones, 0)


@gluon.jit
def router_kernel(logits_ptr, slots_ptr, num_tiles_ptr, experts_ptr, pairs_ptr, weights_ptr, num_experts_ptr, C: gl.constexpr, E: gl.constexpr,
                  K: gl.constexpr, EXPERTS: gl.constexpr, TILES: gl.constexpr, PADDED_TILES: gl.constexpr, NORMALIZE: gl.constexpr,
                  NUM_WARPS: gl.constexpr):
    choose_and_route(logits_ptr, slots_ptr, num_tiles_ptr, experts_ptr, pairs_ptr, weights_ptr, num_experts_ptr, C, E, K, EXPERTS, TILES, PADDED_TILES,
                     NORMALIZE, NUM_WARPS)
