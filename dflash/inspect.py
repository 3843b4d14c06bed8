"""What `kilotok inspect` says of a draft head: every convention that an engine must share, from the files alone."""

import math
from pathlib import Path

from ..quant.checkpoint import CheckpointReader
from .checkpoint import read_config, read_metadata
from .config import DraftConfig


def inspect_draft(directory: Path) -> str:
    """Lines as those of `inspect_directory`; one that says `none` where there is no such directory.

    Errors: FileNotFoundError and ValueError for an incomplete or damaged draft, NotImplementedError for one that cannot be served here.
    """
    if not directory.exists():
        return _line("draft head", "none")
    c, metadata, reader = read_config(directory), read_metadata(directory), CheckpointReader(directory)
    infos = [reader.info(name) for name in reader.names]
    weights = sum(math.prod(shape) for dtype, shape in infos if dtype.startswith(("BF", "F")))   # not the tables of a reduced vocabulary
    return "\n".join((
        _line("draft head", f"in {directory.name}/: {c.num_hidden_layers} layers, hidden {c.hidden_size}, {len(infos)} tensors, {weights:,} weights"),
        _line("  block", f"{c.block_size} tokens, the anchor and {c.num_drafts} drafts"),
        _line("  attention", _attention(c)),
        _line("  rope", _rope(c)),
        _line("  taps", f"outputs of layers {list(c.target_layer_ids)} of {c.num_target_layers or 'a target whose layers are not recorded'}"),
        _line("  mask token", f"{c.mask_token_id}, {'with a trained embedding of its own' if c.mask_embedding else 'the row of the embedding'}"),
        _line("  embedding", f"{'its own' if 'embed_tokens.weight' in reader else 'of the target'}{_times(c.input_embedding_scale)}"),
        _line("  logits", _logits(c, has_head="lm_head.weight" in reader)),
        _line("  made for", _made_for(metadata)),
    ))


def _line(name: str, text: str) -> str:
    return f"  {name:<13} {text}"


def _times(factor: float) -> str:
    return "" if factor == 1 else f", times {factor:g}"


def _attention(c: DraftConfig) -> str:
    window = "full" if c.sliding_window is None else f"window {c.sliding_window}"
    if c.full_attention_layers:
        window += f", layers {list(c.full_attention_layers)} full"
    causality = {"never": "non-causal", "always": "causal", "sliding": "causal in layers with the window"}[c.causal]
    values = f", values{_times(c.attention_value_scale).removeprefix(',')}" if c.attention_value_scale != 1 else ""
    return f"{window}, {causality}, {c.num_attention_heads} heads of {c.head_dim}, {c.num_key_value_heads} KV{', sinks' if c.attention_sinks else ''}{values}"


def _rope(c: DraftConfig) -> str:
    turned = "" if c.partial_rotary_factor == 1 else f", {c.rotary_dim} of {c.head_dim} dimensions turn"
    scaling = dict(c.rope_scaling or {})
    kind = scaling.pop("rope_type", None)
    scaled = "" if kind is None else f", {kind} ({', '.join(f'{key} {value}' for key, value in sorted(scaling.items()))})"
    return f"theta {c.rope_theta:g}{turned}{scaled}"


def _logits(c: DraftConfig, *, has_head: bool) -> str:
    tokens = f"all {c.vocab_size:,} tokens" if c.draft_vocab_size is None else f"{c.draft_vocab_size:,} of {c.vocab_size:,} tokens"
    cap = "" if c.logit_softcap is None else f", capped at {c.logit_softcap:g}"
    return f"{tokens}, {'a head of its own' if has_head else 'the head of the target'}{_times(c.output_multiplier)}{cap}"


def _made_for(metadata: dict[str, object] | None) -> str:
    if metadata is None:
        return "not recorded: written by another tool"
    target = metadata["target"]
    assert isinstance(target, dict), "read_metadata checks it"
    step = f", step {metadata['step']} of {metadata.get('max_steps')}" if "step" in metadata else ""
    return f"{target.get('name')} (weights {str(target.get('sha256'))[:12]}, scale_mode {target.get('scale_mode')}){step}"
