"""What `train qat` refuses: one clear error, before anything is written."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kilotok.quant.checkpoint import disk, export_run
from kilotok.train.cli import main as train


def left_behind(folder: Path, *, before: set[Path]) -> set[Path]:
    return set(folder.rglob("*")) - before


def test_existing_run_is_refused_and_untouched(tiny_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(["qat", str(tiny_recipe)]) == 0
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")}
    assert train(["qat", str(tiny_recipe)]) == 2
    assert "--resume" in capsys.readouterr().err
    assert train(["qat", str(tiny_recipe), "--resume", "--optim.lr", "0.5"]) == 2
    assert "another recipe (now optim.lr: 0.5, was 0.001)" in capsys.readouterr().err
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")} == before


def test_a_quantized_parent_is_refused(tiny_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(["qat", str(tiny_recipe)]) == 0
    export_run(tmp_path / "run", tmp_path / "out")
    assert train(["qat", str(tiny_recipe), "--model", str(tmp_path / "out"), "--run", str(tmp_path / "again")]) == 2
    assert "is quantized already" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()


def test_rows_longer_than_the_model_s_context_are_refused(tiny_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(["qat", str(tiny_recipe), "--data.sequence_length", "513"]) == 2
    assert "max_position_embeddings, 512" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_gpu_that_is_not_there_is_refused(tiny_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert train(["qat", str(tiny_recipe), "--trainer.accelerator", "gpu"]) == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_folder_that_is_no_run_is_refused(tiny_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("mine")
    assert train(["qat", str(tiny_recipe)]) == 2
    assert "is no run of ours" in capsys.readouterr().err
    assert (tmp_path / "run" / "thesis.txt").read_text() == "mine"


def damage_nan(model: Path) -> None:
    state = load_file(model / "model.safetensors")
    state["model.layers.1.mlp.experts.2.up_proj.weight"][3, 5] = float("nan")
    save_file(state, model / "model.safetensors", metadata={"format": "pt"})


def damage_infinity(model: Path) -> None:
    state = load_file(model / "model.safetensors")
    state["model.layers.0.self_attn.q_proj.weight"][1, 2] = float("inf")
    save_file(state, model / "model.safetensors", metadata={"format": "pt"})


def damage_truncate(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def damage_remove_config(model: Path) -> None:
    (model / "config.json").unlink()


def damage_remove_router(model: Path) -> None:
    state = load_file(model / "model.safetensors")
    del state["model.layers.1.mlp.gate.weight"]
    save_file(state, model / "model.safetensors", metadata={"format": "pt"})


def damage_reshape(model: Path) -> None:
    state = load_file(model / "model.safetensors")
    state["model.layers.0.mlp.experts.1.up_proj.weight"] = torch.ones(32, 32, dtype=torch.bfloat16)
    save_file(state, model / "model.safetensors", metadata={"format": "pt"})


def damage_drop_a_layer(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    config = {k: v for k, v in config.items() if k != "layer_types"}
    (model / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))


def damage_make_dense(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}))


def damage_all_layers_dense(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "mlp_only_layers": [0, 1]}))


@pytest.mark.parametrize(("damage", "parts"), [
    (damage_nan, ["model.layers.1.mlp.experts.gate_up_proj", "nan", "(2, 35, 5)", "repair"]),
    (damage_infinity, ["model.layers.0.self_attn.q_proj.weight", "inf", "(1, 2)"]),
    (damage_truncate, ["model.safetensors", "truncated or damaged", "download it again"]),
    (damage_remove_config, ["no config.json", "Give the path of a Hugging Face checkpoint"]),
    (damage_remove_router, ["no tensor named model.layers.1.mlp.gate.weight", "incomplete"]),
    (damage_reshape, ["model.layers.0.mlp.experts.1.up_proj.weight has shape (32, 32)", "(32, 64)"]),
    (damage_drop_a_layer, ["model.layers.1.mlp.experts.", "does not have", "do not belong together"]),
    (damage_make_dense, ["'qwen3'", "qwen3_moe", "no experts to quantize"]),
    (damage_all_layers_dense, ["no expert weight found", "nothing to quantize"]),
])
def test_a_model_that_cannot_be_used_is_refused_before_anything_is_written(
        damage: Callable[[Path], None], parts: list[str], tiny_recipe: Path, tiny_moe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(tiny_moe)
    before = set(tmp_path.rglob("*"))
    assert train(["qat", str(tiny_recipe)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]   # one line, after the progress bars of loading
    assert error.startswith("error: ")
    for part in parts:
        assert part in error
    assert left_behind(tmp_path, before=before) == set()


def test_an_unknown_key_is_refused_before_anything_is_written(tiny_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_recipe.write_text(tiny_recipe.read_text().replace("warmup_steps", "warm_up_steps"))
    before = set(tmp_path.rglob("*"))
    assert train(["qat", str(tiny_recipe)]) == 2
    assert "unknown key 'optim.warm_up_steps'. Did you mean 'optim.warmup_steps'?" in capsys.readouterr().err
    assert left_behind(tmp_path, before=before) == set()


def test_a_missing_model_is_refused(tiny_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = set(tmp_path.rglob("*"))
    assert train(["qat", str(tiny_recipe), "--model", str(tmp_path / "nowhere")]) == 2
    assert f"no directory at {tmp_path / 'nowhere'}" in capsys.readouterr().err
    assert left_behind(tmp_path, before=before) == set()


def test_an_expert_width_that_is_no_multiple_of_32_is_refused(
        tiny_recipe: Path, make_tiny_moe: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_tiny_moe("odd", moe_intermediate_size=48)
    before = set(tmp_path.rglob("*"))
    assert train(["qat", str(tiny_recipe), "--model", str(model)]) == 2
    error = capsys.readouterr().err
    assert "model.layers.0.mlp.experts.down_proj" in error and "multiple of 32" in error and "48" in error
    assert left_behind(tmp_path, before=before) == set()


def test_a_disk_without_room_is_refused_before_anything_is_written(
        tiny_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))  # type: ignore[attr-defined]
    before = set(tmp_path.rglob("*"))
    assert train(["qat", str(tiny_recipe)]) == 2
    assert "Free some space" in capsys.readouterr().err
    assert left_behind(tmp_path, before=before) == set()
