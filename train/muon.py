"""Muon's step for matrices that lie whole on a rank, or in pieces on several (FSDP2: DTensors sharded by rows, or by experts).

The step is the same whatever the number of ranks: momentum, weight decay and the last addition are elementwise, so each rank does its piece;
Newton-Schulz reads the Nesterov momentum in bf16 and wants whole matrices.

    [E, R, C] sharded by expert     every rank orthogonalizes its own experts; no communication
    [R, C] sharded by row           the matrices are dealt out: pieces go to a matrix's owner in bf16 (what Newton-Schulz rounds to anyway,
                                    so nothing is lost), which orthogonalizes it and sends the pieces of the result back

Cost. For W weights in matrices on N ranks a rank sends at most 2 * 2 bytes * W / N a step, in two all-to-alls over all matrices of a group, holds
some 8 bytes * W / N beside the optimizer's state, and does about 1 / N of the products: the longest matrix first, always to the rank that
has least to do. (Every rank gathering everything would receive 2 bytes * W and do all of the products.) One matrix is never split.

The ranks of a group must agree on which parameters have a gradient; under FSDP2 they do, because gradients are reduced together.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from muon import zeropower_via_newtonschulz5
from torch import Tensor
from torch.distributed.tensor import DTensor

NEWTON_SCHULZ_STEPS = 5   # Jordan's number, for which the quintic's coefficients were chosen
MATCH_RMS_ADAMW = 0.2     # Moonlight: the RMS of AdamW's steps lies between 0.2 and 0.4


@torch.no_grad()
def muon_step(params: Sequence[Tensor], *, momenta: Sequence[Tensor], lr: float, weight_decay: float, beta: float, row_groups: int) -> None:
    """One step of matrices and stacks of them, all with a gradient; `momenta`, of their shapes and placements, move too.

    Errors: as `sharded_over`; RuntimeError for a parameter that was flattened since its group was made.
    """
    dealt: dict[Any, list[tuple[Tensor, Tensor, float]]] = {}
    for p, m in zip(params, momenta, strict=True):
        if p.dim() not in (2, 3):
            raise RuntimeError(f"Muon: a parameter has become of shape {tuple(p.shape)} since the optimizer was made. Muon needs whole matrices: "
                               "shard with FSDP2 (fully_shard), which keeps them, instead of FSDP1, which flattens them.")
        group = sharded_over(p, where="Muon")
        grad, momentum, piece = local(p.grad, like=p), local(m, like=p), local(p, like=p)
        momentum.lerp_(grad, 1 - beta)
        ahead = grad.lerp(momentum, beta).bfloat16()   # a new tensor: what is left in p.grad is the caller's
        piece.mul_(1 - lr * weight_decay)
        scale = -lr * MATCH_RMS_ADAMW * math.sqrt(max(p.size(-2) // row_groups, p.size(-1)))
        if group is None:
            piece.add_(orthogonal(ahead, row_groups=row_groups), alpha=scale)
        else:
            dealt.setdefault(group, []).append((p, ahead, scale))
    for group, matrices in dealt.items():
        updates = orthogonal_dealt([ahead for _, ahead, _ in matrices], num_rows=[p.size(0) for p, _, _ in matrices], group=group, row_groups=row_groups)
        for (p, _, scale), update in zip(matrices, updates, strict=True):
            local(p, like=p).add_(update, alpha=scale)


def orthogonal(ahead: Tensor, *, row_groups: int) -> Tensor:
    """The orthogonalized matrix, or matrices of a stack, bf16. Shapes: [R, C] or [E, R, C], R a multiple of row_groups; so is the result."""
    if row_groups == 1:
        return zeropower_via_newtonschulz5(ahead, steps=NEWTON_SCHULZ_STEPS)  # type: ignore[no-any-return]
    return zeropower_via_newtonschulz5(ahead.unflatten(-2, (row_groups, -1)), steps=NEWTON_SCHULZ_STEPS).flatten(-3, -2)  # type: ignore[no-any-return]


def orthogonal_dealt(pieces: Sequence[Tensor], *, num_rows: Sequence[int], group: dist.ProcessGroup, row_groups: int) -> list[Tensor]:
    """`orthogonal` of matrices whose rows lie on the ranks of `group`, each rank's piece of the results. Every rank calls it with the same matrices.

    Shapes: pieces bf16 [rows here, C]; num_rows, R of the whole matrices, cut as torch.chunk does (the last ranks may have fewer rows, or none).
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    columns = [p.size(1) for p in pieces]
    rows = [rows_by_rank(r, world=world) for r in num_rows]
    assert [r[rank] for r in rows] == [p.size(0) for p in pieces], f"pieces {[tuple(p.shape) for p in pieces]} are not rank {rank}'s of {list(num_rows)} rows"
    owners = deal([newton_schulz_cost(r // row_groups, c) * row_groups for r, c in zip(num_rows, columns, strict=True)], num_ranks=world)
    by_owner = sorted(range(len(pieces)), key=lambda i: (owners[i], i))
    mine = [i for i in by_owner if owners[i] == rank]
    out_sizes = [sum(pieces[i].numel() for i in by_owner if owners[i] == o) for o in range(world)]
    in_sizes = [sum(rows[i][r] * columns[i] for i in mine) for r in range(world)]

    sent = torch.cat([pieces[i].flatten() for i in by_owner])
    received = sent.new_empty(sum(in_sizes))
    dist.all_to_all_single(received, sent, in_sizes, out_sizes, group=group)
    parts = iter(received.split([rows[i][r] * columns[i] for r in range(world) for i in mine]))
    of_rank = [{i: next(parts).view(-1, columns[i]) for i in mine} for _ in range(world)]
    whole = {i: orthogonal(torch.cat([of_rank[r][i] for r in range(world)]), row_groups=row_groups).split(rows[i]) for i in mine}

    back = torch.cat([received.new_empty(0), *(whole[i][r].flatten() for r in range(world) for i in mine)])
    returned = torch.empty_like(sent)
    dist.all_to_all_single(returned, back, out_sizes, in_sizes, group=group)
    results = dict(zip(by_owner, returned.split([pieces[i].numel() for i in by_owner]), strict=True))
    return [results[i].view_as(piece) for i, piece in enumerate(pieces)]


def rows_by_rank(num_rows: int, *, world: int) -> list[int]:
    """How many rows each rank holds, as torch.chunk and DTensor cut them."""
    each = -(-num_rows // world)
    return [max(0, min(each, num_rows - r * each)) for r in range(world)]


def newton_schulz_cost(rows: int, columns: int) -> int:
    """Operations of the five steps on one matrix."""
    small, large = sorted((rows, columns))
    return 10 * small * small * (2 * large + small)


def deal(costs: Sequence[int], *, num_ranks: int) -> list[int]:
    """Owner of each item: the dearest first, always to the rank with least to do so far; ties to the lower rank, so all ranks agree."""
    load, owners = [0] * num_ranks, [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owners[i] = min(range(num_ranks), key=lambda r: (load[r], r))
        load[owners[i]] += costs[i]
    return owners


def sharded_over(p: Tensor, *, where: str) -> dist.ProcessGroup | None:
    """The group that holds a matrix's rows between them; None when this rank has whole matrices: a plain tensor, a replica, experts of its own.

    Errors: NotImplementedError for a DTensor cut in another way.
    """
    if not isinstance(p, DTensor):
        return None
    cut = [dim for dim, placement in enumerate(p.placements) if not placement.is_replicate() and p.device_mesh.size(dim) > 1]
    if not cut:
        return None
    if len(cut) > 1 or not p.placements[cut[0]].is_shard(0):
        raise NotImplementedError(f"{where}: a parameter of shape {tuple(p.shape)} is placed as {p.placements}; Muon takes parameters cut along dimension 0 "
                                  "over one dimension of the mesh (FSDP2), and replicas. Put it in an AdamW group.")
    return None if p.dim() == 3 else p.device_mesh.get_group(cut[0])


def local(tensor: Tensor | None, *, like: Tensor) -> Tensor:
    """This rank's piece of a tensor that belongs to the parameter `like`, sharing its memory. Errors: RuntimeError when it is placed in another way."""
    assert tensor is not None, "parameters without a gradient are left out before"
    ours, theirs = (getattr(t, "placements", "whole") for t in (like, tensor))
    if ours != theirs:
        raise RuntimeError(f"optimizer: a parameter of shape {tuple(like.shape)} and its gradient or state are placed differently ({ours} and {theirs}). "
                           "Make the optimizer after the model is sharded.")
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
