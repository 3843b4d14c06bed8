"""Drafts that others have published: each is read, becomes a model of the published shapes, and is written so that it reads back equal."""

import copy
import dataclasses
import json
from typing import Any

import pytest
import torch
from published_drafts import DEEPSEEK_V4_FLASH, DFLASH2, GEMMA4_31B, KIMI_K26, MIMO_PRO, PUBLISHED, QWEN3_8B, QWEN36_27B, published_shapes

from kilotok.dflash.config import DraftConfig
from kilotok.dflash.model import DraftModel


def read(raw: dict[str, Any]) -> DraftConfig:
    return DraftConfig.from_json(raw, where="draft/config.json")


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_reads_back_equal(name: str) -> None:
    config = read(copy.deepcopy(PUBLISHED[name]))
    assert read(json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_gives_the_published_tensors(name: str) -> None:
    config = read(PUBLISHED[name])
    with torch.device("meta"):
        draft = DraftModel(config)
    assert {n: tuple(p.shape) for n, p in draft.named_parameters()} == published_shapes(config)
    sinks = config.num_hidden_layers * config.attention_sinks
    assert len(list(draft.parameters())) == 11 * config.num_hidden_layers + 3 + sinks


@pytest.mark.parametrize(("name", "billions"), [("Qwen3-8B", 1.05), ("Qwen3.6-27B", 1.73), ("MiMo-V2.5-Pro", 2.77), ("MiMo-V2.5", 1.47)])
def test_their_sizes_are_the_published_ones(name: str, billions: float) -> None:
    with torch.device("meta"):
        draft = DraftModel(read(PUBLISHED[name]))
    assert round(sum(p.numel() for p in draft.parameters()) / 1e9, 2) == billions


def attention(config: DraftConfig) -> list[tuple[int | None, bool]]:
    return [(config.window_of(i), config.is_causal(i)) for i in range(config.num_hidden_layers)]


def test_what_is_easily_read_wrong() -> None:
    """Window and causality by layer, rope, and the options, each as its publisher means it."""
    assert attention(read(QWEN3_8B)) == [(None, False)] * 5
    assert attention(read(QWEN36_27B)) == [(2048, True)] * 4 + [(None, False)]   # nothing said: sliding layers are causal for every engine
    assert read(PUBLISHED["Qwen3.6-35B-A3B"]).block_size == 16 and read(PUBLISHED["Qwen3.6-35B-A3B"]).rope_theta == 1e7
    assert attention(read(PUBLISHED["Qwen3.6-35B-A3B"])) == [(2048, True)] * 8
    mimo = read(MIMO_PRO)
    assert attention(mimo) == [(1024, False)] * 5
    assert (mimo.attention_sinks, mimo.attention_value_scale, mimo.rotary_dim, mimo.rope_theta, mimo.backbone_rotary_base) == (True, 0.612, 64, 1e4, 5e6)
    kimi = read(KIMI_K26)
    assert kimi.rope_scaling == {"rope_type": "yarn", "factor": 48.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0}
    assert read(GEMMA4_31B).input_embedding_scale == 73.5


def test_the_speculators_form() -> None:
    """Its layer ids count the embedding as 0, it does not say how deep the target is, and its sliding layers are causal unless it says so."""
    config = read(DEEPSEEK_V4_FLASH)
    assert config.target_layer_ids == (3, 13, 23, 32, 42) and config.num_target_layers is None and config.num_features == 5 * 16384
    assert config.draft_vocab_size == 32000 and config.vocab_size == 129280
    assert attention(config) == [(2048, True)] * 5
    assert attention(read({**DEEPSEEK_V4_FLASH, "sliding_window_non_causal": True})) == [(2048, False)] * 5
    assert read({**DEEPSEEK_V4_FLASH, "draft_vocab_size": 129280}).draft_vocab_size is None   # all of them is no reduction


@pytest.mark.parametrize(("changes", "message"), [
    ({"speculators_model_type": "dspark"}, r"is a speculators 'dspark' draft; this reader knows dflash\."),
    ({"speculators_model_type": "dflash2"}, r"is a speculators 'dflash2' draft"),
    ({"sample_from_anchor": True}, r"sample_from_anchor: its slots predict the token after their place"),
    ({"aux_hidden_state_layer_ids": [0, 14]}, r"taps the embedding's output \(layer id 0 of speculators\), which is not supported\."),
])
def test_what_speculators_has_and_this_model_has_not(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"^draft/config\.json: {message}"):
        read({**DEEPSEEK_V4_FLASH, **changes})


@pytest.mark.parametrize("key", ["transformer_layer_config", "aux_hidden_state_layer_ids", "mask_token_id", "block_size"])
def test_an_incomplete_speculators_config(key: str) -> None:
    with pytest.raises(ValueError, match=rf"^draft/config\.json: has no {key}\. The config is incomplete\.$"):
        read({k: v for k, v in DEEPSEEK_V4_FLASH.items() if k != key})


@pytest.mark.parametrize("name", DFLASH2)
def test_dflash2_is_refused_by_name(name: str) -> None:
    with pytest.raises(NotImplementedError, match=r"^draft/config\.json: is a DFlash2 draft, which adds convolutions and a candidate selector"):
        read(DFLASH2[name])


def test_the_options_of_a_dflash2_draft_are_read_where_a_dflash_draft_has_them() -> None:
    raw = copy.deepcopy(DFLASH2["Muse-Glimmer-30B"])
    config = read({**raw, "architectures": ["DFlashDraftModel"]})
    assert (config.output_multiplier, config.logit_softcap) == (0.19611613513818404, 20)
    assert read(config.to_json()) == config
    assert dataclasses.replace(config, logit_softcap=None).to_json()["dflash_config"].get("final_logit_softcapping") is None
