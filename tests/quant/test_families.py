"""Every family from discovery to export: the right tensors, the right axis, the values of training on disk, everything else untouched."""

import json
from pathlib import Path

import pytest
import torch
from cases import MODES, ScaleMode
from conftest import finished_run
from families import FAMILIES, family_config, family_model, save_family
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config

from kilotok.quant.archs import find_arch, load_config, load_model
from kilotok.quant.checkpoint import CheckpointReader, export_run, load_exported_model, read_exported_experts, require_fitting_parent
from kilotok.quant.experts import attach_fake_quant
from kilotok.quant.plan import PlanOptions, make_plan
from kilotok.quant.tensor import fake_quant_weight

IDS = torch.randint(4, 4096, (2, 12), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_plan_takes_the_routed_experts_and_nothing_else(name: str) -> None:
    plan = make_plan(family_config(name), scale_mode="even", where="test")
    layers = {int(w.name.split(".")[2]) for w in plan.weights}
    assert layers == set(FAMILIES[name].layers) and len(plan.weights) == 2 * len(layers)
    assert all(w.role == "experts" and ".experts." in w.name and len(w.shape) == 3 and "shared" not in w.name for w in plan.weights)
    quantized = [r for r in plan.rows if r.treatment == "MXFP4"]
    assert sum(r.count for r in quantized) == len(plan.weights)
    assert {r.reason for r in plan.rows if ".gate.weight" in r.pattern or "router" in r.pattern} <= {"router"}


@pytest.mark.parametrize("name", ["gpt_oss", "llama4_text"])
def test_transposed_layouts_are_quantized_along_the_input(name: str) -> None:
    model = family_model(name)
    plan = make_plan(model.config, scale_mode="even", where="test")
    weight = plan.experts[0]
    assert weight.dim == -2 and weight.canonical_shape[-1] == 64   # hidden_size, the input of gate_up
    w = model.get_parameter(weight.name).detach()
    along_input = fake_quant_weight(w.mT.contiguous(), name="w", scale_mode="even").mT
    assert torch.equal(fake_quant_weight(w, name="w", scale_mode="even", dim=-2), along_input)
    assert not torch.equal(fake_quant_weight(w, name="w", scale_mode="even", dim=-1), along_input)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FAMILIES)
def test_export_holds_the_values_of_training(name: str, mode: ScaleMode, tmp_path: Path) -> None:
    parent = save_family(tmp_path / "parent", name)
    trained = finished_run(tmp_path / "run", parent, scale_mode=mode, move=0.02)
    result = export_run(tmp_path / "run", tmp_path / "out")
    before, after = load_file(parent / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    arch = find_arch(load_config(parent).model_type, where="test")
    untouched = [n for n in before if arch.expert_slice(n) is None]
    assert FAMILIES[name].router_on_disk in untouched and FAMILIES[name].expert_on_disk not in untouched
    for n in untouched:
        assert after[n].dtype == before[n].dtype and torch.equal(after[n].view(torch.uint8), before[n].view(torch.uint8)), n
    assert result.kept_tensors == len(untouched)

    model = load_exported_model(tmp_path / "out", dtype=torch.float32)
    ours = load_model(parent, dtype=torch.float32)
    state = dict(model.named_parameters())
    experts = read_exported_experts(tmp_path / "out", arch=arch)
    assert set(experts) == set(trained)
    with torch.no_grad():
        for n, w in trained.items():
            expected = fake_quant_weight(w, name=n, scale_mode=mode, dim=arch.axis)
            assert torch.equal(state[n], expected.float()), n
            assert torch.equal(arch.canonical(expected), experts[n].dequantize()), n
            ours.get_parameter(n).copy_(w)
        plan = make_plan(load_config(parent), scale_mode=mode, where="test")
        attached = attach_fake_quant(ours, plan=plan)
        got, expected_logits = model(IDS, use_cache=False).logits, ours(IDS, use_cache=False).logits
        assert torch.equal(got, expected_logits)
        attached.end_step()


@pytest.mark.parametrize("name", [n for n, f in FAMILIES.items() if f.transformers_reads])
def test_transformers_reads_the_same_values(name: str, tmp_path: Path) -> None:
    parent = save_family(tmp_path / "parent", name)
    trained = finished_run(tmp_path / "run", parent, move=0.02)
    export_run(tmp_path / "run", tmp_path / "out")
    arch = find_arch(load_config(parent).model_type, where="test")
    how = {"quantization_config": Mxfp4Config(dequantize=True)} if arch.layout == "gpt-oss" else {}
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16, **how).state_dict()
    for n, w in trained.items():
        assert torch.equal(theirs[n].float(), fake_quant_weight(w, name=n, scale_mode="even", dim=arch.axis).float()), n
    for n, w in load_model(parent, dtype=torch.bfloat16).named_parameters():
        if n not in trained:
            assert torch.equal(theirs[n].float(), w.float()), n


@pytest.mark.parametrize("name", FAMILIES)
def test_a_bf16_and_an_fp32_master_give_the_same_bytes(name: str, tmp_path: Path) -> None:
    """What is quantized is the master rounded to bf16, whatever it is kept in."""
    parent = save_family(tmp_path / "parent", name)
    trained = finished_run(tmp_path / "fp32", parent, move=0.02)
    finished_run(tmp_path / "bf16", parent, move=0.02)
    state = {f"student.{n}": w.to(torch.bfloat16) for n, w in trained.items()}
    torch.save({"state_dict": state}, tmp_path / "bf16" / "checkpoints" / "step-00000001.ckpt")
    for run in ("fp32", "bf16"):
        export_run(tmp_path / run, tmp_path / f"out-{run}")
    assert (tmp_path / "out-fp32" / "model.safetensors").read_bytes() == (tmp_path / "out-bf16" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_a_multi_token_prediction_layer_is_copied_and_not_packed(name: str, tmp_path: Path) -> None:
    parent = save_family(tmp_path / "parent", name, num_nextn_predict_layers=1)
    state = load_file(parent / "model.safetensors")
    mtp = {n.replace(".layers.1.", ".layers.2."): w.clone() for n, w in state.items() if ".layers.1." in n}
    save_file({**state, **mtp}, parent / "model.safetensors", metadata={"format": "pt"})
    finished_run(tmp_path / "run", parent, move=0.02)
    export_run(tmp_path / "run", tmp_path / "out")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert mtp and all(torch.equal(after[n], w) for n, w in mtp.items())
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert "model.layers.2.mlp.experts.0.gate_proj" in ignored and "model.layers.1.mlp.experts.0.gate_proj" not in ignored


@pytest.mark.parametrize("name", [n for n, f in FAMILIES.items() if f.shared])
def test_shared_experts_are_taken_only_when_asked_for(name: str, tmp_path: Path) -> None:
    plan = make_plan(family_config(name), scale_mode="even", where="test", options=PlanOptions(shared_experts=True))
    shared = [w.name for w in plan.weights if w.role == "shared_experts"]
    assert set(FAMILIES[name].shared) <= set(shared) and len(shared) == 3 * len(FAMILIES[name].layers)
    parent = save_family(tmp_path / "parent", name)
    finished_run(tmp_path / "run", parent, quant={"shared_experts": True})
    export_run(tmp_path / "run", tmp_path / "out")
    state = dict(load_exported_model(tmp_path / "out", dtype=torch.bfloat16).named_parameters())
    source = dict(load_model(parent, dtype=torch.bfloat16).named_parameters())
    for n in shared:
        assert torch.equal(state[n], fake_quant_weight(source[n], name=n, scale_mode="even")), n


@pytest.mark.parametrize("name", FAMILIES)
def test_a_parent_that_lacks_a_tensor_is_refused(name: str, tmp_path: Path) -> None:
    parent = save_family(tmp_path / "parent", name)
    state = load_file(parent / "model.safetensors")
    for gone in (FAMILIES[name].expert_on_disk, FAMILIES[name].router_on_disk, "model.norm.weight"):
        save_file({n: w for n, w in state.items() if n != gone}, parent / "model.safetensors", metadata={"format": "pt"})
        config = load_config(parent)
        with pytest.raises(ValueError, match="no tensor named"):
            require_fitting_parent(CheckpointReader(parent), config=config, plan=make_plan(config, scale_mode="even", where="test"))
