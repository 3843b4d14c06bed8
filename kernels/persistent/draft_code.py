"""What the device code of rounds must know when it is compiled, beside a step's (step_code.py): a draft's sizes and matrices, and the words of its columns.

A kernel of rounds is one of rolled products: the draft's matrices go through the same ring in stages of the same size, and attention of the draft takes the
same area of shared memory as the target's. A kernel without a draft knows nothing of this file.

Words, int32 [3, 8, C], change inside a launch, so they are read past L1, behind a barrier; each set has rows as StepInputs:

    0    what the target's step reads; rows 3 and on are the host's, for all columns of a tile
    1    slots of the draft: row 0 is a sequence's anchor in its tile's first column; slot and position of its block
    2    what the draft's context takes: slot and position of committed columns
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from .attention_device import value_width
from .attention_rows import staged_rows
from .draft_model import DRAFT_MATRICES, DraftShape
from .fragments import NUM_WARPS
from .model import StepShape
from .plan import num_classes
from .step_code import AREA_UNIT, REGISTERS_OF_TWO, DenseCode, StepCode

ROUND_PHASES = ("draft_embed", "draft_qkv", "draft_attention", "draft_merge", "draft_out", "draft_gate_up", "draft_down", "draft_head", "draft_sample",
                "choose", "accept", "fc", "keys", "append")
WORD_SETS = 3


@dataclass(frozen=True)
class DraftCode:
    """The draft; PHASE is one of ROUND_PHASES for a launch of that phase alone, or "rounds"."""

    PHASE: str
    N: int                  # slots of a block, the anchor's included
    LAYERS: int
    EPS: float
    F: int
    MAX_LENGTH: int
    # attention
    H: int
    G: int
    HALF: int
    SCALE: float
    QK_EPS: float
    WINDOW: int
    CAUSAL: bool
    PART_COLUMNS: int
    CLASSES: int
    QUERY_UNIT: int         # of the area, in units of 1024 bytes
    # weights
    qkv: DenseCode
    out: DenseCode
    gate_up: DenseCode
    down: DenseCode
    fc: DenseCode
    keys: DenseCode

    @property
    def STREAMS(self) -> bool:
        """Whether the launch waits for weights."""
        return self.PHASE in ("rounds", "draft_qkv", "draft_out", "draft_gate_up", "draft_down", "draft_head", "fc", "keys")

    def of_phase(self, phase: str) -> "DraftCode":
        """For a launch of that phase alone."""
        return replace(self, PHASE=phase)


def round_code(shape: StepShape, draft: DraftShape, *, layouts: dict[str, Any], **options: Any) -> tuple[StepCode, DraftCode]:
    """The code of the target and of the draft in one kernel; layouts and options as `StepCode.of`.

    Errors: NotImplementedError for a target that is not `rolled`, ValueError as `DraftShape.require_target`, and as `StepCode.of`.
    """
    if not shape.rolled:
        raise NotImplementedError("round_code: drafts run in the kernel of rolled dense products alone. Pack the target's weights of a shape with rolled=True.")
    draft.require_target(shape)
    assert draft.num_layers <= shape.num_layers, "a round has as many tags as the target has layers"
    matrices = {name: draft.dense_layout(name) for name in DRAFT_MATRICES}
    code = StepCode.of(shape, layouts=layouts, alike=tuple(matrices.values()), **options)
    everything = (*(layouts[name] for name in ("qkv", "out", "router", "head")), *matrices.values())
    dense = {name: DenseCode.of(layout, slot_units=code.SLOT_UNITS, alike=everything) for name, layout in matrices.items()}
    assert all(one.STAGE_BLOCKS == code.STAGE_BLOCKS for one in dense.values()), "one piece of code for all dense products"
    assert max(dense[name].NUM_BLOCKS for name in ("qkv", "gate_up", "keys")) <= code.X_STAGES * code.STAGE_BLOCKS, "a norm of the same width"
    heads, half = draft.heads, draft.heads.head_dim // 2
    values = value_width(half) * code.KEYS * 2
    attention = 2 * staged_rows(code.QUERIES) * half * 2 + code.KEYS * code.QUERIES * 2 + (0 if code.VALUES_AHEAD else values)
    part_columns = 1 << (min(8, code.QUERIES // (heads.num_heads // heads.num_kv_heads)).bit_length() - 1)
    value_units = max(code.VALUE_UNITS, values // AREA_UNIT)
    return (replace(code, PHASE="rounds", WORDS_CHANGE=True, KEYS_HALF=max(code.HALF, half), AREA_UNITS=max(code.AREA_UNITS, -(-attention // AREA_UNIT)),
                    VALUE_UNITS=value_units, PRODUCT_UNITS=max(code.PRODUCT_UNITS, value_units if code.VALUES_AHEAD else 0)),
            DraftCode(PHASE="rounds", N=draft.block_size, LAYERS=draft.num_layers, EPS=draft.rms_eps, F=draft.intermediate_size, MAX_LENGTH=draft.max_length,
                      H=heads.num_heads, G=heads.num_kv_heads, HALF=half, SCALE=heads.scale, QK_EPS=heads.rms_eps or 0.0, WINDOW=heads.window or 0,
                      CAUSAL=draft.causal, PART_COLUMNS=part_columns, CLASSES=num_classes(draft.max_length),
                      QUERY_UNIT=0 if code.VALUES_AHEAD else values // AREA_UNIT, **dense))


class DraftPointers(NamedTuple):
    """Every tensor of the draft that the kernel is given an address of, by name; the comment is what it points to."""

    mask: Any               # bf16
    attention_norm: Any     # bf16
    mlp_norm: Any           # bf16
    hidden_norm: Any        # bf16
    norm: Any               # bf16
    qk_norm: Any            # bf16
    cos: Any                # fp32
    sin: Any                # fp32
    cache: Any              # bf16
    residual: Any           # fp32
    qkv: Any                # fp32
    mixed: Any              # bf16
    inter: Any              # bf16
    context: Any            # fp32
    keys: Any               # fp32
    plan_rows: Any          # i32
    plan_num_rows: Any      # i32
    plan_spans: Any         # i32
    span_mixed: Any         # fp32
    span_stats: Any         # fp32
    span_words: Any         # fp32: tagged words of the same, as of S.TAGGED
    stats_words: Any        # fp32
    arrivals: Any           # i32
    shares: Any             # fp32 [3, C, SLICES]: of a slice its best proposal's scaled logit, its largest one, the sum of its exponentials
    candidates: Any         # i32 [C]
    confidence: Any         # fp32 [C]
    limits: Any             # i32 [C / 8]
    verify: Any             # i32 [C / 8]
    committed: Any          # i32 [C / 8]
    cost: Any               # fp32 [8]
    scale: Any              # fp32 [8]
    ring_verify: Any        # i32 [rounds, C / 8], of the host


DRAFT_POINTER_TYPES = DraftPointers(**{name: f"*{kind}" for kind, names in {
    "bf16": "mask attention_norm mlp_norm hidden_norm norm qk_norm cache mixed inter",
    "fp32": "cos sin residual qkv context keys span_mixed span_stats span_words stats_words shares confidence cost scale",
    "i32": "plan_rows plan_num_rows plan_spans arrivals candidates limits verify committed ring_verify",
}.items() for name in names.split()})


def round_options(code: StepCode, draft: DraftCode) -> dict[str, Any]:
    """Of the compiler and the launch, as `step_code.launch_options`."""
    options: dict[str, Any] = {"num_warps": NUM_WARPS, "launch_cooperative_grid": draft.PHASE == "rounds"}
    if code.PARTITIONS == 1:
        options["maxnreg"] = REGISTERS_OF_TWO if draft.STREAMS else 128
    return options
