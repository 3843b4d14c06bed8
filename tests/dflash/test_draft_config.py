"""The draft's config.json: read back equal, read alike by the three engines, and refused where they would differ."""

import copy
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest

from kilotok.dflash.config import DraftConfig, default_target_layer_ids

FULL = DraftConfig(hidden_size=4096, intermediate_size=12288, num_hidden_layers=5, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
                   vocab_size=151936, target_layer_ids=(1, 9, 17, 25, 33), num_target_layers=36, mask_token_id=151669, block_size=16,
                   max_position_embeddings=40960)
SLIDING = dataclasses.replace(FULL, sliding_window=1024, block_size=8, rope_theta=5e5, rms_norm_eps=1e-5)
SMALL = DraftConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4, head_dim=16, vocab_size=100,
                    target_layer_ids=(3,), num_target_layers=4, mask_token_id=0, block_size=2, sliding_window=2)

# Qwen3-8B-DFlash-b16 as published: block size and rope on the top level only
QWEN3_8B = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}, "hidden_size": 4096, "intermediate_size": 12288,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 5, "layer_types": ["full_attention"] * 5,
    "num_target_layers": 36, "max_window_layers": 5, "use_sliding_window": False, "sliding_window": None, "rope_theta": 1e6, "rope_scaling": None,
    "max_position_embeddings": 40960, "vocab_size": 151936, "rms_norm_eps": 1e-6, "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "dtype": "bfloat16"}
# MiMo-V2.5-Pro-FP4-DFlash: no layer_types, a window by use_swa only, and much that this model does not have
MIMO = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": 6144, "intermediate_size": 16384, "num_hidden_layers": 5,
    "num_attention_heads": 128, "num_key_value_heads": 8, "head_dim": 128, "v_head_dim": 128, "partial_rotary_factor": 0.5, "block_size": 8,
    "dflash_config": {"target_layer_ids": [0, 15, 31, 47, 69], "mask_token_id": 151669, "num_anchors": 4096, "block_size": 8, "loss_decay_gamma": 7.0,
                      "use_swa": True, "swa_window_size": 1024, "backbone_rotary_base": 5000000, "attention_value_scale": 0.612, "attention_sink_bias": True},
    "num_target_layers": 70, "vocab_size": 152064, "max_position_embeddings": 262144, "rope_theta": 10000, "sliding_window": 1024, "rms_norm_eps": 1e-5}


def read(raw: dict[str, Any]) -> DraftConfig:
    return DraftConfig.from_json(raw, where="draft/config.json")


def changed(config: DraftConfig, changes: dict[str, Any]) -> dict[str, Any]:
    """config.json with some keys set, or removed for `...`; a key with a dot is in a section."""
    raw = copy.deepcopy(config.to_json())
    for path, value in changes.items():
        *section, key = path.split(".")
        place = raw[section[0]] if section else raw
        if value is ...:
            del place[key]
        else:
            place[key] = value
    return raw


UNSORTED = dataclasses.replace(FULL, target_layer_ids=(33, 0, 35))


@pytest.mark.parametrize("config", [FULL, SLIDING, SMALL, UNSORTED], ids=["full", "sliding", "small", "unsorted taps"])
def test_what_is_written_reads_back_equal(config: DraftConfig) -> None:
    assert read(json.loads(json.dumps(config.to_json()))) == config


def test_every_published_key_is_written_with_its_value() -> None:
    ours = FULL.to_json()
    for key, value in QWEN3_8B.items():
        if key == "dflash_config":
            assert QWEN3_8B[key].items() <= ours[key].items()   # type: ignore[attr-defined]
        elif key not in ("auto_map", "rope_scaling"):   # code beside the weights, which we do not ship; null
            assert ours[key] == value, key


def test_the_published_config_is_read() -> None:
    assert read(QWEN3_8B) == FULL


def test_block_size_and_theta_are_read_from_either_place() -> None:
    """Qwen3.6-35B-A3B has both in their sections only."""
    for path in ("block_size", "dflash_config.block_size", "rope_theta", "rope_parameters.rope_theta"):
        assert read(changed(SLIDING, {path: ...})) == SLIDING, path
    assert read(changed(SLIDING, {"rope_parameters": ..., "block_size": ...})) == SLIDING


# --- one config that all engines read the same way ---


def z_lab(raw: dict[str, Any]) -> list[tuple[int | None, bool, int, float]]:
    """(window, causal in the block, block size, theta) of every layer as z-lab's code takes them: an explicit is_causal wins, else sliding is causal."""
    sliding = [t == "sliding_attention" for t in raw["layer_types"]]
    return [(raw["sliding_window"] if s else None, raw.get("is_causal", s), raw["block_size"], raw["rope_theta"]) for s in sliding]


def vllm(raw: dict[str, Any]) -> list[tuple[int | None, bool, int, float]]:
    """is_causal before dflash_config.causal before the layer's type; use_swa makes every layer sliding and non-causal."""
    d, layers = raw["dflash_config"], []
    for t in raw["layer_types"]:
        sliding = t == "sliding_attention" or d.get("use_swa", False)
        causal = raw.get("is_causal", d.get("causal", sliding and not d.get("use_swa", False)))
        layers.append((d.get("swa_window_size", raw["sliding_window"]) if sliding else None, causal, raw["block_size"], raw["rope_parameters"]["rope_theta"]))
    return layers


def sglang(raw: dict[str, Any]) -> list[tuple[int | None, bool, int, float]]:
    """Knows nothing of use_swa and swa_window_size."""
    sliding = [t == "sliding_attention" for t in raw["layer_types"]]
    block = raw["dflash_config"].get("block_size", raw.get("block_size"))
    return [(raw["sliding_window"] if s else None, raw.get("is_causal", s), block, raw["rope_parameters"]["rope_theta"]) for s in sliding]


@pytest.mark.parametrize("engine", [z_lab, vllm, sglang])
@pytest.mark.parametrize("config", [FULL, SLIDING, SMALL], ids=["full", "sliding", "small"])
def test_engines_read_one_window_and_one_causality(config: DraftConfig, engine: Callable[[dict[str, Any]], list[tuple[int | None, bool, int, float]]]) -> None:
    expected = (config.sliding_window, False, config.block_size, config.rope_theta)
    assert engine(config.to_json()) == [expected] * config.num_hidden_layers


@pytest.mark.parametrize("key", ["is_causal", "layer_types", "sliding_window", "dflash_config.causal", "dflash_config.use_swa", "dflash_config.swa_window_size",
                                 "dflash_config.block_size", "block_size", "rope_theta", "rope_parameters"])
def test_every_convention_is_written_under_every_name(key: str) -> None:
    value: Any = SLIDING.to_json()
    for part in key.split("."):
        value = value[part]
    assert value == {"is_causal": False, "layer_types": ["sliding_attention"] * 5, "sliding_window": 1024, "causal": False, "use_swa": True,
                     "swa_window_size": 1024, "block_size": 8, "rope_theta": 5e5, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"},
                     }[key.rpartition(".")[2]]


# --- contradictions ---


@pytest.mark.parametrize(("changes", "names"), [
    ({"rope_theta": 1e4}, ("rope_theta 10000.0", "rope_parameters.rope_theta 500000.0")),
    ({"rope_parameters.rope_theta": 1e7}, ("rope_theta 500000.0", "rope_parameters.rope_theta 10000000.0")),
    ({"block_size": 16}, ("block_size 16", "dflash_config.block_size 8")),
    ({"dflash_config.block_size": 7}, ("block_size 8", "dflash_config.block_size 7")),
    ({"sliding_window": 2048}, ("sliding_window 2048", "dflash_config.swa_window_size 1024")),
    ({"dflash_config.swa_window_size": 1023}, ("sliding_window 1024", "dflash_config.swa_window_size 1023")),
])
def test_two_names_for_one_number_must_agree(changes: dict[str, Any], names: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match=r"^draft/config\.json: .* contradict each other; engines would read it differently\.$") as error:
        read(changed(SLIDING, changes))
    assert " and ".join(names) in str(error.value)


@pytest.mark.parametrize(("config", "changes"), [
    (SLIDING, {"layer_types": ["sliding_attention"] * 4 + ["full_attention"]}),   # Qwen3.6-27B
    (SLIDING, {"layer_types": ["sliding_attention"] * 4 + ["full_attention"], "dflash_config.use_swa": ...}),
    (SLIDING, {"layer_types": ["full_attention"] * 5}),                           # ModelOpt: a window for vLLM, none for SGLang
    (SLIDING, {"dflash_config.use_swa": False}), (FULL, {"dflash_config.use_swa": True}), (FULL, {"layer_types": ["sliding_attention"] * 5}),
])
def test_layers_of_two_kinds_are_refused(config: DraftConfig, changes: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match=r"^draft/config\.json: layer_types .* and use_swa .*: engines read this differently\."):
        read(changed(config, changes))


@pytest.mark.parametrize(("config", "changes"), [
    (FULL, {"is_causal": True}), (SLIDING, {"is_causal": True}), (SLIDING, {"is_causal": True, "dflash_config.causal": True}),
    (FULL, {"is_causal": ..., "dflash_config.causal": True}),
    (SLIDING, {"is_causal": ..., "dflash_config.causal": True}),
    (SLIDING, {"is_causal": ..., "dflash_config.causal": ..., "dflash_config.use_swa": ...}),   # nothing said: every engine takes it as causal
])
def test_causal_slots_are_refused(config: DraftConfig, changes: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match=r"^draft/config\.json: its slots are causal .*; non-causal drafts are supported\."):
        read(changed(config, changes))


@pytest.mark.parametrize("changes", [
    {"dflash_config.causal": ..., "dflash_config.use_swa": ..., "dflash_config.swa_window_size": ...},   # z-lab: is_causal decides
    {"is_causal": ..., "dflash_config.use_swa": ..., "dflash_config.swa_window_size": ...},
    {"is_causal": ..., "dflash_config.causal": ..., "layer_types": ..., "sliding_window": ...},          # MiMo: use_swa is non-causal
    {"use_sliding_window": ..., "max_window_layers": ...},
])
def test_one_sufficient_name_is_enough(changes: dict[str, Any]) -> None:
    assert read(changed(SLIDING, changes)) == SLIDING


def test_a_window_that_no_layer_uses_does_not_count() -> None:
    assert read(changed(FULL, {"sliding_window": 2048})) == FULL
    assert read(changed(FULL, {"layer_types": ..., "dflash_config.use_swa": ..., "is_causal": ..., "dflash_config.causal": ...})) == FULL


# --- refusals ---


@pytest.mark.parametrize("key", [
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "num_target_layers",
    "rms_norm_eps", "max_position_embeddings", "dflash_config.target_layer_ids", "dflash_config.mask_token_id"])
def test_a_missing_key_is_named(key: str) -> None:
    for missing in (..., None):
        with pytest.raises(ValueError, match=rf"^draft/config\.json: has no {key.rpartition('.')[2]}\. The config is incomplete\.$"):
            read(changed(FULL, {key: missing}))


@pytest.mark.parametrize(("changes", "key"), [
    ({"block_size": ..., "dflash_config.block_size": ...}, "block_size"), ({"rope_theta": ..., "rope_parameters": ...}, "rope_theta"),
    ({"sliding_window": ..., "dflash_config.swa_window_size": ...}, "sliding_window"),
])
def test_a_number_missing_under_all_its_names_is_named(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=rf"^draft/config\.json: has no {key}\."):
        read(changed(SLIDING, changes))


@pytest.mark.parametrize("section", [..., None, [1]])
def test_no_dflash_section(section: Any) -> None:
    with pytest.raises(ValueError, match=r"^draft/config\.json: no dflash_config section\. This is not the config\.json of a DFlash draft\.$"):
        read(changed(FULL, {"dflash_config": section}))


def test_layer_types_of_another_depth() -> None:
    with pytest.raises(ValueError, match=r"^draft/config\.json: layer_types names 4 layers, num_hidden_layers is 5\."):
        read(changed(FULL, {"layer_types": ["full_attention"] * 4}))


UNSUPPORTED = {"attention_sink_bias": True, "attention_value_scale": 0.612, "output_multiplier": 0.19611613513818404, "final_logit_softcapping": 20,
               "sample_from_anchor": True}


@pytest.mark.parametrize(("key", "value"), UNSUPPORTED.items())
def test_what_would_change_the_numbers_is_refused_by_name(key: str, value: Any) -> None:
    for path in (key, f"dflash_config.{key}"):
        with pytest.raises(NotImplementedError, match=rf"^draft/config\.json: {key} is {value!r}; drafts with it are not supported yet\."):
            read(changed(SLIDING, {path: value}))


def test_the_neutral_values_of_those_keys_are_read() -> None:
    neutral = {"attention_sink_bias": False, "attention_value_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": None,
               "sample_from_anchor": False}
    assert neutral.keys() == UNSUPPORTED.keys()
    for key, value in neutral.items():
        assert read(changed(SLIDING, {key: value, f"dflash_config.{key}": None})) == SLIDING


@pytest.mark.parametrize("changes", [
    {"partial_rotary_factor": 0.5}, {"rope_parameters.partial_rotary_factor": 0.5}, {"rope_parameters.rope_type": "yarn"},
    {"rope_parameters": ..., "rope_scaling": {"rope_type": "yarn", "factor": 48.0}},
    {"attention_bias": True}, {"hidden_act": "gelu"}, {"architectures": ["DFlash2DraftModel"]}, {"architectures": ...}, {"architectures": ["Qwen3ForCausalLM"]},
])
def test_other_models_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match=r"^draft/config\.json: (rope|attention_bias|architecture) "):
        read(changed(SLIDING, changes))


def test_mimo_is_refused_and_without_its_extras_read() -> None:
    with pytest.raises(NotImplementedError, match="attention_sink_bias is True"):
        read(MIMO)
    plain = copy.deepcopy(MIMO)
    del plain["partial_rotary_factor"]
    for key in ("attention_value_scale", "attention_sink_bias", "backbone_rotary_base"):
        del plain["dflash_config"][key]   # type: ignore[attr-defined]
    config = read(plain)
    assert (config.sliding_window, config.block_size, config.rope_theta, config.target_layer_ids) == (1024, 8, 10000.0, (0, 15, 31, 47, 69))


@pytest.mark.parametrize(("changes", "message"), [
    *(({name: 0}, rf"draft\.{name}: must be positive; got 0\.") for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                                                                              "num_key_value_heads", "head_dim", "vocab_size")),
    ({"num_key_value_heads": 5}, r"draft\.num_attention_heads: must be a multiple of num_key_value_heads \(5\); got 32\."),
    ({"head_dim": 33}, r"draft\.head_dim: must be even for rotary positions; got 33\."),
    ({"block_size": 1}, r"draft\.block_size: counts the anchor and needs at least one slot, so at least 2; got 1\."),
    ({"sliding_window": 15}, r"draft\.sliding_window: must be at least the block size \(16\); got 15\."),
    ({"target_layer_ids": ()}, r"draft\.target_layer_ids: needs layers in 0\.\.35, the target's; got \[\]\."),
    ({"target_layer_ids": (1, 36)}, r"draft\.target_layer_ids: needs layers in 0\.\.35, the target's; got \[1, 36\]\."),
    ({"target_layer_ids": (-1,)}, r"draft\.target_layer_ids: needs layers in 0\.\.35, the target's; got \[-1\]\."),
    ({"target_layer_ids": (1, 9, 1)}, r"draft\.target_layer_ids: each layer is tapped once; got \[1, 9, 1\]\."),
    ({"mask_token_id": 151936}, r"draft\.mask_token_id: must be a row of the target's embedding, 0\.\.151935; got 151936\."),
    ({"mask_token_id": -1}, r"draft\.mask_token_id: must be a row of the target's embedding, 0\.\.151935; got -1\."),
])
def test_numbers_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        dataclasses.replace(FULL, **changes)


def test_the_ends_of_the_ranges_are_allowed() -> None:
    c = dataclasses.replace(FULL, sliding_window=16, target_layer_ids=(0, 35), mask_token_id=151935)
    assert c.num_drafts == 15 and dataclasses.replace(SMALL, block_size=2).num_drafts == 1


# --- taps ---


@pytest.mark.parametrize(("target", "draft", "ids"), [
    (36, 5, (1, 9, 17, 25, 33)), (64, 5, (1, 16, 31, 46, 61)), (40, 5, (1, 10, 19, 28, 37)), (28, 5, (1, 7, 13, 19, 25)), (48, 5, (1, 12, 23, 34, 45)),
    (70, 5, (1, 18, 34, 50, 67)),    # 17.5 and 50.5 go to the even neighbour, as Python rounds
    (36, 1, (18,)), (5, 1, (2,)), (1, 1, (0,)), (5, 2, (1, 2)), (6, 3, (1, 2, 3)),
])
def test_the_published_rule_for_taps(target: int, draft: int, ids: tuple[int, ...]) -> None:
    assert default_target_layer_ids(num_target_layers=target, num_draft_layers=draft) == ids


@pytest.mark.parametrize(("target", "draft"), [(2, 2), (4, 2), (5, 3), (7, 5)])
def test_a_target_with_too_few_layers_is_refused(target: int, draft: int) -> None:
    with pytest.raises(ValueError, match=rf"^draft\.target_layer_ids: {draft} different layers do not fit the published rule for a target of {target}\."):
        default_target_layer_ids(num_target_layers=target, num_draft_layers=draft)
