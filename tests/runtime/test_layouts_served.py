"""A directory serves the same numbers in whatever layout it lies, and they are those of training; it can be a target, or a parent again."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import finished_run, save_tiny_moe

from kilotok.quant.archs import load_model
from kilotok.quant.checkpoint import ExportOptions, convert_directory, export_run, load_exported_model
from kilotok.runtime.weights import load_executor
from kilotok.train.cli import main as train

WIDE = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 64}   # more than one FP8 tile


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One run with FP8 attention in both layouts that hold it, and its values."""
    root = tmp_path_factory.mktemp("served")
    parent = save_tiny_moe(root / "parent", **WIDE)
    finished_run(root / "run", parent, move=0.02, quant={"attention": "fp8_block"})
    for layout in ("compressed-tensors", "mimo"):
        export_run(root / "run", root / layout, options=ExportOptions(layout=layout))
    convert_directory(root / "mimo", root / "dense", layout="dense")
    return {name: root / name for name in ("compressed-tensors", "mimo", "dense")}


def weights_of(executor: Any) -> list[torch.Tensor]:
    w = executor.weights
    return [w.embedding, w.norm, w.head, *(t for layer in w.layers for t in (layer.qkv, layer.out, layer.router, layer.gate_up, layer.down))]


def test_the_executor_reads_the_values_of_training_from_every_layout(directories: dict[str, Path]) -> None:
    expected = load_exported_model(directories["compressed-tensors"], dtype=torch.float32).state_dict()
    for name, directory in directories.items():
        executor = load_executor(directory, device="cpu", dtype=torch.float32)
        for i, layer in enumerate(executor.weights.layers):
            at = f"model.layers.{i}"
            assert torch.equal(layer.gate_up, expected[f"{at}.mlp.experts.gate_up_proj"]), name
            assert torch.equal(layer.down, expected[f"{at}.mlp.experts.down_proj"]), name
            assert torch.equal(layer.out, expected[f"{at}.self_attn.o_proj.weight"]), name
            assert torch.equal(layer.qkv, torch.cat([expected[f"{at}.self_attn.{p}_proj.weight"] for p in "qkv"])), name
    assert not torch.equal(expected["model.layers.0.self_attn.o_proj.weight"],
                           load_model(directories["mimo"].parent / "parent", dtype=torch.float32).state_dict()["model.layers.0.self_attn.o_proj.weight"])


def test_the_values_are_a_parent_to_train_and_the_packed_directory_says_how(
        directories: dict[str, Path], tiny_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(["qat", str(tiny_recipe), "--model", str(directories["mimo"]), "--run", str(tmp_path / "no")]) == 2
    assert "kilotok convert" in (error := capsys.readouterr().err) and "--layout dense" in error
    assert train(["qat", str(tiny_recipe), "--model", str(directories["dense"]), "--run", str(tmp_path / "again"), "--trainer.max_steps", "2"]) == 0
    assert train(["qat", str(tiny_recipe), "--model", str(directories["dense"]), "--run", str(tmp_path / "again"), "--trainer.max_steps", "2", "--resume"]) == 0
    capsys.readouterr()
    export_run(tmp_path / "again", tmp_path / "out", options=ExportOptions(layout="mimo"))
    assert (tmp_path / "out" / "model.safetensors").is_file()
