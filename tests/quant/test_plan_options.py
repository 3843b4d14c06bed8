"""The plan's options: expected counts, experts kept at higher precision, attention, router and shared experts, with bytes by hand."""

import json
from typing import Any

import pytest
from families import FAMILIES as KNOWN
from families import family_config
from torch import nn
from transformers import PretrainedConfig, Qwen2MoeConfig, Qwen3MoeConfig

from kilotok.quant.archs import build_model
from kilotok.quant.plan import PlanOptions, QuantPlan, make_plan

TINY = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 64,
        "pad_token_id": 0, "eos_token_id": 2, "bos_token_id": None, "num_hidden_layers": 3, "num_experts_per_tok": 2}
EXPERTS = "model.layers.*.mlp.experts"


def qwen3(**changes: Any) -> PretrainedConfig:
    return Qwen3MoeConfig(**{**TINY, "head_dim": 16, "num_experts": 5, "moe_intermediate_size": 96, "intermediate_size": 160, "tie_word_embeddings": True,
                             **changes})


def qwen2(**changes: Any) -> PretrainedConfig:
    return Qwen2MoeConfig(**{**TINY, "num_experts": 3, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 96, "intermediate_size": 160,
                             "tie_word_embeddings": False, **changes})


def plan_of(config: PretrainedConfig, **options: Any) -> QuantPlan:
    return make_plan(config, scale_mode="even", where="parent", options=PlanOptions(**options))


# --- how many there must be ---


def test_expected_counts_that_are_right_pass() -> None:
    counts = {"experts": 4, "shared_experts": 6, "attention": 12, "router": 2}
    plan = plan_of(qwen2(mlp_only_layers=[1]), shared_experts=True, attention="mxfp8", router="mxfp8", expected=counts)
    assert {role: sum(w.role == role for w in plan.weights) for role in counts} == counts
    assert len(plan_of(qwen3(), expected={"experts": 6, "attention": 0}).weights) == 6


@pytest.mark.parametrize(("options", "said"), [
    ({"expected": {"experts": 7}}, r"experts must be 7 weights; found 6 \(model\.layers\.0\..*gate_up_proj \.\.\. model\.layers\.2\..*down_proj\)"),
    ({"expected": {"attention": 1}}, r"names 1 attention, but quant\.attention is not set"),
    ({"expected": {"attention": 11}, "attention": "fp8_block"}, r"attention must be 11 weights; found 12 "),
])
def test_expected_counts_that_are_wrong_stop_the_plan(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"^parent: quant.expected: {said}"):
        plan_of(qwen3(), **options)


def test_expected_of_an_unknown_role_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^quant\.expected: roles are experts, shared_experts, attention, router; got 'expert'"):
        PlanOptions(expected={"expert": 6})


# --- what is kept at higher precision ---


@pytest.mark.parametrize(("keep", "kept"), [
    (("model.layers.1.mlp.experts.down_proj",), {(1, "down_proj")}),
    (("model.layers.0.*",), {(0, "gate_up_proj"), (0, "down_proj")}),
    (("*.down_proj", "model.layers.2.*"), {(0, "down_proj"), (1, "down_proj"), (2, "down_proj"), (2, "gate_up_proj")}),
])
@pytest.mark.parametrize("fmt", ["bf16", "mxfp8"])
def test_keep_takes_names_and_patterns(keep: tuple[str, ...], kept: set[tuple[int, str]], fmt: str) -> None:
    plan = plan_of(qwen3(), keep=keep, keep_format=fmt)
    assert {w.name: w.format for w in plan.experts} == {
        f"model.layers.{i}.mlp.experts.{leaf}": fmt if (i, leaf) in kept else "mxfp4" for i in range(3) for leaf in ("gate_up_proj", "down_proj")}
    weights = {"gate_up_proj": 5 * 192 * 64, "down_proj": 5 * 64 * 96}
    elements = sum(weights[leaf] for _, leaf in kept)
    everything = 3 * sum(weights.values())
    kept_bits = {"bf16": 16, "mxfp8": 8.25}[fmt]
    assert plan.bits_per_expert_weight == (kept_bits * elements + 4.25 * (everything - elements)) / everything
    assert plan.bytes_after == plan.bytes_before - 2 * everything + plan.bits_per_expert_weight * everything / 8


def test_kept_layers_have_a_row_of_their_own() -> None:
    plan = plan_of(qwen3(), keep=("model.layers.0.*",))
    found = {(r.pattern, r.treatment): (r.count, r.bytes_before, r.bytes_after) for r in plan.rows if "experts" in r.pattern}
    assert found == {
        (f"{EXPERTS}.gate_up_proj", "kept bfloat16"): (1, 122880, 122880), (f"{EXPERTS}.down_proj", "kept bfloat16"): (1, 61440, 61440),
        (f"{EXPERTS}.gate_up_proj", "MXFP4"): (2, 245760, 65280), (f"{EXPERTS}.down_proj", "MXFP4"): (2, 122880, 32640)}


def test_a_kept_weight_of_an_fp32_parent_takes_fp32_bytes() -> None:
    """The export writes it in the parent's dtype."""
    found = {r.treatment: (r.bytes_before, r.bytes_after) for r in plan_of(qwen3(dtype="float32"), keep=("model.layers.0.*",)).rows
             if r.pattern == f"{EXPERTS}.down_proj"}
    assert found == {"kept float32": (4 * 30720, 4 * 30720), "MXFP4": (8 * 30720, 61440 * 17 // 32)}


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^parent: quant\.keep: 'model\.layers\.3\.\*' matches no expert weight\. They are model\.layers\.0.*\(6\)"):
        plan_of(qwen3(), keep=("model.layers.0.*", "model.layers.3.*"))


def test_keeping_everything_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^parent: quant\.keep: covers all 6 expert weights"):
        plan_of(qwen3(), keep=("*",))


# --- attention, router, shared experts ---


def test_bytes_of_every_treatment_by_hand() -> None:
    """Qwen2-MoE: 3 layers, the middle one dense; D = 64, 3 experts of F = 32, shared F = 96, heads 4 and 2 of 16."""
    plan = plan_of(qwen2(mlp_only_layers=[1]), shared_experts=True, attention="mxfp8", router="mxfp8",
                   keep=("model.layers.0.*.down_proj",), keep_format="mxfp8")
    found = {(r.pattern, r.treatment): (r.count, r.bytes_before, r.bytes_after) for r in plan.rows if not r.treatment.startswith("kept")}
    attention = "model.layers.*.self_attn"
    assert found == {
        (f"{EXPERTS}.gate_up_proj", "MXFP4"): (2, 2 * 2 * 12288, 2 * 12288 * 17 // 32),          # 3 * 64 * 64
        (f"{EXPERTS}.down_proj", "MXFP4"): (1, 2 * 6144, 6144 * 17 // 32),                       # 3 * 64 * 32
        (f"{EXPERTS}.down_proj", "MXFP8"): (1, 2 * 6144, 6144 * 33 // 32),
        **{(f"model.layers.*.mlp.shared_expert.{p}_proj.weight", "MXFP4"): (2, 2 * 2 * 6144, 2 * 6144 * 17 // 32) for p in ("gate", "up", "down")},   # 96 * 64
        **{(f"{attention}.{p}_proj.weight", "MXFP8"): (3, 3 * 2 * n, 3 * n * 33 // 32) for p, n in (("q", 4096), ("k", 2048), ("v", 2048), ("o", 4096))},
        ("model.layers.*.mlp.gate.weight", "MXFP8"): (2, 2 * 2 * 192, 2 * 2 * 192),              # 3 * 64, written as bf16
    }
    assert plan.bytes_after == plan.bytes_before - sum(before - after for _, before, after in found.values())
    assert {r.reason for r in plan.rows if r.treatment == "MXFP8"} == {"routed experts", "attention, as asked", "router, as asked"}


def test_fp8_tiles_count_their_bf16_scales() -> None:
    """80 x 64 and 64 x 80 are one tile each, 160 x 64 are two."""
    rows = {r.pattern: r for r in plan_of(qwen3(num_attention_heads=10, num_key_value_heads=5), attention="fp8_block").rows if r.treatment == "FP8 128x128"}
    assert {p.split(".")[-2]: (r.count, r.shape, r.bytes_after) for p, r in rows.items()} == {
        "q_proj": (3, (160, 64), 3 * (10240 + 2 * 2)), "k_proj": (3, (80, 64), 3 * (5120 + 2)), "v_proj": (3, (80, 64), 3 * (5120 + 2)),
        "o_proj": (3, (64, 160), 3 * (10240 + 2 * 2))}


@pytest.mark.parametrize("name", [n for n in KNOWN if n != "gpt_oss"])
@pytest.mark.parametrize("fmt", ["mxfp8", "fp8_block"])
def test_attention_of_every_family_is_its_linear_layers(name: str, fmt: str) -> None:
    config = family_config(name)
    plan = plan_of(config, attention=fmt)
    model = build_model(config, device="meta")
    inside = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Linear) and ("self_attn." in n or "linear_attn." in n)}
    found = [w for w in plan.weights if w.role == "attention"]
    assert inside and {w.name for w in found} == inside and {w.format for w in found} == {fmt}
    assert len(plan.experts) == 2 * len(KNOWN[name].layers)


@pytest.mark.parametrize("name", KNOWN)
def test_the_router_of_every_family_is_one_matrix_a_layer(name: str) -> None:
    plan = plan_of(family_config(name), router="mxfp8")
    routers = [w for w in plan.weights if w.role == "router" and "shared_expert_gate" not in w.name]
    assert [w.shape[0] for w in routers] == [4] * len(KNOWN[name].layers)
    row_of = {r.pattern: r for r in plan.rows if r.reason == "router, as asked"}
    assert row_of and all(r.bytes_before == r.bytes_after for r in row_of.values())


@pytest.mark.parametrize("name", [n for n, f in KNOWN.items() if not f.shared and n != "gpt_oss"])
def test_shared_experts_of_a_family_without_them_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"^parent: quant\.shared_experts: this model has no such weight\. Leave the option out"):
        plan_of(family_config(name), shared_experts=True)


def test_a_shared_expert_whose_width_is_no_multiple_of_32_is_refused_only_when_asked_for() -> None:
    config = qwen2(shared_expert_intermediate_size=48)
    assert len(plan_of(config).weights) == 6
    with pytest.raises(ValueError, match=r"^parent: model\.layers\.0\.mlp\.shared_expert\.down_proj\.weight: .*got 48 in shape \(64, 48\)"):
        plan_of(config, shared_experts=True)


def test_the_control_plans_the_same_weights_and_quantizes_none() -> None:
    options = {"shared_experts": True, "attention": "mxfp8", "router": "mxfp8", "keep": ("model.layers.0.*",), "keep_format": "mxfp8"}
    plan, control = plan_of(qwen2(), **options), plan_of(qwen2(), experts="bf16", **options)
    assert [w.name for w in control.weights] == [w.name for w in plan.weights]
    assert {w.format for w in control.weights} == {"bf16"}
    assert control.bytes_after == control.bytes_before and {r.treatment for r in control.rows} == {"kept bfloat16"}


# --- gpt-oss, whose layout on disk has one format ---


@pytest.mark.parametrize(("options", "said"), [
    ({"attention": "mxfp8"}, r"quant\.attention: the layout of gpt-oss holds MXFP4 experts and bf16, nothing else; got 'mxfp8'"),
    ({"attention": "fp8_block"}, r"quant\.attention: .*got 'fp8_block'"),
    ({"shared_experts": True}, r"quant\.shared_experts: "),
    ({"keep": ("model.layers.0.*",), "keep_format": "mxfp8"}, r"quant\.keep_format: .*got 'mxfp8'"),
    ({"keep": ("model.layers.1.mlp.experts.down_proj",)}, r"quant\.keep: .*got model\.layers\.1\.mlp\.experts\.down_proj alone\. Keep model\.layers\.1"),
    ({"keep": ("model.layers.0.*", "*.1.*.gate_up_proj")}, r"quant\.keep: .*got model\.layers\.1\.mlp\.experts\.gate_up_proj alone"),
])
def test_what_the_layout_of_gpt_oss_cannot_say_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"^parent: {said}"):
        plan_of(family_config("gpt_oss"), **options)


def test_gpt_oss_may_keep_whole_layers_and_round_its_router() -> None:
    plan = plan_of(family_config("gpt_oss"), keep=("model.layers.1.*",), router="mxfp8")
    assert [w.format for w in plan.experts] == ["mxfp4", "mxfp4", "bf16", "bf16"]
    assert len(plan_of(family_config("gpt_oss"), experts="bf16", attention="mxfp8").experts) == 4   # the control writes nothing


# --- options in a run's record ---


def test_options_survive_their_record() -> None:
    options = PlanOptions(keep=("a", "b*"), keep_format="mxfp8", shared_experts=True, attention="fp8_block", router="mxfp8", expected={"experts": 3})
    assert PlanOptions.from_json({"scale_mode": "even", "format": "mxfp4", **json.loads(json.dumps(options.to_json()))}) == options
    assert PlanOptions.from_json({"scale_mode": "even", "format": "mxfp4"}) == PlanOptions()   # the record of a run before there were options
