"""What the device code of a step must know when it is compiled: sizes of a model, layouts of its weights, and how shared memory is cut.

One ring a consumer serves all phases: its slots hold stages of dense weights and of expert codes alike, in units of 4096 bytes. The scales of experts
have rings of their own beside it. What is not alive at the same time lies in one area (units of 1024 bytes):

    attention               values | queries | weights
    products                normalized activations | exchange of consumer 0 | exchange of consumer 1

Keys lie outside of it: the first ones of a layer are fetched while products are still under way.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ..moe.product import Stages, scale_box
from ..mx.layouts import FragmentLayout
from .fragments import NUM_WARPS, UNIT_BYTES, DenseLayout
from .model import MAX_STEPS, StepShape, StepWeights
from .plan import CHUNK, RUN_COLUMNS, num_classes
from .router import router_constants

PHASES = ("embed", "qkv", "attention", "out", "router", "gate_up", "down", "add", "head", "sample", "finish")
LAYER_STAMPS = 7                    # phases of a layer, each behind a barrier
SLICES = 32                         # parts of the vocabulary that sampling takes apart
_RING_BYTES = 105 * 1024            # of both consumers: what an SM has in flight at full bandwidth; more would make dependent loads wait
_SLOT_UNITS = 4                     # 16 KB: the least slot, if the weights' stages divide so
AREA_UNIT = 1024
SHARED_BYTES = 227 * 1024           # of an SM of an H200, for one program


@dataclass(frozen=True)
class DenseCode:
    """One matrix of a layer; see fragments.py."""

    ROWS: int
    DEPTH: int
    DEPTH_WARPS: int
    NUM_BLOCKS: int
    PAIRS: int
    SPLITS: int
    STAGE_BLOCKS: int
    ITEMS: int
    UNITS: int          # of one matrix

    @staticmethod
    def of(layout: DenseLayout, *, slot_units: int) -> "DenseCode":
        blocks = max(b for b in range(1, slot_units // 2 + 1) if layout.num_blocks % b == 0)
        return DenseCode(ROWS=layout.rows, DEPTH=layout.depth, DEPTH_WARPS=layout.depth_warps, NUM_BLOCKS=layout.num_blocks, PAIRS=layout.pairs,
                         SPLITS=layout.splits, STAGE_BLOCKS=blocks, ITEMS=layout.num_items, UNITS=layout.num_units)

    @property
    def positions(self) -> int:
        """Blocks of normalized activations in shared memory."""
        return -(-self.SPLITS * self.PAIRS * self.NUM_BLOCKS * self.DEPTH_WARPS // 8) * 8


@dataclass(frozen=True)
class ExpertCode:
    """Gate and up, or down; see `moe/product.py`."""

    DEPTH: int
    DEPTH_WARPS: int
    NUM_STEPS: int
    PARTS: int
    TILE_STAGES: int
    SCALE_BOX: int

    @staticmethod
    def of(layout: FragmentLayout) -> "ExpertCode":
        parts = 1 << (min(4, layout.num_groups).bit_length() - 1)
        return ExpertCode(DEPTH=layout.depth, DEPTH_WARPS=layout.depth_warps, NUM_STEPS=layout.num_steps, PARTS=parts, TILE_STAGES=layout.num_groups,
                          SCALE_BOX=scale_box(layout, Stages(groups=1, parts=parts, stages=2, partitions=2)))


@dataclass(frozen=True)
class StepCode:
    """Everything; PHASE is one of PHASES for a launch of that phase alone, or "all"."""

    PHASE: str
    PROGRAMS: int
    PROFILE: bool
    C: int
    COLUMN_TILES: int
    D: int
    V: int
    EPS: float
    # attention
    H: int
    G: int
    HALF: int
    QUERY_ROWS: int
    SCALE: float
    QK_EPS: float
    QK_NORM: bool
    WINDOW: int
    CLASSES: int
    # experts
    E: int
    K: int
    F: int
    EXPERTS: int
    TILES: int
    PADDED_TILES: int
    NORMALIZE: bool
    # weights
    qkv: DenseCode
    out: DenseCode
    router: DenseCode
    head: DenseCode
    up: ExpertCode
    down: ExpertCode
    # shared memory
    SLOT_UNITS: int
    STAGES: int
    EXCHANGE: int           # fp32 of a consumer
    PAIR_TILES: int
    POSITIONS: int
    AREA_UNITS: int
    EXCHANGE_UNIT: int      # of the area, where consumer 0's begins
    EXCHANGE_UNITS: int
    QUERY_UNIT: int

    @staticmethod
    def of(shape: StepShape, *, layouts: dict[str, Any], num_columns: int, programs: int, phase: str = "all", profile: bool = False) -> "StepCode":
        """layouts: of qkv, out, router, head (DenseLayout), gate_up and down (FragmentLayout).

        Errors: NotImplementedError for experts whose activations two consumers cannot hold, and as `router_constants`.
        """
        where, heads = "StepCode", shape.heads
        up, down = layouts["gate_up"], layouts["down"]
        if max(up.num_steps, down.num_steps) > MAX_STEPS:
            raise NotImplementedError(f"{where}: a warp of the resident kernel holds the activations of up to {MAX_STEPS} steps; got {up.num_steps} and "
                                      f"{down.num_steps}. Choose the layouts with max_steps={MAX_STEPS}.")
        slot_units = max(up.num_steps, down.num_steps, _SLOT_UNITS)
        dense = {name: DenseCode.of(layouts[name], slot_units=slot_units) for name in ("qkv", "out", "router", "head")}
        for name in ("qkv", "out", "router", "head"):
            splits = shape.qkv_splits if name == "qkv" else 1
            if splits != dense[name].SPLITS:
                raise NotImplementedError(f"{where}: whoever reads the sums of {name} takes {splits} of them; got {dense[name].SPLITS}.")
        experts = ExpertCode.of(up), ExpertCode.of(down)
        table = router_constants(num_columns=num_columns, experts_per_token=shape.experts_per_token, num_experts=shape.num_experts)
        stages = max(2, min(8, _RING_BYTES // (2 * slot_units * (UNIT_BYTES + 256))))
        exchange = max(e.PARTS for e in experts) * NUM_WARPS * 128
        positions = max(dense[name].positions for name in ("qkv", "router", "head"))     # out reads mixed values as they are
        query_rows = -(-RUN_COLUMNS * (heads.num_heads // heads.num_kv_heads) // 64) * 64
        half = heads.head_dim // 2
        values = 2 * CHUNK * half * 2
        attention = values + 2 * query_rows * half * 2 + query_rows * CHUNK * 2
        exchange_unit = positions * 512 // AREA_UNIT
        exchange_units = exchange * 4 // AREA_UNIT
        return StepCode(
            PHASE=phase, PROGRAMS=programs, PROFILE=profile, C=num_columns, COLUMN_TILES=num_columns // 8, D=shape.hidden_size, V=shape.vocab_size,
            EPS=shape.rms_eps, H=heads.num_heads, G=heads.num_kv_heads, HALF=half, QUERY_ROWS=query_rows, SCALE=heads.scale, QK_EPS=heads.rms_eps or 0.0,
            QK_NORM=heads.rms_eps is not None, WINDOW=heads.window or 0, CLASSES=num_classes(shape.max_length), E=shape.num_experts,
            K=shape.experts_per_token, F=shape.expert_hidden,
            EXPERTS=table["EXPERTS"], TILES=table["TILES"], PADDED_TILES=table["PADDED_TILES"],
            NORMALIZE=shape.normalize_router_weights, qkv=dense["qkv"], out=dense["out"], router=dense["router"],
            head=dense["head"], up=experts[0], down=experts[1], SLOT_UNITS=slot_units, STAGES=stages,
            EXCHANGE=exchange, PAIR_TILES=max([NUM_WARPS // d.DEPTH_WARPS for d in dense.values() if d.PAIRS == 2], default=1), POSITIONS=positions,
            AREA_UNITS=max(-(-attention // AREA_UNIT), exchange_unit + 2 * exchange_units), EXCHANGE_UNIT=exchange_unit, EXCHANGE_UNITS=exchange_units,
            QUERY_UNIT=values // AREA_UNIT)

    def expert_stages(self) -> tuple[Stages, Stages]:
        """Of gate and up, and of down, as their descriptors are made."""
        up, down = (Stages(groups=1, parts=e.PARTS, stages=self.STAGES, partitions=2) for e in (self.up, self.down))
        return up, down

    def of_phase(self, phase: str) -> "StepCode":
        """For a launch of that phase alone."""
        return replace(self, PHASE=phase)


def layouts_of(weights: StepWeights) -> dict[str, Any]:
    """What `StepCode.of` takes."""
    return {"qkv": weights.qkv.layout, "out": weights.out.layout, "router": weights.router.layout, "head": weights.head.layout,
            "gate_up": weights.experts.gate_up.layout, "down": weights.experts.down.layout}


class Pointers(NamedTuple):
    """Every tensor that the kernel is given an address of, by name; the comment is what it points to."""

    words: Any              # i32 [8, C]: StepInputs
    embedding: Any          # bf16
    attention_norm: Any     # bf16
    experts_norm: Any       # bf16
    norm: Any               # bf16
    qk_norm: Any            # bf16
    cos: Any                # fp32
    sin: Any                # fp32
    cache: Any              # bf16
    pages: Any              # i32
    residual: Any           # fp32
    qkv: Any                # fp32
    mixed: Any              # bf16
    mixed_pairs: Any        # i32: the same
    normed: Any             # bf16
    normed_pairs: Any       # i32: the same
    router_logits: Any      # fp32
    list_tiles: Any         # i32 [2 programs]: a routing list for every consumer
    list_experts: Any       # i32
    list_pairs: Any         # i32
    list_weights: Any       # fp32
    list_counts: Any        # i32
    inter: Any              # bf16
    inter_pairs: Any        # i32: the same
    partials: Any           # fp32
    plan_rows: Any          # i32
    plan_num_rows: Any      # i32
    plan_spans: Any         # i32
    span_mixed: Any         # fp32
    span_stats: Any         # fp32
    arrivals: Any           # i32
    taps: Any               # i32 [L]: place of a layer's output among the features, or -1
    features: Any           # bf16
    logits: Any             # fp32
    best: Any               # fp32 [C, SLICES]
    best_ids: Any           # i32 [C, SLICES]
    next: Any               # i32 [C]
    distinct: Any           # i32 [L]
    barrier: Any            # i32
    fault: Any              # i32
    stop: Any               # i32: the host wants no further step
    ring_tokens: Any        # i32 [steps, C], of the host
    ring_count: Any         # i32, of the host: steps whose tokens are there
    host_stop: Any          # i32, of the host
    stamps: Any             # i64


POINTER_TYPES = Pointers(**{name: f"*{kind}" for kind, names in {
    "bf16": "embedding attention_norm experts_norm norm qk_norm cache mixed normed inter features",
    "fp32": "cos sin residual qkv router_logits list_weights partials span_mixed span_stats logits best",
    "i64": "stamps",
    "i32": "words pages mixed_pairs normed_pairs list_tiles list_experts list_pairs list_counts inter_pairs plan_rows plan_num_rows plan_spans arrivals "
           "taps best_ids next distinct barrier fault stop ring_tokens ring_count host_stop",
}.items() for name in names.split()})
_DTYPES = {"*bf16": torch.bfloat16, "*fp32": torch.float32, "*i64": torch.int64, "*i32": torch.int32}


def check_pointers(pointers: Pointers) -> None:
    """Our own invariant: every address is of what the kernel takes it for."""
    for name, tensor, kind in zip(Pointers._fields, pointers, POINTER_TYPES, strict=True):
        assert tensor.dtype == _DTYPES[kind] and tensor.is_contiguous(), f"{name} must be contiguous {kind}; got {tensor.dtype}"
