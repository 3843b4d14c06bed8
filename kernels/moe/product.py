"""The two products of a mixture-of-experts layer for few tokens: gate and up with the activation, and down.

Both walk the stages (column tile of the routing list, groups of rows): weights that are streamed at once, times 8 token columns.
Stages are dealt out as contiguous ranges, so a range reads the activations of a column tile once and then only weights.

    gate_up   inter[tile, column, F] = activation(gate, up), bf16. Gate and up of a channel are two sums of the same lane.
    down      partial[token * K + rank, D] = weight * (down + bias), fp32; then y, the partials of each token by rank.

A column's bits depend on its token alone: not on the other columns, on how many there are, or on which expert lies beside.
Dead columns read and write nothing.

Legend: T tokens, K experts per token, E experts, D hidden, F expert channels, M column tiles, C the 8 columns of a tile.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..mx.dequantize import dequantize_mxfp4_ref
from ..mx.layouts import FragmentLayout, FragmentWeight, row_order, unpack_fragments
from .device import add_partials_kernel, down_kernel, gate_up_kernel
from .routing import TILE_COLUMNS, Routing
from .weights import CLAMP_ALPHA, CLAMP_LIMIT, Activation, ExpertWeights

UNIT_BYTES = 4352            # eight warps times 512 bytes of codes and 32 of scales
_RING_BYTES = 105 * 1024     # all that an SM has in flight; deeper rings make every dependent load wait behind the stream
_MAX_SHARED_STEPS = 6        # two partitions leave a thread 112 registers, and a step's activations take 8
SWIZZLE_NONE = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


# --- what fits ---


def require(where: str, name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, *, like: Tensor, or_more: bool = False) -> None:
    """ValueError unless `tensor` is contiguous, of `shape` (its first dimension may be larger with `or_more`), `dtype` and the device of `like`.

    Kernels write by address: what is too small here would be memory of somebody else.
    """
    got = tuple(tensor.shape)
    fits = got == shape or (or_more and len(got) == len(shape) and got[0] >= shape[0] and got[1:] == shape[1:])
    if not fits or tensor.dtype != dtype or not tensor.is_contiguous() or tensor.device != like.device:
        raise ValueError(f"{where}: {name} must be contiguous {dtype} {list(shape)}{' or more rows' if or_more else ''} on {like.device}; got "
                         f"{tensor.dtype} {list(got)}, strides {tensor.stride()}, on {tensor.device}.")


def check_routing(where: str, routing: Routing, *, num_layers: int, num_experts: int, num_tokens: int, like: Tensor) -> None:
    """ValueError unless the routing is of these layers, experts and tokens."""
    if routing.num_experts != num_experts:
        raise ValueError(f"{where}: the routing is of {routing.num_experts} experts and the weights of {num_experts} a layer. "
                         "Route with num_experts of the weights.")
    lead = () if num_layers == 1 else (num_layers,)
    tiles = routing.experts_M.shape[-1]
    for name, shape, dtype in (("num_tiles", (*lead, 1), torch.int32), ("experts_M", (*lead, tiles), torch.int32),
                               ("pairs_MC", (*lead, tiles, TILE_COLUMNS), torch.int32), ("weights_MC", (*lead, tiles, TILE_COLUMNS), torch.float32),
                               ("num_experts_T", (*lead, num_tokens), torch.int32)):
        require(where, f"routing.{name}", getattr(routing, name), shape, dtype, like=like)


# --- plain torch ---


def weights_of(weight: FragmentWeight, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """Dequantized weights of a packed tensor, in the order of the packed rows."""
    blocks, scales = unpack_fragments(weight)
    dense = dequantize_mxfp4_ref(blocks, scales, dtype=dtype)
    return dense[..., row_order(weight.layout.rows, pairs=weight.pairs, device=dense.device), :]


def activate_ref(gate: Tensor, up: Tensor, *, activation: Activation) -> Tensor:
    """The product of gate and up channels, in their dtype."""
    if activation == "silu":
        return gate * torch.sigmoid(gate) * up
    gate, up = gate.clamp(max=CLAMP_LIMIT), up.clamp(-CLAMP_LIMIT, CLAMP_LIMIT)
    return (up + 1) * gate * torch.sigmoid(CLAMP_ALPHA * gate)


def gate_up_sums_ref(x_TD: Tensor, weights: ExpertWeights, routing: Routing, *, dtype: torch.dtype = torch.float64,
                     dequantized: Tensor | None = None) -> Tensor:
    """Gate and up before the bias and the activation, [M, C, 2, F]; dead columns are zeros.

    dequantized: of `weights_of`, in `dtype`, where a caller keeps it.

    Errors: ValueError for activations or a routing of other sizes than the weights. Other dtypes than bf16 are taken as they are.
    """
    check_routing("gate_up_ref", routing, num_layers=1, num_experts=weights.num_experts, num_tokens=len(x_TD), like=x_TD)
    require("gate_up_ref", "x", x_TD, (len(x_TD), weights.hidden_size), x_TD.dtype, like=x_TD)
    packed = weights_of(weights.gate_up, dtype=dtype) if dequantized is None else dequantized
    sums = x_TD.new_zeros(len(routing.experts_M), TILE_COLUMNS, 2, weights.channels, dtype=dtype)
    for tile in range(int(routing.num_tiles)):
        live = routing.pairs_MC[tile] >= 0
        tokens = (routing.pairs_MC[tile][live] // routing.num_experts_per_token).long()
        rows = x_TD[tokens].to(dtype) @ packed[int(routing.experts_M[tile])].mT
        sums[tile, live] = rows.view(-1, weights.channels // 8, 2, 8).transpose(1, 2).flatten(2)
    return sums


def gate_up_ref(x_TD: Tensor, weights: ExpertWeights, routing: Routing, *, dtype: torch.dtype = torch.float64,
                dequantized: Tensor | None = None) -> Tensor:
    """Activated channels, bf16 [M, C, F], from sums in `dtype`; dead columns are zeros.

    Numerics: one rounding, to bf16, at the end. Errors: as `gate_up_sums_ref`.
    """
    sums = gate_up_sums_ref(x_TD, weights, routing, dtype=dtype, dequantized=dequantized)
    if weights.gate_up_bias_E2F is not None:
        sums += weights.gate_up_bias_E2F.to(dtype)[routing.experts_M.long().clamp(min=0)][:, None]
    inter = activate_ref(sums[..., 0, :], sums[..., 1, :], activation=weights.activation)
    return torch.where((routing.pairs_MC >= 0)[..., None], inter, 0.0).to(torch.bfloat16)


def down_ref(inter_MCF: Tensor, weights: ExpertWeights, routing: Routing, *, dtype: torch.dtype = torch.float64,
             dequantized: Tensor | None = None) -> Tensor:
    """The layer's output [T, D] in `dtype`: each token's weighted down products, added by rank.

    Errors: ValueError for a routing of another number of experts than the weights.
    """
    num_tokens, per_token = len(routing.num_experts_T), routing.num_experts_per_token
    check_routing("down_ref", routing, num_layers=1, num_experts=weights.num_experts, num_tokens=num_tokens, like=inter_MCF)
    packed = weights_of(weights.down, dtype=dtype) if dequantized is None else dequantized
    partials = inter_MCF.new_zeros(num_tokens * per_token, weights.hidden_size, dtype=dtype)
    for tile in range(int(routing.num_tiles)):
        live, expert = routing.pairs_MC[tile] >= 0, int(routing.experts_M[tile])
        rows = inter_MCF[tile, live].to(dtype) @ packed[expert].mT
        if weights.down_bias_ED is not None:
            rows = rows + weights.down_bias_ED[expert].to(dtype)
        partials[routing.pairs_MC[tile][live].long()] = rows * routing.weights_MC[tile][live][:, None].to(dtype)
    total = partials.new_zeros(num_tokens, weights.hidden_size)
    for rank in range(per_token):
        total = total + partials.view(num_tokens, per_token, weights.hidden_size)[:, rank]
    return total


# --- launch ---


@dataclass(frozen=True, kw_only=True)
class Stages:
    """How a product cuts its weights: `groups` of the layout a stage, `parts` stages between two sums over the warps, `stages` in each ring,
    and `partitions`, 1 or 2, of consumers on an SM, each with a ring."""

    groups: int
    parts: int
    stages: int
    partitions: int = 1

    @staticmethod
    def of(layout: FragmentLayout) -> "Stages":
        """For a product that has the GPU to itself: what an H200 was measured to like.

        Two partitions where a warp's activations leave room for their registers, each with two slots of 17 to 35 KB.
        """
        even = layout.num_groups % 2 == 0
        if layout.num_steps > _MAX_SHARED_STEPS:
            return Stages(groups=1, parts=min(2, layout.num_groups), stages=2)
        if layout.depth_warps == 1:   # no sums over the warps to save
            return Stages(groups=2 if even else 1, parts=1, stages=2, partitions=2)
        if layout.num_steps <= 4 and even:
            return Stages(groups=2, parts=min(2, layout.num_groups // 2), stages=2, partitions=2)
        return Stages(groups=1, parts=min(4, _power_of_two(layout.num_groups)), stages=2, partitions=2)

    @staticmethod
    def of_layer(gate_up: FragmentLayout, down: FragmentLayout) -> tuple["Stages", "Stages"]:
        """For both products in one kernel, where a few tokens leave a partition some twenty stages: the smallest stages, in equal rings."""
        partitions = 2 if max(gate_up.num_steps, down.num_steps) <= _MAX_SHARED_STEPS else 1
        slot = max(gate_up.num_steps, down.num_steps) * UNIT_BYTES
        stages = max(2, min(8, _RING_BYTES // (partitions * slot)))
        up, low = (Stages(groups=1, parts=min(4 if layout.num_steps <= _MAX_SHARED_STEPS else 2, _power_of_two(layout.num_groups)), stages=stages,
                          partitions=partitions) for layout in (gate_up, down))
        return up, low

    def check(self, layout: FragmentLayout) -> None:
        """ValueError unless stages divide the weight."""
        if (self.groups < 1 or self.groups * self.parts not in (1, 2, 4) or (self.parts > 1 and self.groups > 2) or self.stages < 2
                or self.partitions not in (1, 2) or layout.num_groups % self.groups):
            raise ValueError(f"Stages: groups * parts must be 1, 2 or 4, groups divide the {layout.num_groups} groups of the weight (at most 2 with several "
                             f"parts), with 2 stages or more and 1 or 2 partitions; got {self}.")


def _power_of_two(number: int) -> int:
    """The largest that is not above it."""
    return 1 << (max(1, number).bit_length() - 1)


def scale_box(layout: FragmentLayout, stages: Stages) -> int:
    """Words of a TMA row of scales: the largest power of two up to 256 that divides those of a stage."""
    words = stages.groups * layout.num_steps * layout.unit_scale_words
    return min(256, words & -words)


def constants_of(layout: FragmentLayout, stages: Stages) -> dict[str, int]:
    """What the device code must know of one weight."""
    stages.check(layout)
    return {"DEPTH": layout.depth, "DEPTH_WARPS": layout.depth_warps, "NUM_STEPS": layout.num_steps, "GROUPS": stages.groups, "PARTS": stages.parts,
            "TILE_STAGES": layout.num_groups // stages.groups, "SCALE_BOX": scale_box(layout, stages)}


def descriptors(weight: FragmentWeight, stages: Stages) -> tuple[Any, Any]:
    """TMA descriptors of codes and scales; make them once, at load time. All experts lie one after the other."""
    layout, box = weight.layout, scale_box(weight.layout, stages)
    codes, scales = weight.codes.view(-1, 256), weight.scales.view(-1, box)
    return (TensorDescriptor.from_tensor(codes, [layout.num_warps // 2, 256], SWIZZLE_NONE), TensorDescriptor.from_tensor(scales, [1, box], SWIZZLE_NONE))


def check_device(x: Tensor, weights: ExpertWeights, *, where: str) -> None:
    if x.device.type != "cuda" or torch.cuda.get_device_capability(x.device)[0] != 9:
        raise NotImplementedError(f"{where}: the kernel is built for sm_90 (Hopper); got {x.device}. The twins ({where}_ref) run anywhere.")
    for tensor in (weights.gate_up.codes, weights.down.codes, weights.gate_up_bias_E2F, weights.down_bias_ED):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{where}: weights and activations must be on one device; got {tensor.device} and {x.device}.")


def num_programs(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def gate_up(x_TD: Tensor, weights: ExpertWeights, routing: Routing, *, inter_MCF: Tensor, stages: Stages | None = None, sums: Tensor | None = None) -> Tensor:
    """`gate_up_ref` on an sm_90 GPU, into `inter_MCF` (bf16 [M, 8, F]; dead columns keep what they had). Returns it.

    sums: fp32 [M, 8, 2, F]; if given, gate and up before bias and activation are written there and `inter_MCF` is left alone.
    Numerics: within 1e-6 (relative, in norm) of the float64 sums of the same bf16 inputs, for scale bytes from 40 up (derived: smaller
        ones make subnormal partial sums); then one rounding to bf16.
    Errors: ValueError for shapes, dtypes or devices that do not fit; NotImplementedError on anything but sm_90.
    """
    where = "gate_up"
    num_tokens, tiles = len(routing.num_experts_T), len(routing.experts_M)
    check_routing(where, routing, num_layers=1, num_experts=weights.num_experts, num_tokens=num_tokens, like=x_TD)
    require(where, "x", x_TD, (num_tokens, weights.hidden_size), torch.bfloat16, like=x_TD)
    if sums is None:
        require(where, "inter_MCF", inter_MCF, (tiles, TILE_COLUMNS, weights.channels), torch.bfloat16, like=x_TD, or_more=True)
    else:
        require(where, "sums", sums, (tiles, TILE_COLUMNS, 2, weights.channels), torch.float32, like=x_TD, or_more=True)
    check_device(x_TD, weights, where=where)
    layout = weights.gate_up.layout
    stages = stages or Stages.of(layout)
    codes, scales = descriptors(weights.gate_up, stages)
    bias = weights.gate_up_bias_E2F
    gate_up_kernel[(num_programs(x_TD.device),)](
        codes, scales, x_TD.view(torch.int32), inter_MCF if sums is None else sums, bias if bias is not None else routing.weights_MC, routing.experts_M,
        routing.pairs_MC, routing.num_tiles, K=routing.num_experts_per_token, F=weights.channels, ACTIVATION=weights.activation if sums is None else "none",
        HAS_BIAS=bias is not None and sums is None, STAGES=stages.stages, PARTITIONS=stages.partitions, PROGRAMS=num_programs(x_TD.device),
        NUM_WARPS=layout.num_warps, num_warps=layout.num_warps, **constants_of(layout, stages))
    return inter_MCF if sums is None else sums


def down(inter_MCF: Tensor, weights: ExpertWeights, routing: Routing, *, partials_RD: Tensor, y_TD: Tensor, stages: Stages | None = None) -> Tensor:
    """`down_ref` on an sm_90 GPU, into `y_TD` (fp32): two launches. Returns it.

    Shapes: partials_RD fp32 [T * K, D], scratch.
    Numerics: as `gate_up`; fp32 sums over ranks in order.
    """
    where = "down"
    num_tokens = len(routing.num_experts_T)
    check_routing(where, routing, num_layers=1, num_experts=weights.num_experts, num_tokens=num_tokens, like=inter_MCF)
    require(where, "inter_MCF", inter_MCF, (len(routing.experts_M), TILE_COLUMNS, weights.channels), torch.bfloat16, like=inter_MCF, or_more=True)
    require(where, "partials_RD", partials_RD, (num_tokens * routing.num_experts_per_token, weights.hidden_size), torch.float32, like=inter_MCF, or_more=True)
    require(where, "y", y_TD, (num_tokens, weights.hidden_size), torch.float32, like=inter_MCF)
    check_device(inter_MCF, weights, where=where)
    layout = weights.down.layout
    stages = stages or Stages.of(layout)
    codes, scales = descriptors(weights.down, stages)
    bias, programs = weights.down_bias_ED, num_programs(inter_MCF.device)
    down_kernel[(programs,)](
        codes, scales, inter_MCF.view(torch.int32), partials_RD, bias if bias is not None else routing.weights_MC, routing.experts_M, routing.pairs_MC,
        routing.weights_MC, routing.num_tiles, D=weights.hidden_size, HAS_BIAS=bias is not None, STAGES=stages.stages, PARTITIONS=stages.partitions,
        PROGRAMS=programs, NUM_WARPS=layout.num_warps, num_warps=layout.num_warps, **constants_of(layout, stages))
    add_partials_kernel[(programs,)](partials_RD, y_TD, routing.num_experts_T, y_TD.shape[0], K=routing.num_experts_per_token, D=weights.hidden_size,
                                     PROGRAMS=programs, NUM_WARPS=8, num_warps=8)
    return y_TD
