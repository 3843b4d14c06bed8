"""`train qat --sensitivity`: one weight at a time equals measuring two models, a planted layer is found, and the table decides a run and its export."""

import dataclasses
import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, family_config, family_model
from safetensors.torch import load_file, save_file

from kilotok.quant.archs import load_model
from kilotok.quant.checkpoint import export_run
from kilotok.quant.checkpoint.run import Run
from kilotok.quant.experts import attach_fake_quant
from kilotok.quant.plan import make_plan
from kilotok.quant.quality import measure_quality
from kilotok.train.cli import main as train
from kilotok.train.one_at_a_time import Choice, Measurements, OneModel
from kilotok.train.recipe import RecipeError
from kilotok.train.sensitivity_report import svg_chart

LAYERS, PLANTED = 4, 2


def expert(layer: int, projection: str) -> str:
    return f"model.layers.{layer}.mlp.experts.{projection}"


@pytest.fixture
def planted(tiny_recipe: Path, make_tiny_moe: Callable[..., Path], tmp_path: Path) -> Path:
    """A recipe of a model of four layers whose third is hard to round and otherwise alike: 64 times one input of down_proj, and a 64th of the row of
    up_proj that makes it, which is the same function, and leaves an outlier in every MX block of down_proj."""
    model = make_tiny_moe("planted", num_hidden_layers=LAYERS)
    path = model / "model.safetensors"
    state = load_file(path)
    for name, weight in state.items():
        if f"layers.{PLANTED}.mlp.experts." in name and "down_proj" in name:
            weight[:, 0] *= 64
        elif f"layers.{PLANTED}.mlp.experts." in name and "up_proj" in name:
            weight[0] /= 64
    save_file(state, path, metadata={"format": "pt"})
    recipe = tmp_path / "planted.yaml"
    recipe.write_text(tiny_recipe.read_text().replace(str(tmp_path / "tiny"), str(model)))
    return recipe


def table(tmp_path: Path, run: str = "run") -> dict[str, Any]:
    raw: dict[str, Any] = json.loads((tmp_path / f"{run}-sensitivity" / "sensitivity.json").read_text())
    return raw


# --- one at a time ---


@pytest.mark.parametrize("name", FAMILIES)
def test_one_model_gives_the_figures_of_two(name: str) -> None:
    """Handing a layer the parent's own outputs changes nothing: exactly the KL of a second, quantized model, in every family."""
    config = family_config(name)
    plan = make_plan(config, scale_mode="even", where="test")
    rows = torch.randint(4, 4096, (3, 17), generator=torch.Generator().manual_seed(5))
    last = plan.experts[-1].name
    only = dataclasses.replace(plan, weights=(*(dataclasses.replace(w, format="bf16") for w in plan.experts[:-1]), plan.experts[-1]))
    student, parent = family_model(name).float(), family_model(name).float()
    attach_fake_quant(student, plan=only)
    expected = measure_quality(student, parent=parent, rows=list(rows))
    one = OneModel(family_model(name).float(), plan=plan, autocast_dtype=None, chunk_rows=1024)
    choices = [Choice(key="last", formats={last: "mxfp4"}), Choice(key="none", formats={}), Choice(key="again", formats={last: "mxfp4"})]
    found = {c.key: q for c, q in one.measure(rows, choices=choices)}
    assert choices[0].first_layer == 1
    assert expected.kl > 0 and found["last"] == expected == found["again"]
    assert found["none"].kl == 0 and found["none"].cross_entropy == found["none"].parent_cross_entropy == expected.parent_cross_entropy


def test_layers_before_the_changed_one_are_not_run_again(make_tiny_moe: Callable[..., Path]) -> None:
    model = load_model(make_tiny_moe("deep", num_hidden_layers=LAYERS), dtype=torch.float32)
    plan = make_plan(model.config, scale_mode="even", where="test")
    one = OneModel(model, plan=plan, autocast_dtype=None, chunk_rows=64)
    ran: list[int] = []
    for i, layer in enumerate(one.layers):
        layer.self_attn.register_forward_hook(lambda module, args, output, i=i: ran.append(i))   # type: ignore[union-attr, misc, operator]
    rows = torch.randint(4, 4096, (2, 9), generator=torch.Generator().manual_seed(5))
    counted = []
    for _ in one.measure(rows, choices=[Choice(key=str(i), formats={expert(i, "down_proj"): "mxfp4"}) for i in (3, 1)]):
        counted.append(list(ran))
        ran.clear()
    assert counted == [[0, 1, 2, 3, 3], [1, 2, 3]]   # the parent, then from the changed layer on
    assert not any("forward" in layer.__dict__ for layer in one.layers)
    assert all(model.get_parameter(w.name).dtype == torch.bfloat16 for w in plan.experts)


def test_half_a_line_is_measured_again_and_another_header_is_refused(tmp_path: Path, planted: Path) -> None:
    of = {"parent": "a", "scale_mode": "even"}
    path = tmp_path / "measurements.jsonl"
    assert train(["qat", str(planted), "--sensitivity"]) == 0
    quality = Measurements(tmp_path / "run-sensitivity" / "measurements.jsonl", of={}).of_choice("even rows", "all")["code"][0]
    first = Measurements(path, of=of)
    first.add("even rows", "code", 0, "x", quality)
    first.add("even rows", "code", 1, "x", quality)
    path.write_text(path.read_text()[:-20])
    again = Measurements(path, of=of)
    assert again.has("even rows", "code", 0, "x") and not again.has("even rows", "code", 1, "x")
    again.add("even rows", "code", 1, "x", quality)
    assert Measurements(path, of=of).of_choice("even rows", "x") == {"code": [quality, quality]}
    with pytest.raises(RecipeError, match=r"started with another scale_mode: even there, mse now"):
        Measurements(path, of={**of, "scale_mode": "mse"})
    path.write_text('{"par')
    assert not Measurements(path, of=of).has("even rows", "code", 0, "x")


# --- the command ---


def test_the_planted_layer_ranks_first_and_parts_add_up(planted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(["qat", str(planted), "--sensitivity", "--quant.bits_per_weight", "7.2"]) == 0
    found = table(tmp_path)
    assert [(w["layer"], w["projection"]) for w in found["weights"]] == [(i, p) for i in range(LAYERS) for p in ("gate_up_proj", "down_proj")]
    layers = {layer["layer"]: layer["kl"] for layer in found["layers"]}
    assert max(layers, key=lambda i: layers[i]) == PLANTED
    assert all(w["kl"] > 0 for w in found["weights"])
    assert found["none"]["kl"] == 0 and found["none"]["perplexity"] == found["none"]["parent_perplexity"]
    parts = sum(layers.values())
    assert 0.5 < parts / found["all"]["kl"] < 2   # to first order
    elements = 4 * 64 * 64
    assert found["weights"][0]["elements"] == elements
    assert found["weights"][0]["bytes"] == {"mxfp4": elements * 17 // 32, "mxfp8": elements * 33 // 32, "bf16": 2 * elements}
    assert found["parent"]["sha256"] and found["versions"]["torch"] == torch.__version__ and found["recipe"]["quant"]["bits_per_weight"] == 7.2

    plans = found["comparison"]["plans"]
    assert plans["chosen"]["kept"] == [expert(PLANTED, "gate_up_proj"), expert(PLANTED, "down_proj")]
    assert plans["chosen"]["bits"] == 4.25 + 11.75 / LAYERS and plans["all in MXFP4"]["bits"] == 4.25
    assert len(plans["uniform"]["kept"]) == 2 and plans["uniform"]["bits"] == plans["chosen"]["bits"]
    assert plans["chosen"]["tokens"] == found["all"]["tokens"] == 2 * 32   # heldout_rows 4: two to choose by, two to compare on
    assert plans["chosen"]["kl"] < plans["all in MXFP4"]["kl"]
    out = capsys.readouterr().out
    assert f"written to {tmp_path / 'run-sensitivity'}" in out and "## Plans at 7.2 bits" in out
    assert sorted(p.name for p in (tmp_path / "run-sensitivity").iterdir()) == [
        "measurements.jsonl", "recipe.yaml", "sensitivity.json", "sensitivity.md", "sensitivity.svg"]
    assert not (tmp_path / "run").exists()


def test_the_chosen_plan_beats_the_uniform_plan_at_equal_bits(planted: Path, tmp_path: Path) -> None:
    """One layer of four: the uniform plan keeps the third (the middle) by chance, so two are asked for, and it keeps the second and fourth."""
    assert train(["qat", str(planted), "--sensitivity", "--quant.bits_per_weight", "10.125"]) == 0
    plans = table(tmp_path)["comparison"]["plans"]
    assert plans["uniform"]["kept"][::2] == [expert(1, "gate_up_proj"), expert(3, "gate_up_proj")]
    assert plans["chosen"]["bits"] == plans["uniform"]["bits"] == 10.125
    assert plans["chosen"]["kl"] < plans["uniform"]["kl"] < plans["all in MXFP4"]["kl"]


def test_domains_are_measured_apart_and_pooled_by_tokens(planted: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("Tables, chairs and long walks by the river; then rain. " * 60)
    text = planted.read_text().replace("heldout:\n", f"heldout:\n  - {{domain: prose, path: {other}}}\n")
    planted.write_text(text)
    assert train(["qat", str(planted), "--sensitivity", "--data.heldout_rows", "6", "--trainer.batch_size", "2", "--trainer.precision", "bf16-mixed"]) == 0
    found = table(tmp_path)
    for figures in (found["all"], *found["weights"], *found["layers"]):
        domains = figures["domains"].values()
        assert [d["tokens"] for d in domains] == [96, 96] and figures["tokens"] == 192
        assert figures["kl"] == pytest.approx(sum(d["kl"] for d in domains) / 2)
    assert found["all"]["domains"]["prose"]["kl"] != found["all"]["domains"]["code"]["kl"]


def test_a_killed_measurement_goes_on_where_it_stopped(planted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["qat", str(planted), "--sensitivity", "--quant.bits_per_weight", "10.125", "--trainer.batch_size", "1"]
    real, added = Measurements.add, []

    def add(self: Measurements, *args: Any) -> None:
        if len(added) == 19:
            raise KeyboardInterrupt
        added.append(args[:4])
        real(self, *args)

    monkeypatch.setattr(Measurements, "add", add)
    assert train([*command, "--run", str(tmp_path / "killed")]) == 130
    assert not (tmp_path / "killed-sensitivity" / "sensitivity.json").exists()
    with (tmp_path / "killed-sensitivity" / "measurements.jsonl").open("a") as f:
        f.write('{"part": "even rows", "dom')
    monkeypatch.setattr(Measurements, "add", lambda self, *args: (added.append(args[:4]), real(self, *args))[1])
    assert train([*command, "--run", str(tmp_path / "killed")]) == 2   # not without --resume
    assert train([*command, "--run", str(tmp_path / "killed"), "--resume"]) == 0
    assert len(set(added)) == len(added) == 2 * 14 + 2 * 3   # two batches each; nothing measured twice
    assert train([*command, "--run", str(tmp_path / "whole")]) == 0
    killed, whole = table(tmp_path, "killed"), table(tmp_path, "whole")
    assert all(killed[k] == whole[k] for k in ("weights", "layers", "all", "none", "comparison", "parent"))


def test_another_budget_measures_the_comparison_alone(planted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(["qat", str(planted), "--sensitivity"]) == 0
    before = table(tmp_path)
    assert before["comparison"] is None
    capsys.readouterr()
    assert train(["qat", str(planted), "--sensitivity", "--resume", "--quant.bits_per_weight", "9", "--quant.granularity", "projection"]) == 0
    out, after = capsys.readouterr().out, table(tmp_path)
    assert "even rows, code: batch" not in out and "odd rows, code: batch 1 of 1, 3 measurements" in out
    assert before["weights"] == after["weights"] and len(after["comparison"]["plans"]["chosen"]["kept"]) % 2 == 1
    assert all(p["bits"] <= 9 for p in after["comparison"]["plans"].values())


def test_the_chart_has_a_bar_for_every_weight_as_high_as_its_kl(planted: Path, tmp_path: Path) -> None:
    assert train(["qat", str(planted), "--sensitivity"]) == 0
    found = table(tmp_path)
    svg = (tmp_path / "run-sensitivity" / "sensitivity.svg").read_text()
    assert svg == svg_chart(found)
    root = ET.fromstring(svg)
    bars = [r for r in root.iter("{http://www.w3.org/2000/svg}rect") if len(r)]   # those with a title
    heights = [float(b.attrib["height"]) for b in bars]
    kls = [w["kl"] for w in found["weights"]]
    assert len(bars) == len(kls)
    assert [h / max(heights) for h in heights] == pytest.approx([k / max(kls) for k in kls], abs=1e-3)
    words = {t.text for t in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"layer", "KL, nats a token", "gate_up_proj", "down_proj", *map(str, range(LAYERS))} <= words


# --- a run by the table ---


def test_a_run_by_the_table_keeps_what_it_says_and_exports_so(planted: Path, tmp_path: Path) -> None:
    """One recipe: measure, train, export."""
    recipe = ["qat", str(planted), "--quant.sensitivity", str(tmp_path / "run-sensitivity" / "sensitivity.json"), "--quant.bits_per_weight", "7.2",
              "--trainer.max_steps", "2"]
    assert train([*recipe, "--sensitivity"]) == 0
    assert train(recipe) == 0
    run = Run.open(tmp_path / "run")
    kept = {expert(PLANTED, "gate_up_proj"), expert(PLANTED, "down_proj")}
    assert set(run.plan_options.keep) == kept and run.plan_options.keep_format == "bf16"
    export_run(tmp_path / "run", tmp_path / "out")
    names = set(load_file(tmp_path / "out" / "model.safetensors"))
    for layer in range(LAYERS):
        for projection in ("gate_proj", "up_proj", "down_proj"):
            stem = f"model.layers.{layer}.mlp.experts.1.{projection}"
            assert (f"{stem}.weight" in names) == (layer == PLANTED) and (f"{stem}.weight_packed" in names) == (layer != PLANTED)
    state = load_file(tmp_path / "out" / "model.safetensors")
    routed = {n: w for n, w in state.items() if ".mlp.experts." in n}
    elements = sum(w.numel() * (2 if n.endswith("_packed") else 1) for n, w in routed.items() if not n.endswith("_scale"))
    assert 8 * sum(w.numel() * w.element_size() for w in routed.values()) / elements == 4.25 + 11.75 / LAYERS
    assert json.loads((tmp_path / "out" / "kilotok.json").read_text())["quant"]["keep"] == sorted(kept, key=lambda n: "down" in n)


def test_a_table_that_changed_is_no_resume(planted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run-sensitivity" / "sensitivity.json"
    recipe = ["qat", str(planted), "--quant.sensitivity", str(path), "--quant.bits_per_weight", "7.2", "--trainer.max_steps", "2"]
    assert train([*recipe, "--sensitivity"]) == 0
    assert train(recipe) == 0
    meta = tmp_path / "run" / "meta.json"
    record = json.loads(meta.read_text())
    del record["qat"]   # as if it was killed before its last figures
    meta.write_text(json.dumps({**record, "status": "running"}))
    raw = json.loads(path.read_text())
    for layer in raw["layers"]:
        layer["kl"] = float(layer["layer"] == 0)
    path.write_text(json.dumps(raw))
    assert train([*recipe, "--resume"]) == 2
    assert "the table keeps other experts than when" in capsys.readouterr().err


# --- refusals ---


def refused(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    assert train(["qat", *command]) == 2
    return capsys.readouterr().err


def test_refusals(planted: Path, tiny_moe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, out = str(planted), tmp_path / "run-sensitivity"
    assert "must be at least 4.25" in refused(capsys, recipe, "--sensitivity", "--quant.bits_per_weight", "3")
    assert "must be at least 4.25" in refused(capsys, recipe, "--sensitivity", "--quant.bits_per_weight", "16")
    assert "keeps nothing" in refused(capsys, recipe, "--sensitivity", "--quant.bits_per_weight", "4.3")
    assert "leave out quant.experts and quant.keep" in refused(capsys, recipe, "--sensitivity", "--quant.keep", "['*layers.0.*']")
    assert "leave out quant.experts and quant.keep" in refused(capsys, recipe, "--sensitivity", "--quant.experts", "bf16")
    assert "at least 2 rows" in refused(capsys, recipe, "--sensitivity", "--data.heldout_rows", "1")
    assert not out.exists()   # nothing was written so far
    assert "needs quant.sensitivity, the table" in refused(capsys, recipe, "--quant.bits_per_weight", "7.2")
    assert "needs quant.bits_per_weight" in refused(capsys, recipe, "--quant.sensitivity", "x.json")
    assert "quant.keep and quant.bits_per_weight: give one" in refused(capsys, recipe, "--quant.bits_per_weight", "7.2", "--quant.keep", "['*']")
    assert train(["dflash-distill", recipe, "--sensitivity"]) == 2
    assert "belongs to train qat" in capsys.readouterr().err

    assert train(["qat", recipe, "--sensitivity"]) == 0
    assert "exists. Continue it with --resume" in refused(capsys, recipe, "--sensitivity")
    assert "started with another text" in refused(capsys, recipe, "--sensitivity", "--resume", "--data.heldout_rows", "2")
    assert "started with another scale_mode: even there, floor now" in refused(capsys, recipe, "--sensitivity", "--resume", "--quant.scale_mode", "floor")
    by_table = [recipe, "--quant.sensitivity", str(out / "sensitivity.json"), "--quant.bits_per_weight", "7.2"]
    assert "on another parent" in refused(capsys, *by_table, "--model", str(tiny_moe))
    assert "scale_mode even; this recipe's is mse" in refused(capsys, *by_table, "--quant.scale_mode", "mse")
    (out / "measurements.jsonl").unlink()
    assert "holds no measurements of ours" in refused(capsys, recipe, "--sensitivity", "--resume")
    assert not (tmp_path / "run").exists()
