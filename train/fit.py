"""The Lightning trainer of a run, the same for every kind of training."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from .callbacks import AtomicCheckpointIO, save_final
from .config import ScaleOutConfig, TrainerConfig
from .loggers import wandb_logger
from .recipe import RecipeError
from .schedule import warmup_cosine
from .sharding import ShardedStrategy


def require_accelerator(config: TrainerConfig) -> None:
    """RecipeError for a GPU that is asked for and not there."""
    if config.accelerator == "gpu" and not torch.cuda.is_available():
        raise RecipeError("trainer.accelerator: gpu, but torch sees no CUDA device. Use cpu or auto, or install a CUDA build of torch.")


def is_sharded(config: TrainerConfig) -> bool:
    return isinstance(config, ScaleOutConfig) and config.strategy == "fsdp"


class _StepCheckpoint(ModelCheckpoint):
    """A resumed run has the checkpoint of its first step. Lightning would write it again after the first micro-batch, amid an accumulated step."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._last_global_step_saved = trainer.global_step


def make_trainer(config: TrainerConfig, *, run_dir: Path, max_grad_norm: float | None, callbacks: list[L.Callback]) -> L.Trainer:
    """Checkpoints every `checkpoint_every_steps` into RUN/checkpoints, one kept, each whole or absent."""
    checkpoints = _StepCheckpoint(
        dirpath=run_dir / "checkpoints", filename="step-{step:08d}", auto_insert_metric_name=False, every_n_train_steps=config.checkpoint_every_steps,
        save_top_k=1, enable_version_counter=False)
    sharded = is_sharded(config)
    num_nodes, strategy = (config.num_nodes, config.strategy) if isinstance(config, ScaleOutConfig) else (1, "auto")
    return L.Trainer(
        accelerator=config.accelerator, devices=config.devices, num_nodes=num_nodes,
        strategy=ShardedStrategy(devices=config.devices * num_nodes) if sharded else strategy,
        precision="32-true" if sharded else config.precision,   # under FSDP2 layers are gathered in the compute dtype, without autocast
        max_steps=config.max_steps, max_epochs=1,
        accumulate_grad_batches=config.accumulate_grad_batches, gradient_clip_val=max_grad_norm,
        log_every_n_steps=config.log_every_steps, callbacks=[*callbacks, checkpoints], logger=wandb_logger(config.wandb_project, run_dir=run_dir),
        plugins=[] if sharded else [AtomicCheckpointIO()], limit_val_batches=0, num_sanity_val_steps=0, enable_model_summary=False,
        use_distributed_sampler=False, default_root_dir=run_dir)


def with_warmup_cosine(optimizer: torch.optim.Optimizer, *, warmup_steps: int, max_steps: int, final_ratio: float) -> dict[str, Any]:
    """What `configure_optimizers` returns: the optimizer, its rate following `warmup_cosine` step by step."""
    return with_schedule(optimizer, lambda s: warmup_cosine(s, warmup_steps=warmup_steps, max_steps=max_steps, final_ratio=final_ratio))


def with_schedule(optimizer: torch.optim.Optimizer, share: Callable[[int], float]) -> dict[str, Any]:
    """What `configure_optimizers` returns: the optimizer, the rate of each of its groups times `share` of the step."""
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(trainer: L.Trainer, module: L.LightningModule, *, data: L.LightningDataModule, checkpoint: Path | None, run_dir: Path, max_steps: int) -> None:
    """Train to max_steps and leave a checkpoint of that step. Errors: RuntimeError when Lightning stopped before."""
    trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)
    if trainer.global_step != max_steps:
        raise RuntimeError(f"train: stopped at step {trainer.global_step} of {max_steps}. Continue with --resume.")
    save_final(trainer, run_dir=run_dir)
