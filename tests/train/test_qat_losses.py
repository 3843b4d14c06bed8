"""The distance of hidden states in `train qat`: against a direct computation, with checkpointed layers, and what is refused."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from families import family_model
from tolerances import DISTILL_SUM_FP32, assert_within
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kilotok.quant.archs import load_config, load_model
from kilotok.quant.checkpoint.run import Run
from kilotok.quant.experts import attach_fake_quant
from kilotok.quant.plan import make_plan
from kilotok.quant.quality import head_weight, hidden_states
from kilotok.train.cli import main as train
from kilotok.train.hidden import hidden_mse, layer_outputs
from kilotok.train.qat import QATModule

IDS = torch.arange(3, 27).view(2, 12)


def weights_of(run: Path) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in Run.open(run).load_trained_weights().items()}


def first_row(run: Path) -> dict[str, float]:
    return {k: float(v) for k, v in next(csv.DictReader((run / "metrics.csv").open())).items() if v}


def test_hidden_mse_is_a_mean_over_tokens_and_dims_summed_over_the_layers() -> None:
    a, b = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 0.0], [0.0, 4.0]])
    assert float(hidden_mse([a], teacher_TD=[b])) == (4 + 9) / 4
    assert float(hidden_mse([a, 2 * a], teacher_TD=[b, 2 * a - 1])) == (4 + 9) / 4 + 1
    assert hidden_mse([a.bfloat16()], teacher_TD=[b.bfloat16()]).dtype == torch.float32
    teacher = b.clone().requires_grad_()
    student = a.clone().requires_grad_()
    hidden_mse([student], teacher_TD=[teacher]).backward()
    assert teacher.grad is None and torch.equal(student.grad, (a - b) / 2)   # type: ignore[arg-type]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_layer_outputs_are_the_model_s_and_carry_its_gradient(checkpointed: bool) -> None:
    """With checkpointing the output is made inside the layer's checkpoint; its gradient must be that of a plain run all the same."""
    grads = []
    for checkpoint in (False, checkpointed):
        model: Any = family_model("mixtral").float()
        if checkpoint:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
        with layer_outputs(model, layers=[1, 0]) as outputs:
            final = hidden_states(model, IDS)
            states = model.model(input_ids=IDS, use_cache=False, output_hidden_states=True).hidden_states if not checkpoint else None
        if states is not None:   # hidden_states: embedding, layer 0, layer 1 after the norm
            assert torch.equal(outputs[1], states[1].flatten(0, 1))
            assert torch.equal(model.model.norm(outputs[0]), final)
        hidden_mse(outputs, teacher_TD=[torch.zeros_like(o) for o in outputs]).backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert "model.layers.0.mlp.experts.down_proj" in grads[0] and grads[0].keys() == grads[1].keys()
    assert all(torch.equal(grads[0][n], grads[1][n]) for n in grads[0])


@pytest.mark.parametrize("layers", ["[]", "[1, 0]"])
def test_a_run_logs_the_distance_that_a_direct_computation_gives(layers: str, tiny_recipe: Path, tiny_moe: Path, tmp_path: Path,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    real = QATModule.training_step

    def step(self: QATModule, batch: Tensor, batch_idx: int) -> Tensor:
        seen.append(batch)
        return real(self, batch, batch_idx)

    monkeypatch.setattr(QATModule, "training_step", step)
    assert train(["qat", str(tiny_recipe), "--trainer.max_steps", "1", "--loss.hidden_mse_weight", "0.5", "--loss.hidden_layers", layers]) == 0
    row = first_row(tmp_path / "run")
    student: Any = load_model(tiny_moe, dtype=torch.float32)
    parent: Any = load_model(tiny_moe, dtype=torch.float32)
    attach_fake_quant(student, plan=make_plan(load_config(tiny_moe), scale_mode="even", where="test"))
    expected = torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        ours, theirs = (m.model(input_ids=seen[0][:, :-1], output_hidden_states=True) for m in (student, parent))
    pairs = [(ours.last_hidden_state, theirs.last_hidden_state)]
    if layers != "[]":   # layer 1 is the last: transformers gives its output after the norm only, so it is undone from the hook's side below
        outputs = []
        for model in (student, parent):
            with torch.no_grad(), layer_outputs(model, layers=[1]) as last:
                hidden_states(model, seen[0][:, :-1])
            outputs.append(last[0])
        pairs += [(ours.hidden_states[1], theirs.hidden_states[1]), (outputs[0], outputs[1])]
    for a, b in pairs:
        expected += ((a.double() - b.double()) ** 2).mean()
    assert float(expected) > 0
    assert_within(torch.tensor(row["hidden_mse"]), expected, bound=DISTILL_SUM_FP32, what="hidden_mse")
    assert row["loss"] == pytest.approx(row["kl"] + 0.5 * row["hidden_mse"], rel=1e-6)


def test_the_distance_trains_and_without_a_weight_it_is_not_there(tiny_recipe: Path, tmp_path: Path) -> None:
    only = ["--loss.kl_weight", "0", "--loss.hidden_mse_weight", "1"]
    steps = ["--trainer.max_steps", "30", "--trainer.checkpoint_every_steps", "30", "--trainer.batch_size", "8", "--optim.lr", "2e-4"]
    assert train(["qat", str(tiny_recipe), *only, *steps]) == 0
    rows = list(csv.DictReader((tmp_path / "run" / "metrics.csv").open()))
    distances = [float(r["hidden_mse"]) for r in rows]
    assert sum(distances[-5:]) < 0.8 * sum(distances[:5]) and distances == [float(r["loss"]) for r in rows]
    assert train(["qat", str(tiny_recipe), "--run", str(tmp_path / "plain"), "--trainer.max_steps", "1"]) == 0
    assert "hidden_mse" not in first_row(tmp_path / "plain")


@pytest.mark.parametrize(("options", "message"), [
    (["--loss.hidden_mse_weight", "-1"], "loss.hidden_mse_weight: must be at least 0"),
    (["--loss.kl_weight", "0"], "must not all be zero"),
    (["--loss.hidden_mse_weight", "1", "--loss.hidden_layers", "[0, 2]"], "the model's layers are 0 to 1; got 2"),
    (["--loss.hidden_mse_weight", "1", "--loss.hidden_layers", "[-1]"], "different layer numbers, from 0"),
    (["--loss.hidden_mse_weight", "1", "--loss.hidden_layers", "[1, 1]"], "different layer numbers, from 0"),
    (["--loss.hidden_layers", "[1]"], "needs loss.hidden_mse_weight"),
])
def test_losses_that_cannot_be_are_refused(options: list[str], message: str, tiny_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(["qat", str(tiny_recipe), *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


class RowsOfLogits(TorchDispatchMode):
    """The most rows of any tensor with the vocabulary as its last dim; the (transposed) heads are none of them."""

    def __init__(self, *heads: Tensor) -> None:
        super().__init__()
        self.vocab, self.rows, self.heads = heads[0].shape[0], 0, {h.untyped_storage().data_ptr() for h in heads}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and t.dim() and t.shape[-1] == self.vocab and t.untyped_storage().data_ptr() not in self.heads:
                self.rows = max(self.rows, t.numel() // self.vocab)
        return result


def test_a_training_step_never_holds_the_logits_of_all_rows(tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole step, forward and backward, with all losses on: 2 x 32 rows, 16 rows of logits at a time."""
    recorders: list[tuple[RowsOfLogits, RowsOfLogits]] = []
    real = QATModule.training_step

    def step(self: QATModule, batch: Tensor, batch_idx: int) -> Tensor:
        forward, backward = (RowsOfLogits(head_weight(self.student), head_weight(self.parent)) for _ in range(2))
        recorders.append((forward, backward))
        with forward:
            loss = real(self, batch, batch_idx)
        with backward:
            torch.autograd.grad(loss, [p for p in self.parameters() if p.requires_grad], retain_graph=True)
        return loss

    monkeypatch.setattr(QATModule, "training_step", step)
    losses = ["--loss.ce_weight", "1", "--loss.hidden_mse_weight", "1", "--loss.chunk_rows", "16"]
    assert train(["qat", str(tiny_recipe), "--trainer.max_steps", "1", *losses]) == 0
    ((forward, backward),) = recorders
    assert (forward.rows, backward.rows) == (16, 16)
