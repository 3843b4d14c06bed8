"""The mixture-of-experts layer on packed MXFP4 experts: products for few tokens, which stream weights, and for many.

The decode kernels are built for sm_90 and say so elsewhere; the twins `x_ref` run anywhere.
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
