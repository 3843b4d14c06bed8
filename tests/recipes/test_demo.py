"""The demo on the pocket model, shortened: every stage runs, and every figure of its table is measured."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from safetensors.torch import load_file, save_file

from kilotok.quant.quality import Quality
from kilotok.train.config import QATRecipe
from kilotok.train.recipe import load_recipe

ROOT = Path(__file__).parents[2]
SHORT = ["--trainer.max_steps", "3", "--trainer.batch_size", "4", "--data.sequence_length", "64", "--data.heldout_rows", "3", "--optim.warmup_steps", "1",
         "--data.train", "[{domain: code, stdlib: true, part: train, documents: 5}]"]


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
    command = [sys.executable, "recipes/pocket/demo.py", "--out", str(out), "--", *SHORT]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return out, done.stdout


def test_the_demo_prints_one_table_of_the_export(output: tuple[Path, str]) -> None:
    _, text = output
    table = text[text.index("== 4."):]
    for domain in ("code", "math", "chat", "agent", "all"):
        (row,) = re.findall(rf"^{domain} +(\d+) \| +([\d.]+) +([\d.]+) +([\d.]+) \| +(\S+)% \| +([\d.]+) +([\d.]+) ", table, flags=re.M)
        tokens, parent, rounded, trained = int(row[0]), *map(float, row[1:4])
        assert tokens == (768 if domain == "all" else 192)
        assert 1 < parent < 300 and rounded != parent and trained != rounded
        assert float(row[5]) > 0 and float(row[6]) > 0
    assert "13,948,352 bytes -> 7,035,3" in text and "144 expert tensors packed, 56 kept" in text


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
