"""Inputs of the expert products, an independent reference, and the checks that tests and the benchmark share."""

from dataclasses import replace

import torch
from moe_compile import Shape
from torch import Tensor

from kilotok.kernels.moe.layer import Experts, Workspace
from kilotok.kernels.moe.prefill import PrefillWeights
from kilotok.kernels.moe.product import down, down_ref, gate_up, gate_up_ref, gate_up_sums_ref
from kilotok.kernels.moe.routing import route, route_ref, stack_routings
from kilotok.kernels.moe.weights import ExpertWeights, PairOrder, pack_experts
from kilotok.kernels.mx import dequantize_mxfp4_ref

BF16 = torch.bfloat16


class Checkpoint(PrefillWeights):
    """Experts as a checkpoint has them, which is how prefill takes them."""

    def pack(self, *, rank: int = 0, world_size: int = 1) -> ExpertWeights:
        return pack_experts(**vars(self), rank=rank, world_size=world_size)


def checkpoint_of(shape: Shape, *, seed: int, experts: int | None = None, scales: tuple[int, int] = (108, 128), order: PairOrder | None = None,
                  device: str = "cpu") -> Checkpoint:
    """All 16 codes and scales of a range of powers of two, in the order and with the biases of the shape's family."""
    g = torch.Generator(device=device).manual_seed(seed)
    num = experts or shape.experts

    def packed(rows: int, depth: int) -> tuple[Tensor, Tensor]:
        return (torch.randint(0, 256, (num, rows, depth // 32, 16), dtype=torch.uint8, device=device, generator=g),
                torch.randint(scales[0], scales[1] + 1, (num, rows, depth // 32), dtype=torch.uint8, device=device, generator=g))

    gate_up_blocks, gate_up_scales = packed(2 * shape.channels, shape.hidden)
    down_blocks, down_scales = packed(shape.hidden, shape.channels)
    bias = (torch.randn(num, 2 * shape.channels, device=device, generator=g), torch.randn(num, shape.hidden, device=device, generator=g))
    interleaved = shape.activation == "clamped_swiglu"
    return Checkpoint(gate_up_blocks=gate_up_blocks, gate_up_scales=gate_up_scales, down_blocks=down_blocks, down_scales=down_scales,
                      order=order or ("interleaved" if interleaved else "split"), activation="clamped_swiglu" if interleaved else "silu",
                      gate_up_bias_EG=bias[0] if shape.bias else None, down_bias_ED=bias[1] if shape.bias else None)


def activations(num_tokens: int, hidden: int, *, seed: int, device: str = "cpu") -> Tensor:
    """bf16 with a few large channels, scaled so that gates are of the order of one."""
    g = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(num_tokens, hidden, device=device, generator=g) * 0.01
    x[:, ::97] *= 20
    return x.to(BF16)


def routed(num_tokens: int, shape: Shape, *, seed: int, experts: int | None = None) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    ids = torch.rand(num_tokens, experts or shape.experts, generator=g).argsort(dim=-1)[:, :shape.per_token].to(torch.int32)
    weights = torch.rand(num_tokens, shape.per_token, generator=g) + 0.1
    return ids, weights / weights.sum(dim=-1, keepdim=True)


def dense_reference(x_TD: Tensor, checkpoint: Checkpoint, ids_TK: Tensor, weights_TK: Tensor, *, round_channels: bool) -> Tensor:
    """The layer from dequantized weights in float64, token by token, without any of the code under test but dequantization.

    round_channels: to bf16 between the products.
    """
    gate_up_EGD = dequantize_mxfp4_ref(checkpoint.gate_up_blocks, checkpoint.gate_up_scales, dtype=torch.float64)
    down_EDF = dequantize_mxfp4_ref(checkpoint.down_blocks, checkpoint.down_scales, dtype=torch.float64)
    out = torch.zeros(len(x_TD), down_EDF.shape[1], dtype=torch.float64, device=x_TD.device)
    for token in range(len(x_TD)):
        for expert, weight in sorted(zip(ids_TK[token].tolist(), weights_TK[token].tolist(), strict=True)):
            if not 0 <= expert < len(gate_up_EGD):
                continue
            h = gate_up_EGD[expert] @ x_TD[token].double()
            if checkpoint.gate_up_bias_EG is not None:
                h = h + checkpoint.gate_up_bias_EG[expert].double()
            gate, up = (h[0::2], h[1::2]) if checkpoint.order == "interleaved" else h.chunk(2)
            if checkpoint.activation == "silu":
                inter = torch.nn.functional.silu(gate) * up
            else:
                gate, up = torch.clamp(gate, max=7.0), torch.clamp(up, -7.0, 7.0)
                inter = gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)
            y = down_EDF[expert] @ (inter.to(BF16).double() if round_channels else inter)
            if checkpoint.down_bias_ED is not None:
                y = y + checkpoint.down_bias_ED[expert].double()
            out[token] += weight * y
    return out


# --- on a GPU ---


def relative(got: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm."""
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def beyond_neighbours(got: Tensor, expected: Tensor) -> float:
    """The largest difference of two bf16 tensors, as a share of what a rounding to the other neighbour and an fp32 error of a millionth make.

    Infinite if more than three values and one in a thousand differ at all: fp32 sums bring about one in ten thousand over a tie.
    """
    difference = (got.double() - expected.double()).abs()
    if int((difference > 0).sum()) > 3 + expected.numel() // 1000:
        return float("inf")
    wide = expected.double()
    return float((difference / (2**-7 * wide.abs() + 1e-6 * wide.square().mean().sqrt())).max())


REPEATS = 40   # a race that spoiled one run in a hundred went unseen with two


def poison(workspace: Workspace) -> None:
    """NaN in everything that a launch must write before it reads."""
    workspace.inter_MCF.fill_(float("nan"))
    workspace.partials_RD.fill_(float("nan"))


def check_products(shape: Shape, *, num_tokens: int, seed: int, scales: tuple[int, int] = (108, 128)) -> dict[str, float]:
    """Relative errors of the three kernels against float64 of the same bf16 inputs; bitwise checks on the way.

    Bitwise: the two products in REPEATS runs, the layer in as many against them, and a token alone against the same token among others.
    """
    experts = min(shape.experts, 4 * shape.per_token)
    checkpoint = checkpoint_of(shape, seed=seed, experts=experts, scales=scales, device="cuda")
    weights = checkpoint.pack()
    x = activations(num_tokens, shape.hidden, seed=seed, device="cuda")
    ids, token_weights = (t.cuda() for t in routed(num_tokens, shape, seed=seed, experts=experts))
    routing = route(ids, token_weights, num_experts=experts)
    expected_routing = route_ref(ids, token_weights, num_experts=experts)
    tiles = int(expected_routing.num_tiles)
    live = expected_routing.pairs_MC[:tiles] >= 0
    space = Workspace.of(weights, num_tokens=num_tokens, num_experts_per_token=shape.per_token, device=x.device)

    poison(space)
    sums = torch.full((len(routing.experts_M), 8, 2, weights.channels), float("nan"), device="cuda")
    gate_up(x, weights, routing, inter_MCF=space.inter_MCF, sums=sums)
    errors = {"gate and up": relative(sums[:tiles][live], gate_up_sums_ref(x, weights, expected_routing)[:tiles][live])}
    assert bool(sums[:tiles][~live].isnan().all()), "a dead column was written"

    gate_up(x, weights, routing, inter_MCF=space.inter_MCF)
    channels_ref = gate_up_ref(x, weights, expected_routing)
    errors["channels (bf16)"] = beyond_neighbours(space.inter_MCF[:tiles][live], channels_ref[:tiles][live])
    y = torch.full((num_tokens, shape.hidden), float("nan"), device="cuda")
    down(space.inter_MCF, weights, routing, partials_RD=space.partials_RD, y_TD=y)
    exact_inter = torch.where(live[..., None], space.inter_MCF[:tiles], 0.0)
    errors["down"] = relative(y, down_ref(exact_inter, weights, expected_routing))
    wrong = []
    for i in range(REPEATS):
        poison(space)
        gate_up(x, weights, routing, inter_MCF=space.inter_MCF)
        again = torch.full_like(y, float("nan"))
        down(space.inter_MCF, weights, routing, partials_RD=space.partials_RD, y_TD=again)
        wrong += [] if torch.equal(again, y) else [i]
    assert not wrong, f"runs {wrong} of {REPEATS} of the two products differ from the first"

    layer = Experts(weights, workspace=space)
    results = []
    for _ in range(REPEATS):
        poison(space)
        results.append(layer(x, routing, y_TD=torch.full_like(y, float("nan"))).clone())
    layer.check_fault()
    errors["layer"] = relative(results[0], down_ref(exact_inter, weights, expected_routing))
    wrong = [i for i, result in enumerate(results) if not torch.equal(result, y)]
    assert not wrong, f"runs {wrong} of {REPEATS} of the layer differ from its two products"
    for token in range(num_tokens):
        only = torch.full_like(ids, -1)
        only[token] = ids[token]
        poison(space)
        alone = layer(x, route(only, token_weights, num_experts=experts), y_TD=torch.full_like(y, float("nan")))
        assert torch.equal(alone[token], y[token]), f"token {token} depends on its neighbours"
        assert not bool(alone[torch.arange(num_tokens) != token].any()), "a dead token has an output"
    check_stack(shape, num_tokens=num_tokens, seed=seed)
    return errors


def check_stack(shape: Shape, *, num_tokens: int, seed: int) -> None:
    """Three layers in one launch, bitwise the same as each in its own."""
    count, experts = 3, 2 * shape.per_token
    checkpoint = checkpoint_of(shape, seed=seed, experts=count * experts, device="cuda")
    weights = checkpoint.pack()
    x = torch.stack([activations(num_tokens, shape.hidden, seed=seed + i, device="cuda") for i in range(count)])
    routings = [route(*(t.cuda() for t in routed(num_tokens, shape, seed=seed + i, experts=experts)), num_experts=experts) for i in range(count)]
    space = Workspace.of(weights, num_tokens=num_tokens, num_experts_per_token=shape.per_token, device=x.device)
    poison(space)
    y = torch.full((count, num_tokens, shape.hidden), float("nan"), device="cuda")
    together = Experts(weights, workspace=space, num_layers=count)
    together(x, stack_routings(routings), y_TD=y)
    together.check_fault()
    for i in range(count):
        slice_ = slice(i * experts, (i + 1) * experts)
        one = replace(checkpoint, **{name: value[slice_] for name, value in vars(checkpoint).items() if isinstance(value, torch.Tensor)})
        poison(space)
        alone = Experts(one.pack(), workspace=space)(x[i], routings[i], y_TD=torch.full_like(y[i], float("nan")))
        assert torch.equal(alone, y[i]), f"layer {i} of a stack differs from the layer alone"
