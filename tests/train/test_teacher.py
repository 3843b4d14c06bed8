"""The parent with its layers in host memory: the same results, and never more than a layer's copy at a time."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, family_model

from kilotok.quant.checkpoint.run import Run
from kilotok.quant.quality import hidden_states
from kilotok.train.cli import main as train
from kilotok.train.qat import QATModule
from kilotok.train.teacher import offload_layers

IDS = torch.arange(3, 27).view(2, 12)
CPU = torch.device("cpu")


def frozen(name: str) -> Any:
    return family_model(name).requires_grad_(False)


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_results_are_bit_equal_for_every_family(name: str) -> None:
    expected = hidden_states(frozen(name), IDS)
    model = frozen(name)
    offload_layers(model, device=CPU)
    for _ in range(2):   # the second pass begins from rest again
        assert torch.equal(hidden_states(model, IDS), expected)


@torch.no_grad()
def test_layers_run_on_copies_that_come_and_go() -> None:
    model = frozen("mixtral")
    at_rest = {n: p.data_ptr() for n, p in model.named_parameters()}
    seen: list[tuple[int, list[int], set[str]]] = []
    offloaded = offload_layers(model, device=CPU)
    for index, layer in enumerate(model.model.layers):
        def look(module: Any, args: Any, index: int = index) -> None:
            moved = {n for n, p in model.named_parameters() if p.data_ptr() != at_rest[n]}
            seen.append((index, offloaded.resident, moved))
        layer.self_attn.register_forward_pre_hook(lambda module, args, look=look: look(module, args))
    hidden_states(model, IDS)
    for index, resident, moved in seen:
        assert resident == [index]
        assert moved == {n for n in at_rest if n.startswith(f"model.layers.{index}.")}   # all of this layer, nothing else
    assert len(seen) == 2 and offloaded.resident == []
    assert {n: p.data_ptr() for n, p in model.named_parameters()} == at_rest


@torch.no_grad()
def test_the_next_layer_is_on_its_way_when_a_layer_is_done() -> None:
    model = frozen("mixtral")
    offloaded = offload_layers(model, device=CPU)
    after: list[list[int]] = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, args, output: after.append(offloaded.resident))
    hidden_states(model, IDS)
    assert after == [[1], []]


@torch.no_grad()
def test_what_the_host_holds_is_what_is_computed_with() -> None:
    """The copies are made anew at every pass, buffers included: a change at rest is seen."""
    model = frozen("deepseek_v3")
    offload_layers(model, device=CPU)
    before = hidden_states(model, IDS)
    model.model.layers[1].mlp.gate.e_score_correction_bias[:2] += 100.0   # a buffer or a parameter, by transformers version
    moved = hidden_states(model, IDS)
    model.model.layers[0].input_layernorm.weight *= 2
    assert not torch.equal(before, moved) and not torch.equal(moved, hidden_states(model, IDS))


def test_a_tied_head_stays_tied(tiny_moe: Path) -> None:
    model: Any = family_model("qwen3_moe", tie_word_embeddings=True).requires_grad_(False)
    offload_layers(model, device=CPU)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_model_that_is_trained_is_refused() -> None:
    with pytest.raises(ValueError, match="must be frozen"):
        offload_layers(family_model("mixtral"), device=CPU)


def test_a_run_with_an_offloaded_teacher_is_the_run_without(tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[bool] = []
    real = QATModule.training_step

    def step(self: QATModule, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        used.append(self.offloaded is not None)
        return real(self, batch, batch_idx)

    monkeypatch.setattr(QATModule, "training_step", step)
    common = ["qat", str(tiny_recipe), "--trainer.max_steps", "3"]
    assert train([*common, "--run", str(tmp_path / "a")]) == 0
    assert train([*common, "--run", str(tmp_path / "b"), "--loss.teacher_offload", "true"]) == 0
    assert used == [False] * 3 + [True] * 3
    a, b = (Run.open(tmp_path / r).load_trained_weights() for r in ("a", "b"))
    assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
    results = [json.loads((tmp_path / r / "meta.json").read_text()) for r in ("a", "b")]
    assert results[0]["qat"] == results[1]["qat"] and results[0]["round_to_nearest"] == results[1]["round_to_nearest"]


def test_offloading_a_sharded_parent_is_refused(tiny_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(["qat", str(tiny_recipe), "--loss.teacher_offload", "true", "--trainer.strategy", "fsdp"]) == 2
    assert "in pieces on the devices" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@torch.no_grad()
def test_on_a_gpu_results_are_bit_equal_and_two_layers_fit() -> None:
    """Six layers of about 50 MB each: their copies never take more than three layers' memory (two, and what the allocator rounds up)."""
    device = torch.device("cuda")
    shape: dict[str, Any] = {"num_hidden_layers": 6, "num_local_experts": 8, "hidden_size": 512, "intermediate_size": 2048}
    resident = family_model("mixtral", **shape).requires_grad_(False).to(device)
    expected = hidden_states(resident, IDS.to(device))
    one_layer = sum(p.numel() * p.element_size() for p in resident.model.layers[0].parameters())   # type: ignore[union-attr, index]
    del resident
    model: Any = family_model("mixtral", **shape).requires_grad_(False)
    offload_layers(model, device=device)
    assert all(p.is_pinned() for p in model.model.layers.parameters()) and model.lm_head.weight.is_cuda
    hidden_states(model, IDS.to(device))   # warms the allocator and cuBLAS
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        assert torch.equal(hidden_states(model, IDS.to(device)), expected)
    assert torch.cuda.max_memory_allocated() - before < 3 * one_layer
