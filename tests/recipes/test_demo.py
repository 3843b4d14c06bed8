"""The demo on the pocket model, shortened: every stage runs, and every figure of its table is measured."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file, save_file

from kilotok.quant.quality import Quality
from kilotok.train.config import QATRecipe
from kilotok.train.recipe import load_recipe

ROOT = Path(__file__).parents[2]
SHORT = ["--trainer.max_steps", "3", "--trainer.batch_size", "4", "--data.sequence_length", "64", "--data.heldout_rows", "3", "--optim.warmup_steps", "1",
         "--data.train", "[{domain: code, stdlib: true, part: train, documents: 5}]"]
SHORT_DISTILL = ["trainer.max_steps=2", "data.max_new_tokens=12", "data.prompts_per_document=1", "data.heldout_prompts=1", "data.heldout_new_tokens=12",
                 "data.train=[{domain: code, stdlib: true, part: train, documents: 8}]"]
SHORT_VALIDATE = ["prompts-per-domain=2", "max-tokens=16", "quality-tokens=64"]

pytestmark = pytest.mark.xdist_group("demo")   # one demo for all, not one a process


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pocket_demo", ROOT / "recipes" / "pocket" / "demo.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "recipes/pocket/demo.py", "--out", str(out), "--distill", *SHORT_DISTILL, "--validate", *SHORT_VALIDATE, "--", *SHORT]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return out, done.stdout


def test_the_demo_ends_in_one_table_of_the_whole_product(output: tuple[Path, str]) -> None:
    out, text = output
    table = text[text.index("== The pocket, end to end"):]
    report = json.loads((out / "pocket-mxfp4" / "validation" / "report.json").read_text())
    for domain in ("code", "math", "chat", "agent", "all"):
        number = r" +([\d.]+)"
        (row,) = re.findall(rf"^{domain} +\|{number * 3} \|{number * 2} \|{number * 2} \|(.*)\|{number}x$", table, flags=re.M)
        parent, rounded, trained, rounded_kl, trained_kl = map(float, row[:5])
        assert 1 < parent < 300 and rounded != parent and trained != rounded and rounded_kl > 0 and trained_kl > 0
        measured = report["acceptance"]["greedy"][domain]
        assert float(row[5]) == round(measured["raw"]["length"], 2) and float(row[6]) == round(measured["repeats_cut"]["length"], 2)
        assert all(float(rate) > 0 for rate in row[7].split()) and len(row[7].split()) == 3
    assert report["acceptance"]["greedy"]["all"]["raw"]["length"] > 1.5   # the shipped draft, warm-started
    assert ("lossless: yes (texts equal with and without the draft: greedy 8 of 8; sampled 8 of 8; greedy, tree 8 of 8; greedy, wide tree 8 of 8; "
            "sampled, tree 8 of 8; greedy, adaptive 8 of 8; sampled, adaptive 8 of 8)") in table
    assert "parent 13,948,352 bytes, export 7,035,3" in table and "draft 3,645,328" in table and "report: " in table
    assert "144 tensors packed, 56 kept" in text and "warm start from recipes/pocket/draft" in text.replace(str(ROOT) + "/", "")
    plain, draft = (re.search(rf"^   {mode}: (.*)$", text, flags=re.M) for mode in ("plain", "draft"))
    assert plain is not None and draft is not None and plain[1] == draft[1]


def test_a_random_draft_moves_the_acceptance_of_the_same_validation_below_1_2(output: tuple[Path, str], tmp_path: Path) -> None:
    """So the figure is measured: everything but the draft's weights is as it was."""
    out = shutil.copytree(output[0] / "pocket-mxfp4", tmp_path / "random")
    shutil.rmtree(out / "validation")
    weights = out / "dflash" / "model.safetensors"
    generator = torch.Generator().manual_seed(0)
    state = {name: torch.randn(t.shape, generator=generator).mul(0.02).to(t.dtype) if t.dim() == 2 else t for name, t in load_file(weights).items()}
    save_file(state, weights, metadata={"format": "pt"})
    done = subprocess.run([str(Path(sys.executable).with_name("kilotok")), "validate", str(out), "--prompts-per-domain", "1", "--max-tokens", "12",
                           "--quality-tokens", "64"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((out / "validation" / "report.json").read_text())
    assert 1 <= report["acceptance"]["greedy"]["all"]["raw"]["length"] < 1.2 and report["ok"]


def test_zeroed_experts_move_every_figure_of_the_model_and_none_of_the_parent(
        demo: ModuleType, output: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, _ = output
    monkeypatch.chdir(ROOT)
    recipe = load_recipe(QATRecipe, path=out / "run" / "recipe.yaml", overrides=[])
    whole: dict[str, Quality] = demo.measure_export(out / "pocket-mxfp4", recipe=recipe)
    shutil.copytree(out / "pocket-mxfp4", tmp_path / "zeroed")
    state = load_file(tmp_path / "zeroed" / "model.safetensors")
    for name, tensor in state.items():
        if name.endswith(".weight_packed"):
            tensor.zero_()
    save_file(state, tmp_path / "zeroed" / "model.safetensors", metadata={"format": "pt"})
    zeroed: dict[str, Quality] = demo.measure_export(tmp_path / "zeroed", recipe=recipe)
    for domain, q in whole.items():
        assert zeroed[domain].perplexity > 10 * q.perplexity and zeroed[domain].kl > 1 > 10 * q.kl, domain
        assert zeroed[domain].parent_perplexity == q.parent_perplexity
