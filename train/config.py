"""The recipe of `train qat`: frozen dataclasses, one field a line. A YAML file names only what differs."""

import math
from dataclasses import dataclass, field
from typing import Literal

from ..kernels.mx import SCALE_MODES, ScaleMode


@dataclass(frozen=True, kw_only=True)
class QuantConfig:
    """Which numbers the experts get."""

    scale_mode: ScaleMode = "even"                        # rule that picks a block's E8M0 scale: even, floor, rceil
    trainable: Literal["experts", "all"] = "experts"      # `experts` leaves every other tensor as it is in the parent

    def __post_init__(self) -> None:
        if self.scale_mode not in SCALE_MODES:
            raise ValueError(f"quant.scale_mode: must be one of {', '.join(SCALE_MODES)}; got {self.scale_mode!r}.")


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """What the quantized model is trained on."""

    kl_weight: float = 1.0      # KL(parent || model) at temperature 1, nats per token
    ce_weight: float = 0.0      # cross-entropy to the text, nats per token
    chunk_rows: int = 1024      # token rows whose logits exist at one time

    def __post_init__(self) -> None:
        at_least("loss.kl_weight", self.kl_weight, 0)
        at_least("loss.ce_weight", self.ce_weight, 0)
        if self.kl_weight + self.ce_weight == 0:
            raise ValueError("loss: kl_weight and ce_weight must not both be zero; got 0.0 and 0.0. There would be nothing to train on.")
        positive("loss.chunk_rows", self.chunk_rows)


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW with a warm-up and a cosine."""

    lr: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    warmup_steps: int = 0
    final_lr_ratio: float = 0.1          # the cosine ends at this share of lr
    max_grad_norm: float | None = 1.0    # null: no clipping

    def __post_init__(self) -> None:
        positive("optim.lr", self.lr)
        at_least("optim.weight_decay", self.weight_decay, 0)
        at_least("optim.warmup_steps", self.warmup_steps, 0)
        if not all(0 <= b < 1 for b in self.betas):
            raise ValueError(f"optim.betas: must lie in [0, 1); got {list(self.betas)}.")
        if not 0 <= self.final_lr_ratio <= 1:
            raise ValueError(f"optim.final_lr_ratio: must lie in [0, 1]; got {self.final_lr_ratio}.")
        if self.max_grad_norm is not None:
            positive("optim.max_grad_norm (null for no clipping)", self.max_grad_norm)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Documents of one domain: this Python's standard library, a Hub dataset, or a local file or folder."""

    domain: str                                       # label of the figures
    weight: float = 1.0                               # share of the training rows, relative to the other sources
    stdlib: bool = False                              # modules of this Python's standard library
    hub: str | None = None                            # dataset on the Hub, read with `datasets`
    hub_config: str | None = None                     # its configuration, such as `main`
    split: str = "train"                              # its split
    path: str | None = None                           # local .jsonl, .parquet or .txt file, or folder of .txt/.py files; replaces the Hub
    text: str | None = None                           # column that holds plain text
    prompt: str | None = None                         # column that holds the user's turn
    response: str | None = None                       # column that holds the answer; null: the turn alone
    tools: str | None = None                          # column that holds a list of tool schemas
    documents: int | None = None                      # read at most so many, spread evenly over the source; null: all
    part: Literal["all", "train", "heldout"] = "all"  # heldout: documents whose name has sha256 % 10 == 0; train: the others

    def __post_init__(self) -> None:
        if not self.stdlib and self.hub is None and self.path is None:
            raise ValueError(f"data source {self.domain!r}: needs one of stdlib: true, hub: NAME or path: FILE; got none.")
        if self.stdlib and (self.hub or self.path):
            raise ValueError(f"data source {self.domain!r}: stdlib excludes hub and path; got {self.hub or self.path!r}.")
        if self.text and self.prompt:
            raise ValueError(f"data source {self.domain!r}: give text or prompt, not both; got {self.text!r} and {self.prompt!r}.")
        if (self.stdlib or self.text) and (self.response or self.tools or (self.stdlib and (self.text or self.prompt))):
            raise ValueError(f"data source {self.domain!r}: prompt, response and tools go together, and neither with text nor with stdlib.")
        positive(f"data source {self.domain!r}: weight", self.weight)
        if self.documents is not None:
            positive(f"data source {self.domain!r}: documents", self.documents)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Text, cut into rows of one length."""

    train: list[Source] = field(default_factory=list)
    heldout: list[Source] = field(default_factory=list)
    sequence_length: int = 512       # predicted tokens a row
    heldout_rows: int = 64           # rows a held-out domain contributes at most, spread evenly over its text

    def __post_init__(self) -> None:
        positive("data.sequence_length", self.sequence_length)
        positive("data.heldout_rows", self.heldout_rows)


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """How long, how wide, on what; the names are Lightning's."""

    max_steps: int = 100
    batch_size: int = 8                          # rows a device takes at once
    accumulate_grad_batches: int = 1
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    devices: int = 1
    checkpoint_every_steps: int = 50
    log_every_steps: int = 10
    val_every_steps: int | None = None           # held-out KL while training; null: at the end only
    wandb_project: str | None = None             # also log to Weights & Biases; offline without a network
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_steps", "batch_size", "accumulate_grad_batches", "devices", "checkpoint_every_steps", "log_every_steps"):
            positive(f"trainer.{name}", getattr(self, name))
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"trainer.seed: must lie in 0..2**32 - 1; got {self.seed}.")
        if self.val_every_steps is not None:
            positive("trainer.val_every_steps (null for at the end only)", self.val_every_steps)


@dataclass(frozen=True, kw_only=True)
class QATRecipe:
    """Everything `train qat` needs."""

    model: str                                   # Hugging Face checkpoint directory of the bf16 parent
    run: str                                     # directory to write: recipe.yaml, meta.json, checkpoints/, metrics.csv
    quant: QuantConfig = field(default_factory=QuantConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    data: DataConfig = field(default_factory=DataConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)


def positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:   # also refuses NaN
        raise ValueError(f"{name}: must be positive; got {value}.")


def at_least(name: str, value: float, least: float) -> None:
    if not least <= value < math.inf:
        raise ValueError(f"{name}: must be at least {least}; got {value}.")
