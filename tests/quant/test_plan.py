"""The plan: exactly the routed experts, with counts and bytes worked out by hand here."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import MODES, ScaleMode
from torch import nn
from transformers import LlamaConfig, OlmoeConfig, PretrainedConfig, Qwen2MoeConfig, Qwen3MoeConfig

import kilotok.quant.plan as plan_module
from kilotok.quant.archs import build_model, find_arch, load_config
from kilotok.quant.plan import PlanRow, QuantPlan, find_experts, make_plan

TINY = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 64,
        "pad_token_id": 0, "eos_token_id": 2, "bos_token_id": None}


def qwen3(**changes: Any) -> PretrainedConfig:
    return Qwen3MoeConfig(**{**TINY, "num_hidden_layers": 3, "head_dim": 16, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 96,
                             "intermediate_size": 160, "tie_word_embeddings": True, **changes})


def qwen2(**changes: Any) -> PretrainedConfig:
    return Qwen2MoeConfig(**{**TINY, "num_hidden_layers": 3, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                             "shared_expert_intermediate_size": 96, "intermediate_size": 160, "tie_word_embeddings": False, **changes})


def olmoe(**changes: Any) -> PretrainedConfig:
    return OlmoeConfig(**{**TINY, "num_key_value_heads": 4, "num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32,
                          "tie_word_embeddings": False, **changes})


def plan_of(config: PretrainedConfig, scale_mode: ScaleMode = "even") -> QuantPlan:
    return make_plan(config, scale_mode=scale_mode, where="parent")


def row(plan: QuantPlan, pattern: str) -> PlanRow:
    found = [r for r in plan.rows if r.pattern == pattern]
    assert len(found) == 1, f"{pattern}: {len(found)} rows of {[r.pattern for r in plan.rows]}"
    return found[0]


def tensors_of(plan: QuantPlan, reason: str) -> dict[str, int]:
    return {r.pattern: r.count for r in plan.rows if r.reason == reason}


EXPERTS = "model.layers.*.mlp.experts"
# config -> (layers with experts, shape of gate_up_proj, shape of down_proj)
FAMILIES = {
    "qwen3_moe": (qwen3(), (0, 1, 2), (5, 192, 64), (5, 64, 96)),
    "qwen3_moe_dense_layer": (qwen3(mlp_only_layers=[1]), (0, 2), (5, 192, 64), (5, 64, 96)),
    "qwen3_moe_sparse_step": (qwen3(decoder_sparse_step=2), (1,), (5, 192, 64), (5, 64, 96)),
    "qwen2_moe": (qwen2(), (0, 1, 2), (3, 64, 64), (3, 64, 32)),
    "qwen2_moe_dense_layer": (qwen2(mlp_only_layers=[0]), (1, 2), (3, 64, 64), (3, 64, 32)),
    "olmoe": (olmoe(), (0, 1), (4, 64, 64), (4, 64, 32)),
}


@pytest.mark.parametrize(("config", "layers", "gate_up", "down"), FAMILIES.values(), ids=FAMILIES)
def test_exactly_the_routed_experts_are_taken(
    config: PretrainedConfig, layers: tuple[int, ...], gate_up: tuple[int, ...], down: tuple[int, ...],
) -> None:
    plan = plan_of(config)
    expected = [(f"model.layers.{i}.mlp.experts.{leaf}", shape) for i in layers for leaf, shape in (("gate_up_proj", gate_up), ("down_proj", down))]
    assert [(e.name, e.shape) for e in plan.experts] == expected
    assert {e.module for e in plan.experts} == {f"model.layers.{i}.mlp.experts" for i in layers}
    assert {r.pattern: (r.count, r.shape, r.reason) for r in plan.rows if r.treatment == "MXFP4"} == {
        f"{EXPERTS}.gate_up_proj": (len(layers), gate_up, "routed experts"), f"{EXPERTS}.down_proj": (len(layers), down, "routed experts")}


@pytest.mark.parametrize(("config", "layers", "gate_up", "down"), FAMILIES.values(), ids=FAMILIES)
def test_every_parameter_is_in_one_row_and_bytes_add_up(
    config: PretrainedConfig, layers: tuple[int, ...], gate_up: tuple[int, ...], down: tuple[int, ...],
) -> None:
    plan = plan_of(config)
    parameters = dict(build_model(config, device="meta").named_parameters())
    elements = sum(p.numel() for p in parameters.values())
    experts = len(layers) * (gate_up[0] * gate_up[1] * gate_up[2] + down[0] * down[1] * down[2])
    assert sum(r.count for r in plan.rows) == len(parameters)
    assert plan.bytes_before == 2 * elements
    assert plan.bytes_after == 2 * (elements - experts) + experts // 2 + experts // 32   # half a byte a weight, one byte for 32
    assert sum(r.bytes_before for r in plan.rows if r.treatment == "MXFP4") == 2 * experts
    for r in plan.rows:
        assert r.treatment in ("MXFP4", "kept bfloat16")
        assert (r.bytes_before == r.bytes_after) == (r.treatment != "MXFP4"), r.pattern


def test_bytes_of_a_model_by_hand() -> None:
    """Qwen3-MoE: 3 layers, the middle one dense; D = 64, 5 experts of F = 96, dense F = 160, heads 4 and 2 of 16, V = 128 tied."""
    plan = plan_of(qwen3(mlp_only_layers=[1]))
    gate_up, down = row(plan, f"{EXPERTS}.gate_up_proj"), row(plan, f"{EXPERTS}.down_proj")
    assert (gate_up.bytes_before, gate_up.bytes_after) == (245760, 65280)   # 2 * 5 * 192 * 64 = 122880 weights
    assert (down.bytes_before, down.bytes_after) == (122880, 32640)         # 2 * 5 * 64 * 96 = 61440 weights
    dense = row(plan, "model.layers.*.mlp.down_proj.weight")
    assert (dense.count, dense.shape, dense.bytes_before) == (1, (64, 160), 20480)
    # kept elements: embedding 8192; attention 3 * (4096 + 2048 + 2048 + 4096); dense 3 * 10240; routers 2 * 320; norms 7 * 64 + 6 * 16
    assert plan.bytes_before == 2 * (8192 + 36864 + 30720 + 640 + 544) + 245760 + 122880 == 522560
    assert plan.bytes_after == 2 * 76960 + 65280 + 32640 == 251840


@pytest.mark.parametrize(("config", "layers", "gate_up", "down"), FAMILIES.values(), ids=FAMILIES)
def test_reasons(config: PretrainedConfig, layers: tuple[int, ...], gate_up: tuple[int, ...], down: tuple[int, ...]) -> None:
    plan = plan_of(config)
    attention = {r.pattern for r in plan.rows if "self_attn" in r.pattern}
    norms = {r.pattern for r in plan.rows if "norm" in r.pattern}
    assert attention and norms
    assert set(tensors_of(plan, "norm")) == norms
    assert set(tensors_of(plan, "attention")) == attention - norms
    routers = {r.pattern for r in plan.rows if r.pattern.endswith(("mlp.gate.weight", "shared_expert_gate.weight"))}
    assert tensors_of(plan, "router") == dict.fromkeys(routers, len(layers)) and "model.layers.*.mlp.gate.weight" in routers
    assert tensors_of(plan, "embedding") == {"model.embed_tokens.weight": 1}
    assert tensors_of(plan, "head") == ({} if config.tie_word_embeddings else {"lm_head.weight": 1})
    for r in plan.rows:
        if r.reason != "routed experts":
            assert r.treatment == "kept bfloat16", f"{r.pattern} would be quantized"


def test_dense_layers_and_shared_experts_are_kept() -> None:
    """All three have leaves of the same names: experts, the dense layer 1 and the shared experts of layers 0 and 2."""
    plan = plan_of(qwen2(mlp_only_layers=[1]))
    shared = {f"model.layers.*.mlp.shared_expert.{p}_proj.weight": 2 for p in ("gate", "up", "down")}
    dense = {f"model.layers.*.mlp.{p}_proj.weight": 1 for p in ("gate", "up", "down")}
    assert tensors_of(plan, "shared expert or dense layer") == {**shared, **dense}
    assert row(plan, "model.layers.*.mlp.shared_expert.down_proj.weight").shape == (64, 96)
    assert row(plan, "model.layers.*.mlp.down_proj.weight").shape == (64, 160)
    assert row(plan, "model.layers.*.mlp.shared_expert_gate.weight").treatment == "kept bfloat16"
    assert len(plan.experts) == 4


@pytest.mark.parametrize(("dtype", "element_bytes"), [("bfloat16", 2), ("float32", 4), ("float16", 2), (None, 2)])
def test_bytes_follow_the_config_dtype(dtype: str | None, element_bytes: int) -> None:
    plan = plan_of(qwen3(dtype=dtype))
    before, after = row(plan, "model.embed_tokens.weight"), row(plan, f"{EXPERTS}.down_proj")
    assert before.bytes_before == before.bytes_after == 128 * 64 * element_bytes
    assert before.treatment == f"kept {dtype or 'bfloat16'}"
    assert (after.bytes_before, after.bytes_after) == (92160 * element_bytes, 46080 + 2880)   # packed size does not depend on it


def test_a_loaded_model_has_the_same_experts_as_its_plan() -> None:
    config = qwen2(mlp_only_layers=[1])
    model = build_model(config, device="cpu")
    assert find_experts(model, arch=find_arch("qwen2_moe", where="parent")) == plan_of(config).experts


def test_rank_and_owner_decide_not_names() -> None:
    """Look-alikes that no family of the catalogue has today: a 2-D fused weight, and a 3-D one outside the experts module."""
    layers = nn.ModuleDict()
    for i, (owner, shape) in enumerate([("experts", (4, 64, 64)), ("experts", (64, 64)), ("shared_experts", (4, 64, 64))]):
        module = nn.Module()
        module.register_parameter("gate_up_proj", nn.Parameter(torch.zeros(shape)))
        layers[str(i)] = nn.ModuleDict({"mlp": nn.ModuleDict({owner: module})})
    model = nn.ModuleDict({"model": nn.ModuleDict({"layers": layers})})
    assert [e.name for e in find_experts(model, arch=find_arch("qwen3_moe", where="parent"))] == ["model.layers.0.mlp.experts.gate_up_proj"]


# --- refusals ---


def test_a_dense_model_is_refused_with_the_known_families() -> None:
    config = LlamaConfig(**TINY, num_hidden_layers=1, intermediate_size=64)
    with pytest.raises(ValueError, match=r"^parent: .*olmoe, qwen2_moe, .*qwen3_moe.*got 'llama'\. A dense model has no experts to quantize"):
        plan_of(config)


def test_a_moe_without_a_sparse_layer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^parent: no expert weight found: .*gate_up_proj or down_proj.*mlp_only_layers: there is nothing to quantize"):
        plan_of(qwen3(mlp_only_layers=[0, 1, 2]))


def test_an_expert_width_that_is_no_multiple_of_32_is_refused() -> None:
    name = r"model\.layers\.0\.mlp\.experts\.down_proj"
    with pytest.raises(ValueError, match=rf"^parent: {name}: .*multiple of 32.*got 48 in shape \(5, 64, 48\)\. .*pad the dimension"):
        plan_of(qwen3(moe_intermediate_size=48))


def test_a_hidden_size_that_is_no_multiple_of_32_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^parent: model\.layers\.0\.mlp\.experts\.gate_up_proj: .*got 80 in shape \(5, 192, 80\)"):
        plan_of(qwen3(hidden_size=80))


def test_a_dense_width_that_is_no_multiple_of_32_does_not_matter() -> None:
    assert len(plan_of(qwen3(intermediate_size=100, mlp_only_layers=[0])).experts) == 4


@pytest.mark.parametrize(("owner", "leaf"), [("model.layers.1.mlp", "gate_up_proj"), ("model.mtp", "w2"), ("model.layers.0.mlp.shared_experts", "down_proj")])
def test_a_3_d_parameter_named_like_an_expert_elsewhere_stops_the_plan(monkeypatch: pytest.MonkeyPatch, owner: str, leaf: str) -> None:
    """A name collision, which no family of the catalogue has: nothing is guessed."""
    def with_a_stranger(config: Any, *, device: str) -> nn.Module:
        model = build_model(config, device=device)
        parent, _, last = owner.rpartition(".")
        if last not in model.get_submodule(parent)._modules:
            model.get_submodule(parent).add_module(last, nn.Module())
        model.get_submodule(owner).register_parameter(leaf, nn.Parameter(torch.zeros(5, 64, 96, device=device)))
        return model

    monkeypatch.setattr(plan_module, "build_model", with_a_stranger)
    name = f"{owner}.{leaf}".replace(".", r"\.")
    with pytest.raises(ValueError, match=rf"^parent: 1 3-D parameter.* lie outside .*: {name} \(5, 64, 96\)\. 6 expert weights were found"):
        plan_of(qwen3())


def test_an_experts_module_without_one_of_its_weights_stops_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_down(config: Any, *, device: str) -> nn.Module:
        model = build_model(config, device=device)
        del model.get_submodule("model.layers.1.mlp.experts").down_proj
        return model

    monkeypatch.setattr(plan_module, "build_model", without_down)
    with pytest.raises(ValueError, match=r"^parent: model\.layers\.1\.mlp\.experts owns 1 of 2 fused weights"):
        plan_of(qwen3())


@pytest.mark.parametrize("transposed", [True, False])
def test_a_layout_other_than_the_catalogue_s_stops_the_plan(monkeypatch: pytest.MonkeyPatch, transposed: bool) -> None:
    """transformers says how the module's weights lie; on a disagreement the wrong axis would be quantized without a word."""
    def turned(config: Any, *, device: str) -> nn.Module:
        model = build_model(config, device=device)
        experts: Any = model.get_submodule("model.layers.2.mlp.experts")
        experts.is_transposed, experts.is_concatenated = transposed, transposed
        return model

    monkeypatch.setattr(plan_module, "build_model", turned)
    with pytest.raises(ValueError, match=r"model\.layers\.2\.mlp\.experts: transformers says transposed .*correct quant/archs/qwen_moe\.py"):
        plan_of(qwen3())


# --- the pocket model ---


@pytest.mark.parametrize("mode", MODES)
def test_pocket(pocket: Path, mode: ScaleMode) -> None:
    """6 layers of 8 experts, D = 256, F = 128: 12 tensors, 4718592 weights."""
    plan = make_plan(load_config(pocket), scale_mode=mode, where=str(pocket))
    assert [(e.name, e.shape) for e in plan.experts] == [
        (f"model.layers.{i}.mlp.experts.{leaf}", (8, 256, last)) for i in range(6) for leaf, last in (("gate_up_proj", 256), ("down_proj", 128))]
    # kept: embedding 4096 * 256; per layer attention 196608, q and k norm 64, norms 512, router 2048; last norm 256
    kept = 2 * (4096 * 256 + 6 * (196608 + 64 + 512 + 2048) + 256)
    assert (plan.bytes_before, plan.bytes_after) == (2 * 4718592 + kept, 4718592 * 17 // 32 + kept) == (13925632, 6995200)
    lines = plan.table().splitlines()
    total = lines[-1]
    assert total.split()[:4] == ["total", str(sum(r.count for r in plan.rows)), "13.93", "7.00"]
    assert total.endswith(f"50% of the bytes; of 12 fused expert tensors 12 in MXFP4, scale_mode {mode}; 4.25 bits a routed expert weight")
    gate_up = next(line for line in lines if line.startswith(f"{EXPERTS}.gate_up_proj"))
    assert gate_up.split()[1:5] == ["6", "8x256x256", "6.29", "1.67"] and gate_up.endswith("MXFP4 (routed experts)")
    assert len(lines) == len(plan.rows) + 2
    assert lines[1].startswith(f"{EXPERTS}.gate_up_proj")   # largest first
