"""Which tokens end a text, by the files of a directory."""

import json
from pathlib import Path

import pytest

from kilotok.quant.checkpoint import end_token_ids


@pytest.mark.parametrize(("generation", "config", "expected"), [
    ({"eos_token_id": [2, 0]}, {"eos_token_id": 7}, {2, 0}), ({"eos_token_id": 5}, {}, {5}), ({"eos_token_id": 0}, {"eos_token_id": 7}, {0}),
    ({"eos_token_id": None}, {"eos_token_id": 7}, {7}), ({}, {"eos_token_id": [7, 8]}, {7, 8}), ({}, {}, set()), ({}, {"eos_token_id": None}, set())])
def test_end_tokens_come_from_the_generation_config_first(generation: dict[str, object], config: dict[str, object], expected: set[int], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert end_token_ids(tmp_path) == expected
