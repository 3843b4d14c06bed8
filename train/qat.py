"""MXFP4 quantization-aware training of a model's experts, distilled from the bf16 parent.

The student starts as the parent and computes with the MXFP4 values of its expert weights; its masters are fp32. The loss
is KL(parent || student) over the text, plus cross-entropy if the recipe asks for it. A checkpoint holds the trained
tensors and the optimizer; the parent is read again from its own directory.
"""

from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from ..kernels.loss import distillation_sums_ref
from ..quant.archs import load_config, load_model, load_tokenizer
from ..quant.checkpoint import CheckpointReader, require_fitting_parent, require_free_space
from ..quant.checkpoint.run import step_of
from ..quant.experts import attach_fake_quant
from ..quant.plan import QuantPlan, make_plan
from ..quant.quality import Quality, head_weight, hidden_states, measure_quality, pool
from ..quant.tensor import SOURCE_DTYPE
from .callbacks import HeldoutFigures, MetricsCSV
from .config import QATRecipe
from .data import TextData, describe_source
from .fit import AUTOCAST, fit, make_trainer, require_accelerator
from .loggers import quiet_lightning
from .provenance import parent_record
from .recipe import RecipeError
from .report import qat_table
from .run_dir import completed, open_run, rank_zero_print, require_finite, resume_point, write_meta
from .schedule import warmup_cosine

LOGGED = ("loss", "kl", "cross_entropy", "lr")
HELDOUT = ("heldout_kl", "heldout_perplexity")


class QATModule(L.LightningModule):
    """Student, frozen parent, loss and optimizer. Checkpoints hold the student's trained tensors only."""

    def __init__(self, recipe: QATRecipe, *, student: nn.Module, parent: nn.Module, plan: QuantPlan) -> None:
        super().__init__()
        self.recipe = recipe
        self.strict_loading = False   # the checkpoint holds the trained tensors only
        self.student = student
        self._outside = (parent.requires_grad_(False),)   # in a tuple it is no submodule: neither saved nor trained
        experts = {e.name for e in plan.experts}
        for name, parameter in student.named_parameters():
            parameter.requires_grad_(recipe.quant.trainable == "all" or name in experts)
        student.eval()   # no dropout: the student is to be the parent, and a resumed run must draw nothing anew
        attach_fake_quant(student, experts=plan.experts, scale_mode=recipe.quant.scale_mode)

    @property
    def parent(self) -> nn.Module:
        return self._outside[0]

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        trained = {n for n, p in self.named_parameters() if p.requires_grad}
        return {k: v for k, v in super().state_dict(*args, **kwargs).items() if k in trained}

    def on_fit_start(self) -> None:
        self.parent.to(self.device)

    def training_step(self, batch_BT: Tensor, batch_idx: int) -> Tensor:
        inputs, labels = batch_BT[:, :-1], batch_BT[:, 1:].flatten()
        with torch.no_grad():
            teacher = hidden_states(self.parent, inputs)
        sums = distillation_sums_ref(
            hidden_states(self.student, inputs), teacher_hidden_TD=teacher, head_VD=head_weight(self.student),
            teacher_head_VD=head_weight(self.parent), labels_T=labels, chunk_rows=self.recipe.loss.chunk_rows)
        kl, ce = sums.kl / labels.numel(), sums.cross_entropy / labels.numel()
        loss = self.recipe.loss.kl_weight * kl + self.recipe.loss.ce_weight * ce
        if not bool(torch.isfinite(loss.detach())):
            raise ValueError(f"train qat: the loss is {float(loss)} at step {self.global_step}: the run has diverged. Start a new --run with a lower optim.lr.")
        lr = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.log("loss", loss.detach(), prog_bar=True)
        self.log_dict({"kl": kl.detach(), "cross_entropy": ce.detach(), "lr": lr})
        return loss

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        require_finite(self.student)   # before the file replaces a good one

    def configure_optimizers(self) -> Any:
        o, steps = self.recipe.optim, self.recipe.trainer.max_steps
        params = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(params, lr=o.lr, betas=o.betas, weight_decay=o.weight_decay)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda s: warmup_cosine(s, warmup_steps=o.warmup_steps, max_steps=steps, final_ratio=o.final_lr_ratio))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def run_qat(recipe: QATRecipe, *, resume: bool) -> dict[str, Any]:
    """Train, measure, write RUN; returns RUN/meta.json as a dict.

    Errors: all of the input is checked before RUN is created. RecipeError for a run that exists without `resume`, or was
        made by another recipe; ValueError and FileNotFoundError for a model or data that cannot be used.
    """
    run_dir, model_dir = Path(recipe.run), Path(recipe.model)
    t = recipe.trainer
    checkpoint = resume_point(run_dir, recipe=recipe, resume=resume)
    if (done := completed(run_dir, checkpoint=checkpoint, max_steps=t.max_steps)) is not None:
        return done
    config = load_config(model_dir)
    _check_config(config, recipe=recipe)
    plan = make_plan(config, scale_mode=recipe.quant.scale_mode, where=recipe.model)
    rank_zero_print(plan.table())
    require_fitting_parent(CheckpointReader(model_dir), config=config, plan=plan)
    data = TextData(recipe.data, tokenizer=load_tokenizer(model_dir), seed=t.seed, batch_size=t.batch_size,
                    accumulate=t.accumulate_grad_batches, max_steps=t.max_steps)
    if (largest := data.max_token_id()) >= config.vocab_size:
        raise ValueError(f"tokenizer: gives token {largest}, but the model's vocab_size is {config.vocab_size}. They do not belong together.")
    autocast = AUTOCAST[t.precision]
    parent = load_model(model_dir, dtype=autocast or torch.float32)
    require_finite(parent)
    student = load_model(model_dir, dtype=torch.float32)
    module = QATModule(recipe, student=student, parent=parent, plan=plan)
    trained_bytes = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
    require_free_space(run_dir, num_bytes=2 * 3 * trained_bytes, what="train qat (two checkpoints of weights and optimizer)")

    quiet_lightning()
    L.seed_everything(t.seed, verbose=False)
    meta = _open_run(run_dir, recipe=recipe, plan=plan, model_dir=model_dir, text_sha256=data.sha256())
    metrics = MetricsCSV(run_dir / "metrics.csv", logged=LOGGED, extra=HELDOUT, resumed_step=step_of(checkpoint) if checkpoint else 0,
                         every_steps=t.log_every_steps)

    def measure() -> dict[str, Quality]:
        module.parent.to(module.device)
        return {d: measure_quality(student, parent=parent, rows=rows, rows_per_batch=t.batch_size, chunk_rows=recipe.loss.chunk_rows,
                                     autocast_dtype=autocast) for d, rows in data.heldout.items()}

    def pooled() -> dict[str, float]:
        quality = pool(list(measure().values()))
        return {"heldout_kl": quality.kl, "heldout_perplexity": quality.perplexity}

    callbacks: list[L.Callback] = [metrics]
    if t.val_every_steps is not None:
        callbacks.append(HeldoutFigures(pooled, every_steps=t.val_every_steps, metrics=metrics))
    trainer = make_trainer(t, run_dir=run_dir, max_grad_norm=recipe.optim.max_grad_norm, callbacks=callbacks)
    if "round_to_nearest" not in meta:
        rank_zero_print("measuring the parent and round-to-nearest on held-out text")
        module.to(trainer.strategy.root_device)
        meta["round_to_nearest"] = {d: q.to_json() for d, q in measure().items()}   # before a step the student is the rounded parent
        write_meta(run_dir, meta)
    fit(trainer, module, data=data, checkpoint=checkpoint, run_dir=run_dir, max_steps=t.max_steps)
    _round_as_exported(module, experts={e.name for e in plan.experts}, dtype=config.dtype or torch.bfloat16)
    rank_zero_print("measuring the trained model on held-out text")
    module.to(trainer.strategy.root_device)
    meta["qat"] = {d: q.to_json() for d, q in measure().items()}
    meta["status"] = "complete"
    write_meta(run_dir, meta)
    rank_zero_print(qat_table(meta))
    return meta


def _check_config(config: Any, *, recipe: QATRecipe) -> None:
    """What the recipe asks of the model and the machine, before anything is read."""
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"model: {recipe.model} is quantized already. QAT starts from the unquantized (bf16) parent: give that checkpoint.")
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and recipe.data.sequence_length > longest:
        raise RecipeError(f"data.sequence_length: {recipe.data.sequence_length} is beyond the model's max_position_embeddings, {longest}. Lower it.")
    require_accelerator(recipe.trainer)


@torch.no_grad()
def _round_as_exported(module: QATModule, *, experts: set[str], dtype: torch.dtype) -> None:
    """Give tensors trained beside the experts the values the export will write, so that what is measured is what ships."""
    for name, parameter in module.student.named_parameters():
        if parameter.requires_grad and name not in experts:
            parameter.copy_(parameter.to(dtype))


def _open_run(run_dir: Path, *, recipe: QATRecipe, plan: QuantPlan, model_dir: Path, text_sha256: str) -> dict[str, Any]:
    """RUN/meta.json, new or as it was."""
    fresh = {
        "kind": "qat", "status": "running", "max_steps": recipe.trainer.max_steps, "parent": parent_record(model_dir),
        "quant": {"format": "mxfp4", "scale_mode": recipe.quant.scale_mode, "source_dtype": str(SOURCE_DTYPE).removeprefix("torch."),
                  "trainable": recipe.quant.trainable},
        "plan": {"expert_tensors": len(plan.experts), "bytes_before": plan.bytes_before, "bytes_after": plan.bytes_after},
        "text_sha256": text_sha256,
        "heldout_text": {s.domain: " + ".join(describe_source(o) for o in recipe.data.heldout if o.domain == s.domain) for s in recipe.data.heldout}}
    return open_run(run_dir, recipe=recipe, fresh=fresh, unchanged={
        "text_sha256": f"data: the text has changed since {run_dir} was started (or the Python whose library it is). Restore it, or start a new run.",
        "parent.sha256": f"model: {model_dir} has changed since {run_dir} was started. Restore it, or start a new run."})
