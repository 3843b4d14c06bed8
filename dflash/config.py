"""The draft head's configuration, as the published DFlash drafts write it.

One geometry, three readers: vLLM, SGLang and z-lab's code take the window, the causality, the block size and the rope from
different keys, with different defaults. Every convention is written out under each of the names they read, and refused on
reading when two of the names disagree.

`target_layer_ids` count decoder layers from 0 and tap their OUTPUT, before the final norm: id i is hidden_states[i + 1] of
transformers, except the last layer, which transformers returns after the final norm.
"""

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """Shapes and conventions of a DFlash draft head. Slots see their whole block (non-causal)."""

    hidden_size: int                       # D: of the draft and of the target, whose embedding and head it borrows
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    target_layer_ids: tuple[int, ...]      # tapped layers, in the order their outputs are concatenated
    num_target_layers: int
    mask_token_id: int                     # row of the target's embedding that fills slots 1..
    block_size: int = 8                    # the anchor and the masked slots
    sliding_window: int | None = None      # a slot at q sees context at k with q - k < window; None: all of it
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32768

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
        if not self.target_layer_ids or any(not 0 <= i < self.num_target_layers for i in self.target_layer_ids):
            raise ValueError(f"draft.target_layer_ids: needs layers in 0..{self.num_target_layers - 1}, the target's; got {list(self.target_layer_ids)}.")
        if len(set(self.target_layer_ids)) != len(self.target_layer_ids):
            raise ValueError(f"draft.target_layer_ids: each layer is tapped once; got {list(self.target_layer_ids)}.")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(f"draft.mask_token_id: must be a row of the target's embedding, 0..{self.vocab_size - 1}; got {self.mask_token_id}.")

    @property
    def num_drafts(self) -> int:
        return self.block_size - 1

    def to_json(self) -> dict[str, Any]:
        """config.json of the published drafts; `from_json` reads it back to an equal configuration."""
        layer_type = "full_attention" if self.sliding_window is None else "sliding_attention"
        dflash: dict[str, Any] = {"target_layer_ids": list(self.target_layer_ids), "mask_token_id": self.mask_token_id, "block_size": self.block_size,
                                  "causal": False, "use_swa": self.sliding_window is not None}
        if self.sliding_window is not None:
            dflash["swa_window_size"] = self.sliding_window
        return {
            "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "dtype": "bfloat16",
            "hidden_size": self.hidden_size, "intermediate_size": self.intermediate_size, "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads, "num_key_value_heads": self.num_key_value_heads, "head_dim": self.head_dim,
            "vocab_size": self.vocab_size, "num_target_layers": self.num_target_layers, "block_size": self.block_size,
            "is_causal": False, "layer_types": [layer_type] * self.num_hidden_layers, "sliding_window": self.sliding_window,
            "use_sliding_window": self.sliding_window is not None, "max_window_layers": 0 if self.sliding_window is not None else self.num_hidden_layers,
            "rope_theta": self.rope_theta, "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "rms_norm_eps": self.rms_norm_eps, "max_position_embeddings": self.max_position_embeddings,
            "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0, "tie_word_embeddings": False,
            "dflash_config": dflash}

    @classmethod
    def from_json(cls, raw: dict[str, Any], *, where: str) -> "DraftConfig":
        """Read a draft's config.json.

        Errors: ValueError for a missing key, for keys that contradict each other, and for conventions this model does not have.
        """
        nested = raw.get("dflash_config")
        if not isinstance(nested, dict):
            raise ValueError(f"{where}: no dflash_config section. This is not the config.json of a DFlash draft.")
        _refuse_unknown_conventions(raw, nested, where=where)
        layers = _need(raw, "num_hidden_layers", where)
        theta = _agree(where, {"rope_theta": raw.get("rope_theta"), "rope_parameters.rope_theta": (raw.get("rope_parameters") or {}).get("rope_theta")})
        block = _agree(where, {"block_size": raw.get("block_size"), "dflash_config.block_size": nested.get("block_size")})
        return cls(
            hidden_size=_need(raw, "hidden_size", where), intermediate_size=_need(raw, "intermediate_size", where), num_hidden_layers=layers,
            num_attention_heads=_need(raw, "num_attention_heads", where), num_key_value_heads=_need(raw, "num_key_value_heads", where),
            head_dim=_need(raw, "head_dim", where), vocab_size=_need(raw, "vocab_size", where),
            target_layer_ids=tuple(_need(nested, "target_layer_ids", where)), num_target_layers=_need(raw, "num_target_layers", where),
            mask_token_id=_need(nested, "mask_token_id", where), block_size=_given(block, "block_size", where),
            sliding_window=_window(raw, nested, layers, where),
            rope_theta=float(_given(theta, "rope_theta", where)), rms_norm_eps=_need(raw, "rms_norm_eps", where),
            max_position_embeddings=_need(raw, "max_position_embeddings", where))


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
    if architecture != "DFlashDraftModel":
        raise NotImplementedError(f"{where}: architecture {architecture!r}; this reader knows DFlashDraftModel.")
    if raw.get("is_causal") is False and nested.get("causal"):
        raise ValueError(f"{where}: is_causal false and dflash_config.causal true contradict each other; engines would read it differently.")
    unknown = set(raw.get("layer_types") or []) - {"full_attention", "sliding_attention"}
    if unknown:
        raise NotImplementedError(f"{where}: layer_types has {sorted(unknown)[0]!r}; full_attention and sliding_attention are supported.")
    if raw.get("v_head_dim") not in (None, raw.get("head_dim")):
        raise NotImplementedError(f"{where}: v_head_dim {raw['v_head_dim']} differs from head_dim {raw.get('head_dim')}; that is not supported yet.")
    refused = (("attention_sink_bias", False), ("attention_value_scale", 1.0), ("output_multiplier", 1.0), ("final_logit_softcapping", None),
               ("sample_from_anchor", False), ("backbone_rotary_base", None), ("input_embedding_scale", 1.0), ("draft_vocab_size", raw.get("vocab_size")))
    for key, neutral in refused:
        for source in (raw, nested):
            if source.get(key) not in (None, neutral):
                raise NotImplementedError(f"{where}: {key} is {source[key]!r}; drafts with it are not supported yet.")
    for rope in (raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}, raw):
        kind = "default" if rope is raw else rope.get("rope_type", rope.get("type", "default"))
        if kind != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise NotImplementedError(f"{where}: rope {kind!r}, partial factor {rope.get('partial_rotary_factor', 1.0)}; the default rope over all "
                                      "dimensions is supported.")
    if raw.get("attention_bias") or raw.get("hidden_act", "silu") != "silu":
        raise NotImplementedError(f"{where}: attention_bias and activations other than silu are not supported yet.")


def _window(raw: dict[str, Any], nested: dict[str, Any], layers: int, where: str) -> int | None:
    """The one window of all layers, by every name that an engine may read it under."""
    types = raw.get("layer_types") or []
    if types and len(types) != layers:
        raise ValueError(f"{where}: layer_types names {len(types)} layers, num_hidden_layers is {layers}. The config is damaged.")
    sliding = {t == "sliding_attention" for t in types} | ({bool(nested["use_swa"])} if "use_swa" in nested else set())
    if len(sliding) > 1:
        raise NotImplementedError(f"{where}: layer_types {types} and use_swa {nested.get('use_swa')}: engines read this differently. One kind for all layers, "
                                  "said in both places, is supported.")
    if sliding in (set(), {False}):
        causal, window = False, None
    else:
        window = _given(_agree(where, {"sliding_window": raw.get("sliding_window"), "dflash_config.swa_window_size": nested.get("swa_window_size")}),
                        "sliding_window", where)
        causal = "use_swa" not in nested   # a sliding layer is causal for z-lab, vLLM and SGLang unless something says otherwise
    said = next((v for v in (raw.get("is_causal"), nested.get("causal")) if v is not None), causal)   # null is as good as absent
    if said:
        raise NotImplementedError(f"{where}: its slots are causal (is_causal, or a sliding layer without is_causal: false); non-causal drafts are supported.")
    return window


def _need(raw: dict[str, Any], key: str, where: str) -> Any:
    return _given(raw.get(key), key, where)


def _given(value: Any, key: str, where: str) -> Any:
    if value is None:
        raise ValueError(f"{where}: has no {key}. The config is incomplete.")
    return value


def _agree(where: str, values: dict[str, Any]) -> Any:
    """The one value given under several names; None when under none."""
    given = {k: v for k, v in values.items() if v is not None}
    if len(set(given.values())) > 1:
        raise ValueError(f"{where}: {' and '.join(f'{k} {v}' for k, v in given.items())} contradict each other; engines would read it differently.")
    return next(iter(given.values()), None)
