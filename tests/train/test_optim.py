"""MuonAdamW against float64, the package's function, torch.optim.Muon and torch.optim.AdamW; and the groups it is given."""

import io
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from muon import zeropower_via_newtonschulz5
from tolerances import Bound, assert_equal, assert_within
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim.lr_scheduler import LambdaLR
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, TensorDataset

from kilotok.train.optim import MuonAdamW, parameter_groups

LR, DECAY, BETA = 0.02, 0.3, 0.95
SHAPES = [(24, 40), (40, 24), (16, 16), (3, 20, 12), (2, 9, 33), (1, 24, 16)]
# Over 200 Gaussian matrices of each of these sizes the largest errors seen were 0.086 (maximum) and 0.046 (RMS) against float64, 0.107 and
# 0.053 between two orders of the operations: bf16 rounds at 2**-9, and the quintic's slope is up to 3.4445**5 = 485 at small singular values.
NEWTON_SCHULZ_BF16 = Bound(maximum=0.1, rms=0.055, reason="five bf16 Newton-Schulz steps against the quintic in float64")
NEWTON_SCHULZ_ORDER = Bound(maximum=0.12, rms=0.06, reason="the same bf16 products and sums, rounded in another order")
LOWEST, HIGHEST = 0.66, 1.23   # singular values of an update: 0.68 and 1.21 of the quintic, and bf16

Gradients = Sequence[Sequence[Tensor | None]]   # for each step, one for each parameter


def randn(shape: Sequence[int], *, seed: int) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))


def gradients(shape: Sequence[int], *, steps: int, seed: int = 0) -> list[Tensor]:
    return [randn(shape, seed=1000 * seed + 10 + t) * size for t, size in zip(range(steps), (1.0, 0.1, 10.0, 3.0), strict=False)]


def muon(params: Sequence[Tensor], **numbers: Any) -> MuonAdamW:
    return MuonAdamW([{"params": list(params), "use_muon": True, "lr": LR, "weight_decay": DECAY, "momentum": BETA, **numbers}])


def walk(optimizer: torch.optim.Optimizer, params: Sequence[Tensor], grads: Gradients) -> Iterator[int]:
    """A step for each list of gradients; yields after it."""
    for t, of_step in enumerate(grads):
        for p, g in zip(params, of_step, strict=True):
            p.grad = None if g is None else g.clone()
        optimizer.step()
        yield t


def trained(make: Callable[[list[Tensor]], torch.optim.Optimizer], starts: Sequence[Tensor], grads: Gradients) -> list[Tensor]:
    params: list[Tensor] = [nn.Parameter(s.clone()) for s in starts]
    assert len([*walk(make(params), params, grads)]) == len(grads)
    return [p.detach() for p in params]


def step_scale(shape: Sequence[int], row_groups: int = 1) -> float:
    return 0.2 * math.sqrt(max(shape[-2] // row_groups, shape[-1]))


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.Tanh(), nn.Linear(10, 4), nn.Tanh(), nn.Linear(4, 1))


def groups(module: nn.Module, **changes: Any) -> list[dict[str, Any]]:
    numbers = {"muon_lr": 0.02, "muon_weight_decay": 0.1, "adamw_lr": 0.01, "adamw_weight_decay": 0.2, "betas": (0.8, 0.9), "momentum": BETA}
    return parameter_groups(module, **{**numbers, **changes})


def quintic(x: Tensor) -> Tensor:
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * x**3 + 2.0315 * x**5
    return x


# --- Muon ---


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_step_is_the_formula_in_float64(shape: tuple[int, ...]) -> None:
    """Momentum as its explicit sum; the update keeps the singular vectors of the Nesterov gradient, and brings its values near one."""
    p, grads = nn.Parameter(randn(shape, seed=1)), gradients(shape, steps=4, seed=3)
    optimizer, before = muon([p]), p.detach().double()
    for t in walk(optimizer, [p], [[g] for g in grads]):
        m = sum((1 - BETA) * BETA ** (t - i) * grads[i].double() for i in range(t + 1))
        u, s, vt = torch.linalg.svd(BETA * m + (1 - BETA) * grads[t].double(), full_matrices=False)
        s = s / s.square().sum(-1, keepdim=True).sqrt()
        assert float(s.min()) > 1 / 600, "the test's gradients must be well conditioned"
        update = ((1 - LR * DECAY) * before - p.detach().double()) / (LR * step_scale(shape))
        assert_within(update, u * quintic(s).unsqueeze(-2) @ vt, bound=NEWTON_SCHULZ_BF16, what=f"update {t}")
        in_basis = u.mT @ update @ vt.mT   # the identity for the polar factor u @ vt
        values = in_basis.diagonal(dim1=-2, dim2=-1)
        assert float(values.min()) > LOWEST and float(values.max()) < HIGHEST, values
        assert float((in_basis - torch.diag_embed(values)).abs().max()) < 0.06   # 0.054 was the largest of 200 matrices
        before = p.detach().double()


@pytest.mark.parametrize("row_groups", [1, 2])
@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (16, 16), (3, 20, 12), (1, 8, 5), (0, 4, 6)], ids=str)
def test_every_step_is_bitwise_the_packages_function(shape: tuple[int, ...], row_groups: int) -> None:
    p, grads = nn.Parameter(randn(shape, seed=1)), gradients(shape, steps=3)
    m, expected, optimizer = torch.zeros(shape), p.detach().clone(), muon([p], row_groups=row_groups)
    for t in walk(optimizer, [p], [[g] for g in grads]):
        m = torch.lerp(m, grads[t], 1 - BETA)
        parts = torch.lerp(grads[t], m, BETA).chunk(row_groups, dim=-2)
        update = torch.cat([zeropower_via_newtonschulz5(part, steps=5) for part in parts], dim=-2)
        expected = (expected * (1 - LR * DECAY)).add(update, alpha=-LR * step_scale(shape, row_groups))
        assert_equal(p.detach(), expected, what=f"step {t}", bits=True)
        assert_equal(optimizer.state[p]["momentum_buffer"], m, what="momentum", bits=True)


@pytest.mark.parametrize("shape", [(40, 24), (3, 20, 12), (2, 18, 33), (1, 24, 16)], ids=str)
def test_experts_and_row_groups_step_as_separate_parameters(shape: tuple[int, ...]) -> None:
    start, grads = randn(shape, seed=1), gradients(shape, steps=3)
    for g in grads:   # of very different sizes: a norm over more than one matrix would show
        g[..., : shape[-2] // 2, :] *= 1e3
        g[-1] *= 1e-2
    fused, = trained(lambda ps: muon(ps, row_groups=2), [start], [[g] for g in grads])
    whole, = trained(muon, [start], [[g] for g in grads])
    halves = trained(muon, start.chunk(2, dim=-2), [g.chunk(2, dim=-2) for g in grads])
    assert_equal(fused, torch.cat(halves, dim=-2), what="row_groups", bits=True)
    assert not torch.equal(whole, fused)
    if len(shape) == 3:
        assert_equal(whole, torch.stack(trained(muon, list(start), [list(g) for g in grads])), what="experts", bits=True)


@pytest.mark.parametrize("shape", [s for s in SHAPES if len(s) == 2], ids=str)
def test_agrees_with_torch_muon(shape: tuple[int, ...]) -> None:
    start, grads = randn(shape, seed=1), gradients(shape, steps=4)
    params = [nn.Parameter(start.clone()) for _ in range(2)]
    ours, theirs = muon(params[:1]), torch.optim.Muon(params[1:], lr=LR, weight_decay=DECAY, momentum=BETA, adjust_lr_fn="match_rms_adamw")
    before = [start, start]
    for t, _ in zip(walk(ours, params[:1], [[g] for g in grads]), walk(theirs, params[1:], [[g] for g in grads]), strict=True):
        assert_equal(ours.state[params[0]]["momentum_buffer"], theirs.state[params[1]]["momentum_buffer"], what="momentum", bits=True)
        assert_within(*(p.detach() - b * (1 - LR * DECAY) for p, b in zip(params, before, strict=True)), bound=NEWTON_SCHULZ_ORDER, what=f"update {t}")
        before = [p.detach().clone() for p in params]


@pytest.mark.parametrize("size", [1e-4, 1.0, 1e6])
@pytest.mark.parametrize("shape", [*SHAPES, (5, 200)], ids=str)
def test_the_step_has_adamws_rms_and_is_transposed_with_the_matrix(shape: tuple[int, ...], size: float) -> None:
    """0.2 lr, times the RMS of the singular values, whatever the shape and the size of the gradient."""
    grad = randn(shape, seed=5) * size
    p, q = (trained(lambda ps: muon(ps, weight_decay=0.0), [torch.zeros_like(g)], [[g]])[0] for g in (grad, grad.mT.contiguous()))
    assert 0.2 * LOWEST < float(p.square().mean().sqrt()) / LR < 0.2 * HIGHEST
    assert_within(q.mT, p, bound=NEWTON_SCHULZ_ORDER)


def test_an_expert_without_tokens() -> None:
    """A zero gradient is not None: the expert that never had another decays, the one that had goes on along its momentum."""
    p = nn.Parameter(randn((2, 6, 4), seed=1))
    grads = [randn((2, 6, 4), seed=7) * torch.tensor([1.0, 0.0])[:, None, None]] + [torch.zeros(2, 6, 4)] * 20
    before, expected = p.detach().clone()
    for t in walk(muon([p]), [p], [[g] for g in grads]):
        expected = expected * (1 - LR * DECAY)
        assert_equal(p.detach()[1], expected, what=f"step {t}", bits=True)
        assert float((p.detach()[0] - before * (1 - LR * DECAY)).square().mean().sqrt()) > 0.2 * LOWEST * LR
        before = p.detach()[0].clone()


# --- AdamW ---


@pytest.mark.parametrize("foreach", [False, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_adamw_is_bitwise_torchs(dtype: torch.dtype, foreach: bool | None) -> None:
    shapes = [(5,), (4, 7), (2, 3, 4), (), (1, 9)]
    starts = [randn(s, seed=i).to(dtype) for i, s in enumerate(shapes)]
    grads: list[list[Tensor | None]] = [[randn(s, seed=100 * t + i).to(dtype) for i, s in enumerate(shapes)] for t in range(6)]
    grads[2][1] = grads[3][0] = None
    numbers: list[dict[str, Any]] = [{"lr": 0.1, "weight_decay": 0.3, "betas": (0.7, 0.8), "eps": 1e-3}, {"lr": 0.02}]
    defaults = {"weight_decay": 0.0, "betas": (0.9, 0.95), "eps": 1e-8}
    ours = trained(lambda ps: MuonAdamW([{"params": part, "use_muon": False, **n} for part, n in zip((ps[:3], ps[3:]), numbers, strict=True)]), starts, grads)
    torchs = trained(lambda ps: torch.optim.AdamW(
        [{"params": part, **defaults, **n} for part, n in zip((ps[:3], ps[3:]), numbers, strict=True)], foreach=foreach), starts, grads)
    for i, (got, expected) in enumerate(zip(ours, torchs, strict=True)):
        assert_equal(got, expected, what=f"parameter {i}", bits=True)
        assert not torch.equal(got, starts[i])


# --- what the classes of muon-optimizer 0.1.0 get wrong ---


def test_a_closure_is_run_once_with_gradients_on_and_its_loss_returned() -> None:
    net, losses = model(), []
    optimizer = MuonAdamW(groups(net))

    def closure() -> Tensor:
        losses.append(net(randn((8, 6), seed=1)).square().mean())
        losses[-1].backward()
        return losses[-1]

    with torch.no_grad():
        assert optimizer.step(closure) is losses[0]
    assert len(losses) == 1 and all(not torch.equal(p, q) for p, q in zip(net.parameters(), model().parameters(), strict=True) if p.dim() == 2)
    assert optimizer.step() is None


@pytest.mark.parametrize("use_muon", [True, False])
def test_a_parameter_without_a_gradient_is_left_alone_and_starts_later(use_muon: bool) -> None:
    group = {"use_muon": use_muon, "lr": 0.1, "weight_decay": 0.5}
    starts, grads = [randn((4, 6), seed=1), randn((4, 6), seed=2)], gradients((4, 6), steps=4)
    params = [nn.Parameter(s.clone()) for s in starts]
    optimizer = MuonAdamW([{"params": params, **group}])
    for t in walk(optimizer, params, [[None, None], [grads[0], None], [grads[1], None], [None, grads[2]], [None, grads[3]]]):
        if t <= 2:
            assert_equal(params[1].detach(), starts[1], bits=True)
            assert (params[1] in optimizer.state, params[0] in optimizer.state) == (False, t >= 1)
    for i, own in enumerate([grads[:2], grads[2:]]):
        alone, = trained(lambda ps: MuonAdamW([{"params": ps, **group}]), [starts[i]], [[g] for g in own])
        assert_equal(params[i].detach(), alone, what=f"parameter {i}", bits=True)


def test_gradients_and_the_callers_groups_are_only_read() -> None:
    net = model()
    given, copy, params = groups(net), groups(net), [*net.parameters()]
    grads = [[randn(p.shape, seed=10 * t + i) for i, p in enumerate(params)] for t in range(2)]
    for t in walk(MuonAdamW(given), params, grads):
        for p, g in zip(params, grads[t], strict=True):
            assert_equal(p.grad, g, what="gradient", bits=True)
    for g, c in zip(given, copy, strict=True):
        assert g.keys() == c.keys() and all(a is b for a, b in zip(g.pop("params"), c.pop("params"), strict=True)) and g == c


@pytest.mark.parametrize("rank", range(4))
def test_five_matrices_on_each_of_four_ranks(rank: int) -> None:
    """Every rank has the result of a single process, with collectives that do nothing: none is needed, nothing is dealt out."""
    starts, *grads = [[randn((4 + i, 6), seed=10 * t + i) for i in range(5)] for t in range(3)]
    dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
    try:
        of_rank = trained(muon, starts, grads)
    finally:
        dist.destroy_process_group()
    for got, expected in zip(of_rank, trained(muon, starts, grads), strict=True):
        assert_equal(got, expected, bits=True)


# --- state, schedules, Lightning ---


@pytest.mark.parametrize("row_groups", [{}, {"0.weight": 2}], ids=["one", "two"])
def test_resuming_is_bitwise_the_run_that_was_not_stopped(row_groups: dict[str, int]) -> None:
    """State of optimizer and schedule through torch.save; the new optimizer is made with other numbers, which the state replaces."""
    def make(**changes: Any) -> tuple[nn.Module, MuonAdamW, LambdaLR]:
        net = model()
        optimizer = MuonAdamW(groups(net, row_groups=row_groups, **changes))
        return net, optimizer, LambdaLR(optimizer, lambda t: 1 / (1 + t))

    def train(net: nn.Module, optimizer: MuonAdamW, schedule: LambdaLR, steps: range) -> None:
        params = list(net.parameters())
        for _ in walk(optimizer, params, [[randn(p.shape, seed=100 * k + i) for i, p in enumerate(params)] for k in steps]):
            schedule.step()

    whole, buffer = make(), io.BytesIO()
    train(*whole, range(3))
    torch.save([part.state_dict() for part in whole], buffer)
    train(*whole, range(3, 6))
    buffer.seek(0)
    resumed = make(muon_lr=7.0, momentum=0.1, betas=(0.1, 0.2), adamw_weight_decay=9.0)
    for part, state in zip(resumed, torch.load(buffer), strict=True):   # weights_only: tensors and plain values, nothing else
        part.load_state_dict(state)
    train(*resumed, range(3, 6))
    for a, b in zip(whole[0].parameters(), resumed[0].parameters(), strict=True):
        assert_equal(b.detach(), a.detach(), bits=True)
        assert whole[1].state[a].keys() == resumed[1].state[b].keys() != set()
        for key, value in whole[1].state[a].items():
            assert_equal(resumed[1].state[b][key], value, what=key, bits=True)
    assert resumed[1].state_dict()["param_groups"] == whole[1].state_dict()["param_groups"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_state_has_the_parameters_dtype(dtype: torch.dtype) -> None:
    net = model().to(dtype)
    optimizer = MuonAdamW(groups(net))
    assert [*walk(optimizer, [*net.parameters()], [[torch.ones_like(p) for p in net.parameters()]])] == [0]
    assert {k: v.dtype for k, v in optimizer.state[net[0].weight].items()} == {"momentum_buffer": dtype}
    assert {k: v.dtype for k, v in optimizer.state[net[0].bias].items()} == {"step": torch.float32, "exp_avg": dtype, "exp_avg_sq": dtype}


class Regression(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = model()
        x = randn((32, 6), seed=1)
        self.data = TensorDataset(x, x.sin().sum(1, keepdim=True))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return (self.net(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = MuonAdamW(groups(self.net))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": LambdaLR(optimizer, lambda t: 0.9**t), "interval": "step"}}


def test_lightning_trains_as_a_plain_loop_over_two_optimizers_does(tmp_path: Path) -> None:
    """Automatic optimization (a closure), clipping and a schedule; against Muon and torch.optim.AdamW side by side, rates set by hand."""
    module, plain = Regression(), Regression()
    trainer = L.Trainer(max_steps=6, accelerator="cpu", gradient_clip_val=0.5, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                        enable_model_summary=False, default_root_dir=tmp_path)
    trainer.fit(module, DataLoader(module.data, batch_size=8))
    assert [(g["initial_lr"], g["lr"]) for g in trainer.optimizers[0].param_groups] == [(lr, lr * 0.9**6) for lr in (0.02, 0.01, 0.01)]
    matrices, *others = groups(plain.net)
    others = [{k: v for k, v in g.items() if k != "use_muon"} for g in others]
    optimizers = [MuonAdamW([matrices]), torch.optim.AdamW(others, foreach=False)]
    for t, batch in zip(range(6), [*DataLoader(plain.data, batch_size=8)] * 2, strict=False):
        plain.zero_grad()
        plain.training_step(batch, t).backward()
        nn.utils.clip_grad_norm_([p for o in optimizers for g in o.param_groups for p in g["params"]], 0.5)
        for optimizer, rates in zip(optimizers, ([0.02], [0.01, 0.01]), strict=True):
            for g, lr in zip(optimizer.param_groups, rates, strict=True):
                g["lr"] = lr * 0.9**t
            optimizer.step()
    for (name, a), b, start in zip(module.named_parameters(), plain.parameters(), model().parameters(), strict=True):
        assert_equal(a.detach(), b.detach(), what=name, bits=True)
        assert not torch.equal(a.detach(), start.detach()), name


def test_a_small_regression_is_learned_twice_alike() -> None:
    curves: list[list[float]] = [[], []]
    for losses in curves:
        task = Regression()
        optimizer = MuonAdamW(groups(task.net, muon_weight_decay=0.0, adamw_weight_decay=0.0))
        for _ in range(100):
            task.zero_grad()
            loss = task.training_step(list(task.data.tensors), 0)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    assert curves[0][-1] < 0.05 * curves[0][0], (curves[0][0], curves[0][-1])
    assert curves[0] == curves[1]


# --- groups ---


def toy() -> nn.Module:
    """Hidden matrices, and one of everything that is none."""
    net = nn.ModuleDict({"head": nn.Linear(4, 9, bias=False), "embed": nn.Embedding(9, 4), "norm": nn.LayerNorm((3, 4)), "q": nn.Linear(4, 6),
                         "one": nn.Linear(4, 1), "conv": nn.Conv1d(4, 4, 2), "image": nn.Conv2d(2, 2, 2, bias=False), "router": nn.Linear(4, 3, bias=False),
                         "experts": nn.Module(), "frozen": nn.Linear(4, 4)})
    net["head"].weight = net["embed"].weight   # tied, and first met as a Linear's
    net["frozen"].requires_grad_(False)
    for leaf, shape in {"gate_up_proj": (3, 8, 4), "gate_up_proj_2": (3, 4, 4), "gate_up_proj_bias": (3, 8), "down_proj": (3, 4, 4),
                        "column": (3, 4, 1), "scale": ()}.items():
        net["experts"].register_parameter(leaf, nn.Parameter(torch.ones(shape)))
    return net


def test_every_trainable_parameter_is_in_its_one_group() -> None:
    net = toy()
    made = groups(net, row_groups={r".*\.gate_up_proj": 2}, adamw_names=[r"router\..*", "embed.weight"])
    muon_numbers = {"use_muon": True, "lr": 0.02, "weight_decay": 0.1, "momentum": BETA}
    adamw_numbers = {"use_muon": False, "lr": 0.01, "betas": (0.8, 0.9)}
    assert [{k: v for k, v in g.items() if k != "params"} for g in made] == [
        {**muon_numbers, "row_groups": 1, "param_names": ["q.weight", "experts.gate_up_proj_2", "experts.down_proj"]},
        {**muon_numbers, "row_groups": 2, "param_names": ["experts.gate_up_proj"]},
        {**adamw_numbers, "weight_decay": 0.2, "param_names": ["head.weight", "one.weight", "conv.weight", "image.weight", "router.weight", "experts.column"]},
        {**adamw_numbers, "weight_decay": 0.0, "param_names": ["norm.weight", "norm.bias", "q.bias", "one.bias", "conv.bias", "experts.gate_up_proj_bias",
                                                               "experts.scale"]}]
    named, flat = dict(net.named_parameters(remove_duplicate=False)), [p for g in made for p in g["params"]]
    assert all(named[n] is p for g in made for n, p in zip(g["param_names"], g["params"], strict=True))
    assert len(flat) == len(set(flat)) and set(flat) == {p for p in net.parameters() if p.requires_grad}
    assert "router.weight" in groups(net)[0]["param_names"] and "experts.gate_up_proj" in groups(net)[0]["param_names"]
    assert [g["param_names"] for g in groups(nn.Linear(2, 2, bias=False))] == [["weight"]]
    optimizer = MuonAdamW(made)
    with pytest.raises(ValueError, match="group 4: late: Muon takes a matrix"):
        optimizer.add_param_group({"params": [("late", nn.Parameter(torch.ones(3)))], "use_muon": True, "lr": 0.1})
    assert len(optimizer.param_groups) == 4


P = nn.Parameter(torch.ones(6, 4))
REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: groups(nn.Linear(2, 2).requires_grad_(False)), ValueError, r"^parameter_groups: needs a parameter with requires_grad; Linear has none\."),
    (lambda: groups(model(), row_groups={"weight": 2}), ValueError, "every pattern must match a trainable parameter; got 'weight'.*such as '0.weight'"),
    (lambda: groups(toy(), adamw_names=["frozen.weight"]), ValueError, "got 'frozen.weight'"),
    (lambda: groups(model(), row_groups={"0.*": 2, ".*weight": 5}), ValueError, r"row_groups of 0.weight must be one number; got \[2, 5\]"),
    (lambda: MuonAdamW([{"params": [P], "lr": 0.1}]), ValueError, "^MuonAdamW: group 0: needs the key 'use_muon'"),
    (lambda: muon([P], momentun=0.9), ValueError, "unknown key 'momentun' with use_muon=True. Did you mean 'momentum'?"),
    (lambda: muon([P], lr=float("nan")), ValueError, r"lr must lie in \[0, inf\); got nan"),
    (lambda: muon([P], lr=torch.tensor(0.1)), TypeError, "lr must be a number"),
    (lambda: muon([P], momentum=1.0), ValueError, r"momentum must lie in \[0, 1.0\); got 1.0"),
    (lambda: muon([P], row_groups=4), ValueError, r"parameter 0: the rows must be a multiple of row_groups = 4; got shape \(6, 4\)"),
    (lambda: muon([P], row_groups=0), ValueError, "row_groups must be a whole number of at least 1; got 0"),
    (lambda: muon([P[0].detach()]), ValueError, r"Muon takes a matrix or a stack of them; got shape \(4,\)"),
    (lambda: muon([nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))]), TypeError, "must be real floating point; got torch.complex64"),
    (lambda: MuonAdamW([{"params": [P], "use_muon": False, "lr": 0.1, "betas": (0.9, 1.0)}]), ValueError, r"betas must lie in \[0, 1.0\); got 1.0"),
    (lambda: MuonAdamW([{"params": [P], "use_muon": False, "lr": 0.1, "betas": (0.9,)}]), ValueError, r"betas must be two numbers; got \(0.9,\)"),
    (lambda: muon([P]).load_state_dict(torch.optim.AdamW([P]).state_dict()), ValueError, r"use_muon of the groups must be \[True\]; got \[None\]"),
    (lambda: [*walk(muon([P]), [P], [[torch.ones(6, 4).to_sparse()]])], RuntimeError, "gradients must be dense"),
]


@pytest.mark.parametrize(("make", "kind", "message"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_refusals(make: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        make()
