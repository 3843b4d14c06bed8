# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment"
"""The router of a decode step: from logits to the routing list that the expert products walk through.

Of each live column the K largest logits win, of equal ones the lowest expert id. Weights are exp(logit - largest) in fp32 over a sum: of the chosen
experts (`normalize`), which is both a softmax renormalised over the chosen ones and a softmax of the chosen logits; or of all experts.

The list is that of `moe/routing.py`, from a table of columns and experts instead of pairs: what a pair needs to know is how many columns before
it chose its expert, how many experts before its own its column chose, and how many tiles the experts before it have. Three running sums.

Every consumer of a resident step does this for itself, which saves a barrier over the grid; so it is short. In two halves, and what lies between them:

    choose_experts  A warp has a column, a lane consecutive experts. Of K rounds each finds the largest value below that of the round before, by one
                    reduction over the warp's integers; how often it occurs is counted beside that chain. The K-th largest value and how many of its ties
                    are in, the lowest ids, decide. Columns meet once, in a table of bytes in shared memory; where the tiles of each expert end follows
                    in every warp by itself. That is all that the producer of weights needs, and it is left in shared memory.
    columns_of_tile The columns of the tile that a consumer begins with, from that table: a list that was just written would come back from L2 behind the
                    weights that the producer asks for, and the activations of those columns can be asked for only then.
    write_list      Pairs, then weights, to memory, while the first of the experts' codes and activations are on their way; read for later tiles and by down.

A column's weights are added in an order that depends on the number of experts alone: a lane's consecutive ones, then a tree over lanes.

Legend: C columns, E experts, K experts per column, M column tiles.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..moe.product import require
from ..moe.routing import MAX_EXPERTS_PER_TOKEN, TILE_COLUMNS, Routing, max_tiles, route_ref
from ..moe.stream import cta_barrier, hidden, row_major
from .merge_device import row_lanes
from .plan import words_cache

MAX_TABLE = 8192        # columns times experts, rounded up to powers of two: 32 cells a thread
NUM_WARPS = 8
_COLUMNS = gl.constexpr(TILE_COLUMNS)
_SHIFT = gl.constexpr(TILE_COLUMNS.bit_length() - 1)
_LOG2_E = gl.constexpr(1.4426950408889634)
_LOWEST = gl.constexpr(-2147483648)   # below every logit
_LEAST_EXPERTS = 128    # a lane has four or more


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
    return {"C": num_columns, "E": num_experts, "K": experts_per_token, "EXPERTS": max(experts, _LEAST_EXPERTS), "TILES": tiles,
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


@gluon.constexpr_function
def cells(experts, num_warps):
    """[column, four experts, one of them]: `row_lanes` with its experts as two axes."""
    return gl.BlockedLayout([1, experts // 128, 4], [1, 32, 1], [num_warps, 1, 1], [2, 1, 0])


@gluon.jit
def _load_logits(logits_ptr, slots_ptr, first, COLUMNS: gl.constexpr, C: gl.constexpr, E: gl.constexpr, EXPERTS: gl.constexpr, NUM_WARPS: gl.constexpr,
                 SPLITS: gl.constexpr, CHANGE: gl.constexpr):
    """Columns, experts, which of their cells there are, and the logits; the two loads do not wait for each other."""
    TABLE: gl.constexpr = row_lanes(EXPERTS, NUM_WARPS)
    column = first + gl.arange(0, COLUMNS, gl.SliceLayout(1, TABLE))
    expert = gl.arange(0, EXPERTS, gl.SliceLayout(0, TABLE))[None, :]
    slots = gl.load(slots_ptr + column, cache_modifier=words_cache(CHANGE))
    logits = gl.load(logits_ptr + column[:, None] * E + expert, mask=(column[:, None] >= 0) & (expert < E), other=-float("inf"), cache_modifier=".cg")
    for split in gl.static_range(1, SPLITS):
        logits += gl.load(logits_ptr + split * (C * E) + column[:, None] * E + expert, mask=(column[:, None] >= 0) & (expert < E), other=0.0,
                          cache_modifier=".cg")
    inside = (slots >= 0)[:, None] & (expert < E)
    return column, expert, inside, gl.where(inside, logits, -float("inf"))


@gluon.jit
def _count(cells):
    return gl.sum(cells.to(gl.int32), 1)


@gluon.jit
def _choose(logits, inside, K: gl.constexpr):
    """1 where a column chose an expert, else 0; and how many of its experts come before. Of dead columns 0."""
    bits = (logits + 0.0).to(gl.int32, bitcast=True)       # -0 is 0
    values = gl.where(inside, bits ^ ((bits >> 31) & 0x7FFFFFFF), _LOWEST)              # integers in the order of the logits
    value = gl.max(values, 1)
    limit = value
    reached = _count(values >= value[:, None])
    for _ in range(1, hidden(gl.to_tensor(K))):
        value = gl.max(gl.where(values < value[:, None], values, _LOWEST), 1)
        limit = gl.where(reached < K, value, limit)
        reached = _count(values >= value[:, None])
    above = (values > limit[:, None]).to(gl.int32)
    tied = ((values == limit[:, None]) & inside).to(gl.int32)
    both = above + (tied << 16)
    before = gl.associative_scan(both, 1, _add) - both
    wanted = K - gl.sum(above, 1)[:, None]
    chosen = above | (tied & (before >> 16 < wanted).to(gl.int32))
    return chosen, (before & 0xFFFF) + gl.minimum(before >> 16, wanted)


@gluon.jit
def _weigh(logits, inside, chosen, NORMALIZE: gl.constexpr):
    shares = gl.exp2((logits - gl.max(logits, 1)[:, None]) * _LOG2_E)
    if NORMALIZE:
        counted = chosen != 0
    else:
        counted = inside
    return shares / gl.sum(gl.where(counted, shares, 0.0), 1)[:, None]


@gluon.jit
def _bytes_of(words, LAYOUT: gl.constexpr, EXPERTS: gl.constexpr, NUM_WARPS: gl.constexpr):
    """[columns, EXPERTS] of [columns, EXPERTS / 4]."""
    CELLS: gl.constexpr = cells(EXPERTS, NUM_WARPS)
    shift = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, CELLS))) * 8
    return gl.convert_layout(gl.reshape((words[:, :, None] >> shift[None, None, :]) & 255, (words.shape[0], EXPERTS)), LAYOUT)


@gluon.jit
def _table_of(table, C: gl.constexpr, EXPERTS: gl.constexpr):
    """A byte for every column and expert."""
    return table._reinterpret(gl.int32, [C, EXPERTS // 4], row_major(1))


@gluon.jit
def _tell_columns(table, turn, chosen, C: gl.constexpr, COLUMNS: gl.constexpr, EXPERTS: gl.constexpr, NUM_WARPS: gl.constexpr):
    CELLS: gl.constexpr = cells(EXPERTS, NUM_WARPS)
    shift = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, CELLS))) * 8
    quads = gl.convert_layout(gl.reshape(chosen, (COLUMNS, EXPERTS // 4, 4)), CELLS)
    table._reinterpret(gl.int32, [C // COLUMNS, COLUMNS, EXPERTS // 4], row_major(2)).index(turn).store(gl.sum(quads << shift[None, None, :], 2))


@gluon.jit
def _tiles_of(table, C: gl.constexpr, EXPERTS: gl.constexpr, NUM_WARPS: gl.constexpr):
    """How many tiles each expert has, [1, EXPERTS], and how many experts have one."""
    TABLE: gl.constexpr = row_lanes(EXPERTS, NUM_WARPS)
    rows = _table_of(table, C, EXPERTS)
    ROW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, cells(EXPERTS, NUM_WARPS)))
    words = gl.zeros((EXPERTS // 4,), gl.int32, ROW)
    cta_barrier()
    for c in range(C):
        words += rows.index(c).load(ROW)      # no byte overflows: 64 columns
    columns = _bytes_of(words[None, :], TABLE, EXPERTS, NUM_WARPS)
    return (columns + (_COLUMNS - 1)) >> _SHIFT, gl.max(_count(columns > 0), 0)


@gluon.jit
def choose_experts(logits_ptr, slots_ptr, table, ends, C: gl.constexpr, E: gl.constexpr, K: gl.constexpr, EXPERTS: gl.constexpr, NUM_WARPS: gl.constexpr,
                   SPLITS: gl.constexpr = 1, CHANGE: gl.constexpr = False):
    """The first half.

    table: shared memory, C * EXPERTS bytes; ends: int32 [1, EXPERTS] there, where the tiles of each expert end, for `moe.stream.expert_of`. CHANGE: whether
    slots do inside a launch.

    Returns the number of tiles, that of distinct experts, and what `write_list` goes on with. Behind a barrier of the CTA all can read `ends`.
    """
    COLUMNS: gl.constexpr = C if C < _COLUMNS else _COLUMNS
    if C == COLUMNS:
        _column, _expert, inside, logits = _load_logits(logits_ptr, slots_ptr, 0, COLUMNS, C, E, EXPERTS, NUM_WARPS, SPLITS, CHANGE)
        chosen, rank = _choose(logits, inside, K)
        _tell_columns(table, 0, chosen, C, COLUMNS, EXPERTS, NUM_WARPS)
        kept = (logits, chosen, rank)
    else:
        for turn in range(C // COLUMNS):
            _column, _expert, inside, logits = _load_logits(logits_ptr, slots_ptr, turn * COLUMNS, COLUMNS, C, E, EXPERTS, NUM_WARPS, SPLITS, CHANGE)
            chosen, rank = _choose(logits, inside, K)
            _tell_columns(table, turn, chosen, C, COLUMNS, EXPERTS, NUM_WARPS)
        kept = ()
    tiles, distinct = _tiles_of(table, C, EXPERTS, NUM_WARPS)
    end = gl.associative_scan(tiles, 1, _add)
    ends.store(end)
    return gl.max(gl.sum(tiles, 1), 0), distinct, (kept, end - tiles)


@gluon.jit
def columns_of_tile(table, ends, tile, cell, LAYOUT: gl.constexpr, C: gl.constexpr, EXPERTS: gl.constexpr, NUM_WARPS: gl.constexpr):
    """The columns of a tile's cells, -1 where there is none: what the list will have, for who cannot wait until it has been to memory and back.

    Behind the barrier that follows `choose_experts`, of the same table and ends. cell: 0..7, of LAYOUT. Of a tile that is not there, anything.
    """
    end = ends.load(row_lanes(EXPERTS, NUM_WARPS))
    expert = gl.minimum(gl.max(gl.sum((end <= tile).to(gl.int32), 1), 0), EXPERTS - 1)
    first = gl.max(gl.max(gl.where(end <= tile, end, 0), 1), 0)
    words = table._reinterpret(gl.int32, [C * EXPERTS // 4, 1], row_major(1))
    left = cell + ((tile - first) << _SHIFT)       # columns of the expert that come before the cell's
    column = cell * 0 - 1
    COLUMNS: gl.constexpr = C if C < _COLUMNS else _COLUMNS
    for c in range(0, C if C == COLUMNS else hidden(gl.to_tensor(C)), COLUMNS):
        for i in gl.static_range(COLUMNS):      # their words on their way together
            chose = (words.index((c + i) * (EXPERTS // 4) + (expert >> 2)).load(LAYOUT) >> ((expert & 3) * 8)) & 1
            column = gl.where((chose != 0) & (left == 0), c + i, column)
            left -= chose
    return column


@gluon.jit
def _write_columns(rows, first, COLUMNS: gl.constexpr, column, expert, chosen, rank, before, experts_ptr, pairs_ptr, num_experts_ptr, K: gl.constexpr,
                   EXPERTS: gl.constexpr, ALL: gl.constexpr, NUM_WARPS: gl.constexpr):
    """Pairs; returns the places of the cells in the list."""
    WORDS: gl.constexpr = gl.SliceLayout(2, cells(EXPERTS, NUM_WARPS))
    mine = first + gl.arange(0, COLUMNS, gl.SliceLayout(1, WORDS))
    words = gl.zeros((COLUMNS, EXPERTS // 4), gl.int32, WORDS)
    cta_barrier()   # here, so that the loop has none
    for c in range(first + COLUMNS):
        words += gl.where(c < mine[:, None], rows.index(c).load(gl.SliceLayout(0, WORDS))[None, :], 0)
    earlier = _bytes_of(words, row_lanes(EXPERTS, NUM_WARPS), EXPERTS, NUM_WARPS)      # columns before that chose the expert
    tile = before + (earlier >> _SHIFT)
    place = (before << _SHIFT) + earlier
    gl.store(pairs_ptr + place, column[:, None] * K + rank, mask=chosen != 0)
    if ALL:
        gl.store(experts_ptr + tile, expert + tile * 0, mask=(chosen != 0) & (earlier & (_COLUMNS - 1) == 0))
        gl.store(num_experts_ptr + column, gl.sum(chosen, 1))
    return place


@gluon.jit
def clear_list(pairs_ptr, weights_ptr, TILES: gl.constexpr, PADDED_TILES: gl.constexpr, ALL: gl.constexpr, NUM_WARPS: gl.constexpr):
    """Before a barrier of the CTA that is before `write_list`, which writes some of these cells by other threads. ALL: weights too, which nobody reads
    where there is no pair."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [NUM_WARPS], [0])
    cell = gl.arange(0, PADDED_TILES * _COLUMNS, LANES)
    gl.store(pairs_ptr + cell, cell * 0 - 1, mask=cell < TILES * _COLUMNS)
    if ALL:
        gl.store(weights_ptr + cell, gl.zeros((PADDED_TILES * _COLUMNS,), gl.float32, LANES), mask=cell < TILES * _COLUMNS)


@gluon.jit
def write_list(logits_ptr, slots_ptr, table, chosen_before, num_tiles, num_tiles_ptr, experts_ptr, pairs_ptr, weights_ptr, num_experts_ptr, C: gl.constexpr,
               E: gl.constexpr, K: gl.constexpr, EXPERTS: gl.constexpr, TILES: gl.constexpr, PADDED_TILES: gl.constexpr, NORMALIZE: gl.constexpr,
               ALL: gl.constexpr, NUM_WARPS: gl.constexpr,
               SPLITS: gl.constexpr = 1, CHANGE: gl.constexpr = False):
    """The second half, behind `clear_list` and a barrier: pairs, and with ALL the numbers and the experts, which a step has in shared memory. Returns what
    `write_weights` goes on with."""
    TABLE: gl.constexpr = row_lanes(EXPERTS, NUM_WARPS)
    COLUMNS: gl.constexpr = C if C < _COLUMNS else _COLUMNS
    kept, before = chosen_before
    rows = _table_of(table, C, EXPERTS)
    if ALL:
        LANES: gl.constexpr = gl.BlockedLayout([1], [32], [NUM_WARPS], [0])
        tile = gl.arange(0, PADDED_TILES, LANES)
        gl.store(num_tiles_ptr + tile, tile * 0 + num_tiles, mask=tile == 0)
        gl.store(experts_ptr + tile, tile * 0 - 1, mask=(tile < TILES) & (tile >= num_tiles))
    if C == COLUMNS:
        logits, chosen, rank = kept
        column = gl.arange(0, COLUMNS, gl.SliceLayout(1, TABLE))
        expert = gl.arange(0, EXPERTS, gl.SliceLayout(0, TABLE))[None, :]
        place = _write_columns(rows, 0, COLUMNS, column, expert, chosen, rank, before, experts_ptr, pairs_ptr, num_experts_ptr, K, EXPERTS, ALL, NUM_WARPS)
        return logits, chosen, place
    else:
        for turn in range(C // COLUMNS):
            column, expert, inside, logits = _load_logits(logits_ptr, slots_ptr, turn * COLUMNS, COLUMNS, C, E, EXPERTS, NUM_WARPS, SPLITS, CHANGE)
            own = table._reinterpret(gl.int32, [C // COLUMNS, COLUMNS, EXPERTS // 4], row_major(2)).index(turn).load(
                gl.SliceLayout(2, cells(EXPERTS, NUM_WARPS)))
            chosen = _bytes_of(own, TABLE, EXPERTS, NUM_WARPS)
            rank = gl.associative_scan(chosen, 1, _add) - chosen
            place = _write_columns(rows, turn * COLUMNS, COLUMNS, column, expert, chosen, rank, before, experts_ptr, pairs_ptr, num_experts_ptr, K, EXPERTS,
                                   ALL, NUM_WARPS)
            gl.store(weights_ptr + place, _weigh(logits, inside, chosen, NORMALIZE), mask=chosen != 0)
        return ()


@gluon.jit
def write_weights(written, weights_ptr, C: gl.constexpr, E: gl.constexpr, EXPERTS: gl.constexpr, NORMALIZE: gl.constexpr, NUM_WARPS: gl.constexpr):
    """The weights, which only the down product reads; of more than 8 columns `write_list` has written them."""
    if C <= _COLUMNS:
        logits, chosen, place = written
        expert = gl.arange(0, EXPERTS, gl.SliceLayout(0, row_lanes(EXPERTS, NUM_WARPS)))[None, :]
        weights = _weigh(logits, (chosen >= 0) & (expert < E), chosen, NORMALIZE)      # a dead column chose nothing
        gl.store(weights_ptr + place, weights, mask=chosen != 0)


@gluon.jit
def choose_and_route(logits_ptr, slots_ptr, table, ends, num_tiles_ptr, experts_ptr, pairs_ptr, weights_ptr, num_experts_ptr, C: gl.constexpr,
                     E: gl.constexpr, K: gl.constexpr, EXPERTS: gl.constexpr, TILES: gl.constexpr, PADDED_TILES: gl.constexpr, NORMALIZE: gl.constexpr,
                     NUM_WARPS: gl.constexpr):
    """The whole list by one program (or one partition of NUM_WARPS warps), into memory that no other program writes."""
    clear_list(pairs_ptr, weights_ptr, TILES, PADDED_TILES, True, NUM_WARPS)
    num_tiles, _, chosen = choose_experts(logits_ptr, slots_ptr, table, ends, C, E, K, EXPERTS, NUM_WARPS)
    cta_barrier()   # the cells above are written again, by other threads
    written = write_list(logits_ptr, slots_ptr, table, chosen, num_tiles, num_tiles_ptr, experts_ptr, pairs_ptr, weights_ptr, num_experts_ptr, C, E, K,
                         EXPERTS, TILES, PADDED_TILES, NORMALIZE, True, NUM_WARPS)
    write_weights(written, weights_ptr, C, E, EXPERTS, NORMALIZE, NUM_WARPS)


@gluon.jit
def make_tables(C: gl.constexpr, EXPERTS: gl.constexpr):
    """Shared memory of `choose_experts`."""
    return gl.allocate_shared_memory(gl.int32, [C * EXPERTS // 4], row_major(1)), gl.allocate_shared_memory(gl.int32, [1, EXPERTS], row_major(2))


@gluon.jit
def router_kernel(logits_ptr, slots_ptr, num_tiles_ptr, experts_ptr, pairs_ptr, weights_ptr, num_experts_ptr, C: gl.constexpr, E: gl.constexpr,
                  K: gl.constexpr, EXPERTS: gl.constexpr, TILES: gl.constexpr, PADDED_TILES: gl.constexpr, NORMALIZE: gl.constexpr,
                  NUM_WARPS: gl.constexpr):
    table, ends = make_tables(C, EXPERTS)
    choose_and_route(logits_ptr, slots_ptr, table, ends, num_tiles_ptr, experts_ptr, pairs_ptr, weights_ptr, num_experts_ptr, C, E, K, EXPERTS, TILES,
                     PADDED_TILES, NORMALIZE, NUM_WARPS)
