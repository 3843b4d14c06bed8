"""The twin of the persistent step against the reference executor, teacher-forced: the same model, rounded at other points."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from conftest import POCKET, ROOT, export_experts
from families import save_family
from step_models import state_for, teacher_forced, weights_of_directory
from torch import Tensor

from kilotok.kernels.persistent import StepRef
from kilotok.quant.archs import load_tokenizer
from kilotok.quant.checkpoint.metadata import read_json
from kilotok.runtime.archs import graph_of
from kilotok.runtime.step_weights import read_step_weights, step_shape
from kilotok.runtime.weights import load_executor

TAPS = (2, 4, 5)
LENGTH = 140          # over a page's end


@dataclass(frozen=True, kw_only=True)
class Text:
    """Logits of one text, by who computed them; features of the twin and of the reference in float64."""

    twin: Tensor
    twin_exact: Tensor      # sums in float64, rounded at the same points
    reference: Tensor       # in float64
    reference_bf16: Tensor
    features: tuple[Tensor, Tensor]


def texts() -> list[list[int]]:
    rows = [json.loads(line)["prompt"] for n in ("code", "chat", "math", "agent")
            for line in (ROOT / "recipes" / "prompts" / f"{n}.jsonl").read_text().splitlines()[:8]]
    ids = load_tokenizer(POCKET)("\n".join(rows))["input_ids"]
    return [ids[start:start + LENGTH] for start in (0, 300)]


def read(directory: Path, ids: list[int], *, taps: tuple[int, ...]) -> Text:
    weights = weights_of_directory(directory, taps=taps)
    twin, features = teacher_forced(StepRef(weights, state_for(weights.shape)), ids)
    exact, _ = teacher_forced(StepRef(weights, state_for(weights.shape, wide=torch.float64), dtype=torch.float64), ids)
    step, rounded = (load_executor(directory, device="cpu", dtype=dtype, taps=taps).open().read(ids) for dtype in (torch.float64, torch.bfloat16))
    return Text(twin=twin.double(), twin_exact=exact, reference=step.logits_TV, reference_bf16=rounded.logits_TV.double(),
                features=(features.flatten(1).double(), step.features_TF))


def distance(got: Tensor, expected: Tensor) -> float:
    """RMS of a position's difference over the RMS of all, at the middle one of the positions: where a router's tie falls the other way, a few move by more."""
    return float(((got - expected).square().mean(-1).sqrt() / expected.square().mean().sqrt()).median())


@pytest.fixture(scope="module")
def pocket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_experts(POCKET, tmp_path_factory.mktemp("pocket") / "out")


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixtral")
    shape = {"num_attention_heads": 6, "head_dim": 32, "num_experts_per_tok": 3, "num_local_experts": 5}
    return export_experts(save_family(folder / "parent", "mixtral", **shape), folder / "out")


def test_on_the_pocket_it_is_nearer_to_float64_than_the_reference_in_bf16(pocket: Path) -> None:
    disagreements = 0
    for ids in texts():
        text = read(pocket, ids, taps=TAPS)
        assert distance(text.twin, text.reference) < min(0.004, 0.7 * distance(text.reference_bf16, text.reference))   # 0.002 and 0.0026; bf16 0.005, 0.006
        assert distance(text.twin, text.twin_exact) < 0.004                                                           # 0.0014 and 0.0021
        assert distance(*text.features) < 0.006                                                                       # 0.0037 and 0.0041
        reference, twin = text.reference.log_softmax(-1), text.twin.log_softmax(-1)
        assert float((reference.exp() * (reference - twin)).sum(-1).mean()) < 3e-3   # mean KL; 6.5e-4 and 2.1e-3 were measured
        differ = text.reference.argmax(-1) != text.twin.argmax(-1)
        top = text.reference[differ].topk(2, dim=-1).values
        assert bool((top[:, 0] - top[:, 1] < 0.5).all()), "a disagreement where the reference was sure"
        disagreements += int(differ.sum())
    assert disagreements <= 0.02 * 2 * LENGTH


def test_without_norms_of_queries_and_keys(mixtral: Path) -> None:
    ids = torch.randint(4, 4096, (150,), generator=torch.Generator().manual_seed(3)).tolist()
    text = read(mixtral, ids, taps=(1, 0))
    assert distance(text.twin, text.reference) < min(0.01, 0.9 * distance(text.reference_bf16, text.reference))   # 0.0048; bf16 0.0074
    assert distance(text.twin, text.twin_exact) < 0.004
    assert distance(*text.features) < 0.008
    assert float((text.reference.argmax(-1) == text.twin.argmax(-1)).double().mean()) > 0.97


def test_what_the_step_cannot_read_is_refused(pocket: Path, tmp_path: Path) -> None:
    config = read_json(POCKET / "config.json")
    graph = graph_of(config, where="here")
    with pytest.raises(NotImplementedError, match=r"the experts of layer 0 are not in MXFP4, and the persistent step reads nothing else\. Export them"):
        read_step_weights(POCKET, graph=graph, config=config, shape=step_shape(graph), device="cpu", programs=132)
    small = save_family(tmp_path / "small", "mixtral")
    with pytest.raises(NotImplementedError, match=r"^Heads: built for head_dim 32, 64 or 128"):
        step_shape(graph_of(read_json(small / "config.json"), where="here"))
