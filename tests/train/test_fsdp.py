"""FSDP2: two ranks train what one trains, checkpoints are sharded and whole, a run goes on with another number of ranks, the export is the same."""

import csv
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import save_tiny_moe
from families import FAMILIES, save_family
from ranks import command_on_ranks, stop_at
from torch import nn

from kilotok.quant.archs import empty_model, find_arch, load_config, load_model
from kilotok.quant.checkpoint import CheckpointReader, export_run
from kilotok.quant.checkpoint.run import Run
from kilotok.quant.checkpoint.shards import ParameterSource
from kilotok.train.cli import main as train
from kilotok.train.config import QATRecipe
from kilotok.train.qat import QATModule
from kilotok.train.recipe import load_recipe
from kilotok.train.sharding import materialize

pytestmark = pytest.mark.xdist_group("ranks")
FSDP = ["--trainer.strategy", "fsdp"]
TWO = [*FSDP, "--trainer.devices", "2", "--trainer.batch_size", "1"]


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """Runs of one rank in this process connect it to itself; later tests start processes of their own, which inherit the environment."""
    before = dict(os.environ)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)


def run_cli(*args: object) -> subprocess.CompletedProcess[str]:
    """A process of its own: Lightning starts the command again for every further rank."""
    result = subprocess.run([sys.executable, "-m", "kilotok.train.cli", "qat", *map(str, args)], capture_output=True, text=True, timeout=300, check=False,
                            env={**os.environ, "KILOTOK_TRACEBACK": "1"})
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return result


def on_two_ranks(recipe: Path, *more: str, run: Path, **how: Any) -> None:
    """The same without the imports of new interpreters (how: as `command_on_ranks`)."""
    command_on_ranks(train, ["qat", str(recipe), *more, *TWO, "--run", str(run)], world=2, folder=run.with_name(f"{run.name}-ranks"), **how)


def losses(run: Path) -> list[float]:
    return [float(r["loss"]) for r in csv.DictReader((run / "metrics.csv").open())]


def exported(run: Path, out: Path) -> bytes:
    export_run(run, out)
    return (out / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_two_ranks_reach_the_loss_of_one_over_fifty_steps(tiny_recipe: Path, tmp_path: Path) -> None:
    steps = ["--trainer.max_steps", "50", "--trainer.checkpoint_every_steps", "25"]
    assert train(["qat", str(tiny_recipe), *steps, "--run", str(tmp_path / "one")]) == 0
    on_two_ranks(tiny_recipe, *steps, run=tmp_path / "two")
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    # fp32: the same gradients in another order of summation. AdamW divides by their size, so roundings of small ones grow with the steps.
    assert len(one) == len(two) == 50 and one[-1] < one[0]
    assert max(abs(a - b) / a for a, b in zip(one, two, strict=True)) < 1e-3
    a, b = (json.loads((tmp_path / r / "meta.json").read_text()) for r in ("one", "two"))
    for stage in ("round_to_nearest", "qat"):
        assert a[stage]["code"]["tokens"] == b[stage]["code"]["tokens"]
        assert a[stage]["code"]["kl"] == pytest.approx(b[stage]["code"]["kl"], rel=1e-3)


def test_a_sharded_checkpoint_exports_to_the_bytes_of_the_same_weights_in_one_file(tiny_recipe: Path, tmp_path: Path) -> None:
    run_cli(tiny_recipe, *TWO, "--run", tmp_path / "two")
    checkpoint = Run.open(tmp_path / "two").checkpoint
    assert checkpoint.is_dir() and len(list(checkpoint.glob("*.distcp"))) == 2
    weights = Run.open(tmp_path / "two").load_trained_weights()
    assert sorted(weights) == [f"model.layers.{i}.mlp.experts.{p}_proj" for i in (0, 1) for p in ("down", "gate_up")]
    one = tmp_path / "one" / "checkpoints"
    one.mkdir(parents=True)
    (tmp_path / "one" / "meta.json").write_text((tmp_path / "two" / "meta.json").read_text())
    torch.save({"state_dict": {f"student.{n}": w for n, w in weights.items()}}, one / checkpoint.name)
    assert exported(tmp_path / "two", tmp_path / "out-two") == exported(tmp_path / "one", tmp_path / "out-one")


def test_a_run_goes_on_with_another_number_of_ranks(tiny_recipe: Path, tmp_path: Path) -> None:
    on_two_ranks(tiny_recipe, run=tmp_path / "whole")
    short = tmp_path / "short"
    on_two_ranks(tiny_recipe, run=short, patch=stop_at(3, module=QATModule), exit_code=-signal.SIGKILL)
    assert Run.open(short).step == 2
    assert train(["qat", str(tiny_recipe), *FSDP, "--trainer.batch_size", "2", "--run", str(short), "--resume"]) == 0
    assert len(losses(short)) == 6
    # one rank adds the two rows' gradients in another order than two
    for a, b in zip(losses(tmp_path / "whole"), losses(short), strict=True):
        assert a == pytest.approx(b, rel=1e-4)
    assert json.loads((short / "meta.json").read_text())["qat"]["code"]["kl"] == pytest.approx(
        json.loads((tmp_path / "whole" / "meta.json").read_text())["qat"]["code"]["kl"], rel=1e-3)


def test_resume_with_other_rows_a_step_is_refused(tiny_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(["qat", str(tiny_recipe), *FSDP]) == 0
    assert train(["qat", str(tiny_recipe), *FSDP, "--trainer.batch_size", "4", "--resume"]) == 2
    assert "rows of a step" in capsys.readouterr().err


def test_a_sharded_run_continues_to_the_bits_of_an_uninterrupted_one(tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert train(["qat", str(tiny_recipe), *FSDP, "--run", str(tmp_path / "whole")]) == 0
    real = QATModule.training_step

    def step(self: QATModule, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.global_step == 3:
            raise ValueError("stopped by the test")
        return real(self, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(QATModule, "training_step", step)
        assert train(["qat", str(tiny_recipe), *FSDP, "--run", str(tmp_path / "short")]) == 2
    assert [p.name for p in (tmp_path / "short" / "checkpoints").iterdir()] == ["step-00000002.ckpt"]
    assert train(["qat", str(tiny_recipe), *FSDP, "--run", str(tmp_path / "short"), "--resume"]) == 0
    a, b = (Run.open(tmp_path / r).load_trained_weights() for r in ("whole", "short"))
    assert [n for n in a if not torch.equal(a[n], b[n])] == [] and losses(tmp_path / "whole") == losses(tmp_path / "short")


@pytest.mark.parametrize("options", [["--trainer.gradient_checkpointing", "true"], ["--quant.backward", "recompute"], ["--quant.trainable", "all"],
                                     ["--trainer.accumulate_grad_batches", "2"]], ids=lambda o: o[0])
def test_options_train_alike_sharded_and_not(options: list[str], tiny_recipe: Path, tmp_path: Path) -> None:
    assert train(["qat", str(tiny_recipe), *options, "--run", str(tmp_path / "plain")]) == 0
    assert train(["qat", str(tiny_recipe), *options, *FSDP, "--run", str(tmp_path / "sharded")]) == 0
    for a, b in zip(losses(tmp_path / "plain"), losses(tmp_path / "sharded"), strict=True):
        assert a == pytest.approx(b, rel=1e-5)
    plain, sharded = (Run.open(tmp_path / r).load_trained_weights() for r in ("plain", "sharded"))
    assert {n.replace("lm_head", "model.embed_tokens") for n in plain} == {n.replace("lm_head", "model.embed_tokens") for n in sharded}
    export_run(tmp_path / "sharded", tmp_path / "out")


def test_a_truncated_shard_says_what_to_do(tiny_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(["qat", str(tiny_recipe), *FSDP]) == 0
    (piece,) = (tmp_path / "run" / "checkpoints" / "step-00000006.ckpt").glob("*.distcp")
    piece.write_bytes(piece.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"step-00000006\.ckpt: cannot be read as a checkpoint"):
        Run.open(tmp_path / "run").load_trained_weights()


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_loads_piece_by_piece_as_it_loads_whole(name: str, tmp_path: Path) -> None:
    parent = save_family(tmp_path / "parent", name)
    config = load_config(parent)
    expected = load_model(parent, dtype=torch.float32)
    model = empty_model(config, dtype=torch.float32)
    assert all(p.is_meta for p in model.parameters())
    source = ParameterSource(CheckpointReader(parent), config=config, arch=find_arch(config.model_type, where="test"))
    materialize(model, source=source, device=torch.device("cpu"), rank=0, world=1)
    state, buffers = dict(expected.named_parameters()), dict(expected.named_buffers())
    assert set(state) == {n for n, _ in model.named_parameters()}
    assert [n for n, p in model.named_parameters() if not torch.equal(p, state[n])] == []
    assert [n for n, b in model.named_buffers() if not torch.equal(b, buffers[n])] == []
    for parameter, start, stop in (("model.norm.weight", 3, 7), (next(n for n in state if ".experts." in n and state[n].dim() == 3), 1, 3)):
        assert torch.equal(source.read(parameter, start=start, stop=stop, shape=state[parameter].shape).float(), state[parameter][start:stop])


def test_a_rank_reads_only_its_own_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = save_tiny_moe(tmp_path / "tiny")
    config = load_config(parent)
    reader = CheckpointReader(parent)
    read: list[str] = []
    real = CheckpointReader.get
    monkeypatch.setattr(CheckpointReader, "get", lambda self, n: read.append(n) or real(self, n))
    source = ParameterSource(reader, config=config, arch=find_arch("qwen3_moe", where="test"))
    source.read("model.layers.1.mlp.experts.down_proj", start=2, stop=4, shape=torch.Size((4, 64, 32)))
    assert read == [f"model.layers.1.mlp.experts.{e}.down_proj.weight" for e in (2, 3)]


def test_the_recipe_knows_the_rows_of_a_step(tiny_recipe: Path) -> None:
    recipe = load_recipe(QATRecipe, path=tiny_recipe, overrides=[*TWO, "--trainer.num_nodes", "3", "--trainer.accumulate_grad_batches", "5"])
    assert recipe.trainer.rows_per_step == 1 * 5 * 2 * 3


def test_tied_embeddings_stay_tied(tmp_path: Path) -> None:
    parent = save_tiny_moe(tmp_path / "tiny")
    config = load_config(parent)
    model: nn.Module = empty_model(config, dtype=torch.float32)
    source = ParameterSource(CheckpointReader(parent), config=config, arch=find_arch("qwen3_moe", where="test"))
    materialize(model, source=source, device=torch.device("cpu"), rank=0, world=1)
    assert model.lm_head.weight is model.model.embed_tokens.weight   # type: ignore[union-attr]


def test_a_write_that_fails_leaves_the_earlier_checkpoint(
        tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from lightning.pytorch.strategies import ModelParallelStrategy

    real, calls = ModelParallelStrategy.save_checkpoint, []

    def save(self: ModelParallelStrategy, checkpoint: dict, path: Path, storage_options: object = None) -> None:
        real(self, checkpoint, path, storage_options)
        calls.append(path)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(ModelParallelStrategy, "save_checkpoint", save)
    assert train(["qat", str(tiny_recipe), *FSDP]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002.ckpt"]
    monkeypatch.undo()
    assert train(["qat", str(tiny_recipe), *FSDP, "--resume"]) == 0
    assert Run.open(tmp_path / "run").step == 6
