"""Muon on several ranks: the step of a sharded parameter is, to the bit, the step of the whole one."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from tolerances import assert_equal
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from kilotok.train.muon import deal, newton_schulz_cost, rows_by_rank
from kilotok.train.optim import MuonAdamW, parameter_groups

pytestmark = pytest.mark.xdist_group("ranks")
# rows that two and three ranks cannot share evenly, fewer rows than ranks, experts that are not shared evenly
SHAPES = {"tall": (26, 8), "wide": (7, 24), "two": (2, 9), "square": (16, 16), "experts": (5, 6, 4), "fused": (3, 8, 4), "fused_matrix": (10, 6),
          "norm": (7,), "row": (1, 6), "one": (1,), "idle": (4, 4)}


def seeded(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def model() -> nn.Module:
    net = nn.Module()
    for i, (name, shape) in enumerate(SHAPES.items()):
        net.register_parameter(name, nn.Parameter(seeded(shape, i)))
    return net


def optimizer_of(net: nn.Module) -> MuonAdamW:
    return MuonAdamW(parameter_groups(net, muon_lr=0.02, muon_weight_decay=0.1, adamw_lr=0.01, adamw_weight_decay=0.2, betas=(0.8, 0.9), momentum=0.95,
                                      row_groups={"fused.*": 2}))


def train(net: nn.Module, optimizer: MuonAdamW, steps: range) -> None:
    """`idle` never has a gradient, `wide` not in the second step."""
    for t in steps:
        for i, (name, p) in enumerate(net.named_parameters()):
            grad: Tensor | None = seeded(tuple(p.shape), 100 + 20 * t + i)
            if isinstance(p, DTensor) and grad is not None:
                grad = distribute_tensor(grad, p.device_mesh, p.placements)
            p.grad = None if name == "idle" or (name == "wide" and t == 1) else grad
        optimizer.step()


def whole(t: Tensor) -> Tensor:
    return (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()


def results(net: nn.Module, optimizer: MuonAdamW) -> dict[str, Tensor]:
    found = {name: whole(p) for name, p in net.named_parameters()}
    for name, p in net.named_parameters():
        found.update({f"{name}.{k}": whole(v) for k, v in optimizer.state.get(p, {}).items()})
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_a_sharded_step_is_the_whole_step_to_the_bit(world: int, tmp_path: Path) -> None:
    """fully_shard cuts a model; two steps, a state_dict into a new optimizer, a third step; every product was done on one rank only."""
    def work(rank: int) -> tuple[dict[str, Tensor], dict[str, int], int]:
        net = model()
        fully_shard(net, mesh=init_device_mesh("cpu", (world,)))
        assert all(isinstance(p, DTensor) and p.placements == (Shard(0),) for p in net.parameters())
        first = optimizer_of(net)
        train(net, first, range(2))
        second = optimizer_of(net)
        second.load_state_dict(first.state_dict())
        with CommDebugMode() as counted:
            train(net, second, range(2, 3))
        return results(net, second), {str(k): v for k, v in counted.get_comm_counts().items()}, rank

    of_ranks = on_ranks(world, work, folder=tmp_path)
    net = model()
    optimizer = optimizer_of(net)
    train(net, optimizer, range(3))
    expected = results(net, optimizer)
    for found, counts, rank in of_ranks:
        assert found.keys() == expected.keys()
        for name in expected:
            assert_equal(found[name], expected[name], what=f"rank {rank}: {name}", bits=True)
        exchanges = {k: v for k, v in counts.items() if "alltoall" in k.replace("_", "")}
        assert sum(exchanges.values()) == 4, counts   # two for the matrices of each of the two groups, whatever their number


def test_experts_of_a_rank_need_no_other_rank(tmp_path: Path) -> None:
    def work(rank: int) -> tuple[int, Tensor]:
        mesh = init_device_mesh("cpu", (2,))
        p = nn.Parameter(distribute_tensor(seeded((5, 6, 4), 0), mesh, [Shard(0)]))
        p.grad = distribute_tensor(seeded((5, 6, 4), 1), mesh, [Shard(0)])
        with CommDebugMode() as counted:
            MuonAdamW([{"params": [p], "use_muon": True, "lr": 0.1}]).step()
        return counted.get_total_counts(), whole(p)

    (a, p), (b, _) = on_ranks(2, work, folder=tmp_path)
    q = nn.Parameter(seeded((5, 6, 4), 0))
    q.grad = seeded((5, 6, 4), 1)
    MuonAdamW([{"params": [q], "use_muon": True, "lr": 0.1}]).step()
    assert a == b == 0
    assert_equal(p, q.detach(), bits=True)


def test_dealing_gives_every_matrix_one_owner_and_no_rank_much_more_than_another() -> None:
    # the shapes of a five-layer draft of a 4096-wide target: fc, and q, k, v, o, gate, up, down of every layer
    shapes = [(4096, 20480), *5 * [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (12288, 4096), (12288, 4096), (4096, 12288)]]
    costs = [newton_schulz_cost(*s) for s in shapes]
    assert newton_schulz_cost(3, 5) == newton_schulz_cost(5, 3) == 20 * 9 * 5 + 10 * 27
    for world in (1, 2, 3, 8):
        owners = deal(costs, num_ranks=world)
        load = [sum(c for c, o in zip(costs, owners, strict=True) if o == r) for r in range(world)]
        assert len(owners) == len(shapes) and min(load) > 0
        assert max(load) < 1.1 * sum(costs) / world, (world, load)
    assert deal([], num_ranks=3) == [] and deal([5, 5, 5], num_ranks=2) == [0, 1, 0]


@pytest.mark.parametrize(("rows", "world"), [(7, 2), (2, 3), (0, 2), (9, 4), (8, 4)])
def test_rows_are_cut_as_torch_cuts_them(rows: int, world: int) -> None:
    cut = [len(c) for c in torch.arange(rows).chunk(world)]
    assert rows_by_rank(rows, world=world) == [*cut, *[0] * (world - len(cut))] if rows else rows_by_rank(rows, world=world) == [0] * world


def fake_mesh(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape)


@pytest.fixture
def one_of_four() -> Any:
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_other_placements_are_refused_and_replicas_are_whole(one_of_four: None) -> None:
    value = seeded((8, 6), 0)
    for mesh, placements in ((fake_mesh((4,)), [Shard(1)]), (fake_mesh((2, 2)), [Shard(0), Shard(1)]), (fake_mesh((2, 2)), [Shard(0), Shard(0)])):
        p = nn.Parameter(DTensor.from_local(value, mesh, placements, run_check=False))
        with pytest.raises(NotImplementedError, match=r"^MuonAdamW: group 0: parameter 0: a parameter of shape .* is placed as .*Put it in an AdamW group"):
            MuonAdamW([{"params": [p], "use_muon": True, "lr": 0.1}])
    replica = nn.Parameter(DTensor.from_local(value.clone(), fake_mesh((4,)), [Replicate()], run_check=False))
    replica.grad = DTensor.from_local(seeded((8, 6), 1), replica.device_mesh, [Replicate()], run_check=False)   # type: ignore[attr-defined]
    plain = nn.Parameter(value.clone())
    plain.grad = seeded((8, 6), 1)
    for p in (replica, plain):
        MuonAdamW([{"params": [p], "use_muon": True, "lr": 0.1}]).step()
    assert_equal(replica.to_local().detach(), plain.detach(), bits=True)   # type: ignore[attr-defined]


def test_a_gradient_placed_in_another_way_is_refused(one_of_four: None) -> None:
    mesh = fake_mesh((4,))
    for use_muon in (True, False):
        p = nn.Parameter(DTensor.from_local(seeded((2, 6), 0), mesh, [Shard(0)], run_check=False))
        p.grad = DTensor.from_local(seeded((8, 6), 0), mesh, [Replicate()], run_check=False)
        with pytest.raises(RuntimeError, match=r"placed differently .*Make the optimizer after the model is sharded"):
            MuonAdamW([{"params": [p], "use_muon": use_muon, "lr": 0.1}]).step()


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_parameters_that_fsdp1_flattened_are_refused(use_orig_params: bool, tmp_path: Path) -> None:
    def work(rank: int) -> list[str]:
        errors = []
        net = nn.Linear(6, 4, bias=False)
        early = MuonAdamW([{"params": [net.weight], "use_muon": True, "lr": 0.1}])
        wrapped = FullyShardedDataParallel(net, use_orig_params=use_orig_params, device_id=torch.device("cpu"))
        wrapped(torch.ones(2, 6)).sum().backward()
        attempts = [lambda: parameter_groups(wrapped, muon_lr=0.1, muon_weight_decay=0, adamw_lr=0.1, adamw_weight_decay=0, betas=(0.9, 0.9), momentum=0.9)]
        if use_orig_params:
            attempts.append(early.step)   # type: ignore[arg-type]
        for attempt in attempts:
            try:
                attempt()
                errors.append("none")
            except (NotImplementedError, RuntimeError) as error:
                errors.append(str(error))
        return errors

    for errors in on_ranks(2, work, folder=tmp_path):
        assert len(errors) == 1 + use_orig_params
        assert all("FSDP1" in e and "fully_shard" in e for e in errors), errors
