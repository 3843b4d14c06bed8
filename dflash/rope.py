"""Scaled rotary positions of a draft: which numbers each kind takes, as transformers names and reads them."""

import difflib
import math
from typing import Any

ROPE_TYPES = ("default", "linear", "yarn", "llama3")   # whose angles do not depend on how long the text has become
REQUIRED = {"linear": ("factor",), "yarn": ("factor", "original_max_position_embeddings"),
            "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")}
OPTIONAL = {"linear": (), "yarn": ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"), "llama3": ()}
BESIDE = ("rope_theta", "partial_rotary_factor")   # of the draft itself
BETAS = (32, 1)                                    # beta_fast and beta_slow where they are left out, YaRN's own


def check_rope_scaling(scaling: dict[str, Any]) -> None:
    """ValueError for a kind that is not known, and for numbers that it does not take, lacks or cannot use."""
    kind = scaling.get("rope_type")
    if kind not in REQUIRED:
        raise ValueError(f"draft.rope_scaling: needs a rope_type of {', '.join(REQUIRED)}; got {kind!r}.")
    known = (*REQUIRED[kind], *OPTIONAL[kind])
    for key, value in scaling.items():
        if key == "rope_type":
            continue
        if key in BESIDE:
            raise ValueError(f"draft.rope_scaling: {key} is not a number of the scaling; got {value!r}. Set draft.{key} instead.")
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            remedy = f"Did you mean {close[0]!r}?" if close else f"It takes {', '.join(known)}."
            raise ValueError(f"draft.rope_scaling: unknown key {key!r} of {kind}. {remedy}")
        if key == "truncate":
            if not isinstance(value, bool):
                raise ValueError(f"draft.rope_scaling: truncate must be true or false; got {value!r}.")
        elif isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ValueError(f"draft.rope_scaling: {key} must be a positive number; got {value!r}.")
    missing = [key for key in REQUIRED[kind] if key not in scaling]
    if missing:
        raise ValueError(f"draft.rope_scaling: {kind} needs {' and '.join(missing)}; got {', '.join(scaling)}.")
    fast, slow = (scaling.get(key, default) for key, default in zip(("beta_fast", "beta_slow"), BETAS, strict=True))
    if kind == "yarn" and not fast > slow:
        raise ValueError(f"draft.rope_scaling: beta_fast must be above beta_slow; got {fast} and {slow}.")
    if kind == "llama3" and not scaling["high_freq_factor"] > scaling["low_freq_factor"]:
        raise ValueError(f"draft.rope_scaling: high_freq_factor must be above low_freq_factor; got {scaling['high_freq_factor']} "
                         f"and {scaling['low_freq_factor']}.")
