"""The DFlash draft head: a small transformer that fills a block of masked slots in one pass, reading the target's hidden states.

    ctx  = hidden_norm(fc(cat(tapped layer outputs)))              once per committed token
    x    = target.embed([anchor, MASK, ..., MASK])
    x   += o_proj(attend(q(norm(x)), [k(ctx); k(norm(x))], [v(ctx); v(norm(x))]))     every layer; ctx is not updated
    x   += mlp(norm(x))
    logits of slot n = target.lm_head(norm(x))[n]                  predicts the token AT the slot's position, no shift

The context's keys and values depend on nothing but its features, so they are computed once per token and kept. Training
runs many blocks of one sequence against the same context (`forward`); drafting runs one (`context`, `block`). What a slot sees is
`kernels.attention`'s plan in both. Tensor names and shapes are the published ones; embedding and head are the target's and are not stored.

Cost of a block: N rows through L layers, plus the visible context's keys and values, W rows a layer.

Legend: B sequences, A anchors a sequence, N draft block length, S context tokens, D hidden, F tapped features (taps * D),
H query heads, G key/value heads, K head dimension, V the target's vocabulary, U the draft's.
Source: DFlash, arXiv 2602.06036, and its published checkpoints.
"""

import contextlib
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..kernels.attention import BlockPlan, attend_blocks, block_plan
from .config import DraftConfig


class Context(NamedTuple):
    """Keys (rotated) and values (scaled) of the context tokens in one layer, [B, G, S, K] each."""

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
        return self.weight.to(x.dtype) * normed.to(x.dtype)   # so a bf16 block stays bf16 beside fp32 masters, as it is when served


class Rotation(NamedTuple):
    """Cosines and sines of some positions, [..., 1, rotary_dim / 2] each."""

    cos: Tensor
    sin: Tensor


def rotary_frequencies(config: DraftConfig) -> tuple[Tensor, float]:
    """(radians a position, fp64 [rotary_dim / 2], factor of cosine and sine). Scaled kinds are transformers' own, which computes them in fp32."""
    c, half, cpu = config, config.rotary_dim // 2, torch.device("cpu")   # real numbers also where the model is made on the meta device
    if c.rope_scaling is None:
        return c.rope_theta ** (-torch.arange(half, dtype=torch.float64, device=cpu) / half), 1.0
    hf: Any = Qwen3Config(hidden_size=c.hidden_size, num_attention_heads=c.num_attention_heads, head_dim=c.head_dim,
                          max_position_embeddings=c.max_position_embeddings)
    hf.rope_parameters = {"rope_theta": c.rope_theta, "partial_rotary_factor": c.partial_rotary_factor, **c.rope_scaling}
    with cpu:
        frequencies, factor = ROPE_INIT_FUNCTIONS[c.rope_scaling["rope_type"]](hf, cpu)
    return frequencies.double(), float(factor)


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """Rotary position embedding, halves layout (NeoX), of the first dimensions. Shapes: x [..., H, K] at the positions [...] of `by`."""
    half = by.cos.shape[-1]
    a, b = x[..., :half], x[..., half:2 * half]
    return torch.cat((a * by.cos - b * by.sin, b * by.cos + a * by.sin, x[..., 2 * half:]), dim=-1)


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
        self.attention_sink_bias = nn.Parameter(torch.zeros(config.num_attention_heads)) if config.attention_sinks else None

    def keys_values(self, x: Tensor, *, at: Rotation) -> tuple[Tensor, Tensor]:
        """Rotated keys and scaled values of tokens [..., D]: two tensors [..., G, K]."""
        shape = (*x.shape[:-1], self.config.num_key_value_heads, self.config.head_dim)
        keys = rotate(self.k_norm(self.k_proj(x).view(shape)), at)
        values = self.v_proj(x).view(shape)
        return keys, values if self.config.attention_value_scale == 1 else values * self.config.attention_value_scale

    def forward(self, x_BAND: Tensor, *, context: Context, plan: BlockPlan, at: Rotation) -> Tensor:
        c = self.config
        query = rotate(self.q_norm(self.q_proj(x_BAND).view(*x_BAND.shape[:-1], c.num_attention_heads, c.head_dim)), at)
        keys, values = self.keys_values(x_BAND, at=at)
        mixed = attend_blocks(query, context_keys_BGSK=context.keys, context_values_BGSK=context.values, keys_BANGK=keys, values_BANGK=values, plan=plan,
                              sinks_H=self.attention_sink_bias)
        output: Tensor = self.o_proj(mixed.flatten(-2))
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

    def forward(self, x_BAND: Tensor, *, context: Context | Tensor, context_at: Rotation | None, plan: BlockPlan, at: Rotation) -> Tensor:
        """context: the layer's keys and values, or ctx [B, S, D] at the positions of `context_at`, which gives them."""
        if not isinstance(context, Context):
            assert context_at is not None
            context = self.context(context, at=context_at)
        x_BAND = x_BAND + self.self_attn(self.input_layernorm(x_BAND), context=context, plan=plan, at=at)
        x_BAND = x_BAND + self.mlp(self.post_attention_layernorm(x_BAND))
        return x_BAND

    def context(self, ctx_BSD: Tensor, *, at: Rotation) -> Context:
        """Keys and values of context tokens; what they see of the layer is its two projections and the key's norm."""
        keys, values = self.self_attn.keys_values(ctx_BSD, at=at)
        return Context(keys.transpose(1, 2), values.transpose(1, 2))


class Blocks(NamedTuple):
    """Where the blocks of a batch of (packed) rows sit.

    anchors_BA: row index of each anchor, ascending where it counts; ids_BA: its token; positions_BS: int64 of the row's tokens, inside their
    document, which begins at position 0.
    """

    anchors_BA: Tensor
    ids_BA: Tensor
    positions_BS: Tensor


class DraftModel(nn.Module):
    """The draft head's trained tensors, 11 a layer and 3, under their published names; options add theirs."""

    draft_ids: Tensor | None
    own_head: Tensor | None
    own_embedding: Tensor | None

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.num_features, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mask_embedding = nn.Parameter(torch.zeros(config.hidden_size)) if config.mask_embedding else None
        # target ids of the tokens it can propose, ascending; the logits have one column for each
        self.register_buffer("draft_ids", None if config.draft_vocab_size is None else torch.arange(config.draft_vocab_size))
        # of a checkpoint that brings its own head or embedding; else both are the target's
        self.register_buffer("own_head", None)
        self.register_buffer("own_embedding", None)
        self._frequencies, self._rotary_factor = rotary_frequencies(config)

    @torch.no_grad()
    def initialize(self, *, generator: torch.Generator, final_norm_D: Tensor, mask_row_D: Tensor | None = None) -> None:
        """Random weights of standard deviation 0.02 in matrices (GPT-2's), ones in norms, zeros in sinks, the target's own weight in the final norm.

        The target's head was trained behind that norm; behind ones its logits can be far too large (tied embeddings). A trained mask
        embedding starts from the row of the target's embedding that it replaces.
        """
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02, generator=generator)
            elif name.endswith("attention_sink_bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.ones_(parameter)
        self.norm.weight.copy_(final_norm_D)
        if self.mask_embedding is not None:
            if mask_row_D is None:
                raise ValueError("initialize: a trained mask embedding starts from the embedding's row of the mask token; got none.")
            self.mask_embedding.copy_(mask_row_D)

    def context(self, features_BSF: Tensor, *, positions_BS: Tensor) -> list[Context]:
        """Keys and values of context tokens for every layer, from the target's tapped features.

        Shapes: features_BSF [B, S, F]; positions_BS int64, inside the document. Returns one Context a layer.
        """
        ctx_BSD = self.hidden_norm(self.fc(features_BSF))
        at = self.rotation(positions_BS, dtype=ctx_BSD.dtype)
        return [layer.context(ctx_BSD, at=at) for layer in self.layers]  # type: ignore[operator, misc]

    def block(self, block_BAND: Tensor, *, contexts: list[Context], plans: list[BlockPlan], positions_BA: Tensor) -> Tensor:
        """Hidden states of all slots, ready for the target's head, from the context's keys and values: the form that drafting uses.

        Shapes: block_BAND, embeddings of [anchor, MASK, ...]; positions_BA int64 of the anchors, inside the document; a plan a layer.
            Returns [B, A, N, D]; slot n predicts the token at anchor + n, slot 0 means nothing.
        """
        at = self.rotation(self._slot_positions(positions_BA), dtype=block_BAND.dtype)
        x = block_BAND
        with torch.compiler.set_stance("force_eager"):   # compiled layers are for training's fixed shapes
            for layer, context, plan in zip(self.layers, contexts, plans, strict=True):
                x = layer(x, context=context, context_at=None, plan=plan, at=at)
        hidden: Tensor = self.norm(x)
        return hidden

    def forward(self, features_BSF: Tensor, *, blocks: Blocks, embedding_VD: Tensor, flex: bool = False) -> Tensor:
        """The training form: many blocks of each (packed) row in one pass. `block` at work computes the same.

        Shapes: features_BSF, target features of the row; embedding_VD, the target's. flex: attention by block mask on a GPU, which takes rows
            and slots in multiples of 128; else dense.
        Returns hidden states [B, A, N, D].
        """
        c = self.config
        plans = self.plans(blocks, flex=flex)
        ctx_BSD = self.hidden_norm(self.fc(features_BSF))
        x = self.embed(blocks.ids_BA, embedding_VD=embedding_VD).to(ctx_BSD.dtype)
        positions_BA = blocks.positions_BS.gather(1, blocks.anchors_BA)
        at, context_at = self.rotation(self._slot_positions(positions_BA), dtype=x.dtype), self.rotation(blocks.positions_BS, dtype=x.dtype)
        with contextlib.nullcontext() if flex else torch.compiler.set_stance("force_eager"):
            for i, layer in enumerate(self.layers):
                x = layer(x, context=ctx_BSD, context_at=context_at, plan=plans[c.window_of(i), c.is_causal(i)], at=at)
        hidden: Tensor = self.norm(x)
        return hidden

    def compile_layers(self) -> None:
        """Compile the layers for `forward` with a block mask: norms, rotations and activations become few kernels. All layers of a kind share the code."""
        for layer in self.layers:
            layer.compile(dynamic=False)

    def plans(self, blocks: Blocks, *, flex: bool) -> dict[tuple[int | None, bool], BlockPlan]:
        """The attention plan of every kind of layer, by (window, causal)."""
        c = self.config
        anchors, length = blocks.anchors_BA, blocks.positions_BS.shape[1]
        firsts = anchors - blocks.positions_BS.gather(1, anchors)
        kinds = {(c.window_of(i), c.is_causal(i)) for i in range(c.num_hidden_layers)}
        return {(window, causal): block_plan(anchors, firsts_BA=firsts, block_size=c.block_size, length=length, window=window, causal=causal, flex=flex)
                for window, causal in kinds}

    def embed(self, anchor_ids_BA: Tensor, *, embedding_VD: Tensor) -> Tensor:
        """Embeddings of [anchor, MASK, ..., MASK], [B, A, N, D]: slot 0 holds the anchor's own token."""
        c = self.config
        embedding_VD = embedding_VD if self.own_embedding is None else self.own_embedding
        anchor = F.embedding(anchor_ids_BA, embedding_VD).unsqueeze(2)
        mask = embedding_VD[c.mask_token_id] if self.mask_embedding is None else self.mask_embedding.to(embedding_VD.dtype)
        block = torch.cat((anchor, mask.expand(*anchor_ids_BA.shape, c.num_drafts, -1)), dim=2)
        return block if c.input_embedding_scale == 1 else block * c.input_embedding_scale

    def head_rows(self, head_VD: Tensor) -> Tensor:
        """The rows of the target's head that give its logits, or its own, [U, D]."""
        if self.own_head is not None:
            own: Tensor = self.own_head
            return own
        return head_VD if self.draft_ids is None else head_VD[self.draft_ids]

    def logits(self, hidden: Tensor, *, head_UD: Tensor) -> Tensor:
        """Logits [..., U] of hidden states [..., D], scaled and capped as configured."""
        c = self.config
        logits = F.linear(hidden.to(head_UD.dtype), head_UD)
        if c.output_multiplier != 1:
            logits = logits * c.output_multiplier
        return logits if c.logit_softcap is None else c.logit_softcap * torch.tanh(logits / c.logit_softcap)

    def rotation(self, positions: Tensor, *, dtype: torch.dtype) -> Rotation:
        """Angles in fp64, so that position 100,000 is as exact as position 1; then rounded to `dtype`."""
        self._frequencies = self._frequencies.to(positions.device)
        angles = (positions.double().unsqueeze(-1) * self._frequencies).unsqueeze(-2)
        return Rotation((angles.cos() * self._rotary_factor).to(dtype), (angles.sin() * self._rotary_factor).to(dtype))

    def _slot_positions(self, positions_BA: Tensor) -> Tensor:
        return positions_BA.unsqueeze(-1) + torch.arange(self.config.block_size, device=positions_BA.device)
