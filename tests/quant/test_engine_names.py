"""What vLLM and SGLang did with our names, frozen in goldens/engine_names.json; tests/quant/test_layouts.py compares every export with it."""

from pathlib import Path

from exports import ENGINE_NAMES, pattern
from families import FAMILIES

from kilotok.quant.archs import find_arch
from kilotok.quant.checkpoint import CheckpointReader
from kilotok.quant.checkpoint.readers import engine_notes

DRAFT = Path(__file__).parents[2] / "recipes" / "pocket" / "draft"


def test_both_engines_take_every_tensor_of_a_draft() -> None:
    names = {pattern(n) for n in CheckpointReader(DRAFT).names}
    for engine in ("vllm", "sglang"):
        taken = ENGINE_NAMES["draft"][engine]
        assert set(taken["parameters"]) == names and taken["not_taken"] == []


def test_vllm_takes_every_tensor_of_an_export_but_granitemoe_s_experts() -> None:
    tried = {key: e["vllm"] for key, e in ENGINE_NAMES["exports"].items() if "vllm" in e}
    assert {key for key, taken in tried.items() if taken["not_taken"]} == {"granitemoe/compressed-tensors"}
    assert all("w1.weight" in n or "w2.weight" in n or "w3.weight" in n for n in tried["granitemoe/compressed-tensors"]["not_taken"])
    assert len(tried) >= 21 and sum(key.endswith("/mimo") for key in tried) >= 9 and "gpt_oss/gpt-oss" in tried
    # the fused parameters of engines: gate first, then up
    taken = tried["qwen3_moe/compressed-tensors"]["parameters"]
    expert = "model.layers.*.mlp.experts.*"
    assert {taken[f"{expert}.{p}_proj.weight_packed"].rsplit(".", 1)[1] for p in ("gate", "up")} == {"w13_weight_packed"}
    assert taken[f"{expert}.down_proj.weight_scale"].endswith("w2_weight_scale")


def test_sglang_reads_mimo_s_and_gpt_oss_s_layouts_and_we_say_where_it_reads_the_other_wrong() -> None:
    exports = ENGINE_NAMES["exports"]
    for key in ("mimo_v2_flash/mimo", "gpt_oss/gpt-oss"):
        assert exports[key]["sglang"]["not_taken"] == []
    wrong = {key.split("/")[0] for key, e in exports.items() if e.get("sglang", {}).get("not_taken") or "refuses" in e.get("sglang", {})}
    assert {"qwen3_moe", "glm4_moe", "minimax_m2", "olmoe", "qwen2_moe", "mixtral"} <= wrong
    for name in wrong:
        assert any("SGLang 0.5.23" in note for note in engine_notes(name, layout="compressed-tensors")), name
    assert engine_notes("deepseek_v3", layout="compressed-tensors") == engine_notes("mimo_v2_flash", layout="mimo") == ()


def test_every_family_has_a_record() -> None:
    layouts = {key.split("/")[0] for key in ENGINE_NAMES["exports"]}
    assert layouts == set(FAMILIES) and all(find_arch(name, where="test") for name in layouts)
