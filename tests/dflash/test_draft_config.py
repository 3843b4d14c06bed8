"""The draft's config.json: read back equal, read alike by the three engines, and refused where they would differ."""

import copy
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
from published_drafts import QWEN3_8B

from kilotok.dflash.config import DraftConfig, default_target_layer_ids

FULL = DraftConfig(hidden_size=4096, intermediate_size=12288, num_hidden_layers=5, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
                   vocab_size=151936, target_layer_ids=(1, 9, 17, 25, 33), num_target_layers=36, mask_token_id=151669, block_size=16,
                   max_position_embeddings=40960)
SLIDING = dataclasses.replace(FULL, sliding_window=1024, block_size=8, rope_theta=5e5, rms_norm_eps=1e-5)
SMALL = DraftConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4, head_dim=16, vocab_size=100,
                    target_layer_ids=(3,), num_target_layers=4, mask_token_id=0, block_size=2, sliding_window=2)

# every option at a value of its own; layers of both kinds
OPTIONS = dataclasses.replace(
    SLIDING, full_attention_layers=(4,), causal="sliding", partial_rotary_factor=0.5, attention_sinks=True, attention_value_scale=0.612,
    rope_scaling={"rope_type": "yarn", "factor": 48.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0},
    input_embedding_scale=64.0, output_multiplier=0.19611613513818404, logit_softcap=20.0, mask_embedding=True, draft_vocab_size=32000, target_hidden_size=8192,
    backbone_rotary_base=5e6)


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


KINDS = {
    "full": FULL, "full causal": dataclasses.replace(FULL, causal="always"), "sliding": SLIDING,
    "sliding causal": dataclasses.replace(SLIDING, causal="always"), "mixed": dataclasses.replace(SLIDING, full_attention_layers=(1, 4)),
    "mixed causal": dataclasses.replace(SLIDING, full_attention_layers=(4,), causal="always"),
    "mixed, sliding ones causal": dataclasses.replace(SLIDING, full_attention_layers=(4,), causal="sliding"), "small": SMALL}
OTHERS = {"unsorted taps": dataclasses.replace(FULL, target_layer_ids=(33, 0, 35)), "every option": OPTIONS,
          "depth of the target unknown": dataclasses.replace(FULL, num_target_layers=None)}
BOTH = {**KINDS, **OTHERS}


@pytest.mark.parametrize("config", BOTH.values(), ids=BOTH)
def test_what_is_written_reads_back_equal(config: DraftConfig) -> None:
    assert read(json.loads(json.dumps(config.to_json()))) == config


def test_every_option_is_there_when_written_and_absent_when_neutral() -> None:
    """An option that is not used leaves no key that another reader would have to know."""
    written = {**OPTIONS.to_json(), **OPTIONS.to_json()["dflash_config"]}
    plain = {**FULL.to_json(), **FULL.to_json()["dflash_config"]}
    for key, value in {"partial_rotary_factor": 0.5, "attention_sink_bias": True, "attention_value_scale": 0.612, "input_embedding_scale": 64.0,
                       "output_multiplier": 0.19611613513818404, "final_logit_softcapping": 20.0, "mask_embedding": True, "draft_vocab_size": 32000,
                       "target_hidden_size": 8192, "backbone_rotary_base": 5e6, "rope_scaling": OPTIONS.rope_scaling}.items():
        assert written[key] == value and key not in plain, key
    assert written["rope_parameters"] == {"rope_theta": 5e5, "partial_rotary_factor": 0.5, **(OPTIONS.rope_scaling or {})}


def test_every_published_key_is_written_with_its_value() -> None:
    ours = FULL.to_json()
    for key, value in QWEN3_8B.items():
        if key == "dflash_config":
            assert QWEN3_8B[key].items() <= ours[key].items()
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
@pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)
def test_engines_read_one_window_and_one_causality(config: DraftConfig, engine: Callable[[dict[str, Any]], list[tuple[int | None, bool, int, float]]]) -> None:
    assert engine(config.to_json()) == [(config.window_of(i), config.is_causal(i), config.block_size, config.rope_theta)
                                        for i in range(config.num_hidden_layers)]


def test_window_and_causality_by_layer_by_hand() -> None:
    """What the test above holds the engines to."""
    def by_layer(kind: str) -> list[tuple[int | None, bool]]:
        return [(KINDS[kind].window_of(i), KINDS[kind].is_causal(i)) for i in range(5)]

    assert by_layer("full") == [(None, False)] * 5 and by_layer("full causal") == [(None, True)] * 5
    assert by_layer("sliding") == [(1024, False)] * 5 and by_layer("sliding causal") == [(1024, True)] * 5
    assert by_layer("mixed") == [(1024, False), (None, False), (1024, False), (1024, False), (None, False)]
    assert by_layer("mixed causal") == [(1024, True)] * 4 + [(None, True)]
    assert by_layer("mixed, sliding ones causal") == [(1024, True)] * 4 + [(None, False)]


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
    (SLIDING, {"layer_types": ["sliding_attention"] * 4 + ["full_attention"]}),   # for vLLM all of them slide
    (SLIDING, {"layer_types": ["full_attention"] * 5}),                           # ModelOpt: a window for vLLM, none for SGLang
    (SLIDING, {"dflash_config.use_swa": False}), (FULL, {"dflash_config.use_swa": True}), (FULL, {"layer_types": ["sliding_attention"] * 5}),
])
def test_layer_types_that_use_swa_contradicts_are_refused(config: DraftConfig, changes: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match=r"^draft/config\.json: layer_types .* and use_swa .*: engines read this differently\."):
        read(changed(config, changes))


@pytest.mark.parametrize(("config", "changes"), [
    (FULL, {"is_causal": True}), (SLIDING, {"is_causal": True}), (FULL, {"dflash_config.causal": True}), (SLIDING, {"dflash_config.causal": True}),
])
def test_two_names_for_the_causality_must_agree(config: DraftConfig, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^draft/config\.json: is_causal \w+ and dflash_config\.causal \w+ contradict each other"):
        read(changed(config, changes))


@pytest.mark.parametrize(("config", "changes", "causal"), [
    (FULL, {"is_causal": True, "dflash_config.causal": True}, "always"), (FULL, {"is_causal": ..., "dflash_config.causal": True}, "always"),
    (FULL, {"is_causal": ..., "dflash_config.causal": ...}, "never"),
    (SLIDING, {"is_causal": True, "dflash_config.causal": ..., "dflash_config.use_swa": ...}, "always"),
    (SLIDING, {"is_causal": ..., "dflash_config.causal": ..., "dflash_config.use_swa": ...}, "always"),   # nothing said: every engine takes it as causal
    (SLIDING, {"is_causal": None, "dflash_config.causal": None}, "never"),                                # use_swa is non-causal
    (KINDS["mixed"], {"is_causal": ..., "dflash_config.causal": ...}, "sliding"),
    (KINDS["mixed"], {"is_causal": True, "dflash_config.causal": ...}, "always"),
])
def test_the_causality_is_that_of_the_engines(config: DraftConfig, changes: dict[str, Any], causal: str) -> None:
    assert read(changed(config, changes)).causal == causal


@pytest.mark.parametrize("path", ["partial_rotary_factor", "rope_parameters.factor", "rope_parameters.rope_type", "rope_parameters.beta_fast",
                                  "rope_scaling.rope_type"])
def test_two_names_for_the_rope_must_agree(path: str) -> None:
    """A `default` beside a `yarn` is the dangerous one: every engine takes another of the two."""
    other = "default" if path.endswith("rope_type") else 0.25
    with pytest.raises(ValueError, match=rf"{path.rpartition('.')[2]} .* contradict each other; engines would read it differently\.$"):
        read(changed(OPTIONS, {path: other}))


def test_the_rope_is_read_from_either_place() -> None:
    for path in ("rope_scaling", "partial_rotary_factor", "rope_theta", "rope_parameters.factor", "rope_parameters.rope_type"):
        assert read(changed(OPTIONS, {path: ...})) == OPTIONS, path
    assert read(changed(OPTIONS, {"rope_parameters": ...})) == OPTIONS
    scaling = {"type" if k == "rope_type" else k: v for k, v in (OPTIONS.rope_scaling or {}).items()}
    assert read(changed(OPTIONS, {"rope_scaling": scaling, "rope_parameters": ...})) == OPTIONS   # its old name
    sections = {"rope_type": "default", "mrope_section": [11, 11, 10]}   # of a multimodal target: the text turns as ever
    assert read(changed(FULL, {"rope_parameters.mrope_section": [11, 11, 10], "rope_scaling": sections})) == FULL


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
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
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


def test_a_target_of_unknown_depth() -> None:
    """Other tools do not write num_target_layers."""
    for missing in (..., None):
        config = read(changed(FULL, {"num_target_layers": missing}))
        assert config.num_target_layers is None and config == dataclasses.replace(FULL, num_target_layers=None)


@pytest.mark.parametrize("path", ["sample_from_anchor", "dflash_config.sample_from_anchor"])
def test_slots_that_predict_the_next_token_are_refused(path: str) -> None:
    with pytest.raises(NotImplementedError, match=r"^draft/config\.json: sample_from_anchor is True: its slots predict the token after their place"):
        read(changed(SLIDING, {path: True}))
    assert read(changed(SLIDING, {path: False})) == SLIDING


def test_an_option_is_read_on_the_top_level_too_and_must_agree() -> None:
    assert read(changed(OPTIONS, {"output_multiplier": 0.19611613513818404, "dflash_config.output_multiplier": ...})) == OPTIONS
    with pytest.raises(ValueError, match=r"attention_value_scale 2\.0 and dflash_config\.attention_value_scale 0\.612 contradict each other"):
        read(changed(OPTIONS, {"attention_value_scale": 2.0}))


def test_the_neutral_values_of_the_options_are_read() -> None:
    neutral = {"attention_sink_bias": False, "attention_value_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": None,
               "input_embedding_scale": 1.0, "mask_embedding": False, "draft_vocab_size": SLIDING.vocab_size}
    for key, value in neutral.items():
        assert read(changed(SLIDING, {key: value, f"dflash_config.{key}": None})) == SLIDING, key


@pytest.mark.parametrize("changes", [
    {"rope_parameters.rope_type": "dynamic"}, {"rope_parameters.rope_type": "longrope"}, {"rope_parameters": ..., "rope_scaling": {"type": "dynamic"}},
    {"layer_types": ["chunked_attention"] * 5}, {"v_head_dim": 64}, {"attention_bias": True}, {"hidden_act": "gelu"},
    {"architectures": ["DFlash2DraftModel"]}, {"architectures": ...}, {"architectures": ["Qwen3ForCausalLM"]},
])
def test_other_models_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match=r"^draft/config\.json: (rope '|layer_types has|v_head_dim|attention_bias|architecture|is a DFlash2)"):
        read(changed(SLIDING, changes))


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
    ({"full_attention_layers": (1,)}, r"draft\.full_attention_layers: is for drafts with a sliding window; got none\."),
    ({"sliding_window": 64, "full_attention_layers": (5,)}, r"draft\.full_attention_layers: needs layers in 0\.\.4, ascending; got \[5\]\."),
    ({"sliding_window": 64, "full_attention_layers": (4, 1)}, r"draft\.full_attention_layers: needs layers in 0\.\.4, ascending; got \[4, 1\]\."),
    ({"sliding_window": 64, "full_attention_layers": (0, 1, 2, 3, 4)}, r"draft\.full_attention_layers: names every layer, so that none slides\."),
    ({"causal": "maybe"}, r"draft\.causal: must be never, always or sliding; got 'maybe'\."),
    ({"causal": "sliding"}, r"draft\.causal: `sliding` is for drafts with both kinds of layers"),
    ({"causal": "sliding", "sliding_window": 64}, r"draft\.causal: `sliding` is for drafts with both kinds of layers"),
    ({"partial_rotary_factor": 0.0}, r"draft\.partial_rotary_factor: must lie in \(0, 1\]"),
    ({"partial_rotary_factor": 0.4}, r"draft\.partial_rotary_factor: .* turn an even number of dimensions; got 0\.4 of 128\."),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, r"draft\.rope_scaling: needs a rope_type of linear, yarn, llama3; got 'dynamic'\."),
    ({"rope_scaling": {"factor": 2.0}}, r"draft\.rope_scaling: needs a rope_type of linear, yarn, llama3; got None\."),
    *(({name: 0.0}, rf"draft\.{name}: must be positive; got 0\.0\.") for name in ("attention_value_scale", "input_embedding_scale", "output_multiplier")),
    ({"logit_softcap": 0.0}, r"draft\.logit_softcap: must be positive, or null for none; got 0\.0\."),
    ({"draft_vocab_size": 0}, r"draft\.draft_vocab_size: must lie in 1\.\.151936; got 0\."),
    ({"draft_vocab_size": 151937}, r"draft\.draft_vocab_size: must lie in 1\.\.151936; got 151937\."),
    ({"mask_token_id": -1}, r"draft\.mask_token_id: must be a row of the target's embedding, 0\.\.151935; got -1\."),
])
def test_numbers_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        dataclasses.replace(FULL, **changes)


def test_a_vocabulary_of_all_tokens_is_none() -> None:
    whole = dataclasses.replace(FULL, draft_vocab_size=FULL.vocab_size)
    assert whole == FULL and whole.draft_vocab_size is None and "draft_vocab_size" not in whole.to_json()


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
