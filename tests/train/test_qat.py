"""`train qat` end to end on a tiny model: what it writes, what it refuses, and resuming after a kill."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from forked import Forked, start
from safetensors.torch import load_file

from kilotok.quant.checkpoint.run import Run
from kilotok.train.callbacks import save_final
from kilotok.train.cli import main as train
from kilotok.train.qat import QATModule


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in Run.open(run).load_trained_weights().items()}


def test_run_directory_holds_recipe_meta_checkpoint_and_metrics(tiny_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(["qat", str(tiny_recipe)]) == 0
    run = tmp_path / "run"
    assert sorted(p.name for p in run.iterdir()) == ["checkpoints", "meta.json", "metrics.csv", "recipe.yaml", "report.md"]
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["step-00000006.ckpt"]
    meta = json.loads((run / "meta.json").read_text())
    assert meta["status"] == "complete"
    assert {"format": "mxfp4", "scale_mode": "even", "source_dtype": "bfloat16", "trainable": "experts", "experts": "mxfp4", "keep": []}.items() \
        <= meta["quant"].items()
    assert len(meta["parent"]["sha256"]) == 64 and meta["versions"]["torch"] == torch.__version__
    rows = list(csv.DictReader((run / "metrics.csv").open()))
    assert [int(r["step"]) for r in rows] == [1, 2, 3, 4, 5, 6] and all(float(r["kl"]) > 0 for r in rows)
    out = capsys.readouterr().out
    assert "MXFP4 (routed experts)" in out and "router" in out and "gap" in out


def test_training_moves_the_experts_and_nothing_else(tiny_recipe: Path, tiny_moe: Path, tmp_path: Path) -> None:
    assert train(["qat", str(tiny_recipe)]) == 0
    trained = weights_of(tmp_path / "run")
    assert sorted(trained) == sorted(f"model.layers.{i}.mlp.experts.{p}" for i in (0, 1) for p in ("gate_up_proj", "down_proj"))
    disk_state = load_file(tiny_moe / "model.safetensors")
    gate = disk_state["model.layers.0.mlp.experts.1.gate_proj.weight"].float()
    assert not torch.equal(trained["model.layers.0.mlp.experts.gate_up_proj"][1, :32], gate)


def test_trainable_all_trains_every_tensor(tiny_recipe: Path, tmp_path: Path) -> None:
    assert train(["qat", str(tiny_recipe), "--quant.trainable", "all"]) == 0
    trained = weights_of(tmp_path / "run")
    assert "model.layers.0.self_attn.q_proj.weight" in trained and "model.layers.1.mlp.gate.weight" in trained


def test_training_lowers_the_divergence_from_the_parent(tiny_recipe: Path, tmp_path: Path) -> None:
    assert train(["qat", str(tiny_recipe), "--trainer.max_steps", "40", "--trainer.checkpoint_every_steps", "40", "--optim.lr", "2e-3"]) == 0
    meta = json.loads((tmp_path / "run" / "meta.json").read_text())
    assert meta["qat"]["code"]["kl"] < meta["round_to_nearest"]["code"]["kl"]


def test_bf16_mixed_precision_trains(tiny_recipe: Path, tmp_path: Path) -> None:
    assert train(["qat", str(tiny_recipe), "--trainer.precision", "bf16-mixed"]) == 0
    assert all(w.dtype == torch.float32 and bool(torch.isfinite(w).all()) for w in weights_of(tmp_path / "run").values())


def test_accumulated_micro_batches_read_the_same_rows_as_one_batch(tiny_recipe: Path, tmp_path: Path) -> None:
    """Two micro-batches of 2 and one batch of 4 see the same text; sums are taken in another order, so only nearly the same step.

    Bound: AdamW divides by the gradient's own size, so a rounding difference of 1e-7 in a gradient near zero can move its
    weight by a whole step; after one step no weight may differ by more than twice the rate, and the mean by far less.
    """
    common = ["qat", str(tiny_recipe), "--trainer.max_steps", "1", "--optim.lr", "1e-3"]
    assert train([*common, "--run", str(tmp_path / "a"), "--trainer.batch_size", "4"]) == 0
    assert train([*common, "--run", str(tmp_path / "b"), "--trainer.batch_size", "2", "--trainer.accumulate_grad_batches", "2"]) == 0
    a, b = weights_of(tmp_path / "a"), weights_of(tmp_path / "b")
    for name in a:
        difference = (a[name] - b[name]).abs()
        assert float(difference.max()) <= 2.1e-3 and float(difference.mean()) < 2e-5, name


@pytest.mark.xdist_group("ranks")
def test_two_devices_read_the_rows_of_one_and_train_alike(tiny_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Data-parallel over two CPU processes, started by the command line, against one device with the joint batch; bounds as for accumulation above."""
    common = ["qat", str(tiny_recipe), "--trainer.max_steps", "2", "--trainer.checkpoint_every_steps", "1"]
    assert train([*common, "--run", str(tmp_path / "one"), "--trainer.batch_size", "4"]) == 0
    command = [sys.executable, "-m", "kilotok.train.cli", *common, "--run", str(tmp_path / "two"), "--trainer.devices", "2"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for printed in (capsys.readouterr().out, done.stdout):
        assert printed.count("gap") == 2   # one table, its legend once
    a, b = weights_of(tmp_path / "one"), weights_of(tmp_path / "two")
    for name in a:
        difference = (a[name] - b[name]).abs()
        assert float(difference.max()) <= 4.2e-3 and float(difference.mean()) < 4e-5, name
    assert len(list(csv.DictReader((tmp_path / "two" / "metrics.csv").open()))) == 2


def start_and_wait_for_a_checkpoint(command: list[str], run: Path, *, printed: Path) -> Forked:
    process = start(train, [*command, "--run", str(run)], folder=printed)
    deadline = time.monotonic() + 120
    while not list((run / "checkpoints").glob("step-*.ckpt")) and process.is_running() and time.monotonic() < deadline:
        time.sleep(0.01)
    return process


def test_kill_and_resume_gives_the_weights_of_an_uninterrupted_run(
        tiny_recipe: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["qat", str(tiny_recipe), "--trainer.max_steps", "40", "--trainer.checkpoint_every_steps", "5"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert train([*command, "--run", str(whole)]) == 0
    process = start_and_wait_for_a_checkpoint(command, killed, printed=tmp_path_factory.mktemp("printed"))
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    stopped = Run.open(killed)
    assert 0 < stopped.step < 40 and json.loads((killed / "meta.json").read_text())["status"] == "running"
    capsys.readouterr()
    assert train([*command, "--run", str(killed), "--resume"]) == 0
    assert "resuming from step-" in capsys.readouterr().out
    a, b = weights_of(whole), weights_of(killed)
    assert a.keys() == b.keys()
    assert [n for n in a if not torch.equal(a[n], b[n])] == []
    rows = [[r for r in csv.DictReader((run / "metrics.csv").open())] for run in (whole, killed)]
    assert rows[0] == rows[1]
    results = [json.loads((run / "meta.json").read_text()) for run in (whole, killed)]
    assert results[0]["qat"] == results[1]["qat"] and results[0]["round_to_nearest"] == results[1]["round_to_nearest"]


def test_resume_after_a_kill_before_the_first_checkpoint_starts_over(tiny_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(["qat", str(tiny_recipe)]) == 0
    expected = weights_of(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    meta = json.loads((tmp_path / "run" / "meta.json").read_text())
    (tmp_path / "run" / "meta.json").write_text(json.dumps({**meta, "status": "running"}))
    assert train(["qat", str(tiny_recipe), "--resume"]) == 0
    assert "no checkpoint yet" in capsys.readouterr().out
    assert all(torch.equal(w, expected[n]) for n, w in weights_of(tmp_path / "run").items())


def test_resume_of_a_complete_run_does_nothing(tiny_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(["qat", str(tiny_recipe)]) == 0
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")}
    assert train(["qat", str(tiny_recipe), "--resume"]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")} == before


def test_a_run_killed_while_it_was_made_starts_over(tiny_recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text("half")
    (tmp_path / "run" / ".meta.json.partial").write_text("half")
    assert train(["qat", str(tiny_recipe), "--resume"]) == 0
    assert Run.open(tmp_path / "run").is_complete
    assert not (tmp_path / "run" / ".meta.json.partial").exists()


def interrupted(tiny_recipe: Path, run: Path, monkeypatch: pytest.MonkeyPatch, *, at_step: int = 3) -> None:
    """Stop a run of the recipe inside a training step, as Ctrl-C would."""
    real = QATModule.training_step

    def step(self: QATModule, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.global_step == at_step:
            raise ValueError("stopped by the test")
        return real(self, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(QATModule, "training_step", step)
        assert train(["qat", str(tiny_recipe), "--run", str(run)]) == 2


def test_a_resumed_run_keeps_one_checkpoint_and_may_have_moved(tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(tiny_recipe, tmp_path / "run", monkeypatch)
    (tmp_path / "run").rename(tmp_path / "moved")
    assert train(["qat", str(tiny_recipe), "--run", str(tmp_path / "moved"), "--resume"]) == 0
    assert [p.name for p in (tmp_path / "moved" / "checkpoints").iterdir()] == ["step-00000006.ckpt"]


def test_resume_is_bitwise_for_a_parent_with_dropout(
        tiny_recipe: Path, make_tiny_moe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tmp_path / "dropout.yaml"
    recipe.write_text(tiny_recipe.read_text().replace(str(tmp_path / "tiny"), str(make_tiny_moe("dropout", attention_dropout=0.3))))
    assert train(["qat", str(recipe), "--run", str(tmp_path / "whole")]) == 0
    interrupted(recipe, tmp_path / "run", monkeypatch)
    assert train(["qat", str(recipe), "--resume", "--run", str(tmp_path / "run")]) == 0
    a, b = weights_of(tmp_path / "whole"), weights_of(tmp_path / "run")
    assert [n for n in a if not torch.equal(a[n], b[n])] == []


def test_resume_on_other_text_is_refused(tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    interrupted(tiny_recipe, tmp_path / "run", monkeypatch)
    text = (tmp_path / "text.jsonl").read_text()
    (tmp_path / "text.jsonl").write_text(text.replace("add_7", "sub_7"))
    assert train(["qat", str(tiny_recipe), "--resume"]) == 2
    assert "the text has changed" in capsys.readouterr().err


@pytest.mark.parametrize("keep", [0, 10, 20_000])
def test_resume_from_a_truncated_checkpoint_says_what_to_do(
        keep: int, tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    interrupted(tiny_recipe, tmp_path / "run", monkeypatch)
    (path,) = (tmp_path / "run" / "checkpoints").iterdir()
    path.write_bytes(path.read_bytes()[:keep])
    assert train(["qat", str(tiny_recipe), "--resume"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "step-00000002.ckpt: cannot be read as a checkpoint" in error and "Remove it" in error
    path.unlink()
    assert train(["qat", str(tiny_recipe), "--resume"]) == 0


def test_divergence_is_an_error_and_is_not_saved(tiny_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(["qat", str(tiny_recipe), "--optim.lr", "1e38", "--optim.warmup_steps", "3", "--trainer.checkpoint_every_steps", "1"]) == 2
    assert "error: " in capsys.readouterr().err
    for path in (tmp_path / "run" / "checkpoints").glob("*.ckpt"):
        assert all(bool(torch.isfinite(w).all()) for w in weights_of(tmp_path / "run").values()), path


def test_held_out_figures_while_training_go_to_the_csv(tiny_recipe: Path, tmp_path: Path) -> None:
    assert train(["qat", str(tiny_recipe), "--trainer.val_every_steps", "3", "--trainer.accumulate_grad_batches", "2"]) == 0
    rows = [r for r in csv.DictReader((tmp_path / "run" / "metrics.csv").open()) if r["heldout_kl"]]
    assert [int(r["step"]) for r in rows] == [3, 6] and rows[0]["heldout_kl"] != rows[1]["heldout_kl"]
    final = json.loads((tmp_path / "run" / "meta.json").read_text())["qat"]["code"]
    assert float(rows[1]["heldout_kl"]) == final["kl"]


def test_ctrl_c_says_how_to_go_on(tiny_recipe: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    command = ["qat", str(tiny_recipe), "--trainer.max_steps", "2000"]
    process = start_and_wait_for_a_checkpoint(command, tmp_path / "run", printed=tmp_path_factory.mktemp("printed"))
    os.kill(process.pid, signal.SIGINT)
    assert process.wait() == 130 and "--resume" in process.stderr.read_text().splitlines()[-1]


def test_a_write_that_fails_half_way_leaves_the_earlier_checkpoint(
        tiny_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = torch.save, []

    def save(checkpoint: object, f: object) -> None:
        calls.append(1)
        if len(calls) == 2:
            f.write(b"half a checkpoint")  # type: ignore[attr-defined]
            raise OSError(28, "No space left on device")
        real(checkpoint, f)  # type: ignore[arg-type]

    monkeypatch.setattr(torch, "save", save)
    assert train(["qat", str(tiny_recipe)]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002.ckpt"]
    monkeypatch.undo()
    assert train(["qat", str(tiny_recipe), "--resume"]) == 0
    assert Run.open(tmp_path / "run").step == 6


def test_wandb_is_offline_and_says_so_without_a_network(
        tiny_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:1")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    assert train(["qat", str(tiny_recipe), "--trainer.wandb_project", "pocket"]) == 0
    assert "wandb: offline (127.0.0.1 cannot be reached" in capsys.readouterr().out
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*"))
    assert len(list(csv.DictReader((tmp_path / "run" / "metrics.csv").open()))) == 6   # the CSV is written all the same


def test_a_run_started_before_there_were_more_options_goes_on(tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its recipe and its record name fewer fields; they count as the defaults."""
    interrupted(tiny_recipe, tmp_path / "run", monkeypatch)
    recipe = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())
    for section, fields in {"quant": ("backward", "keep", "attention"), "trainer": ("strategy", "num_nodes"), "loss": ("teacher_offload",)}.items():
        for field in fields:
            del recipe[section][field]
    del recipe["baselines"]
    (tmp_path / "run" / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    meta = json.loads((tmp_path / "run" / "meta.json").read_text())
    meta["quant"] = {k: meta["quant"][k] for k in ("format", "scale_mode", "source_dtype", "trainable")}
    (tmp_path / "run" / "meta.json").write_text(json.dumps(meta))
    assert train(["qat", str(tiny_recipe), "--resume"]) == 0
    assert Run.open(tmp_path / "run").is_complete


@pytest.mark.parametrize(("options", "said"), [
    (["--quant.keep_format", "mxfp8"], "quant.keep_format: mxfp8 has nothing to apply to"),
    (["--quant.granularity", "projection"], "quant.granularity: projection is how a budget is spent"),
    (["--quant.experts", "bf16", "--quant.activations", "mxfp8"], "quant.experts: bf16 is the control"),
])
def test_options_without_effect_are_refused(options: list[str], said: str, tiny_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(["qat", str(tiny_recipe), *options]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_whether_the_last_checkpoint_is_missing_is_decided_by_one_rank_for_all(tmp_path: Path) -> None:
    """Each looking for itself, one may see the file that another has just written, and not meet it in the barrier of the save."""
    saved: list[Path] = []

    class Strategy:
        def broadcast(self, missing: bool) -> bool:
            return not missing   # what the first rank saw

    class Trainer:
        global_step, strategy = 6, Strategy()

        def save_checkpoint(self, path: Path) -> None:
            saved.append(path)

    final = tmp_path / "checkpoints" / "step-00000006.ckpt"
    save_final(Trainer(), run_dir=tmp_path)   # type: ignore[arg-type]
    assert saved == []
    final.parent.mkdir()
    final.touch()
    save_final(Trainer(), run_dir=tmp_path)   # type: ignore[arg-type]
    assert saved == [final]
