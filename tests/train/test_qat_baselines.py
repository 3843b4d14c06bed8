"""What `train qat` compares the trained model with: round-to-nearest in other scale modes, and the control that is not quantized."""

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kilotok.quant.checkpoint.run import Run
from kilotok.train import qat_run
from kilotok.train.cli import main as train
from kilotok.train.qat import QATModule
from kilotok.train.report import qat_table


def meta_of(run: Path) -> dict[str, Any]:
    meta: dict[str, Any] = json.loads((run / "meta.json").read_text())
    return meta


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in Run.open(run).load_trained_weights().items()}


def test_rounding_in_another_mode_is_what_a_run_in_that_mode_measures(tiny_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And it leaves no trace: training in the own mode goes on as without."""
    short = ["qat", str(tiny_recipe), "--trainer.max_steps", "2"]
    assert train([*short, "--baselines.scale_modes", "[even, floor, mse]"]) == 0
    assert "round-to-nearest, floor" in capsys.readouterr().out
    assert train([*short, "--run", str(tmp_path / "floor"), "--quant.scale_mode", "floor"]) == 0
    assert train([*short, "--run", str(tmp_path / "even")]) == 0
    meta, floor, even = (meta_of(tmp_path / r) for r in ("run", "floor", "even"))
    assert list(meta["round_to_nearest_modes"]) == ["floor", "mse"]   # the own mode is measured once
    assert meta["round_to_nearest_modes"]["floor"] == floor["round_to_nearest"] != meta["round_to_nearest"]
    assert meta["round_to_nearest_modes"]["mse"]["code"]["kl"] not in (meta["round_to_nearest"]["code"]["kl"], floor["round_to_nearest"]["code"]["kl"])
    assert meta["round_to_nearest"] == even["round_to_nearest"] and meta["qat"] == even["qat"]
    a, b = weights_of(tmp_path / "run"), weights_of(tmp_path / "even")
    assert all(torch.equal(a[n], b[n]) for n in a)


def test_the_control_is_a_run_with_bf16_experts(tiny_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ce = ["--loss.kl_weight", "0", "--loss.ce_weight", "1"]
    assert train(["qat", str(tiny_recipe), *ce, "--baselines.control", "true"]) == 0
    out = capsys.readouterr().out
    assert train(["qat", str(tiny_recipe), *ce, "--run", str(tmp_path / "bf16"), "--quant.experts", "bf16"]) == 0
    meta, control, alone = (meta_of(tmp_path / r) for r in ("run", "run/control", "bf16"))
    assert control["status"] == "complete" and control["quant"]["experts"] == "bf16"
    assert control["round_to_nearest"]["code"]["kl"] == 0.0   # the parent is bf16: its masters round to themselves
    assert meta["control"] == control["qat"] == alone["qat"]
    assert meta["control"]["code"]["cross_entropy"] < meta["control"]["code"]["parent_cross_entropy"]   # it was trained
    a, b = weights_of(tmp_path / "run" / "control"), weights_of(tmp_path / "bf16")
    assert sorted(a) == sorted(weights_of(tmp_path / "run")) and all(torch.equal(a[n], b[n]) for n in a)
    assert len(list(csv.DictReader((tmp_path / "run" / "control" / "metrics.csv").open()))) == 6
    assert out.count("held-out text ") == 1 and "control: bf16, trained" in out and "fitting to text" in out   # one table, the control in it
    assert "control: bf16, trained" in (tmp_path / "run" / "report.md").read_text()
    meta["loss"]["ce_weight"] = 0.0
    assert "moves the parent" in qat_table(meta)


def test_the_control_leaves_out_all_quantization_of_the_run(tiny_recipe: Path, tmp_path: Path) -> None:
    """The same tensors are trained, and none is rounded but to bf16: it starts at the parent."""
    assert train(["qat", str(tiny_recipe), "--trainer.max_steps", "1", "--baselines.control", "true", "--quant.trainable", "all", "--quant.attention", "mxfp8",
                  "--quant.activations", "mxfp8", "--quant.keep", "['model.layers.0.*']", "--quant.expected", "{experts: 4, attention: 8}"]) == 0
    control = meta_of(tmp_path / "run" / "control")
    assert control["round_to_nearest"]["code"]["kl"] == 0.0 and control["quant"]["attention"] is None and control["quant"]["activations"] is None
    assert sorted(weights_of(tmp_path / "run")) == sorted(weights_of(tmp_path / "run" / "control"))


@pytest.mark.parametrize("stopped_in", ["the run", "the control"])
def test_a_run_with_a_control_killed_anywhere_continues(stopped_in: str, tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["qat", str(tiny_recipe), "--trainer.max_steps", "3", "--baselines.control", "true"]
    assert train([*command, "--run", str(tmp_path / "whole")]) == 0
    real = QATModule.training_step

    def step(self: QATModule, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.global_step == 2 and (self.recipe.quant.experts == "bf16") == (stopped_in == "the control"):
            raise KeyboardInterrupt
        return real(self, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(QATModule, "training_step", step)
        assert train(command) == 130
    meta = meta_of(tmp_path / "run")
    assert meta["status"] == "running" and ("qat" in meta) == (stopped_in == "the control")
    trained = [] if stopped_in == "the run" else [(tmp_path / "run" / "metrics.csv").stat().st_mtime_ns]
    assert train([*command, "--resume"]) == 0
    assert trained in ([], [(tmp_path / "run" / "metrics.csv").stat().st_mtime_ns])   # a finished training is not opened again
    whole, run = meta_of(tmp_path / "whole"), meta_of(tmp_path / "run")
    for key in ("status", "round_to_nearest", "qat", "control", "coverage"):
        assert run[key] == whole[key], key
    assert all(torch.equal(w, weights_of(tmp_path / "whole" / "control")[n]) for n, w in weights_of(tmp_path / "run" / "control").items())


def test_a_control_on_other_text_than_its_run_is_refused(
        tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["qat", str(tiny_recipe), "--trainer.max_steps", "1", "--baselines.control", "true"]
    assert train(command) == 0
    shutil.rmtree(tmp_path / "run" / "control")
    meta = meta_of(tmp_path / "run")
    del meta["control"]
    (tmp_path / "run" / "meta.json").write_text(json.dumps({**meta, "status": "running"}))
    text = tmp_path / "text.jsonl"
    text.write_text(text.read_text().replace("add_7", "sub_7"))
    assert train([*command, "--resume"]) == 2
    assert "the text has changed" in capsys.readouterr().err
    assert not (tmp_path / "run" / "control").exists()


@pytest.mark.parametrize(("options", "message"), [
    (["--baselines.scale_modes", "[even, even]"], "baselines.scale_modes: must be different modes"),
    (["--baselines.scale_modes", "[nearest]"], "baselines.scale_modes"),
    (["--baselines.control", "true", "--quant.experts", "bf16"], "is itself the control"),
    (["--baselines.scale_modes", "[mse]", "--quant.experts", "bf16"], "rounds nothing"),
    (["--baselines.control", "true", "--quant.attention", "mxfp8"], "quant.trainable: all"),
])
def test_baselines_that_say_nothing_are_refused(
        options: list[str], message: str, tiny_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(["qat", str(tiny_recipe), *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_room_for_the_control_s_checkpoints_is_asked_for_beforehand(tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def stop(directory: Path, *, num_bytes: int, what: str) -> None:
        asked.append(num_bytes)
        raise OSError("stop")

    monkeypatch.setattr(qat_run, "require_free_space", stop)
    for control in ("false", "true"):
        assert train(["qat", str(tiny_recipe), "--baselines.control", control]) == 2
    assert asked[1] == asked[0] * 3 // 2


@pytest.mark.xdist_group("ranks")
def test_two_devices_train_the_control_after_the_run(tiny_recipe: Path, tmp_path: Path) -> None:
    """Both processes go on from the one training to the other, and both come back after a kill between the two."""
    command = [sys.executable, "-m", "kilotok.train.cli", "qat", str(tiny_recipe), "--trainer.max_steps", "1", "--trainer.devices", "2",
               "--baselines.control", "true"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("held-out text ") == 1 and "control: bf16, trained" in done.stdout
    whole = meta_of(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "control")
    (tmp_path / "run" / "meta.json").write_text(json.dumps({**{k: v for k, v in whole.items() if k != "control"}, "status": "running"}))
    again = subprocess.run([*command, "--resume"], capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert meta_of(tmp_path / "run")["control"] == whole["control"]
