"""`train qat`: from a recipe to a run directory, with its figures.

RUN/control, if the recipe asks for it, is a run of its own: the bf16 parent trained by the same recipe with nothing quantized, after the main
one. A run killed anywhere continues with `--resume`; what is finished is not done again.
"""

import dataclasses
import gc
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_only

from ..quant.archs import empty_model, load_config, load_model, load_tokenizer
from ..quant.checkpoint import CheckpointReader, require_fitting_parent, require_free_space, sha256_of_weights, stored_dtypes, write_atomically
from ..quant.checkpoint.run import read_meta, step_of
from ..quant.checkpoint.shards import ParameterSource
from ..quant.plan import PlanOptions, QuantPlan, make_plan
from ..quant.quality import Quality, measure_quality, pool
from ..quant.sensitivity import kept_by_budget
from ..quant.tensor import SOURCE_DTYPE
from .callbacks import CountExperts, FinalFigures, HeldoutFigures, MetricsCSV
from .config import BaselinesConfig, QATRecipe, QuantConfig
from .data import TextData, describe_source
from .fit import fit, is_sharded, make_trainer, require_accelerator
from .loggers import quiet_lightning
from .precision import AUTOCAST
from .provenance import parent_record
from .qat import LOGGED, QATModule
from .recipe import RecipeError
from .report import qat_report, qat_table
from .run_dir import completed, open_run, rank_zero_print, require_finite, resume_point, write_meta

CONTROL = "control"   # the folder in RUN
HELDOUT = ("heldout_kl", "heldout_perplexity")


def run_qat(recipe: QATRecipe, *, resume: bool) -> dict[str, Any]:
    """Train, measure, write RUN; returns RUN/meta.json as a dict.

    Errors: all of the input is checked before RUN is created. RecipeError for a run that exists without `resume`, or was
        made by another recipe; ValueError and FileNotFoundError for a model or data that cannot be used.
    """
    return _run(recipe, resume=resume, main=None)


def _run(recipe: QATRecipe, *, resume: bool, main: dict[str, Any] | None) -> dict[str, Any]:
    """main: meta.json of the run that this one is the control of."""
    run_dir = Path(recipe.run)
    checkpoint = resume_point(run_dir, recipe=recipe, resume=resume)
    if (done := completed(run_dir, checkpoint=checkpoint, max_steps=recipe.trainer.max_steps)) is not None:
        return done
    meta = _trained(run_dir, checkpoint=checkpoint, max_steps=recipe.trainer.max_steps)
    if meta is None:
        meta = _train(recipe, checkpoint=checkpoint, main=main)
    if recipe.baselines.control:
        gc.collect()   # the models of the run before: Lightning's objects refer to each other
        control = _control_recipe(recipe)
        rank_zero_print(f"control: training the bf16 parent by the same recipe, in {control.run}")
        meta["control"] = _run(control, resume=Path(control.run).exists(), main=meta)["qat"]
    _write_report(run_dir, meta)
    meta["status"] = "complete"
    write_meta(run_dir, meta)
    if main is None:   # the control is in the table of its run
        rank_zero_print(qat_table(meta))
    return meta


@rank_zero_only
def _write_report(run_dir: Path, meta: dict[str, Any]) -> None:
    write_atomically(run_dir / "report.md", text=qat_report(meta))


def _trained(run_dir: Path, *, checkpoint: Path | None, max_steps: int) -> dict[str, Any] | None:
    """RUN/meta.json of a run whose own training and figures are done, though not its control."""
    if checkpoint is None or step_of(checkpoint) < max_steps:
        return None
    meta = read_meta(run_dir)
    return meta if "qat" in meta else None


def _control_recipe(recipe: QATRecipe) -> QATRecipe:
    """The same training with nothing quantized."""
    quant = QuantConfig(experts="bf16", trainable=recipe.quant.trainable, scale_mode=recipe.quant.scale_mode, backward=recipe.quant.backward,
                        expected={r: n for r, n in recipe.quant.expected.items() if r == "experts"})
    return dataclasses.replace(recipe, run=str(Path(recipe.run) / CONTROL), quant=quant, baselines=BaselinesConfig())


def _train(recipe: QATRecipe, *, checkpoint: Path | None, main: dict[str, Any] | None) -> dict[str, Any]:
    """Train and measure one model; returns RUN/meta.json, which has all figures but the control's."""
    run_dir, model_dir, t = Path(recipe.run), Path(recipe.model), recipe.trainer
    config = load_config(model_dir)
    check_config(config, recipe=recipe)
    plan = make_plan(config, scale_mode=recipe.quant.scale_mode, where=recipe.model, options=_plan_options(recipe))
    rank_zero_print(plan.table())
    reader = CheckpointReader(model_dir)
    require_fitting_parent(reader, config=config, plan=plan)
    stored = stored_dtypes(reader, config=config)
    data = TextData(recipe.data, tokenizer=load_tokenizer(model_dir), seed=t.seed, batch_size=t.batch_size,
                    accumulate=t.accumulate_grad_batches, max_steps=t.max_steps)
    if (largest := data.max_token_id()) >= config.vocab_size:
        raise ValueError(f"tokenizer: gives token {largest}, but the model's vocab_size is {config.vocab_size}. They do not belong together.")
    sharded = is_sharded(t)
    autocast = None if sharded else AUTOCAST[t.precision]
    parent_dtype = AUTOCAST[t.precision] or torch.float32
    if sharded:   # nothing is read here: each rank reads its own pieces when the processes are connected
        source = ParameterSource(reader, config=config, arch=plan.arch)
        parent, student = (empty_model(config, dtype=dtype) for dtype in (parent_dtype, torch.float32))
        module = QATModule(recipe, student=student, parent=parent, plan=plan, stored=stored, source=source)
    else:
        parent = load_model(model_dir, dtype=parent_dtype)
        require_finite(parent)
        module = QATModule(recipe, student=load_model(model_dir, dtype=torch.float32), parent=parent, plan=plan, stored=stored)
    trained_bytes = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
    checkpoints = 3 if recipe.baselines.control else 2   # one is kept while the next is written, or the control's two
    require_free_space(run_dir, num_bytes=checkpoints * 3 * trained_bytes, what=f"train qat ({checkpoints} checkpoints of weights and optimizer)")

    quiet_lightning()
    L.seed_everything(t.seed, verbose=False)
    meta = _open_run(run_dir, recipe=recipe, plan=plan, model_dir=model_dir, text_sha256=data.sha256(), main=main)
    logged = (*LOGGED, "hidden_mse") if recipe.loss.hidden_mse_weight else LOGGED
    metrics = MetricsCSV(run_dir / "metrics.csv", logged=logged, extra=HELDOUT, resumed_step=step_of(checkpoint) if checkpoint else 0,
                         every_steps=t.log_every_steps)

    def measure() -> dict[str, Quality]:
        return {d: measure_quality(module.student, parent=module.parent, rows=rows, rows_per_batch=t.batch_size, chunk_rows=recipe.loss.chunk_rows,
                                   autocast_dtype=autocast) for d, rows in data.heldout.items()}

    def pooled() -> dict[str, float]:
        quality = pool(list(measure().values()))
        return {"heldout_kl": quality.kl, "heldout_perplexity": quality.perplexity}

    def before() -> None:
        """Before a step the student is the rounded parent."""
        if "round_to_nearest" not in meta:
            rank_zero_print("measuring the parent and round-to-nearest on held-out text")
            meta["round_to_nearest"] = {d: q.to_json() for d, q in measure().items()}
            write_meta(run_dir, meta)
        for mode in recipe.baselines.scale_modes:
            if mode != plan.scale_mode and mode not in meta.get("round_to_nearest_modes", {}):
                rank_zero_print(f"measuring round-to-nearest with scale_mode {mode}")
                module.quant.scale_mode = mode   # read whenever a weight is quantized
                figures = {d: q.to_json() for d, q in measure().items()}
                module.quant.scale_mode = plan.scale_mode
                meta["round_to_nearest_modes"] = {**meta.get("round_to_nearest_modes", {}), mode: figures}
                write_meta(run_dir, meta)

    def after() -> None:
        module.round_as_exported()
        rank_zero_print("measuring the trained model on held-out text")
        meta["coverage"] = counts.record()
        meta["qat"] = {d: q.to_json() for d, q in measure().items()}

    counts = CountExperts(lambda: module.student, experts=plan.experts)
    callbacks: list[L.Callback] = [metrics, counts]
    if t.val_every_steps is not None:
        callbacks.append(HeldoutFigures(pooled, every_steps=t.val_every_steps, metrics=metrics))
    callbacks.append(FinalFigures(before=before, after=after, run_dir=run_dir, max_steps=t.max_steps))
    trainer = make_trainer(t, run_dir=run_dir, max_grad_norm=recipe.optim.max_grad_norm, callbacks=callbacks)
    fit(trainer, module, data=data, checkpoint=checkpoint, run_dir=run_dir, max_steps=t.max_steps)
    write_meta(run_dir, meta)
    return meta


def check_config(config: Any, *, recipe: QATRecipe) -> None:
    """What the recipe asks of the model and the machine, before anything is read."""
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"model: {recipe.model} is quantized already. QAT starts from the unquantized (bf16) parent: give that checkpoint, "
                         f"or the values of this one, by `kilotok convert {recipe.model} OUT --layout dense`.")
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and recipe.data.sequence_length > longest:
        raise RecipeError(f"data.sequence_length: {recipe.data.sequence_length} is beyond the model's max_position_embeddings, {longest}. Lower it.")
    beyond = [i for i in recipe.loss.hidden_layers if i >= config.num_hidden_layers]
    if beyond:
        raise RecipeError(f"loss.hidden_layers: the model's layers are 0 to {config.num_hidden_layers - 1}; got {beyond[0]}.")
    require_accelerator(recipe.trainer)


def _plan_options(recipe: QATRecipe) -> PlanOptions:
    """The recipe's, with the weights that its table of sensitivities keeps at its budget."""
    q = recipe.quant
    if q.bits_per_weight is None:
        return q.plan_options()
    if q.sensitivity is None:
        raise RecipeError("quant.bits_per_weight: needs quant.sensitivity, the table to spend it by. Make one with train qat RECIPE --sensitivity.")
    return q.plan_options(keep=kept_by_budget(
        Path(q.sensitivity), parent_sha256=sha256_of_weights(Path(recipe.model)), scale_mode=q.scale_mode, bits_per_weight=q.bits_per_weight,
        keep_format=q.keep_format, granularity=q.granularity))


def _open_run(run_dir: Path, *, recipe: QATRecipe, plan: QuantPlan, model_dir: Path, text_sha256: str, main: dict[str, Any] | None) -> dict[str, Any]:
    """RUN/meta.json, new or as it was. main: that of the run this is the control of, which must be of the same parent and text."""
    fresh: dict[str, Any] = {
        "kind": "qat", "status": "running", "max_steps": recipe.trainer.max_steps, "parent": parent_record(model_dir),
        "quant": {"format": "mxfp4", "scale_mode": recipe.quant.scale_mode, "source_dtype": str(SOURCE_DTYPE).removeprefix("torch."),
                  "trainable": recipe.quant.trainable, "backward": recipe.quant.backward, "activations": recipe.quant.activations, **plan.options.to_json()},
        "plan": {"expert_tensors": len(plan.experts), "bytes_before": plan.bytes_before, "bytes_after": plan.bytes_after,
                 "summary": plan.summary()},
        "loss": dataclasses.asdict(recipe.loss), "seed": recipe.trainer.seed, "text_sha256": text_sha256,
        "heldout_text": {s.domain: " + ".join(describe_source(o) for o in recipe.data.heldout if o.domain == s.domain) for s in recipe.data.heldout}}
    other_text = f"data: the text has changed since {run_dir} was started (or the Python whose library it is). Restore it, or start a new run."
    other_parent = f"model: {model_dir} has changed since {run_dir} was started. Restore it, or start a new run."
    if main is not None and main["text_sha256"] != fresh["text_sha256"]:
        raise RecipeError(other_text)
    if main is not None and main["parent"]["sha256"] != fresh["parent"]["sha256"]:
        raise RecipeError(other_parent)
    return open_run(run_dir, recipe=recipe, fresh=fresh, unchanged={
        "text_sha256": other_text,
        "parent.sha256": other_parent,
        "quant.keep": f"quant.sensitivity: the table keeps other experts than when {run_dir} was started. Restore it, or start a new run."})
