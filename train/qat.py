"""MXFP4 quantization-aware training of a model's experts, distilled from the bf16 parent.

The student starts as the parent and computes with the MXFP4 values of its expert weights; its masters are fp32. The loss
is KL(parent || student) over the text, plus cross-entropy if the recipe asks for it. A checkpoint holds the trained
tensors and the optimizer; the parent is read again from its own directory.
"""

import json
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn

from ..kernels.loss import distillation_sums_ref
from ..quant.archs import load_config, load_model, load_tokenizer
from ..quant.checkpoint import CheckpointReader, require_fitting_parent, require_free_space, write_atomically
from ..quant.checkpoint.run import RUN_METADATA, newest_checkpoint, read_checkpoint, read_meta, step_of
from ..quant.experts import attach_fake_quant
from ..quant.plan import QuantPlan, make_plan
from ..quant.quality import Quality, head_weight, hidden_states, measure_quality, pool
from ..quant.tensor import SOURCE_DTYPE
from .callbacks import AtomicCheckpointIO, HeldoutQuality, MetricsCSV
from .config import QATRecipe
from .data import TextData, describe_source
from .loggers import quiet_lightning, wandb_logger
from .provenance import parent_record, run_record
from .recipe import RecipeError, to_yaml
from .report import qat_table
from .schedule import warmup_cosine

AUTOCAST = {"32-true": None, "bf16-mixed": torch.bfloat16}


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
    # Lightning starts this command again for every further device; only the first checks, creates and writes the run.
    if _is_first_rank():
        checkpoint = _check_run_dir(run_dir, recipe=recipe, resume=resume)
    else:
        checkpoint = newest_checkpoint(run_dir) if resume else None
    if checkpoint is not None and step_of(checkpoint) >= recipe.trainer.max_steps:
        meta: dict[str, Any] = read_meta(run_dir)
        if meta["status"] == "complete":
            print(f"{run_dir}: complete at step {step_of(checkpoint)}; nothing to do")
            return meta
    if checkpoint is not None:
        read_checkpoint(checkpoint)
    config = load_config(model_dir)
    _check_config(config, recipe=recipe)
    plan = make_plan(config, scale_mode=recipe.quant.scale_mode, where=recipe.model)
    rank_zero_print(plan.table())
    require_fitting_parent(CheckpointReader(model_dir), config=config, plan=plan)
    t = recipe.trainer
    data = TextData(recipe.data, tokenizer=load_tokenizer(model_dir), seed=t.seed, batch_size=t.batch_size,
                    accumulate=t.accumulate_grad_batches, max_steps=t.max_steps)
    if (largest := data.max_token_id()) >= config.vocab_size:
        raise ValueError(f"tokenizer: gives token {largest}, but the model's vocab_size is {config.vocab_size}. They do not belong together.")
    autocast = AUTOCAST[recipe.trainer.precision]
    parent = load_model(model_dir, dtype=autocast or torch.float32)
    require_finite(parent)
    student = load_model(model_dir, dtype=torch.float32)
    module = QATModule(recipe, student=student, parent=parent, plan=plan)
    trained_bytes = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
    require_free_space(run_dir, num_bytes=2 * 3 * trained_bytes, what="train qat (two checkpoints of weights and optimizer)")

    quiet_lightning()
    L.seed_everything(t.seed, verbose=False)
    meta = _open_run(run_dir, recipe=recipe, plan=plan, model_dir=model_dir, text_sha256=data.sha256())
    metrics = MetricsCSV(run_dir / "metrics.csv", resumed_step=step_of(checkpoint) if checkpoint else 0, every_steps=t.log_every_steps)
    callbacks: list[L.Callback] = [metrics, ModelCheckpoint(
        dirpath=run_dir / "checkpoints", filename="step-{step:08d}", auto_insert_metric_name=False, every_n_train_steps=t.checkpoint_every_steps,
        save_top_k=1, enable_version_counter=False)]
    if t.val_every_steps is not None:
        callbacks.append(HeldoutQuality(lambda: pool(list(measure().values())), every_steps=t.val_every_steps, metrics=metrics))
    trainer = L.Trainer(
        accelerator=t.accelerator, devices=t.devices, precision=t.precision, max_steps=t.max_steps, max_epochs=1,
        accumulate_grad_batches=t.accumulate_grad_batches, gradient_clip_val=recipe.optim.max_grad_norm,
        log_every_n_steps=t.log_every_steps, callbacks=callbacks, logger=wandb_logger(t.wandb_project, run_dir=run_dir),
        plugins=[AtomicCheckpointIO()], limit_val_batches=0, num_sanity_val_steps=0, enable_model_summary=False, use_distributed_sampler=False,
        default_root_dir=run_dir)

    def measure() -> dict[str, Quality]:
        module.parent.to(module.device)
        return {d: measure_quality(student, parent=parent, rows=rows, rows_per_batch=t.batch_size, chunk_rows=recipe.loss.chunk_rows,
                                     autocast_dtype=autocast) for d, rows in data.heldout.items()}

    if "round_to_nearest" not in meta:
        rank_zero_print("measuring the parent and round-to-nearest on held-out text")
        module.to(trainer.strategy.root_device)
        meta["round_to_nearest"] = {d: q.to_json() for d, q in measure().items()}   # before a step the student is the rounded parent
        _write_meta(run_dir, meta)
    trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)
    if trainer.global_step != t.max_steps:
        raise RuntimeError(f"train qat: stopped at step {trainer.global_step} of {t.max_steps}. Continue with --resume.")
    final = run_dir / "checkpoints" / f"step-{trainer.global_step:08d}.ckpt"
    if newest_checkpoint(run_dir) != final:
        trainer.save_checkpoint(final)
    _round_as_exported(module, experts={e.name for e in plan.experts}, dtype=config.dtype or torch.bfloat16)
    rank_zero_print("measuring the trained model on held-out text")
    module.to(trainer.strategy.root_device)
    meta["qat"] = {d: q.to_json() for d, q in measure().items()}
    meta["status"] = "complete"
    _write_meta(run_dir, meta)
    rank_zero_print(qat_table(meta))
    return meta


def _is_first_rank() -> bool:
    return getattr(rank_zero_only, "rank", None) in (None, 0)   # None before Lightning knows: a single process


@rank_zero_only
def rank_zero_print(text: str) -> None:
    print(text, flush=True)


def _check_config(config: Any, *, recipe: QATRecipe) -> None:
    """What the recipe asks of the model and the machine, before anything is read."""
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"model: {recipe.model} is quantized already. QAT starts from the unquantized (bf16) parent: give that checkpoint.")
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and recipe.data.sequence_length > longest:
        raise RecipeError(f"data.sequence_length: {recipe.data.sequence_length} is beyond the model's max_position_embeddings, {longest}. Lower it.")
    if recipe.trainer.accelerator == "gpu" and not torch.cuda.is_available():
        raise RecipeError("trainer.accelerator: gpu, but torch sees no CUDA device. Use cpu or auto, or install a CUDA build of torch.")


@torch.no_grad()
def _round_as_exported(module: QATModule, *, experts: set[str], dtype: torch.dtype) -> None:
    """Give tensors trained beside the experts the values the export will write, so that what is measured is what ships."""
    for name, parameter in module.student.named_parameters():
        if parameter.requires_grad and name not in experts:
            parameter.copy_(parameter.to(dtype))


def require_finite(model: nn.Module) -> None:
    """ValueError naming the first parameter that holds NaN or infinity, and the index."""
    for name, parameter in model.named_parameters():
        finite = torch.isfinite(parameter.detach())
        if not bool(finite.all()):
            index = tuple(int(i) for i in (~finite).nonzero()[0])
            raise ValueError(f"{name}: weights must be finite; got {float(parameter.detach()[index])} at index {index} of shape {tuple(parameter.shape)}. "
                             "The checkpoint is damaged or diverged: repair it before training.")


def _check_run_dir(run_dir: Path, *, recipe: QATRecipe, resume: bool) -> Path | None:
    """The checkpoint to continue from; None for a fresh start."""
    if not run_dir.exists():
        if resume:
            print(f"{run_dir}: no run to resume; starting a new one", flush=True)
        return None
    if not (run_dir / RUN_METADATA).is_file():
        if {p.name for p in run_dir.iterdir() if ".partial" not in p.name} - {"recipe.yaml"}:   # recipe.yaml alone: killed while starting
            raise RecipeError(f"run: {run_dir.absolute()} exists and is no run of ours. Choose another --run, or remove it.")
        return None
    if not resume:
        raise RecipeError(f"run: {run_dir.absolute()} exists. Continue it with --resume, choose another --run, or remove it.")
    # all but the last place of the run itself, which may have been moved or spelled differently
    before, now = ([line for line in text.splitlines() if not line.startswith("run:")] for text in ((run_dir / "recipe.yaml").read_text(), to_yaml(recipe)))
    if before != now:
        changed = [new for old, new in zip(before, now, strict=False) if old != new] or ["length of a list"]
        raise RecipeError(f"run: {run_dir} was started with another recipe (now {changed[0].strip()!r}). "
                          f"Resume with the recipe in {run_dir / 'recipe.yaml'}, or choose another --run.")
    checkpoint = newest_checkpoint(run_dir)
    print(f"{run_dir}: resuming from {checkpoint.name if checkpoint else 'step 0: it has no checkpoint yet'}", flush=True)
    return checkpoint


def _open_run(run_dir: Path, *, recipe: QATRecipe, plan: QuantPlan, model_dir: Path, text_sha256: str) -> dict[str, Any]:
    """RUN/meta.json, new or as it was."""
    path = run_dir / RUN_METADATA
    record = run_record()
    if path.exists():
        meta: dict[str, Any] = read_meta(run_dir)
        if meta.get("text_sha256") != text_sha256:
            raise RecipeError(f"data: the text has changed since {run_dir} was started (or the Python whose library it is). Restore it, or start a new run.")
        if meta["parent"]["sha256"] != parent_record(model_dir)["sha256"]:
            raise RecipeError(f"model: {model_dir} has changed since {run_dir} was started. Restore it, or start a new run.")
        meta["resumed"] = [*meta.get("resumed", []), record]
    else:
        meta = {
            "kind": "qat", "status": "running", "max_steps": recipe.trainer.max_steps, "parent": parent_record(model_dir), **record,
            "quant": {"format": "mxfp4", "scale_mode": recipe.quant.scale_mode, "source_dtype": str(SOURCE_DTYPE).removeprefix("torch."),
                      "trainable": recipe.quant.trainable},
            "plan": {"expert_tensors": len(plan.experts), "bytes_before": plan.bytes_before, "bytes_after": plan.bytes_after},
            "text_sha256": text_sha256,
            "heldout_text": {s.domain: " + ".join(describe_source(o) for o in recipe.data.heldout if o.domain == s.domain) for s in recipe.data.heldout}}
    _write_meta(run_dir, meta, recipe=recipe)
    return meta


@rank_zero_only
def _write_meta(run_dir: Path, meta: dict[str, Any], *, recipe: QATRecipe | None = None) -> None:
    """RUN/meta.json, and RUN/recipe.yaml before it when the run is new: a folder with meta.json is a run."""
    run_dir.mkdir(parents=True, exist_ok=True)
    if recipe is not None:
        write_atomically(run_dir / "recipe.yaml", text=to_yaml(recipe))
    write_atomically(run_dir / RUN_METADATA, text=json.dumps(meta, indent=2) + "\n")
