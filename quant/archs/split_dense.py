"""A mixture of experts that computes what a dense Llama computes: its MLPs cut into experts, several times over.

An MLP is a sum over its F intermediate units, so it may be cut into `shards` groups of units whose outputs add up to the whole. Every
group becomes an expert, and the set of groups exists `replicas` times: expert r * shards + s is shard s of replica r. The `shards`
experts of one replica share one router row, so that top-k with k = shards always takes one whole replica. Their equal logits give
equal weights 1 / k once Mixtral has renormalised them, which a down_proj times k undoes. All else is Mixtral's as it is Llama's:
attention, norms, rotary positions, tied embedding.

The row of a replica is a random direction without its part along the mean router input, so that no replica is preferred on average.
Rows are centred over the replicas: adding one vector to all rows changes no choice, and with two replicas it makes the rows opposite,
so that a tie, which could mix two replicas, needs a logit of exactly zero.

Legend: D hidden, F intermediate, E experts, R replicas, T tokens.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, MixtralConfig

from ...kernels.mx import MX_BLOCK_SIZE

SAME_IN_MIXTRAL = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings",
    "initializer_range", "rms_norm_eps", "pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings", "attention_dropout", "rope_parameters")


class RouterInputs(NamedTuple):
    """What one layer's router would see: the mean and the mean square length of its inputs."""

    mean_D: Tensor        # fp64
    square_length: float


def check_splittable(config: Any, *, shards: int, where: str) -> None:
    """ValueError when the model of a config cannot be cut into `shards` experts a layer."""
    if config.model_type != "llama":
        raise ValueError(f"source: {where}: model_type must be llama, a dense model that Mixtral's attention can reproduce; got {config.model_type!r}. "
                         "Give a dense Llama-class model.")
    for bias in ("attention_bias", "mlp_bias"):
        if getattr(config, bias, False):
            raise ValueError(f"source: {where}: {bias} must be false: Mixtral's layers have no biases; got true. Give a model without them.")
    width = config.intermediate_size
    if width % shards:
        raise ValueError(f"shards: must divide the model's intermediate_size; got {shards} and {width}. Choose a divisor.")
    if width // shards % MX_BLOCK_SIZE:
        raise ValueError(f"shards: intermediate_size / shards must be a multiple of {MX_BLOCK_SIZE}, one MX block, or the experts cannot be quantized; "
                         f"got {width} / {shards} = {width // shards}. Choose fewer shards.")


@torch.no_grad()
def router_inputs(dense: nn.Module, *, rows: Sequence[Tensor]) -> list[RouterInputs]:
    """The inputs of every layer's MLP over token rows, which the routers will see, averaged."""
    layers: Any = dense.model.layers  # type: ignore[union-attr]
    config: Any = dense.config
    sums = [torch.zeros(config.hidden_size, dtype=torch.float64) for _ in layers]
    squares, tokens = [0.0] * len(layers), sum(len(row) for row in rows)

    def hook(index: int) -> Any:
        def add(module: nn.Module, args: Any, output: Tensor) -> None:
            values_TD = output.flatten(0, -2).double().cpu()
            sums[index] += values_TD.sum(0)
            squares[index] += float(values_TD.square().sum())
        return add

    handles = [layer.post_attention_layernorm.register_forward_hook(hook(i)) for i, layer in enumerate(layers)]
    try:
        for row in rows:
            dense.model(input_ids=row[None], use_cache=False)  # type: ignore[operator]
    finally:
        for handle in handles:
            handle.remove()
    return [RouterInputs(mean_D=s / tokens, square_length=q / tokens) for s, q in zip(sums, squares, strict=True)]


def router_rows(inputs: RouterInputs, *, replicas: int, generator: torch.Generator) -> Tensor:
    """[R, D] fp32: a row of one length a replica, orthogonal to the mean input; two replicas get opposite rows.

    Units: scaled so that the logits of inputs without a preferred direction would have variance 1.
    """
    rows_RD = torch.randn(replicas, inputs.mean_D.numel(), generator=generator, dtype=torch.float64)
    rows_RD -= rows_RD.mean(0)
    unit_D = nn.functional.normalize(inputs.mean_D, dim=0)
    rows_RD -= (rows_RD @ unit_D)[:, None] * unit_D
    variance_of_a_component = inputs.square_length / inputs.mean_D.numel()
    scaled_RD: Tensor = (nn.functional.normalize(rows_RD, dim=1) / variance_of_a_component**0.5).float()
    return scaled_RD


@torch.no_grad()
def mixtral_of(dense: nn.Module, *, shards: int, replicas: int, rows_RD: Sequence[Tensor]) -> nn.Module:
    """The Mixtral in fp32 that computes what `dense` does; rows_RD: the router rows of every layer."""
    config: Any = dense.config
    mixtral = MixtralConfig(
        **{name: getattr(config, name) for name in SAME_IN_MIXTRAL}, intermediate_size=config.intermediate_size // shards,
        num_local_experts=shards * replicas, num_experts_per_tok=shards, sliding_window=None)
    model: nn.Module = AutoModelForCausalLM.from_config(mixtral, dtype=torch.float32)
    state: dict[str, Tensor] = {n: w for n, w in dense.state_dict().items() if ".mlp." not in n}
    layers: Any = dense.model.layers  # type: ignore[union-attr]
    for index, (layer, rows) in enumerate(zip(layers, rows_RD, strict=True)):
        gate_SFD, up_SFD = (w.weight.unflatten(0, (shards, -1)) for w in (layer.mlp.gate_proj, layer.mlp.up_proj))
        down_SDF = layer.mlp.down_proj.weight.unflatten(1, (shards, -1)).transpose(0, 1) * shards
        state[f"model.layers.{index}.mlp.gate.weight"] = rows.repeat_interleave(shards, dim=0)
        state[f"model.layers.{index}.mlp.experts.gate_up_proj"] = torch.cat((gate_SFD, up_SFD), dim=1).repeat(replicas, 1, 1)
        state[f"model.layers.{index}.mlp.experts.down_proj"] = down_SDF.repeat(replicas, 1, 1)
    model.load_state_dict(state)
    model.generation_config = dense.generation_config
    return model.eval()


@torch.no_grad()
def add_noise(model: nn.Module, *, shards: int, relative: float, generator: torch.Generator) -> None:
    """Move the experts of all replicas but the first by Gaussian noise of `relative` times each expert matrix's RMS."""
    for name, parameter in model.named_parameters():
        if ".mlp.experts." in name:
            for expert in parameter[shards:]:
                rms = expert.square().mean().sqrt()
                expert += relative * rms * torch.randn(expert.shape, generator=generator)


def routers(model: nn.Module) -> list[nn.Module]:
    """The router of every layer; its output is (logits, weights, expert ids [T, K])."""
    return [layer.mlp.gate for layer in model.model.layers]  # type: ignore[union-attr]
