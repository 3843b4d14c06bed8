"""From a checkpoint directory to what a persistent step runs: its shape and its packed weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..kernels.persistent import Heads, LayerMatrices, StepShape, StepWeights
from .graph import ModelGraph
from .weights import CheckpointTensors


def step_shape(graph: ModelGraph, *, taps: tuple[int, ...] = (), num_layers: int | None = None, max_length: int | None = None) -> StepShape:
    """The shape of a graph; with fewer layers or a shorter context if asked so. Its dense matrices are packed for rolled products: the faster form.

    Errors: NotImplementedError for sizes that no kernel is built for.
    """
    heads = Heads(num_heads=graph.num_heads, num_kv_heads=graph.num_kv_heads, head_dim=graph.head_dim, rms_eps=graph.rms_eps if graph.has_qk_norm else None)
    shape = StepShape(
        hidden_size=graph.hidden_size, num_layers=num_layers or graph.num_layers, heads=heads, num_experts=graph.num_experts,
        experts_per_token=graph.experts_per_token, expert_hidden=graph.expert_hidden, normalize_router_weights=graph.normalize_router_weights,
        rms_eps=graph.rms_eps, rope_theta=graph.rope_theta, vocab_size=graph.vocab_size, max_length=max_length or graph.max_length, taps=taps,
        rolled=True)
    for matrix in ("qkv", "out", "router", "head"):
        shape.dense_layout(matrix)
    return shape


def read_step_weights(directory: Path, *, graph: ModelGraph, config: dict[str, Any], shape: StepShape, device: str, programs: int) -> StepWeights:
    """Packed a layer at a time on `device`, for that many SMs. What is no expert is rounded to bf16 where it is wider.

    Errors: NotImplementedError for experts that are not in MXFP4; ValueError for tensors that are not the graph's.
    """
    tensors = CheckpointTensors(directory, graph=graph, config=config)

    def layers() -> Iterator[LayerMatrices]:
        for i in range(shape.num_layers):
            gate_up, down = (tensors.packed_experts(i, leaf) for leaf in ("gate_up_proj", "down_proj"))
            if gate_up is None or down is None:
                raise NotImplementedError(f"{directory}: the experts of layer {i} are not in MXFP4, and the persistent step reads nothing else. "
                                          "Export them (`kilotok export`), or take --executor reference.")
            dense: dict[str, Any] = {name: None if t is None else bf16(t) for name, t in tensors.dense(i).items()}
            yield LayerMatrices(**dense, gate_up_blocks=gate_up.blocks, gate_up_scales=gate_up.scales, down_blocks=down.blocks, down_scales=down.scales)

    def bf16(tensor: Tensor) -> Tensor:
        return tensor.to(torch.bfloat16)

    embedding, head = bf16(tensors.embedding), tensors.head
    return StepWeights.pack(shape, layers(), embedding_VD=embedding, norm_D=bf16(tensors.norm), head_VD=embedding if head is None else bf16(head),
                            device=device, programs=programs)
