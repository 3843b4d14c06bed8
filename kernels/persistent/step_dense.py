# Device code has no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment"
"""The dense products of a step as a consumer runs them, in two forms: each matrix in code of its own (dense_device.py), the two consumers of an SM together,
or all in one piece of code (rolled_dense.py), each consumer for itself.

m: as step_phases.py. Columns beyond eight are taken a tile at a time, each with the weights streamed again: a column's operations stay what they are in a
step of eight.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..moe.stream import row_major
from .dense_device import consume_dense, meet
from .fragments import NUM_WARPS
from .plan import words_cache
from .rolled_dense import consume_rolled, load_weights, share_of

_WARPS = gl.constexpr(NUM_WARPS)
QKV, OUT, ROUTER, HEAD = (gl.constexpr(i) for i in range(4))    # matrices, in the order of a layer
_QKV, _OUT, _ROUTER = QKV, OUT, ROUTER


@gluon.jit
def live_of(words_ptr, tile, S: gl.constexpr):
    """A bit for every column of a tile that lives."""
    c = gl.arange(0, 8, gl.BlockedLayout([1], [32], [_WARPS], [0]))
    return gl.sum((gl.load(words_ptr + S.C + tile * 8 + c, cache_modifier=words_cache(S.WORDS_CHANGE)) >= 0).to(gl.int32) << c, 0)


@gluon.jit
def exchange_of(m, S: gl.constexpr, PART: gl.constexpr):
    # of rolled products each consumer has an area of its own
    return m[3].index(S.EXCHANGE_UNIT + (0 if S.ROLLED_DENSE else PART * S.EXCHANGE_UNITS))._reinterpret(gl.float32, [S.EXCHANGE], row_major(1))


@gluon.jit
def _activations(m, S: gl.constexpr):
    return m[3].index(0)._reinterpret(gl.int32, [S.POSITIONS * 128], row_major(1))


# --- each in code of its own ---


@gluon.jit
def _dense_tile(m, slot, phase, turn, x_ptr, norm, out_ptr, live, W: gl.constexpr, NORM: gl.constexpr, ADD: gl.constexpr, S: gl.constexpr,
                PART: gl.constexpr, copy_ptr):
    return consume_dense(m[0], m[1], m[2], slot, phase, exchange_of(m, S, PART), m[4], m[5], turn, _activations(m, S), m[6], x_ptr, norm, out_ptr, out_ptr,
                         live, NORM, S.EPS, ADD, W.ROWS, W.DEPTH, W.DEPTH_WARPS, W.NUM_BLOCKS, W.PAIRS, W.SPLITS, W.STAGE_BLOCKS, S.SLOT_UNITS, S.STAGES,
                         PART, S.PARTITIONS, S.PROGRAMS, _WARPS, copy_ptr, S.C)


@gluon.jit
def _dense(m, p, slot, phase, turn, x_ptr, norm, out_ptr, live, W: gl.constexpr, NORM: gl.constexpr, ADD: gl.constexpr, S: gl.constexpr,
           PART: gl.constexpr, copy_ptr=None):
    """x_ptr: a row of W.DEPTH numbers a column; with NORM fp32, else pairs of bf16."""
    ROW: gl.constexpr = W.DEPTH if NORM else W.DEPTH // 2
    if S.COLUMN_TILES == 1:
        slot, phase, turn = _dense_tile(m, slot, phase, turn, x_ptr, norm, out_ptr, live, W, NORM, ADD, S, PART, copy_ptr)
    else:
        for tile in range(S.COLUMN_TILES):
            if not NORM:
                turn = meet(m[5], turn)     # a norm begins with one; nobody still reads what the tile before shared
            its_copy = copy_ptr
            if copy_ptr is not None:
                its_copy = copy_ptr + tile * (8 * W.DEPTH)
            slot, phase, turn = _dense_tile(m, slot, phase, turn, x_ptr + tile * (8 * ROW), norm, out_ptr + tile * (8 * W.ROWS),
                                            live_of(p.words, tile, S), W, NORM, ADD, S, PART, its_copy)
    return slot, phase, turn


@gluon.jit
def qkv_phase(m, p, slot, phase, turn, live, norm, S: gl.constexpr, PART: gl.constexpr):
    W: gl.constexpr = S.qkv
    return _dense(m, p, slot, phase, turn, p.residual, norm, p.qkv, live, W, True, False, S, PART)


@gluon.jit
def out_phase(m, p, slot, phase, turn, live, S: gl.constexpr, PART: gl.constexpr):
    W: gl.constexpr = S.out
    return _dense(m, p, slot, phase, turn, p.mixed_pairs, (), p.residual, live, W, False, True, S, PART)


@gluon.jit
def router_phase(m, p, slot, phase, turn, live, norm, S: gl.constexpr, PART: gl.constexpr):
    W: gl.constexpr = S.router
    return _dense(m, p, slot, phase, turn, p.residual, norm, p.router_logits, live, W, True, False, S, PART, p.normed)


@gluon.jit
def head_phase(m, p, slot, phase, turn, live, norm, S: gl.constexpr, PART: gl.constexpr):
    W: gl.constexpr = S.head
    return _dense(m, p, slot, phase, turn, p.residual, norm, p.logits, live, W, True, False, S, PART)


# --- in one piece of code ---


@gluon.jit
def matrix_of(p, kind, layer, S: gl.constexpr):
    """Of a matrix of QKV, OUT, ROUTER or HEAD: norm, result, rows, row tiles, splits, blocks of a warp, parts of the squares that it reads."""
    norm = p.norm
    out = p.logits
    rows = gl.to_tensor(S.head.ROWS)
    splits = gl.to_tensor(S.head.SPLITS)
    num_blocks = gl.to_tensor(S.head.NUM_BLOCKS)
    num_squares = gl.to_tensor((S.D + 255) // 256)
    if kind == _QKV:
        norm = p.attention_norm + layer * S.D
        out = p.qkv
        rows = gl.to_tensor(S.qkv.ROWS)
        splits = gl.to_tensor(S.qkv.SPLITS)
        num_blocks = gl.to_tensor(S.qkv.NUM_BLOCKS)
    elif kind == _OUT:
        out = p.residual
        rows = gl.to_tensor(S.out.ROWS)
        splits = gl.to_tensor(S.out.SPLITS)
        num_blocks = gl.to_tensor(S.out.NUM_BLOCKS)
    elif kind == _ROUTER:
        norm = p.experts_norm + layer * S.D
        out = p.router_logits
        rows = gl.to_tensor(S.router.ROWS)
        splits = gl.to_tensor(S.router.SPLITS)
        num_blocks = gl.to_tensor(S.router.NUM_BLOCKS)
        num_squares = gl.to_tensor((S.D + 15) // 16)
    return norm, out, rows, (rows + 15) // 16, splits, num_blocks, num_squares


@gluon.jit
def begin_matrix(matrix, S: gl.constexpr, PART: gl.constexpr):
    """A consumer's share, and the norm's weights that it begins with: before the wait for the residual."""
    norm, _, _, groups, splits, num_blocks, _ = matrix
    share = share_of(groups, splits, _WARPS, PART, S.PARTITIONS, S.PROGRAMS)
    return share, load_weights(norm, share[2], num_blocks, 0, S.D, _WARPS)


@gluon.jit
def rolled_phase(m, p, slot, phase, live, kind, matrix, begun, S: gl.constexpr, PART: gl.constexpr):
    """A dense product of all columns. begun: of `begin_matrix`."""
    norm, out, rows, groups, _, num_blocks, num_squares = matrix
    share, weights = begun
    x_area = m[3].index(0)._reinterpret(gl.int32, [S.X_STAGES * S.STAGE_BLOCKS * 1024], row_major(1))
    exchange = m[3].index(S.DENSE_EXCHANGE_UNIT)._reinterpret(gl.float32, [_WARPS * 128], row_major(1))
    is_out = (kind == _OUT) + rows * 0
    copies = (kind == _ROUTER) + rows * 0
    for tile in range(S.COLUMN_TILES):
        its = live
        if S.COLUMN_TILES > 1:
            its = live_of(p.words, tile, S)
        slot, phase = consume_rolled(m[0], m[1], m[2], slot, phase, exchange, x_area, is_out, is_out, 0, p.residual + tile * (8 * S.D),
                                     p.mixed + tile * (8 * S.out.DEPTH), weights, norm, p.normed + tile * (8 * S.D), copies, out + tile * 8 * rows, p.normed,
                                     p.squares + tile * (8 * S.SQUARES), num_squares, its, rows, groups, share, num_blocks, S.out.DEPTH, S.EPS, S.C, S.D,
                                     S.STAGE_BLOCKS, S.X_STAGES, S.SQUARES, S.SLOT_UNITS, S.STAGES, False, _WARPS)
    return slot, phase
