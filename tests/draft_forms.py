"""The draft head three ways, for tests to hold to each other: trained on packed rows, at work, and the published computation written out."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from conftest import save_tiny_moe
from tolerances import Bound
from torch import Tensor, nn

from kilotok.dflash.config import DraftConfig
from kilotok.dflash.context import Taps
from kilotok.dflash.drafter import DFlashDrafter
from kilotok.dflash.hf_target import HFTarget
from kilotok.dflash.model import Blocks, DraftModel
from kilotok.quant.archs import load_model
from kilotok.train.distill_data import DOCUMENTS, IDS, POSITIONS, pack_row
from kilotok.train.responses import Response
from kilotok.train.slot_pass import run_target

TAPS = (2, 0)      # of four layers; the order is that of the features
WINDOW = 9
MASK, PAD = 4090, 0
WHY = "the same terms, summed over a packed row or over the cache of one document"
BOUNDS = {torch.float64: Bound(maximum=1e-10, rms=1e-10, reason=WHY), torch.float32: Bound(maximum=1e-4, rms=1e-4, reason=WHY)}
LENGTHS = (23, 1, 17, 31)   # with a prompt of 5 at most; 23 and 31 are longer than the window and two blocks
ROWS = {"one document": ([(3,)], 31), "packed": ([(0, 1, 2, 3)], 72), "padded": ([(2, 0)], 57), "two rows": ([(0, 3, 2), (3, 1)], 80)}
# how many committed tokens the target reads at a time: a prompt longer than the window, then rounds of 1 to 8
CHUNKS = {"token by token": (1,), "rounds": (12, 1, 8, 2, 1, 5)}


def document(number: int) -> Response:
    ids = torch.randint(4, MASK, (LENGTHS[number],), generator=torch.Generator().manual_seed(100 + number)).tolist()
    return Response(prompt=tuple(ids[:5]), response=tuple(ids[5:]))


def ids_of(number: int) -> list[int]:
    d = document(number)
    return [*d.prompt, *d.response]


def make_target(directory: Path, *, dtype: torch.dtype) -> nn.Module:
    """Four random layers whose norms are not ones, so that before and after the final norm are different things."""
    model = load_model(save_tiny_moe(directory, num_hidden_layers=4), dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5, generator=generator)
    model.set_experts_implementation("eager")   # type: ignore[operator]  # grouped_mm has no float64
    return model.to(dtype)


def make_draft(target: nn.Module, *, window: int | None, taps: Sequence[int] = TAPS, **options: Any) -> DraftModel:
    """Random weights large enough for sharp attention, and norms that are not ones."""
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
             "vocab_size": 4096, "num_target_layers": 4, "mask_token_id": MASK, "rope_theta": 1e4}
    draft = DraftModel(DraftConfig(**{**shape, "target_layer_ids": tuple(taps), "sliding_window": window, **options}))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        if draft.draft_ids is not None:
            draft.draft_ids.copy_(torch.randperm(4096, generator=generator)[:len(draft.draft_ids)].sort().values)
        for parameter in draft.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=1.5 * parameter.shape[1] ** -0.5, generator=generator)
            else:
                parameter.uniform_(0.5, 1.5, generator=generator)
    return draft.to(dtype_of(target)).requires_grad_(False)


def dtype_of(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


def embedding_of(target: nn.Module) -> Tensor:
    return target.get_input_embeddings().weight.detach()   # type: ignore[operator]


# --- the three ways ---


def train_form(draft: DraftModel, target: nn.Module, rows: Sequence[Sequence[int]], *, length: int, each_anchor_alone: bool = False,
               taps: Sequence[int] = TAPS, one_document: bool = False) -> dict[tuple[int, int, int], Tensor]:
    """(row, document, position) -> hidden states [7, D] of the masked slots, for every position but a document's first."""
    batch = torch.stack([pack_row([document(d) for d in row], length=length, pad_id=PAD) for row in rows])
    ids, documents, positions = batch[:, IDS], batch[:, DOCUMENTS], batch[:, POSITIONS]
    features, _ = run_target(target, ids, documents_BS=documents, positions_BS=positions, layer_ids=tuple(taps))
    valid = positions > 0
    if one_document:   # a block's rotations depend on differences only, so this changes nothing but what it sees
        positions = torch.arange(length).expand_as(positions)
    index = torch.stack([v.nonzero().flatten()[torch.arange(int(valid.sum(1).max())) % int(v.sum())] for v in valid])   # the shorter row comes round again
    columns = index.split(1, dim=1) if each_anchor_alone else [index]
    hidden = torch.cat([draft(features, blocks=Blocks(anchors_BA=c, ids_BA=ids.gather(1, c), positions_BS=positions),
                              embedding_VD=embedding_of(target)) for c in columns], dim=1)
    found = {}
    for b, row in enumerate(rows):
        starts = [sum(LENGTHS[d] for d in row[:n]) for n in range(len(row))]
        for a, i in enumerate(index[b].tolist()):
            n = max(n for n, s in enumerate(starts) if s <= i)
            found[b, row[n], i - starts[n]] = hidden[b, a, 1:]
    return found


@functools.cache
def committed_features(target: nn.Module, number: int, *, chunks: Sequence[int], taps: Sequence[int]) -> list[Tensor]:
    """Features of a document as a round after the other commits it; the target reads wrong proposals as well and is rewound."""
    ids, found = ids_of(number), []
    with Taps(target, layer_ids=taps) as entered:
        reader = HFTarget(target, taps=entered, max_length=512)
        start = step = 0
        while start + (size := chunks[min(step, len(chunks) - 1)]) < len(ids):
            found.append(reader.read([*ids[start:start + size], *([7] * (8 - size))]).features_TF[:size])
            start, step = start + size, step + 1
            reader.rewind(start)
    return found


def serve_form(draft: DraftModel, target: nn.Module, number: int, *, chunks: Sequence[int] = (1,), head_VD: Tensor | None = None) -> dict[int, Tensor]:
    """position -> logits [7, V] of the drafter when the anchor is there; without a head its hidden states [7, D]."""
    embedding, found, start = embedding_of(target), {}, 0
    drafter = DFlashDrafter(draft, embedding_VD=embedding, head_VD=torch.eye(64, dtype=embedding.dtype) if head_VD is None else head_VD)
    for features in committed_features(target, number, chunks=chunks, taps=draft.config.target_layer_ids):
        drafter.observe(features)
        start += len(features)
        found[start] = drafter.logits(ids_of(number)[start])
    return found


def frequencies(c: DraftConfig) -> tuple[Tensor, float]:
    """(radians a position, fp64, of each pair of dimensions that turn; factor of both) by the formulas of the papers.

    Source: YaRN, arXiv 2309.00071, equations 18-23; position interpolation, arXiv 2306.15595.
    """
    size = int(c.head_dim * c.partial_rotary_factor)
    plain = c.rope_theta ** (-torch.arange(0, size, 2).double() / size)
    if c.rope_scaling is None:
        return plain, 1.0
    s = c.rope_scaling
    if s["rope_type"] == "linear":
        return plain / s["factor"], 1.0
    assert s["rope_type"] == "yarn"

    def turning(turns: float) -> float:
        """The pair, counted in halves, that turns so often within the original length."""
        return size * math.log(s["original_max_position_embeddings"] / (turns * 2 * math.pi)) / (2 * math.log(c.rope_theta))

    low, high = max(math.floor(turning(s["beta_fast"])), 0), min(math.ceil(turning(s["beta_slow"])), size - 1)
    stretched = ((torch.arange(size // 2).double() - low) / (high - low)).clamp(0, 1)
    return plain / s["factor"] * stretched + plain * (1 - stretched), 0.1 * math.log(s["factor"]) + 1


MISTAKES = ("MASK in the anchor slot", "position off by one", "anchor leaked into the context", "the token after the anchor leaked", "causal in the block",
            "rope theta a hundredfold")
MISTAKES_WITH_OPTIONS = {"sinks ignored": {"attention_sinks": True}, "value scale ignored": {"attention_value_scale": 0.612},
                         "mask vector ignored": {"mask_embedding": True}, "embedding scale ignored": {"input_embedding_scale": 3.0},
                         "partial rotary ignored": {"partial_rotary_factor": 0.5},
                         "block not causal": {"causal": "always"}}


@functools.cache
def features_in_one_pass(target: nn.Module, number: int, *, taps: Sequence[int]) -> Tensor:
    with Taps(target, layer_ids=taps) as entered, torch.no_grad():
        target(torch.tensor([ids_of(number)]))
        return entered.take()[0]


def published(draft: DraftModel, target: nn.Module, number: int, position: int, *, mistake: str = "") -> Tensor:
    """Hidden states [N - 1, D], one document and one slot at a time, from the published description; `mistake` names what is done wrong."""
    c, w, ids = draft.config, draft.state_dict(), ids_of(number)
    if mistake == "rope theta a hundredfold":
        c = dataclasses.replace(c, rope_theta=c.rope_theta * 100)
    if mistake == "partial rotary ignored":
        c = dataclasses.replace(c, partial_rotary_factor=1.0)
    features = features_in_one_pass(target, number, taps=c.target_layer_ids)
    turns, factor = frequencies(c)

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + c.rms_norm_eps).sqrt() * w[f"{name}.weight"]

    def rope(x: Tensor, places: Tensor) -> Tensor:
        """x [T, H, K]: of the dimensions that turn, the pair (i, i + half) is a complex number turned by place * frequency."""
        angle = places[:, None, None] * turns
        turned = torch.complex(*x.double()[..., :2 * len(turns)].chunk(2, dim=-1)) * torch.polar(torch.full_like(angle, factor), angle)
        return torch.cat((turned.real, turned.imag, x[..., 2 * len(turns):].double()), dim=-1).to(x.dtype)

    context = torch.arange(position + {"anchor leaked into the context": 1, "the token after the anchor leaked": 2}.get(mistake, 0))
    slots = torch.arange(c.block_size) + position + (mistake == "position off by one")
    ctx = norm(features[context] @ w["fc.weight"].T, "hidden_norm")
    x = embedding_of(target)[[MASK if mistake == "MASK in the anchor slot" else ids[position], *[MASK] * (c.block_size - 1)]].clone()
    if c.mask_embedding and mistake != "mask vector ignored":
        x[1:] = w["mask_embedding"]
    if mistake != "embedding scale ignored":
        x = x * c.input_embedding_scale
    for i in range(c.num_hidden_layers):
        at = f"layers.{i}.self_attn"
        h = norm(x, f"layers.{i}.input_layernorm")
        q = rope(norm((h @ w[f"{at}.q_proj.weight"].T).view(len(slots), -1, c.head_dim), f"{at}.q_norm"), slots)
        both = torch.cat((ctx, h))
        k = rope(norm((both @ w[f"{at}.k_proj.weight"].T).view(len(both), -1, c.head_dim), f"{at}.k_norm"), torch.cat((context, slots)))
        v = (both @ w[f"{at}.v_proj.weight"].T).view(len(both), -1, c.head_dim)
        is_full = c.sliding_window is None or i in c.full_attention_layers
        is_causal = c.causal == "always" or (c.causal == "sliding" and not is_full)
        is_causal = (is_causal or mistake == "causal in the block") and mistake != "block not causal"
        mixed = []
        for n, slot in enumerate(slots.tolist()):
            seen = [s for s in context.tolist() if is_full or slot - s < c.sliding_window]
            seen += [len(context) + m for m in range(len(slots)) if m <= n or not is_causal]
            heads = []
            for head in range(c.num_attention_heads):
                g = head * c.num_key_value_heads // c.num_attention_heads
                weights = (k[seen, g] @ q[n, head] * c.head_dim**-0.5).exp()
                sink = w[f"{at}.attention_sink_bias"][head].exp() if c.attention_sinks and mistake != "sinks ignored" else 0.0
                heads.append(weights / (weights.sum() + sink) @ v[seen, g])
            mixed.append(torch.cat(heads))
        scale = 1.0 if mistake == "value scale ignored" else c.attention_value_scale
        x = x + scale * torch.stack(mixed) @ w[f"{at}.o_proj.weight"].T
        h = norm(x, f"layers.{i}.post_attention_layernorm")
        gate = h @ w[f"layers.{i}.mlp.gate_proj.weight"].T
        x = x + (gate * gate.sigmoid() * (h @ w[f"layers.{i}.mlp.up_proj.weight"].T)) @ w[f"layers.{i}.mlp.down_proj.weight"].T
    return norm(x, "norm")[1:]


def published_logits(draft: DraftModel, hidden: Tensor, *, head_VD: Tensor) -> Tensor:
    """[N - 1, V]: -inf for tokens outside a reduced vocabulary."""
    c = draft.config
    logits = c.output_multiplier * (hidden @ head_VD.T)
    if c.logit_softcap is not None:
        logits = c.logit_softcap * (logits / c.logit_softcap).tanh()
    if c.draft_vocab_size is not None:
        outside = torch.ones(len(head_VD), dtype=torch.bool)
        outside[draft.state_dict()["draft_ids"]] = False
        logits = logits.masked_fill(outside, -math.inf)
    return logits


def deviation(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())
