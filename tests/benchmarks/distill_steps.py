"""One training step of a DFlash draft, as each of the implementations that `bench_distill_peers.py` compares runs it: the rows of its table.

The peers' modules are imported inside the function of their row, because each row runs in a process of its own.

Legend: S tokens, D hidden, V vocabulary.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

WHERE = "bench_distill_peers"
WARMUP = 3


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The draft and its input."""

    hidden_size: int = 4096
    intermediate_size: int = 12288
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    vocab_size: int = 151936
    num_hidden_layers: int = 5
    num_target_layers: int = 36
    target_layer_ids: tuple[int, ...] = (1, 9, 17, 25, 33)   # from 0, of layer outputs
    block_size: int = 8
    length: int = 4096
    prompt: int = 64        # tokens that are not supervised
    anchors: int = 512
    rope_theta: float = 1e6

    @property
    def mask_token_id(self) -> int:
        return self.vocab_size - 1

    def qwen3(self, *, layers: int) -> dict[str, Any]:
        """config.json of a Qwen3 model of this shape."""
        keys = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "rope_theta")
        return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": layers, "max_position_embeddings": 40960,
                "rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02,
                "tie_word_embeddings": False, "dtype": "bfloat16", **{k: getattr(self, k) for k in keys}}


TINY = Shape(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=256, num_hidden_layers=2,
             num_target_layers=12, target_layer_ids=(1, 9), length=128, prompt=16, anchors=8)


@dataclass(kw_only=True)
class Clock:
    """Marks of the steps, from which the times of a row come; looks at the loss and, in the first step, at the gradients."""

    cuda: bool
    marks: list[Any] = field(default_factory=list)        # start, optimizer, end, start, optimizer, end, ...
    losses: list[Tensor] = field(default_factory=list)
    gradients: str | None = None

    def mark(self) -> None:
        if self.cuda:
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    def at_optimizer(self, parameters: Iterator[nn.Parameter]) -> None:
        """Between the backward pass and clipping. Errors: RuntimeError when a trained tensor has no gradient, or only zeros."""
        self.mark()
        if self.gradients is None:   # of the first step, which is warm-up
            norms = [None if p.grad is None else float(p.grad.float().norm()) for p in parameters if p.requires_grad]
            alive = sum(n is not None and math.isfinite(n) and n > 0 for n in norms)
            self.gradients = f"{alive} of {len(norms)}"
            if alive != len(norms) or not norms:
                raise RuntimeError(f"{WHERE}: every trained tensor must have a finite gradient that is not zero; {self.gradients} have. The step is wrong.")

    def times(self) -> tuple[list[float], list[float]]:
        """Milliseconds of forward and backward, and of the optimizer, a number a timed step."""
        if self.cuda:
            torch.cuda.synchronize()
        spans = [a.elapsed_time(b) if self.cuda else (b - a) * 1e3 for a, b in zip(self.marks, self.marks[1:], strict=False)]
        return spans[3 * WARMUP::3], spans[3 * WARMUP + 1::3]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a row is given."""

    shape: Shape
    device: str
    steps: int
    clock: Clock
    scratch: Path

    @property
    def tiny(self) -> bool:
        return self.device == "cpu"

    @property
    def total(self) -> int:
        return WARMUP + self.steps

    def batch(self) -> dict[str, Tensor]:
        """ids and documents int64, supervised fp32, all [1, S]; features [1, S, taps * D] and the target's last hidden states [1, S, D] in bf16."""
        s = self.shape
        draw = torch.Generator(self.device).manual_seed(1)
        features = torch.randn(1, s.length, (len(s.target_layer_ids) + 1) * s.hidden_size, generator=draw, device=self.device)
        if not self.tiny:
            features = features.bfloat16()
        supervised = torch.ones(1, s.length, device=self.device)
        supervised[:, :s.prompt] = 0
        return {"ids": torch.randint(s.vocab_size - 1, (1, s.length), generator=draw, device=self.device), "supervised": supervised,
                "documents": torch.zeros(1, s.length, dtype=torch.long, device=self.device),
                "features": features[..., :-s.hidden_size].contiguous(), "hidden": features[..., -s.hidden_size:].contiguous()}


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What a row says of itself. A loss of ln V in every slot would be `weight` * ln V."""

    options: str
    optimizer: str
    weight: float = 1.0
    more: dict[str, list[float]] = field(default_factory=dict)   # milliseconds of a second optimizer


def specforge(job: Job, *, fast: bool) -> Ran:
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
    from specforge.algorithms.dflash.providers import build_draft, build_step
    from specforge.config import Config
    from specforge.modeling.target.target_utils import TargetEmbeddingsAndHead
    from specforge.runtime.contracts import TrainBatch
    from specforge.training.assembly import _optimizer_factory
    from specforge.training.backend import FSDPTrainingBackend, ParallelConfig
    from specforge.training.controller import TrainerCore
    from specforge.training.model_loading import load_draft_config_source
    from transformers import Qwen3Config

    s = job.shape
    draft_json = s.qwen3(layers=s.num_hidden_layers) | {
        "architectures": ["DFlashDraftModel"], "block_size": s.block_size, "num_target_layers": s.num_target_layers,
        "layer_types": ["full_attention"] * s.num_hidden_layers, "use_sliding_window": False, "sliding_window": None,
        "dflash_config": {"mask_token_id": s.mask_token_id, "target_layer_ids": list(s.target_layer_ids)}}
    path = job.scratch / "draft.json"
    path.write_text(json.dumps(draft_json))
    # the keys that its configs/qwen3-8b-dflash recipes set; all else is its default
    training = {"strategy": "dflash", "learning_rate": 6e-4, "warmup_ratio": 0.04, "max_grad_norm": 1.0, "num_anchors": s.anchors, "loss_decay_gamma": 7.0,
                "attention_backend": "sdpa" if job.tiny else "flex_attention", "max_steps": 10000}
    model = {"target_model_path": "unused", "draft_model_config": str(path), "torch_dtype": "float32" if job.tiny else "bfloat16"}
    if fast:
        training |= {"objective_chunk_blocks": 0}
        model |= {"use_liger_kernel": not job.tiny}
    config = Config(model=model, data={"hidden_states_path": "unused"}, training=training)
    dtype = getattr(torch, model["torch_dtype"])
    with torch.device(job.device):
        draft = build_draft(config, load_draft_config_source(str(path)))
        target = TargetEmbeddingsAndHead(Qwen3Config(**s.qwen3(layers=s.num_target_layers))).to(dtype).eval().requires_grad_(False)
    for weight in (target.embed_tokens.weight, target.lm_head.weight):
        nn.init.normal_(weight, std=0.02)
    t = config.training
    wrapped = OnlineDFlashModel(
        draft_model=draft, target_lm_head=target.lm_head, target_embed_tokens=target.embed_tokens, mask_token_id=s.mask_token_id, block_size=s.block_size,
        attention_backend=t.attention_backend, num_anchors=t.num_anchors, loss_decay_gamma=t.loss_decay_gamma,
        objective_chunk_blocks=t.objective_chunk_blocks, loss_type=t.loss_type, dpace_alpha=t.dpace_alpha).to(job.device, dtype).train()
    factory = _optimizer_factory(config)
    factory.total_steps = training["max_steps"]
    backend = FSDPTrainingBackend(ParallelConfig(param_dtype=dtype), optimizer_factory=factory)
    backend.prepare_model(wrapped, wrap=False, optimizer_target=draft)
    core, step = TrainerCore(build_step(wrapped), backend), backend.step

    def timed_step() -> Any:
        job.clock.at_optimizer(draft.parameters())
        return step()

    backend.step = timed_step
    b = job.batch()
    batch = TrainBatch(sample_ids=["0"], strategy="dflash", tensors={"input_ids": b["ids"], "hidden_states": b["features"], "loss_mask": b["supervised"]})
    for _ in steps(job):
        job.clock.losses.append(torch.tensor(core.train_step(batch).loss))
    liger = "Liger norms and MLP" if model.get("use_liger_kernel") else "Qwen3 norms and MLP"
    chunks = "logits of all blocks at once" if fast else f"logits of {t.objective_chunk_blocks} blocks at a time, recomputed"
    return Ran(options=f"{t.attention_backend}, full, {liger}, CE gamma {t.loss_decay_gamma:g}, {chunks}",
               optimizer=f"BF16Optimizer: AdamW, fp32 masters{', its foreach default' if not job.tiny else ''}")


def speculators(job: Job, *, full: bool) -> Ran:
    import speculators.train.trainer as trainer_module
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
    from speculators.train.cli import create_transformer_layer_config
    from speculators.train.config import TrainConfig
    from speculators.train.trainer import Trainer, TrainerConfig

    s = job.shape
    verifier = job.scratch / "verifier"
    verifier.mkdir()
    (verifier / "config.json").write_text(json.dumps(s.qwen3(layers=s.num_target_layers)))
    layers = range(s.num_hidden_layers)
    options = ["--verifier-name-or-path", str(verifier), "--speculator-type", "dflash", "--block-size", str(s.block_size), "--max-anchors", str(s.anchors),
               "--num-layers", str(s.num_hidden_layers), "--mask-token-id", str(s.mask_token_id), "--total-seq-len", str(s.length),
               "--target-layer-ids", *(str(i + 1) for i in s.target_layer_ids), "--max-steps", str(job.total + 1), "--log-freq", "1000000",
               "--save-path", str(job.scratch / "checkpoints")]
    if full:
        options += ["--full-attention-indices", *map(str, layers)]
    if job.tiny:
        options += ["--draft-attn-impl", "sdpa", "--loss-implementation", "eager", "--hidden-states-dtype", "float32"]
        trainer_module.get_local_rank = lambda: "cpu"
    args = argparse.Namespace(**TrainConfig.resolve(options).flatten())
    args.draft_vocab_size = s.vocab_size
    decoder = create_transformer_layer_config(
        verifier_name_or_path=str(verifier), num_layers=args.num_layers, draft_arch=args.draft_arch, hidden_act=args.draft_hidden_act,
        sliding_window=args.sliding_window, full_attention_indices=args.full_attention_indices)
    with torch.device(job.device):
        model = DFlashDraftModel(DFlashSpeculatorConfig(**DFlashDraftModel._build_base_config_kwargs("dflash", decoder, **vars(args))))
    for weight in (model.embed_tokens.weight, model.lm_head.weight, model.verifier_lm_head.weight):   # what the verifier's files would fill
        nn.init.normal_(weight, std=0.02)
    call, _ = DFlashDraftModel.get_trainer_kwargs(**vars(args))
    known = {name: getattr(args, name) for name in TrainerConfig._fields if hasattr(args, name)}
    config = TrainerConfig(**known | {"num_epochs": 1, "resume_from_checkpoint": False, "train_call_kwargs": call, "val_call_kwargs": call,
                                      "hidden_states_dtype": getattr(torch, args.hidden_states_dtype)})
    b = job.batch()
    batch = {"hidden_states": b["features"], "input_ids": b["ids"], "loss_mask": b["supervised"].bool(), "verifier_last_hidden_states": b["hidden"],
             "document_ids": b["documents"], "position_ids": torch.arange(s.length, device=job.device)[None]}

    class Batches(list):  # type: ignore[type-arg]
        batch_sampler = None

    trainer = Trainer(model, config, Batches({**batch, "error_records": 0} for _ in range(job.total)))
    if job.tiny:
        trainer.device_type = "cpu"
    model.register_forward_hook(lambda module, inputs, output: job.clock.losses.append(output[1].detach()))
    clip = torch.nn.utils.clip_grad_norm_

    def timed_clip(parameters: Any, *rest: Any, **kwargs: Any) -> Tensor:
        parameters = list(parameters)
        job.clock.at_optimizer(iter(parameters))
        return clip(parameters, *rest, **kwargs)

    torch.nn.utils.clip_grad_norm_ = timed_clip

    def epoch() -> None:
        marks = steps(job)
        next(marks)
        trainer.global_step = 1   # step 0 is one that it logs, waiting for the device at every turn
        trainer.train_epoch(0, step_callback=lambda: next(marks, None))

    epoch()
    weight = sum(0.5**j for k in range(1, s.block_size) for j in range(k, s.block_size)) / (s.block_size - 1)   # D-PACE of slots that know nothing
    peak = peak_gib(job)
    first, job.clock.marks = job.clock.marks, []
    trainer.optimizers, trainer.schedulers = [], []
    trainer.config = config._replace(optimizer="adamw")
    trainer.setup_optimizer()
    epoch()
    _, adamw = job.clock.times()
    job.clock.marks = first
    attention = "full" if full else f"causal window of {args.sliding_window}"
    return Ran(options=f"{args.draft_attn_impl}, {attention}, {'eager' if job.tiny else 'compiled'} forward, fp32 weights, "
                       f"{args.loss_implementation} {args.loss_fn} with {args.per_position_loss_weight}",
               optimizer=f"torch Muon ({config.muon_ns_steps} steps) and AdamW, fp32", weight=weight, more={"AdamW alone": adamw, "peak_gib": [peak]})


def ours(job: Job, *, dtype: torch.dtype) -> Ran:
    """The step of `train dflash-distill`, with the target's features given; `dtype` of the weights."""
    from kilotok.dflash.anchors import anchor_generator, draw_anchors, fill_tiles, valid_anchors
    from kilotok.dflash.config import DraftConfig
    from kilotok.dflash.loss import SlotLossOptions, slot_sums, slot_targets
    from kilotok.dflash.model import Blocks, DraftModel
    from kilotok.train.optim import MuonAdamW, parameter_groups

    s, b, flex = job.shape, job.batch(), not job.tiny
    compute = torch.float32 if job.tiny else torch.bfloat16
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
             "target_layer_ids", "num_target_layers", "mask_token_id", "block_size", "rope_theta")
    draft = DraftModel(DraftConfig(**{n: getattr(s, n) for n in names})).to(job.device)
    draft.initialize(generator=torch.Generator(job.device).manual_seed(0), final_norm_D=torch.ones(s.hidden_size, device=job.device))
    draft.to(torch.float32 if job.tiny else dtype)
    if flex:
        draft.compile_layers()
    embedding, head = (torch.randn(s.vocab_size, s.hidden_size, device=job.device, dtype=compute) * 0.02 for _ in range(2))
    muon = MuonAdamW(parameter_groups(draft, muon_lr=1e-3, muon_weight_decay=0.1, adamw_lr=1e-3, adamw_weight_decay=0.01, betas=(0.9, 0.95), momentum=0.95))
    positions, supervised = torch.arange(s.length, device=job.device)[None], b["supervised"].bool()

    def run(optimizer: torch.optim.Optimizer) -> None:
        for i in steps(job):
            index, is_valid = draw_anchors(valid_anchors(b["documents"], supervised_BS=supervised, positions_BS=positions), num_anchors=s.anchors,
                                           documents_BS=b["documents"], generator=anchor_generator(seed=0, rank=0, index=i, device=torch.device(job.device)))
            if flex:
                index, is_valid = fill_tiles(index, is_valid, block_size=s.block_size)
            with torch.autocast(job.device, dtype=torch.bfloat16, enabled=not job.tiny):
                slots = draft(b["features"], blocks=Blocks(anchors_BA=index, ids_BA=b["ids"].gather(1, index), positions_BS=positions),
                              embedding_VD=embedding, flex=flex)
                targets = slot_targets(b["ids"], documents_BS=b["documents"], supervised_BS=supervised, anchor_index_BA=index, anchor_valid_BA=is_valid,
                                       block_size=s.block_size)
                sums = slot_sums(slots, targets=targets, head_VD=head, target_hidden_BSD=b["hidden"], options=SlotLossOptions(decay_gamma=7.0))
            loss = sums.loss / sums.weight.clamp(min=1e-6)
            loss.backward()
            job.clock.losses.append(loss.detach())
            job.clock.at_optimizer(draft.parameters())
            torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    run(muon)
    _, first = job.clock.times()
    job.clock.marks.clear()
    muon.state.clear()
    run(torch.optim.AdamW(draft.parameters(), lr=1e-4, fused=True))
    return Ran(options=f"full, {str(dtype).removeprefix('torch.')} weights, bf16 autocast, compiled layers, block mask, CE gamma 7 fused with the head",
               optimizer="AdamW, fused (Muon beside it)", more={"Muon": first})


ROWS: dict[str, tuple[str, Callable[[Job], Ran]]] = {
    "kilotok": ("kilotok", partial(ours, dtype=torch.float32)),
    "kilotok-bf16": ("kilotok, bf16 weights", partial(ours, dtype=torch.bfloat16)),
    "specforge": ("SpecForge, its recipe", partial(specforge, fast=False)),
    "specforge-fast": ("SpecForge, its fastest options", partial(specforge, fast=True)),
    "speculators": ("speculators, its defaults", partial(speculators, full=False)),
    "speculators-full": ("speculators, full attention", partial(speculators, full=True)),
}


def steps(job: Job) -> Iterator[int]:
    """Indices of all steps, with a mark before and after each; memory is watched after the warm-up."""
    for i in range(job.total):
        if i == WARMUP and job.clock.cuda:
            torch.cuda.reset_peak_memory_stats()
        job.clock.mark()
        yield i
        job.clock.mark()


def peak_gib(job: Job) -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if job.clock.cuda else math.nan
