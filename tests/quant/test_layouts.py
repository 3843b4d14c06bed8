"""Layouts: the same numbers in every one of them, byte for byte there and back, and each family where it may be."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import finished_run
from exports import IDS, differing, exported, files_of, require_engine_names
from families import FAMILIES, family_config, save_family
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config

from kilotok.quant.archs import find_arch, load_config, load_model
from kilotok.quant.checkpoint import PackedCheckpoint, convert_directory, export_run, inspect_directory, load_exported_model, read_exported_experts
from kilotok.quant.checkpoint.export import ExportOptions
from kilotok.quant.checkpoint.layouts import LAYOUTS, find_layout
from kilotok.quant.checkpoint.reader import DTYPE_NAMES
from kilotok.quant.formats import Packed, find_format
from kilotok.runtime.cli import main as kilotok

MIMO = [name for name in FAMILIES if name not in ("gpt_oss", "granitemoe", "llama4_text")]
EXPORTS = [(name, "compressed-tensors") for name in FAMILIES] + [(name, "mimo") for name in MIMO] + [("gpt_oss", "gpt-oss")]
WIDE = {"hidden_size": 256, "head_dim": 64}   # more than one FP8 tile


def packed_like(fmt: str, rows: int, columns: int, *, experts: int | None = None) -> Packed:
    generator = torch.Generator().manual_seed(rows + columns)
    w = torch.randn(*(() if experts is None else (experts,)), rows, columns, generator=generator)
    return find_format(fmt).encode(w, name="w", scale_mode="even")


@pytest.mark.parametrize(("layout", "fmt"), [
    pytest.param(layout, fmt, id=f"{layout.name}-{fmt}") for layout in LAYOUTS if layout.can_write for fmt in ("mxfp4", "fp8_block")
    if fmt == "mxfp4" or not layout.is_fused])   # a fused layout holds MXFP4 alone
@pytest.mark.parametrize("shape", [(1, 32), (96, 64), (130, 160)], ids=str)
def test_a_weight_comes_back_from_the_bytes_its_layout_describes(layout: Any, fmt: str, shape: tuple[int, int]) -> None:
    packed = packed_like(fmt, *shape, experts=3 if layout.is_fused else None)
    whole = (3, *shape) if layout.is_fused else shape
    tensors = layout.to_disk(packed)
    assert [(DTYPE_NAMES[t.dtype], tuple(t.shape)) for t in tensors] == list(layout.specs(fmt, whole, scales=packed.scales.dtype))
    back = layout.from_disk(fmt, *tensors, name="w")
    assert torch.equal(back.elements.view(torch.uint8), packed.elements.view(torch.uint8)) and torch.equal(back.scales, packed.scales)
    assert back.scales.dtype == packed.scales.dtype


@pytest.mark.parametrize(("name", "layout"), EXPORTS, ids=lambda x: x)
def test_every_layout_holds_the_values_of_training_and_converts_there_and_back_to_the_same_bytes(name: str, layout: str, tmp_path: Path) -> None:
    out, values = exported(tmp_path, name, layout)
    assert PackedCheckpoint(out, arch=find_arch(load_config(out).model_type, where="test")).layout is find_layout(layout)
    assert differing(load_exported_model(out, dtype=torch.float32), values) == []
    require_engine_names(out, name=name, layout=layout)
    other = "compressed-tensors" if layout != "compressed-tensors" else "gpt-oss" if name == "gpt_oss" else "mimo"
    if name not in (*MIMO, "gpt_oss"):
        with pytest.raises(ValueError, match="it keeps experts one by one"):
            convert_directory(out, tmp_path / "there", layout=other)
        return
    convert_directory(out, tmp_path / "there", layout=other)
    assert differing(load_exported_model(tmp_path / "there", dtype=torch.float32), values) == []
    convert_directory(tmp_path / "there", tmp_path / "back", layout=layout)
    assert files_of(tmp_path / "back") == files_of(out)


@pytest.mark.parametrize(("layout", "quant"), [
    ("mimo", {"attention": "fp8_block"}), ("mimo", {"keep": ["model.layers.1.*"]}), ("compressed-tensors", {"attention": "fp8_block", "router": "mxfp8"}),
], ids=str)
def test_fp8_attention_and_kept_layers_go_there_and_back(layout: str, quant: dict[str, Any], tmp_path: Path) -> None:
    out, values = exported(tmp_path, "qwen3_moe", layout, quant=quant, mlp_only_layers=[], **WIDE)
    assert differing(load_exported_model(out, dtype=torch.float32), values) == []
    other = "compressed-tensors" if layout == "mimo" else "mimo"
    convert_directory(out, tmp_path / "there", layout=other)
    assert differing(load_exported_model(tmp_path / "there", dtype=torch.float32), values) == []
    convert_directory(tmp_path / "there", tmp_path / "back", layout=layout)
    assert files_of(tmp_path / "back") == files_of(out)


def test_a_converted_export_is_the_export_in_that_layout(tmp_path: Path) -> None:
    """Weight files and config.json, byte for byte: a conversion adds nothing of its own."""
    out, _ = exported(tmp_path, "qwen3_moe", "compressed-tensors", quant={"attention": "fp8_block"}, **WIDE)
    export_run(tmp_path / "run", tmp_path / "direct", options=ExportOptions(layout="mimo"))
    convert_directory(out, tmp_path / "converted", layout="mimo")
    assert files_of(tmp_path / "converted") == files_of(tmp_path / "direct")


def test_mimo_names_its_experts_and_every_linear_layer_that_is_not_fp8(tmp_path: Path) -> None:
    out, _ = exported(tmp_path, "qwen3_moe", "mimo", quant={"attention": "fp8_block"}, **WIDE)
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["store_dtype"], config["weight_block_size"]) == ("fp8", "mxfp4", [128, 128])
    state = load_file(out / "model.safetensors")
    expert = "model.layers.1.mlp.experts.3.up_proj"
    assert state[f"{expert}.weight"].dtype == torch.uint8 and state[f"{expert}.weight"].shape == (32, 128)
    assert state[f"{expert}.weight_scale"].dtype == torch.uint8 and state[f"{expert}.weight_scale"].shape == (32, 8)
    query = "model.layers.0.self_attn.q_proj"
    assert state[f"{query}.weight"].dtype == torch.float8_e4m3fn and state[f"{query}.weight_scale_inv"].dtype == torch.float32
    assert state[f"{query}.weight_scale_inv"].shape == (2, 2) and f"{query}.weight_scale" not in state
    ignored = set(config["ignored_layers"])
    # layer 0 is dense: engines fuse its gate and up projection and ask by that name
    assert {"lm_head", "model.layers.1.mlp.gate", "model.layers.0.mlp.gate_up_proj", "model.layers.0.mlp.down_proj"} <= ignored
    assert not any(".self_attn." in name or ".experts." in name for name in ignored)


@pytest.mark.parametrize(("layout", "name", "quant", "said"), [
    ("gpt-oss", "qwen3_moe", {}, "readers take it for gpt-oss alone"), ("mimo", "gpt_oss", {}, "keeps experts one by one"),
    ("mimo", "qwen2_moe", {"shared_experts": True}, "is mxfp4"), ("mimo", "qwen2_moe", {"attention": "mxfp8"}, "is mxfp8"),
    ("mimo", "qwen2_moe", {"keep": ["*.1.*down_proj"]}, "as a whole")], ids=str)
def test_a_layout_that_cannot_hold_a_run_says_why(
        layout: str, name: str, quant: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parent = save_family(tmp_path / "parent", name)
    finished_run(tmp_path / "run", parent, quant=quant)
    assert kilotok(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--layout", layout]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


def test_transformers_reads_a_converted_directory(tmp_path: Path) -> None:
    """The mimo export of a Qwen3-MoE by way of compressed-tensors, and a gpt-oss one that was split and put together: the logits are ours."""
    for name, layout, native in (("qwen3_moe", "mimo", "compressed-tensors"), ("gpt_oss", "compressed-tensors", "gpt-oss")):
        folder = tmp_path / name
        out, values = exported(folder, name, layout)
        convert_directory(out, folder / "native", layout=native)
        how = {"quantization_config": Mxfp4Config(dequantize=True)} if native == "gpt-oss" else {}
        theirs = AutoModelForCausalLM.from_pretrained(folder / "native", dtype=torch.bfloat16, **how).eval()
        ours = load_exported_model(out, dtype=torch.bfloat16)
        with torch.no_grad():
            assert torch.equal(theirs(IDS, use_cache=False).logits, ours(IDS, use_cache=False).logits)
        assert differing(theirs, values) == []


# --- values again, to train on ---


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss", "llama4_text", "granitemoe"])
def test_dense_is_an_unquantized_checkpoint_that_can_be_trained(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, values = exported(tmp_path, name, "gpt-oss" if name == "gpt_oss" else "compressed-tensors")
    assert kilotok(["convert", str(out), str(tmp_path / "dense"), "--layout", "dense"]) == 0
    assert differing(load_model(tmp_path / "dense", dtype=torch.float32), values) == []
    parent, dense = load_file(tmp_path / "parent" / "model.safetensors"), load_file(tmp_path / "dense" / "model.safetensors")
    assert {n: (t.dtype, t.shape) for n, t in dense.items()} == {n: (t.dtype, t.shape) for n, t in parent.items()}
    trained = finished_run(tmp_path / "again", tmp_path / "dense")   # not moved: its weights are their own rounding
    export_run(tmp_path / "again", tmp_path / "second")
    arch = find_arch(load_config(out).model_type, where="test")
    for fused, tensor in read_exported_experts(tmp_path / "second", arch=arch).items():
        assert torch.equal(arch.canonical(tensor.dequantize()), trained[fused].to(torch.bfloat16)), fused


@pytest.mark.parametrize(("scale", "said"), [(150, "overflows"), (100, "vanish or lose bits")])
def test_float16_that_cannot_hold_the_values_is_refused(scale: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = exported(tmp_path, "qwen3_moe", "compressed-tensors")
    assert kilotok(["convert", str(out), str(tmp_path / "half"), "--layout", "dense", "--dtype", "float16"]) == 2   # bf16 embeddings lose bits
    capsys.readouterr()
    assert not (tmp_path / "half").exists() and not list(tmp_path.glob(".half*"))
    assert kilotok(["convert", str(out), str(tmp_path / "half"), "--layout", "dense", "--dtype", "bfloat16"]) == 0   # a second run completes
    state = load_file(out / "model.safetensors")
    state["model.layers.1.mlp.experts.2.down_proj.weight_scale"].fill_(scale)
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"experts\.2\.down_proj: float16 cannot hold its values .*{said}.*Use bfloat16 or float32"):
        load_exported_model(out, dtype=torch.float16)


# --- DeepSeek-V4's own layout ---


def as_deepseek_v4(parent: Path, out: Path, *, released_names: bool) -> dict[str, torch.Tensor]:
    """`parent` as DeepSeek-V4 is released: packed int8 experts with E8M0 scales, attention and shared experts in FP8 tiles. Returns the values."""
    out.mkdir()
    config = json.loads((parent / "config.json").read_text())
    config |= {"expert_dtype": "fp4", "quantization_config": {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}}
    (out / "config.json").write_text(json.dumps(config))
    state, values = {}, {}
    for name, w in load_file(parent / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        values[name] = w
        if ".experts." in name and "shared" not in name:
            packed = find_format("mxfp4").encode(w, name=name, scale_mode="rceil")
            state[f"{stem}.weight"], state[f"{stem}.scale"] = packed.elements.view(torch.int8), packed.scales.view(torch.float8_e8m0fnu)
            values[name] = find_format("mxfp4").decode(packed)
        elif name.endswith((".wq_a.weight", ".wkv.weight", ".w1.weight", ".w2.weight", ".w3.weight")) and "compressor" not in name:
            scale = torch.full((1, 1), 2.0**-9)
            elements = (w.float() / scale).to(torch.float8_e4m3fn)
            state[f"{stem}.weight"], state[f"{stem}.scale"] = elements, scale.to(torch.float8_e8m0fnu)
            values[name] = (elements.float() * scale).to(torch.bfloat16)
        else:
            state[name] = w
    if released_names:
        state = {n.removeprefix("model.").replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_"): w for n, w in state.items()}
        state["mtp.0.ffn.experts.0.w1.weight"] = torch.zeros(32, 32, dtype=torch.int8)   # a layer that no reader of ours builds
        state["mtp.0.ffn.experts.0.w1.scale"] = torch.zeros(32, 2, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    return values


@pytest.mark.parametrize("released_names", [False, True])
def test_deepseek_v4_is_read_and_converted(released_names: bool, tmp_path: Path) -> None:
    parent = save_family(tmp_path / "parent", "deepseek_v4")
    values = as_deepseek_v4(parent, tmp_path / "v4", released_names=released_names)
    save_file(values, parent / "model.safetensors", metadata={"format": "pt"})
    expected = load_model(parent, dtype=torch.float32).state_dict()
    found = load_exported_model(tmp_path / "v4", dtype=torch.float32).state_dict()
    assert [n for n, w in expected.items() if not torch.equal(found[n], w)] == []
    arch = find_arch("deepseek_v4", where="test")
    experts = read_exported_experts(tmp_path / "v4", arch=arch)
    assert set(experts) >= {f"model.layers.{i}.mlp.experts.{p}" for i in (0, 1) for p in ("gate_up_proj", "down_proj")}
    assert torch.equal(experts["model.layers.1.mlp.experts.down_proj"].dequantize().float(), expected["model.layers.1.mlp.experts.down_proj"])
    assert "deepseek-v4" in inspect_directory(tmp_path / "v4")
    for layout in ("mimo", "dense"):
        convert_directory(tmp_path / "v4", tmp_path / layout, layout=layout)
        again = (load_model if layout == "dense" else load_exported_model)(tmp_path / layout, dtype=torch.float32).state_dict()
        assert [n for n, w in expected.items() if not torch.equal(again[n], w)] == []


def test_every_family_has_a_layout_by_default() -> None:
    for name in FAMILIES:
        assert find_layout(find_arch(family_config(name).model_type, where="test").layout).can_write
