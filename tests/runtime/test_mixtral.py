"""Mixtral on the reference executor: transformers' numbers, the column rule, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import export_experts
from families import save_family
from tolerances import FP32_EPS, Bound, assert_equal, assert_within

from kilotok.dflash.context import Taps
from kilotok.quant.archs import load_model
from kilotok.quant.checkpoint import load_exported_model
from kilotok.runtime.archs import graph_of
from kilotok.runtime.weights import load_executor

TAPS = (1, 0)
BOUND = Bound(maximum=64 * FP32_EPS, rms=16 * FP32_EPS, reason="fp32 norms, router and sums in another order, through all layers")


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "num_experts_per_tok": 3, "num_local_experts": 5,
                             "intermediate_size": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}
    return save_family(tmp_path_factory.mktemp("mixtral") / "parent", "mixtral", **shape)


@pytest.fixture(scope="module")
def exported(mixtral: Path) -> Path:
    return export_experts(mixtral, mixtral.with_name("out"))


@pytest.mark.parametrize("packed", [False, True], ids=["parent", "exported"])
def test_logits_and_features_are_those_of_transformers(mixtral: Path, exported: Path, packed: bool) -> None:
    model = load_exported_model(exported, dtype=torch.float32) if packed else load_model(mixtral, dtype=torch.float32)
    model.set_experts_implementation("eager")  # type: ignore[operator]
    executor = load_executor(exported if packed else mixtral, device="cpu", dtype=torch.float32, taps=TAPS)
    ids = torch.randint(4, 4096, (150,), generator=torch.Generator().manual_seed(1)).tolist()
    with Taps(model, layer_ids=TAPS) as taps, torch.no_grad():
        logits, features = model(torch.tensor([ids])).logits[0], taps.take()[0]
    step = executor.open().read(ids)
    assert_within(step.logits_TV, logits, bound=BOUND, what="logits")
    assert_within(step.features_TF, features, bound=BOUND, what="features")


def test_a_token_alone_and_among_others_has_the_same_bits(mixtral: Path) -> None:
    executor = load_executor(mixtral, device="cpu", dtype=torch.float32)
    ids = torch.randint(4, 4096, (20,), generator=torch.Generator().manual_seed(2)).tolist()
    alone = executor.open()
    assert_equal(torch.cat([alone.read([i]).logits_TV for i in ids]), executor.open().read(ids).logits_TV, bits=True)


@pytest.mark.parametrize(("key", "value"), [("sliding_window", 128), ("hidden_act", "gelu"), ("rope_scaling", {"type": "linear", "factor": 2.0}),
                                            ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0})])
def test_a_variant_that_does_not_run(mixtral: Path, key: str, value: Any) -> None:
    config = json.loads((mixtral / "config.json").read_text())
    with pytest.raises(NotImplementedError, match=rf"^here: {key} is .*; the reference executor runs Mixtral with full attention"):
        graph_of({**config, key: value}, where="here")


@pytest.mark.parametrize(("change", "error"), [({"num_local_experts": None}, "no num_local_experts in config"), ({"num_experts_per_tok": 9}, "must lie in"),
                                               ({"rope_parameters": None, "rope_theta": None}, "no rope_theta")])
def test_an_incomplete_config(mixtral: Path, change: dict[str, Any], error: str) -> None:
    config = json.loads((mixtral / "config.json").read_text())
    with pytest.raises(ValueError, match=f"^here: .*{error}"):
        graph_of({**config, **change}, where="here")
