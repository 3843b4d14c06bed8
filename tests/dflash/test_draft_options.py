"""Every option of a draft, alone and together: trained, at work and as published it is one computation; and leaving it out shows."""

import dataclasses

import pytest
import torch
from draft_forms import (
    BOUNDS,
    CHUNKS,
    LENGTHS,
    MISTAKES_WITH_OPTIONS,
    WINDOW,
    deviation,
    dtype_of,
    embedding_of,
    frequencies,
    make_draft,
    make_target,
    published,
    published_logits,
    serve_form,
    train_form,
)
from tolerances import Bound, assert_within
from torch import nn

from kilotok.dflash.config import DraftConfig
from kilotok.dflash.model import rotary_frequencies

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 8.0, "beta_slow": 1.0}
MIXED = {"sliding_window": WINDOW, "full_attention_layers": (1,)}
TOGETHER = {"attention_sinks": True, "attention_value_scale": 0.612, "partial_rotary_factor": 0.5, "rope_scaling": YARN, "mask_embedding": True,
            "draft_vocab_size": 500, "logit_softcap": 20.0, "output_multiplier": 0.2, "input_embedding_scale": 8.0}
OPTIONS = {
    "sinks": {"attention_sinks": True}, "sinks and a window": {"attention_sinks": True, "sliding_window": WINDOW},
    "value scale": {"attention_value_scale": 0.612}, "partial rotary": {"partial_rotary_factor": 0.5},
    "yarn": {"rope_scaling": YARN}, "linear scaling": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "window in one layer": MIXED, "window in the other": {"sliding_window": WINDOW, "full_attention_layers": (0,)},
    "causal": {"causal": "always"}, "causal with a window": {"causal": "always", "sliding_window": WINDOW},
    "causal where it slides": {**MIXED, "causal": "sliding"},
    "mask embedding": {"mask_embedding": True}, "embedding scale": {"input_embedding_scale": 8.0}, "reduced vocabulary": {"draft_vocab_size": 500},
    "softcap and multiplier": {"logit_softcap": 20.0, "output_multiplier": 0.2}, "blocks of 16": {"block_size": 16},
    "blocks of 16, a window": {"block_size": 16, "sliding_window": 17},
    "together": {**TOGETHER, **MIXED, "causal": "sliding"}, "together, sliding, blocks of 16": {**TOGETHER, "block_size": 16, "sliding_window": 17}}
# transformers, and every engine with it, computes scaled frequencies in fp32; the papers' formulas are in fp64 here
SCALED = Bound(maximum=1e-4, rms=1e-4, reason="frequencies in fp32 against fp64, times 31 positions, through two layers of sharp attention")


@pytest.fixture(scope="module", params=[torch.float64, torch.float32], ids=["fp64", "fp32"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    return make_target(tmp_path_factory.mktemp("target") / "tiny", dtype=request.param)


@pytest.mark.parametrize("name", OPTIONS)
def test_training_serving_and_the_published_computation_agree(target: nn.Module, name: str) -> None:
    draft, head = make_draft(target, **{"window": None, **OPTIONS[name]}), embedding_of(target)   # type: ignore[arg-type]
    bound = BOUNDS[head.dtype]
    trained = train_form(draft, target, [(0, 3)], length=60)
    for d in (0, 3):
        served = serve_form(draft, target, d, head_VD=head)
        in_rounds = serve_form(draft, target, d, chunks=CHUNKS["rounds"], head_VD=head) if d == 3 else {}
        columns = slice(None) if draft.draft_ids is None else draft.draft_ids
        for position, logits in served.items():
            got = draft.logits(trained[0, d, position], head_UD=draft.head_rows(head))
            for read in (logits, *([in_rounds[position]] if position in in_rounds else [])):
                assert read.shape == (draft.config.num_drafts, 4096)
                assert_within(got, read[:, columns], bound=bound, what=f"{name}, document {d}, anchor at {position}")
        assert d == 0 or set(in_rounds) == {12, 13, 21, 23, 24, 29}
        assert set(served) == set(range(1, LENGTHS[d]))
        for position in (1, WINDOW, WINDOW + 1, 20):
            hidden = published(draft, target, d, position)
            expected = published_logits(draft, hidden, head_VD=head)
            is_drafted = expected[0].isfinite()
            assert torch.equal(served[position].isfinite(), expected.isfinite())   # nothing outside a reduced vocabulary is ever proposed
            limit = SCALED if draft.config.rope_scaling else bound
            assert_within(trained[0, d, position], hidden, bound=limit, what=f"{name}: training, document {d}, anchor at {position}")
            assert_within(served[position][:, is_drafted], expected[:, is_drafted], bound=limit, what=f"{name}: serving, document {d}, anchor at {position}")


@pytest.mark.parametrize("mistake", MISTAKES_WITH_OPTIONS)
def test_an_option_that_is_forgotten_breaks_the_bound(target: nn.Module, mistake: str) -> None:
    draft, bound = make_draft(target, window=None, **MISTAKES_WITH_OPTIONS[mistake]), BOUNDS[dtype_of(target)]   # type: ignore[arg-type]
    trained, served = train_form(draft, target, [(3,)], length=31), serve_form(draft, target, 3)
    for position in (1, 6, 20, 29):
        wrong = published(draft, target, 3, position, mistake=mistake)
        for form in (trained[0, 3, position], served[position]):
            assert deviation(form, wrong) > 100 * bound.maximum, f"{mistake} would pass with the anchor at {position}"


SHAPE = DraftConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=64, vocab_size=100,
                    target_layer_ids=(0,), num_target_layers=4, mask_token_id=99)


@pytest.mark.parametrize("scaling", [
    None, {"rope_type": "linear", "factor": 4.0}, YARN,
    {"rope_type": "yarn", "factor": 48.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0}])
@pytest.mark.parametrize("partial", [1.0, 0.5])
@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_frequencies_are_those_of_the_papers(theta: float, partial: float, scaling: dict[str, object] | None) -> None:
    config = dataclasses.replace(SHAPE, rope_theta=theta, partial_rotary_factor=partial, rope_scaling=scaling)
    got, factor = rotary_frequencies(config)
    expected, expected_factor = frequencies(config)
    assert got.shape == (config.rotary_dim // 2,) and got.dtype == torch.float64
    # each frequency on its own: the slow ones are small beside the first
    assert float((got / expected - 1).abs().max()) < (1e-14 if scaling is None else 1e-6)
    assert factor == pytest.approx(expected_factor, rel=1e-12)
