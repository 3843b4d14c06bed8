"""What a run says of itself: its tables, how tokens fell on the experts, and several seeds side by side."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from kilotok.train.cli import main as train
from kilotok.train.report import qat_report, qat_table
from kilotok.train.seeds import FinishedRun, seeds_table

MODULES = ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]


def quality(*, kl: float, ce: float, parent: float = 2.0, tokens: int = 100) -> dict[str, Any]:
    return {"tokens": tokens, "kl": kl, "cross_entropy": ce, "parent_cross_entropy": parent}


def meta(**changes: Any) -> dict[str, Any]:
    """A record whose figures are easy: on `code` rounding adds 0.4 nats and training takes 0.3 of them back, and 3/4 of the KL."""
    layer = {"experts": 4, "tokens_min": 0, "tokens_median": 3.0, "tokens_max": 9, "max_over_mean": 2.25, "variation": 0.9, "entropy": 0.7}
    return {
        "kind": "qat", "status": "complete", "max_steps": 6, "seed": 5, "versions": {}, "parent": {"path": "/m", "sha256": "ab" * 32}, "text_sha256": "cd",
        "quant": {"scale_mode": "even", "experts": "mxfp4"}, "plan": {"expert_tensors": 4, "bytes_before": 4_000_000, "bytes_after": 1_000_000,
            "summary": "of 4 fused expert tensors 4 in MXFP4, scale_mode even; 4.25 bits a routed expert weight"},
        "loss": {"ce_weight": 0.0}, "heldout_text": {"code": "a file", "prose": "a book"},
        "round_to_nearest": {"code": quality(kl=0.4, ce=2.4), "prose": quality(kl=0.8, ce=2.4, tokens=300)},
        "qat": {"code": quality(kl=0.1, ce=2.1), "prose": quality(kl=0.4, ce=2.21, tokens=300)},
        "coverage": {"layers": [{**layer, "module": m, "never_routed": never} for m, never in zip(MODULES, ([], [1, 3]), strict=True)]}, **changes}


def cells(markdown: str, *, text: str, model: str) -> list[str]:
    (row,) = [line for line in markdown.splitlines() if line.startswith(f"| {text} |") and f"| {model} |" in line]
    return [c.strip() for c in row.strip("|").split("|")]


def test_the_figures_by_hand() -> None:
    md = qat_report(meta(round_to_nearest_modes={"mse": {"code": quality(kl=0.2, ce=2.3), "prose": quality(kl=0.8, ce=2.4, tokens=300)}},
                         control={"code": quality(kl=0.0, ce=2.0), "prose": quality(kl=0.0, ce=2.0, tokens=300)}))
    assert cells(md, text="code", model="parent") == ["code", "100", "parent", f"{math.exp(2.0):.4f}", "", "", ""]
    assert cells(md, text="code", model="round-to-nearest, even") == ["code", "100", "round-to-nearest, even", f"{math.exp(2.4):.4f}", "", "0.40000", ""]
    assert cells(md, text="code", model="round-to-nearest, mse")[4:] == ["25.0%", "0.20000", "50.0%"]
    assert cells(md, text="code", model="control: bf16, trained")[4:] == ["100.0%", "0.00000", "100.0%"]
    assert cells(md, text="code", model="QAT, even")[3:] == [f"{math.exp(2.1):.4f}", "75.0%", "0.10000", "75.0%"]
    assert cells(md, text="all", model="QAT, even") == ["all", "400", "QAT, even", f"{math.exp(2.1825):.4f}", "54.4%", "0.32500", "53.6%"]   # by tokens


def test_the_screen_has_the_same_rows(capsys: pytest.CaptureFixture[str]) -> None:
    lines = qat_table(meta()).splitlines()
    assert [line.split()[0] for line in lines[1:13]] == ["code,", "parent", "round-to-nearest,", "QAT,", "prose,", "parent", "round-to-nearest,", "QAT,",
                                                         "all,", "parent", "round-to-nearest,", "QAT,"]
    assert lines[4].split() == ["QAT,", "even", f"{math.exp(2.1):.4f}", "75.0%", "0.10000", "75.0%"]
    assert "of 4 fused expert tensors 4 in MXFP4, scale_mode even" in lines[13] and "1.00 MB after (25%)" in lines[13]


def test_shares_of_nothing_are_dashes() -> None:
    same = {"code": quality(kl=0.0, ce=2.0)}
    md = qat_report(meta(round_to_nearest=same, qat=same))
    assert cells(md, text="code", model="QAT, even")[4:] == ["-", "0.00000", "-"]
    assert "| all |" not in md   # one domain


def test_a_bf16_run_is_called_what_it_is() -> None:
    plan = {"expert_tensors": 4, "bytes_before": 4_000_000, "bytes_after": 4_000_000,
            "summary": "of 4 fused expert tensors 4 in bf16; 16 bits a routed expert weight"}
    text = qat_table(meta(quant={"scale_mode": "even", "experts": "bf16"}, plan=plan))
    assert "bf16, trained" in text and "MXFP4" not in text and "QAT" not in text


def test_experts_never_routed_are_named() -> None:
    names = f"{MODULES[1]}.1, {MODULES[1]}.3"
    for text in (qat_table(meta()), qat_report(meta())):
        assert "2 of 8 experts were never routed" in text and names in text
    assert f"| {MODULES[1]} | 4 | 0 | 3 | 9 | 2.25 | 0.90 | 0.700 | 1, 3 |" in qat_report(meta())
    many = [{**layer, "never_routed": list(range(20)), "experts": 40} for layer in meta()["coverage"]["layers"]]
    assert "and 28 more, see report.md" in qat_table(meta(coverage={"layers": many}))
    assert "more, see" not in qat_report(meta(coverage={"layers": many})) and f"{MODULES[1]}.19" in qat_report(meta(coverage={"layers": many}))
    whole = [{**layer, "never_routed": []} for layer in meta()["coverage"]["layers"]]
    assert "never routed" not in qat_table(meta(coverage={"layers": whole}))


def test_a_record_without_coverage_is_still_a_table() -> None:
    old = {k: v for k, v in meta().items() if k not in ("coverage", "seed", "loss")}
    assert "experts while training" not in qat_table(old) and "seed" not in qat_report(old)


# --- in a run ---


def test_a_run_counts_the_tokens_of_its_steps_and_no_others(tiny_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Held-out figures while training, accumulation and checkpointed layers change nothing: steps x rows x length x K choices a layer."""
    assert train(["qat", str(tiny_recipe), "--trainer.max_steps", "3", "--trainer.accumulate_grad_batches", "2", "--trainer.val_every_steps", "1",
                  "--trainer.gradient_checkpointing", "true"]) == 0
    record = json.loads((tmp_path / "run" / "meta.json").read_text())["coverage"]["layers"]
    assert [c["module"] for c in record] == MODULES
    for layer in record:
        choices = layer["tokens_max"] / layer["max_over_mean"] * layer["experts"]
        assert choices == pytest.approx(3 * 2 * 2 * 32 * 2)
    report = (tmp_path / "run" / "report.md").read_text()
    assert "| model.layers.1.mlp.experts | 4 |" in report and "experts while training" in capsys.readouterr().out


def test_an_expert_no_token_reaches_is_named_by_the_run(
        tiny_recipe: Path, make_tiny_moe: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows u, -u, v, -v and 0 of a router: two of the first four logits are positive for any input, so the fifth is never among the two largest."""
    model = make_tiny_moe("five", num_experts=5)
    state = load_file(model / "model.safetensors")
    router = state["model.layers.1.mlp.gate.weight"]
    router[1], router[3], router[4] = -router[0], -router[2], 0
    save_file(state, model / "model.safetensors", metadata={"format": "pt"})
    assert train(["qat", str(tiny_recipe), "--model", str(model), "--trainer.max_steps", "2"]) == 0
    record = json.loads((tmp_path / "run" / "meta.json").read_text())["coverage"]["layers"]
    assert record[1]["never_routed"] == [4] and record[1]["tokens_min"] == 0 and record[0]["never_routed"] == []
    assert "warning: 1 of 10 experts were never routed a token in training: they are quantized but got no gradient (model.layers.1.mlp.experts.4)" \
        in capsys.readouterr().out


@pytest.mark.xdist_group("ranks")
def test_two_devices_count_together(tiny_recipe: Path, tmp_path: Path) -> None:
    """The counts are of both processes, also those that a resume begins with."""
    command = [sys.executable, "-m", "kilotok.train.cli", "qat", str(tiny_recipe), "--trainer.max_steps", "2", "--trainer.checkpoint_every_steps", "1",
               "--trainer.devices", "2"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    saved = next(v for k, v in torch.load(checkpoint, weights_only=True)["callbacks"].items() if "CountExperts" in k)
    assert [sum(c) for c in saved["tokens_per_expert"].values()] == [2 * 2 * 2 * 32 * 2] * 2
    record = json.loads((tmp_path / "run" / "meta.json").read_text())["coverage"]["layers"]
    assert [layer["tokens_max"] for layer in record] == [max(c) for c in saved["tokens_per_expert"].values()]


# --- several seeds ---


@pytest.fixture
def fake_runs(tmp_path: Path) -> Callable[..., list[str]]:
    """Runs of seeds 0, 1, ... with the given trained cross-entropies on one domain; `recipe` changes the last one's recipe."""
    def make(*trained: float, recipe: dict[str, Any] | None = None, **changes: Any) -> list[str]:
        for index, ce in enumerate(trained):
            run = tmp_path / f"s{index}"
            run.mkdir()
            last = index == len(trained) - 1
            one = {"round_to_nearest": {"code": quality(kl=0.4, ce=2.4)}, "qat": {"code": quality(kl=0.1 * (index + 1), ce=ce)}}
            (run / "meta.json").write_text(json.dumps(meta(**one, **(changes if last else {}))))
            plain = {"model": f"/m{index}", "run": str(run), "optim": {"lr": 1e-3}, "trainer": {"seed": index}}
            (run / "recipe.yaml").write_text(yaml.safe_dump({**plain, **((recipe or {}) if last else {})}))
        return [str(tmp_path / f"s{i}") for i in range(len(trained))]
    return make


def test_a_row_a_run_and_mean_and_spread(fake_runs: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    runs = fake_runs(2.1, 2.2, 2.3)
    assert train(["qat-report", *runs]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    parent, rounded = f"{math.exp(2.0):.4f}", f"{math.exp(2.4):.4f}"
    assert lines[2].split() == [runs[1], "1", "code", parent, rounded, f"{math.exp(2.2):.4f}", "50.0%", "0.40000", "0.20000", "50.0%"]
    mean = lines[4].split()
    assert mean[:5] == ["mean", "+-", "std", "3", "code"]
    assert " ".join(mean[5:]).endswith("50.0% +- 25.0% 0.40000 +- 0.00000 0.20000 +- 0.10000 50.0% +- 25.0%")   # sample deviation


@pytest.mark.parametrize(("changes", "message"), [
    ({"recipe": {"optim": {"lr": 0.5}}}, "no mean: the runs differ in optim.lr"),
    ({"parent": {"path": "/m", "sha256": "00"}}, "no mean: the runs differ in the parent"),
    ({"text_sha256": "other"}, "no mean: the runs differ in the text"),
    ({"recipe": {"trainer": {"seed": 0}}}, "no mean: two of the runs have the same seed"),
])
def test_runs_of_different_kinds_have_no_mean(changes: dict[str, Any], message: str, fake_runs: Callable[..., list[str]],
                                              capsys: pytest.CaptureFixture[str]) -> None:
    assert train(["qat-report", *fake_runs(2.1, 2.2, **changes)]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith(message) and "+-" not in out


def test_one_run_is_a_table_without_mean(fake_runs: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert train(["qat-report", *fake_runs(2.1)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_real_runs_of_two_seeds_are_compared(tiny_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in ("0", "1"):
        assert train(["qat", str(tiny_recipe), "--trainer.max_steps", "1", "--trainer.seed", seed, "--run", str(tmp_path / seed)]) == 0
    capsys.readouterr()
    assert train(["qat-report", str(tmp_path / "0"), str(tmp_path / "1")]) == 0
    assert "over 2 seeds" in capsys.readouterr().out


def test_what_is_no_finished_run_is_refused(fake_runs: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run,) = fake_runs(2.1)
    for arguments, message in (([], "takes run directories"), ([run, "--resume"], "takes run directories"), ([run, "--trainer.seed", "1"], "takes run"),
                               ([str(tmp_path)], "no meta.json and recipe.yaml")):
        assert train(["qat-report", *arguments]) == 2
        assert message in capsys.readouterr().err
    for changes, message in (({"kind": "distill"}, "is a run of kind 'distill'"), ({"qat": None}, "is not finished")):
        broken = {k: v for k, v in meta(**changes).items() if v is not None}
        (Path(run) / "meta.json").write_text(json.dumps(broken))
        assert train(["qat-report", run]) == 2
        assert message in capsys.readouterr().err


def test_seeds_of_a_text_that_rounding_does_not_hurt() -> None:
    """No gap to close: a dash, and the other figures have their mean."""
    better = {"code": quality(kl=0.1, ce=1.9), "prose": quality(kl=0.8, ce=2.4, tokens=300)}
    recipe = {"run": "a", "trainer": {"seed": 1}}
    runs = [FinishedRun(name=f"r{i}", meta=meta(round_to_nearest=better), recipe={**recipe, "trainer": {"seed": i}}) for i in range(3)]
    rows = [line.split() for line in seeds_table(runs).splitlines() if line.startswith("mean +- std")]
    assert [r[4] for r in rows] == ["code", "prose", "all"] and "-" in rows[0] and "nan" not in " ".join(rows[0]) and "-" not in rows[1]
