"""A real mixture of experts out of a dense Llama-class model, for machines that cannot get one: `train build-moe`.

The construction (quant/archs/split_dense.py) computes exactly what the source computes, which is checked here before anything else.
Then all replicas but the first are moved by noise, so that choosing between them matters, and everything but the routers is distilled
from the source for a few steps. The routers stay: the experts of one replica share a router row, and rows that drift apart would send a
token to parts of two replicas, which no dense MLP ever was.
"""

import contextlib
import hashlib
import importlib.metadata
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from ..kernels.loss import distillation_sums_ref
from ..quant.archs import load_config, load_model, load_tokenizer
from ..quant.archs.gguf import DenseModel, read_gguf
from ..quant.archs.split_dense import add_noise, check_splittable, mixtral_of, router_inputs, router_rows, routers
from ..quant.checkpoint import new_directory, require_free_space, sha256_of_weights, write_atomically
from ..quant.checkpoint.disk import share
from ..quant.experts import attach_fake_quant
from ..quant.plan import PlanOptions, make_plan
from ..quant.quality import head_weight, hidden_states, measure_quality
from .build_config import BuildRecipe, HealConfig
from .data import TextData
from .fit import with_warmup_cosine
from .loggers import quiet_lightning
from .packing import spread
from .precision import AUTOCAST
from .provenance import run_record
from .recipe import RecipeError
from .run_dir import require_finite

RECORD = "build.json"
# Largest difference of a logit, relative to the largest logit. Both models sum the same fp32 products in another order, once a layer; seen:
# 15 eps for 30 layers. A shard in the wrong place or a token that goes to parts of two replicas moves logits by a thousand times as much.
LOGIT_BOUND = 128 * 2.0**-23
# Differences of that size decide between two tokens only where they tie that closely.
ARGMAX_BOUND = 0.999


class HealModule(L.LightningModule):
    """KL to the dense source, all parameters but the routers, AdamW."""

    def __init__(self, config: HealConfig, *, student: nn.Module, dense: nn.Module) -> None:
        super().__init__()
        self.config, self.student = config, student
        self._outside = (dense.requires_grad_(False),)   # in a tuple it is no submodule: not trained
        self.curve: list[dict[str, float]] = []          # KL of the last micro-batch, every log_every_steps
        kept = {id(p) for router in routers(student) for p in router.parameters()}
        for parameter in student.parameters():
            parameter.requires_grad_(id(parameter) not in kept)

    def training_step(self, batch_BT: Tensor, batch_idx: int) -> Tensor:
        inputs, labels = batch_BT[:, :-1], batch_BT[:, 1:].flatten()
        (dense,) = self._outside
        with torch.no_grad():
            teacher = hidden_states(dense, inputs)
        sums = distillation_sums_ref(
            hidden_states(self.student, inputs), teacher_hidden_TD=teacher, head_VD=head_weight(self.student), teacher_head_VD=head_weight(dense),
            labels_T=labels, chunk_rows=self.config.chunk_rows)
        kl = sums.kl / labels.numel()
        if not bool(torch.isfinite(kl.detach())):
            raise ValueError(f"train build-moe: the loss is {float(kl.detach())} at step {self.global_step}: healing has diverged. Lower heal.optim.lr.")
        micro, step = (batch_idx + 1) % self.config.accumulate_grad_batches, self.global_step + 1
        if micro == 0 and (step % self.config.log_every_steps == 0 or step in (1, self.config.max_steps)):
            self.curve.append({"step": step, "kl": float(kl.detach())})
            print(f"healing: step {step} of {self.config.max_steps}: KL {float(kl.detach()):.5f}", flush=True)
        return kl

    def configure_optimizers(self) -> Any:
        o, steps = self.config.optim, self.config.max_steps
        params = [p for p in self.student.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(params, lr=o.lr, betas=o.betas, weight_decay=o.weight_decay)
        return with_warmup_cosine(optimizer, warmup_steps=o.warmup_steps, max_steps=steps, final_ratio=o.final_lr_ratio)


def run_build(recipe: BuildRecipe) -> dict[str, Any]:
    """Build, check, heal, measure, write OUT; returns OUT/build.json as a dict.

    Errors: input is checked before anything is computed. FileExistsError for an OUT that exists; ValueError, NotImplementedError,
        FileNotFoundError for a source or data that cannot be used; RuntimeError when the result does not compute what the source does.
    """
    source, out, heal = Path(recipe.source), Path(recipe.out), recipe.heal
    if out.exists():
        raise FileExistsError(f"out: {out.absolute()} exists. Nothing is overwritten: choose another --out, or remove it.")
    _device(heal)
    dense, tokenizer = _read_source(source, recipe=recipe)
    config: Any = dense.config
    require_finite(dense)
    if recipe.data.sequence_length > config.max_position_embeddings:
        raise RecipeError(f"data.sequence_length: {recipe.data.sequence_length} is beyond the model's max_position_embeddings, "
                          f"{config.max_position_embeddings}. Lower it.")
    data = TextData(recipe.data, tokenizer=tokenizer, seed=recipe.seed, batch_size=heal.batch_size, accumulate=heal.accumulate_grad_batches,
                    max_steps=heal.max_steps)
    if (largest := data.max_token_id()) >= config.vocab_size:
        raise ValueError(f"tokenizer: gives token {largest}, but the model's vocab_size is {config.vocab_size}. They do not belong together.")
    require_free_space(out, num_bytes=2 * recipe.replicas * sum(p.numel() for p in dense.parameters()), what="train build-moe")

    generator = torch.Generator().manual_seed(recipe.seed)
    rows = [row for source_rows in data.sources for row in _some(source_rows, count=max(1, recipe.rows // len(data.sources)))]
    rows_by_layer = [router_rows(i, replicas=recipe.replicas, generator=generator) for i in router_inputs(dense, rows=rows)]
    model = mixtral_of(dense, shards=recipe.shards, replicas=recipe.replicas, rows_RD=rows_by_layer)
    record: dict[str, Any] = {
        "kind": "build-moe", **run_record(), "recipe": asdict(recipe), "source": _source_record(source), "text_sha256": data.sha256(),
        "parameters": {"dense": _count(dense), "moe": _count(model)},
        "check": compare_logits(model, dense=dense, rows=[r for d in data.heldout.values() for r in _some(d, count=recipe.rows)])}
    _require_equal(record["check"])

    with experts_in_bf16(model) if heal.precision == "bf16-mixed" else contextlib.nullcontext():
        _noise_and_heal(model, dense=dense, data=data, recipe=recipe, generator=generator, record=record)
    with new_directory(out) as folder:
        _write(folder, model=model.cpu(), tokenizer=tokenizer, record=record)
    print(_table(record), flush=True)
    return record


def _noise_and_heal(
    model: nn.Module, *, dense: nn.Module, data: TextData, recipe: BuildRecipe, generator: torch.Generator, record: dict[str, Any],
) -> None:
    """The model from equal replicas to what is written, measured at each stage into `record`."""
    device = _device(recipe.heal)
    record["stages"] = {"built": measure(model, dense=dense, data=data, recipe=recipe, device=device)}
    if recipe.noise:
        add_noise(model.cpu(), shards=recipe.shards, relative=recipe.noise, generator=generator)
        record["stages"]["noised"] = measure(model, dense=dense, data=data, recipe=recipe, device=device)
    if recipe.heal.max_steps:
        record["heal_curve"] = _heal(model, dense=dense, data=data, recipe=recipe)
        require_finite(model)
    model.cpu()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))   # what is measured from here on is what is written
    record["stages"]["written"] = measure(model, dense=dense, data=data, recipe=recipe, device=device)


@torch.no_grad()
def compare_logits(model: nn.Module, *, dense: nn.Module, rows: Sequence[Tensor]) -> dict[str, Any]:
    """How far two models' logits are apart over token rows, on the CPU in fp32, one row at a time."""
    worst = largest = 0.0
    agreeing = tokens = 0
    for row in rows:
        got, expected = (m(input_ids=row[None], use_cache=False).logits[0] for m in (model, dense))
        worst, largest = max(worst, float((got - expected).abs().max())), max(largest, float(expected.abs().max()))
        agreeing += int((got.argmax(-1) == expected.argmax(-1)).sum())
        tokens += len(row)
    return {"tokens": tokens, "max_logit_difference": worst, "bound": LOGIT_BOUND * largest, "max_logit": largest, "argmax_agreement": agreeing / tokens}


def measure(model: nn.Module, *, dense: nn.Module, data: TextData, recipe: BuildRecipe, device: torch.device) -> dict[str, Any]:
    """Held-out quality by domain and expert load by layer, on the healing's device and in its precision."""
    model.to(device)
    dense.to(device)
    with counted_choices(model, shards=recipe.shards) as counts:
        quality = {d: measure_quality(model, parent=dense, rows=rows, rows_per_batch=recipe.heal.batch_size, chunk_rows=recipe.heal.chunk_rows,
                                      autocast_dtype=AUTOCAST[recipe.heal.precision]).to_json() for d, rows in data.heldout.items()}
    load = [[n / sum(c.tokens_per_expert_E) for n in c.tokens_per_expert_E] for c in counts]
    return {"quality": quality, "expert_load": load, "whole_replica_share": sum(c.whole for c in counts) / sum(c.tokens for c in counts)}


@dataclass(kw_only=True)
class Choices:
    """What one router chose."""

    shards: int
    tokens_per_expert_E: list[int] = field(default_factory=list)
    tokens: int = 0
    whole: int = 0           # tokens that took all shards of one replica

    def add(self, expert_ids_TK: Tensor) -> None:
        counts = torch.bincount(expert_ids_TK.flatten(), minlength=len(self.tokens_per_expert_E)).tolist()
        self.tokens_per_expert_E = [a + b for a, b in zip(self.tokens_per_expert_E, counts, strict=True)]
        replica_TK = expert_ids_TK // self.shards
        self.whole += int((replica_TK == replica_TK[:, :1]).all(dim=1).sum())
        self.tokens += len(expert_ids_TK)


@contextlib.contextmanager
def counted_choices(model: nn.Module, *, shards: int) -> Iterator[list[Choices]]:
    """Count what every router chooses in the block."""
    found = routers(model)
    config: Any = model.config
    counts = [Choices(shards=shards, tokens_per_expert_E=[0] * config.num_local_experts) for _ in found]
    handles = [r.register_forward_hook(lambda module, args, output, c=c: c.add(output[2])) for r, c in zip(found, counts, strict=True)]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def experts_in_bf16(model: nn.Module) -> Iterator[None]:
    """The experts compute with their masters rounded to bf16 in the block: the seam of QAT with nothing quantized. transformers' grouped product takes no
    part in autocast by itself and would run fp32 masters in fp32."""
    plan = make_plan(model.config, scale_mode="even", where="train build-moe", options=PlanOptions(experts="bf16"))
    attached = attach_fake_quant(model, plan=plan)
    try:
        yield
    finally:
        attached.detach()


def _device(heal: HealConfig) -> torch.device:
    if heal.accelerator == "gpu" and not torch.cuda.is_available():
        raise RecipeError("heal.accelerator: gpu, but torch sees no CUDA device. Use cpu or auto, or install a CUDA build of torch.")
    return torch.device("cuda" if heal.accelerator != "cpu" and torch.cuda.is_available() else "cpu")


def _read_source(source: Path, *, recipe: BuildRecipe) -> DenseModel:
    if not source.is_dir():
        found = read_gguf(source)
        check_splittable(found.model.config, shards=recipe.shards, where=str(source))
        return found
    check_splittable(load_config(source), shards=recipe.shards, where=str(source))
    return DenseModel(load_model(source, dtype=torch.float32), load_tokenizer(source))


def _source_record(source: Path) -> dict[str, Any]:
    """Name, kind and hash; the path itself says nothing elsewhere."""
    if source.is_dir():
        return {"name": source.name, "kind": "Hugging Face directory", "sha256": sha256_of_weights(source)}
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"name": source.name, "kind": "GGUF", "sha256": digest, "gguf": importlib.metadata.version("gguf")}


def _some(rows: Sequence[Tensor], *, count: int) -> list[Tensor]:
    return [rows[i] for i in spread(len(rows), limit=count)]


def _count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _require_equal(check: dict[str, Any]) -> None:
    print(f"against the dense source, fp32, {check['tokens']} tokens: largest difference of a logit {check['max_logit_difference']:.2e} "
          f"(bound {check['bound']:.2e}), same most likely token {check['argmax_agreement']:.4%}", flush=True)
    if check["max_logit_difference"] > check["bound"] or check["argmax_agreement"] < ARGMAX_BOUND:
        raise RuntimeError(f"train build-moe: the experts do not compute what the source computes: largest difference {check['max_logit_difference']:.2e}, "
                           f"bound {check['bound']:.2e}, same most likely token {check['argmax_agreement']:.4%}. Nothing was written; please report this.")


def _heal(model: nn.Module, *, dense: nn.Module, data: TextData, recipe: BuildRecipe) -> list[dict[str, float]]:
    heal = recipe.heal
    quiet_lightning()
    L.seed_everything(recipe.seed, verbose=False)
    module = HealModule(heal, student=model, dense=dense)
    trainer = L.Trainer(
        accelerator=heal.accelerator, devices=1, precision=heal.precision, max_steps=heal.max_steps, max_epochs=1,
        accumulate_grad_batches=heal.accumulate_grad_batches, gradient_clip_val=heal.optim.max_grad_norm, logger=False, enable_checkpointing=False,
        enable_model_summary=False, enable_progress_bar=False, use_distributed_sampler=False, limit_val_batches=0, num_sanity_val_steps=0)
    trainer.fit(module, datamodule=data)
    if trainer.global_step != heal.max_steps:
        raise RuntimeError(f"train build-moe: healing stopped at step {trainer.global_step} of {heal.max_steps}. Start it again; nothing was written.")
    return module.curve


def _write(folder: Path, *, model: nn.Module, tokenizer: Any, record: dict[str, Any]) -> None:
    model.to(torch.bfloat16).save_pretrained(folder)  # type: ignore[operator]
    tokenizer.save_pretrained(folder)
    for file in folder.glob("*.safetensors"):
        share(file)
    write_atomically(folder / RECORD, text=json.dumps(record, indent=2) + "\n")


def _table(record: dict[str, Any]) -> str:
    """Perplexity and KL by stage and domain, and the spread of the expert load."""
    stages = record["stages"]
    lines = [f"{'held-out':<10} {'tokens':>7} {'dense':>8} " + " ".join(f"{s:>8} {'KL':>8}" for s in stages)]
    for domain, first in stages["built"]["quality"].items():
        cells = [f"{s['quality'][domain]['perplexity']:>8.3f} {s['quality'][domain]['kl']:>8.5f}" for s in stages.values()]
        lines.append(f"{domain:<10} {first['tokens']:>7} {first['parent_perplexity']:>8.3f} {' '.join(cells)}")
    for name, stage in stages.items():
        shares = [n for layer in stage["expert_load"] for n in layer]
        lines.append(f"{name}: an expert takes {min(shares):.3f} to {max(shares):.3f} of its layer's choices, {1 / len(stage['expert_load'][0]):.3f} if all "
                     f"were alike; {stage['whole_replica_share']:.4%} of the choices are one whole replica")
    return "\n".join(lines)
