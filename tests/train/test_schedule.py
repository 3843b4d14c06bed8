"""Learning-rate schedules at their corners, and the optimizers a recipe of `train dflash-distill` can ask for."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from kilotok.dflash.config import DraftConfig
from kilotok.dflash.model import DraftModel
from kilotok.train.distill import DistillModule
from kilotok.train.distill_config import DistillRecipe, MuonConfig
from kilotok.train.schedule import Schedule, rate_share, warmup_cosine


def curve(schedule: Schedule, *, warmup_steps: int = 4, max_steps: int = 20, final_ratio: float = 0.1, decay_share: float = 0.25) -> list[float]:
    return [rate_share(s, schedule=schedule, warmup_steps=warmup_steps, max_steps=max_steps, final_ratio=final_ratio, decay_share=decay_share)
            for s in range(max_steps + 5)]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
def test_every_schedule_warms_up_alike_and_stays_at_its_end(schedule: Schedule) -> None:
    values = curve(schedule)
    assert values[:4] == [0.25, 0.5, 0.75, 1.0] and values[4] == 1.0
    assert values[20:] == pytest.approx([1.0 if schedule == "constant" else 0.1] * 5, rel=1e-12)
    assert all(b <= a for a, b in itertools.pairwise(values[3:]))
    assert curve(schedule, warmup_steps=0)[0] == 1.0
    assert all(v == 1.0 for v in curve(schedule, warmup_steps=0, final_ratio=1.0))
    assert curve(schedule, warmup_steps=20)[:20] == [(s + 1) / 20 for s in range(20)]


def test_linear_is_torchs() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    theirs = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.1, total_iters=20)
    for share in curve("linear", warmup_steps=0):
        assert share == pytest.approx(theirs.get_last_lr()[0], rel=1e-12)
        optimizer.step()
        theirs.step()


def test_wsd_is_flat_until_its_share_of_the_steps_is_left() -> None:
    values = curve("wsd")
    assert values[3:16] == [1.0] * 13   # a quarter of 20 steps: from step 15, which is still at the peak
    assert values[15:21] == pytest.approx([1 - 0.9 * k / 5 for k in range(6)], rel=1e-12)
    assert curve("wsd", decay_share=1.0) == curve("linear")   # never before the warm-up is over
    assert curve("wsd", final_ratio=0.0)[20] == 0.0


def test_the_cosine_is_qats() -> None:
    assert curve("cosine") == [warmup_cosine(s, warmup_steps=4, max_steps=20, final_ratio=0.1) for s in range(25)]


def test_a_recipes_warm_up_is_steps_or_a_share_of_them() -> None:
    by_share, by_steps = MuonConfig(warmup_ratio=0.25, schedule="linear"), MuonConfig(warmup_steps=5, schedule="linear")
    assert [by_share.rate_share(s, max_steps=20) for s in range(21)] == [by_steps.rate_share(s, max_steps=20) for s in range(21)]
    none = MuonConfig(warmup_ratio=0.0, final_lr_ratio=0.0)   # zero is a number, not a default
    assert none.rate_share(0, max_steps=20) == 1.0 and none.rate_share(20, max_steps=20) == 0.0


@pytest.mark.parametrize(("options", "message"), [
    ({"kind": "sgd"}, r"^optim.kind: must be one of muon, adamw; got 'sgd'"),
    ({"schedule": "step"}, r"^optim.schedule: must be one of cosine, linear, constant, wsd; got 'step'"),
    ({"warmup_ratio": 1.5}, r"^optim.warmup_ratio: must lie in \[0, 1\]; got 1.5"),
    ({"warmup_ratio": 0.1, "warmup_steps": 3}, r"^optim.warmup_ratio: excludes warmup_steps; got 0.1 and 3"),
    ({"decay_share": 0.0}, r"^optim.decay_share: must lie in \(0, 1\]; got 0.0"),
])
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MuonConfig(**options)


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_matrices_are_trained_by_the_optimizer_that_is_asked_for(kind: Any) -> None:
    draft = DraftModel(DraftConfig(hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=4,
                                   vocab_size=16, target_layer_ids=(0,), num_target_layers=2, mask_token_id=3))
    optim = MuonConfig(kind=kind, muon_lr=0.5, adamw_lr=0.25, warmup_steps=2)
    module = DistillModule(DistillRecipe(optim=optim), draft=draft, target=nn.Linear(2, 2))
    groups = module.configure_optimizers()["optimizer"].param_groups
    of_parameter = {name: (g["use_muon"], g["initial_lr"], g["lr"]) for g in groups for name in g["param_names"]}
    assert of_parameter.keys() == {n for n, _ in draft.named_parameters()}
    for name, p in draft.named_parameters():
        expected = (True, 0.5, 0.25) if kind == "muon" and p.dim() == 2 else (False, 0.25, 0.125)   # half way up the warm-up of two steps
        assert of_parameter[name] == expected, name


def test_a_decay_of_zero_is_zero() -> None:
    """verl-SpeCo#91: `value or default` takes a zero for nothing said."""
    draft = DraftModel(DraftConfig(hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=4,
                                   vocab_size=16, target_layer_ids=(0,), num_target_layers=2, mask_token_id=3))
    optim = MuonConfig(muon_weight_decay=0.0, adamw_weight_decay=0.0, momentum=0.0, betas=(0.0, 0.0), final_lr_ratio=0.0)
    groups = DistillModule(DistillRecipe(optim=optim), draft=draft, target=nn.Linear(2, 2)).configure_optimizers()["optimizer"].param_groups
    assert {g["use_muon"] for g in groups} == {True, False}
    for g in groups:
        assert g["weight_decay"] == 0.0 and (g["momentum"] == 0.0 if g["use_muon"] else tuple(g["betas"]) == (0.0, 0.0))
    assert optim.rate_share(10, max_steps=10) == 0.0
