"""The mixture-of-experts layer on packed MXFP4 experts: products for few tokens, which stream weights, and for many.

The decode kernels are built for sm_90 and say so elsewhere; the twins `x_ref` run anywhere. An example:

    import torch
    from kilotok.kernels.moe import Experts, Workspace, experts_ref, pack_experts, route

    E, D, F, T, K = 16, 2048, 768, 8, 8                      # experts, hidden, channels, tokens, experts a token
    codes = lambda rows, depth: torch.randint(0, 256, (E, rows, depth // 32, 16), dtype=torch.uint8)     # a checkpoint's blocks and scales
    scales = lambda rows, depth: torch.randint(110, 125, (E, rows, depth // 32), dtype=torch.uint8)
    weights = pack_experts(gate_up_blocks=codes(2 * F, D), gate_up_scales=scales(2 * F, D), down_blocks=codes(D, F), down_scales=scales(D, F),
                           order="split", activation="silu")  # tensor parallel: rank=, world_size=
    ids = torch.rand(T, E).argsort(-1)[:, :K].int()
    x, routing = torch.randn(T, D).bfloat16(), route(ids, torch.full((T, K), 1 / K), num_experts=E)
    y = experts_ref(x, weights, routing)                      # float64, anywhere; on a Hopper GPU (run on an H200), all of the above on "cuda":
    # workspace = Workspace.of(weights, num_tokens=T, num_experts_per_token=K, device=x.device)
    # Experts(weights, workspace=workspace)(x, routing, y_TD=torch.empty(T, D, device="cuda"))
"""

from .layer import Experts, Workspace, experts_ref
from .prefill import PrefillWeights, prefill, prefill_ref
from .product import Stages, down, down_ref, gate_up, gate_up_ref
from .routing import Routing, route, route_ref, stack_routings
from .weights import ExpertWeights, channels_of_rank, pack_experts

__all__ = [
    "ExpertWeights",
    "Experts",
    "PrefillWeights",
    "Routing",
    "Stages",
    "Workspace",
    "channels_of_rank",
    "down",
    "down_ref",
    "experts_ref",
    "gate_up",
    "gate_up_ref",
    "pack_experts",
    "prefill",
    "prefill_ref",
    "route",
    "route_ref",
    "stack_routings",
]
