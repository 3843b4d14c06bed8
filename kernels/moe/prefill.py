# Device code has no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The experts of one layer for many tokens: rows grouped by expert, products on dequantized tiles.

With many tokens the weights are read once for all of them and the tensor core is the limit. So packed codes stay in checkpoint order:
each program dequantizes its tile of [BLOCK_N, BLOCK_K] weights to bf16 in registers, where MXFP4 is exact, and multiplies it with
BLOCK_M rows of one expert. Rows are sorted by expert, and programs find their expert from `offsets_E`, so that no expert costs
anything without rows. The down products are scattered back to pairs (token, place) and added by place.

Numerics: fp32 sums over K in order; the channels between the products are bf16. Results differ from the decode products' in the last
bits of fp32: another order of additions.

Legend: T tokens, K experts per token, R = T * K rows, E experts, D hidden, F expert channels.
"""

from dataclasses import dataclass
from typing import get_args

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..mx.dequantize import dequantize_mxfp4_ref
from ..mx.device import decode
from .product import activate_ref
from .weights import ACTIVATIONS, Activation, PairOrder

BLOCK_M, BLOCK_N, BLOCK_K = 64, 64, 64


@dataclass(frozen=True, kw_only=True)
class PrefillWeights:
    """The experts as the checkpoint has them: blocks uint8 [E, rows, Q, 16], scales uint8 [E, rows, Q]; biases fp32 in the order of the rows."""

    gate_up_blocks: Tensor
    gate_up_scales: Tensor
    down_blocks: Tensor
    down_scales: Tensor
    order: PairOrder
    activation: Activation
    gate_up_bias_EG: Tensor | None = None
    down_bias_ED: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Grouping:
    """Pairs sorted by expert: pair = token * K + place. `offsets_E` are the ends; pairs without an expert come last and have no group."""

    pairs_R: Tensor
    offsets_E: Tensor


def group_pairs(expert_ids_TK: Tensor, *, num_experts: int) -> Grouping:
    """Stable sort by expert; ids outside 0..E-1 go nowhere. Stays on the device."""
    flat = expert_ids_TK.flatten().long()
    live = (flat >= 0) & (flat < num_experts)
    keys = torch.where(live, flat, num_experts)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=flat.device).scatter_add_(0, keys, torch.ones_like(keys))
    return Grouping(pairs_R=keys.argsort(stable=True).to(torch.int32), offsets_E=counts[:-1].cumsum(0).to(torch.int32))


def _gate_and_up(rows: Tensor, *, order: PairOrder) -> tuple[Tensor, Tensor]:
    gate, up = (rows[..., 0::2], rows[..., 1::2]) if order == "interleaved" else rows.chunk(2, dim=-1)
    return gate, up


def prefill_ref(x_TD: Tensor, weights: PrefillWeights, expert_ids_TK: Tensor, expert_weights_TK: Tensor, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """The layer's output [T, D] in `dtype`, one expert at a time on its dequantized weights."""
    num_experts, (num_tokens, per_token) = len(weights.gate_up_scales), expert_ids_TK.shape
    grouping = group_pairs(expert_ids_TK, num_experts=num_experts)
    rows_RD = torch.zeros(num_tokens * per_token, x_TD.shape[1], dtype=dtype, device=x_TD.device)
    start = 0
    for expert, end in enumerate(grouping.offsets_E.tolist()):
        pairs, start = grouping.pairs_R[start:end].long(), end
        gate_up = dequantize_mxfp4_ref(weights.gate_up_blocks[expert], weights.gate_up_scales[expert], dtype=torch.float32).to(dtype)
        h = x_TD[pairs // per_token].to(dtype) @ gate_up.mT
        if weights.gate_up_bias_EG is not None:
            h = h + weights.gate_up_bias_EG[expert].to(dtype)
        inter = activate_ref(*_gate_and_up(h, order=weights.order), activation=weights.activation).to(torch.bfloat16)
        down = dequantize_mxfp4_ref(weights.down_blocks[expert], weights.down_scales[expert], dtype=torch.float32).to(dtype)
        y = inter.to(dtype) @ down.mT
        rows_RD[pairs] = y if weights.down_bias_ED is None else y + weights.down_bias_ED[expert].to(dtype)
    return _add(rows_RD, expert_ids_TK, expert_weights_TK, num_experts=num_experts)


def _check(x_TD: Tensor, weights: PrefillWeights, expert_ids_TK: Tensor, expert_weights_TK: Tensor) -> None:
    if expert_ids_TK.dtype not in (torch.int32, torch.int64) or x_TD.dtype != torch.bfloat16 or not x_TD.is_contiguous():
        raise ValueError(f"prefill: expert ids must be int32 or int64 and activations contiguous bfloat16; got {expert_ids_TK.dtype} and {x_TD.dtype}, "
                         f"strides {x_TD.stride()}.")
    if weights.activation not in ACTIVATIONS or weights.order not in get_args(PairOrder):
        raise ValueError(f"prefill: activation must be one of {', '.join(ACTIVATIONS)} and order split or interleaved; got {weights.activation!r} and "
                         f"{weights.order!r}.")
    experts, rows, mx_blocks = weights.gate_up_scales.shape
    hidden = mx_blocks * 32
    for name, tensor, shape in (("gate_up_blocks", weights.gate_up_blocks, (experts, rows, mx_blocks, 16)),
                                ("down_scales", weights.down_scales, (experts, hidden, rows // 64)),
                                ("down_blocks", weights.down_blocks, (experts, hidden, rows // 64, 16)),
                                ("gate_up_bias_EG", weights.gate_up_bias_EG, (experts, rows)), ("down_bias_ED", weights.down_bias_ED, (experts, hidden)),
                                ("x", x_TD, (len(x_TD), hidden)), ("expert ids", expert_ids_TK, (len(x_TD), expert_ids_TK.shape[-1])),
                                ("expert weights", expert_weights_TK, tuple(expert_ids_TK.shape))):
        if tensor is not None and (tuple(tensor.shape) != shape or tensor.device != x_TD.device):
            raise ValueError(f"prefill: {name} must be {list(shape)} on {x_TD.device}; got {list(tensor.shape)} on {tensor.device}.")


def _add(rows_RD: Tensor, expert_ids_TK: Tensor, expert_weights_TK: Tensor, *, num_experts: int) -> Tensor:
    """Every token's weighted rows, place by place; a place without an expert adds nothing, whatever its weight."""
    num_tokens, per_token = expert_ids_TK.shape
    live = (expert_ids_TK >= 0) & (expert_ids_TK < num_experts)
    weights = torch.where(live, expert_weights_TK, 0.0).to(rows_RD.dtype)
    weighted = rows_RD.view(num_tokens, per_token, rows_RD.shape[1]) * weights[..., None]
    total = torch.zeros_like(weighted[:, 0])
    for place in range(per_token):
        total = total + weighted[:, place]
    return total


def prefill(x_TD: Tensor, weights: PrefillWeights, expert_ids_TK: Tensor, expert_weights_TK: Tensor) -> Tensor:
    """`prefill_ref` on the CPU; on CUDA two grouped products, fp32 [T, D].

    Shapes: x_TD bf16, contiguous. Cost: R rows of bf16 gate and up and of fp32 down between the products; nothing is read back.
    """
    _check(x_TD, weights, expert_ids_TK, expert_weights_TK)
    if x_TD.device.type == "cpu":
        return prefill_ref(x_TD, weights, expert_ids_TK, expert_weights_TK, dtype=torch.float32)
    (num_tokens, hidden), per_token = x_TD.shape, expert_ids_TK.shape[1]
    grouping = group_pairs(expert_ids_TK, num_experts=len(weights.gate_up_scales))
    rows = num_tokens * per_token
    h = torch.empty(rows, weights.gate_up_scales.shape[1], dtype=torch.float32, device=x_TD.device)
    _grouped(x_TD, weights.gate_up_blocks, weights.gate_up_scales, weights.gate_up_bias_EG, grouping, out=h, rows_per_source=per_token)
    inter = activate_ref(*_gate_and_up(h, order=weights.order), activation=weights.activation).to(torch.bfloat16)
    y = torch.zeros(rows, hidden, dtype=torch.float32, device=x_TD.device)   # pairs without an expert stay zeros
    _grouped(inter, weights.down_blocks, weights.down_scales, weights.down_bias_ED, grouping, out=y, rows_per_source=1)
    return _add(y, expert_ids_TK, expert_weights_TK, num_experts=len(weights.gate_up_scales))


def _grouped(source: Tensor, blocks: Tensor, scales: Tensor, bias: Tensor | None, grouping: Grouping, *, out: Tensor, rows_per_source: int) -> None:
    """out[pair] = weight[expert of the pair] @ source[pair // rows_per_source]."""
    experts, rows, mx_blocks = scales.shape
    pairs = len(grouping.pairs_R)
    if not pairs or not rows:
        return
    tiles = triton.cdiv(pairs, BLOCK_M) + experts   # each expert may leave one tile partly filled
    with torch.cuda.device(source.device):
        _grouped_kernel[(tiles, triton.cdiv(rows, BLOCK_N))](
            source, blocks.contiguous(), scales.contiguous(), scales if bias is None else bias.contiguous(), grouping.pairs_R, grouping.offsets_E, out, rows,
            DEPTH=mx_blocks * 32, EXPERTS=experts, EXPERTS_POW2=triton.next_power_of_2(experts), ROWS_PER_SOURCE=rows_per_source, HAS_BIAS=bias is not None,
            BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, num_warps=4, num_stages=3)


@triton.jit
def _grouped_kernel(source_ptr, blocks_ptr, scales_ptr, bias_ptr, pairs_ptr, offsets_ptr, out_ptr, num_rows, DEPTH: tl.constexpr, EXPERTS: tl.constexpr,
                    EXPERTS_POW2: tl.constexpr, ROWS_PER_SOURCE: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                    BLOCK_K: tl.constexpr):
    """A tile of BLOCK_M pairs of one expert and BLOCK_N of its rows; tiles are numbered expert by expert."""
    tile = tl.program_id(0)
    e = tl.arange(0, EXPERTS_POW2)
    ends = tl.load(offsets_ptr + e, mask=e < EXPERTS, other=0)
    starts = tl.load(offsets_ptr + e - 1, mask=(e > 0) & (e < EXPERTS), other=0)
    tiles_of = tl.where(e < EXPERTS, (ends - starts + BLOCK_M - 1) // BLOCK_M, 0)
    tile_ends = tl.cumsum(tiles_of, 0)
    expert = tl.sum((tile_ends <= tile).to(tl.int32), 0)
    if expert >= EXPERTS:
        return
    mine = e == expert
    first = tl.sum(tl.where(mine, starts, 0), 0) + (tile - tl.sum(tl.where(mine, tile_ends - tiles_of, 0), 0)) * BLOCK_M
    position = first + tl.arange(0, BLOCK_M)
    inside = position < tl.sum(tl.where(mine, ends, 0), 0)
    pair = tl.load(pairs_ptr + position, mask=inside, other=0).to(tl.int64)
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_row = (expert.to(tl.int64) * num_rows + row)[:, None]
    row_inside = row < num_rows
    k = tl.arange(0, BLOCK_K)
    byte = tl.arange(0, BLOCK_K // 2)
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, DEPTH, BLOCK_K):
        x = tl.load(source_ptr + (pair // ROWS_PER_SOURCE)[:, None] * DEPTH + (start + k)[None, :],
                    mask=inside[:, None] & (start + k < DEPTH)[None, :], other=0.0)
        codes_inside = row_inside[:, None] & (start + 2 * byte < DEPTH)[None, :]
        packed = tl.load(blocks_ptr + weight_row * (DEPTH // 2) + (start // 2 + byte)[None, :], mask=codes_inside, other=0).to(tl.int32)
        scale = tl.load(scales_ptr + weight_row * (DEPTH // 32) + ((start + 2 * byte) // 32)[None, :], mask=codes_inside, other=0).to(tl.int32)
        weights = tl.join(decode(packed, scale), decode(packed >> 4, scale)).reshape(BLOCK_N, BLOCK_K)
        sums = tl.dot(x, weights.to(x.dtype).T, sums, input_precision="ieee")   # exact in bf16
    if HAS_BIAS:
        sums += tl.load(bias_ptr + expert * num_rows + row, mask=row_inside, other=0.0)[None, :]
    tl.store(out_ptr + pair[:, None] * num_rows + row[None, :], sums, mask=inside[:, None] & row_inside[None, :])
