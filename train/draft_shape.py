"""From a recipe's draft section and a target to the draft's configuration."""

import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..dflash.checkpoint import misfit, read_config, read_metadata
from ..dflash.config import DraftConfig, default_target_layer_ids
from ..dflash.model import DraftModel
from .distill_config import DraftShape
from .distill_data import IDS, SUPERVISED
from .recipe import RecipeError


def resolve_shape(shape: DraftShape, *, config: Any, tokenizer: Any) -> tuple[DraftConfig, str]:
    """(configuration, where its weights start from).

    Errors: ValueError for a draft to start from that has other shapes than the target, RecipeError for what cannot be filled in.
    """
    if shape.init_from is not None:
        c, origin = _shape_of_existing(Path(shape.init_from), config=config)
        _refuse_other_shape(shape, c)
        return c, origin
    mask = shape.mask_token_id if shape.mask_token_id is not None else tokenizer.mask_token_id
    if mask is None:
        raise RecipeError("draft.mask_token_id: the target's tokenizer has no mask token. Name an unused row of the embedding, such as the first after the "
                          f"tokenizer's own tokens ({len(tokenizer)}, if it is below the vocab_size of {config.vocab_size}).")
    taps = tuple(shape.target_layer_ids) if shape.target_layer_ids is not None else _default_taps(config.num_hidden_layers, shape.num_hidden_layers)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return DraftConfig(
        hidden_size=config.hidden_size, intermediate_size=_given_or(shape.intermediate_size, 3 * config.hidden_size),
        num_hidden_layers=shape.num_hidden_layers, num_attention_heads=_given_or(shape.num_attention_heads, config.num_attention_heads),
        num_key_value_heads=_given_or(shape.num_key_value_heads, config.num_key_value_heads), head_dim=_given_or(shape.head_dim, head_dim),
        vocab_size=config.vocab_size,
        target_layer_ids=taps, num_target_layers=config.num_hidden_layers, mask_token_id=mask, block_size=shape.block_size,
        sliding_window=shape.sliding_window, full_attention_layers=tuple(shape.full_attention_layers), causal=shape.causal, rope_theta=shape.rope_theta,
        partial_rotary_factor=shape.partial_rotary_factor, rope_scaling=shape.rope_scaling, rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings, attention_sinks=shape.attention_sinks, attention_value_scale=shape.attention_value_scale,
        output_multiplier=shape.output_multiplier, logit_softcap=_softcap(shape, config=config), mask_embedding=shape.mask_embedding,
        draft_vocab_size=shape.draft_vocab_size), "random weights"


def _given_or(value: int | None, default: int) -> int:
    return default if value is None else value


def _softcap(shape: DraftShape, *, config: Any) -> float | None:
    cap = getattr(config, "final_logit_softcapping", None) if shape.logit_softcap is None else shape.logit_softcap
    return cap if cap else None   # 0 is none


def _shape_of_existing(directory: Path, *, config: Any) -> tuple[DraftConfig, str]:
    c = read_config(directory)
    if (difference := misfit(c, config.to_dict())) is not None:
        name, mine, theirs = difference
        raise ValueError(f"draft.init_from: {directory} is for a target with {name} {mine}; this target has {theirs}. Start from random weights "
                         "(init_from: null) or from a draft of this model.")
    metadata = read_metadata(directory)
    target = (metadata or {}).get("target")
    made_for = f"distilled from weights {target['sha256'][:12]}" if target else "of unknown origin"
    return dataclasses.replace(c, num_target_layers=config.num_hidden_layers), f"warm start from {directory}, {made_for}"


def _refuse_other_shape(shape: DraftShape, existing: DraftConfig) -> None:
    """RecipeError for options that are set in the recipe, differ from the draft it starts from, and would do nothing."""
    ignored = []
    for option in dataclasses.fields(DraftShape):
        if option.name == "init_from":
            continue
        default = option.default if option.default_factory is dataclasses.MISSING else option.default_factory()
        asked = getattr(shape, option.name)
        wanted: Any = tuple(asked) if isinstance(asked, list) else asked
        if (option.name == "logit_softcap" and wanted == 0) or (option.name == "draft_vocab_size" and wanted == existing.vocab_size):
            wanted = None
        if asked != default and wanted != getattr(existing, option.name):
            ignored.append(f"draft.{option.name} {asked} (there: {getattr(existing, option.name)})")
    if ignored:
        raise RecipeError(f"draft.init_from: the shape is that of {shape.init_from}, which the recipe contradicts: {', '.join(ignored)}. Leave these options "
                          "out, or start from random weights (init_from: null).")


def _default_taps(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """The published rule, with as many taps as there are different layers."""
    for taps in range(max(1, num_draft_layers), 0, -1):   # DraftConfig refuses 0 layers
        try:
            return default_target_layer_ids(num_target_layers=num_target_layers, num_draft_layers=taps)
        except ValueError:
            continue
    raise RecipeError(f"draft.target_layer_ids: the published rule gives no layer for a target of {num_target_layers}. Name them in the recipe.")


def require_room_for_end_tokens(draft_vocab_size: int, *, eos_ids: Collection[int]) -> None:
    """RecipeError for a vocabulary that end tokens alone would fill: no answer's own token could be proposed."""
    if draft_vocab_size <= len(set(eos_ids)):
        raise RecipeError(f"draft.draft_vocab_size: must have room for the target's end tokens ({len(set(eos_ids))}) and at least one more, so at least "
                          f"{len(set(eos_ids)) + 1}; got {draft_vocab_size}. Published drafts have thousands (32000).")


def choose_draft_ids(rows: Sequence[Sequence[Tensor]], *, size: int, vocab_size: int, always: Collection[int]) -> Tensor:
    """int64 [size], ascending: `always`, then the tokens that the responses use most, ties to the lowest id.

    rows: packed rows [4, S] of every source.
    """
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for row in (r for source in rows for r in source):
        counts += row[IDS][row[SUPERVISED].bool()].bincount(minlength=vocab_size)
    counts[sorted(always)] = int(counts.sum()) + 1
    return counts.sort(descending=True, stable=True).indices[:size].sort().values


def draft_plan(draft: DraftModel, *, origin: str) -> str:
    """What will be trained, printed before anything runs."""
    c = draft.config
    window = f"window {c.sliding_window}" if c.sliding_window is not None else "full attention"
    if c.full_attention_layers:
        window += f" (layers {list(c.full_attention_layers)}: full attention)"
    causal = {"never": "non-causal", "always": "causal in the block", "sliding": "causal in the block in sliding layers"}[c.causal]
    options = [f"{name} {value}" for name, value, neutral in (
        ("partial rotary", c.partial_rotary_factor, 1.0), ("rope scaling", c.rope_scaling, None), ("value scale", c.attention_value_scale, 1.0),
        ("output multiplier", c.output_multiplier, 1.0), ("logit softcap", c.logit_softcap, None), ("vocabulary", c.draft_vocab_size, None))
        if value != neutral]
    options += [name for name, on in (("attention sinks", c.attention_sinks), ("trained mask embedding", c.mask_embedding)) if on]
    if c.num_target_layers is not None and c.num_target_layers - 1 in c.target_layer_ids:
        options.append("taps the last layer, which vLLM and this project read before the final norm, z-lab's code after it and some SGLang models not at all")
    if c.backbone_rotary_base is not None:
        options.append(f"backbone_rotary_base {c.backbone_rotary_base:g} not used, as in vLLM and SGLang")
    return (f"draft head: {c.num_hidden_layers} layers, {sum(p.numel() for p in draft.parameters()):,} weights, block {c.block_size} (the anchor and "
            f"{c.num_drafts} masked slots), {window}, {causal}, taps the outputs of layers {list(c.target_layer_ids)} of {c.num_target_layers}, "
            f"mask token {c.mask_token_id}{''.join(f', {o}' for o in options)}\ndraft head: starts from {origin}")
