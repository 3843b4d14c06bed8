"""The experts of one layer as the products read them, and a rank's part of them.

A rank of a tensor-parallel group has a slice of the experts' channels: rows of gate and up, columns of down. Down's columns come in
MX blocks of 32, so slices are whole blocks; where they do not divide evenly the first ranks have one block more.

Legend: E experts, D hidden, F expert channels (this rank's), G = 2F gate and up rows, Q MX blocks along the input.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from ..mx.format import MX_BLOCK_SIZE
from ..mx.layouts import MAX_STEPS, FragmentWeight, choose_layout, pack_fragments

Activation = Literal["silu", "clamped_swiglu"]
PairOrder = Literal["split", "interleaved"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
CLAMP_LIMIT = 7.0      # gpt-oss: gate at most 7, up within +-7,
CLAMP_ALPHA = 1.702    # (up + 1) * gate * sigmoid(1.702 * gate)


@dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """Gate and up rows paired by tile, down rows in order; biases fp32, gate before up."""

    gate_up: FragmentWeight            # [E, ...] of 2F x D
    down: FragmentWeight               # [E, ...] of D x F
    activation: Activation
    gate_up_bias_E2F: Tensor | None = None
    down_bias_ED: Tensor | None = None

    @property
    def num_experts(self) -> int:
        return self.gate_up.codes.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.down.layout.rows

    @property
    def channels(self) -> int:
        return self.down.layout.depth

    @property
    def bytes_per_expert(self) -> int:
        """What a step reads of one expert, pad included."""
        return self.gate_up.layout.num_bytes + self.down.layout.num_bytes


def channels_of_rank(num_channels: int, *, rank: int, world_size: int) -> slice:
    """The expert channels of one rank, in whole MX blocks."""
    if num_channels % MX_BLOCK_SIZE:
        raise ValueError(f"channels_of_rank: expert channels must be a multiple of {MX_BLOCK_SIZE}, one MX block of the down projection; got {num_channels}.")
    blocks = num_channels // MX_BLOCK_SIZE
    if not 0 <= rank < world_size or world_size > blocks:
        raise ValueError(f"channels_of_rank: rank must be in 0..world_size - 1, and world_size at most the {blocks} MX blocks of {num_channels} channels; "
                         f"got rank {rank} of {world_size}. Use fewer ranks.")
    each, more = divmod(blocks, world_size)
    start = rank * each + min(rank, more)
    return slice(start * MX_BLOCK_SIZE, (start + each + (rank < more)) * MX_BLOCK_SIZE)


def take_channels(gate_up: Tensor, down: Tensor, *, channels: slice, order: PairOrder) -> tuple[Tensor, Tensor]:
    """A rank's gate and up rows and down MX blocks, of blocks or of scales.

    Shapes: gate_up [E, 2F, Q, ...], down [E, D, F / 32, ...], still in checkpoint order.
    """
    half = gate_up.shape[1] // 2
    rows = torch.arange(half)[channels]
    index = torch.cat((rows, half + rows)) if order == "split" else torch.stack((2 * rows, 2 * rows + 1), dim=1).flatten()
    return gate_up[:, index.to(gate_up.device)], down[:, :, channels.start // MX_BLOCK_SIZE:channels.stop // MX_BLOCK_SIZE]


def pack_experts(
    *, gate_up_blocks: Tensor, gate_up_scales: Tensor, down_blocks: Tensor, down_scales: Tensor, order: PairOrder, activation: Activation,
    gate_up_bias_EG: Tensor | None = None, down_bias_ED: Tensor | None = None, rank: int = 0, world_size: int = 1, max_steps: int = MAX_STEPS,
) -> ExpertWeights:
    """Checkpoint order to what the products read.

    Shapes: gate_up_blocks uint8 [E, 2F, D / 32, 16], gate_up_scales [E, 2F, D / 32]; down_blocks [E, D, F / 32, 16], down_scales
        [E, D, F / 32]; gate_up_bias_EG [E, 2F] in the order of the rows, down_bias_ED [E, D]. F is the whole layer's.
    order: `split` has gate rows before up rows, `interleaved` (gpt-oss) has them in turn.
    max_steps: of `choose_layout`.
    Numerics: with several ranks only rank 0 adds the down bias, so that the sum over ranks has it once.
    """
    where = "pack_experts"
    if gate_up_scales.dim() != 3 or down_scales.dim() != 3:
        raise ValueError(f"{where}: scales must be [E, rows, blocks]; got {tuple(gate_up_scales.shape)} and {tuple(down_scales.shape)}.")
    experts, rows, _ = gate_up_scales.shape
    hidden, channels = down_scales.shape[1], down_scales.shape[2] * MX_BLOCK_SIZE
    if rows != 2 * channels or gate_up_scales.shape[2] * MX_BLOCK_SIZE != hidden or down_scales.shape[0] != experts:
        raise ValueError(f"{where}: gate_up must be [E, 2F, D / 32] and down [E, D, F / 32]; got {tuple(gate_up_scales.shape)} and "
                         f"{tuple(down_scales.shape)}.")
    for name, tensor, shape in (("gate_up_blocks", gate_up_blocks, (*gate_up_scales.shape, 16)), ("down_blocks", down_blocks, (*down_scales.shape, 16)),
                                ("gate_up_bias_EG", gate_up_bias_EG, (experts, rows)), ("down_bias_ED", down_bias_ED, (experts, hidden))):
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{where}: {name} must be {list(shape)}, as the scales are; got {list(tensor.shape)}.")
    if activation not in ACTIVATIONS or order not in get_args(PairOrder):
        raise ValueError(f"{where}: activation must be one of {', '.join(ACTIVATIONS)} and order split or interleaved; got {activation!r} and {order!r}.")
    mine = channels_of_rank(channels, rank=rank, world_size=world_size)
    gate_up_blocks, down_blocks = take_channels(gate_up_blocks, down_blocks, channels=mine, order=order)
    gate_up_scales, down_scales = take_channels(gate_up_scales, down_scales, channels=mine, order=order)
    gate_up_bias = None
    if gate_up_bias_EG is not None:
        pairs = gate_up_bias_EG.unflatten(1, (2, channels)) if order == "split" else gate_up_bias_EG.unflatten(1, (channels, 2)).mT
        gate_up_bias = pairs[:, :, mine].float().contiguous()
    down_bias = None
    if down_bias_ED is not None:
        down_bias = down_bias_ED.float().contiguous() if rank == 0 else torch.zeros_like(down_bias_ED, dtype=torch.float32)
    width = mine.stop - mine.start
    return ExpertWeights(
        gate_up=pack_fragments(gate_up_blocks, gate_up_scales, layout=choose_layout(2 * width, hidden, max_steps=max_steps), pairs=order),
        down=pack_fragments(down_blocks.contiguous(), down_scales.contiguous(), layout=choose_layout(hidden, width, max_steps=max_steps)),
        activation=activation, gate_up_bias_E2F=gate_up_bias, down_bias_ED=down_bias)
