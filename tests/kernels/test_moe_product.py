"""The expert products: twins against dequantized weights, the device code's indices on the CPU, what the compiler makes of it, and a GPU."""

import dataclasses

import pytest
import torch
from moe_checks import BF16, activations, beyond_neighbours, check_products, checkpoint_of, dense_reference, routed
from moe_compile import SHAPES, Built, Shape, build_down, build_gate_up, build_layer
from tolerances import Bound, assert_equal, assert_within
from torch import Tensor

from kilotok.kernels.moe.layer import Experts, Workspace, experts_ref
from kilotok.kernels.moe.product import Stages, down, down_ref, gate_up, gate_up_ref, gate_up_sums_ref, scale_box, weights_of
from kilotok.kernels.moe.routing import Routing, route_ref
from kilotok.kernels.moe.weights import channels_of_rank
from kilotok.kernels.mx.layouts import FragmentWeight, choose_layout

FP64 = Bound(maximum=1e-12, rms=1e-13, reason="float64 sums of a few thousand terms in another order")
SMALL = (
    Shape(name="silu", hidden=96, channels=64, experts=6, per_token=2),
    Shape(name="gpt-oss family", hidden=128, channels=96, experts=4, per_token=3, activation="clamped_swiglu", bias=True),
    Shape(name="one expert", hidden=64, channels=32, experts=1, per_token=1),
)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


# --- twins ---


@pytest.mark.parametrize("num_tokens", [1, 8, 19])
@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_the_twin_equals_dequantized_experts(shape: Shape, num_tokens: int) -> None:
    checkpoint = checkpoint_of(shape, seed=num_tokens)
    x = activations(num_tokens, shape.hidden, seed=1)
    ids, weights = routed(num_tokens, shape, seed=2)
    if num_tokens > 1:
        ids[1] = -1
    got = experts_ref(x, checkpoint.pack(), route_ref(ids, weights, num_experts=shape.experts))
    assert_within(got, dense_reference(x, checkpoint, ids, weights, round_channels=True), bound=FP64)


def test_split_and_interleaved_rows_give_the_same() -> None:
    shape = SMALL[1]
    split = checkpoint_of(shape, seed=3, order="split")
    assert split.gate_up_bias_EG is not None

    def in_turn(t: Tensor) -> Tensor:
        return torch.stack(t.chunk(2, dim=1), dim=2).flatten(1, 2)

    interleaved = dataclasses.replace(split, order="interleaved", gate_up_blocks=in_turn(split.gate_up_blocks), gate_up_scales=in_turn(split.gate_up_scales),
                                      gate_up_bias_EG=in_turn(split.gate_up_bias_EG))
    a, b = split.pack(), interleaved.pack()
    assert_equal(a.gate_up.codes, b.gate_up.codes)
    assert_equal(a.gate_up.scales, b.gate_up.scales)
    assert a.gate_up_bias_E2F is not None and b.gate_up_bias_E2F is not None
    assert_equal(a.gate_up_bias_E2F, b.gate_up_bias_E2F)


@pytest.mark.parametrize("shape", SMALL[:2], ids=str)
def test_ranks_add_up_to_the_whole(shape: Shape) -> None:
    """Also where MX blocks do not divide evenly: 3 blocks on 2 ranks."""
    checkpoint = checkpoint_of(shape, seed=4)
    x = activations(4, shape.hidden, seed=5)
    ids, weights = routed(4, shape, seed=6)
    routing = route_ref(ids, weights, num_experts=shape.experts)
    ranks = [checkpoint.pack(rank=r, world_size=2) for r in range(2)]
    assert sum(r.channels for r in ranks) == shape.channels
    assert_within(sum(experts_ref(x, r, routing) for r in ranks), experts_ref(x, checkpoint.pack(), routing), bound=FP64)


def test_slices_are_whole_mx_blocks() -> None:
    assert [channels_of_rank(2048, rank=r, world_size=8) for r in (0, 7)] == [slice(0, 256), slice(1792, 2048)]
    widths = [channels_of_rank(2880, rank=r, world_size=8) for r in range(8)]
    assert [w.stop - w.start for w in widths] == [384, 384] + [352] * 6 and widths[-1].stop == 2880
    for channels, rank, world_size, words in ((2880, 8, 8, "rank 8 of 8"), (64, 0, 3, "at most the 2 MX blocks"), (48, 0, 1, "multiple of 32")):
        with pytest.raises(ValueError, match=words):
            channels_of_rank(channels, rank=rank, world_size=world_size)


def test_no_live_token_gives_zeros() -> None:
    shape = SMALL[0]
    routing = route_ref(torch.full((3, 2), -1), torch.ones(3, 2), num_experts=shape.experts)
    y = experts_ref(activations(3, shape.hidden, seed=1), checkpoint_of(shape, seed=1).pack(), routing)
    assert_equal(y, torch.zeros(3, shape.hidden, dtype=torch.float64))


def test_the_kernel_refuses_a_cpu() -> None:
    shape = SMALL[0]
    weights = checkpoint_of(shape, seed=1).pack()
    routing = route_ref(*routed(2, shape, seed=1), num_experts=shape.experts)
    with pytest.raises(NotImplementedError, match=r"gate_up: the kernel is built for sm_90 .*; got cpu"):
        gate_up(activations(2, shape.hidden, seed=1), weights, routing, inter_MCF=torch.empty(4, 8, shape.channels, dtype=BF16))


def test_what_would_write_outside_is_refused_before_a_launch() -> None:
    """Everything fits: the kernel refuses the CPU. One thing does not: a ValueError that names it."""
    shape = SMALL[0]
    weights = checkpoint_of(shape, seed=1).pack()
    x, routing = activations(3, shape.hidden, seed=1), route_ref(*routed(3, shape, seed=1), num_experts=shape.experts)
    more = route_ref(*routed(9, shape, seed=1), num_experts=shape.experts)
    space = Workspace.of(weights, num_tokens=3, num_experts_per_token=shape.per_token, device=x.device)
    y = torch.empty(3, shape.hidden)

    def layer(x_TD: Tensor = x, r: Routing = routing, y_TD: Tensor = y, workspace: Workspace = space, num_layers: int = 1) -> None:
        Experts(weights, workspace=workspace, num_layers=num_layers)(x_TD, r, y_TD=y_TD)

    with pytest.raises(NotImplementedError, match="experts: the kernel is built for sm_90"):
        layer()
    wrong = dataclasses.replace(routing, num_experts=shape.experts + 1)
    tight = dataclasses.replace(space, inter_MCF=space.inter_MCF[:1])
    for call, words in (
        (lambda: layer(r=more), r"routing.num_experts_T must be .* \[3\]"), (lambda: layer(r=wrong), "the routing is of"),
        (lambda: layer(y_TD=y.bfloat16()), "y must be contiguous torch.float32"), (lambda: layer(y_TD=y[:1].expand(3, -1)), "y must be contiguous"),
        (lambda: layer(x_TD=x[:, :32].contiguous()), "x must be"), (lambda: layer(workspace=tight), "the workspace's inter_MCF must be .* or more rows"),
        (lambda: layer(workspace=dataclasses.replace(space, partials_RD=space.partials_RD[:2])), "the workspace's partials_RD must be"),
        (lambda: layer(num_layers=2), "x must be contiguous"),
        (lambda: gate_up(x, weights, routing, inter_MCF=space.inter_MCF.float()), "gate_up: inter_MCF must be"),
        (lambda: gate_up(x, weights, routing, inter_MCF=space.inter_MCF, sums=torch.zeros(1)), "gate_up: sums must be"),
        (lambda: down(space.inter_MCF, weights, routing, partials_RD=torch.zeros(1), y_TD=y), "down: partials_RD must be"),
        (lambda: down(space.inter_MCF, weights, routing, partials_RD=space.partials_RD, y_TD=y[:2]), "down: y must be"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def test_the_twin_refuses_a_routing_of_something_else() -> None:
    shape = SMALL[0]
    weights, x = checkpoint_of(shape, seed=1).pack(), activations(3, shape.hidden, seed=1)
    routing = route_ref(*routed(3, shape, seed=1), num_experts=shape.experts)
    wrong = dataclasses.replace(routing, num_experts=shape.experts + 1)
    with pytest.raises(ValueError, match=r"gate_up_ref: the routing is of .* Route with"):
        experts_ref(x, weights, wrong)
    with pytest.raises(ValueError, match=r"down_ref: the routing is of .* Route with"):
        down_ref(gate_up_ref(x, weights, routing), weights, wrong)
    with pytest.raises(ValueError, match=r"routing.num_experts_T must be .* \[2\]"):
        experts_ref(x[:2], weights, routing)


def test_biases_and_blocks_must_fit_the_scales() -> None:
    checkpoint = checkpoint_of(SHAPES[4], seed=1, experts=2)
    bias = torch.zeros(1, SHAPES[4].hidden)
    for change, words in (({"down_bias_ED": bias}, "down_bias_ED must be"), ({"gate_up_bias_EG": bias}, "gate_up_bias_EG must be"),
                          ({"gate_up_blocks": torch.cat([checkpoint.gate_up_blocks] * 2, 1)}, "gate_up_blocks must be")):
        with pytest.raises(ValueError, match=words):
            dataclasses.replace(checkpoint, **change).pack()


@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_no_tokens(shape: Shape) -> None:
    weights = checkpoint_of(shape, seed=1).pack()
    routing = route_ref(torch.zeros(0, shape.per_token, dtype=torch.int32), torch.zeros(0, shape.per_token), num_experts=shape.experts)
    assert experts_ref(activations(0, shape.hidden, seed=1), weights, routing).shape == (0, shape.hidden)


# --- the device code's indices, followed on the CPU ---


def batch_sums(x_TD: Tensor, rows_g: Tensor, weight: FragmentWeight, stages: Stages, first: int) -> Tensor:
    """What `multiply` and `sum_over_warps` give for a batch of stages of the first expert, by their own indexing: [row tiles, 128], float64.

    Stages behind the last are zeros, as in `_multiply_rest`.
    """
    layout = weight.layout
    codes, scales = weight.codes[0].view(-1, layout.num_warps, 8, 4, 4), weight.scales[0]
    units = stages.groups * layout.num_steps
    exchange = torch.zeros(stages.groups * stages.parts, layout.num_warps, 128, dtype=torch.float64)
    words = 4 if layout.num_steps % 4 == 0 else 2 if layout.num_steps % 2 == 0 else 1
    for part in range(min(stages.parts, layout.num_groups // stages.groups - first)):
        for unit in range(units):
            at = (first + part) * units + unit
            s = scales.view(-1, layout.num_warps, 8, words)[at // words, :, :, at % words]
            step = unit % layout.num_steps
            w = codes[at]                                        # [warp, g, t, j]
            factors = [v.to(torch.int32).view(torch.float32).double() for v in
                       (s & 0x7F800000, (s << 8) & 0x7F800000, (s << 16) & 0x7F800000, ((s << 24) | ((s >> 8) & 0xFFFFFF)) & 0x7F800000)]
            registers = (w & -0x7E3F7E40, (w << 3) & -0x7E3F7E40, ((w << 6) & 0x01C001C0) | ((w << 1) & -0x7FFF8000),
                         ((w >> 3) & 0x01C001C0) | ((w << 2) & -0x7FFF8000))
            a = torch.stack([torch.stack([(r << 16).view(torch.float32), (r & -0x10000).view(torch.float32)], dim=-1) for r in registers], dim=-2)
            a = a.double() * 2.0**126                            # [warp, g, t, j, register, half]
            for block in range(2):
                warp = torch.arange(layout.num_warps)
                mx_block = (warp % layout.depth_warps) * (2 * layout.num_steps) + 2 * step + block
                columns = mx_block[:, None, None] * 32 + torch.arange(4)[None, :, None] * 8 + torch.arange(8)   # [warp, t, 8]
                inside = columns < x_TD.shape[1]
                b = torch.where(inside & (rows_g >= 0)[:, None, None, None], x_TD.double()[rows_g.clamp(min=0)][:, columns.clamp(max=x_TD.shape[1] - 1)], 0.0)
                b = b.view(8, layout.num_warps, 4, 2, 2, 2)      # [column, warp, t, q, register pair, half]
                for row_half in range(2):
                    mine = a[:, :, :, 2 * block:2 * block + 2, row_half::2, :]       # [warp, g, t, q, pair, half]
                    sums = torch.einsum("wgtqph,cwtqph->wgc", mine, b) * factors[2 * block + row_half][..., None]
                    fragment = exchange[part * stages.groups + unit // layout.num_steps].view(layout.num_warps, 8, 4, 2, 2)   # g, t, row half, column of pair
                    fragment[:, :, :, row_half] += sums.view(layout.num_warps, 8, 4, 2)
    # of a lane's four sums (row g, g + 8) x (column 2t, 2t + 1) the row varies first
    return exchange.view(-1, layout.num_warps, 32, 2, 2).transpose(-1, -2).reshape(-1, layout.depth_warps, 128).sum(1)


def coordinates(row_tiles: int) -> tuple[Tensor, Tensor]:
    """`result_coordinates`."""
    tile, element = torch.arange(row_tiles)[:, None], torch.arange(128)[None, :]
    return tile * 16 + (element >> 4) + 8 * (element & 1), (((element >> 2) & 3) * 2 + ((element >> 1) & 1)).expand(row_tiles, 128)


@pytest.mark.parametrize("sizes", [(128, 64), (2048, 32), (768, 256), (96, 2880), (256, 576)], ids=str)
def test_the_device_indices_give_the_products(sizes: tuple[int, int]) -> None:
    """hidden, channels: layouts of 1, 2, 4 and 8 warps along the input, padded steps, padded rows."""
    hidden, channels = sizes
    shape = Shape(name="indices", hidden=hidden, channels=channels, experts=1, per_token=1)
    weights = checkpoint_of(shape, seed=hidden).pack()
    x = activations(5, hidden, seed=1)
    routing = route_ref(torch.zeros(5, 1, dtype=torch.int32), torch.ones(5, 1), num_experts=1)
    rows_g = torch.tensor([*range(5), -1, -1, -1])
    layout, stages = weights.gate_up.layout, Stages.of(weights.gate_up.layout)
    got = torch.zeros(8, 2, channels, dtype=torch.float64)
    for first in range(0, layout.num_groups // stages.groups, stages.parts):
        sums = batch_sums(x, rows_g, weights.gate_up, stages, first)
        row, column = coordinates(len(sums))
        f = first * stages.groups * layout.row_warps * 8 + (row >> 4) * 8 + (row & 7)
        keep = f < channels
        got[column[keep], (row[keep] >> 3) & 1, f[keep]] = sums[keep]
    assert_within(got[:5], gate_up_sums_ref(x, weights, routing)[0, :5], bound=FP64)
    inter = gate_up_ref(x, weights, routing)
    layout, stages = weights.down.layout, Stages.of(weights.down.layout)
    y = torch.zeros(8, hidden, dtype=torch.float64)
    for first in range(0, layout.num_groups // stages.groups, stages.parts):
        sums = batch_sums(inter[0], rows_g, weights.down, stages, first)
        row, column = coordinates(len(sums))
        d = first * stages.groups * layout.group_rows + row
        y[column[d < hidden], d[d < hidden]] = sums[d < hidden]
    assert_within(y[:5], down_ref(inter, weights, routing), bound=FP64)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_stages_divide_the_weights_and_fill_the_ring(shape: Shape) -> None:
    in_layer = Stages.of_layer(shape.gate_up, shape.down)
    layouts = (shape.gate_up, shape.down)
    for layout, stages in (*((each, Stages.of(each)) for each in layouts), *zip(layouts, in_layer, strict=True)):
        stages.check(layout)
        assert stages.partitions * stages.stages * stages.groups * layout.num_steps * 4352 <= 140 * 1024
        assert stages.groups * layout.num_steps * layout.unit_scale_words % scale_box(layout, stages) == 0
    assert (in_layer[0].stages, in_layer[0].partitions) == (in_layer[1].stages, in_layer[1].partitions)
    with pytest.raises(ValueError, match="divide the 3 groups"):
        Stages(groups=2, parts=1, stages=2).check(choose_layout(96, 768))
    with pytest.raises(ValueError, match="must be 1, 2 or 4"):
        Stages(groups=-1, parts=-1, stages=2).check(choose_layout(2048, 2048))
    with pytest.raises(ValueError, match="at most 2 with several parts"):
        Stages(groups=4, parts=2, stages=2).check(choose_layout(2048, 2048))


# --- compiled ---

# At 17.5 instructions an MMA, everything counted, an H200 keeps 97 % of its read stream; at 20 it loses a tenth. The pocket's gate and up
# are two stages in all, the sums and stores of one shared by 32 MMAs.
MOST_PER_MMA = {"pocket": 22.5, "gpt-oss-20b": 17.6, "SmolLM2-MoE": 17.6}
MOST_IN_LAYER = {"pocket": 23.5}


def assert_fits(built: Built) -> None:
    """Nothing spilled where it counts: two or four words that the compiler computes before the partitions part may wait on the stack, once a launch."""
    assert built.local_bytes == 0 and built.stack_bytes <= 16 and not any(loop.local_accesses for loop in built.loops), f"spills: {built}"
    assert built.shared_bytes <= 227 * 1024, str(built)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_compiled_for_sm_90(shape: Shape) -> None:
    gate_up_kernel, down_kernel, layer = build_gate_up(shape), build_down(shape), build_layer(shape)
    for built in (gate_up_kernel, down_kernel, layer):
        assert_fits(built)
    stages = Stages.of(shape.gate_up)
    whole = [loop for loop in gate_up_kernel.loops if loop.num_mma == shape.gate_up.num_steps * 4 * stages.groups * stages.parts]
    assert len(whole) >= stages.partitions and whole[0].per_mma <= MOST_PER_MMA.get(shape.name, 17.5), str(gate_up_kernel)
    # A layer has one body for whole and for short batches: a second one cost 7 us at T = 8, presumably instruction fetches (recipes/RECORDS.md). What a
    # batch adds to its MMAs is a branch that is not taken, zeros for parts that are missing, the sums and the stores.
    in_layer = Stages.of_layer(shape.gate_up, shape.down)
    assert len(layer.loops) == 2 * in_layer[0].partitions
    assert layer.loops[0].per_mma_in_blocks <= 17.5 and layer.loops[0].per_mma <= MOST_IN_LAYER.get(shape.name, 18.5), str(layer)
    assert down_kernel.loops[0].per_mma_in_blocks <= 20, str(down_kernel)
    # Every slot is given back behind a fence: without one its last reads may be under way when TMA writes it again.
    assert layer.ptx.count("fence.proxy.async.shared::cta") == in_layer[0].partitions * sum(each.parts for each in in_layer)
    assert "red.global.add.f" not in down_kernel.ptx and "atom.global.add.f" not in down_kernel.ptx


def test_channels_may_round_to_the_other_neighbour_and_no_further() -> None:
    expected = torch.randn(8, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    for ulps, few, fine in ((1, True, True), (2, True, False), (1, False, False)):
        got = expected.clone()
        got.view(torch.int16)[0 if few else slice(None), :2 if few else None] += ulps
        assert (beyond_neighbours(got, expected) <= 1) == fine, (ulps, few)


def test_the_other_variants_compile() -> None:
    """Each activation with and without biases, and the raw sums."""
    qwen, gpt_oss = SHAPES[0], SHAPES[2]
    for shape in (dataclasses.replace(qwen, bias=True), dataclasses.replace(gpt_oss, bias=False)):
        assert_fits(build_gate_up(shape))
    assert_fits(build_gate_up(qwen, activation="none"))


# --- on a GPU ---


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("num_tokens", [1, 4, 8, 19])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gpu_against_float64(shape: Shape, num_tokens: int) -> None:
    """Fresh inputs each run, all codes, scales of 2**-19 to 2 and of 2**-43 to 2**-19; dead columns are poisoned memory."""
    seed = torch.seed() % 2**31
    for scales in ((108, 128), (84, 108)):
        errors = check_products(shape, num_tokens=num_tokens, seed=seed, scales=scales)
        assert errors["gate and up"] <= 1e-6 and errors["down"] <= 1e-6 and errors["layer"] <= 1e-6, errors
        assert errors["channels (bf16)"] <= 1, errors


@pytest.mark.gpu
@needs_gpu
def test_gpu_weights_pack_to_the_same_bytes() -> None:
    checkpoint = checkpoint_of(SMALL[1], seed=1)
    on_gpu = dataclasses.replace(checkpoint, **{n: t.cuda() for n, t in vars(checkpoint).items() if isinstance(t, Tensor)}).pack()
    for which in ("gate_up", "down"):
        assert_equal(getattr(on_gpu, which).codes.cpu(), getattr(checkpoint.pack(), which).codes)
        assert_equal(weights_of(getattr(on_gpu, which)).cpu(), weights_of(getattr(checkpoint.pack(), which)))
