"""Self-distillation of a DFlash draft head from an exported MXFP4 target.

The target answers the prompts itself; its hidden states are tapped while it reads a packed row of prompts and answers; the
draft fills blocks at random anchors of the answers and is trained on what the target wrote (ce) or would have said (kl).
Only the draft is trained: embedding and head are the target's.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from ..dflash.anchors import anchor_generator
from ..dflash.checkpoint import DRAFT_DIRECTORY, HELDOUT_PROMPTS, draft_metadata, read_config, read_draft, read_metadata, target_record, write_draft
from ..dflash.export import KIND, draft_record
from ..dflash.loss import SlotSums
from ..dflash.model import DraftModel
from ..quant.archs import load_config, load_tokenizer
from ..quant.checkpoint import end_token_ids, load_exported_model, new_directory, require_free_space, sha256_of_weights
from ..quant.checkpoint.disk import refuse_existing
from ..quant.checkpoint.run import RUN_METADATA, read_meta, step_of
from ..quant.quality import head_weight
from .acceptance import acceptance_alarm, acceptance_figures, acceptance_table, measure_acceptance
from .callbacks import HeldoutFigures, MetricsCSV
from .distill_config import DistillRecipe
from .distill_data import DOCUMENTS, PromptData, RowData
from .distill_rows import Answers, answer_share, check_features, heldout_texts, make_rows, start_ranks, store_features
from .draft_shape import choose_draft_ids, draft_plan, require_room_for_end_tokens, resolve_shape
from .fit import fit, is_sharded, make_trainer, require_accelerator, with_schedule
from .loggers import quiet_lightning
from .muon import local
from .optim import MuonAdamW, parameter_groups
from .packing import spread
from .parity import Parity, measure_parity
from .precision import AUTOCAST
from .prompts import to_jsonl
from .recipe import RecipeError
from .run_dir import completed, open_run, rank_zero_print, require_finite, require_folder, resume_point, write_meta
from .sharding import data_parallel_rank, shard_draft, whole_draft
from .slot_pass import slot_pass, whole_tiles

LOGGED = ("loss", "accuracy", "first_slot_accuracy", "lr")


class DistillModule(L.LightningModule):
    """Draft, frozen target, loss and optimizer. Checkpoints hold the draft and the optimizer.

    The loss of a step is one mean over all slots of its rows, on whatever ranks and in whatever micro-batches they are: gradients of sums are
    added up, and divided once by the weight of the whole step.
    """

    def __init__(self, recipe: DistillRecipe, *, draft: DraftModel, target: nn.Module) -> None:
        super().__init__()
        self.recipe = recipe
        self.draft = draft
        self._outside = (target.requires_grad_(False),)   # in a tuple it is no submodule: neither saved nor trained
        self._is_prepared = False
        self._step_sums: SlotSums | None = None           # of all ranks, since the last step

    @property
    def target(self) -> nn.Module:
        return self._outside[0]

    def configure_model(self) -> None:
        """Under FSDP2: shard the draft; else on a GPU: compile its layers. Lightning calls it before the optimizer is made, with the processes connected."""
        if self._is_prepared:
            return
        self._is_prepared = True
        strategy: Any = self.trainer.strategy
        if is_sharded(self.recipe.trainer):
            self.draft.to(strategy.root_device)
            shard_draft(self.draft, mesh=strategy.device_mesh["data_parallel"], compute_dtype=AUTOCAST[self.recipe.trainer.precision])
            if strategy.root_device.type == "cuda":
                rank_zero_print("draft head: under FSDP2 its layers are not compiled, only their attention; steps take longer than with ddp")
        elif strategy.root_device.type == "cuda":
            self.draft.compile_layers()

    def on_fit_start(self) -> None:
        self.target.to(self.device)

    def training_step(self, batch: Tensor | Sequence[Tensor], batch_idx: int) -> Tensor:
        t = self.recipe.trainer
        # the micro-batch's index in the run, so that a resumed run draws what the uninterrupted one would have
        index = self.global_step * t.accumulate_grad_batches + batch_idx % t.accumulate_grad_batches
        generator = anchor_generator(seed=t.seed, rank=data_parallel_rank(self.trainer), index=index, device=self.device)
        sums = slot_pass(self.draft, self.target, batch, loss=self.recipe.loss, generator=generator, flex=self.device.type == "cuda")
        joint = self._over_ranks(sums)
        if self._step_sums is not None:
            joint = SlotSums(*(a + b for a, b in zip(self._step_sums, joint, strict=True)))
        self._step_sums = joint
        loss = joint.loss / joint.weight.clamp(min=1e-6)
        if not bool(torch.isfinite(loss)):   # of all ranks, so that all of them stop
            raise ValueError(f"train dflash-distill: the loss is {float(loss)} at step {self.global_step}: the run has diverged. "
                             "Start a new --run with lower optim.muon_lr and optim.adamw_lr.")
        share = joint.correct_N / joint.count_N.clamp(min=1)
        self.log("loss", loss, prog_bar=True)
        self.log_dict({"accuracy": joint.correct_N.sum() / joint.count_N.sum().clamp(min=1), "first_slot_accuracy": share[1],
                       "lr": self.trainer.optimizers[0].param_groups[0]["lr"]})
        return sums.loss / self._slots

    @property
    def _slots(self) -> int:
        """Blocks of a micro-batch: keeps gradients of sums at the size of gradients of means until the step divides them by the weight."""
        return self.recipe.trainer.batch_size * self.recipe.loss.anchors

    def _over_ranks(self, sums: SlotSums) -> SlotSums:
        """The sums of all ranks' micro-batches."""
        if self.trainer.world_size == 1:
            return SlotSums(*(t.detach() for t in sums))
        flat = torch.cat([t.detach().double().flatten() for t in sums])
        total = torch.as_tensor(self.trainer.strategy.reduce(flat, reduce_op="sum")).split([t.numel() for t in sums])
        return SlotSums(*(part.view(t.shape).to(t.dtype) for part, t in zip(total, sums, strict=True)))

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Gradients of the step's sum, averaged over ranks and micro-batches, become those of its mean; before they are clipped."""
        assert self._step_sums is not None, "a step has at least one micro-batch"
        factor = self._slots * self.recipe.trainer.accumulate_grad_batches * self.trainer.world_size / self._step_sums.weight.clamp(min=1e-6)
        for parameter in self.draft.parameters():
            if parameter.grad is not None:
                local(parameter.grad, like=parameter).mul_(factor)
        self._step_sums = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        require_finite(self.draft)   # before the file replaces a good one

    def configure_optimizers(self) -> Any:
        o, steps = self.recipe.optim, self.recipe.trainer.max_steps
        groups = parameter_groups(self.draft, muon_lr=o.muon_lr, muon_weight_decay=o.muon_weight_decay, adamw_lr=o.adamw_lr,
                                  adamw_weight_decay=o.adamw_weight_decay, betas=o.betas, momentum=o.momentum,
                                  adamw_names=[".*"] if o.kind == "adamw" else [])
        optimizer = MuonAdamW(groups)
        return with_schedule(optimizer, lambda step: o.rate_share(step, max_steps=steps))


def run_distill(recipe: DistillRecipe, *, resume: bool) -> dict[str, Any]:
    """Answer, train, measure, write the draft into the target's directory; returns RUN/meta.json as a dict. With data.shard only answers.

    Errors: all of the input is checked before RUN is created. RecipeError for a run or a draft that exists already; ValueError and
        FileNotFoundError for a target, a draft to start from or data that cannot be used.
    """
    _require_folders(recipe)
    if recipe.data.shard is not None:
        return {"answered_batches": answer_share(recipe)}
    run_dir, target_dir = Path(recipe.run), Path(recipe.target)
    out = Path(recipe.out) if recipe.out is not None else target_dir / DRAFT_DIRECTORY
    t = recipe.trainer
    checkpoint = resume_point(run_dir, recipe=recipe, resume=resume)
    if out.is_dir() and (done := completed(run_dir, checkpoint=checkpoint, max_steps=t.max_steps)) is not None:
        return done
    if (finished := _killed_at_the_end(run_dir, out=out)) is not None:
        return finished
    refuse_existing(out)
    require_accelerator(t)
    config = load_config(target_dir)
    _check_target(config, target_dir=target_dir, recipe=recipe)
    tokenizer = load_tokenizer(target_dir)
    autocast = AUTOCAST[t.precision]
    shape, origin = resolve_shape(recipe.draft, config=config, tokenizer=tokenizer)
    record, eos_ids = target_record(target_dir), end_token_ids(target_dir)
    if shape.draft_vocab_size is not None and recipe.draft.init_from is None:
        require_room_for_end_tokens(shape.draft_vocab_size, eos_ids=eos_ids)
    draft = DraftModel(shape)
    rank_zero_print(draft_plan(draft, origin=origin))
    data = PromptData(recipe.data, tokenizer=tokenizer, vocab_size=config.vocab_size, max_length=config.max_position_embeddings)
    target = load_exported_model(target_dir, dtype=autocast or torch.float32)
    if recipe.draft.init_from is not None:
        existing = read_draft(Path(recipe.draft.init_from), dtype=torch.float32)
        draft.own_head, draft.own_embedding = existing.own_head, existing.own_embedding   # frozen, and written again
        draft.load_state_dict(existing.state_dict())
    else:
        final_norm: Any = target.model.norm  # type: ignore[union-attr]
        embedding: Tensor = target.get_input_embeddings().weight  # type: ignore[operator]
        draft.initialize(generator=torch.Generator().manual_seed(t.seed), final_norm_D=final_norm.weight, mask_row_D=embedding[shape.mask_token_id])
    require_free_space(run_dir, num_bytes=2 * 3 * 4 * sum(p.numel() for p in draft.parameters()),
                       what="train dflash-distill (two checkpoints of draft and optimizer)")

    quiet_lightning()
    L.seed_everything(t.seed, verbose=False)
    teacher = target if recipe.features_from is None else load_exported_model(Path(recipe.features_from), dtype=autocast or torch.float32)
    module = DistillModule(recipe, draft=draft, target=teacher)
    answers = Answers(recipe, data, run_dir=run_dir, target=target, dtype=autocast or torch.float32, target_sha256=record["sha256"], eos_ids=eos_ids,
                      tokenizer=tokenizer, config=config)
    states_of = None if recipe.features_from is None else _model_record(Path(recipe.features_from))
    check_features(recipe, target=teacher, target_sha256=(states_of or record)["sha256"], layer_ids=shape.target_layer_ids)
    meta = _open_run(run_dir, recipe=recipe, data=data, target=record, states_of=states_of, draft_config=shape.to_json())
    columns = tuple(f"heldout_{d}" for d in (*data.heldout, "all"))
    metrics = MetricsCSV(run_dir / "metrics.csv", logged=LOGGED, extra=columns, resumed_step=step_of(checkpoint) if checkpoint else 0,
                         every_steps=t.log_every_steps)

    def measure(*, tree_budget: int | None = None) -> dict[str, Any]:
        target.to(device)
        return measure_acceptance(whole_draft(draft), target, data.heldout, max_tokens=recipe.data.heldout_new_tokens, eos_ids=eos_ids,
                                  max_length=config.max_position_embeddings, tree_budget=tree_budget, texts=texts)

    callbacks: list[L.Callback] = [metrics]
    if t.val_every_steps is not None:
        callbacks.append(HeldoutFigures(lambda: {f"heldout_{d}": v for d, v in acceptance_figures(measure()).items()},
                                        every_steps=t.val_every_steps, metrics=metrics))
    trainer = make_trainer(t, run_dir=run_dir, max_grad_norm=recipe.optim.max_grad_norm, callbacks=callbacks)
    device = trainer.strategy.root_device
    target.to(device)
    rank = start_ranks(trainer)
    rows: list[Any] = make_rows(answers, run_dir=run_dir, meta=meta, rank=rank)
    texts = heldout_texts(answers, rank=rank)
    if draft.draft_ids is not None and recipe.draft.init_from is None:
        draft.draft_ids.copy_(choose_draft_ids(rows, size=len(draft.draft_ids), vocab_size=config.vocab_size, always=eos_ids))
    parity = _parity(draft, target, rows, recipe=recipe, device=device, max_length=config.max_position_embeddings)
    meta["parity"] = parity.to_json()
    rank_zero_print(str(parity))
    parity.require()
    if recipe.data.features is not None:
        rows = store_features(rows, directory=Path(recipe.data.features), target=teacher.to(device), target_sha256=(states_of or record)["sha256"],
                              layer_ids=shape.target_layer_ids, recipe=recipe, trainer=trainer, rank=rank)
    if "before" not in meta:
        rank_zero_print(f"measuring the draft before training ({origin})")
        module.to(device)
        meta["before"] = measure()
        write_meta(run_dir, meta)
        rank_zero_print(acceptance_table(meta["before"]))
    rows_data = RowData(rows, weights=[s.weight for s in recipe.data.train], seed=t.seed, batch_size=t.batch_size, accumulate=t.accumulate_grad_batches,
                        max_steps=t.max_steps)
    fit(trainer, module, data=rows_data, checkpoint=checkpoint, run_dir=run_dir, max_steps=t.max_steps)
    draft = whole_draft(draft)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))   # what is measured is what is written
    rank_zero_print("measuring the trained draft on held-out prompts")
    draft.to(device)
    meta["after"] = measure(tree_budget=recipe.data.heldout_tree_budget)
    write_meta(run_dir, meta)   # before the draft is there, so that a kill in between can be told
    if trainer.is_global_zero:
        _write(out, draft, meta=meta, data=data, head_VD=head_weight(target))
    _complete(run_dir, meta, out=out)
    rank_zero_print(acceptance_table(meta["after"], before=meta["before"]))
    if (alarm := acceptance_alarm(meta["after"])) is not None:
        rank_zero_print(alarm)
    rank_zero_print(f"{out}: draft of {sum(p.numel() for p in draft.parameters()):,} weights written, for target {meta['target']['sha256'][:12]}")
    return meta


def _parity(draft: DraftModel, target: nn.Module, rows: list[Any], *, recipe: DistillRecipe, device: torch.device, max_length: int) -> Parity:
    """Training against serving on the fullest of some rows; on a GPU the block mask too, with rows and anchors as in training."""
    # spread over a source, because packing by length may keep answers of different temperatures apart
    some = [row if isinstance(row, Tensor) else row[0] for row in (rows[0][i] for i in spread(len(rows[0]), limit=16))]
    fullest = max(some, key=lambda r: int(r[DOCUMENTS].max()))
    row = fullest.to(device)
    flex_rows = None
    if device.type == "cuda":
        flex_rows = whole_tiles(torch.stack([some[i % len(some)] for i in range(recipe.trainer.batch_size)])).to(device)
    return measure_parity(draft.to(device), target, row, max_length=max_length, autocast=AUTOCAST[recipe.trainer.precision], flex_rows=flex_rows,
                          num_anchors=recipe.loss.anchors, temperatures=recipe.data.temperatures,
                          more_rows=[r.to(device) for r in some if r is not fullest])


def _complete(run_dir: Path, meta: dict[str, Any], *, out: Path) -> None:
    meta["status"] = "complete"
    meta["draft"] = str(out.absolute())
    write_meta(run_dir, meta)


def _killed_at_the_end(run_dir: Path, *, out: Path) -> dict[str, Any] | None:
    """RUN/meta.json, completed, of a run that was killed when its draft was in place already; None for all others."""
    if not out.is_dir() or not (run_dir / RUN_METADATA).is_file():
        return None
    meta = read_meta(run_dir)
    if "after" not in meta or read_metadata(out) != draft_metadata(read_config(out), draft_record(meta, step=meta["max_steps"])):
        return None
    _complete(run_dir, meta, out=out)
    print(f"{run_dir}: was killed when the draft had just been written; complete now", flush=True)
    return meta


def _require_folders(recipe: DistillRecipe) -> None:
    """Everything that is written goes into folders. A file where the draft goes is refused with all else that is there."""
    d = recipe.data
    for name, path in (("run", recipe.run), ("data.responses", d.responses), ("data.features", d.features)):
        if path is not None:
            require_folder(name, Path(path))
    if recipe.out is not None and not Path(recipe.out).is_dir():
        require_folder("out", Path(recipe.out).absolute().parent)


def _check_target(config: Any, *, target_dir: Path, recipe: DistillRecipe) -> None:
    if getattr(config, "quantization_config", None) is None:
        raise ValueError(f"target: {target_dir} is not quantized. A draft is distilled from the model that is served: give a directory of `kilotok export`.")
    longest = config.max_position_embeddings
    d = recipe.data
    if d.sequence_length > longest:
        raise RecipeError(f"data.sequence_length: {d.sequence_length} is beyond the target's max_position_embeddings, {longest}. Lower it.")


def _model_record(directory: Path) -> dict[str, str]:
    return {"model": directory.absolute().name, "sha256": sha256_of_weights(directory)}


def _open_run(
    run_dir: Path, *, recipe: DistillRecipe, data: PromptData, target: dict[str, Any], states_of: dict[str, str] | None, draft_config: dict[str, Any],
) -> dict[str, Any]:
    init = Path(recipe.draft.init_from) if recipe.draft.init_from is not None else None
    fresh = {"kind": KIND, "status": "running", "max_steps": recipe.trainer.max_steps, "target": target, "draft_config": draft_config,
             "prompts_sha256": data.sha256, "features_from": states_of,
             "started_from": None if init is None else {"draft": init.name, "sha256": sha256_of_weights(init),
                                                        "distilled_from": (read_metadata(init) or {}).get("target")},
             "heldout_prompts": {d: len(p) for d, p in data.heldout.items()}}
    return open_run(run_dir, recipe=recipe, fresh=fresh, unchanged={
        "prompts_sha256": f"data: the prompts have changed since {run_dir} was started (or the Python whose library they are from). "
                          "Restore them, or start a new run.",
        "started_from": f"draft.init_from: {init} has changed since {run_dir} was started. Restore it, or start a new run.",
        "features_from": f"features_from: {recipe.features_from} has changed since {run_dir} was started. Restore it, or start a new run.",
        "target.sha256": f"target: {recipe.target} has changed since {run_dir} was started. Restore it, or start a new run."})


def _write(out: Path, draft: DraftModel, *, meta: dict[str, Any], data: PromptData, head_VD: Tensor) -> None:
    with new_directory(out) as partial:
        write_draft(partial, draft, metadata=draft_record(meta, step=meta["max_steps"]), head_VD=head_VD)
        (partial / HELDOUT_PROMPTS).write_text(to_jsonl([p for prompts in data.heldout_file.values() for p in prompts]), encoding="utf-8")

