"""Attention of blocks of slots to the context and to their own block, with optional sinks.

    weights = softmax over [visible context | visible slots of the own block | sink]
    output  = weights of context and slots, times their values         a sink takes its share and gives nothing

`attend_blocks` runs FlexAttention when the plan has a block mask and its dense twin otherwise.

Cost: 4 K operations per visible pair and query head; memory of the twin: one score per row, query head and context token.

Legend: B rows, A anchors a row, N slots of a block, S context tokens, H query heads, G key/value heads, R = H / G, K head dimension.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from .block_plan import BlockPlan


def attend_blocks(
    query_BANHK: Tensor, *, context_keys_BGSK: Tensor, context_values_BGSK: Tensor, keys_BANGK: Tensor, values_BANGK: Tensor, plan: BlockPlan,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """The mixed values [B, A, N, H, K]; scores are scaled by K**-0.5.

    Numerics: scores and sums in fp32 (fp64 for fp64 input), weights in the query's dtype.
    """
    if plan.mask is None:
        return attend_blocks_ref(query_BANHK, context_keys_BGSK=context_keys_BGSK, context_values_BGSK=context_values_BGSK, keys_BANGK=keys_BANGK,
                                 values_BANGK=values_BANGK, plan=plan, sinks_H=sinks_H)
    shape = query_BANHK.shape
    query = query_BANHK.flatten(1, 2).transpose(1, 2)
    keys = torch.cat((context_keys_BGSK, keys_BANGK.flatten(1, 2).transpose(1, 2)), dim=2)
    values = torch.cat((context_values_BGSK, values_BANGK.flatten(1, 2).transpose(1, 2)), dim=2)
    mixed = _flex()(query, keys, values, block_mask=plan.mask, enable_gqa=True, with_lse=sinks_H is not None)
    if sinks_H is not None:
        mixed, lse = mixed
        mixed = mixed * torch.sigmoid(lse - sinks_H.to(lse.dtype)[:, None]).unsqueeze(-1).to(mixed.dtype)
    output: Tensor = mixed.transpose(1, 2).reshape(shape)
    return output


def attend_blocks_ref(
    query_BANHK: Tensor, *, context_keys_BGSK: Tensor, context_values_BGSK: Tensor, keys_BANGK: Tensor, values_BANGK: Tensor, plan: BlockPlan,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """As `attend_blocks`, with every score written out."""
    batch, anchors, slots, heads, size = query_BANHK.shape
    groups = context_keys_BGSK.shape[1]
    length = context_keys_BGSK.shape[2]
    query = query_BANHK * size**-0.5
    # rows of one key/value head: every anchor, slot and query head of its group, against the same context
    query = query.view(batch, anchors, slots, groups, heads // groups, size).permute(0, 3, 1, 2, 4, 5)                   # B G A N R K
    to_context = (query.flatten(2, 4) @ context_keys_BGSK.mT).view(*query.shape[:-1], length)                               # B G A N R S
    to_context = to_context.masked_fill(~plan.context_visible(length)[:, None, :, :, None], -torch.inf)
    own_keys, own_values = (t.permute(0, 3, 1, 2, 4) for t in (keys_BANGK, values_BANGK))                                  # B G A N K
    to_block = (query.flatten(3, 4) @ own_keys.mT).view(*query.shape[:-1], slots)                                          # B G A N R N
    if plan.causal:
        to_block = to_block.masked_fill(~plan.block_visible()[:, None], -torch.inf)
    scores = [to_context, to_block]
    if sinks_H is not None:
        scores.append(sinks_H.to(query.dtype).view(groups, 1, 1, -1, 1).expand(*query.shape[:-1], 1))
    wide = torch.promote_types(query.dtype, torch.float32)
    weights = torch.cat(scores, dim=-1).to(wide).softmax(-1).to(query.dtype)
    mixed = (weights[..., :length].flatten(2, 4) @ context_values_BGSK).view(query.shape)
    mixed = mixed + (weights[..., length:length + slots].flatten(3, 4) @ own_values).view(query.shape)
    return mixed.permute(0, 2, 3, 1, 4, 5).reshape(batch, anchors, slots, heads, size)


def _flex_attention(query: Tensor, keys: Tensor, values: Tensor, *, block_mask: Any, enable_gqa: bool, with_lse: bool) -> Any:
    if not with_lse:
        return flex_attention(query, keys, values, block_mask=block_mask, enable_gqa=enable_gqa)
    mixed, aux = flex_attention(query, keys, values, block_mask=block_mask, enable_gqa=enable_gqa, return_aux=AuxRequest(lse=True))
    return mixed, aux.lse


@functools.cache
def _compiled_flex() -> Any:
    return torch.compile(_flex_attention, dynamic=False)


def _flex() -> Any:
    """FlexAttention compiled by itself, unless what calls it is being compiled: uncompiled it would write every score out."""
    return _flex_attention if torch.compiler.is_compiling() else _compiled_flex()
