"""Exports beyond MXFP4 experts: our reader gives the values of training for each, and it is said what transformers does with them.

transformers 5.24.0 with compressed-tensors 0.20.1 reads attention, router and shared experts exactly. Experts in more than one format
it cannot read: it refuses most of them, and one kind it loads with random weights and a warning (`MISREAD`). Those exports are for
engines that look every projection up by its name, and for our reader.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import finished_run
from exports import IDS, differing
from families import FAMILIES, save_family
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, Mxfp4Config

from kilotok.quant.archs import load_config, load_model
from kilotok.quant.checkpoint import PackedCheckpoint, export_run, inspect_directory, load_exported_model, read_exported_experts
from kilotok.quant.experts import attach_fake_quant
from kilotok.quant.formats import find_format
from kilotok.quant.plan import PlanOptions, QuantPlan, make_plan
from kilotok.runtime.cli import main as kilotok

pytestmark = pytest.mark.xdist_group("export_formats")   # each export is made once and read by several tests
WIDE = {"hidden_size": 256, "head_dim": 64}   # more than one FP8 tile
MOE = {"mlp_only_layers": []}
DEQUANTIZE = {"quantization_config": CompressedTensorsConfig(dequantize=True)}

# name -> family, changes of its config, options, formats of the config's groups in order
EXACT: dict[str, tuple[str, dict[str, Any], dict[str, Any], list[str]]] = {
    "attention_mxfp8": ("qwen3_moe", MOE, {"attention": "mxfp8"}, ["mxfp4-pack-quantized", "mxfp8-quantized"]),
    "attention_fp8": ("qwen3_moe", MOE, {"attention": "fp8_block"}, ["mxfp4-pack-quantized", "float-quantized"]),
    "attention_fp8_wide": ("qwen3_moe", {**MOE, **WIDE}, {"attention": "fp8_block"}, ["mxfp4-pack-quantized", "float-quantized"]),
    "router": ("qwen3_moe", MOE, {"router": "mxfp8"}, ["mxfp4-pack-quantized"]),
    "shared": ("qwen2_moe", {}, {"shared_experts": True}, ["mxfp4-pack-quantized"]),
    "all_three": ("qwen2_moe", {}, {"shared_experts": True, "attention": "mxfp8", "router": "mxfp8"}, ["mxfp4-pack-quantized", "mxfp8-quantized"]),
    "latent_attention": ("deepseek_v3", {}, {"attention": "mxfp8"}, ["mxfp4-pack-quantized", "mxfp8-quantized"]),
    "renamed": ("mixtral", {}, {"attention": "fp8_block", "router": "mxfp8"}, ["mxfp4-pack-quantized", "float-quantized"]),
}
REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], list[str]]] = {
    "layer_bf16": ("qwen3_moe", MOE, {"keep": ["model.layers.1.*"]}, ["mxfp4-pack-quantized"]),
    "first_layer_bf16": ("qwen3_moe", MOE, {"keep": ["model.layers.0.*"]}, ["mxfp4-pack-quantized"]),
    "layer_mxfp8": ("qwen3_moe", MOE, {"keep": ["model.layers.1.*"], "keep_format": "mxfp8"}, ["mxfp4-pack-quantized", "mxfp8-quantized"]),
    "first_layer_mxfp8": ("qwen3_moe", MOE, {"keep": ["model.layers.0.*"], "keep_format": "mxfp8"}, ["mxfp8-quantized", "mxfp4-pack-quantized"]),
    "gate_up_alone": ("qwen3_moe", MOE, {"keep": ["model.layers.1.*.gate_up_proj"]}, ["mxfp4-pack-quantized"]),
    "with_attention": ("qwen3_moe", MOE, {"keep": ["model.layers.0.*"], "attention": "mxfp8"}, ["mxfp4-pack-quantized", "mxfp8-quantized"]),
    "with_shared": ("qwen2_moe", {}, {"shared_experts": True, "keep": ["model.layers.1.*"]}, ["mxfp4-pack-quantized"]),
}
MISREAD: dict[str, tuple[str, dict[str, Any], dict[str, Any], list[str]]] = {
    "down_alone": ("qwen3_moe", MOE, {"keep": ["model.layers.1.*.down_proj"]}, ["mxfp4-pack-quantized"]),
    "down_alone_mxfp8": ("qwen3_moe", MOE, {"keep": ["model.layers.1.*.down_proj"], "keep_format": "mxfp8"}, ["mxfp4-pack-quantized", "mxfp8-quantized"]),
    "every_down": ("qwen3_moe", MOE, {"keep": ["*.down_proj"]}, ["mxfp4-pack-quantized"]),
    "renamed_down_alone": ("mixtral", {}, {"keep": ["*.1.*.down_proj"]}, ["mxfp4-pack-quantized"]),
}
ALL = {**EXACT, **REFUSED, **MISREAD}


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A family exported with some options, in root / out; read only, as several tests have it."""

    root: Path
    plan: QuantPlan
    values: dict[str, Tensor]    # those training computed with, by in-memory name
    masters: dict[str, Tensor]


Export = Callable[[str, dict[str, Any], dict[str, Any]], Exported]


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Export:
    """Of a family, with changes of its config and options."""
    made: dict[str, Exported] = {}

    def get(name: str, changes: dict[str, Any], options: dict[str, Any]) -> Exported:
        key = repr((name, changes, options))
        if key not in made:
            made[key] = make_export(tmp_path_factory.mktemp("export"), name, changes, options)
        return made[key]
    return get


def make_export(root: Path, name: str, changes: dict[str, Any], options: dict[str, Any]) -> Exported:
    parent = save_family(root / "parent", name, **changes)
    trained = finished_run(root / "run", parent, move=0.02, quant=options)
    export_run(root / "run", root / "out")
    plan = make_plan(load_config(parent), scale_mode="even", where="test", options=PlanOptions.from_json(options))
    masters = {n: p.detach() for n, p in load_model(parent, dtype=torch.float32).named_parameters()} | trained
    values = dict(masters)
    for w in plan.weights:
        values[w.name] = find_format(w.format).fake_quant(masters[w.name], name=w.name, scale_mode="even", dim=w.dim, dtype=torch.float32, faults=None)
    return Exported(root=root, plan=plan, values=values, masters=masters)


@pytest.mark.parametrize(("name", "changes", "options", "groups"), ALL.values(), ids=ALL)
def test_our_reader_gives_the_values_of_training(name: str, changes: dict[str, Any], options: dict[str, Any], groups: list[str], export: Export) -> None:
    e = export(name, changes, options)
    plan, values, masters = e.plan, e.values, e.masters
    formats = {w.name: w.format for w in plan.weights}
    assert len(set(formats.values())) > 1 or name == "qwen2_moe"
    assert all(not torch.equal(values[n], masters[n]) for n in formats)
    model = load_exported_model(e.root / "out", dtype=torch.float32)
    assert differing(model, values) == []

    ours = load_model(e.root / "parent", dtype=torch.float32)
    ours.load_state_dict(masters, strict=False)
    attach_fake_quant(ours, plan=plan)
    with torch.no_grad():
        assert torch.equal(model(IDS, use_cache=False).logits, ours(IDS, use_cache=False).logits)

    config = json.loads((e.root / "out" / "config.json").read_text())["quantization_config"]
    assert [g["format"] for g in config["config_groups"].values()] == groups
    assert config["format"] == (groups[0] if len(groups) == 1 else "mixed-precision")
    assert set(read_exported_experts(e.root / "out", arch=plan.arch)) == {w.name for w in plan.experts if w.format == "mxfp4"}


@pytest.mark.parametrize(("name", "changes", "options", "groups"), ALL.values(), ids=ALL)
def test_files_have_the_bytes_of_the_plan_and_kept_tensors_the_parent_s(
        name: str, changes: dict[str, Any], options: dict[str, Any], groups: list[str], export: Export) -> None:
    e = export(name, changes, options)
    plan = e.plan
    before, after = load_file(e.root / "parent" / "model.safetensors"), load_file(e.root / "out" / "model.safetensors")
    buffers = sum(t.numel() * t.element_size() for n, t in before.items() if n.endswith("e_score_correction_bias"))   # in the files, no parameters
    assert sum(t.numel() * t.element_size() for t in after.values()) - buffers == plan.bytes_after
    packed = {m.stem: m.format for m in PackedCheckpoint(e.root / "out", arch=plan.arch).modules.values()}
    assert set(packed.values()) == {w.format for w in plan.weights if w.role != "router"} - {"bf16"}
    planned = {w.name for w in plan.weights}
    for n, tensor in before.items():
        if plan.arch.expert_slice(n) is None and n not in planned and plan.arch.memory_module(n) not in planned:
            assert after[n].dtype == tensor.dtype and torch.equal(after[n].view(torch.uint8), tensor.view(torch.uint8)), n
    report = inspect_directory(e.root / "out")
    assert ("mxfp8 weights" in report) == ("mxfp8" in packed.values()) and ("fp8_block weights" in report) == ("fp8_block" in packed.values())


@pytest.mark.parametrize(("name", "changes", "options", "groups"), EXACT.values(), ids=EXACT)
def test_transformers_reads_exactly_the_values_of_training(
        name: str, changes: dict[str, Any], options: dict[str, Any], groups: list[str], export: Export) -> None:
    """In bf16: compressed-tensors decompresses to bf16 for MX formats whatever is asked for, and does not round FP8 tiles when asked for fp32."""
    e = export(name, changes, options)
    model, report = AutoModelForCausalLM.from_pretrained(e.root / "out", dtype=torch.bfloat16, output_loading_info=True)
    with torch.no_grad():
        theirs = model(IDS, use_cache=False).logits   # compressed weights are decompressed by the first forward
    assert differing(model, e.values) == [] and not report["missing_keys"] and not report["unexpected_keys"]
    with torch.no_grad():
        assert torch.equal(theirs, load_exported_model(e.root / "out", dtype=torch.bfloat16)(IDS, use_cache=False).logits)


@pytest.mark.parametrize("case", ["attention_mxfp8", "attention_fp8_wide", "router", "shared", "latent_attention"])
def test_transformers_dequantizes_to_the_values_of_training_in_fp32(case: str, export: Export) -> None:
    name, changes, options, _ = EXACT[case]
    e = export(name, changes, options)
    model = AutoModelForCausalLM.from_pretrained(e.root / "out", dtype=torch.float32, **DEQUANTIZE)
    assert differing(model, e.values) == []


def test_transformers_cannot_dequantize_shared_experts_beside_another_format(export: Export) -> None:
    """Its `dequantize=True` takes one format for all dense layers; without it, it reads them exactly (above)."""
    name, changes, options, _ = EXACT["all_three"]
    e = export(name, changes, options)
    with pytest.raises(RuntimeError, match="conversion of the weights"):
        AutoModelForCausalLM.from_pretrained(e.root / "out", dtype=torch.bfloat16, **DEQUANTIZE)


@pytest.mark.parametrize(("name", "changes", "options", "groups"), REFUSED.values(), ids=REFUSED)
def test_transformers_refuses_layers_of_experts_in_another_format(
        name: str, changes: dict[str, Any], options: dict[str, Any], groups: list[str], export: Export) -> None:
    e = export(name, changes, options)
    for how in ({}, DEQUANTIZE):
        with pytest.raises(RuntimeError, match="conversion of the weights"):
            AutoModelForCausalLM.from_pretrained(e.root / "out", dtype=torch.bfloat16, **how)


@pytest.mark.parametrize(("name", "changes", "options", "groups"), MISREAD.values(), ids=MISREAD)
def test_transformers_loads_random_weights_where_only_down_proj_is_kept(
        name: str, changes: dict[str, Any], options: dict[str, Any], groups: list[str], export: Export) -> None:
    """Known harm, written down so that a change of it is noticed: it only warns that they are missing."""
    e = export(name, changes, options)
    model, report = AutoModelForCausalLM.from_pretrained(e.root / "out", dtype=torch.bfloat16, output_loading_info=True)
    kept = {w.name for w in e.plan.experts if w.format != "mxfp4"}
    assert set(report["missing_keys"]) == kept == set(differing(model, e.values))


@pytest.mark.parametrize("options", [{"keep": ["model.layers.1.*"]}, {"router": "mxfp8"}, {"keep": ["model.layers.0.*"], "router": "mxfp8"}], ids=str)
def test_gpt_oss_keeps_whole_layers(options: dict[str, Any], export: Export) -> None:
    e = export("gpt_oss", {}, options)
    assert differing(load_exported_model(e.root / "out", dtype=torch.float32), e.values) == []
    theirs = AutoModelForCausalLM.from_pretrained(e.root / "out", dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True))
    assert differing(theirs, e.values) == []
    config = json.loads((e.root / "out" / "config.json").read_text())["quantization_config"]
    assert [m for m in config["modules_to_not_convert"] if m.endswith(".experts")] == sorted({w.module for w in e.plan.experts if w.format == "bf16"})


@pytest.mark.parametrize("name", [n for n in FAMILIES if n != "gpt_oss"])
@pytest.mark.parametrize("fmt", ["mxfp8", "fp8_block"])
def test_attention_and_router_of_every_family_read_back(name: str, fmt: str, export: Export) -> None:
    e = export(name, {}, {"attention": fmt, "router": "mxfp8"})
    plan, values, masters = e.plan, e.values, e.masters
    assert any(w.role == "attention" for w in plan.weights) and any(w.role == "router" for w in plan.weights)
    assert differing(load_exported_model(e.root / "out", dtype=torch.float32), values) == []
    assert all(not torch.equal(values[w.name], masters[w.name]) for w in plan.weights)


@pytest.mark.parametrize(("keep", "said"), [([], None), (["model.layers.0.*"], "keep their experts at higher precision"), (["*.0.*down_proj"], "WRONG")])
def test_the_export_says_who_cannot_read_it(keep: list[str], said: str | None, tmp_path: Path, tiny_moe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finished_run(tmp_path / "run", tiny_moe, quant={"keep": keep})
    assert kilotok(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    warned = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert len(warned) == (said is not None) and all(said in line for line in warned if said is not None)


def test_transformers_makes_linear_layers_of_llama_4_experts_and_reads_them(tmp_path: Path) -> None:
    parent = save_family(tmp_path / "parent", "llama4_text")
    finished_run(tmp_path / "run", parent, move=0.02)
    assert export_run(tmp_path / "run", tmp_path / "out").warnings == ()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16).eval()
    ours = load_exported_model(tmp_path / "out", dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(theirs(IDS, use_cache=False).logits, ours(IDS, use_cache=False).logits)


def test_the_export_says_which_family_transformers_misreads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, said in (("granitemoe", "RANDOM"), ("kimi_linear", "refuses it")):
        parent = save_family(tmp_path / name, name)
        finished_run(tmp_path / f"{name}-run", parent)
        assert kilotok(["export", str(tmp_path / f"{name}-run"), str(tmp_path / f"{name}-out")]) == 0
        assert "warning: transformers 5.24" in (printed := capsys.readouterr().out) and said in printed
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path / "granitemoe-out", output_loading_info=True)
    assert any("experts" in n for n in report["missing_keys"])   # what it fills with random values
    with pytest.raises(RuntimeError, match="conversion"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "kimi_linear-out")
