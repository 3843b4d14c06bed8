# Device code has no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The experts of one layer as one persistent kernel: gate and up, a barrier over the grid, down.

What it wins over two launches is that weights keep streaming across the barrier: down's weights do not depend on what gate and up
gave, so the producer fills the ring with them while the consumers still wait for each other. Its lead is the ring, 70-105 KB; a deeper
one makes the first dependent loads behind the barrier wait longer than it hides.

Several layers can be run in one launch, each on its own input: what a layer costs inside a persistent step. Between layers weights do not
stream ahead, as the experts of the next are not known in a real step.

The barrier is a counter whose top bit turns when all have come, so it needs no reset and may wrap. Its wait is bounded: a program that polls in
vain for seconds sets `fault` and goes on, and the host reads the flag with the result.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..mx.layouts import FragmentLayout
from .device import add_partials, consume_down, consume_gate_up, first_down_columns
from .product import (
    Stages,
    check_device,
    check_routing,
    constants_of,
    descriptors,
    down_ref,
    gate_up_ref,
    num_programs,
    require,
)
from .routing import TILE_COLUMNS, Routing, max_tiles
from .stream import cta_barrier, make_ring, make_scale_ring, program, stream_weights
from .weights import ExpertWeights

# About 0.7 us each, so about three seconds. One thread polls; the barrier behind it passes the acquire on.
_POLLS = 1 << 22
_WAIT_PTX = gl.constexpr(f"""{{
.reg .pred p; .reg .b32 now, polls;
mov.u32 $0, 0; mov.u32 polls, 0;
setp.ne.u32 p, $3, 0;
@p bra DONE;
POLL:
ld.acquire.gpu.global.u32 now, [$1];
xor.b32 now, now, $2;
setp.lt.s32 p, now, 0;
@p bra DONE;
add.u32 polls, polls, 1;
setp.lt.u32 p, polls, {_POLLS};
@p bra POLL;
mov.u32 $0, 1;
DONE:
bar.warp.sync 0xffffffff;
}}""")


def experts_ref(x_TD: Tensor, weights: ExpertWeights, routing: Routing, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """The layer's output [T, D] in `dtype`; activated channels are rounded to bf16 between the products, as the kernel does.

    Errors: as `gate_up_ref`.
    """
    return down_ref(gate_up_ref(x_TD, weights, routing, dtype=dtype), weights, routing, dtype=dtype)


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """What a layer writes on the way; one serves all layers of a model that have the same sizes, for up to its number of tokens."""

    inter_MCF: Tensor       # bf16
    partials_RD: Tensor     # fp32, a row a pair
    barrier: Tensor         # int32 [1], zero at first
    fault: Tensor           # int32 [1]: nonzero if a barrier was given up

    @staticmethod
    def of(weights: ExpertWeights, *, num_tokens: int, num_experts_per_token: int, device: torch.device) -> "Workspace":
        tiles = max_tiles(num_tokens, num_experts_per_token, weights.num_experts)
        return Workspace(
            inter_MCF=torch.empty(tiles, TILE_COLUMNS, weights.channels, dtype=torch.bfloat16, device=device),
            partials_RD=torch.empty(num_tokens * num_experts_per_token, weights.hidden_size, device=device),
            barrier=torch.zeros(1, dtype=torch.int32, device=device), fault=torch.zeros(1, dtype=torch.int32, device=device))


def layer_constants(gate_up: FragmentLayout, down: FragmentLayout, up_stages: Stages, down_stages: Stages) -> dict[str, int]:
    return ({f"UP_{name}": value for name, value in constants_of(gate_up, up_stages).items()}
            | {f"DOWN_{name}": value for name, value in constants_of(down, down_stages).items()})


class Experts:
    """One layer's experts with their TMA descriptors, ready to launch.

    Errors: NotImplementedError on anything but sm_90; RuntimeError from `check_fault` after a barrier that was given up.
    """

    def __init__(self, weights: ExpertWeights, *, workspace: Workspace, num_layers: int = 1, stages: tuple[Stages, Stages] | None = None) -> None:
        self.weights, self.workspace, self.num_layers = weights, workspace, num_layers
        self.stages = stages or Stages.of_layer(weights.gate_up.layout, weights.down.layout)
        if any(getattr(self.stages[0], name) != getattr(self.stages[1], name) for name in ("stages", "partitions")):
            raise ValueError(f"Experts: both products share partitions and rings; got {self.stages}.")
        if num_layers < 1 or weights.num_experts % num_layers:
            raise ValueError(f"Experts: the experts of {num_layers} layers lie one after the other; got {weights.num_experts} experts.")
        self._descriptors = (*descriptors(weights.gate_up, self.stages[0]), *descriptors(weights.down, self.stages[1]))
        self._constants = layer_constants(weights.gate_up.layout, weights.down.layout, *self.stages)

    def __call__(self, x_TD: Tensor, routing: Routing, *, y_TD: Tensor) -> Tensor:
        """`experts_ref` into `y_TD` (fp32). Returns it. One launch; nothing is read back.

        With several layers x, y and the tensors of the routing have a leading dimension of layers, and expert numbers are those of the layer.
        """
        weights, space = self.weights, self.workspace
        where, hidden, num_tokens = "experts", weights.hidden_size, x_TD.shape[-2] if x_TD.dim() > 1 else 0
        shape = (num_tokens, hidden) if self.num_layers == 1 else (self.num_layers, num_tokens, hidden)
        require(where, "x", x_TD, shape, torch.bfloat16, like=x_TD)
        require(where, "y", y_TD, shape, torch.float32, like=x_TD)
        check_routing(where, routing, num_layers=self.num_layers, num_experts=weights.num_experts // self.num_layers, num_tokens=num_tokens, like=x_TD)
        require(where, "the workspace's inter_MCF", space.inter_MCF, (routing.experts_M.shape[-1], TILE_COLUMNS, weights.channels), torch.bfloat16, like=x_TD,
                or_more=True)
        require(where, "the workspace's partials_RD", space.partials_RD, (num_tokens * routing.num_experts_per_token, hidden), torch.float32, like=x_TD,
                or_more=True)
        check_device(x_TD, weights, where=where)
        up_bias, down_bias = weights.gate_up_bias_E2F, weights.down_bias_ED
        none = routing.weights_MC   # a pointer that is not read
        _layer_kernel[(num_programs(x_TD.device),)](
            *self._descriptors, x_TD.view(torch.int32), space.inter_MCF, space.inter_MCF.view(torch.int32), space.partials_RD, y_TD,
            none if up_bias is None else up_bias, none if down_bias is None else down_bias, routing.experts_M, routing.pairs_MC, routing.weights_MC,
            routing.num_experts_T, routing.num_tiles, space.barrier, space.fault, self.num_layers, weights.num_experts // self.num_layers,
            x_TD.shape[-2], routing.experts_M.shape[-1], K=routing.num_experts_per_token,
            D=weights.hidden_size, F=weights.channels, ACTIVATION=weights.activation, UP_BIAS=up_bias is not None, DOWN_BIAS=down_bias is not None,
            STAGES=self.stages[0].stages, PARTITIONS=self.stages[0].partitions, PROGRAMS=num_programs(x_TD.device),
            NUM_WARPS=weights.gate_up.layout.num_warps, **self._constants, num_warps=weights.gate_up.layout.num_warps, launch_cooperative_grid=True)
        return y_TD

    def check_fault(self) -> None:
        """Raises if a program gave up waiting at the barrier, and makes the workspace ready again; waits for the device."""
        if int(self.workspace.fault):
            self.workspace.fault.zero_()
            self.workspace.barrier.zero_()
            raise RuntimeError("experts: a program waited seconds for the others at the grid barrier and gave up; the result is not valid. "
                               "Programs that cannot all be resident do this: is another kernel holding SMs?")


@gluon.jit
def grid_barrier(barrier_ptr, fault_ptr, PART: gl.constexpr, PARTITIONS: gl.constexpr, PROGRAMS: gl.constexpr, NUM_WARPS: gl.constexpr):
    """Everything written before it by the consumers of any program can be read after it. All programs must be resident."""
    cta_barrier()
    number = program(NUM_WARPS) * PARTITIONS + PART
    before = gl.atomic_add(barrier_ptr, gl.where(number == 0, -2147483648 - (PROGRAMS * PARTITIONS - 1), 1), sem="release", scope="gpu")
    thread = gl.arange(0, NUM_WARPS * 32, gl.BlockedLayout([1], [32], [NUM_WARPS], [0]))
    zeros = thread * 0
    ptx: gl.constexpr = _WAIT_PTX
    gave_up = gl.inline_asm_elementwise(ptx, "=&r,l,r,r", [zeros.to(gl.int64) + barrier_ptr.to(gl.int64, bitcast=True), zeros + before, thread],
                                        dtype=gl.int32, is_pure=False, pack=1)
    gl.store(fault_ptr + zeros, gave_up, mask=gave_up != 0)
    cta_barrier()


@gluon.jit
def _layer_consumer(ring, up_scales, down_scales, exchange, full, empty, go, done, x_ptr, inter_out_ptr, inter_ptr, partials_ptr, y_ptr, up_bias_ptr,
                    down_bias_ptr, experts_ptr, pairs_ptr, weights_ptr, num_experts_ptr, num_tiles_ptr, barrier_ptr, fault_ptr, num_layers, layer_experts,
                    num_tokens, max_tiles, K: gl.constexpr, D: gl.constexpr, F: gl.constexpr, ACTIVATION: gl.constexpr, UP_BIAS: gl.constexpr,
                    DOWN_BIAS: gl.constexpr, UP_DEPTH: gl.constexpr, UP_DEPTH_WARPS: gl.constexpr, UP_NUM_STEPS: gl.constexpr, UP_GROUPS: gl.constexpr,
                    UP_PARTS: gl.constexpr, UP_TILE_STAGES: gl.constexpr, DOWN_DEPTH: gl.constexpr, DOWN_DEPTH_WARPS: gl.constexpr,
                    DOWN_NUM_STEPS: gl.constexpr, DOWN_GROUPS: gl.constexpr, DOWN_PARTS: gl.constexpr, DOWN_TILE_STAGES: gl.constexpr,
                    SLOT_UNITS: gl.constexpr, STAGES: gl.constexpr, PART: gl.constexpr, PARTITIONS: gl.constexpr, PROGRAMS: gl.constexpr,
                    NUM_WARPS: gl.constexpr):
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    mbarrier.arrive(go, count=1)
    for layer in range(num_layers):
        num_tiles = gl.load(num_tiles_ptr + layer)
        first = layer * max_tiles
        first_expert = layer * layer_experts
        slot, phase = consume_gate_up(ring, up_scales, exchange, full, empty, slot, phase, x_ptr + layer * num_tokens * (D // 2), inter_out_ptr, up_bias_ptr,
                                      experts_ptr + first, pairs_ptr + first * 8, first_expert, num_tiles, K, F, ACTIVATION, UP_BIAS, UP_DEPTH,
                                      UP_DEPTH_WARPS, UP_NUM_STEPS, UP_GROUPS, UP_PARTS, UP_TILE_STAGES, SLOT_UNITS, STAGES, PART, PARTITIONS, PROGRAMS,
                                      NUM_WARPS, True)
        columns = first_down_columns(pairs_ptr + first * 8, weights_ptr + first * 8, num_tiles, DOWN_DEPTH_WARPS, DOWN_GROUPS, DOWN_PARTS, DOWN_TILE_STAGES,
                                     PART, PARTITIONS, PROGRAMS, NUM_WARPS)
        grid_barrier(barrier_ptr, fault_ptr, PART, PARTITIONS, PROGRAMS, NUM_WARPS)
        slot, phase = consume_down(ring, down_scales, exchange, full, empty, slot, phase, columns, inter_ptr, partials_ptr, down_bias_ptr, experts_ptr + first,
                                   pairs_ptr + first * 8, weights_ptr + first * 8, first_expert, num_tiles, D, DOWN_BIAS, DOWN_DEPTH, DOWN_DEPTH_WARPS,
                                   DOWN_NUM_STEPS, DOWN_GROUPS, DOWN_PARTS, DOWN_TILE_STAGES, SLOT_UNITS, STAGES, PART, PARTITIONS, PROGRAMS,
                                   NUM_WARPS, True)
        grid_barrier(barrier_ptr, fault_ptr, PART, PARTITIONS, PROGRAMS, NUM_WARPS)
        if layer + 1 < num_layers:
            mbarrier.wait(done, layer & 1)   # with few tokens a partition may have no weights at all: the producer must not miss a turn
            mbarrier.arrive(go, count=1)
        add_partials(partials_ptr, y_ptr + layer * num_tokens * D, num_experts_ptr + layer * num_tokens, num_tokens, PART, PARTITIONS, PROGRAMS, K, D,
                     NUM_WARPS)


@gluon.jit
def _layer_producer(up_codes_desc, up_scales_desc, down_codes_desc, down_scales_desc, ring, up_scales, down_scales, full, empty, go, done, experts_ptr,
                    num_tiles_ptr, num_layers, layer_experts, max_tiles, UP_TILE_STAGES: gl.constexpr, UP_UNITS: gl.constexpr, UP_SCALE_BOX: gl.constexpr,
                    DOWN_TILE_STAGES: gl.constexpr, DOWN_UNITS: gl.constexpr, DOWN_SCALE_BOX: gl.constexpr, SLOT_UNITS: gl.constexpr, STAGES: gl.constexpr,
                    PART: gl.constexpr, PARTITIONS: gl.constexpr, PROGRAMS: gl.constexpr, NUM_WARPS: gl.constexpr):
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    for layer in range(num_layers):
        num_tiles = gl.load(num_tiles_ptr + layer)
        experts = experts_ptr + layer * max_tiles
        first_expert = layer * layer_experts
        mbarrier.wait(go, layer & 1)
        slot, phase = stream_weights(up_codes_desc, up_scales_desc, ring, up_scales, full, empty, slot, phase, experts, first_expert, num_tiles,
                                     UP_TILE_STAGES, UP_UNITS, SLOT_UNITS, UP_SCALE_BOX, STAGES, PART, PARTITIONS, PROGRAMS, NUM_WARPS)
        # No barrier here: this is the run-ahead.
        slot, phase = stream_weights(down_codes_desc, down_scales_desc, ring, down_scales, full, empty, slot, phase, experts, first_expert, num_tiles,
                                     DOWN_TILE_STAGES, DOWN_UNITS, SLOT_UNITS, DOWN_SCALE_BOX, STAGES, PART, PARTITIONS, PROGRAMS, NUM_WARPS)
        mbarrier.arrive(done, count=1)


@gluon.jit
def _make_layer_ring(up_codes_desc, up_scales_desc, down_scales_desc, UP_UNITS: gl.constexpr, UP_SCALE_BOX: gl.constexpr, DOWN_UNITS: gl.constexpr,
                     DOWN_SCALE_BOX: gl.constexpr, SLOT_UNITS: gl.constexpr, STAGES: gl.constexpr, EXCHANGE: gl.constexpr, NUM_WARPS: gl.constexpr):
    ring, exchange, full, empty = make_ring(up_codes_desc, SLOT_UNITS, STAGES, EXCHANGE, NUM_WARPS)
    up_scales = make_scale_ring(up_scales_desc, UP_UNITS, UP_SCALE_BOX, STAGES, NUM_WARPS)
    down_scales = make_scale_ring(down_scales_desc, DOWN_UNITS, DOWN_SCALE_BOX, STAGES, NUM_WARPS)
    go = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())     # the producer may begin a layer
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())   # and has asked for all of its weights
    mbarrier.init(go, count=1)
    mbarrier.init(done, count=1)
    return ring, up_scales, down_scales, exchange, full, empty, go, done


@gluon.jit(do_not_specialize=["num_layers", "layer_experts", "num_tokens", "max_tiles"])
def _layer_kernel(up_codes_desc, up_scales_desc, down_codes_desc, down_scales_desc, x_ptr, inter_out_ptr, inter_ptr, partials_ptr, y_ptr, up_bias_ptr,
                  down_bias_ptr, experts_ptr, pairs_ptr, weights_ptr, num_experts_ptr, num_tiles_ptr, barrier_ptr, fault_ptr, num_layers, layer_experts,
                  num_tokens, max_tiles, K: gl.constexpr, D: gl.constexpr, F: gl.constexpr, ACTIVATION: gl.constexpr, UP_BIAS: gl.constexpr,
                  DOWN_BIAS: gl.constexpr, UP_DEPTH: gl.constexpr, UP_DEPTH_WARPS: gl.constexpr, UP_NUM_STEPS: gl.constexpr, UP_GROUPS: gl.constexpr,
                  UP_PARTS: gl.constexpr, UP_TILE_STAGES: gl.constexpr, UP_SCALE_BOX: gl.constexpr, DOWN_DEPTH: gl.constexpr, DOWN_DEPTH_WARPS: gl.constexpr,
                  DOWN_NUM_STEPS: gl.constexpr, DOWN_GROUPS: gl.constexpr, DOWN_PARTS: gl.constexpr, DOWN_TILE_STAGES: gl.constexpr,
                  DOWN_SCALE_BOX: gl.constexpr, STAGES: gl.constexpr, PARTITIONS: gl.constexpr, PROGRAMS: gl.constexpr, NUM_WARPS: gl.constexpr):
    UP_UNITS: gl.constexpr = UP_GROUPS * UP_NUM_STEPS
    DOWN_UNITS: gl.constexpr = DOWN_GROUPS * DOWN_NUM_STEPS
    SLOT_UNITS: gl.constexpr = UP_UNITS if UP_UNITS > DOWN_UNITS else DOWN_UNITS
    UP_ITEM: gl.constexpr = UP_GROUPS * UP_PARTS
    DOWN_ITEM: gl.constexpr = DOWN_GROUPS * DOWN_PARTS
    EXCHANGE: gl.constexpr = (UP_ITEM if UP_ITEM > DOWN_ITEM else DOWN_ITEM) * NUM_WARPS * 128
    ring, up_scales, down_scales, exchange, full, empty, go, done = _make_layer_ring(
        up_codes_desc, up_scales_desc, down_scales_desc, UP_UNITS, UP_SCALE_BOX, DOWN_UNITS, DOWN_SCALE_BOX, SLOT_UNITS, STAGES, EXCHANGE, NUM_WARPS)
    if PARTITIONS == 1:
        gl.warp_specialize([
            (_layer_consumer, (ring, up_scales, down_scales, exchange, full, empty, go, done, x_ptr, inter_out_ptr, inter_ptr, partials_ptr, y_ptr,
                               up_bias_ptr, down_bias_ptr, experts_ptr, pairs_ptr, weights_ptr, num_experts_ptr, num_tiles_ptr, barrier_ptr, fault_ptr,
                               num_layers, layer_experts, num_tokens, max_tiles, K, D, F, ACTIVATION, UP_BIAS, DOWN_BIAS, UP_DEPTH, UP_DEPTH_WARPS,
                               UP_NUM_STEPS, UP_GROUPS, UP_PARTS, UP_TILE_STAGES, DOWN_DEPTH, DOWN_DEPTH_WARPS, DOWN_NUM_STEPS, DOWN_GROUPS, DOWN_PARTS,
                               DOWN_TILE_STAGES, SLOT_UNITS, STAGES, 0, 1, PROGRAMS, NUM_WARPS)),
            (_layer_producer, (up_codes_desc, up_scales_desc, down_codes_desc, down_scales_desc, ring, up_scales, down_scales, full, empty, go, done,
                               experts_ptr, num_tiles_ptr, num_layers, layer_experts, max_tiles, UP_TILE_STAGES, UP_UNITS, UP_SCALE_BOX, DOWN_TILE_STAGES,
                               DOWN_UNITS, DOWN_SCALE_BOX, SLOT_UNITS, STAGES, 0, 1, PROGRAMS, NUM_WARPS)),
        ], [1], [24])
    else:
        ring_1, up_scales_1, down_scales_1, exchange_1, full_1, empty_1, go_1, done_1 = _make_layer_ring(
            up_codes_desc, up_scales_desc, down_scales_desc, UP_UNITS, UP_SCALE_BOX, DOWN_UNITS, DOWN_SCALE_BOX, SLOT_UNITS, STAGES, EXCHANGE, NUM_WARPS)
        gl.warp_specialize([
            (_layer_consumer, (ring, up_scales, down_scales, exchange, full, empty, go, done, x_ptr, inter_out_ptr, inter_ptr, partials_ptr, y_ptr,
                               up_bias_ptr, down_bias_ptr, experts_ptr, pairs_ptr, weights_ptr, num_experts_ptr, num_tiles_ptr, barrier_ptr, fault_ptr,
                               num_layers, layer_experts, num_tokens, max_tiles, K, D, F, ACTIVATION, UP_BIAS, DOWN_BIAS, UP_DEPTH, UP_DEPTH_WARPS,
                               UP_NUM_STEPS, UP_GROUPS, UP_PARTS, UP_TILE_STAGES, DOWN_DEPTH, DOWN_DEPTH_WARPS, DOWN_NUM_STEPS, DOWN_GROUPS, DOWN_PARTS,
                               DOWN_TILE_STAGES, SLOT_UNITS, STAGES, 0, 2, PROGRAMS, NUM_WARPS)),
            (_layer_consumer, (ring_1, up_scales_1, down_scales_1, exchange_1, full_1, empty_1, go_1, done_1, x_ptr, inter_out_ptr, inter_ptr, partials_ptr,
                               y_ptr, up_bias_ptr, down_bias_ptr, experts_ptr, pairs_ptr, weights_ptr, num_experts_ptr, num_tiles_ptr, barrier_ptr, fault_ptr,
                               num_layers, layer_experts, num_tokens, max_tiles, K, D, F, ACTIVATION, UP_BIAS, DOWN_BIAS, UP_DEPTH, UP_DEPTH_WARPS,
                               UP_NUM_STEPS, UP_GROUPS, UP_PARTS, UP_TILE_STAGES, DOWN_DEPTH, DOWN_DEPTH_WARPS, DOWN_NUM_STEPS, DOWN_GROUPS, DOWN_PARTS,
                               DOWN_TILE_STAGES, SLOT_UNITS, STAGES, 1, 2, PROGRAMS, NUM_WARPS)),
            (_layer_producer, (up_codes_desc, up_scales_desc, down_codes_desc, down_scales_desc, ring, up_scales, down_scales, full, empty, go, done,
                               experts_ptr, num_tiles_ptr, num_layers, layer_experts, max_tiles, UP_TILE_STAGES, UP_UNITS, UP_SCALE_BOX, DOWN_TILE_STAGES,
                               DOWN_UNITS, DOWN_SCALE_BOX, SLOT_UNITS, STAGES, 0, 2, PROGRAMS, NUM_WARPS)),
            (_layer_producer, (up_codes_desc, up_scales_desc, down_codes_desc, down_scales_desc, ring_1, up_scales_1, down_scales_1, full_1, empty_1, go_1,
                               done_1, experts_ptr, num_tiles_ptr, num_layers, layer_experts, max_tiles, UP_TILE_STAGES, UP_UNITS, UP_SCALE_BOX,
                               DOWN_TILE_STAGES, DOWN_UNITS, DOWN_SCALE_BOX, SLOT_UNITS, STAGES, 1, 2, PROGRAMS, NUM_WARPS)),
        ], [NUM_WARPS, 1, 1], [112, 24, 24])
