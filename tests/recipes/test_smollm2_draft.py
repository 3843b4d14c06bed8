"""The prompts and the ablations of SmolLM2-MoE's draft: what is held out stays out, and every row is the settings it is called."""

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from conftest import export_experts, save_tiny_moe

from kilotok.train.distill_config import DistillRecipe
from kilotok.train.recipe import load_recipe

RECIPES = Path(__file__).parents[2] / "recipes" / "smollm2-moe"
DOMAINS = ("code", "math", "chat", "agent")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, RECIPES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def prompts() -> ModuleType:
    return load("prompts")


@pytest.fixture(scope="module")
def ablations() -> ModuleType:
    return load("ablations")


def rows_of(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_data(root: Path) -> None:
    """Sixty rows for each file, in its own columns."""
    def write(file: str, make: Any) -> None:
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(make(i)) + "\n" for i in range(60)))

    for file in ("mbpp/train.jsonl", "mbpp/test.jsonl"):
        write(file, lambda i, file=file: {"text": f"Write function {i} of {file}.", "test_list": [f"assert f({i}) == {i}"]})
    write("humaneval/humaneval.jsonl", lambda i: {"prompt": f"def f{i}(x):\n    \"\"\"Number {i}.\"\"\"\n"})
    for file in ("gsm8k/train.jsonl", "gsm8k/test.jsonl"):
        write(file, lambda i, file=file: {"question": f"How much is {i} + {i} in {file}?"})
    write("svamp/svamp.jsonl", lambda i: {"Body": f"Ann has {i} nuts.", "Question": "How many?"})
    write("self_instruct/seed_tasks.jsonl", lambda i: {"instruction": f"Say {i}.", "instances": [{"input": ""}]})
    write("oasst/oasst_filtered.jsonl", lambda i: {"prompt": f"Расскажи про число {i}." if i % 2 else f"Tell me of {i}."})
    for file in ("arena_hard_v2/prompts.jsonl", "mt_bench/question.jsonl"):
        write(file, lambda i, file=file: {"turns": [f"Describe {i} as in {file}."]})
    for name in ("simple_python", "multiple", "parallel", "irrelevance"):
        write(f"bfcl/{name}.jsonl", lambda i, name=name: {"question": [[{"role": "user", "content": f"Call {name} with {i}."}]],
                                                          "function": [{"name": f"f{i}"}]})


def test_what_is_held_out_is_not_trained_on(prompts: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_data(tmp_path / "data")
    monkeypatch.setattr("sys.argv", ["prompts.py", "--data", str(tmp_path / "data"), "--out", str(tmp_path / "out")])
    prompts.main()
    for domain in DOMAINS:
        train, heldout = (rows_of(path / f"{domain}.jsonl") for path in (tmp_path / "out", tmp_path / "out" / "heldout"))
        texts = [{r["prompt"] for r in rows} for rows in (train, heldout)]
        assert train and heldout and not texts[0] & texts[1]
        assert len(texts[0]) == len(train) and len(texts[1]) == len(heldout)
    everything = {domain: [r["prompt"] for r in rows_of(tmp_path / "out" / f"{domain}.jsonl")] for domain in DOMAINS}
    assert not any("mbpp/test" in p or "def f1(x)" in p for p in everything["code"]) and any("mbpp/train" in p for p in everything["code"])
    assert not any("gsm8k/test" in p for p in everything["math"]) and not any("mt_bench" in p for p in everything["chat"])
    assert not any("Расскажи" in p for p in everything["chat"])
    assert all(p.startswith(prompts.CALLS) and '{"name": "f' in p for p in everything["agent"])


def recipe_of(ablations: ModuleType, name: str) -> DistillRecipe:
    args = argparse.Namespace(out=Path("out"), target=Path("t"), parent=Path("bf16"), responses=Path("r"), steps=250, set=[])
    command = ablations.command(name, args)
    assert command[3:5] == ["dflash-distill", str(RECIPES / "distill.yaml")]
    return load_recipe(DistillRecipe, path=RECIPES / "distill.yaml", overrides=command[5:])


def test_rows_differ_in_what_they_say(ablations: ModuleType) -> None:
    ours = recipe_of(ablations, "ours")
    assert (ours.loss.anchors, ours.optim.kind, ours.features_from, ours.trainer.max_steps) == (4096, "muon", None, 250)
    recipes = {name: recipe_of(ablations, name) for name in ablations.ROWS}
    assert recipes["anchors-512"].loss.anchors == 512 and recipes["adamw-1e-3"].optim.kind == recipes["adamw-3e-3"].optim.kind == "adamw"
    assert recipes["parent"].features_from == "bf16"
    for name, recipe in recipes.items():
        assert (recipe.data.sequence_length, recipe.trainer.batch_size, recipe.trainer.seed, recipe.data.responses) == (4096, 4, 20261130, "r"), name
        assert (recipe.data.train, recipe.data.heldout) == (ours.data.train, ours.data.heldout), name


def test_the_peers_rows_are_their_published_settings(ablations: ModuleType) -> None:
    theirs = recipe_of(ablations, "specforge")
    assert (theirs.optim.kind, theirs.optim.adamw_lr, theirs.optim.adamw_weight_decay, theirs.optim.warmup_ratio) == ("adamw", 6e-4, 0.0, 0.04)
    assert (theirs.loss.ce_weight, theirs.loss.kl_weight, theirs.loss.anchors, theirs.loss.anchors_by) == (1.0, 0.0, 512, "token")
    assert theirs.draft.sliding_window is None and theirs.draft.causal == "never"
    theirs = recipe_of(ablations, "speculators")
    assert (theirs.optim.kind, theirs.optim.muon_lr, theirs.optim.muon_weight_decay, theirs.optim.schedule) == ("muon", 1e-3, 0.1, "linear")
    assert (theirs.loss.weighting, theirs.loss.dpace_alpha, theirs.loss.ce_weight, theirs.loss.kl_weight) == ("dpace", 0.5, 1.0, 0.0)
    assert (theirs.draft.sliding_window, theirs.draft.causal, theirs.draft.target_layer_ids) == (2048, "always", [1, 14, 26])


def test_the_table_says_what_did_not_finish(ablations: ModuleType, tmp_path: Path) -> None:
    def figures(length: float) -> dict[str, Any]:
        return {d: {"walk": {"acceptance_length": length}} for d in (*DOMAINS, "all")}

    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "meta.json").write_text(json.dumps({"before": figures(1.01), "after": figures(2.5)}))
    (tmp_path / "specforge").mkdir()
    (tmp_path / "specforge" / "meta.json").write_text(json.dumps({"before": figures(1.0)}))
    table = ablations.table(argparse.Namespace(out=tmp_path, rows=["ours", "specforge"])).splitlines()
    assert table[0] == "| settings | code | math | chat | agent | all | untrained |"
    assert "| this recipe | 2.500 | 2.500 | 2.500 | 2.500 | 2.500 | 1.010 |" in table
    assert "| SpecForge's published settings | not finished |" in table and "| speculators' published settings | not run |" in table


@pytest.mark.slow
def test_answers_of_several_processes_are_all_that_the_training_reads(tmp_path: Path) -> None:
    """Two shares, whose files the training reads."""
    target, prompts = export_experts(save_tiny_moe(tmp_path / "parent"), tmp_path / "target"), tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Say {i}."}) + "\n" for i in range(24)))
    train, heldout = ([{"domain": "chat", "path": str(prompts), "prompt": "prompt", "part": part}] for part in ("train", "heldout"))
    options = {"data.train": json.dumps(train), "data.heldout": json.dumps(heldout), "data.generation_batch": 4, "data.max_new_tokens": 12,
               "data.temperatures": "[0.0]", "data.sequence_length": 64, "data.heldout_prompts": 1, "data.heldout_new_tokens": 8, "data.heldout_texts": 2,
               "data.heldout_tree_budget": "null", "draft.num_hidden_layers": 1, "draft.intermediate_size": 64, "loss.anchors": 16, "trainer.max_steps": 1,
               "trainer.batch_size": 1, "trainer.accelerator": "cpu", "trainer.precision": "32-true", "trainer.checkpoint_every_steps": 1,
               "optim.warmup_steps": 0}

    command = [sys.executable, str(RECIPES / "draft.py"), "--target", str(target), "--run", str(tmp_path / "run"), "--jobs", "2", "--set",
               *(f"{k}={v}" for k, v in options.items())]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert (target / "dflash" / "model.safetensors").is_file() and "missing" not in done.stdout


def test_shares_take_cards_in_turn() -> None:
    cards_of = load("draft").cards_of
    assert cards_of({}, count=2) == ["0", "1"] and cards_of({}, count=0) == []
    assert cards_of({"CUDA_VISIBLE_DEVICES": "3, GPU-5c"}, count=2) == ["3", "GPU-5c"] and cards_of({"CUDA_VISIBLE_DEVICES": ""}, count=0) == []


def test_a_share_that_fails_is_said_with_its_last_words(tmp_path: Path) -> None:
    draft = load("draft")
    options = argparse.Namespace(responses=tmp_path / "answers")
    draft.log_of(options, "1/2").write_text("starting\ntorch.OutOfMemoryError: CUDA out of memory.\n\n")
    assert draft.last_words(options, "1/2") == "torch.OutOfMemoryError: CUDA out of memory."
    draft.log_of(options, "2/2").write_text("")
    assert draft.last_words(options, "2/2") == "its log is empty"
