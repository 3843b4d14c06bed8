"""Counting which experts the tokens reach, for every family, and the figures made of it.

Legend: T tokens, E experts, K experts per token.
"""

import math
from typing import Any

import pytest
import torch
from families import FAMILIES, family_model
from torch import nn

from kilotok.quant.archs import find_arch
from kilotok.quant.coverage import ExpertCounts, LayerCoverage, coverage_layers, coverage_record, never_routed
from kilotok.quant.plan import PlannedWeight, find_experts

IDS = torch.arange(3, 27).view(2, 12)


def counts_of(model: Any) -> ExpertCounts:
    return ExpertCounts(model, experts=find_experts(model, arch=find_arch(model.config.model_type, where="test")))


def forward(model: Any, ids: torch.Tensor = IDS) -> Any:
    return model.model(input_ids=ids, use_cache=False).last_hidden_state


@pytest.mark.parametrize("name", FAMILIES)
def test_every_token_of_every_family_is_counted_at_its_k_experts(name: str) -> None:
    model = family_model(name).float()
    counts = counts_of(model)
    forward(model)   # not counting
    assert all(sum(c) == 0 for c in counts.totals().values())
    counts.counting = True
    forward(model)
    totals = counts.totals()
    assert len(totals) == len(FAMILIES[name].layers)
    for per_expert in totals.values():
        assert len(per_expert) == 4 and sum(per_expert) == IDS.numel() * model.config.num_experts_per_tok
        assert max(per_expert) <= IDS.numel()   # a token goes to different experts


@pytest.mark.parametrize("name", ["qwen3_moe", "llama4_text", "gpt_oss"])
def test_counts_are_those_of_the_router(name: str) -> None:
    """By the gradient: an expert without a token gets none, and an expert of all tokens counts all."""
    model = family_model(name, num_local_experts=8, num_experts=8).float()
    counts = counts_of(model)
    counts.counting = True
    forward(model, ids=torch.tensor([[5]])).square().sum().backward()   # one token: K of 8 experts
    weights = {w.module: model.get_parameter(w.name) for w in find_experts(model, arch=find_arch(model.config.model_type, where="test"))}
    totals = counts.totals()
    assert weights.keys() == totals.keys()
    for module, weight in weights.items():
        touched = weight.grad.flatten(1).abs().amax(1) > 0   # type: ignore[union-attr]
        assert totals[module] == touched.int().tolist() and sum(totals[module]) == model.config.num_experts_per_tok


def test_a_checkpointed_layer_counts_once() -> None:
    model: Any = family_model("mixtral").float()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    calls: list[int] = []
    model.model.layers[0].mlp.experts.register_forward_pre_hook(lambda *_: calls.append(1))
    counts = counts_of(model)
    counts.counting = True
    loss = forward(model).square().mean()
    counts.counting = False
    loss.backward()
    assert len(calls) == 2   # the layer did run again
    assert all(sum(c) == IDS.numel() * 2 for c in counts.totals().values())


def test_counts_go_on_from_those_before_and_stop_when_detached() -> None:
    model = family_model("mixtral").float()
    counts = counts_of(model)
    counts.counting = True
    forward(model)
    once = counts.totals()
    again = counts_of(model)
    again.before, again.counting = once, True
    forward(model)
    assert again.totals() == {name: [2 * c for c in per_expert] for name, per_expert in once.items()}
    again.detach()
    forward(model)
    assert again.totals() == {name: [2 * c for c in per_expert] for name, per_expert in once.items()}


def test_a_module_whose_choices_cannot_be_read_is_refused() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.zeros(4, 2, 2))

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden

    model = nn.ModuleDict({"mlp": nn.ModuleDict({"experts": Experts()})})
    weight = PlannedWeight(name="mlp.experts.gate_up_proj", shape=(4, 2, 2))
    with pytest.raises(NotImplementedError, match=r"mlp\.experts: Experts is called without expert ids"):
        ExpertCounts(model, experts=[weight])


def test_floating_expert_ids_are_refused() -> None:
    model: Any = family_model("mixtral").float()
    counts = counts_of(model)
    counts.counting = True
    experts = model.model.layers[0].mlp.experts
    with pytest.raises(TypeError, match=r"must be expert ids; got torch\.float32"):
        experts(torch.zeros(1, 64), torch.zeros(1, 2), torch.zeros(1, 2))


def test_figures_by_hand() -> None:
    layer = LayerCoverage.of("m", [0, 2, 6, 0])
    assert (layer.experts, layer.tokens_min, layer.tokens_median, layer.tokens_max, layer.never_routed) == (4, 0, 1.0, 6, [0, 3])
    assert layer.max_over_mean == 3.0
    assert layer.variation == pytest.approx(math.sqrt((4 + 0 + 16 + 4) / 4) / 2)
    assert layer.entropy == pytest.approx(-(0.25 * math.log(0.25) + 0.75 * math.log(0.75)) / math.log(4))
    even = LayerCoverage.of("m", [5, 5])
    assert (even.max_over_mean, even.variation, even.never_routed) == (1.0, 0.0, []) and even.entropy == pytest.approx(1.0)
    assert LayerCoverage.of("m", [0, 7]).entropy == 0.0
    assert LayerCoverage.of("m", [7]).entropy == 1.0


def test_experts_never_routed_are_named() -> None:
    record = coverage_record({"a.experts": [1, 0], "b.experts": [1, 1], "c.experts": [0, 0, 3]})
    assert never_routed(coverage_layers(record)) == ["a.experts.1", "c.experts.0", "c.experts.1"]


def test_no_token_at_all_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"a\.experts: at least one token"):
        coverage_record({"a.experts": [0, 0]})
