"""Small models and recipes that the tests share."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from saved import saved_once
from torch import nn
from torch.nn.attention import flex_attention
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from kilotok.kernels.attention import draft_blocks
from kilotok.quant.archs import load_config, load_model
from kilotok.quant.checkpoint import export_run, sha256_of_weights
from kilotok.quant.plan import PlanOptions, make_plan

# The models here are too small for threads to pay, and two test processes on two cores must not fight over them.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).parents[1]
POCKET = ROOT / "recipes" / "pocket" / "model"


@pytest.fixture(scope="session")
def pocket() -> Path:
    return POCKET


def save_tiny_moe(directory: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """A random Qwen3-MoE of two layers with the pocket's tokenizer, in bf16, saved by transformers."""
    shape = {"hidden_size": 64, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4,
             "num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 64, "max_position_embeddings": 512,
             "vocab_size": 4096, "initializer_range": 0.15,
             "norm_topk_prob": True, "tie_word_embeddings": True, "pad_token_id": 0, "eos_token_id": 2, "bos_token_id": None}

    def save(first: Path) -> None:
        torch.manual_seed(seed)
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**shape, **overrides})).to(torch.bfloat16).save_pretrained(first)
        AutoTokenizer.from_pretrained(POCKET).save_pretrained(first)

    return saved_once(directory, ("tiny", seed, overrides), save=save)


def finished_run(
    directory: Path, parent: Path, *, scale_mode: str = "even", step: int = 1, max_steps: int = 1, move: float = 0.0, seed: int = 0,
    quant: dict[str, Any] | None = None,
) -> dict[str, torch.Tensor]:
    """A QAT run, as the export reads it, whose trained experts are the parent's, moved by noise; returns them (fp32 masters).

    quant: further options of the plan, as the run's record holds them.
    """
    generator = torch.Generator().manual_seed(seed)
    model = load_model(parent, dtype=torch.float32)
    plan = make_plan(load_config(parent), scale_mode="even", where=str(parent), options=PlanOptions.from_json(quant or {}))
    experts = [e.name for e in plan.experts]
    trained = {n: w.detach() + move * torch.randn(w.shape, generator=generator) for n, w in ((n, model.get_parameter(n)) for n in experts)}
    (directory / "checkpoints").mkdir(parents=True)
    others = {w.name: model.get_parameter(w.name).detach() for w in plan.weights if w.role != "experts"}   # planned, and where the parent left them
    torch.save({"state_dict": {f"student.{n}": w for n, w in {**trained, **others}.items()}}, directory / "checkpoints" / f"step-{step:08d}.ckpt")
    meta = {"kind": "qat", "status": "complete", "max_steps": max_steps, "parent": {"path": str(parent), "sha256": sha256_of_weights(parent)},
            "quant": {"format": "mxfp4", "scale_mode": scale_mode, "source_dtype": "bfloat16", "trainable": "experts", **(quant or {})}, "versions": {}}
    (directory / "meta.json").write_text(json.dumps(meta))
    return trained


def export_experts(parent: Path, out: Path, **how: Any) -> Path:
    """`out`, an export of `parent` by way of a finished run (how: as `finished_run`)."""
    run = out.with_name(f"{out.name}-run")
    finished_run(run, parent, **how)
    export_run(run, out)
    return out


@pytest.fixture
def tiny_moe(tmp_path: Path) -> Path:
    return save_tiny_moe(tmp_path / "tiny")


@pytest.fixture
def make_tiny_moe(tmp_path: Path) -> Callable[..., Path]:
    """Build one with other numbers: make_tiny_moe("name", moe_intermediate_size=48)."""
    return lambda name, **overrides: save_tiny_moe(tmp_path / name, **overrides)


@pytest.fixture
def tiny_recipe(tmp_path: Path, tiny_moe: Path) -> Path:
    """A QAT recipe that trains the tiny model for six steps in a second or two."""
    text = tmp_path / "text.jsonl"
    function = "def add_{i}(a, b):\n    return a + b + {i}\n\n\nclass Stack{i}:\n    def push(self, item):\n        self.items.append(item)\n"
    rows = [{"text": function.format(i=i)} for i in range(40)]
    text.write_text("".join(json.dumps(r) + "\n" for r in rows))
    recipe = {
        "model": str(tiny_moe), "run": str(tmp_path / "run"), "optim": {"lr": 1e-3, "warmup_steps": 1},
        "data": {"sequence_length": 32, "heldout_rows": 4, "train": [{"domain": "code", "path": str(text), "text": "text"}],
                 "heldout": [{"domain": "code", "path": str(text), "text": "text"}]},
        "trainer": {"max_steps": 6, "batch_size": 2, "accelerator": "cpu", "checkpoint_every_steps": 2, "log_every_steps": 1}}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def exact_moe(directory: Path) -> nn.Module:
    """`save_tiny_moe` in float64, where a step of eight tokens and eight steps of one differ too little to change a pick."""
    model = load_model(save_tiny_moe(directory), dtype=torch.float32)
    model.set_experts_implementation("eager")   # type: ignore[operator]  # grouped_mm has no float64
    return model.double()


@pytest.fixture
def flex_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention in plain operations; torch refuses its backward on a CPU by a check alone."""
    monkeypatch.setattr(draft_blocks, "_flex", lambda: draft_blocks._flex_attention)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
