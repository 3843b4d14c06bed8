"""Muon for matrices and AdamW for everything else, as one optimizer.

Muon takes the momentum of a matrix, makes all its singular values about one and steps along that. With gradient g, momentum m
and a matrix p of R rows and C columns:

    m <- beta m + (1 - beta) g
    n  = beta m + (1 - beta) g                      Nesterov: one step ahead of m
    O  = NewtonSchulz(n)                            close to U V^T, where n = U S V^T
    p <- (1 - lr wd) p - lr 0.2 sqrt(max(R, C)) O

The factor is Moonlight's: U V^T has an RMS of 1 / sqrt(max(R, C)), so every step has an RMS near 0.2 lr whatever the shape, about
what AdamW's has; its learning rates and weight decays carry over. It is symmetric in R and C: storing a matrix transposed
changes only roundings. A parameter [E, R, C] is E matrices, each with its own O. With `row_groups` = G, every matrix is G of
R/G rows one below the other: the halves of a fused gate_up weight [E, 2F, D] are two linear maps, and orthogonalized together
the larger gradient of the two would take the other one's share of the step.

Precision. m, n and p have the parameter's dtype. Newton-Schulz (five steps of a quintic, in muon-optimizer) runs in bf16
and is rough on purpose: a singular value above 1/600 of n's Frobenius norm ends between 0.68 and 1.21, a smaller one lower. It divides
by that norm plus 1e-7, so the size of n drops out until it is near 1e-7: an expert that stops getting tokens goes on along its old
momentum, at full length, for hundreds of steps; one that never got any only decays.

Cost. One state tensor a weight (AdamW: two). For R <= C, 20 R^2 C + 10 R^3 operations a step against 6 R C T of the forward and
backward pass over the T tokens that reach the matrix: a share of about 3 R / T to 5 R / T. For experts T is that of one expert,
so this is not small below several thousand tokens an expert and step.

Data parallel. Every rank does all of the work on the averaged gradients, which are the same everywhere; there is no communication. Under FSDP2
(fully_shard) the same step is done on pieces, see `muon.py`; FSDP1, which flattens parameters, is refused.

Sources: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024 (kellerjordan.github.io/posts/muon);
J. Liu et al., "Muon is Scalable for LLM Training" (Moonlight), arXiv 2502.16982, section 2.2, for the factor and the weight decay.
"""

import difflib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim.adamw import adamw

from .muon import local, muon_step, sharded_over

_MUON_DEFAULTS: dict[str, Any] = {"weight_decay": 0.0, "momentum": 0.95, "row_groups": 1}
_ADAMW_DEFAULTS: dict[str, Any] = {"weight_decay": 0.0, "betas": (0.9, 0.95), "eps": 1e-8}
_ANY_KIND = {"params", "param_names", "use_muon", "lr", "initial_lr"}   # initial_lr is the schedulers'


class MuonAdamW(torch.optim.Optimizer):
    """Muon on the groups with `use_muon: True`, AdamW on those with False; a parameter without a gradient is left as it is.

    Keys of a group: params, use_muon and lr; optionally weight_decay, param_names, and for Muon momentum and row_groups, for
        AdamW betas and eps.
    Errors: ValueError for a value out of range, a missing key, an unknown one (with the nearest), a shape Muon has no
        meaning for; TypeError for a parameter that is not real floating point; RuntimeError for a sparse gradient.
    Numerics: AdamW is torch's own function, bit for bit torch.optim.AdamW. Gradients are only read.
    """

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        super().__init__(groups, {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Append a checked copy of the group, with the defaults of its kind."""
        super().add_param_group(_with_defaults(param_group, where=f"MuonAdamW: group {len(self.param_groups)}"))
        try:
            _check_parameters(self.param_groups[-1], where=f"MuonAdamW: group {len(self.param_groups) - 1}")
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state_dict() of the same groups; momentum, step counts and the groups' numbers are the saved ones.

        Errors: ValueError when the groups are not those of this optimizer, an AdamW's for instance.
        """
        saved, ours = ([g.get("use_muon") for g in groups] for groups in (state_dict["param_groups"], self.param_groups))
        if saved != ours:
            raise ValueError(f"MuonAdamW.load_state_dict: use_muon of the groups must be {ours}; got {saved}. The state is another optimizer's.")
        super().load_state_dict(state_dict)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every parameter that has a gradient; `closure` computes them first, and its loss is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                if p.grad.is_sparse:
                    raise RuntimeError(f"MuonAdamW.step: gradients must be dense; got a sparse one of shape {tuple(p.shape)}. Use Embedding(sparse=False).")
            if group["use_muon"]:
                self._muon(params, group=group)
            else:
                self._adamw(params, group=group)
        return loss

    def _muon(self, params: list[Tensor], *, group: dict[str, Any]) -> None:
        for p in params:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        muon_step(params, momenta=[self.state[p]["momentum_buffer"] for p in params], lr=group["lr"], weight_decay=group["weight_decay"],
                  beta=group["momentum"], row_groups=group["row_groups"])

    def _adamw(self, params: list[Tensor], *, group: dict[str, Any]) -> None:
        for p in params:
            if not self.state[p]:
                # As in torch, the count is a CPU tensor: reading it must not wait for the GPU.
                self.state[p].update(step=torch.tensor(0.0, dtype=torch.float32), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        states = [self.state[p] for p in params]
        pieces = [[local(t, like=p) for t in (p, p.grad, s["exp_avg"], s["exp_avg_sq"])] for p, s in zip(params, states, strict=True)]
        mine, grads, first, second = ([piece[i] for piece in pieces] for i in range(4))
        adamw(mine, grads, first, second, [], [s["step"] for s in states], amsgrad=False, beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"],
              weight_decay=group["weight_decay"], eps=group["eps"], maximize=False)


def parameter_groups(
    module: nn.Module, *, muon_lr: float, muon_weight_decay: float, adamw_lr: float, adamw_weight_decay: float, betas: tuple[float, float],
    momentum: float, row_groups: Mapping[str, int] | None = None, adamw_names: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Groups for MuonAdamW: every trainable parameter in exactly one, with its name in `param_names`.

    Muon gets the matrices [R, C] and stacks of them [E, R, C] with R and C above 1. AdamW gets the rest: with weight decay what is
    an embedding, a convolution, one row or one column, has more than three dimensions, or fully matches a pattern of
    `adamw_names` (a router, an untied head: Muon is meant for hidden layers); without weight decay norms, biases (those of a stack of experts
    are a matrix in shape only) and all else of less than two dimensions. A tied weight is an embedding under all its names.

    `row_groups` maps a pattern of full names to a number of row groups, as in {r".*\\.gate_up_proj": 2}; others have one.
    Groups without parameters are left out.

    Errors: ValueError if nothing is trainable, if a pattern matches no trainable parameter, or two match one with different numbers;
        NotImplementedError for a module inside FSDP1.
    """
    if any(isinstance(m, FullyShardedDataParallel) for m in module.modules()):
        raise NotImplementedError("parameter_groups: FSDP1 (FullyShardedDataParallel) flattens parameters, and Muon needs matrices. "
                                  "Shard with FSDP2: torch.distributed.fsdp.fully_shard.")
    aliases: dict[nn.Parameter, list[str]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        if p.requires_grad:
            aliases.setdefault(p, []).append(name)
    if not aliases:
        raise ValueError(f"parameter_groups: needs a parameter with requires_grad; {type(module).__name__} has none. Unfreeze what is to be trained.")
    split = row_groups or {}
    for pattern in (*split, *adamw_names):
        if not any(re.fullmatch(pattern, n) for names in aliases.values() for n in names):
            raise ValueError(f"parameter_groups: every pattern must match a trainable parameter; got {pattern!r}. "
                             f"Patterns match the full name, such as {next(iter(aliases.values()))[0]!r}.")
    norms = _weights_of(module, (nn.LayerNorm, nn.RMSNorm))   # of other norms all weights are one-dimensional
    no_matrices = _weights_of(module, (nn.Embedding, nn.EmbeddingBag, nn.Conv1d, nn.ConvTranspose1d))   # Conv1d is no stack: [out, in, width]
    muon: dict[int, dict[str, Tensor]] = {}
    decayed: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for p, names in aliases.items():
        if p.dim() < 2 or p in norms or any(_is_bias(n) for n in names):
            plain[names[0]] = p
        elif p.dim() > 3 or min(p.shape[-2:]) <= 1 or p in no_matrices or any(re.fullmatch(a, n) for a in adamw_names for n in names):
            decayed[names[0]] = p
        else:
            counts = {count for pattern, count in split.items() if any(re.fullmatch(pattern, n) for n in names)}
            if len(counts) > 1:
                raise ValueError(f"parameter_groups: row_groups of {names[0]} must be one number; got {sorted(counts)}. Narrow the patterns.")
            muon.setdefault(counts.pop() if counts else 1, {})[names[0]] = p
    found: list[tuple[dict[str, Any], dict[str, Tensor]]] = [
        ({"use_muon": True, "lr": muon_lr, "weight_decay": muon_weight_decay, "momentum": momentum, "row_groups": count}, muon[count])
        for count in sorted(muon)]
    found += [({"use_muon": False, "lr": adamw_lr, "weight_decay": decay, "betas": betas}, params)
              for decay, params in ((adamw_weight_decay, decayed), (0.0, plain))]
    return [{"params": list(params.values()), "param_names": list(params), **numbers} for numbers, params in found if params]


def _weights_of(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> set[Tensor]:
    return {p for m in module.modules() if isinstance(m, kinds) for p in m.parameters(recurse=False)}


def _is_bias(name: str) -> bool:
    leaf = name.rsplit(".", 1)[-1]
    return leaf == "bias" or leaf.endswith("_bias")


def _with_defaults(group: dict[str, Any], *, where: str) -> dict[str, Any]:
    for key in ("params", "use_muon", "lr"):
        if key not in group:
            raise ValueError(f"{where}: needs the key {key!r}; got {sorted(group)}. A group is a dict; parameter_groups makes them.")
    if not isinstance(group["use_muon"], bool):
        raise TypeError(f"{where}: use_muon must be True or False; got {group['use_muon']!r}.")
    defaults = _MUON_DEFAULTS if group["use_muon"] else _ADAMW_DEFAULTS
    valid = _ANY_KIND | set(defaults)
    for key in group:
        if key not in valid:
            close = difflib.get_close_matches(key, valid, n=1, cutoff=0.4)
            raise ValueError(f"{where}: unknown key {key!r} with use_muon={group['use_muon']}. "
                             + (f"Did you mean {close[0]!r}?" if close else f"Valid: {', '.join(sorted(valid))}."))
    group = {**defaults, **group}
    for key, below in (("lr", math.inf), ("weight_decay", math.inf), ("eps", math.inf), ("momentum", 1.0)):
        if key in group:
            _in_range(f"{where}: {key}", group[key], below=below)
    if "betas" in group:
        if len(group["betas"]) != 2:
            raise ValueError(f"{where}: betas must be two numbers; got {group['betas']!r}.")
        for beta in group["betas"]:
            _in_range(f"{where}: betas", beta, below=1.0)
    count = group.get("row_groups", 1)
    if not isinstance(count, int) or count < 1:
        raise ValueError(f"{where}: row_groups must be a whole number of at least 1; got {count!r}.")
    return group


def _check_parameters(group: dict[str, Any], *, where: str) -> None:
    for i, p in enumerate(group["params"]):
        name = group["param_names"][i] if "param_names" in group else f"parameter {i}"
        if not p.is_floating_point():
            raise TypeError(f"{where}: {name}: must be real floating point; got {p.dtype}.")
        if group["use_muon"] and p.dim() not in (2, 3):
            raise ValueError(f"{where}: {name}: Muon takes a matrix or a stack of them; got shape {tuple(p.shape)}. Put it in an AdamW group.")
        if group["use_muon"]:
            sharded_over(p, where=f"{where}: {name}")
        if group["use_muon"] and p.size(-2) % group["row_groups"]:
            raise ValueError(f"{where}: {name}: the rows must be a multiple of row_groups = {group['row_groups']}; got shape {tuple(p.shape)}. "
                             "Put it in a group of its own.")


def _in_range(name: str, value: Any, *, below: float) -> None:
    if not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number; got {value!r}.")
    if not 0 <= value < below:   # also refuses NaN
        raise ValueError(f"{name} must lie in [0, {below}); got {value}.")
