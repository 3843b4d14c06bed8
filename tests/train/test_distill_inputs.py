"""What `train dflash-distill` refuses in a recipe, at a path and in what is stored, each before a run is made."""

import dataclasses
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import export_experts, save_tiny_moe
from safetensors.torch import load_file, save_file

from kilotok.quant.archs import load_tokenizer
from kilotok.quant.checkpoint import sha256_of_weights
from kilotok.runtime.engine import MAX_TREE_BUDGET as SERVED_TREE_BUDGET
from kilotok.train.cli import main as train
from kilotok.train.config import Source
from kilotok.train.distill_config import HELDOUT_FILE_PROMPTS, MAX_TREE_BUDGET, PromptConfig
from kilotok.train.distill_data import PromptData


@pytest.mark.parametrize(("options", "message"), [
    ({"heldout_tree_budget": 64}, r"^data\.heldout_tree_budget \(null for no trees\): must lie in 1\.\.63, as served; got 64\.$"),
    ({"heldout_tree_budget": 0}, r"must lie in 1\.\.63, as served; got 0\.$"),
    ({"heldout_texts": 51}, r"^data\.heldout_texts: must lie in 0\.\.50, the prompts that are kept of a domain; got 51\.$"),
    ({"heldout_texts": -1}, r"must lie in 0\.\.50"),
    ({"temperatures": [0.0, 5e-7]}, r"^data\.temperatures: needs at least one, each 0 \(greedy\) or in 1e-06\.\.10; got \[0\.0, 5e-07\]\.$"),
    ({"temperatures": [0.5, float("nan")]}, r"each 0 \(greedy\) or in 1e-06\.\.10"),
    ({"temperatures": [0.7, 0.0, 0.7]}, r"^data\.temperatures: the same one twice: \[0\.7, 0\.0, 0\.7\]\. Leave one of them out\.$"),
], ids=["wide", "none", "texts", "negative", "cold", "nan", "twice"])
def test_options_that_a_server_or_a_sampler_does_not_take(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PromptConfig(**options)


def test_what_the_server_takes_is_taken() -> None:
    assert MAX_TREE_BUDGET == SERVED_TREE_BUDGET
    assert PromptConfig(heldout_tree_budget=63, temperatures=[0.0, 1e-6, 10.0]).heldout_tree_budget == 63


@pytest.mark.parametrize("domain", ["", "a/b", "..", ".hidden", "/abs", "a\\b", "a\n", "co\nde", " a", "a:b"])
def test_a_domain_is_a_plain_name(domain: str) -> None:
    with pytest.raises(ValueError, match=r"^data source .*: a domain has letters, digits, spaces and - _ \. alone, beginning with no space or dot\."):
        Source(domain=domain, stdlib=True)


@pytest.mark.parametrize("domain", ["code", "math-2.0", "tool use", "数学", "_x"])
def test_plain_names_are_taken(domain: str) -> None:
    assert Source(domain=domain, stdlib=True).domain == domain


@dataclass(frozen=True)
class Lab:
    """A target, prompts and a recipe whose runs take a second."""

    root: Path

    def train(self, name: str, *more: str) -> int:
        """The command, with --run and --out of that name, which are its last words."""
        return train(["dflash-distill", str(self.root / "recipe.yaml"), "--run", str(self.root / name), "--out", str(self.root / f"{name}-draft"), *more])

    def refused(self, capsys: pytest.CaptureFixture[str], *more: str) -> str:
        """The one line of a run that was never made."""
        assert self.train("refused", *more) == 2
        errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 and not (self.root / "refused").exists() and not (self.root / "refused-draft").exists()
        return errors[0]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    root = tmp_path_factory.mktemp("inputs")
    export_experts(save_tiny_moe(root / "parent", initializer_range=0.05), root / "target")

    def chat(name: str, prompts: list[str]) -> dict[str, Any]:
        (root / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
        return {"domain": "chat", "path": str(root / f"{name}.jsonl"), "prompt": "prompt"}

    (root / "recipe.yaml").write_text(yaml.safe_dump({
        "target": str(root / "target"), "run": "", "draft": {"num_hidden_layers": 1, "intermediate_size": 32, "target_layer_ids": [0, 1], "sliding_window": 16},
        "loss": {"anchors": 4}, "trainer": {"max_steps": 1, "batch_size": 1, "accelerator": "cpu"},
        "data": {"sequence_length": 48, "max_new_tokens": 6, "heldout_prompts": 1, "heldout_new_tokens": 4, "heldout_texts": 2,
                 "responses": str(root / "responses"), "train": [chat("train", ["Add 1.", "Add 2.", "long " * 60])],
                 "heldout": [chat("held", ["Why?", "Who?"])]}}))
    return Lab(root)


def test_runs_that_measure_differently_share_their_answers(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    """Also after a held-out prompt has gone; and what is stored is checked, held-out answers too, before a run is made."""
    assert lab.train("four") == 0
    assert json.loads((lab.root / "four" / "meta.json").read_text())["responses"][0]["too_long"] == 1
    stored = {p: p.stat().st_mtime_ns for p in (lab.root / "responses").rglob("*.json")}
    (four,) = (p for p in stored if p.parent.name.startswith("heldout-chat-"))
    assert lab.train("five", "--data.heldout_new_tokens", "5") == 0
    assert lab.train("one", "--data.heldout_texts", "1") == 0
    assert lab.train("again") == 0
    now = {p: p.stat().st_mtime_ns for p in (lab.root / "responses").rglob("*.json")}
    assert {p: now[p] for p in stored} == stored and len(now) == len(stored) + 2
    text = four.read_text()
    four.write_text(json.dumps({**json.loads(text), "responses": [[7] * 5, [7]]}))
    capsys.readouterr()
    assert f"{four}: not readable as stored answers (answer 0 has 5 tokens, of at most 4)" in lab.refused(capsys)
    four.write_text(text)


@pytest.mark.parametrize(("more", "message"), [
    (["--data.sequence_length", "50"], "sequence_length: it has 48, this run 50"),
    (["--draft.target_layer_ids", "[1]"], "layer_ids: it has [0, 1], this run [1]"),
    (["--features_from", "PARENT"], "target_sha256: it has "), (["--trainer.precision", "bf16-mixed"], "dtype: it has torch.float32, this run torch.bfloat16"),
], ids=["length", "taps", "model", "precision"])
def test_a_store_that_does_not_fit_is_refused_before_anything_is_answered(more: list[str], message: str, lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    store = lab.root / "store"
    if not store.exists():
        assert lab.train("stored", "--data.features", str(store)) == 0
    more = [str(lab.root / "parent") if m == "PARENT" else m for m in more]
    error = lab.refused(capsys, "--data.features", str(store), "--data.responses", str(lab.root / "new"), *more)
    assert f"data.features: {store} is a store of something else: " in error and message in error and not (lab.root / "new").exists()
    other = lab.refused(capsys, "--data.features", str(lab.root / "target"), "--data.responses", str(lab.root / "new"))
    assert "target holds something, and no features.json" in other and not (lab.root / "new").exists()


def test_a_run_on_another_model_s_states_is_resumed_on_the_same_or_not_at_all(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(lab.root / "parent", lab.root / "copy")
    options = ["--features_from", str(lab.root / "copy")]
    assert lab.train("states", *options) == 0
    recorded = {"model": "copy", "sha256": sha256_of_weights(lab.root / "copy")}
    assert json.loads((lab.root / "states" / "meta.json").read_text())["features_from"] == recorded
    assert json.loads((lab.root / "states-draft" / "kilotok_draft.json").read_text())["features_from"] == recorded
    shutil.rmtree(lab.root / "states-draft")
    state = load_file(lab.root / "copy" / "model.safetensors")
    state["model.norm.weight"][0] += 1
    save_file(state, lab.root / "copy" / "model.safetensors", metadata={"format": "pt"})
    assert lab.train("states", "--resume", *options) == 2
    assert f"features_from: {lab.root / 'copy'} has changed since" in capsys.readouterr().err and not (lab.root / "states-draft").exists()


@pytest.mark.parametrize("option", ["run", "out", "data.responses", "data.features"])
@pytest.mark.parametrize("below", [False, True], ids=["on", "below"])
def test_a_file_where_a_folder_belongs(option: str, below: bool, lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    file = lab.root / "thesis.txt"
    file.write_text("mine")
    path = file / "a" / "b" if below else file
    error = lab.refused(capsys, f"--{option}", str(path))
    assert error.endswith(f"{path}: exists already. Nothing is overwritten: choose another directory, or remove this one first."
                          if option == "out" and not below else f" {file} is a file. Choose another path.")
    assert file.read_text() == "mine" and (f"{option}: " in error or option == "out")
    if option == "data.responses":
        assert "data.responses: " in lab.refused(capsys, f"--{option}", str(path), "--data.shard", "1/2")


def test_a_share_is_not_answered_on_the_cpu_when_a_gpu_is_asked_for(lab: Lab, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    error = lab.refused(capsys, "--trainer.accelerator", "gpu", "--data.shard", "1/2", "--data.responses", str(lab.root / "gpu"))
    assert "trainer.accelerator: gpu, but torch sees no CUDA device" in error and not (lab.root / "gpu").exists()


def test_no_held_out_prompt_is_trained_on_beyond_those_kept_either(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"Question {i}." for i in range(120)]
    (lab.root / "many.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in names))
    source = {"domain": "many", "path": str(lab.root / "many.jsonl"), "prompt": "prompt"}
    (lab.root / "both.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in [*names, "Another."]))
    both = Source(domain="both", path=str(lab.root / "both.jsonl"), prompt="prompt")
    how: dict[str, Any] = {"tokenizer": load_tokenizer(lab.root / "target"), "vocab_size": 4096, "max_length": 512}
    with pytest.raises(ValueError, match=r"^data: 120 held-out prompts are also trained on"):
        PromptData(PromptConfig(train=[both], heldout=[Source(**source)]), **how)
    data = PromptData(PromptConfig(train=[dataclasses.replace(both, part="train")], heldout=[Source(**source)]), **how)
    assert len(data.heldout_file["many"]) == HELDOUT_FILE_PROMPTS == 50
    assert {p.row["id"] for p in data.train[0]} == {"Another."}
    assert "prompts left out of training: a held-out one is the same" in capsys.readouterr().out
