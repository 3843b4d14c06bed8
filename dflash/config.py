"""The draft head's configuration, as the published DFlash drafts write it.

One geometry, three readers: vLLM, SGLang and z-lab's code take the window, the causality, the block size and the rope from
different keys, with different defaults. Every convention is written out under each of the names they read, and refused on
reading when two of the names disagree.

`target_layer_ids` count decoder layers from 0 and tap their OUTPUT, before the final norm: id i is hidden_states[i + 1] of
transformers, except the last layer, which transformers returns after the final norm.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

from .rope import ROPE_TYPES, check_rope_scaling

Causality = Literal["never", "always", "sliding"]


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """Shapes and conventions of a DFlash draft head."""

    hidden_size: int                       # D: of the draft and of the target, whose embedding and head it borrows
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    target_layer_ids: tuple[int, ...]      # tapped layers, in the order their outputs are concatenated
    num_target_layers: int | None          # None: a file of another tool does not say
    mask_token_id: int                     # row of the target's embedding that fills slots 1..
    block_size: int = 8                    # the anchor and the masked slots
    sliding_window: int | None = None      # a slot at q sees context at k with q - k < window; None: all of it
    full_attention_layers: tuple[int, ...] = ()   # with a sliding window: layers that see all of the context all the same
    causal: Causality = "never"               # whether a slot sees only the slots before it: in no layer, in all, in the sliding ones
    rope_theta: float = 1e6
    partial_rotary_factor: float = 1.0     # share of a head's dimensions that turn
    rope_scaling: dict[str, Any] | None = None    # rope_type and its numbers (yarn, linear, llama3), as transformers names them
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32768
    attention_sinks: bool = False          # one trained logit a query head that takes part in the softmax and has no value
    attention_value_scale: float = 1.0     # values times this
    input_embedding_scale: float = 1.0     # block embeddings times this
    output_multiplier: float = 1.0         # logits times this, before the cap
    logit_softcap: float | None = None     # logits become cap * tanh(logits / cap)
    mask_embedding: bool = False           # slots 1.. hold a trained vector (mask_embedding.pt) instead of the embedding's row
    draft_vocab_size: int | None = None    # tokens it can propose; None: all
    target_hidden_size: int | None = None  # width of one tap; None: hidden_size
    backbone_rotary_base: float | None = None     # of MiMo's files; kept, and not used: vLLM and SGLang do not use it either

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"draft.{name}: must be positive; got {getattr(self, name)}.")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(f"draft.num_attention_heads: must be a multiple of num_key_value_heads ({self.num_key_value_heads}); "
                             f"got {self.num_attention_heads}.")
        if not 0 < self.rope_theta < math.inf or not 0 < self.rms_norm_eps < 1 or self.max_position_embeddings < 1:
            raise ValueError(f"draft: rope_theta, rms_norm_eps and max_position_embeddings must be positive; got {self.rope_theta}, {self.rms_norm_eps} "
                             f"and {self.max_position_embeddings}.")
        if self.head_dim % 2:
            raise ValueError(f"draft.head_dim: must be even for rotary positions; got {self.head_dim}.")
        if self.block_size < 2:
            raise ValueError(f"draft.block_size: counts the anchor and needs at least one slot, so at least 2; got {self.block_size}.")
        if self.sliding_window is not None and self.sliding_window < self.block_size:
            raise ValueError(f"draft.sliding_window: must be at least the block size ({self.block_size}); got {self.sliding_window}.")
        last = math.inf if self.num_target_layers is None else self.num_target_layers - 1
        if not self.target_layer_ids or any(not 0 <= i <= last for i in self.target_layer_ids):
            raise ValueError(f"draft.target_layer_ids: needs layers in 0..{last}, the target's; got {list(self.target_layer_ids)}.")
        if len(set(self.target_layer_ids)) != len(self.target_layer_ids):
            raise ValueError(f"draft.target_layer_ids: each layer is tapped once; got {list(self.target_layer_ids)}.")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(f"draft.mask_token_id: must be a row of the target's embedding, 0..{self.vocab_size - 1}; got {self.mask_token_id}.")

        self._check_options()

    def _check_options(self) -> None:
        if self.sliding_window is None and self.full_attention_layers:
            raise ValueError("draft.full_attention_layers: is for drafts with a sliding window; got none. All layers see everything already.")
        full = self.full_attention_layers
        if any(not 0 <= i < self.num_hidden_layers for i in full) or list(full) != sorted(set(full)):
            raise ValueError(f"draft.full_attention_layers: needs layers in 0..{self.num_hidden_layers - 1}, ascending; got {list(full)}.")
        if len(full) == self.num_hidden_layers:
            raise ValueError("draft.full_attention_layers: names every layer, so that none slides. Leave sliding_window out.")
        if self.causal not in ("never", "always", "sliding"):
            raise ValueError(f"draft.causal: must be never, always or sliding; got {self.causal!r}.")
        if self.causal == "sliding" and (self.sliding_window is None or not self.full_attention_layers):
            raise ValueError("draft.causal: `sliding` is for drafts with both kinds of layers; with one kind say always or never.")
        if not 0 < self.partial_rotary_factor <= 1 or self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ValueError(f"draft.partial_rotary_factor: must lie in (0, 1] and turn an even number of dimensions; got {self.partial_rotary_factor} "
                             f"of {self.head_dim}.")
        if self.rope_scaling is not None:
            check_rope_scaling(self.rope_scaling)
        for name in ("attention_value_scale", "input_embedding_scale", "output_multiplier"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"draft.{name}: must be positive; got {getattr(self, name)}.")
        if self.logit_softcap is not None and not 0 < self.logit_softcap < math.inf:
            raise ValueError(f"draft.logit_softcap: must be positive, or null for none; got {self.logit_softcap}.")
        if self.draft_vocab_size is not None and not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ValueError(f"draft.draft_vocab_size: must lie in 1..{self.vocab_size}; got {self.draft_vocab_size}.")
        if self.draft_vocab_size == self.vocab_size:   # one form of "all", so that no file says it with a table of tokens that no reader expects
            object.__setattr__(self, "draft_vocab_size", None)

    @property
    def num_drafts(self) -> int:
        return self.block_size - 1

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that turn with the position."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def num_features(self) -> int:
        """F: width of a token's tapped features."""
        return len(self.target_layer_ids) * (self.target_hidden_size or self.hidden_size)

    def window_of(self, layer: int) -> int | None:
        """A layer's sliding window; None where it sees all of the context."""
        return None if layer in self.full_attention_layers else self.sliding_window

    def is_causal(self, layer: int) -> bool:
        """Whether a layer's slots see only the slots before them."""
        return self.causal == "always" or (self.causal == "sliding" and self.window_of(layer) is not None)

    @property
    def context_window(self) -> int | None:
        """Context tokens that any layer can still see; None for all."""
        return None if self.full_attention_layers else self.sliding_window

    def to_json(self) -> dict[str, Any]:
        """config.json of the published drafts; `from_json` reads it back to an equal configuration."""
        is_sliding = [self.window_of(i) is not None for i in range(self.num_hidden_layers)]
        dflash: dict[str, Any] = {"target_layer_ids": list(self.target_layer_ids), "mask_token_id": self.mask_token_id, "block_size": self.block_size}
        top: dict[str, Any] = {}
        if self.causal != "sliding":
            top["is_causal"] = dflash["causal"] = self.causal == "always"
        if self.causal == "never" and len(set(is_sliding)) == 1:   # for vLLM use_swa makes every layer sliding and non-causal
            dflash["use_swa"] = is_sliding[0]
        if self.sliding_window is not None:
            dflash["swa_window_size"] = self.sliding_window
        rope = {"rope_theta": self.rope_theta, "rope_type": "default", **(self.rope_scaling or {})}
        if self.rope_scaling is not None:
            top["rope_scaling"] = dict(self.rope_scaling)
        if self.partial_rotary_factor != 1:
            top["partial_rotary_factor"] = rope["partial_rotary_factor"] = self.partial_rotary_factor
        for section, key, value, neutral in (
                (dflash, "attention_sink_bias", self.attention_sinks, False), (dflash, "attention_value_scale", self.attention_value_scale, 1.0),
                (dflash, "input_embedding_scale", self.input_embedding_scale, 1.0), (dflash, "output_multiplier", self.output_multiplier, 1.0),
                (dflash, "final_logit_softcapping", self.logit_softcap, None), (dflash, "mask_embedding", self.mask_embedding, False),
                (dflash, "backbone_rotary_base", self.backbone_rotary_base, None), (top, "draft_vocab_size", self.draft_vocab_size, None),
                (top, "target_hidden_size", self.target_hidden_size, None)):
            if value != neutral:
                section[key] = value
        return {
            "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "dtype": "bfloat16",
            "hidden_size": self.hidden_size, "intermediate_size": self.intermediate_size, "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads, "num_key_value_heads": self.num_key_value_heads, "head_dim": self.head_dim,
            "vocab_size": self.vocab_size, "num_target_layers": self.num_target_layers, "block_size": self.block_size,
            "layer_types": ["sliding_attention" if s else "full_attention" for s in is_sliding], "sliding_window": self.sliding_window,
            "use_sliding_window": any(is_sliding), "max_window_layers": 0 if any(is_sliding) else self.num_hidden_layers,
            "rope_theta": self.rope_theta, "rope_parameters": rope,
            "rms_norm_eps": self.rms_norm_eps, "max_position_embeddings": self.max_position_embeddings,
            "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0, "tie_word_embeddings": False,
            **top, "dflash_config": dflash}

    @classmethod
    def from_json(cls, raw: dict[str, Any], *, where: str) -> "DraftConfig":
        """Read a draft's config.json.

        Errors: ValueError for a missing key, for keys that contradict each other, and for conventions this model does not have.
        """
        if "speculators_model_type" in raw:
            raw = _from_speculators(raw, where=where)
        nested = raw.get("dflash_config")
        if not isinstance(nested, dict):
            raise ValueError(f"{where}: no dflash_config section. This is not the config.json of a DFlash draft.")
        _refuse_unknown_conventions(raw, nested, where=where)
        layers = _need(raw, "num_hidden_layers", where)
        rope = _rope(raw, where=where)
        theta = _agree(where, {"rope_theta": raw.get("rope_theta"), "rope_parameters.rope_theta": rope.pop("rope_theta", None)})
        partial = _agree(where, {"partial_rotary_factor": raw.get("partial_rotary_factor"), "rope_parameters.partial_rotary_factor":
                                 rope.pop("partial_rotary_factor", None)})
        block = _agree(where, {"block_size": raw.get("block_size"), "dflash_config.block_size": nested.get("block_size")})
        window, full, causal = _attention(raw, nested, layers, where)

        def option(key: str, neutral: Any) -> Any:
            value = _agree(where, {key: raw.get(key), f"dflash_config.{key}": nested.get(key)})
            return neutral if value is None else value

        return cls(
            hidden_size=_need(raw, "hidden_size", where), intermediate_size=_need(raw, "intermediate_size", where), num_hidden_layers=layers,
            num_attention_heads=_need(raw, "num_attention_heads", where), num_key_value_heads=_need(raw, "num_key_value_heads", where),
            head_dim=_need(raw, "head_dim", where), vocab_size=_need(raw, "vocab_size", where),
            target_layer_ids=tuple(_need(nested, "target_layer_ids", where)), num_target_layers=raw.get("num_target_layers"),
            mask_token_id=_need(nested, "mask_token_id", where), block_size=_given(block, "block_size", where),
            sliding_window=window, full_attention_layers=full, causal=causal,
            rope_theta=float(_given(theta, "rope_theta", where)), partial_rotary_factor=1.0 if partial is None else partial,
            rope_scaling=None if rope["rope_type"] == "default" else rope, rms_norm_eps=_need(raw, "rms_norm_eps", where),
            max_position_embeddings=_need(raw, "max_position_embeddings", where), attention_sinks=option("attention_sink_bias", False),
            attention_value_scale=option("attention_value_scale", 1.0), input_embedding_scale=option("input_embedding_scale", 1.0),
            output_multiplier=option("output_multiplier", 1.0), logit_softcap=option("final_logit_softcapping", None),
            mask_embedding=option("mask_embedding", False), draft_vocab_size=option("draft_vocab_size", None),
            target_hidden_size=raw.get("target_hidden_size"), backbone_rotary_base=option("backbone_rotary_base", None))


def default_target_layer_ids(*, num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """The published rule: the middle layer for one tap, else evenly spaced from layer 1 to layer N - 3.

    Errors: ValueError when the target has too few layers for different ones.
    """
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    ids = tuple(round(1 + i * (num_target_layers - 4) / (num_draft_layers - 1)) for i in range(num_draft_layers))
    if list(ids) != sorted(set(ids)) or ids[0] < 0:
        raise ValueError(f"draft.target_layer_ids: {num_draft_layers} different layers do not fit the published rule for a target of {num_target_layers}. "
                         "Name the layers in the recipe.")
    return ids


def _refuse_unknown_conventions(raw: dict[str, Any], nested: dict[str, Any], *, where: str) -> None:
    architecture = (raw.get("architectures") or [None])[0]
    if architecture == "DFlash2DraftModel":
        raise NotImplementedError(f"{where}: is a DFlash2 draft, which adds convolutions and a candidate selector; this reader knows DFlashDraftModel.")
    if architecture != "DFlashDraftModel":
        raise NotImplementedError(f"{where}: architecture {architecture!r}; this reader knows DFlashDraftModel.")
    _agree(where, {"is_causal": raw.get("is_causal"), "dflash_config.causal": nested.get("causal")})
    unknown = set(raw.get("layer_types") or []) - {"full_attention", "sliding_attention"}
    if unknown:
        raise NotImplementedError(f"{where}: layer_types has {sorted(unknown)[0]!r}; full_attention and sliding_attention are supported.")
    if raw.get("v_head_dim") not in (None, raw.get("head_dim")):
        raise NotImplementedError(f"{where}: v_head_dim {raw['v_head_dim']} differs from head_dim {raw.get('head_dim')}; that is not supported.")
    for source in (raw, nested):
        if source.get("sample_from_anchor"):
            raise NotImplementedError(f"{where}: sample_from_anchor is {source['sample_from_anchor']!r}: its slots predict the token after their place; "
                                      "drafts with it are not supported.")
    for rope in (raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}):
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ROPE_TYPES:
            raise NotImplementedError(f"{where}: rope {kind!r}; {', '.join(ROPE_TYPES)} are supported.")
    if raw.get("attention_bias") or raw.get("hidden_act", "silu") != "silu":
        raise NotImplementedError(f"{where}: attention_bias and activations other than silu are not supported.")


def _rope(raw: dict[str, Any], *, where: str) -> dict[str, Any]:
    """The numbers of rope_scaling and rope_parameters, which must agree where both have one, with their rope_type."""
    sections = {name: dict(raw.get(name) or {}) for name in ("rope_scaling", "rope_parameters")}
    for section in sections.values():
        if "type" in section:
            section.setdefault("rope_type", section.pop("type"))   # its old name
        for key in ("mrope_section", "mrope_interleaved"):         # of a multimodal target: for text all sections turn alike
            section.pop(key, None)
    merged = {key: _agree(where, {f"{name}.{key}": section.get(key) for name, section in sections.items()}) for key in set().union(*sections.values())}
    return {"rope_type": "default", **{key: value for key, value in merged.items() if value is not None}}


def _attention(raw: dict[str, Any], nested: dict[str, Any], layers: int, where: str) -> tuple[int | None, tuple[int, ...], Causality]:
    """(window, layers that have none, causality), by every name that an engine may read them under."""
    types = raw.get("layer_types") or []
    if types and len(types) != layers:
        raise ValueError(f"{where}: layer_types names {len(types)} layers, num_hidden_layers is {layers}. The config is damaged.")
    is_sliding = [t == "sliding_attention" for t in types] or [bool(nested.get("use_swa"))] * layers
    if "use_swa" in nested and set(is_sliding) != {bool(nested["use_swa"])}:
        raise NotImplementedError(f"{where}: layer_types {types} and use_swa {nested.get('use_swa')}: engines read this differently. Leave use_swa out, or "
                                  "give all layers the kind it says.")
    window = None
    if any(is_sliding):
        window = _given(_agree(where, {"sliding_window": raw.get("sliding_window"), "dflash_config.swa_window_size": nested.get("swa_window_size")}),
                        "sliding_window", where)
    said = next((v for v in (raw.get("is_causal"), nested.get("causal")) if v is not None), None)   # null is as good as absent
    causal: Causality
    if said is None and any(is_sliding) and "use_swa" not in nested:   # a sliding layer is causal for z-lab, vLLM and SGLang unless something says otherwise
        causal = "always" if all(is_sliding) else "sliding"
    else:
        causal = "always" if said else "never"
    full = tuple(i for i, s in enumerate(is_sliding) if not s) if window is not None else ()
    return window, full, causal


def _from_speculators(raw: dict[str, Any], *, where: str) -> dict[str, Any]:
    """The config of the speculators library in the published form. Its layer ids count the embedding as 0; it does not say how many layers the target has."""
    if raw["speculators_model_type"] != "dflash":
        raise NotImplementedError(f"{where}: is a speculators {raw['speculators_model_type']!r} draft; this reader knows dflash.")
    if raw.get("sample_from_anchor"):
        raise NotImplementedError(f"{where}: sample_from_anchor: its slots predict the token after their place; drafts with it are not supported.")
    layer = _need(raw, "transformer_layer_config", where)
    ids = [i - 1 for i in _need(raw, "aux_hidden_state_layer_ids", where)]
    if min(ids, default=0) < 0:
        raise NotImplementedError(f"{where}: taps the embedding's output (layer id 0 of speculators), which is not supported.")
    nested: dict[str, Any] = {"target_layer_ids": ids, "mask_token_id": _need(raw, "mask_token_id", where)}
    if raw.get("sliding_window_non_causal"):
        nested["causal"] = False
    return {**layer, "architectures": ["DFlashDraftModel"], "block_size": _need(raw, "block_size", where), "dflash_config": nested,
            "draft_vocab_size": raw.get("draft_vocab_size"), "target_hidden_size": raw.get("target_hidden_size")}


def _need(raw: dict[str, Any], key: str, where: str) -> Any:
    return _given(raw.get(key), key, where)


def _given(value: Any, key: str, where: str) -> Any:
    if value is None:
        raise ValueError(f"{where}: has no {key}. The config is incomplete.")
    return value


def _agree(where: str, values: dict[str, Any]) -> Any:
    """The one value given under several names; None when under none."""
    given = {k: v for k, v in values.items() if v is not None}
    if any(value != first for first in list(given.values())[:1] for value in given.values()):
        raise ValueError(f"{where}: {' and '.join(f'{k} {v}' for k, v in given.items())} contradict each other; engines would read it differently.")
    return next(iter(given.values()), None)
