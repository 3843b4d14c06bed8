"""The recipe of `train dflash-distill`: frozen dataclasses, one field a line. A YAML file names only what differs."""

import importlib.resources
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ..dflash.config import Causality
from ..dflash.loss import SlotLossOptions
from ..dflash.sampling import MIN_TEMPERATURE
from .config import ScaleOutConfig, Source, at_least, positive
from .schedule import Schedule, rate_share
from .shares import Share

HELDOUT_FILE_PROMPTS = 50   # a domain, of those in heldout.jsonl
MAX_TREE_BUDGET = 63   # the server's: with the anchor 64, the token columns of its widest step


@dataclass(frozen=True, kw_only=True)
class DraftShape:
    """The draft head. What is null is taken from the target."""

    init_from: str | None = None                   # directory of a draft to start from, whose shape it then has; null: random weights
    num_hidden_layers: int = 5
    intermediate_size: int | None = None           # null: three times the hidden size
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    target_layer_ids: list[int] | None = None      # tapped layers, from 0; null: the published rule, one tap a draft layer as far as they differ
    mask_token_id: int | None = None               # row of the target's embedding that marks a slot; null: the tokenizer's mask token
    block_size: int = 8                            # the anchor and the masked slots
    sliding_window: int | None = 1024              # context a slot sees; null: all of it
    full_attention_layers: list[int] = field(default_factory=list)   # layers without that window
    causal: Causality = "never"                     # slots see only the slots before them: never, always, or in sliding layers only
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 1.0             # share of a head's dimensions that turn with the position
    rope_scaling: dict[str, Any] | None = None     # rope_type (yarn, linear, llama3) and its numbers, as transformers names them
    attention_sinks: bool = False                  # a trained logit a query head that takes part in the softmax
    attention_value_scale: float = 1.0
    mask_embedding: bool = False                   # train the vector of the masked slots instead of taking the embedding's row
    draft_vocab_size: int | None = None            # only the so many tokens that the responses use most; null: all
    output_multiplier: float = 1.0                 # logits times this
    logit_softcap: float | None = None             # then capped by tanh; null takes the target's final_logit_softcapping, 0 is none


@dataclass(frozen=True, kw_only=True)
class PromptConfig:
    """Prompts by domain, and the responses the target gives to them. A source's weight is its share of the training rows."""

    train: list[Source] = field(default_factory=list)
    heldout: list[Source] = field(default_factory=list)
    sequence_length: int = 512                     # tokens of a packed row; a longer prompt with its response is left out, and counted
    prompt_tokens: int = 64                        # plain text gives prompts of so many tokens, each starting at a line
    prompts_per_document: int = 4                  # of a plain-text document, spread evenly over it
    max_new_tokens: int = 256                      # of a response
    temperatures: list[float] = field(default_factory=lambda: [0.0])   # every prompt is answered once at each; 0 is greedy
    generation_batch: int = 64                     # prompts answered at once
    responses: str | None = None                   # directory of the responses, to share them between runs; null: RUN/responses
    endpoint: str | None = None                    # URL of an OpenAI-compatible server of the target, which then answers; null: in process
    endpoint_model: str | None = None              # its name of the target; null: the only model it has
    endpoint_concurrency: int = 64                 # prompts under way at it
    shard: str | None = None                       # 2/8: answer the second of eight shares into data.responses and stop; null: answer all, and train
    features: str | None = None                    # directory of the target's states, read once before training; null: anew at every step
    heldout_prompts: int = 12                      # a domain, spread evenly over its prompts
    heldout_new_tokens: int = 64                   # decoded for each to measure the acceptance length
    heldout_texts: int = 0                         # a domain, at most 50: also measure on so many texts of that length by teacher forcing, much faster
    heldout_tree_budget: int | None = None         # after training also measure trees of so many proposals; num_drafts compares with the chain

    def __post_init__(self) -> None:
        for name in ("sequence_length", "prompt_tokens", "prompts_per_document", "max_new_tokens", "generation_batch", "endpoint_concurrency",
                     "heldout_prompts", "heldout_new_tokens"):
            positive(f"data.{name}", getattr(self, name))
        if self.endpoint_model is not None and self.endpoint is None:
            raise ValueError(f"data.endpoint_model: is the name of a model at data.endpoint; got {self.endpoint_model!r} and no endpoint. Give its URL.")
        if self.shard is not None:
            Share.parse(self.shard, where="data.shard")   # its check
            if self.responses is None:
                raise ValueError(f"data.shard: a share ({self.shard}) is written where the run that trains finds it. Give data.responses, a shared directory.")
        if not 0 <= self.heldout_texts <= HELDOUT_FILE_PROMPTS:
            raise ValueError(f"data.heldout_texts: must lie in 0..{HELDOUT_FILE_PROMPTS}, the prompts that are kept of a domain; got {self.heldout_texts}.")
        if self.heldout_tree_budget is not None and not 1 <= self.heldout_tree_budget <= MAX_TREE_BUDGET:
            raise ValueError(f"data.heldout_tree_budget (null for no trees): must lie in 1..{MAX_TREE_BUDGET}, as served; got {self.heldout_tree_budget}.")
        if not self.temperatures or any(t != 0 and not MIN_TEMPERATURE <= t <= 10 for t in self.temperatures):
            raise ValueError(f"data.temperatures: needs at least one, each 0 (greedy) or in {MIN_TEMPERATURE}..10; got {self.temperatures}.")
        if len(set(self.temperatures)) < len(self.temperatures):
            raise ValueError(f"data.temperatures: the same one twice: {self.temperatures}. Leave one of them out.")


@dataclass(frozen=True, kw_only=True)
class SlotLossConfig(SlotLossOptions):
    """What the masked slots are trained on, and how many a step has."""

    anchors: int = 512                    # blocks a row, drawn anew every step
    anchors_by: Literal["document", "token"] = "document"   # every document of a row has the same share of them, or every token the same chance

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("loss.anchors", self.anchors)


@dataclass(frozen=True, kw_only=True)
class MuonConfig:
    """Muon for matrices, AdamW for the rest, one warm-up and schedule for both."""

    kind: Literal["muon", "adamw"] = "muon"        # adamw: matrices too are trained by AdamW, with adamw_lr
    muon_lr: float = 1e-3
    adamw_lr: float = 1e-3
    muon_weight_decay: float = 0.1
    adamw_weight_decay: float = 0.01
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.95)
    schedule: Schedule = "cosine"                  # after the warm-up: cosine, linear, constant, or wsd (constant, then linearly down at the end)
    warmup_steps: int = 0
    warmup_ratio: float | None = None              # warm-up as a share of trainer.max_steps, instead of warmup_steps
    decay_share: float = 0.2                       # of max_steps, at their end, in which wsd goes down
    final_lr_ratio: float = 0.05                   # where cosine, linear and wsd end, as a share of the peak rate
    max_grad_norm: float | None = 1.0

    def __post_init__(self) -> None:
        for name, value, known in (("kind", self.kind, ("muon", "adamw")), ("schedule", self.schedule, get_args(Schedule))):
            if value not in known:
                raise ValueError(f"optim.{name}: must be one of {', '.join(known)}; got {value!r}.")
        if self.warmup_ratio is not None and not 0 <= self.warmup_ratio <= 1:
            raise ValueError(f"optim.warmup_ratio: must lie in [0, 1]; got {self.warmup_ratio}.")
        if self.warmup_ratio is not None and self.warmup_steps != 0:
            raise ValueError(f"optim.warmup_ratio: excludes warmup_steps; got {self.warmup_ratio} and {self.warmup_steps}. Give one of the two.")
        if not 0 < self.decay_share <= 1:
            raise ValueError(f"optim.decay_share: must lie in (0, 1]; got {self.decay_share}.")
        positive("optim.muon_lr", self.muon_lr)
        positive("optim.adamw_lr", self.adamw_lr)
        for name in ("muon_weight_decay", "adamw_weight_decay", "warmup_steps"):
            at_least(f"optim.{name}", getattr(self, name), 0)
        if not all(0 <= b < 1 for b in (*self.betas, self.momentum)):
            raise ValueError(f"optim: betas and momentum must lie in [0, 1); got {list(self.betas)} and {self.momentum}.")
        if not 0 <= self.final_lr_ratio <= 1:
            raise ValueError(f"optim.final_lr_ratio: must lie in [0, 1]; got {self.final_lr_ratio}.")
        if self.max_grad_norm is not None:
            positive("optim.max_grad_norm (null for no clipping)", self.max_grad_norm)

    def rate_share(self, step: int, *, max_steps: int) -> float:
        """Share of the peak rates at `step`."""
        warmup = self.warmup_steps if self.warmup_ratio is None else round(self.warmup_ratio * max_steps)
        return rate_share(step, schedule=self.schedule, warmup_steps=warmup, max_steps=max_steps, final_ratio=self.final_lr_ratio,
                          decay_share=self.decay_share)


@dataclass(frozen=True, kw_only=True)
class DistillRecipe:
    """Everything `train dflash-distill` needs."""

    target: str = "."                      # exported directory: the model the draft is for
    run: str = "dflash-run"                # directory to write: recipe.yaml, meta.json, responses/, checkpoints/, metrics.csv
    out: str | None = None                 # where the draft goes; null: TARGET/dflash
    features_from: str | None = None       # for comparisons only: train on the states of this model, such as the bf16 parent; null: the target's
    draft: DraftShape = field(default_factory=DraftShape)
    loss: SlotLossConfig = field(default_factory=SlotLossConfig)
    optim: MuonConfig = field(default_factory=MuonConfig)
    data: PromptConfig = field(default_factory=PromptConfig)
    trainer: ScaleOutConfig = field(default_factory=ScaleOutConfig)


def default_recipe() -> DistillRecipe:
    """For a target without a recipe: the prompts installed with kilotok, four domains, and the standard library of this Python."""
    recipes = importlib.resources.files(f"{__package__.rsplit('.', 1)[0]}.recipes")

    def prompts(domain: str, *, tools: str | None = None) -> Source:
        return Source(domain=domain, path=str(recipes / "prompts" / f"{domain}.jsonl"), prompt="prompt", tools=tools)

    def heldout(domain: str, *, tools: str | None = None) -> Source:
        return Source(domain=domain, path=str(recipes / "pocket" / "heldout" / f"{domain}.jsonl"), prompt="prompt", response="response", tools=tools)

    code = Source(domain="code", stdlib=True, part="train", documents=300)
    return DistillRecipe(
        data=PromptConfig(
            train=[code, prompts("code"), prompts("math"), prompts("chat"), prompts("agent", tools="tools")],
            heldout=[Source(domain="code", stdlib=True, part="heldout", documents=60), heldout("math"), heldout("chat"), heldout("agent", tools="tools")]),
        loss=SlotLossConfig(anchors=64), optim=MuonConfig(warmup_steps=20), trainer=ScaleOutConfig(max_steps=1000, batch_size=8))
