"""The dense phase: packing, the twin, the device code's indices on the CPU, what the compiler makes of it, and a GPU."""

import dataclasses
import re

import pytest
import torch
from dense_chain import build_chain, check_chain
from dense_checks import MOST_ROUNDED_APART, activations, check_dense, matrix_of
from dense_compile import SHAPES, Shape, build_dense
from tolerances import Bound, assert_equal, assert_within
from torch import Tensor

from kilotok.kernels.persistent import (
    Cut,
    Dense,
    DenseLayout,
    DenseWeight,
    choose_dense_layout,
    dense_ref,
    live_mask,
    normalize_ref,
    pack_dense,
    unpack_dense,
)
from kilotok.kernels.persistent.dense import constants_of
from kilotok.kernels.persistent.fragments import MAX_BLOCKS, NUM_WARPS, UNIT_BYTES

BF16 = torch.bfloat16
FP64 = Bound(maximum=1e-12, rms=1e-13, reason="float64 sums of a few thousand terms in another order")
FP32_SUMS = Bound(maximum=2e-6, rms=1e-6, reason="fp32 sums of exact bf16 products; rounding to bf16 before them is the same on both sides")
LAYOUTS = (
    DenseLayout(rows=16, depth=256, depth_warps=8, num_blocks=1),
    DenseLayout(rows=40, depth=576, depth_warps=2, num_blocks=9),
    DenseLayout(rows=49, depth=576, depth_warps=8, num_blocks=3),
    DenseLayout(rows=8, depth=576, depth_warps=8, num_blocks=1, pairs=2, splits=2),
    DenseLayout(rows=33, depth=96, depth_warps=4, num_blocks=1),
    DenseLayout(rows=130, depth=64, depth_warps=1, num_blocks=2),
    DenseLayout(rows=48, depth=2048, depth_warps=8, num_blocks=4, splits=2),
    DenseLayout(rows=48, depth=4096, depth_warps=8, num_blocks=8, pairs=2),
    DenseLayout(rows=70, depth=224, depth_warps=2, num_blocks=1, pairs=2, splits=2),
)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def name_of(layout: DenseLayout) -> str:
    return f"{layout.rows}x{layout.depth}-{layout.depth_warps}x{layout.num_blocks}-{layout.pairs}x{layout.splits}"


# --- packing ---


@pytest.mark.parametrize("layout", [*LAYOUTS, *(dataclasses.replace(s.layout, rows=min(s.rows, 200)) for s in SHAPES)], ids=name_of)
def test_packing_has_an_exact_inverse(layout: DenseLayout) -> None:
    """Every bit pattern, NaN and signed zero included; the pad is zeros and is counted."""
    bits = torch.randint(-2**15, 2**15, (2, layout.rows, layout.depth), dtype=torch.int16, generator=torch.Generator().manual_seed(1))
    packed = pack_dense(bits.view(BF16), layout=layout)
    assert_equal(unpack_dense(packed).view(torch.int16), bits)
    assert packed.words.shape == (2, layout.num_bytes // 4) and layout.num_bytes % UNIT_BYTES == 0
    ones = pack_dense(torch.ones(layout.rows, layout.depth, dtype=BF16), layout=layout)
    assert int((ones.words.view(torch.int16) == 0).sum()) * 2 == layout.pad_bytes


def test_a_lane_holds_the_a_fragment() -> None:
    """Element by element, against the table of fragments.py."""
    layout = DenseLayout(rows=64, depth=256, depth_warps=2, num_blocks=2, pairs=2)
    w = torch.arange(64 * 256, dtype=torch.int16).view(64, 256)
    words = pack_dense(w.view(BF16), layout=layout).words.view(torch.int16).view(1, 2, 2, 2, 4, 2, 8, 4, 4, 2)
    for pair in range(2):
        for block, q, row_warp, depth_warp in ((0, 0, 0, 0), (1, 0, 2, 1), (0, 1, 3, 0), (1, 1, 1, 1)):
            first = ((pair * 2 + depth_warp) * 2 + block) * 32
            for lane in (0, 5, 18, 31):
                g, t = lane // 4, lane % 4
                rows, k = (16 * row_warp + g, 16 * row_warp + g + 8), first + 8 * t + 4 * q
                expected = [[w[r, k + j], w[r, k + j + 1]] for j in (0, 2) for r in rows]
                assert words[0, pair, block, q, row_warp, depth_warp, g, t].tolist() == [[int(v) for v in e] for e in expected]


def test_wrong_layouts_and_weights_are_refused() -> None:
    good = dataclasses.asdict(LAYOUTS[0])
    for change, error, words in (({"depth": 100}, ValueError, "depth must be a multiple of 32"), ({"rows": 0}, ValueError, "rows positive"),
                                 ({"depth_warps": 3}, ValueError, "depth_warps must be"), ({"pairs": 3}, ValueError, "pairs must be 1 or 2"),
                                 ({"num_blocks": 13}, NotImplementedError, "1 to 12 blocks"), ({"depth": 512}, ValueError, "must cover depth")):
        with pytest.raises(error, match=words):
            DenseLayout(**(good | change))
    with pytest.raises(TypeError, match="weight must be bf16"):
        pack_dense(torch.zeros(16, 256), layout=LAYOUTS[0])
    with pytest.raises(ValueError, match=r"must be \[..., 16, 256\]"):
        pack_dense(torch.zeros(256, 16, dtype=BF16), layout=LAYOUTS[0])
    with pytest.raises(NotImplementedError, match="Allow more splits"):
        choose_dense_layout(16, 2 * NUM_WARPS * MAX_BLOCKS * 32 + 32)
    assert choose_dense_layout(16, 2 * NUM_WARPS * MAX_BLOCKS * 32 + 32, max_splits=2).splits == 2


def test_layouts_are_even_and_lean() -> None:
    """What each SM reads against an even share, and the pad, of the large matrices; the rest is a stage or two an SM."""
    for shape in SHAPES:
        layout = shape.layout
        assert layout.splits <= shape.max_splits
        if shape.rows * shape.depth > 2**20 * 8:
            assert layout.busiest_bytes(132)[0] * 132 <= 1.04 * 2 * shape.rows * shape.depth, shape.name
            assert layout.pad_bytes <= 0.01 * layout.num_bytes, shape.name
    # 128 row tiles of o_proj: one for each of 128 SMs, both consumers on it.
    assert (SHAPES[1].layout.num_items, SHAPES[1].layout.pairs) == (128, 2)
    # 320 row tiles of qkv would be 3 on the busiest SM and 2.4 on average.
    assert SHAPES[0].layout.splits == 2 and dataclasses.replace(SHAPES[0], max_splits=1).layout.busiest_bytes(132)[0] > 1.2 * 5120 * 2048 * 2 / 132


def test_stages_divide_the_items_and_fill_the_ring() -> None:
    for layout in (*LAYOUTS, *(shape.layout for shape in SHAPES)):
        cut = Cut.of(layout)
        cut.check(layout)
        assert 48 * 1024 <= 2 * cut.stages * cut.stage_blocks * 2 * UNIT_BYTES <= 105 * 1024 and cut.stage_blocks <= 3
    assert Cut.of(SHAPES[0].layout) == Cut(stage_blocks=2, stages=3)
    for wrong in (Cut(stage_blocks=3, stages=2), Cut(stage_blocks=0, stages=2), Cut(stage_blocks=4, stages=1)):
        with pytest.raises(ValueError, match="stage_blocks must divide the 8"):
            wrong.check(LAYOUTS[7])


# --- the twin ---


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_the_twin_equals_a_plain_product(layout: DenseLayout) -> None:
    w, x = matrix_of(layout, seed=1), activations(8, layout.depth, seed=2)
    weight = pack_dense(w, layout=layout)
    expected = x.double() @ w.double().mT
    got = dense_ref(x, weight)
    assert got.shape == (layout.splits, 8, layout.rows)
    assert_within(got.sum(0), expected, bound=FP64)
    assert_within(dense_ref(x, weight, dtype=torch.float32).sum(0), expected, bound=FP32_SUMS)


def test_the_twin_rounds_the_norm_once() -> None:
    layout = LAYOUTS[1]
    w, x, norm = matrix_of(layout, seed=1), torch.randn(8, layout.depth, generator=torch.Generator().manual_seed(2)), torch.rand(layout.depth) + 0.5
    normed = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.double()
    assert_equal(normalize_ref(x, norm, eps=1e-5), normed.to(BF16))
    residual = torch.randn(8, layout.rows)
    got = dense_ref(x, pack_dense(w, layout=layout), norm_D=norm, eps=1e-5, residual_CR=residual)
    assert_within(got, residual.double() + normed.to(BF16).double() @ w.double().mT, bound=FP64)


def test_the_twin_takes_one_of_several_matrices() -> None:
    layout = LAYOUTS[2]
    w = torch.stack([matrix_of(layout, seed=i) for i in range(3)])
    x = activations(8, layout.depth, seed=5)
    assert_within(dense_ref(x, pack_dense(w, layout=layout), matrix=2)[0], x.double() @ w[2].double().mT, bound=FP64)


def test_the_mask_has_a_bit_a_column() -> None:
    assert int(live_mask(torch.tensor([True, False, True, False, False, False, False, True]))) == 0b10000101
    assert int(live_mask(torch.ones(8, dtype=torch.bool))) == 255
    with pytest.raises(ValueError, match=r"columns must be bool \[8\]"):
        live_mask(torch.ones(4, dtype=torch.bool))


def test_what_would_write_outside_is_refused_before_a_launch() -> None:
    """Everything fits: the kernel refuses the CPU. One thing does not: a ValueError that names it."""
    split, whole = LAYOUTS[6], LAYOUTS[7]
    live = live_mask(torch.ones(8, dtype=torch.bool))

    def call(layout: DenseLayout = whole, norm: Tensor | None = None, x: Tensor | None = None, out: Tensor | None = None, residual: Tensor | None = None,
             mask: Tensor = live, matrix: int = 0) -> None:
        dense = Dense(DenseWeight(words=torch.zeros(layout.num_bytes // 4, dtype=torch.int32), layout=layout), norm=norm)
        dense(torch.zeros(8, layout.depth, dtype=BF16) if x is None else x, live=mask, residual_CR=residual, matrix=matrix,
              out=torch.zeros(layout.splits, 8, layout.rows) if out is None else out)

    rows, depth = whole.rows, whole.depth
    for good in (call, lambda: call(split, norm=torch.zeros(2048)), lambda: call(residual=torch.zeros(8, rows), out=torch.zeros(8, rows, dtype=BF16))):
        with pytest.raises(NotImplementedError, match=r"dense: the kernel is built for sm_90 .*; got cpu"):
            good()
    for bad, words in (
        (lambda: call(x=torch.zeros(7, depth, dtype=BF16)), "x must be"), (lambda: call(x=torch.zeros(8, depth)), "x must be contiguous torch.bfloat16"),
        (lambda: call(out=torch.zeros(8, rows)), "out must be"), (lambda: call(out=torch.zeros(1, 8, rows + 1)), "out must be"),
        (lambda: call(split, out=torch.zeros(2, 8, 48, dtype=BF16)), "out must be fp32, or bf16 where"),
        (lambda: call(split, residual=torch.zeros(8, 48)), "Choose the layout with max_splits=1"),
        (lambda: call(residual=torch.zeros(8, rows)), "out must be"),
        (lambda: call(residual=torch.zeros(4, rows), out=torch.zeros(8, rows)), "residual must be"),
        (lambda: call(residual=torch.zeros(8, rows).double(), out=torch.zeros(8, rows)), "residual must be fp32 or bf16"),
        (lambda: call(norm=torch.zeros(depth - 1)), "norm must be"), (lambda: call(norm=torch.zeros(depth).half()), "norm's weight must be"),
        (lambda: call(norm=torch.zeros(depth), x=torch.zeros(8, depth).double()), "the residual must be fp32 or bf16"),
        (lambda: call(mask=live.long()), "live must be"), (lambda: call(matrix=1), "matrix must be 0 to 0"),
    ):
        with pytest.raises(ValueError, match=words):
            bad()


# --- the device code's indices, followed on the CPU ---


def shared_activations(a_CD: Tensor, layout: DenseLayout) -> Tensor:
    """What `normalize` leaves in shared memory of activations a: [positions, column, t, 8], float64."""
    place = torch.arange((layout.padded_depth // 32 + 7) // 8 * 8)
    unit = place // layout.depth_warps
    block = ((unit // layout.num_blocks) * layout.depth_warps + place % layout.depth_warps) * layout.num_blocks + unit % layout.num_blocks
    inside = block < layout.depth // 32
    blocks = a_CD.double().view(8, -1, 32)[:, torch.where(inside, block, 0)].transpose(0, 1)
    return torch.where(inside[:, None, None], blocks, 0.0).view(-1, 8, 4, 8)


def run_indices(a_CD: Tensor, weight: DenseWeight, *, programs: int, residual_CR: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Producers and consumers of a launch by their own indexing: the output [S, C, R], and how often each unit was read."""
    layout, cut = weight.layout, Cut.of(weight.layout)
    c = constants_of(layout, cut)
    dw, nb, pairs, splits, groups = layout.depth_warps, layout.num_blocks, layout.pairs, layout.splits, layout.num_groups
    units = weight.words.view(BF16).view(-1, 8, 8, 4, 4, 2).double()               # [unit, warp, g, t, register, half]
    area = shared_activations(a_CD, layout)
    area = area[: area.shape[0] // dw * dw].view(-1, dw, 8, 4, 8)
    out = torch.full((splits, 8, layout.rows), float("nan"), dtype=torch.float64)
    reads = torch.zeros(len(units), dtype=torch.int64)
    warp, item_stages, items = torch.arange(8), nb // c["STAGE_BLOCKS"], splits * groups
    for program in range(programs):
        stored: list[list[tuple[int, Tensor]]] = [[], []]
        for part in range(2):
            owners, number = (programs * 2, program * 2 + part) if pairs == 1 else (programs, program)
            first, last = items * number // owners, items * (number + 1) // owners
            half = part if pairs == 2 else 0
            stream = []
            for stage in range(first * item_stages, last * item_stages):           # the producer
                at = (((stage // item_stages) * pairs + half) * item_stages + stage % item_stages) * 2 * c["STAGE_BLOCKS"]
                stream += range(at, at + 2 * c["STAGE_BLOCKS"])
            reads[stream] += 1
            position = 0
            for split in range(first // groups, (last + groups - 1) // groups):
                x = [area[(split * pairs + half) * nb + i][warp % dw] for i in range(nb)]           # [warp, column, t, 8]
                for item in range(max(first, split * groups), min(last, (split + 1) * groups)):
                    sums = torch.zeros(8, 8, 4, 2, 2, dtype=torch.float64)         # [warp, g, t, row half, column of pair]
                    for i in range(nb):
                        for q in range(2):
                            a = units[stream[position]].view(8, 8, 4, 2, 2, 2)     # [warp, g, t, pair of columns, row half, half]
                            position += 1
                            b = x[i].view(8, 8, 4, 2, 2, 2)[:, :, :, q]            # [warp, column, t, pair, half]
                            sums += torch.einsum("wgtprh,wctph->wgcr", a, b).view(8, 8, 4, 2, 2).transpose(-1, -2)
                    tiles = sums.permute(0, 2, 4, 3, 1).reshape(8 // dw, dw, 128).sum(1)
                    stored[part].append((item, tiles))
        for i, (item, tiles) in enumerate(stored[0] + (stored[1] if pairs == 1 else [])):
            values = tiles + stored[1][i][1] if pairs == 2 else tiles
            split, group = item // groups, item % groups
            element = torch.arange(128)
            row = (group * layout.row_warps + torch.arange(layout.row_warps)[:, None]) * 16 + (element & 15)
            column = (element >> 4).expand_as(row)
            keep = row < layout.rows
            assert bool(out[split, column[keep], row[keep]].isnan().all()), "stored twice"
            before = 0.0 if residual_CR is None else residual_CR.double()[column[keep], row[keep]]
            out[split, column[keep], row[keep]] = before + values[keep]
    return out, reads


@pytest.mark.parametrize("programs", [1, 3, 132])
@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_the_device_indices_give_the_product(layout: DenseLayout, programs: int) -> None:
    """Every unit read once, every row stored once, and the sums those of the twin."""
    weight = pack_dense(matrix_of(layout, seed=1), layout=layout)
    x = activations(8, layout.depth, seed=2)
    residual = torch.randn(8, layout.rows) if layout.splits == 1 else None
    got, reads = run_indices(x, weight, programs=programs, residual_CR=residual)
    expected = dense_ref(x, weight, residual_CR=residual)
    assert_within(got, expected if residual is None else expected[None], bound=FP64)
    assert_equal(reads, torch.ones_like(reads))


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_both_ways_to_the_activations_agree(layout: DenseLayout) -> None:
    """Through shared memory, with a norm, and straight from memory, without: `load_fragments` against `read_fragments`."""
    x = activations(8, layout.depth, seed=3)
    area = shared_activations(x, layout)
    area = area[: area.shape[0] // layout.depth_warps * layout.depth_warps].view(-1, layout.depth_warps, 8, 4, 8)
    blocks = torch.zeros(8, layout.padded_depth, dtype=torch.float64)
    blocks[:, : layout.depth] = x.double()
    for number in range(layout.pairs * layout.splits):
        for i in range(layout.num_blocks):
            for d in range(layout.depth_warps):
                block = (number * layout.depth_warps + d) * layout.num_blocks + i
                assert_equal(area[number * layout.num_blocks + i, d].reshape(8, 32), blocks[:, block * 32:block * 32 + 32])


# --- compiled ---

# 512 bytes of weights an MMA against 136 in an expert, where 17.5 instructions keep 97 % of an H200's stream: 17.5 * 512 / 136, waits, sums and stores
# counted. The kernels are far below; the lower limits say that nothing is shuffled or loaded narrowly. Items of one or two blocks share a sum by 2 MMAs.
KEEPS_THE_STREAM = 65
MOST_PER_MMA = {1: 38.0, 2: 20.0, 3: 15.0, 4: 13.0, 8: 10.0, 9: 9.0}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_compiled_for_sm_90(shape: Shape) -> None:
    layout, cut = shape.layout, Cut.of(shape.layout)
    built = build_dense(shape)
    assert built.local_bytes == 0 and built.stack_bytes == 0 and not any(loop.local_accesses for loop in built.loops), f"spills: {built}"
    assert built.shared_bytes <= 227 * 1024, str(built)
    assert [loop.num_mma for loop in built.loops] == [2 * layout.num_blocks] * 2, str(built)     # a loop a consumer, over items
    for loop in built.loops:
        assert loop.per_mma <= MOST_PER_MMA[layout.num_blocks] < KEEPS_THE_STREAM, str(built)
    # Every slot is given back behind a fence: without one its last reads may be under way when TMA writes it again.
    assert built.ptx.count("fence.proxy.async.shared::cta") == 2 * layout.num_blocks // cut.stage_blocks
    assert len(re.findall(r"ld\.shared\.v4\.b32", built.ptx)) >= 2 * 2 * layout.num_blocks, "A fragments are not read 16 bytes at a time"
    assert not re.search(r"(red|atom)\.global", built.ptx)


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[1]], ids=str)
def test_consumers_meet_behind_their_writes(shape: Shape) -> None:
    """Between what a warp does to shared memory and the arrival that announces it lies a barrier over the consumer's warps."""
    quiet = True
    arrivals = 0
    for line in build_dense(shape).ptx.splitlines():
        if re.search(r"\b(ld|st)\.shared|[ls][td]matrix", line):
            quiet = False
        elif re.search(r"\b(bar|barrier)\.(sync|warp\.sync)", line):
            quiet = True
        elif "mbarrier.arrive.shared" in line:
            arrivals += 1
            assert quiet, line
    assert arrivals >= 4


def test_the_other_variants_compile() -> None:
    """A bf16 residual, bf16 outputs, a residual beside a norm, and an input too long to be kept in registers between its two readings."""
    head, o_proj = SHAPES[3], SHAPES[1]
    for shape in (dataclasses.replace(head, residual="bf16", out="bf16"), dataclasses.replace(o_proj, residual="bf16", out="bf16"),
                  Shape(name="all at once", rows=2048, depth=2048, norm=True, add=True), Shape(name="MiMo-V2.5-Pro qkv", rows=27136, depth=6144, norm=True)):
        built = build_dense(shape)
        # Of the long input up to eight words wait on the stack during the prologue, once a phase.
        assert built.local_bytes == 0 and built.stack_bytes <= (32 if shape.depth == 6144 else 0), f"spills: {shape} {built}"
        assert not any(loop.local_accesses for loop in built.loops), f"spills: {shape} {built}"
        assert built.shared_bytes <= 227 * 1024, f"{shape} {built}"


def test_two_phases_of_a_resident_kernel_share_a_ring() -> None:
    """o_proj and qkv with barriers over the grid between them, in one kernel: nothing spills, and there is room for what else a step needs."""
    built = build_chain()
    assert built.local_bytes == 0 and built.stack_bytes == 0 and not any(loop.local_accesses for loop in built.loops), f"spills: {built}"
    assert built.shared_bytes <= 140 * 1024, str(built)
    assert [loop.num_mma for loop in built.loops] == [16, 8] * 2 and max(loop.per_mma for loop in built.loops) <= 14, str(built)
    assert built.ptx.count("fence.proxy.async.shared::cta") == 2 * (4 + 2)


# --- on a GPU ---


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("shape", [*SHAPES, *(dataclasses.replace(s, residual="bf16", name=f"{s.name}, bf16 residual") for s in SHAPES[:2])], ids=str)
def test_gpu_against_float64(shape: Shape) -> None:
    """Fresh inputs each run, poisoned outputs, 40 runs bitwise, a column alone against among others."""
    errors = check_dense(shape, seed=torch.seed() % 2**31)
    assert errors["sums"] <= 1e-6 and errors.get("norm", 0.0) <= MOST_ROUNDED_APART, errors


@pytest.mark.gpu
@needs_gpu
def test_gpu_a_resident_kernel_equals_its_launches() -> None:
    """Bitwise, 40 runs of six layers, for all columns, one and some."""
    check_chain(seed=torch.seed() % 2**31, programs=torch.cuda.get_device_properties(0).multi_processor_count)
