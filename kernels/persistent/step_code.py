"""What the device code of a step must know when it is compiled: sizes of a model, layouts of its weights, and how shared memory is cut.

One ring a consumer serves all phases: its slots hold stages of dense weights and of expert codes alike, in units of 4096 bytes. The scales of experts
have rings of their own beside it. What is not alive at the same time lies in one area (units of 1024 bytes):

    attention               queries | weights; before them values, but where the second consumer fetches the first ones of a layer: they lie in its area
    products                normalized activations | exchange of consumer 0 | exchange of consumer 1
    choice of experts       table of consumer 0 | of consumer 1

Where dense products are rolled, each consumer has an area of its own, with products in it one after the other:

    dense                   activations of X_STAGES stages | exchange
    experts                 table | exchange

Keys lie outside of it: the first ones of a layer are fetched while products are still under way.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from triton import next_power_of_2

from ..moe.product import Stages, scale_box
from ..mx.layouts import FragmentLayout
from .attention import FORM, AttentionForm
from .attention_device import value_width
from .attention_rows import staged_rows
from .fragments import NUM_WARPS, TILE_ROWS, UNIT_BYTES, DenseLayout
from .model import MATRICES, MAX_STEPS, StepShape, StepWeights
from .plan import num_classes
from .router import router_constants

PHASES = ("embed", "qkv", "attention", "merge", "out", "router", "gate_up", "down", "add", "head", "sample", "finish")
RESIDENT = ("all", "rounds")        # beside them: kernels of all phases
LAYER_STAMPS = 7                    # phases of a layer, each behind a barrier
SLICES = 32                         # parts of the vocabulary that sampling takes apart
_RING_BYTES = 105 * 1024            # of both consumers: what an SM has in flight at full bandwidth; more would make dependent loads wait
_SLOT_UNITS = 4                     # 16 KB: the least slot, if the weights' stages divide so
_MIXED_AHEAD = 4                    # stages of mixed values on their way to a rolled product
REGISTERS_OF_TWO = 80               # 2 * 384 threads: 61440 of an SM's 65536; setmaxnreg leaves a consumer 104
AREA_UNIT = 1024
_CHUNK_UNITS = UNIT_BYTES // AREA_UNIT      # of a block of every warp in bf16, or of the warps' sums
SHARED_BYTES_OF_TWO = 113 * 1024    # likewise, for each of two programs: 228 KB less 1 KB a program
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
    def of(layout: DenseLayout, *, slot_units: int, alike: tuple[DenseLayout, ...] = ()) -> "DenseCode":
        """alike: others that have the same stages."""
        blocks = max(b for b in range(1, slot_units // 2 + 1) if all(one.num_blocks % b == 0 for one in (layout, *alike)))
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
    def of(layout: FragmentLayout, *, parts: int) -> "ExpertCode":
        parts = 1 << (min(parts, layout.num_groups).bit_length() - 1)
        return ExpertCode(DEPTH=layout.depth, DEPTH_WARPS=layout.depth_warps, NUM_STEPS=layout.num_steps, PARTS=parts, TILE_STAGES=layout.num_groups,
                          SCALE_BOX=scale_box(layout, Stages(groups=1, parts=parts, stages=2, partitions=2)))


@dataclass(frozen=True)
class StepCode:
    """Everything; PHASE is one of PHASES for a launch of that phase alone, "all", or "rounds" (draft_code.py)."""

    PHASE: str
    PROGRAMS: int
    PARTITIONS: int         # consumers of a program
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
    KEYS: int
    QUERIES: int
    LAST_MERGES: bool
    PART_COLUMNS: int
    ATTENDING: int          # programs with items of attention
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
    ROLLED: bool            # little code for the experts: moe/rolled.py
    ROLLED_DENSE: bool      # and for dense products: rolled_dense.py
    ONE_LIST: bool          # consumer 0 chooses experts for its SM; else each consumer for itself
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
    VALUE_UNITS: int
    VALUES_AHEAD: bool      # values of attention lie in the area of a second consumer, which fetches the first ones of a layer
    TAGGED: bool            # partial results of attention are words that the second consumer polls for, instead of the last item's merge
    STAGE_BLOCKS: int       # of rolled dense products: blocks of a warp a stage
    X_STAGES: int           # stages whose activations are in shared memory
    DENSE_EXCHANGE_UNIT: int
    PRODUCT_UNITS: int      # of the area that a second consumer has
    SQUARES: int            # places for parts of a column's sum of squares
    TABLE_UNITS: int        # of a consumer's table of who chose whom
    KEYS_HALF: int          # half of the largest head whose keys there is memory for
    WORDS_CHANGE: bool = False     # the columns' words, inside a launch

    @staticmethod
    def of(shape: StepShape, *, layouts: dict[str, Any], num_columns: int, programs: int, phase: str = "all", profile: bool = False,
           parts: int = 4, rolled: bool = True, one_list: bool = False, form: AttentionForm = FORM, partitions: int = 2,
           alike: tuple[DenseLayout, ...] = ()) -> "StepCode":
        """layouts: of qkv, out, router, head (DenseLayout), gate_up and down (FragmentLayout). parts: 1, 2 or 4 stages of experts between two sums over the
        warps; rolled: in one body of code; one_list: only one consumer of an SM chooses experts, and has the other wait. programs: all,
        partitions: consumers of each; one consumer takes a model whose shape is `rolled`. alike: rolled matrices of others that share the kernel's ring.

        Errors: NotImplementedError for experts whose activations two consumers cannot hold, and as `router_constants`.
        """
        where, heads = "StepCode", shape.heads
        up, down = layouts["gate_up"], layouts["down"]
        if max(up.num_steps, down.num_steps) > MAX_STEPS:
            raise NotImplementedError(f"{where}: a warp of the resident kernel holds the activations of up to {MAX_STEPS} steps; got {up.num_steps} and "
                                      f"{down.num_steps}. Choose the layouts with max_steps={MAX_STEPS}.")
        slot_units = max(up.num_steps, down.num_steps, _SLOT_UNITS)
        matrices = tuple(layouts[name] for name in MATRICES)
        if any(layout.rolled != shape.rolled for layout in matrices) or (partitions == 1 and not shape.rolled):
            raise NotImplementedError(f"{where}: a program of one consumer takes rolled products, and those take matrices of their own layout. "
                                      "Pack the weights of a shape with rolled=True.")
        dense = {name: DenseCode.of(layouts[name], slot_units=slot_units, alike=(*matrices, *alike) if shape.rolled else ()) for name in MATRICES}
        for name in MATRICES:
            splits = {"qkv": shape.qkv_splits, "router": shape.router_splits}.get(name, 1)
            if splits != dense[name].SPLITS:
                raise NotImplementedError(f"{where}: whoever reads the sums of {name} takes {splits} of them; got {dense[name].SPLITS}.")
        experts = ExpertCode.of(up, parts=parts), ExpertCode.of(down, parts=parts)
        routing = router_constants(num_columns=num_columns, experts_per_token=shape.experts_per_token, num_experts=shape.num_experts)
        stages = max(2, min(8, _RING_BYTES // (2 * slot_units * (UNIT_BYTES + 256))))
        exchange = max(e.PARTS for e in experts) * NUM_WARPS * 128
        positions = max(dense[name].positions for name in ("qkv", "router", "head"))     # out reads mixed values as they are
        half = heads.head_dim // 2
        values = value_width(half) * form.keys * 2
        ahead = shape.rolled and partitions == 2
        attention = 2 * staged_rows(form.queries) * half * 2 + form.keys * form.queries * 2 + (0 if ahead else values)
        table_units = -(-num_columns * routing["EXPERTS"] // AREA_UNIT)
        exchange_unit = max(positions * 512 // AREA_UNIT, 2 * table_units)
        exchange_units = exchange * 4 // AREA_UNIT
        x_stages, product_units = 1, exchange_unit + 2 * exchange_units
        if shape.rolled:
            blocks = dense["qkv"].STAGE_BLOCKS
            normed = max(dense[name].NUM_BLOCKS for name in ("qkv", "router", "head")) // blocks
            x_stages = -(-max(normed, min(_MIXED_AHEAD, dense["out"].NUM_BLOCKS // blocks)) // 2) * 2     # an even number of chunks
            exchange_unit = table_units
            product_units = max(x_stages * blocks * _CHUNK_UNITS + _CHUNK_UNITS, exchange_unit + exchange_units)
        return StepCode(
            PHASE=phase, PROGRAMS=programs, PARTITIONS=partitions, PROFILE=profile, C=num_columns, COLUMN_TILES=num_columns // 8, D=shape.hidden_size,
            V=shape.vocab_size, EPS=shape.rms_eps, H=heads.num_heads, G=heads.num_kv_heads, HALF=half, KEYS=form.keys, QUERIES=form.queries,
            LAST_MERGES=form.last_merges, PART_COLUMNS=form.part_columns(heads), ATTENDING=programs // form.share,
            SCALE=heads.scale, QK_EPS=heads.rms_eps or 0.0,
            QK_NORM=heads.rms_eps is not None, WINDOW=heads.window or 0, CLASSES=num_classes(shape.max_length), E=shape.num_experts,
            K=shape.experts_per_token, F=shape.expert_hidden,
            EXPERTS=routing["EXPERTS"], TILES=routing["TILES"], PADDED_TILES=routing["PADDED_TILES"],
            NORMALIZE=shape.normalize_router_weights, ROLLED=rolled, ROLLED_DENSE=shape.rolled, ONE_LIST=one_list, qkv=dense["qkv"], out=dense["out"],
            router=dense["router"],
            head=dense["head"], up=experts[0], down=experts[1], SLOT_UNITS=slot_units, STAGES=stages,
            EXCHANGE=exchange, PAIR_TILES=max([NUM_WARPS // d.DEPTH_WARPS for d in dense.values() if d.PAIRS == 2], default=1), POSITIONS=positions,
            AREA_UNITS=max(-(-attention // AREA_UNIT), product_units),
            PRODUCT_UNITS=max(product_units, values // AREA_UNIT) if ahead else product_units, STAGE_BLOCKS=dense["qkv"].STAGE_BLOCKS, X_STAGES=x_stages,
            DENSE_EXCHANGE_UNIT=x_stages * dense["qkv"].STAGE_BLOCKS * _CHUNK_UNITS, SQUARES=max(32, next_power_of_2(-(-shape.hidden_size // TILE_ROWS))),
            EXCHANGE_UNIT=exchange_unit, EXCHANGE_UNITS=exchange_units,
            QUERY_UNIT=0 if ahead else values // AREA_UNIT, VALUE_UNITS=values // AREA_UNIT, VALUES_AHEAD=ahead,
            TAGGED=ahead and form.last_merges, TABLE_UNITS=table_units, KEYS_HALF=half)

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


def launch_options(code: StepCode) -> dict[str, Any]:
    """Of the compiler and the launch. Two programs an SM have 384 threads each, idle warps of the producer's group included; 256 where there is no producer."""
    options = {"num_warps": NUM_WARPS, "launch_cooperative_grid": code.PHASE in RESIDENT}
    if code.PARTITIONS == 1:
        options["maxnreg"] = 128 if code.PHASE in ("embed", "attention", "merge", "add", "sample", "finish") else REGISTERS_OF_TWO
    return options


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
    squares: Any            # fp32
    mixed: Any              # bf16
    mixed_pairs: Any        # i32: the same
    normed: Any             # bf16
    normed_pairs: Any       # i32: the same
    router_logits: Any      # fp32
    list_tiles: Any         # i32 [2 programs]: of a routing list for every consumer, for launches: a resident step has it in registers
    list_experts: Any       # i32: likewise
    list_pairs: Any         # i32
    list_weights: Any       # fp32
    list_counts: Any        # i32: likewise
    inter: Any              # bf16
    inter_pairs: Any        # i32: the same
    partials: Any           # fp32 [..., 2]: tagged words
    plan_rows: Any          # i32
    plan_num_rows: Any      # i32
    plan_spans: Any         # i32
    span_mixed: Any         # fp32
    span_stats: Any         # fp32
    span_words: Any         # fp32: tagged words of the same, as of S.TAGGED
    stats_words: Any        # fp32
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
    "fp32": "cos sin residual qkv router_logits list_weights partials squares span_mixed span_stats span_words stats_words logits best",
    "i64": "stamps",
    "i32": "words pages mixed_pairs normed_pairs list_tiles list_experts list_pairs list_counts inter_pairs plan_rows plan_num_rows plan_spans arrivals "
           "taps best_ids next distinct barrier fault stop ring_tokens ring_count host_stop",
}.items() for name in names.split()})
DTYPES = {"*bf16": torch.bfloat16, "*fp32": torch.float32, "*i64": torch.int64, "*i32": torch.int32}


def check_pointers(pointers: Pointers) -> None:
    """Our own invariant: every address is of what the kernel takes it for."""
    for name, tensor, kind in zip(Pointers._fields, pointers, POINTER_TYPES, strict=True):
        assert tensor.dtype == DTYPES[kind] and tensor.is_contiguous(), f"{name} must be contiguous {kind}; got {tensor.dtype}"
