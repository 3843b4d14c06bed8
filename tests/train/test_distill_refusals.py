"""What `train dflash-distill` reads and refuses: the default recipe, the target's end tokens, and one clear error before anything is written."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import export_experts, save_tiny_moe
from safetensors.torch import load_file, save_file

from kilotok.dflash.checkpoint import target_record, write_draft
from kilotok.dflash.config import DraftConfig
from kilotok.dflash.model import DraftModel
from kilotok.quant.checkpoint import disk
from kilotok.train import distill
from kilotok.train.cli import main as train
from kilotok.train.distill_config import DistillRecipe, default_recipe
from kilotok.train.recipe import load_recipe


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny model, in `parent` and exported in `target`."""
    root = tmp_path_factory.mktemp("exported")
    parent = save_tiny_moe(root / "parent", initializer_range=0.05)
    export_experts(parent, root / "target")
    return root


@dataclass(frozen=True)
class Case:
    """A folder of its own with the target, prompts and a recipe."""

    root: Path

    @property
    def target(self) -> Path:
        return self.root / "target"

    @property
    def recipe(self) -> Path:
        return self.root / "recipe.yaml"

    @property
    def run(self) -> Path:
        return self.root / "run"

    def write_prompts(self, name: str, prompts: list[str]) -> dict[str, Any]:
        path = self.root / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
        return {"domain": "chat", "path": str(path), "prompt": "prompt"}

    def train(self, *more: str) -> int:
        return train(["dflash-distill", str(self.recipe), *more])

    def snapshot(self) -> dict[Path, int]:
        return {p: p.lstat().st_mtime_ns for p in self.root.rglob("*") if p != self.root}


@pytest.fixture
def case(tmp_path: Path, exported: Path) -> Case:
    shutil.copytree(exported / "target", tmp_path / "target")
    case = Case(tmp_path)
    case.recipe.write_text(yaml.safe_dump({
        "target": str(case.target), "run": str(case.run), "loss": {"anchors": 4},
        "draft": {"num_hidden_layers": 1, "intermediate_size": 96, "target_layer_ids": [0, 1], "sliding_window": 32},
        "data": {"sequence_length": 96, "max_new_tokens": 12, "heldout_prompts": 2, "heldout_new_tokens": 8, "generation_batch": 8,
                 "train": [case.write_prompts("train", [f"Add {i}." for i in range(8)])],
                 "heldout": [case.write_prompts("heldout", [f"Explain {i}." for i in range(3)])]},
        "trainer": {"max_steps": 2, "batch_size": 2, "accelerator": "cpu", "log_every_steps": 1}}))
    return case


def assert_refused(case: Case, arguments: list[str], *, parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2, one line that holds all parts, and every file as it was."""
    before = case.snapshot()
    capsys.readouterr()
    assert case.train(*arguments) == 2
    error = capsys.readouterr().err
    lines = [line for line in error.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and error.splitlines()[-1] == lines[0], error
    for part in parts:
        assert part in lines[0]
    assert case.snapshot() == before


def draft_of(case: Case, **changed: Any) -> Path:
    """A draft beside the target, made for it unless changed."""
    config = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
              "vocab_size": 4096, "target_layer_ids": (0, 1), "num_target_layers": 2, "mask_token_id": 3, "sliding_window": 32,
              **changed}
    (case.root / "old").mkdir()
    write_draft(case.root / "old", DraftModel(DraftConfig(**config)), metadata={"target": target_record(case.target)})
    return case.root / "old"


def other_draft(**changed: Any) -> Callable[[Case], list[str]]:
    return lambda case: ["--draft.init_from", str(draft_of(case, **changed))]


def draft_with_nan(case: Case) -> list[str]:
    old = draft_of(case)
    state = load_file(old / "model.safetensors")
    state["layers.0.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(state, old / "model.safetensors", metadata={"format": "pt"})
    return ["--draft.init_from", str(old)]


def draft_truncated(case: Case) -> list[str]:
    path = draft_of(case) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-50])
    return ["--draft.init_from", str(path.parent)]


def plain_parent(case: Case) -> list[str]:
    save_tiny_moe(case.root / "parent")
    return ["--target", str(case.root / "parent")]


def empty_folder(case: Case) -> list[str]:
    (case.root / "empty").mkdir()
    return ["--target", str(case.root / "empty")]


def damaged_target(case: Case) -> list[str]:
    path = case.target / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return []


def draft_exists(case: Case) -> list[str]:
    (case.target / "dflash").mkdir()
    (case.target / "dflash" / "mine.txt").write_text("mine")
    return []


def draft_is_a_dangling_link(case: Case) -> list[str]:
    (case.target / "dflash").symlink_to("nowhere")
    return []


def someone_else_s_folder(case: Case) -> list[str]:
    case.run.mkdir()
    (case.run / "thesis.txt").write_text("mine")
    return []


def no_mask_token(case: Case) -> list[str]:
    path = case.target / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["mask_token"]
    path.write_text(json.dumps(config))
    return []


def no_chat_template(case: Case) -> list[str]:
    (case.target / "chat_template.jinja").unlink()
    return []


def trained_on_heldout(case: Case) -> list[str]:
    case.write_prompts("heldout", ["Explain 0.", "Add 3.", "Explain 1."])   # two of three are kept, the first two
    return []


def text(name: str, content: str) -> Callable[[Case], list[str]]:
    def write(case: Case) -> list[str]:
        (case.root / f"{name}.jsonl").write_text(content)
        return []
    return write


def long_heldout(case: Case) -> list[str]:
    case.write_prompts("heldout", ["Explain 0.", "word " * 600])
    return []


def options(*arguments: str) -> Callable[[Case], list[str]]:
    return lambda case: list(arguments)


@pytest.mark.parametrize(("prepare", "parts"), [
    (plain_parent, ["target: ", "parent is not quantized", "kilotok export"]),
    (empty_folder, ["empty has no config.json"]),
    (options("--target", "/nowhere/at/all"), ["no directory at /nowhere/at/all"]),
    (damaged_target, ["model.safetensors", "truncated or damaged"]),
    (draft_exists, ["target/dflash: exists already", "Nothing is overwritten"]),
    (draft_is_a_dangling_link, ["target/dflash: exists already"]),
    (someone_else_s_folder, ["run exists and is no run of ours"]),
    (no_mask_token, ["draft.mask_token_id", "no mask token", "(4096, if it is below the vocab_size of 4096)"]),
    (no_chat_template, ["data source 'chat'", "no chat template"]),
    (options("--data.sequence_length", "513"), ["data.sequence_length: 513", "max_position_embeddings, 512"]),
    (trained_on_heldout, ["data: 1 held-out prompts are also trained on, such as 'Add 3.'"]),
    (text("train", ""), ["data source 'chat': no column 'prompt'", "it has no rows"]),
    (text("heldout", "\n"), ["data source 'chat': no column 'prompt'", "it has no rows"]),
    (text("train", '{"prompt": 5}\n'), ["data source 'chat': row 0", "must be text; got int"]),
    (text("train", '{"prompt": "x"\n'), ["train.jsonl, line 1: not JSON"]),
    (options("--data.train", "[]"), ["data.train and data.heldout need at least one source each"]),
    (options("--data.heldout", "[]"), ["data.train and data.heldout need at least one source each"]),
    (options("--data.train", "[{domain: x, path: nowhere.jsonl, prompt: p}]"), ["data source 'x': nothing at", "nowhere.jsonl"]),
    (options("--draft.target_layer_ids", "[0, 2]"), ["draft.target_layer_ids: needs layers in 0..1, the target's; got [0, 2]"]),
    (options("--draft.target_layer_ids", "[-1]"), ["draft.target_layer_ids: needs layers in 0..1, the target's; got [-1]"]),
    (options("--draft.target_layer_ids", "[]"), ["draft.target_layer_ids: needs layers in 0..1, the target's; got []"]),
    (options("--draft.target_layer_ids", "[1, 1]"), ["draft.target_layer_ids: each layer is tapped once; got [1, 1]"]),
    (options("--draft.mask_token_id", "4096"), ["draft.mask_token_id: must be a row of the target's embedding, 0..4095; got 4096"]),
    (options("--draft.block_size", "1"), ["draft.block_size", "at least 2; got 1"]),
    *((options(f"--draft.{name}", "0"), [f"draft.{name}: must be positive; got 0"]) for name in (
        "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")),
    (lambda case: ["--draft.target_layer_ids", "null", "--draft.num_hidden_layers", "0"], ["draft.num_hidden_layers: must be positive; got 0"]),
    (options("--draft.draft_vocab_size", "1"), ["draft.draft_vocab_size: must have room for the target's end tokens (1) and at least one more", "got 1"]),
    (options("--draft.rope_scaling", "{rope_type: yarn, factor: 4.0}"), ["draft.rope_scaling: yarn needs original_max_position_embeddings"]),
    (options("--draft.init_from", "/nowhere"), ["/nowhere: no config.json", "DFlash draft head"]),
    (lambda case: ["--draft.init_from", str(case.target)], ["target/config.json: no dflash_config section"]),
    (other_draft(hidden_size=32), ["draft.init_from: ", "hidden_size 32; this target has 64"]),
    (other_draft(vocab_size=8192), ["draft.init_from: ", "vocab_size 8192; this target has 4096"]),
    (other_draft(num_target_layers=3), ["draft.init_from: ", "num_target_layers 3; this target has 2"]),
    (other_draft(sliding_window=64, attention_sinks=True), ["draft.init_from: ", "draft.sliding_window 32 (there: 64). Leave these options out"]),
    (lambda case: [*other_draft()(case), "--draft.attention_sinks", "true", "--draft.num_hidden_layers", "2"],
     ["draft.num_hidden_layers 2 (there: 1), draft.attention_sinks True (there: False). Leave these options out"]),
    (draft_with_nan, ["old: layers.0.mlp.up_proj.weight holds NaN or infinity"]),
    (draft_truncated, ["old/model.safetensors: cannot be read as safetensors", "truncated or damaged"]),
    (options("--data.temperatures", "[-0.5]"), ["data.temperatures", "[-0.5]"]),
    (options("--data.temperatures", "[]"), ["data.temperatures", "at least one"]),
    (options("--data.max_new_tokens", "0"), ["data.max_new_tokens: must be positive; got 0"]),
    (options("--loss.anchors", "0"), ["loss.anchors: must be positive; got 0"]),
    (options("--loss.decay_gamma", "0"), ["loss.decay_gamma (null for no decay): must be positive; got 0"]),
    (options("--loss.kl_weight", "-1"), ["loss: ce_weight, kl_weight and z_weight must not be negative", "-1.0"]),
    (options("--loss.weighting", "mse"), ["loss.weighting", "mse"]),
    (lambda case: ["--loss.weighting", "dpace", "--loss.kl_weight", "1"], ["loss.weighting dpace", "cross-entropy alone", "Set kl_weight to 0"]),
    (options("--optim.momentum", "1.0"), ["optim: betas and momentum must lie in [0, 1)"]),
    (options("--optim.muon_lr", "nan"), ["optim.muon_lr"]),
    (options("--loss.anchor", "8"), ["--loss.anchor: no such option. Did you mean '--loss.anchors'?"]),
    (options("--sliding_window", "8"), ["--sliding_window: no such option. Did you mean '--draft.sliding_window'?"]),
    (options("--data.train", "[{domain: x, path: p, promt: q}]"), ["unknown key 'data.train[0].promt'. Did you mean 'data.train[0].prompt'?"]),
    (long_heldout, ["data.heldout: prompt", "context is 512"]),
], ids=lambda v: getattr(v, "__name__", "").strip("<>") if callable(v) else v[-1][:40])
def test_refused_before_anything_is_written(prepare: Callable[[Case], list[str]], parts: list[str], case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(case, prepare(case), parts=parts, capsys=capsys)


@pytest.mark.parametrize(("old", "new", "expected"), [
    ("anchors:", "anchor:", "unknown key 'loss.anchor'. Did you mean 'loss.anchors'?"),
    ("sliding_window:", "window:", "unknown key 'draft.window'. Did you mean 'draft.sliding_window'?"),
    ("heldout_prompts:", "heldout_rows:", "unknown key 'data.heldout_rows'. Did you mean 'data.heldout"),
    ("target: ", "model: ", "unknown key 'model'."),
])
def test_unknown_keys_name_the_nearest(old: str, new: str, expected: str, case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    assert old in case.recipe.read_text()
    case.recipe.write_text(case.recipe.read_text().replace(old, new))
    assert_refused(case, [], parts=[f"{case.recipe}: {expected}"], capsys=capsys)


def test_a_gpu_that_is_not_there(case: Case, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert_refused(case, ["--trainer.accelerator", "gpu"], parts=["trainer.accelerator: gpu, but torch sees no CUDA device"], capsys=capsys)


def test_a_disk_without_room(case: Case, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))  # type: ignore[attr-defined]
    assert_refused(case, [], parts=["train dflash-distill", "Free some space"], capsys=capsys)


@pytest.fixture
def begun(case: Case, monkeypatch: pytest.MonkeyPatch) -> Case:
    """A case whose run was made and then stopped, before the first answer."""
    def stop(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(distill, "make_rows", stop)
        assert case.train() == 130
    assert json.loads((case.run / "meta.json").read_text())["status"] == "running" and not (case.target / "dflash").exists()
    return case


def no_change(case: Case) -> None:
    pass


def other_prompts(case: Case) -> None:
    case.write_prompts("train", [f"Add {i}!" for i in range(8)])


def other_heldout(case: Case) -> None:
    case.write_prompts("heldout", ["Explain 0.", "Explain 9."])


def other_target(case: Case) -> None:
    state = load_file(case.target / "model.safetensors")
    state["model.norm.weight"][0] += 1
    save_file(state, case.target / "model.safetensors", metadata={"format": "pt"})


def damaged_checkpoint(case: Case) -> None:
    (case.run / "checkpoints").mkdir()
    (case.run / "checkpoints" / "step-00000001.ckpt").write_bytes(b"PK half of it")


def damaged_meta(case: Case) -> None:
    (case.run / "meta.json").write_text('{"kind": "dflash-dis')


@pytest.mark.parametrize(("change", "arguments", "parts"), [
    (no_change, [], ["run exists", "--resume"]),
    (no_change, ["--resume", "--optim.muon_lr", "0.5"], ["was started with another recipe (now optim.muon_lr: 0.5, was "]),
    (no_change, ["--resume", "--trainer.max_steps", "3"], ["was started with another recipe (now trainer.max_steps: 3, was "]),
    (no_change, ["--resume", "--out", "elsewhere"], ["was started with another recipe (now out: elsewhere, was "]),
    (other_prompts, ["--resume"], ["data: the prompts have changed since", "Restore them, or start a new run"]),
    (other_heldout, ["--resume"], ["data: the prompts have changed since"]),
    (other_target, ["--resume"], ["target: ", "has changed since", "Restore it, or start a new run"]),
    (damaged_checkpoint, ["--resume"], ["step-00000001.ckpt: cannot be read as a checkpoint"]),
    (damaged_meta, ["--resume"], ["meta.json: not readable as JSON"]),
], ids=["exists", "rate", "steps", "out", "prompts", "heldout", "target", "checkpoint", "meta"])
def test_a_run_is_resumed_as_it_was_begun_or_not_at_all(
        change: Callable[[Case], None], arguments: list[str], parts: list[str], begun: Case, capsys: pytest.CaptureFixture[str]) -> None:
    change(begun)
    assert_refused(begun, arguments, parts=parts, capsys=capsys)


def test_a_run_that_was_moved_is_resumed(begun: Case) -> None:
    begun.run.rename(begun.root / "moved")
    assert begun.train("--resume", "--run", str(begun.root / "moved")) == 0
    assert (begun.target / "dflash" / "model.safetensors").is_file()


def test_answers_for_other_settings_are_refused_before_anything_is_written(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    assert case.train("--data.responses", str(case.root / "answers")) == 0
    shutil.rmtree(case.run)
    shutil.rmtree(case.target / "dflash")
    arguments = ["--data.responses", str(case.root / "answers"), "--data.max_new_tokens", "11"]
    assert_refused(case, arguments, parts=["answers", "with other settings"], capsys=capsys)


def test_a_run_killed_when_the_draft_was_just_written_is_completed_by_a_resume(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    real = distill.write_meta

    def killed(run_dir: Path, meta: dict[str, Any], **how: Any) -> None:
        if meta["status"] == "complete":
            raise KeyboardInterrupt
        real(run_dir, meta, **how)

    with monkeypatch.context() as patch:
        patch.setattr(distill, "write_meta", killed)
        assert case.train() == 130
    assert (case.target / "dflash" / "model.safetensors").is_file()
    assert case.train("--resume") == 0
    assert json.loads((case.run / "meta.json").read_text())["status"] == "complete"


def test_resume_of_a_complete_run_does_nothing_unless_its_draft_was_removed(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    assert case.train() == 0
    before = case.snapshot()
    assert case.train("--resume") == 0
    assert f"{case.run}: complete at step 2; nothing to do" in capsys.readouterr().out
    assert case.snapshot() == before
    shutil.move(case.target / "dflash", case.root / "first")
    assert case.train("--resume") == 0
    assert (case.target / "dflash" / "model.safetensors").read_bytes() == (case.root / "first" / "model.safetensors").read_bytes()


def test_the_target_stops_where_the_server_does(case: Case) -> None:
    """generation_config.json goes before config.json, as in Qwen3-MoE's, which names one more end token."""
    def answers() -> list[list[int]]:
        return [a for path in sorted((case.root / "answers").rglob("*.json")) for a in json.loads(path.read_text())["responses"]]

    assert case.train("--data.responses", str(case.root / "answers")) == 0
    before = answers()
    end = next(token for a in before for token in a[1:] if token != a[0])
    for name in ("answers", "run", "target/dflash"):
        shutil.rmtree(case.root / name)
    (case.target / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, end]}))
    assert case.train("--data.responses", str(case.root / "answers")) == 0
    assert answers() == [a[:a.index(end) + 1] if end in a else a for a in before] != before


def test_without_a_recipe_the_default_one_is_used(case: Case, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside an exported directory, in sizes of a test: every source of the default is read and answered."""
    monkeypatch.chdir(case.target)
    small = ["--trainer.max_steps", "1", "--trainer.batch_size", "1", "--trainer.accelerator", "cpu", "--data.prompts_per_document", "1",
             "--data.generation_batch", "1000", "--data.heldout_prompts", "1", "--data.heldout_new_tokens", "4",
             "--data.max_new_tokens", "2", "--draft.num_hidden_layers", "1", "--loss.anchors", "4"]
    assert train(["dflash-distill", *small]) == 0
    said, _, rest = capsys.readouterr().out.partition("\n")
    assert said == "no recipe given: the default one is used"
    used = Path("dflash-run/recipe.yaml")
    assert rest.startswith(used.read_text()) and "data:\n" in used.read_text()
    assert load_recipe(DistillRecipe, path=None, overrides=small, default=default_recipe()) == load_recipe(DistillRecipe, path=used, overrides=[])
    meta = json.loads(Path("dflash-run/meta.json").read_text())
    assert [(r["domain"], r["prompts"]) for r in meta["responses"]][1:] == [("code", 48), ("math", 48), ("chat", 48), ("agent", 48)]
    assert meta["responses"][0]["source"].startswith("Python 3") and 200 < meta["responses"][0]["prompts"] <= 300
    assert meta["target"] == target_record(case.target)
    heldout = [json.loads(line)["domain"] for line in Path("dflash/heldout.jsonl").read_text().splitlines()]
    assert list(dict.fromkeys(heldout)) == list(meta["after"])[:4] == ["code", "math", "chat", "agent"]
