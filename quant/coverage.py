"""How a run's tokens fell on the experts: load balance, and which experts no token ever reached.

An expert that no token was routed to is quantized like the others, but training gave it no gradient: it stays what round-to-nearest made
of it. The counts are one integer an expert, on the device, added to by a hook and read at the end: no step waits for them.

What is counted is a choice of the router, one token to K experts. Experts modules are called as (hidden, expert_ids_TK, weights), so the ids
are read there; a module called with hidden states alone (llama4) gets rows for every expert, and the ids are those its router's logits give.

Legend: T tokens, E experts, K experts per token.
"""

import inspect
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .plan import PlannedWeight


@dataclass(frozen=True, kw_only=True)
class LayerCoverage:
    """One layer's routing over a run. Load is 1.0 for every expert when it is balanced."""

    module: str
    experts: int
    tokens_min: int           # choices of the least and the most used expert, and of the one in the middle
    tokens_median: float
    tokens_max: int
    max_over_mean: float      # 1 balanced, E all tokens on one expert
    variation: float          # standard deviation / mean, 0 balanced
    entropy: float            # of the shares, relative to uniform: 1 balanced, 0 all tokens on one expert
    never_routed: list[int]   # expert ids

    @classmethod
    def of(cls, module: str, tokens_per_expert_E: Sequence[int]) -> "LayerCoverage":
        """Errors: ValueError when no token was counted."""
        counts, total = list(tokens_per_expert_E), sum(tokens_per_expert_E)
        if total == 0:
            raise ValueError(f"coverage: {module}: at least one token must have been counted; got none. Train a step first.")
        mean = total / len(counts)
        entropy = -sum(c / total * math.log(c / total) for c in counts if c)
        return cls(module=module, experts=len(counts), tokens_min=min(counts), tokens_median=statistics.median(counts), tokens_max=max(counts),
                   max_over_mean=max(counts) / mean, variation=statistics.pstdev(counts) / mean,
                   entropy=entropy / math.log(len(counts)) if len(counts) > 1 else 1.0, never_routed=[e for e, c in enumerate(counts) if c == 0])


class ExpertCounts:
    """Counts the tokens of every expert of a model while `counting` is true.

    counting: leave it false in backward, where a checkpointed layer runs a second time. before: the `totals()` of an earlier process of the run.
    Errors: NotImplementedError for a module whose choices can be read neither from its call nor from its router.
    """

    def __init__(self, model: nn.Module, *, experts: Sequence[PlannedWeight]) -> None:
        self.before: dict[str, list[int]] = {}
        self.counting = False
        self._counts: dict[str, Tensor] = {}
        self._handles: list[Any] = []
        for name, weight in {w.module: w for w in experts}.items():
            self._counts[name] = torch.zeros(weight.shape[0], dtype=torch.int64, device=model.get_parameter(weight.name).device)
            module = model.get_submodule(name)
            if len(inspect.signature(module.forward).parameters) > 1:
                self._handles.append(module.register_forward_pre_hook(self._count_call(name), with_kwargs=True))
                continue
            router = getattr(model.get_submodule(name.rsplit(".", 1)[0]), "router", None)
            if not hasattr(router, "top_k"):
                raise NotImplementedError(f"coverage: {name}: {type(module).__name__} is called without expert ids, and no `router` with a `top_k` stands "
                                          "beside it. Describe in quant/coverage.py how this family's choices are read.")
            self._handles.append(router.register_forward_hook(self._count_router(name)))   # type: ignore[union-attr]

    def detach(self) -> None:
        """Hooks off; the counts stay."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def totals(self) -> dict[str, list[int]]:
        """Experts module -> choices of each expert, over the run and over all ranks. Every rank must call it."""
        totals = {}
        for name, counts in self._counts.items():
            everywhere = counts.clone()
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                torch.distributed.all_reduce(everywhere)
            before = self.before.get(name, [0] * len(everywhere))
            totals[name] = [int(now) + then for now, then in zip(everywhere.tolist(), before, strict=True)]
        return totals

    def _count_call(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.counting:
                self._add(name, args[1] if len(args) > 1 else next(iter(kwargs.values())))
        return hook

    def _count_router(self, name: str) -> Any:
        def hook(router: Any, args: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
            if self.counting:   # llama4's router returns (scores, logits), both [T, E], and picks by torch.topk of the logits
                self._add(name, torch.topk(output[1].detach(), router.top_k, dim=-1).indices)
        return hook

    def _add(self, name: str, expert_ids_TK: Tensor) -> None:
        if expert_ids_TK.is_floating_point():
            raise TypeError(f"coverage: {name}: the second argument must be expert ids; got {expert_ids_TK.dtype}. "
                            "Describe in quant/coverage.py how this family's choices are read.")
        ids = expert_ids_TK.detach().flatten().to(torch.int64)
        if self._counts[name].device != ids.device:   # weights that wait on the host; once, at the first batch
            self._counts[name] = self._counts[name].to(ids.device)
        self._counts[name].scatter_add_(0, ids, torch.ones_like(ids))   # bincount would wait for the device


def coverage_record(totals: dict[str, list[int]]) -> dict[str, Any]:
    """The figures of every layer, for RUN/meta.json."""
    return {"layers": [asdict(LayerCoverage.of(name, counts)) for name, counts in totals.items()]}


def coverage_layers(record: dict[str, Any]) -> list[LayerCoverage]:
    return [LayerCoverage(**layer) for layer in record["layers"]]


def never_routed(layers: Sequence[LayerCoverage]) -> list[str]:
    """Every expert that no token reached: `<module>.<expert id>`."""
    return [f"{layer.module}.{e}" for layer in layers for e in layer.never_routed]
