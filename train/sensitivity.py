"""`train qat RECIPE --sensitivity`: what each routed expert weight costs in MXFP4, and whether a plan chosen by that beats an even one.

On even held-out rows: the KL to the parent and the perplexity with one fused weight alone in MXFP4 and all else in bf16, for every weight; the
same for the weights of a layer together, for all together (round-to-nearest), and for none, the parent run a second time, whose KL is what
repeating a run costs on this machine: 0 where the kernels are deterministic. With a budget, on the odd rows, which chose nothing: the plan
that the table gives, the even plan of the same bits, and all in MXFP4; each rounded to nearest, not trained.

Only the routed experts' weights take part: what a recipe quantizes beside them (attention, router, activations) is bf16 here. The model runs
on one device, with the recipe's precision; its experts take 2 bytes a weight and the rest 4.
"""

import dataclasses
import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..quant.archs import load_config, load_model, load_tokenizer
from ..quant.checkpoint import CheckpointReader, require_fitting_parent, write_atomically
from ..quant.formats import find_format
from ..quant.plan import PlanOptions, QuantPlan, make_plan
from ..quant.quality import Quality, pool
from ..quant.sensitivity import KEEP_FORMATS, KIND, QUANTIZED, SensitivityTable, choose_kept, uniform_kept
from .config import QATRecipe
from .data import describe_source, heldout_rows
from .one_at_a_time import Choice, Measurements, OneModel, layer_of
from .precision import AUTOCAST
from .provenance import parent_record, run_record
from .qat_run import check_config
from .recipe import RecipeError, to_yaml
from .run_dir import require_finite
from .sensitivity_report import report_text, svg_chart

MEASUREMENTS = "measurements.jsonl"
NONE, ALL = "none", "all"
CHOICE, COMPARISON = "even rows", "odd rows"   # which held-out rows a measurement is of
PLANS = ("chosen", "uniform", "all in MXFP4")


def sensitivity_dir(recipe: QATRecipe) -> Path:
    """Beside the run of the same recipe."""
    run = Path(recipe.run)
    return run.with_name(f"{run.name}-sensitivity")


def run_sensitivity(recipe: QATRecipe, *, resume: bool) -> dict[str, Any]:
    """Measure, and write the table to RUN-sensitivity; returns sensitivity.json as a dict.

    Errors: before anything is measured. RecipeError for a folder that exists without `resume`, or holds measurements of another model, text,
        scale mode or precision; ValueError for a budget out of range, a model or text that cannot be used.
    """
    out, model_dir, t = sensitivity_dir(recipe), Path(recipe.model), recipe.trainer
    _check_out(out, resume=resume)
    config = load_config(model_dir)
    check_config(config, recipe=recipe)
    if recipe.quant.experts != QUANTIZED or recipe.quant.keep:
        raise RecipeError("train qat --sensitivity: measures every routed expert in MXFP4; leave out quant.experts and quant.keep.")
    plan = make_plan(config, scale_mode=recipe.quant.scale_mode, where=recipe.model, options=PlanOptions())
    require_fitting_parent(CheckpointReader(model_dir), config=config, plan=plan)
    rows = _split_rows(recipe, vocab_size=config.vocab_size)
    record: dict[str, Any] = {"kind": KIND, "parent": parent_record(model_dir), "scale_mode": plan.scale_mode}
    if recipe.quant.bits_per_weight is not None:
        _plans(SensitivityTable.from_json({**record, **_costs(plan, None)}), recipe)   # the budget's range, before minutes of measuring
    model = load_model(model_dir, dtype=torch.float32)
    require_finite(model)
    model.to(torch.device("cuda" if t.accelerator != "cpu" and torch.cuda.is_available() else "cpu"))

    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "recipe.yaml", text=to_yaml(recipe))
    measurements = Measurements(out / MEASUREMENTS, of={
        "parent": record["parent"]["sha256"], "scale_mode": plan.scale_mode, "text": _sha256(rows), "precision": t.precision, "batch_size": t.batch_size})
    runner = OneModel(model, plan=plan, autocast_dtype=AUTOCAST[t.precision], chunk_rows=recipe.loss.chunk_rows)
    choices = _choices(plan)
    print(f"{out}: {len(choices)} measurements of {len(plan.experts)} routed expert weights, one device", flush=True)
    _measure(runner, rows[CHOICE], part=CHOICE, choices=choices, batch_size=t.batch_size, measurements=measurements)
    record |= {"precision": t.precision, "part": CHOICE, **_costs(plan, measurements),
               "all": _figures(measurements, CHOICE, ALL), "none": _figures(measurements, CHOICE, NONE), "comparison": None,
               "heldout_text": {d: " + ".join(describe_source(s) for s in recipe.data.heldout if s.domain == d) for d in rows[CHOICE]}}
    if recipe.quant.bits_per_weight is not None:
        record["comparison"] = _compare(recipe, plan=plan, record=record, runner=runner, rows=rows[COMPARISON], measurements=measurements)
    record |= {"recipe": dataclasses.asdict(recipe), **run_record()}
    text = report_text(record)
    write_atomically(out / "sensitivity.svg", text=svg_chart(record))
    write_atomically(out / "sensitivity.md", text=text)
    write_atomically(out / "sensitivity.json", text=json.dumps(record, indent=2) + "\n")   # last: who finds it finds the others
    print(f"{text}\nwritten to {out}: sensitivity.json, sensitivity.md, sensitivity.svg\nuse it with quant.sensitivity: {out / 'sensitivity.json'} "
          "and quant.bits_per_weight", flush=True)
    return record


def _check_out(out: Path, *, resume: bool) -> None:
    if not out.exists():
        return
    if not resume:
        raise RecipeError(f"run: {out.absolute()} exists. Continue it with --resume (what is measured is kept), choose another --run, or remove it.")
    if not (out / MEASUREMENTS).exists() and {p.name for p in out.iterdir() if ".partial" not in p.name} - {"recipe.yaml"}:
        raise RecipeError(f"run: {out.absolute()} exists and holds no measurements of ours. Choose another --run, or remove it.")


def _split_rows(recipe: QATRecipe, *, vocab_size: int) -> dict[str, dict[str, list[Tensor]]]:
    """Which rows -> domain -> rows."""
    if not recipe.data.heldout:
        raise ValueError("data: data.heldout needs at least one source; see recipes/pocket/qat.yaml.")
    rows = heldout_rows(recipe.data, tokenizer=load_tokenizer(Path(recipe.model)))
    if (largest := max(int(r.max()) for rs in rows.values() for r in rs)) >= vocab_size:
        raise ValueError(f"tokenizer: gives token {largest}, but the model's vocab_size is {vocab_size}. They do not belong together.")
    short = [d for d, rs in rows.items() if len(rs) < 2]
    if short:
        raise ValueError(f"data.heldout: {short[0]!r} must give at least 2 rows, one to choose by and one to compare on; got {len(rows[short[0]])}. "
                         "Raise data.heldout_rows, lower data.sequence_length or add text.")
    return {part: {d: rs[i::2] for d, rs in rows.items()} for i, part in enumerate((CHOICE, COMPARISON))}


def _sha256(rows: Mapping[str, Mapping[str, list[Tensor]]]) -> str:
    digest = hashlib.sha256()
    for domains in rows.values():
        for domain, tensors in domains.items():
            digest.update(f"{domain} {len(tensors)};".encode())
            for row in tensors:
                digest.update(row.numpy().tobytes())
    return digest.hexdigest()


def _choices(plan: QuantPlan) -> list[Choice]:
    """None, all, each layer, each weight."""
    names = [w.name for w in plan.experts]
    layers = dict.fromkeys(layer_of(n) for n in names)
    return [Choice(key=NONE, formats={}), Choice(key=ALL, formats=dict.fromkeys(names, QUANTIZED)),
            *(Choice(key=f"layer {i}", formats={n: QUANTIZED for n in names if layer_of(n) == i}) for i in layers),
            *(Choice(key=n, formats={n: QUANTIZED}) for n in names)]


def _measure(
    runner: OneModel, rows: Mapping[str, list[Tensor]], *, part: str, choices: list[Choice], batch_size: int, measurements: Measurements,
) -> None:
    """What is not measured yet, batch by batch."""
    device = next(runner.model.parameters()).device
    for domain, tensors in rows.items():
        batches = [tensors[i: i + batch_size] for i in range(0, len(tensors), batch_size)]
        for number, batch in enumerate(batches):
            missing = [c for c in choices if not measurements.has(part, domain, number, c.key)]
            if not missing:
                continue
            start = time.perf_counter()
            for choice, quality in runner.measure(torch.stack(batch).to(device), choices=missing):
                measurements.add(part, domain, number, choice.key, quality)
            print(f"{part}, {domain}: batch {number + 1} of {len(batches)}, {len(missing)} measurements in {time.perf_counter() - start:.1f} s", flush=True)


def _costs(plan: QuantPlan, measurements: Measurements | None) -> dict[str, Any]:
    """`weights` and `layers` of the table; without measurements their sizes alone, with KL 0."""
    def figures(key: str) -> dict[str, Any]:
        return {"kl": 0.0} if measurements is None else _figures(measurements, CHOICE, key)

    weights = [{"name": w.name, "layer": layer_of(w.name), "projection": w.leaf, "elements": torch.Size(w.shape).numel(),
                "bytes": {f: find_format(f).num_bytes(w.canonical_shape) for f in (QUANTIZED, *KEEP_FORMATS)}, **figures(w.name)} for w in plan.experts]
    layers = [{"layer": i, "names": [w["name"] for w in weights if w["layer"] == i], **figures(f"layer {i}")}
              for i in dict.fromkeys(w["layer"] for w in weights)]
    return {"weights": weights, "layers": layers}


def _figures(measurements: Measurements, part: str, key: str) -> dict[str, Any]:
    domains = {d: pool(batches) for d, batches in measurements.of_choice(part, key).items()}
    return {**_short(pool(list(domains.values()))), "domains": {d: _short(q) for d, q in domains.items()}}


def _short(quality: Quality) -> dict[str, Any]:
    return {"tokens": quality.tokens, "kl": quality.kl, "perplexity": quality.perplexity, "parent_perplexity": quality.parent_perplexity}


def _plans(table: SensitivityTable, recipe: QATRecipe) -> dict[str, tuple[str, ...]]:
    """Kept weights of each plan of the comparison."""
    assert recipe.quant.bits_per_weight is not None
    bits, keep_format, granularity = recipe.quant.bits_per_weight, recipe.quant.keep_format, recipe.quant.granularity
    kept = [choose(table, bits_per_weight=bits, keep_format=keep_format, granularity=granularity) for choose in (choose_kept, uniform_kept)]
    return dict(zip(PLANS, (*kept, ()), strict=True))


def _compare(
    recipe: QATRecipe, *, plan: QuantPlan, record: dict[str, Any], runner: OneModel, rows: Mapping[str, list[Tensor]], measurements: Measurements,
) -> dict[str, Any]:
    """The plans on rows that the table is not made of."""
    table, keep_format = SensitivityTable.from_json(record), recipe.quant.keep_format
    choices = {}
    for name, kept in _plans(table, recipe).items():
        formats = {w.name: keep_format if w.name in kept else QUANTIZED for w in plan.experts}
        changed = {n: f for n, f in formats.items() if f != "bf16"}
        choices[name] = (kept, Choice(key=f"plan {hashlib.sha256(json.dumps(changed).encode()).hexdigest()[:16]}", formats=changed))
    unique = list({c.key: c for _, c in choices.values()}.values())   # chosen and uniform may be the same
    _measure(runner, rows, part=COMPARISON, choices=unique, batch_size=recipe.trainer.batch_size, measurements=measurements)
    return {"part": COMPARISON, "bits_per_weight": recipe.quant.bits_per_weight, "keep_format": keep_format, "granularity": recipe.quant.granularity,
            "plans": {name: {"kept": list(kept), "bits": table.mean_bits(kept, keep_format=keep_format), **_figures(measurements, COMPARISON, choice.key)}
                      for name, (kept, choice) in choices.items()}}
