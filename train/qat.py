"""The training module of MXFP4 quantization-aware training: a student whose experts are quantized, distilled from its bf16 parent.

The student starts as the parent and computes with the MXFP4 values of its expert weights; its masters are fp32. The loss is
KL(parent || student) over the text, plus cross-entropy and the distance of hidden states if the recipe asks for them. A checkpoint
holds the trained tensors and the optimizer; the parent is read again from its own directory.
"""

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from ..kernels.loss import distillation_sums_ref
from ..quant.checkpoint.shards import ParameterSource
from ..quant.experts import attach_fake_quant
from ..quant.plan import QuantPlan
from ..quant.quality import head_weight, hidden_states
from .config import QATRecipe
from .fit import with_warmup_cosine
from .hidden import hidden_mse, layer_outputs
from .precision import AUTOCAST
from .run_dir import require_finite
from .sharding import materialize, shard_model
from .teacher import OffloadedLayers, offload_layers

LOGGED = ("loss", "kl", "cross_entropy", "lr")   # and hidden_mse, with a weight


class QATModule(L.LightningModule):
    """Student, frozen parent, loss and optimizer. Checkpoints hold the student's trained tensors only."""

    def __init__(self, recipe: QATRecipe, *, student: nn.Module, parent: nn.Module, plan: QuantPlan, stored: dict[str, torch.dtype],
                 source: ParameterSource | None = None) -> None:
        """stored: dtypes of the parent's files by in-memory name. source: where the values of both models come from when they are on `meta`, to be sharded."""
        super().__init__()
        self.stored, self._source, self._is_sharded = stored, source, False
        self.recipe, self.plan = recipe, plan
        self.strict_loading = False   # the checkpoint holds the trained tensors only
        self.student = student
        self.offloaded: OffloadedLayers | None = None   # the parent's layers, once they are
        self._outside = (parent.requires_grad_(False),)   # in a tuple it is no submodule: neither saved nor trained
        planned = {w.name for w in plan.weights}
        for name, parameter in student.named_parameters():
            parameter.requires_grad_(recipe.quant.trainable == "all" or name in planned)
        student.eval()   # no dropout: the student is to be the parent, and a resumed run must draw nothing anew
        if recipe.trainer.gradient_checkpointing:
            enable_checkpointing(student)
        self.quant = attach_fake_quant(student, plan=plan, backward=recipe.quant.backward, activations=recipe.quant.activations)

    @property
    def parent(self) -> nn.Module:
        return self._outside[0]

    def configure_model(self) -> None:
        """Under FSDP2: shard both models and read this rank's pieces. Lightning calls it before the optimizer is made, with the processes connected."""
        if self._source is None or self._is_sharded:
            return
        strategy: Any = self.trainer.strategy
        mesh, rank, world = strategy.device_mesh["data_parallel"], strategy.global_rank, strategy.world_size
        for model in (self.student, self.parent):
            shard_model(model, mesh=mesh, compute_dtype=AUTOCAST[self.recipe.trainer.precision])
            materialize(model, source=self._source, device=strategy.root_device, rank=rank, world=world)
        self._is_sharded = True

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        trained = {n for n, p in self.named_parameters() if p.requires_grad}
        return {k: v for k, v in super().state_dict(*args, **kwargs).items() if k in trained}

    def on_fit_start(self) -> None:
        if self._source is not None:
            return
        if self.recipe.loss.teacher_offload:
            self.offloaded = offload_layers(self.parent, device=self.device)
        else:
            self.parent.to(self.device)

    def training_step(self, batch_BT: Tensor, batch_idx: int) -> Tensor:
        inputs, labels = batch_BT[:, :-1], batch_BT[:, 1:].flatten()
        self.quant.begin_step()
        w = self.recipe.loss
        with torch.no_grad(), layer_outputs(self.parent, layers=w.hidden_layers) as teacher_layers:
            teacher = hidden_states(self.parent, inputs)
        with layer_outputs(self.student, layers=w.hidden_layers) as student_layers:
            student = hidden_states(self.student, inputs)
        sums = distillation_sums_ref(student, teacher_hidden_TD=teacher, head_VD=head_weight(self.student),
                                     teacher_head_VD=head_weight(self.parent), labels_T=labels, chunk_rows=w.chunk_rows)
        self.quant.end_step()
        kl, ce = sums.kl / labels.numel(), sums.cross_entropy / labels.numel()
        figures = {"kl": kl.detach(), "cross_entropy": ce.detach()}
        loss = w.kl_weight * kl + w.ce_weight * ce
        if w.hidden_mse_weight:
            distance = hidden_mse([student, *student_layers], teacher_TD=[teacher, *teacher_layers])
            figures["hidden_mse"] = distance.detach()
            loss = loss + w.hidden_mse_weight * distance
        if not bool(torch.isfinite(loss.detach())):
            raise ValueError(f"train qat: the loss is {float(loss.detach())} at step {self.global_step}: the run has diverged. "
                             "Start a new --run with a lower optim.lr.")
        lr = self.trainer.optimizers[0].param_groups[0]["lr"]
        everywhere = self.trainer.world_size > 1   # figures are means over all rows of the step
        self.log("loss", loss.detach(), prog_bar=True, sync_dist=everywhere)
        self.log_dict({**figures, "lr": lr}, sync_dist=everywhere)
        return loss

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        require_finite(self.student)   # before the file replaces a good one

    def configure_optimizers(self) -> Any:
        o, steps = self.recipe.optim, self.recipe.trainer.max_steps
        params = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(params, lr=o.lr, betas=o.betas, weight_decay=o.weight_decay)
        return with_warmup_cosine(optimizer, warmup_steps=o.warmup_steps, max_steps=steps, final_ratio=o.final_lr_ratio)

    @torch.no_grad()
    def round_as_exported(self) -> None:
        """Give tensors trained beside the planned ones the values the export will write, so that what is measured is what ships."""
        planned = {w.name for w in self.plan.weights}
        for name, parameter in self.student.named_parameters():
            if parameter.requires_grad and name not in planned:
                parameter.copy_(parameter.to(self.stored.get(name, parameter.dtype)))


def enable_checkpointing(model: nn.Module) -> None:
    """transformers' gradient checkpointing in a model that is in evaluation mode: its layers alone are told that they train, which switches no dropout on."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})   # type: ignore[operator]
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False) and module is not model.model:
            module.training = True
