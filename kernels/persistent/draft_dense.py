# Device code has no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment"
"""The dense products of a round, target's and draft's, in the piece of code that rolled_dense.py is.

m, p, S: as step_phases.py; q, T: as draft_phases.py. Which matrix it is, and of which layer, is a number; `next_matrix` is the order of a round.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..moe.stream import row_major
from .draft_phases import context_words, draft_words
from .fragments import NUM_WARPS
from .rolled_dense import consume_rolled
from .step_dense import HEAD, OUT, QKV, ROUTER, live_of, matrix_of

_WARPS = gl.constexpr(NUM_WARPS)
# beside the target's of a step
DRAFT_QKV, DRAFT_OUT, GATE_UP, DOWN, DRAFT_HEAD, FC, KEYS, END = (gl.constexpr(i) for i in range(4, 12))
_QKV, _OUT, _ROUTER, _HEAD = QKV, OUT, ROUTER, HEAD
_DRAFT_QKV, _DRAFT_OUT, _GATE_UP, _DOWN, _DRAFT_HEAD, _FC, _KEYS, _END = DRAFT_QKV, DRAFT_OUT, GATE_UP, DOWN, DRAFT_HEAD, FC, KEYS, END


@gluon.jit
def next_matrix(kind, layer, num_layers, draft_layers):
    """The matrix behind one, and its layer: the draft's layers and its head, the target's and its head, the context's two, END."""
    following = kind + 1
    if kind == _ROUTER:
        layer += 1
        following = gl.to_tensor(_QKV)
        if layer == num_layers:
            following = gl.to_tensor(_HEAD)
    elif kind == _HEAD:
        following = gl.to_tensor(_FC)
    elif kind == _DOWN:
        layer += 1
        following = gl.to_tensor(_DRAFT_QKV)
        if layer == draft_layers:
            following = gl.to_tensor(_DRAFT_HEAD)
    elif kind == _DRAFT_HEAD:
        layer = gl.to_tensor(0)
        following = gl.to_tensor(_QKV)
    return following, layer


@gluon.jit
def words_of(p, kind, S: gl.constexpr):
    """The columns that a matrix's product is for."""
    words = p.words
    if (kind == _FC) | (kind == _KEYS):
        words = context_words(p, S)
    elif kind >= _DRAFT_QKV:
        words = draft_words(p, S)
    return words


@gluon.jit
def _sizes(W: gl.constexpr):
    """Rows, splits, blocks of a warp."""
    return gl.to_tensor(W.ROWS), gl.to_tensor(W.SPLITS), gl.to_tensor(W.NUM_BLOCKS)


@gluon.jit
def round_matrix_of(p, q, kind, layer, S: gl.constexpr, T: gl.constexpr):
    """What `begin_matrix` takes (`matrix_of`), and beside it: the residual that is read or added to, what is copied, its depth in blocks of 32, the norm's eps,
    and whether the input is copied, the product is added, channels are activated, and what was normed goes to the experts."""
    QKV_CODE: gl.constexpr = T.qkv      # an attribute that is no number is no argument in Triton 3.6
    OUT_CODE: gl.constexpr = T.out
    GATE_UP_CODE: gl.constexpr = T.gate_up
    DOWN_CODE: gl.constexpr = T.down
    FC_CODE: gl.constexpr = T.fc
    KEYS_CODE: gl.constexpr = T.keys
    norm, out, rows, _, splits, num_blocks, num_squares = matrix_of(p, kind, layer, S)
    residual = p.residual
    copy = p.mixed
    copy_blocks = gl.to_tensor(S.out.DEPTH // 32)
    eps = gl.to_tensor(S.EPS)
    copied = (kind == _OUT) + rows * 0
    adds = copied
    if kind >= _DRAFT_QKV:
        eps = gl.to_tensor(T.EPS)
        residual = q.residual
        num_squares = gl.to_tensor((S.D + 15) // 16)
        if kind == _DRAFT_QKV:
            norm = q.attention_norm + layer * S.D
            out = q.qkv
            rows, splits, num_blocks = _sizes(QKV_CODE)
            if layer == 0:
                num_squares = gl.to_tensor((S.D + 255) // 256)
        elif kind == _DRAFT_OUT:
            out = q.residual
            rows, splits, num_blocks = _sizes(OUT_CODE)
            copy = q.mixed
            copy_blocks = gl.to_tensor(T.out.DEPTH // 32)
            copied += 1
            adds += 1
        elif kind == _GATE_UP:
            norm = q.mlp_norm + layer * S.D
            rows, splits, num_blocks = _sizes(GATE_UP_CODE)
        elif kind == _DOWN:
            out = q.residual
            rows, splits, num_blocks = _sizes(DOWN_CODE)
            copy = q.inter
            copy_blocks = gl.to_tensor(T.down.DEPTH // 32)
            copied += 1
            adds += 1
        elif kind == _DRAFT_HEAD:
            norm = q.norm
        elif kind == _FC:
            out = q.context
            rows, splits, num_blocks = _sizes(FC_CODE)
            copy = p.features
            copy_blocks = gl.to_tensor(T.fc.DEPTH // 32)
            copied += 1
        else:
            norm = q.hidden_norm
            out = q.keys
            rows, splits, num_blocks = _sizes(KEYS_CODE)
            residual = q.context
    matrix = (norm, out, rows, (rows + 15) // 16, splits, num_blocks, num_squares)
    return matrix, (residual, copy, copy_blocks, eps, copied, adds, (kind == _GATE_UP) + rows * 0, (kind == _ROUTER) + rows * 0)


@gluon.jit
def round_product(m, p, q, slot, phase, live, kind, matrix, more, begun, S: gl.constexpr, PART: gl.constexpr):
    """A dense product of all columns, behind the barrier. begun: of `begin_matrix`. live: of the columns, where there is one tile."""
    norm, out, rows, groups, _, num_blocks, num_squares = matrix
    residual, copy, copy_blocks, eps, copied, adds, activates, copies = more
    share, weights = begun
    x_area = m[3].index(0)._reinterpret(gl.int32, [S.X_STAGES * S.STAGE_BLOCKS * 1024], row_major(1))
    exchange = m[3].index(S.DENSE_EXCHANGE_UNIT)._reinterpret(gl.float32, [_WARPS * 128], row_major(1))
    depth = copy_blocks * 32        # so the compiler knows that rows begin at 16 bytes
    for tile in range(S.COLUMN_TILES):
        its = live
        if S.COLUMN_TILES > 1:
            its = live_of(words_of(p, kind, S), tile, S)
        slot, phase = consume_rolled(m[0], m[1], m[2], slot, phase, exchange, x_area, copied, adds, activates, residual + tile * (8 * S.D),
                                     copy + tile * 8 * depth, weights, norm, p.normed + tile * (8 * S.D), copies, out + tile * 8 * rows,
                                     q.inter + tile * 4 * rows, p.squares + tile * (8 * S.SQUARES), num_squares, its, rows, groups, share, num_blocks, depth,
                                     eps, S.C, S.D, S.STAGE_BLOCKS, S.X_STAGES, S.SQUARES, S.SLOT_UNITS, S.STAGES, True, _WARPS)
    return slot, phase
