"""The recipe of `train build-moe`."""

from dataclasses import dataclass, field
from typing import Literal

from .config import DataConfig, OptimConfig, at_least, positive


@dataclass(frozen=True, kw_only=True)
class HealConfig:
    """A short distillation from the dense source, after the replicas were made to differ. The names are `train qat`'s."""

    max_steps: int = 0                           # 0: no healing
    batch_size: int = 8                          # rows at once, also when measuring
    accumulate_grad_batches: int = 1
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    log_every_steps: int = 10
    chunk_rows: int = 1024                       # token rows whose logits exist at one time
    optim: OptimConfig = field(default_factory=OptimConfig)

    def __post_init__(self) -> None:
        at_least("heal.max_steps (0 for no healing)", self.max_steps, 0)
        for name in ("batch_size", "accumulate_grad_batches", "log_every_steps", "chunk_rows"):
            positive(f"heal.{name}", getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class BuildRecipe:
    """Everything `train build-moe` needs. The experts are shards x replicas, of which a token takes `shards`."""

    source: str                  # dense Llama-class model: a GGUF file or a Hugging Face directory
    out: str                     # directory to write: a Hugging Face Mixtral in bf16, and build.json
    shards: int = 4              # experts that one MLP is cut into; also the experts a token takes
    replicas: int = 2            # copies of each shard
    noise: float = 0.05          # on all replicas but the first, relative to the RMS of an expert's matrix
    seed: int = 0                # of router rows, noise and the order of the text
    rows: int = 8                # training rows that place the routers, and held-out rows a domain that compare the result with the source
    data: DataConfig = field(default_factory=DataConfig)
    heal: HealConfig = field(default_factory=HealConfig)

    def __post_init__(self) -> None:
        positive("shards", self.shards)
        at_least("replicas (with one there is nothing to choose)", self.replicas, 2)
        at_least("noise", self.noise, 0)
        positive("rows", self.rows)
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed: must lie in 0..2**32 - 1; got {self.seed}.")
