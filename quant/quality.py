"""How far a model is from its parent on a text: perplexity and KL, with one code for every model compared."""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ..kernels.loss import distillation_sums_ref


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Means over the predicted tokens of a text, nats per token."""

    tokens: int
    kl: float                     # KL(parent || model)
    cross_entropy: float
    parent_cross_entropy: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.cross_entropy)

    @property
    def parent_perplexity(self) -> float:
        return math.exp(self.parent_cross_entropy)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "perplexity": self.perplexity, "parent_perplexity": self.parent_perplexity}


@torch.no_grad()
def measure_quality(
    model: nn.Module, *, parent: nn.Module, rows: Sequence[Tensor], rows_per_batch: int = 8, chunk_rows: int = 1024,
    autocast_dtype: torch.dtype | None = None,
) -> Quality:
    """Run `model` and `parent` over token rows and compare their predictions.

    Shapes: rows int64 [T + 1] each, all of one length: T predictions a row. With several processes each takes every world-th batch; every one
        returns the figures of all.
    Errors: ValueError for no rows.
    """
    if not rows:
        raise ValueError("measure_quality: at least one row is needed; got none.")
    device = next(model.parameters()).device
    precision = contextlib.nullcontext() if autocast_dtype is None else torch.autocast(device.type, dtype=autocast_dtype)
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    batches = [rows[start: start + rows_per_batch] for start in range(0, len(rows), rows_per_batch)]
    totals = torch.zeros(4, dtype=torch.float64, device=device)   # kl, cross-entropy, the parent's, tokens
    for turn in range(-(-len(batches) // world)):
        index = turn * world + rank
        # a sharded model needs every rank in every forward: a rank without a batch runs the last one and does not count it
        batch = torch.stack(list(batches[min(index, len(batches) - 1)])).to(device)
        with precision:
            sums = distillation_sums_ref(
                hidden_states(model, batch[:, :-1]), teacher_hidden_TD=hidden_states(parent, batch[:, :-1]), head_VD=head_weight(model),
                teacher_head_VD=head_weight(parent), labels_T=batch[:, 1:].flatten(), chunk_rows=chunk_rows)
        if index < len(batches):
            totals += torch.tensor([float(sums.kl), float(sums.cross_entropy), float(sums.teacher_cross_entropy), batch[:, 1:].numel()],
                                   dtype=torch.float64, device=device)
    if world > 1:
        dist.all_reduce(totals)
    kl, ce, parent_ce, tokens = totals.tolist()
    return Quality(tokens=int(tokens), kl=kl / tokens, cross_entropy=ce / tokens, parent_cross_entropy=parent_ce / tokens)


def pool(parts: Sequence[Quality]) -> Quality:
    """One figure over several texts, weighted by their tokens. Errors: ValueError for none."""
    if not parts:
        raise ValueError("pool: at least one text is needed; got none.")
    tokens = sum(q.tokens for q in parts)

    def mean(values: Sequence[float]) -> float:
        return sum(v * q.tokens for v, q in zip(values, parts, strict=True)) / tokens

    return Quality(tokens=tokens, kl=mean([q.kl for q in parts]), cross_entropy=mean([q.cross_entropy for q in parts]),
                   parent_cross_entropy=mean([q.parent_cross_entropy for q in parts]))


def hidden_states(model: nn.Module, input_ids_BT: Tensor) -> Tensor:
    """Final hidden states (after the last norm) of a transformers causal model, [B * T, D]."""
    if isinstance(model, FSDPModule):   # its hooks gather the parameters around a call of the root, whose forward was replaced by this body
        states: Tensor = model(input_ids_BT)  # type: ignore[operator]
    else:
        states = model.model(input_ids=input_ids_BT, use_cache=False).last_hidden_state  # type: ignore[operator]
    return states.flatten(0, 1)


def head_weight(model: nn.Module) -> Tensor:
    """The head's weight, [V, D]."""
    weight: Tensor = model.lm_head.weight  # type: ignore[union-attr, assignment]
    return weight
