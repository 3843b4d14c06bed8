"""Parents and runs that would export other numbers than were trained, and are refused instead."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import finished_run, save_tiny_moe
from families import save_family
from safetensors.torch import load_file, save_file
from torch import Tensor

from kilotok.quant.archs import load_config, load_model
from kilotok.quant.checkpoint import CheckpointReader, export_run, require_fitting_parent, stored_dtypes
from kilotok.quant.checkpoint import reader as reader_module
from kilotok.quant.plan import make_plan


def checkpoint_of(run: Path) -> Path:
    (path,) = (run / "checkpoints").iterdir()
    return path


def rewrite(run: Path, change: Callable[[dict[str, Tensor]], None], *, trainable: str = "experts") -> None:
    path = checkpoint_of(run)
    state = torch.load(path)["state_dict"]
    change(state)
    torch.save({"state_dict": state}, path)
    meta = json.loads((run / "meta.json").read_text())
    meta["quant"]["trainable"] = trainable
    (run / "meta.json").write_text(json.dumps(meta))


def test_a_directory_with_two_sets_of_weights_is_refused(tiny_moe: Path) -> None:
    state = load_file(tiny_moe / "model.safetensors")
    save_file({n: w + 1 for n, w in state.items()}, tiny_moe / "model-00001-of-00001.safetensors", metadata={"format": "pt"})
    (tiny_moe / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(state, "model-00001-of-00001.safetensors")}))
    with pytest.raises(ValueError, match=r"holds both model\.safetensors and model\.safetensors\.index\.json"):
        CheckpointReader(tiny_moe)


def test_a_tied_head_of_its_own_is_refused(tiny_moe: Path) -> None:
    state = load_file(tiny_moe / "model.safetensors")
    config = load_config(tiny_moe)
    plan = make_plan(config, scale_mode="even", where="test")
    for head, refused in ((state["model.embed_tokens.weight"].clone(), False), (state["model.embed_tokens.weight"] * 2, True)):
        save_file({**state, "lm_head.weight": head}, tiny_moe / "model.safetensors", metadata={"format": "pt"})
        if refused:
            with pytest.raises(ValueError, match="ties the head to the embedding, but the files hold two different tensors"):
                require_fitting_parent(CheckpointReader(tiny_moe), config=config, plan=plan)
        else:
            require_fitting_parent(CheckpointReader(tiny_moe), config=config, plan=plan)


@pytest.mark.parametrize(("change", "trainable", "said"), [
    (lambda s: s.pop("student.model.layers.1.mlp.experts.down_proj"), "experts", "holds no model.layers.1.mlp.experts.down_proj"),
    (lambda s: None, "all", "holds no model.embed_tokens.weight"),
    (lambda s: s.update({"student.model.layers.7.mlp.experts.down_proj": torch.ones(4, 64, 32)}), "experts", "which .* does not have"),
    (lambda s: s.update({"student.model.layers.1.mlp.experts.down_proj": torch.ones(4, 32, 32)}), "experts", r"has shape \(4, 32, 32\); the model asks for"),
    (lambda s: s.update({"student.model.norm.weight": torch.ones(63)}), "experts", r"has shape \(63,\)"),
])
def test_a_checkpoint_that_is_not_the_runs_is_refused(
        change: Callable[[dict[str, Tensor]], None], trainable: str, said: str, tiny_moe: Path, tmp_path: Path) -> None:
    finished_run(tmp_path / "run", tiny_moe)
    rewrite(tmp_path / "run", change, trainable=trainable)
    with pytest.raises(ValueError, match=said):
        export_run(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_fp16_parent_cannot_hold_kept_experts(tmp_path: Path) -> None:
    """bf16 values below 2**-14 lose bits in fp16: the export would not be what training computed with."""
    parent = save_tiny_moe(tmp_path / "parent")
    state = {n: (w.float() * 2**-12 if ".experts." in n else w).to(torch.float16) for n, w in load_file(parent / "model.safetensors").items()}
    save_file(state, parent / "model.safetensors", metadata={"format": "pt"})
    finished_run(tmp_path / "run", parent, quant={"keep": ["model.layers.0.*"]}, move=2**-14)
    with pytest.raises(ValueError, match=r"torch\.float16 cannot hold the values that training computed with"):
        export_run(tmp_path / "run", tmp_path / "out")


def test_a_trained_tensor_that_overflows_an_fp16_parent_is_refused(tmp_path: Path) -> None:
    parent = save_tiny_moe(tmp_path / "parent")
    save_file({n: w.to(torch.float16) for n, w in load_file(parent / "model.safetensors").items()}, parent / "model.safetensors", metadata={"format": "pt"})
    finished_run(tmp_path / "run", parent)
    model = load_model(parent, dtype=torch.float32)
    everything = {f"student.{n}": p.detach().clone() for n, p in model.named_parameters()}
    everything["student.model.norm.weight"][3] = 1e5
    rewrite(tmp_path / "run", lambda s: s.update(everything), trainable="all")
    with pytest.raises(ValueError, match=r"model\.norm\.weight: the trained weights \(largest 1e\+05\) do not fit the parent's torch\.float16"):
        export_run(tmp_path / "run", tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))
    everything["student.model.norm.weight"][3] = 1.0
    rewrite(tmp_path / "run", lambda s: s.update(everything), trainable="all")
    export_run(tmp_path / "run", tmp_path / "out")   # a second run completes
    assert CheckpointReader(tmp_path / "out").get("model.norm.weight")[3] == 1.0


def test_the_dtype_of_every_tensor_on_disk_is_known_by_its_name_in_memory(tmp_path: Path) -> None:
    parent = save_family(tmp_path / "parent", "mixtral")
    state = load_file(parent / "model.safetensors")
    state["model.layers.1.block_sparse_moe.gate.weight"] = state["model.layers.1.block_sparse_moe.gate.weight"].float()
    save_file(state, parent / "model.safetensors", metadata={"format": "pt"})
    found = stored_dtypes(CheckpointReader(parent), config=load_config(parent))
    assert set(found) == {n for n, _ in load_model(parent, dtype=torch.float32).named_parameters()}
    assert {n for n, t in found.items() if t == torch.float32} == {"model.layers.1.mlp.gate.weight"}


def test_a_kept_layer_in_mxfp8_is_no_target_of_the_mxfp4_group(tiny_moe: Path, tmp_path: Path) -> None:
    """Engines take the first group that matches; the layer must match its own alone, in every spelling."""
    finished_run(tmp_path / "run", tiny_moe, quant={"keep": ["model.layers.1.*"], "keep_format": "mxfp8"})
    export_run(tmp_path / "run", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    for layer, expected in ((0, "mxfp4-pack-quantized"), (1, "mxfp8-quantized")):
        for projection in ("gate_proj", "up_proj", "down_proj"):
            module = f"model.layers.{layer}.mlp.experts.3.{projection}"
            matching = [g["format"] for g in config["config_groups"].values()
                        if any(re.match(t[3:], module) if t.startswith("re:") else t == module for t in g["targets"])]
            assert matching == [expected], module


def test_renamed_modules_are_targets_under_both_names(tmp_path: Path) -> None:
    parent = save_family(tmp_path / "parent", "kimi_linear")
    finished_run(tmp_path / "run", parent, quant={"attention": "mxfp8", "shared_experts": True})
    export_run(tmp_path / "run", tmp_path / "out")
    groups = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["config_groups"].values()
    targets = {t for g in groups for t in g["targets"]}
    assert {"model.layers.0.self_attn.f_a_proj", "model.layers.0.self_attn.forget_gate.f_a_proj"} <= targets
    assert {"model.layers.1.block_sparse_moe.shared_experts.up_proj", "model.layers.1.mlp.shared_experts.up_proj"} <= targets


def test_a_header_is_read_once_and_not_for_every_tensor(tiny_moe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It describes all tensors: with the 18,432 experts of a 30 B model that took minutes a pass."""
    opened = []
    real = reader_module.read_header
    monkeypatch.setattr(reader_module, "read_header", lambda path: opened.append(path) or real(path))
    reader = CheckpointReader(tiny_moe)
    expected = load_file(tiny_moe / "model.safetensors")
    for name in reader.names:
        assert reader.info(name)[1] == tuple(expected[name].shape)
        assert torch.equal(reader.get(name), expected[name]) and torch.equal(reader.rows(name, start=1, stop=3), expected[name][1:3])
    assert opened == reader.files
