"""Scaled rotary positions: the numbers of a kind are all used, and what it lacks, does not take or cannot use is one clear error."""

import dataclasses
from typing import Any

import pytest

from kilotok.dflash.config import DraftConfig
from kilotok.dflash.model import rotary_frequencies

PLAIN = DraftConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4, head_dim=16, vocab_size=100,
                    target_layer_ids=(3,), num_target_layers=4, mask_token_id=0)
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"factor": 4.0, "original_max_position_embeddings": 4096}
WRONG_SCALING: list[tuple[str, dict[str, Any], str]] = [
    ("yarn", {"factor": 4.0}, r"yarn needs original_max_position_embeddings; got rope_type, factor\.$"),
    ("linear", {}, r"linear needs factor; got rope_type\.$"),
    ("llama3", {"factor": 8.0, "original_max_position_embeddings": 8192}, r"llama3 needs low_freq_factor and high_freq_factor; got "),
    *(("llama3", {k: v for k, v in LLAMA3.items() if k != gone}, rf"llama3 needs {gone}; got ") for gone in LLAMA3),
    *(("yarn", {**YARN, "factor": wrong}, rf"factor must be a positive number; got {shown}\.$") for wrong, shown in (
        (0, "0"), (-4.0, r"-4\.0"), (float("nan"), "nan"), (float("inf"), "inf"), ("4", "'4'"), (True, "True"), (None, "None"))),
    ("yarn", {**YARN, "fator": 4.0}, r"unknown key 'fator' of yarn\. Did you mean 'factor'\?$"),
    ("linear", {"factor": 4.0, "beta_fast": 32}, r"unknown key 'beta_fast' of linear\. It takes factor\.$"),
    ("yarn", {**YARN, "rope_theta": 1e6}, r"rope_theta is not a number of the scaling; got 1000000\.0\. Set draft\.rope_theta instead\.$"),
    ("yarn", {**YARN, "partial_rotary_factor": 0.5}, r"partial_rotary_factor is not a number .* Set draft\.partial_rotary_factor instead\.$"),
    ("yarn", {**YARN, "truncate": 1}, r"truncate must be true or false; got 1\.$"),
    ("yarn", {**YARN, "beta_slow": 32}, r"beta_fast must be above beta_slow; got 32 and 32\.$"),
    ("llama3", {**LLAMA3, "high_freq_factor": 1.0}, r"high_freq_factor must be above low_freq_factor; got 1\.0 and 1\.0\.$"),
]


@pytest.mark.parametrize(("kind", "numbers", "message"), WRONG_SCALING)
def test_wrong_numbers_are_named(kind: str, numbers: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^draft\.rope_scaling: {message}"):
        dataclasses.replace(PLAIN, rope_scaling={"rope_type": kind, **numbers})


@pytest.mark.parametrize("scaling", [
    {"rope_type": "linear", "factor": 2}, {"rope_type": "llama3", **LLAMA3},
    {"rope_type": "yarn", **YARN, "beta_fast": 32, "beta_slow": 1, "attention_factor": 1.2, "mscale": 1.0, "mscale_all_dim": 1.0, "truncate": False}])
def test_every_number_of_a_scaling_is_read_again_and_used(scaling: dict[str, Any]) -> None:
    config = dataclasses.replace(PLAIN, rope_scaling=scaling)
    assert DraftConfig.from_json(config.to_json(), where="config.json") == config
    assert bool((rotary_frequencies(config)[0] != rotary_frequencies(PLAIN)[0]).any())


def test_a_file_is_held_to_the_numbers_of_its_scaling() -> None:
    written = dataclasses.replace(PLAIN, rope_scaling={"rope_type": "yarn", **YARN}).to_json()
    for section in ("rope_scaling", "rope_parameters"):
        del written[section]["original_max_position_embeddings"]
    with pytest.raises(ValueError, match=r"^draft\.rope_scaling: yarn needs original_max_position_embeddings"):
        DraftConfig.from_json(written, where="config.json")


def test_sections_of_a_multimodal_target_are_passed_over() -> None:
    config = dataclasses.replace(PLAIN, rope_scaling={"rope_type": "yarn", **YARN})
    written = config.to_json()
    written["rope_parameters"] |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    assert DraftConfig.from_json(written, where="config.json") == config
