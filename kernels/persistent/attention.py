"""Attention of a decode step over a paged bf16 cache: from raw queries, keys and values to the mixed values of every head.

For each column, a token of a sequence at a position: the norm of every query and key head (where the model has one), rope, the append of the
column's key and value to the cache, and softmax attention over the cache up to that position, the step's own new keys included.

    norm, rope    in fp32 from the raw values; then queries, keys and values are rounded to bf16, once
    scores        bf16 products summed in fp32, times head_dim**-0.5 * log2(e) in fp32; weights are powers of two of them
    a span        its chunks of 128 in order with a running maximum; weights are rounded to bf16 for the product and for their sum
    spans         added in order, each times 2**(its maximum - the largest); one division and one rounding to bf16 at the end

A column's operations and their order depend on its position alone (plan.py), so its bits do not change with the number of columns, with its
neighbours, or with how many are live: masked keys have weights of exactly 0, and rows of a product are independent. Dead columns read and write
nothing. (One gap: a neighbour's value that is not finite would reach earlier columns of its sequence as 0 * inf.)

Cost: the cache is read once for up to 8 columns of a sequence. In a resident step a barrier over the grid lies before this phase and one behind it;
the plan and the first keys of every program are loaded before the first of them, as no layer's old positions depend on its products.

Legend: C columns, H query heads, G key/value heads, K head dimension, P pages, N rows of the plan, L positions.
Source: Milakov and Gimelshein 2018 for the running maximum; Flash-Decoding (Dao et al. 2023) for the split of the cache.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..moe.product import num_programs, require
from .attention_device import STAMPS, attend_kernel, merge_kernel
from .plan import CHUNK, RUN_COLUMNS, Plan, chunks_of, first_chunk, num_classes, num_spans, plan_kernel, span_of

COLUMNS = (8, 16, 32, 64)
NUM_WARPS = 8


@dataclass(frozen=True, kw_only=True)
class Heads:
    """The heads of a layer.

    rms_eps: of the norms of queries and keys; None for a model without. window: a query at position p sees keys from p - window + 1 on; None for all.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float | None = None
    window: int | None = None

    def __post_init__(self) -> None:
        if self.num_heads < 1 or self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(f"Heads: num_heads must be a multiple of num_kv_heads; got {self.num_heads} and {self.num_kv_heads}.")
        if self.head_dim not in (32, 64, 128) or self.num_heads // self.num_kv_heads > 16:
            raise NotImplementedError("Heads: built for head_dim 32, 64 or 128 and up to 16 query heads a key/value head; got "
                                      f"{self.head_dim} and {self.num_heads // self.num_kv_heads}.")
        if self.window is not None and self.window < 1:
            raise ValueError(f"Heads: window must be at least 1, or None for full attention; got {self.window}.")

    @property
    def qkv_width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def scale(self) -> float:
        """Of scores, for powers of two."""
        return math.log2(math.e) / math.sqrt(self.head_dim)

    def cache_shape(self, num_pages: int) -> tuple[int, ...]:
        return num_pages, 2, self.num_kv_heads, CHUNK, self.head_dim


@dataclass(frozen=True, kw_only=True)
class AttentionForm:
    """How the device code is built. Results of different forms differ in their last bits."""

    keys: int = CHUNK           # positions in flight: 128, or 64 for two programs an SM
    queries: int = 16           # query rows of an item: 16, 32 or 64
    last_merges: bool = True    # partial results are added by the last item of a run and head; else by all programs, behind a barrier
    share: int = 1              # in a step one of so many programs has items, the first ones; the others have nothing to do but stream

    def __post_init__(self) -> None:
        if self.keys not in (64, CHUNK) or self.queries not in (16, 32, 64) or self.share < 1:
            raise ValueError(f"AttentionForm: keys are 64 or {CHUNK}, queries 16, 32 or 64, share is 1 or more; got {self.keys}, {self.queries}, {self.share}.")

    def part_columns(self, heads: Heads) -> int:
        """The most columns of an item."""
        return 1 << (min(RUN_COLUMNS, self.queries // (heads.num_heads // heads.num_kv_heads)).bit_length() - 1)

    def plan_constants(self, heads: Heads, *, programs: int) -> dict[str, int]:
        """What `plan_step` must know to cut runs; programs: of the grid of `attend`."""
        return {"AT_ONCE": programs // heads.num_kv_heads, "PART_COLUMNS": self.part_columns(heads)}

    def constants(self) -> dict[str, Any]:
        return {"KEYS": self.keys, "QUERIES": self.queries, "LAST_MERGES": self.last_merges}


FORM = AttentionForm()
FORM_OF_TWO = AttentionForm(keys=64)    # for two programs an SM


def rope_table(*, head_dim: int, theta: float, max_length: int, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """(cos, sin) fp32 [L, K / 2]; angles in fp32, as transformers computes them and models are trained with."""
    frequencies = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    angles = torch.arange(max_length).float().unsqueeze(1) * frequencies
    return angles.cos().to(device), angles.sin().to(device)


@dataclass(frozen=True, kw_only=True)
class Step:
    """What all layers of a step share. slots_C and positions_C: int32; a slot below 0 is a dead column. pages_SP: int32, the page of a slot's chunk."""

    slots_C: Tensor
    positions_C: Tensor
    pages_SP: Tensor


def queries_and_keys_ref(qkv_CW: Tensor, positions_C: Tensor, *, heads: Heads, qk_norm: Tensor | None, cos_LK: Tensor, sin_LK: Tensor,
                         dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [C, H, K] and keys [C, G, K], normed and rotated, and values [C, G, K], in `dtype`, unrounded."""
    x = qkv_CW.to(dtype).view(len(qkv_CW), -1, heads.head_dim)
    query_key, value = x.split((heads.num_heads + heads.num_kv_heads, heads.num_kv_heads), dim=1)
    if heads.rms_eps is not None:
        assert qk_norm is not None, "a layer with rms_eps has norms"
        query_key = query_key * torch.rsqrt(query_key.square().mean(-1, keepdim=True) + heads.rms_eps) * qk_norm.to(dtype)
    cos, sin = (table.to(dtype)[positions_C.long().clamp(min=0)].unsqueeze(1) for table in (cos_LK, sin_LK))
    a, b = query_key.chunk(2, dim=-1)
    query, key = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).split((heads.num_heads, heads.num_kv_heads), dim=1)
    return query, key, value


def attention_ref(qkv_CW: Tensor, step: Step, *, heads: Heads, cache: Tensor, cos_LK: Tensor, sin_LK: Tensor, qk_norm: Tensor | None = None,
                  rounded: torch.dtype | None = torch.bfloat16, round_weights: bool = True, keys: int = CHUNK,
                  dtype: torch.dtype = torch.float32, sees_C: Tensor | None = None) -> Tensor:
    """Mixed values [C, H * K] in `dtype`; the columns' keys and values are stored in `cache`. Dead columns are zeros.

    Shapes: qkv_CW [C, (H + 2 G) K], raw, queries first; cache [P, 2, G, 128, K]; qk_norm [H + G, K], the queries' norms, then the keys'.
    rounded: what queries, keys, values, weights and the result are rounded to; None leaves them in `dtype`. round_weights: False leaves the last two.
    keys: positions whose weights are rounded to bf16 against one maximum, `AttentionForm.keys`.
    sees_C: int32, the last position that a column sees; None: its own. A draft's slots see their whole block.
    """
    def round_(x: Tensor, if_: bool = True) -> Tensor:
        return x.to(rounded).to(dtype) if rounded is not None and if_ else x

    raw = queries_and_keys_ref(qkv_CW, step.positions_C, heads=heads, qk_norm=qk_norm, cos_LK=cos_LK, sin_LK=sin_LK, dtype=dtype)
    query, new_key, new_value = map(round_, raw)
    slots, positions, repeat = step.slots_C.tolist(), step.positions_C.tolist(), heads.num_heads // heads.num_kv_heads
    sees = positions if sees_C is None else sees_C.tolist()
    for c, slot in enumerate(slots):
        if slot >= 0:
            page = step.pages_SP[slot, positions[c] // CHUNK]
            cache[page, 0, :, positions[c] % CHUNK], cache[page, 1, :, positions[c] % CHUNK] = new_key[c].to(cache.dtype), new_value[c].to(cache.dtype)
    out = qkv_CW.new_zeros(len(slots), heads.num_heads, heads.head_dim, dtype=dtype)
    for c, slot in enumerate(slots):
        if slot < 0:
            continue
        first, end = first_chunk(positions[c], heads.window), sees[c] // CHUNK + 1
        rows = query[c].view(heads.num_kv_heads, repeat, heads.head_dim)
        parts = []
        for span in range(span_of(first), span_of(end - 1) + 1):
            largest = rows.new_full((heads.num_kv_heads, repeat, 1), -torch.inf)
            total, mixed = torch.zeros_like(largest), torch.zeros_like(rows)
            for chunk in range(max(first, chunks_of(span)[0]), min(end, chunks_of(span)[1])):
                page = cache[step.pages_SP[slot, chunk]].to(dtype)
                for block in range(0, CHUNK, keys):
                    key, value_rows = page[:, :, block:block + keys]
                    position = chunk * CHUNK + block + torch.arange(keys, device=rows.device)
                    hidden = position > sees[c]
                    if heads.window is not None:
                        hidden |= positions[c] - position >= heads.window
                    scores = (rows @ key.mT * heads.scale).masked_fill(hidden, -torch.inf)
                    new = torch.maximum(largest, scores.amax(-1, keepdim=True))
                    finite = new.masked_fill(new == -torch.inf, 0.0)    # of a block that is hidden as a whole
                    kept, weights = (largest - finite).exp2(), round_((scores - finite).exp2(), round_weights)
                    total = total * kept + weights.sum(-1, keepdim=True)
                    mixed = mixed * kept + weights @ value_rows.masked_fill(hidden[:, None], 0.0)
                    largest = new
            parts.append((largest, total, mixed))
        peak = torch.stack([largest for largest, _, _ in parts]).amax(0)
        total, mixed = torch.zeros_like(peak), torch.zeros_like(rows)
        for part_largest, part_total, part_mixed in parts:
            share = (part_largest - peak).exp2()
            total, mixed = total + share * part_total, mixed + share * part_mixed
        out[c] = (mixed / total).view(heads.num_heads, heads.head_dim)
    return round_(out.flatten(1), round_weights)


@dataclass(frozen=True, kw_only=True)
class AttentionWorkspace:
    """What the phase writes on the way; one serves all layers of the same heads, which run one after the other."""

    plan: Plan
    mixed: Tensor       # fp32: of (span, column, head) a row of K
    stats: Tensor       # fp32: its maximum and sum
    mixed_words: Tensor     # fp32: the same as words with tags (tagged.py), where others poll for them
    stats_words: Tensor
    arrivals: Tensor    # int32, zero between launches

    @staticmethod
    def of(heads: Heads, *, num_columns: int, max_length: int, device: torch.device) -> "AttentionWorkspace":
        """Errors: ValueError for a number of columns that no step has, NotImplementedError for one whose partial results no kernel can address."""
        if num_columns not in COLUMNS:
            raise ValueError(f"AttentionWorkspace: a step has {', '.join(map(str, COLUMNS))} columns; got {num_columns}.")
        spans = num_spans(max_length)
        if heads.window is not None:
            last = (max_length - 1) // CHUNK
            spans = max(span_of(e) - span_of(max(0, e - (heads.window + 6) // CHUNK - 1)) + 1 for e in range(last + 1))
        rows = spans * num_columns * heads.num_heads
        if 2 * rows * heads.head_dim >= 2**31:
            raise NotImplementedError(f"AttentionWorkspace: {rows} partial rows of {heads.head_dim} are beyond 32-bit offsets. Use fewer columns.")
        return AttentionWorkspace(plan=Plan.empty(num_columns=num_columns, max_length=max_length, device=device),
                                  mixed=torch.empty(rows, heads.head_dim, device=device), stats=torch.empty(rows, 2, device=device),
                                  mixed_words=torch.zeros(rows, heads.head_dim, 2, device=device), stats_words=torch.zeros(rows, 2, 2, device=device),
                                  arrivals=torch.zeros(num_columns * heads.num_kv_heads, dtype=torch.int32, device=device))


def attention_constants(heads: Heads, *, num_columns: int) -> dict[str, Any]:
    """What the device code must know of a layer."""
    return {"C": num_columns, "H": heads.num_heads, "G": heads.num_kv_heads, "HALF": heads.head_dim // 2, "SCALE": heads.scale, "EPS": heads.rms_eps or 0.0,
            "NORM": heads.rms_eps is not None, "WINDOW": heads.window or 0}


def plan_columns(step: Step, *, heads: Heads, workspace: AttentionWorkspace, max_length: int, form: AttentionForm = FORM,
                 causal: bool = True) -> None:
    """`plan_ref` into the workspace's plan: one launch of one program, once a step for all layers with these heads."""
    plan, columns = workspace.plan, len(step.slots_C)
    _check_step("plan_columns", step, like=plan.rows_N8)
    plan_kernel[(1,)](step.slots_C, step.positions_C, plan.rows_N8, plan.num_rows, plan.spans_C, C=columns, CLASSES=num_classes(max_length),
                      WINDOW=heads.window or 0, CAUSAL=causal, NUM_WARPS=NUM_WARPS, num_warps=NUM_WARPS,
                      **form.plan_constants(heads, programs=num_programs(plan.rows_N8.device)))


def attention(qkv_CW: Tensor, step: Step, *, heads: Heads, cache: Tensor, cos_LK: Tensor, sin_LK: Tensor, workspace: AttentionWorkspace, out_CW: Tensor,
              qk_norm: Tensor | None = None, form: AttentionForm = FORM, stamps: Tensor | None = None, causal: bool = True) -> Tensor:
    """`attention_ref` on an sm_90 GPU, into `out_CW` (bf16), behind `plan_columns` in the same form. Returns it. Nothing is read back.

    causal: as of `plan_columns`; False lets every column see its whole run (`sees_C` of the twin is the run's last position).

    Shapes: qkv_CW fp32 or bf16; cache bf16; qk_norm bf16 or fp32. stamps: int64 [programs, STAMPS], in ns, when each program came last to: its start, queries
        and new keys in shared memory, weights of a block, mixed values of an item, its partial results stored, merged; None to build without.
    Errors: ValueError for what does not fit, NotImplementedError on anything but sm_90.
    """
    where, columns, device = "attention", len(step.slots_C), qkv_CW.device
    _check_step(where, step, like=qkv_CW)
    rows = workspace.mixed.shape[0] // columns * columns
    kinds = (torch.float32, torch.bfloat16)
    require(where, "qkv", qkv_CW, (columns, heads.qkv_width), qkv_CW.dtype if qkv_CW.dtype in kinds else torch.float32, like=qkv_CW)
    require(where, "out", out_CW, (columns, heads.num_heads * heads.head_dim), torch.bfloat16, like=qkv_CW)
    require(where, "cache", cache, heads.cache_shape(len(cache)), torch.bfloat16, like=qkv_CW)
    for name, table in (("cos", cos_LK), ("sin", sin_LK)):
        require(where, name, table, (len(table), heads.head_dim // 2), torch.float32, like=qkv_CW)
    require(where, "the workspace's mixed", workspace.mixed, (rows, heads.head_dim), torch.float32, like=qkv_CW)
    require(where, "the workspace's stats", workspace.stats, (rows, 2), torch.float32, like=qkv_CW)
    require(where, "the workspace's arrivals", workspace.arrivals, (columns * heads.num_kv_heads,), torch.int32, like=qkv_CW)
    if heads.rms_eps is not None:
        if qk_norm is None:
            raise ValueError(f"{where}: heads with rms_eps need qk_norm, [H + G, K].")
        require(where, "qk_norm", qk_norm, (heads.num_heads + heads.num_kv_heads, heads.head_dim), qk_norm.dtype, like=qkv_CW)
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        raise NotImplementedError(f"{where}: the kernel is built for sm_90 (Hopper); got {device}. The twin (attention_ref) runs anywhere.")
    programs, constants, plan = num_programs(device), attention_constants(heads, num_columns=columns), workspace.plan
    if stamps is not None:
        require(where, "stamps", stamps, (programs, STAMPS), torch.int64, like=qkv_CW)
    attend_kernel[(programs,)](
        qkv_CW, cos_LK if qk_norm is None else qk_norm, cos_LK, sin_LK, cache, step.pages_SP, plan.rows_N8, plan.num_rows, workspace.mixed,
        workspace.stats, workspace.arrivals, out_CW, step.pages_SP.shape[1], plan.rows_N8 if stamps is None else stamps, PROGRAMS=programs,
        STAMPED=stamps is not None, CAUSAL=causal, NUM_WARPS=NUM_WARPS, num_warps=NUM_WARPS, **form.constants(), **constants)
    if not form.last_merges:
        merge_kernel[(programs,)](workspace.mixed, workspace.stats, plan.spans_C, out_CW, PROGRAMS=programs, C=columns, H=heads.num_heads,
                                  G=heads.num_kv_heads, HALF=heads.head_dim // 2, NUM_WARPS=NUM_WARPS, num_warps=NUM_WARPS)
    return out_CW


def _check_step(where: str, step: Step, *, like: Tensor) -> None:
    columns = len(step.slots_C)
    if columns not in COLUMNS:
        raise ValueError(f"{where}: a step has {', '.join(map(str, COLUMNS))} columns; got {columns}. Fill up with dead ones (slot -1).")
    require(where, "slots", step.slots_C, (columns,), torch.int32, like=like)
    require(where, "positions", step.positions_C, (columns,), torch.int32, like=like)
    require(where, "pages", step.pages_SP, tuple(step.pages_SP.shape[:2]), torch.int32, like=like)
