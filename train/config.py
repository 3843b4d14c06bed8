"""The recipe of `train qat`: frozen dataclasses, one field a line. A YAML file names only what differs."""

import math
import re
from dataclasses import dataclass, field
from typing import Literal

from ..kernels.mx import SCALE_MODES, ScaleMode
from ..quant.plan import PlanOptions
from ..quant.sensitivity import Granularity

DOMAIN = re.compile(r"[\w-][\w. -]*")


@dataclass(frozen=True, kw_only=True)
class QuantConfig:
    """Which numbers the weights get."""

    scale_mode: ScaleMode = "even"                        # rule that picks a block's E8M0 scale: even, floor, rceil, mse
    trainable: Literal["experts", "all"] = "experts"      # `experts` leaves every other tensor as it is in the parent
    backward: Literal["keep", "recompute"] = "keep"       # quantized weights in backward: held (2 bytes a weight), or quantized again
    experts: Literal["mxfp4", "bf16"] = "mxfp4"           # bf16: the control, trained alike and not quantized
    keep: list[str] = field(default_factory=list)         # routed experts at higher precision: names of fused weights, or patterns with *
    keep_format: Literal["bf16", "mxfp8"] = "bf16"        # the precision of those
    sensitivity: str | None = None                        # sensitivity.json of `train qat --sensitivity`: keep what it says, by bits_per_weight
    bits_per_weight: float | None = None                  # with `sensitivity`: mean bits of a routed expert weight, scales included
    granularity: Granularity = "layer"                    # what `sensitivity` keeps or quantizes as one: a layer's experts, or one fused weight
    shared_experts: bool = False                          # shared experts in MXFP4 too
    attention: Literal["mxfp8", "fp8_block"] | None = None  # linear layers of the attention: MXFP8, or FP8 in 128 x 128 tiles
    router: Literal["mxfp8"] | None = None                # the router's weight; exported as bf16 that holds the MXFP8 values
    activations: Literal["mxfp8"] | None = None           # also round the experts' inputs, for servers that compute in MXFP8
    expected: dict[str, int] = field(default_factory=dict)  # weights there must be, by role: {experts: 96}

    def __post_init__(self) -> None:
        if self.scale_mode not in SCALE_MODES:
            raise ValueError(f"quant.scale_mode: must be one of {', '.join(SCALE_MODES)}; got {self.scale_mode!r}.")
        if self.sensitivity is not None and self.bits_per_weight is None:   # the other way round is asked by `train qat --sensitivity`
            raise ValueError("quant.sensitivity: needs quant.bits_per_weight, the budget to spend by the table; got none.")
        if self.bits_per_weight is not None and self.keep:
            raise ValueError("quant.keep and quant.bits_per_weight: give one; both say which experts stay at higher precision.")
        if self.keep_format != "bf16" and not self.keep and self.bits_per_weight is None:
            raise ValueError(f"quant.keep_format: {self.keep_format} has nothing to apply to. Name the experts in quant.keep, or give quant.bits_per_weight.")
        if self.granularity != "layer" and self.bits_per_weight is None:
            raise ValueError(f"quant.granularity: {self.granularity} is how a budget is spent; got no quant.bits_per_weight. Give it, or leave this out.")
        if self.experts == "bf16" and (self.activations, self.attention, self.router, self.shared_experts) != (None, None, None, False):
            raise ValueError("quant.experts: bf16 is the control, in which nothing is quantized. Leave activations, attention, router and shared_experts out.")
        self.plan_options()   # its checks

    def plan_options(self, *, keep: tuple[str, ...] | None = None) -> PlanOptions:
        """What the plan needs. keep: instead of `self.keep`."""
        return PlanOptions(experts=self.experts, keep=tuple(self.keep) if keep is None else keep, keep_format=self.keep_format,
                           shared_experts=self.shared_experts, attention=self.attention, router=self.router, expected=self.expected)


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """What the quantized model is trained on."""

    kl_weight: float = 1.0           # KL(parent || model) at temperature 1, nats per token
    ce_weight: float = 0.0           # cross-entropy to the text, nats per token
    hidden_mse_weight: float = 0.0   # mean squared distance of the final hidden states (after the last norm) from the parent's
    hidden_layers: list[int] = field(default_factory=list)   # decoder layers, from 0, whose outputs' distances are added to that
    chunk_rows: int = 1024           # token rows whose logits exist at one time
    teacher_offload: bool = False    # the parent's layers wait in host memory and visit the device one at a time

    def __post_init__(self) -> None:
        for name in ("kl_weight", "ce_weight", "hidden_mse_weight"):
            at_least(f"loss.{name}", getattr(self, name), 0)
        if self.kl_weight + self.ce_weight + self.hidden_mse_weight == 0:
            raise ValueError("loss: kl_weight, ce_weight and hidden_mse_weight must not all be zero; got 0.0, 0.0 and 0.0. There would be nothing to train on.")
        if len(set(self.hidden_layers)) != len(self.hidden_layers) or any(i < 0 for i in self.hidden_layers):
            raise ValueError(f"loss.hidden_layers: must be different layer numbers, from 0; got {self.hidden_layers}.")
        if self.hidden_layers and self.hidden_mse_weight == 0:
            raise ValueError(f"loss.hidden_layers: needs loss.hidden_mse_weight; got layers {self.hidden_layers} with weight 0. Give a weight, or no layers.")
        positive("loss.chunk_rows", self.chunk_rows)


@dataclass(frozen=True, kw_only=True)
class BaselinesConfig:
    """What the trained model is compared with, besides its parent and round-to-nearest in its own scale mode."""

    scale_modes: list[ScaleMode] = field(default_factory=list)   # round-to-nearest also in these: even, floor, rceil, mse
    control: bool = False                                        # also train the bf16 parent by the same recipe, unquantized, in RUN/control

    def __post_init__(self) -> None:
        unknown = [m for m in self.scale_modes if m not in SCALE_MODES]
        if unknown or len(set(self.scale_modes)) != len(self.scale_modes):
            raise ValueError(f"baselines.scale_modes: must be different modes among {', '.join(SCALE_MODES)}; got {self.scale_modes}.")


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
        if not DOMAIN.fullmatch(self.domain):   # folders and columns are named after it
            raise ValueError(f"data source {self.domain!r}: a domain has letters, digits, spaces and - _ . alone, beginning with no space or dot. Rename it.")
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
class ScaleOutConfig(TrainerConfig):
    """And over how many devices."""

    strategy: Literal["auto", "ddp", "fsdp"] = "auto"   # fsdp: masters, gradients and optimizer sharded over all devices (FSDP2); auto: ddp if several
    num_nodes: int = 1                                  # machines; started by torchrun or SLURM, as Lightning does it

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("trainer.num_nodes", self.num_nodes)

    @property
    def rows_per_step(self) -> int:
        """Rows of one optimizer step over all devices."""
        return self.batch_size * self.accumulate_grad_batches * self.devices * self.num_nodes


@dataclass(frozen=True, kw_only=True)
class QATTrainerConfig(ScaleOutConfig):
    """What `train qat` has beyond that."""

    gradient_checkpointing: bool = False         # run each decoder layer's forward again in backward instead of keeping its activations


@dataclass(frozen=True, kw_only=True)
class QATRecipe:
    """Everything `train qat` needs."""

    model: str                                   # Hugging Face checkpoint directory of the bf16 parent
    run: str                                     # directory to write: recipe.yaml, meta.json, checkpoints/, metrics.csv
    quant: QuantConfig = field(default_factory=QuantConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    data: DataConfig = field(default_factory=DataConfig)
    trainer: QATTrainerConfig = field(default_factory=QATTrainerConfig)
    baselines: BaselinesConfig = field(default_factory=BaselinesConfig)

    def __post_init__(self) -> None:
        q, b = self.quant, self.baselines
        if q.experts == "bf16" and (b.control or b.scale_modes):
            raise ValueError("baselines: with quant.experts: bf16 the run is itself the control and rounds nothing to MXFP4; got "
                             f"control {str(b.control).lower()}, scale_modes {b.scale_modes}. Leave the section out.")
        if b.control and q.trainable == "experts" and (q.shared_experts or q.attention or q.router):
            raise ValueError("baselines.control: would train the experts only, and the run also what quant.shared_experts, attention or router add. "
                             "Set quant.trainable: all, which trains the same tensors in both, or leave the control out.")
        if self.loss.teacher_offload and self.trainer.strategy == "fsdp":
            raise ValueError("loss.teacher_offload: with trainer.strategy: fsdp the parent lies in pieces on the devices already. Give one of the two.")


def positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:   # also refuses NaN
        raise ValueError(f"{name}: must be positive; got {value}.")


def at_least(name: str, value: float, least: float) -> None:
    if not least <= value < math.inf:
        raise ValueError(f"{name}: must be at least {least}; got {value}.")
