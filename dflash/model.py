"""The DFlash draft head: a small transformer that fills a block of masked slots in one pass, reading the target's hidden states.

    ctx  = hidden_norm(fc(cat(tapped layer outputs)))              once per committed token
    x    = target.embed([anchor, MASK, ..., MASK])
    x   += o_proj(attend(q(norm(x)), [k(ctx); k(norm(x))], [v(ctx); v(norm(x))]))     every layer; ctx is not updated
    x   += mlp(norm(x))
    logits of slot n = target.lm_head(norm(x))[n]                  predicts the token AT the slot's position, no shift

The context's keys and values depend on nothing but its features, so they are computed once per token and kept. Training
runs many blocks of one sequence against the same context; drafting runs one. Both call `forward`, and `mask.py` says what a
slot sees. Tensor names and shapes are the published ones; embedding and head are the target's and are not stored.

Cost of a block: N rows through L layers, plus the visible context's keys and values, W rows a layer.

Legend: B sequences, A anchors a sequence, N draft block length, S context tokens, D hidden, F tapped features (taps * D),
H query heads, G key/value heads, K head dimension.
Source: DFlash, arXiv 2602.06036, and its published checkpoints.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .config import DraftConfig
from .mask import context_visible


class Context(NamedTuple):
    """Keys (rotated) and values of the context tokens in one layer, [B, G, S, K] each."""

    keys: Tensor
    values: Tensor


class RMSNorm(nn.Module):
    """x / rms(x) * weight, the mean of squares in fp32 (or wider, if x is)."""

    def __init__(self, size: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class Rotation(NamedTuple):
    """Cosines and sines of some positions, [..., 1, K / 2] each."""

    cos: Tensor
    sin: Tensor


def rotation(positions: Tensor, *, head_dim: int, theta: float, dtype: torch.dtype) -> Rotation:
    """Angles in fp64, so that position 100,000 is as exact as position 1; then rounded to `dtype`."""
    half = head_dim // 2
    frequencies = theta ** (-torch.arange(half, device=positions.device, dtype=torch.float64) / half)
    angles = (positions.double().unsqueeze(-1) * frequencies).unsqueeze(-2)
    return Rotation(angles.cos().to(dtype), angles.sin().to(dtype))


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """Rotary position embedding, halves layout (NeoX). Shapes: x [..., H, K] at the positions [...] of `by`."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * by.cos - b * by.sin, b * by.cos + a * by.sin), dim=-1)


class Attention(nn.Module):
    """Slots attend to the visible context and to their own block; the same projections serve both."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        d, k = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(d, config.num_attention_heads * k, bias=False)
        self.k_proj = nn.Linear(d, config.num_key_value_heads * k, bias=False)
        self.v_proj = nn.Linear(d, config.num_key_value_heads * k, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * k, d, bias=False)
        self.q_norm = RMSNorm(k, eps=config.rms_norm_eps)
        self.k_norm = RMSNorm(k, eps=config.rms_norm_eps)

    def keys_values(self, x: Tensor, *, at: Rotation) -> tuple[Tensor, Tensor]:
        """Rotated keys and values of tokens [..., D]: two tensors [..., G, K]."""
        shape = (*x.shape[:-1], self.config.num_key_value_heads, self.config.head_dim)
        keys = rotate(self.k_norm(self.k_proj(x).view(shape)), at)
        return keys, self.v_proj(x).view(shape)

    def forward(self, x_BAND: Tensor, *, context: Context, visible_BANS: Tensor, at: Rotation) -> Tensor:
        c = self.config
        batch, anchors, slots, _ = x_BAND.shape
        groups, repeat = c.num_key_value_heads, c.num_attention_heads // c.num_key_value_heads
        query = self.q_norm(self.q_proj(x_BAND).view(batch, anchors, slots, c.num_attention_heads, c.head_dim))
        query = rotate(query, at) * c.head_dim**-0.5
        own_keys, own_values = self.keys_values(x_BAND, at=at)
        # rows of one key/value head: every anchor, slot and query head of its group, against the same context
        query = query.view(batch, anchors, slots, groups, repeat, c.head_dim).permute(0, 3, 1, 2, 4, 5)              # B G A N R K
        to_context = (query.flatten(2, 4) @ context.keys.mT).view(*query.shape[:-1], -1)                                # B G A N R S
        to_context = to_context.masked_fill(~visible_BANS[:, None, :, :, None], -torch.inf)
        own_keys, own_values = (t.permute(0, 3, 1, 2, 4) for t in (own_keys, own_values))                                # B G A N K
        to_block = (query.flatten(3, 4) @ own_keys.mT).view(*query.shape[:-1], slots)                                    # B G A N R N
        scores = torch.cat((to_context, to_block), dim=-1)
        weights = scores.to(torch.promote_types(x_BAND.dtype, torch.float32)).softmax(-1).to(x_BAND.dtype)
        length = context.keys.shape[2]
        mixed = (weights[..., :length].flatten(2, 4) @ context.values).view(query.shape)
        mixed = mixed + (weights[..., length:].flatten(3, 4) @ own_values).view(query.shape)
        output: Tensor = self.o_proj(mixed.permute(0, 2, 3, 1, 4, 5).reshape(batch, anchors, slots, -1))
        return output


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class Layer(nn.Module):
    """Attention and MLP, both with a norm before and a residual around."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config)


class DraftModel(nn.Module):
    """The draft head's trained tensors, 11 a layer and 3, under their published names."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    @torch.no_grad()
    def initialize(self, *, generator: torch.Generator, final_norm_D: Tensor) -> None:
        """Random weights of standard deviation 0.02 in matrices (GPT-2's), ones in norms, the target's own weight in the final norm.

        The target's head was trained behind that norm; behind ones its logits can be far too large (tied embeddings).
        """
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02, generator=generator)
            else:
                nn.init.ones_(parameter)
        self.norm.weight.copy_(final_norm_D)

    def context(self, features_BSF: Tensor, *, positions_BS: Tensor) -> list[Context]:
        """Keys and values of context tokens for every layer, from the target's tapped features.

        Shapes: features_BSF [B, S, F]; positions_BS int64, inside the document. Returns one Context a layer.
        """
        ctx_BSD = self.hidden_norm(self.fc(features_BSF))
        at = self._rotation(positions_BS, dtype=ctx_BSD.dtype)
        contexts = []
        for layer in self.layers:
            keys, values = layer.self_attn.keys_values(ctx_BSD, at=at)  # type: ignore[operator, union-attr]
            contexts.append(Context(keys.transpose(1, 2), values.transpose(1, 2)))
        return contexts

    def forward(self, block_BAND: Tensor, *, contexts: list[Context], visible_BANS: Tensor, anchors_BA: Tensor) -> Tensor:
        """Hidden states of all slots, ready for the target's head.

        Shapes: block_BAND, embeddings of [anchor, MASK, ...]; visible_BANS bool; anchors_BA int64 positions inside the
            document. Returns [B, A, N, D]; slot n predicts the token at anchor + n, slot 0 means nothing.
        """
        positions_BAN = anchors_BA.unsqueeze(-1) + torch.arange(block_BAND.shape[2], device=block_BAND.device)
        at = self._rotation(positions_BAN, dtype=block_BAND.dtype)
        x = block_BAND
        for layer, context in zip(self.layers, contexts, strict=True):
            x = x + layer.self_attn(layer.input_layernorm(x), context=context, visible_BANS=visible_BANS, at=at)  # type: ignore[operator]
            x = x + layer.mlp(layer.post_attention_layernorm(x))  # type: ignore[operator]
        hidden: Tensor = self.norm(x)
        return hidden

    def _rotation(self, positions: Tensor, *, dtype: torch.dtype) -> Rotation:
        return rotation(positions, head_dim=self.config.head_dim, theta=self.config.rope_theta, dtype=dtype)


def draft_blocks(
    model: DraftModel, *, features_BSF: Tensor, positions_BS: Tensor, documents_BS: Tensor, anchor_index_BA: Tensor, anchor_ids_BA: Tensor,
    embedding_VD: Tensor,
) -> Tensor:
    """The training form: many blocks of each (packed) row in one pass.

    Shapes: features_BSF, target features of the row; positions_BS, documents_BS int64 (padding: a document of its own);
        anchor_index_BA, where in the row each anchor sits; anchor_ids_BA, its token; embedding_VD, the target's.
        Returns hidden states [B, A, N, D].
    """
    c = model.config
    anchors_BA = positions_BS.gather(1, anchor_index_BA)
    same_document_BAS = documents_BS.gather(1, anchor_index_BA).unsqueeze(-1) == documents_BS.unsqueeze(1)
    visible = context_visible(anchors_BA, block_size=c.block_size, context_positions_S=positions_BS, window=c.sliding_window)
    visible = visible & same_document_BAS.unsqueeze(2)
    contexts = model.context(features_BSF, positions_BS=positions_BS)
    block = block_embeddings(c, anchor_ids_BA, embedding_VD=embedding_VD)
    hidden: Tensor = model(block, contexts=contexts, visible_BANS=visible, anchors_BA=anchors_BA)
    return hidden


def block_embeddings(config: DraftConfig, anchor_ids_BA: Tensor, *, embedding_VD: Tensor) -> Tensor:
    """Embeddings of [anchor, MASK, ..., MASK], [B, A, N, D]: slot 0 holds the anchor's own token."""
    ids = anchor_ids_BA.unsqueeze(-1).repeat(1, 1, config.block_size)
    ids[..., 1:] = config.mask_token_id
    return F.embedding(ids, embedding_VD)
