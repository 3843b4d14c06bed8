"""Every family through the real command: discovery, a QAT step, a checkpoint, a resume, the export."""

import json
from pathlib import Path

import pytest
import torch
from families import FAMILIES, save_family
from safetensors.torch import load_file

from kilotok.quant.archs import find_arch, load_config
from kilotok.quant.checkpoint import export_run, read_exported_experts
from kilotok.quant.checkpoint.run import Run
from kilotok.quant.tensor import fake_quant_weight
from kilotok.train.cli import main as train
from kilotok.train.qat import QATModule


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_trained_saved_resumed_and_exported(name: str, tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = save_family(tmp_path / "parent", name)
    command = ["qat", str(tiny_recipe), "--model", str(parent), "--trainer.max_steps", "2", "--trainer.checkpoint_every_steps", "1",
               "--quant.expected", f"{{experts: {2 * len(FAMILIES[name].layers)}}}"]
    assert train([*command, "--run", str(tmp_path / "whole")]) == 0
    real = QATModule.training_step

    def step(self: QATModule, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.global_step == 1:
            raise ValueError("stopped by the test")
        return real(self, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(QATModule, "training_step", step)
        assert train(command) == 2
    assert Run.open(tmp_path / "run").step == 1
    assert train([*command, "--resume"]) == 0

    weights, whole = Run.open(tmp_path / "run").load_trained_weights(), Run.open(tmp_path / "whole").load_trained_weights()
    assert set(weights) == set(whole) and all(torch.equal(weights[n], whole[n]) for n in whole)
    arch = find_arch(load_config(parent).model_type, where="test")
    before, after = load_file(parent / "model.safetensors"), None
    assert len(weights) == 2 * len(FAMILIES[name].layers) and all(n.rsplit(".", 1)[1] in arch.fused for n in weights)
    export_run(tmp_path / "run", tmp_path / "out")
    after = load_file(tmp_path / "out" / "model.safetensors")
    for n, w in before.items():
        if arch.expert_slice(n) is None:
            assert torch.equal(after[n].view(torch.uint8), w.view(torch.uint8)), n
    experts = read_exported_experts(tmp_path / "out", arch=arch)
    for n, w in weights.items():
        assert torch.equal(arch.canonical(fake_quant_weight(w, name=n, scale_mode="even", dim=arch.axis)), experts[n].dequantize()), n
    meta = json.loads((tmp_path / "run" / "meta.json").read_text())
    assert meta["qat"]["code"]["kl"] > 0 and meta["plan"]["expert_tensors"] == len(weights)
