"""The control flow of the step kernel, and of rounds, at the sizes of real models: every wait, arrival and stage of every program, without the products.

What the device code decides by numbers is kept: how many items and stages a partition has, who meets whom how often, which signals are given. What it
computes is left out. Every consumer draws a routing list of its own, so that partitions disagree more than they ever can on a GPU.
"""

import random
import threading
from dataclasses import replace
from typing import Any

import step_on_cpu
import torch
from step_compile import VARIANTS, Variant, code_of, layouts_of_shape
from step_on_cpu import Kernel, Memory, Word

from kilotok.kernels.persistent import StepShape
from kilotok.kernels.persistent.draft_code import DRAFT_POINTER_TYPES, round_code
from kilotok.kernels.persistent.draft_model import DraftShape
from kilotok.kernels.persistent.step_code import POINTER_TYPES


class Nothing:
    """Memory that takes and gives nothing."""

    dtype = torch.float32

    def index(self, _i: Any) -> "Nothing":
        return self

    def _reinterpret(self, *_: Any) -> "Nothing":
        return self

    def load(self, _layout: Any) -> "Nothing":
        return self

    def store(self, _value: Any) -> None:
        return None

    def to(self, *_: Any) -> "Nothing":
        return self

    def __add__(self, _other: Any) -> "Nothing":
        return self

    __radd__ = __add__


_NOTHING = Nothing()
_NO_COLUMN = torch.zeros(8, dtype=torch.bool)


def _allocate(dtype: torch.dtype, shape: Any, layout: Any) -> Any:
    return step_on_cpu._allocate(dtype, shape, layout) if dtype == torch.int64 or list(shape) == [32] or shape[0] == 1 else _NOTHING


def _count_box(_desc: Any, _at: list[Any], barrier: Any, _target: Any, size: int) -> None:
    barrier.change(copied=size)


def count_stages(shape: StepShape, *, num_columns: int, programs: int, num_layers: int, num_steps: int, seed: int,
                 variant: Variant = VARIANTS["pairs"], one_list: bool = False, draft: DraftShape | None = None, drafts: bool = True,
                 every: int = 1) -> dict[str, int]:
    """Runs the kernel's control flow to its end; returns the stages that all producers copied and all consumers released. Raises `Stuck` if they wait
    for each other. With a draft num_steps are rounds, or without `drafts` steps of their kernel. every: of the programs only so many, and the last, as
    they meet at barriers over the grid alone."""
    code, draft_code = code_of(shape, num_columns=num_columns, programs=programs, variant=variant), None
    if draft is not None:
        shape = replace(shape, rolled=True)
        code, draft_code = round_code(shape, draft, layouts=layouts_of_shape(shape, programs=programs), num_columns=num_columns,
                                      programs=programs * variant.per_sm, **variant.code)
    code = replace(code, ONE_LIST=one_list)
    programs *= variant.per_sm
    counts, lock = {"copied": 0, "released": 0}, threading.Lock()
    draw = random.Random(seed)

    def multiply_item(_ring: Any, full: Any, empty: Any, slot: Any, phase: Any, _x: Any, num_blocks: int, stage_blocks: int, _units: int, stages: int,
                      _warps: int) -> Any:
        for _ in range(num_blocks // stage_blocks):
            full.index(slot).wait(phase)
            kernel.modules["moe.stream"].release(empty, slot)
            slot, phase = kernel.modules["moe.stream"].advance(slot, phase, stages)
        return _NOTHING, slot, phase

    def normalize(_x: Any, _w: Any, _live: Any, _area: Any, _squares: Any, met: Any, turn: Any, *_: Any) -> Any:
        meet = kernel.modules["persistent.dense_device"].meet
        return meet(met, meet(met, turn))

    def route(_logits: Any, _slots: Any, _table: Any, ends: Memory, *_: Any) -> Any:
        with lock:
            live = draw.choice((0, 1, 2, code.K, code.TILES, draw.randrange(code.TILES + 1)))
        values = (torch.arange(code.EXPERTS, dtype=torch.int32) + 1).clamp(max=live)
        values[code.E - 1:] = live
        ends.store(values[None])
        return Word(live), 0, ()

    def release(empty: Any, slot: Any) -> None:
        with lock:
            counts["released"] += 1
        empty.index(slot).change(arrivals=1)

    def expect(barrier: Any, size: Any) -> None:
        with lock:
            counts["copied"] += 1
        barrier.change(arrivals=1, expected=int(size))

    def nothing(*_: Any, **__: Any) -> Any:
        return _NOTHING

    def attend(*arguments: Any) -> None:
        *_, ahead, given, turn, _tagged, _tag = arguments
        if ahead:
            given.wait(int(turn) & 1)

    products: dict[str, Any] = {
        "load_activations": lambda *_: ((), ()), "activations": lambda *_: ((), ()), "begin_tile": lambda *_: ((), (), _NO_COLUMN),
        "multiply": lambda *_: (_NOTHING,), "down_columns": lambda *_: (0, 0, 0), "store_channels": nothing,
        "store_partials": nothing, "sum_over_warps": nothing, "keep_sums": nothing, "kept_sums": nothing}
    cheap: dict[str, dict[str, Any]] = {
        "moe.stream": {"release": release},
        "persistent.dense_device": {"multiply_item": multiply_item, "normalize": normalize, "load_norm": nothing, "load_fragments": nothing,
                                    "read_fragments": nothing, "rows_of": lambda *_: (Word(0), False), "sum_over_warps": nothing},
        "persistent.rolled_dense": {"load_weights": lambda *_: (), "_factor": nothing, "_load_residual": nothing, "_fill": nothing, "_copy_piece": nothing,
                                    "_multiply_stage": nothing, "sum_over_warps": lambda *_: 0.0, "_store_channels": nothing},
        "moe.device": products, "moe.rolled": products,
        "persistent.step_dense": {"live_of": lambda *_: 255},
        "persistent.step_phases": {"choose_experts": route, "clear_list": nothing, "write_list": nothing, "write_weights": nothing,
                                   "columns_of_tile": lambda *_: 0, "first_pairs": lambda *_: 0, "attend": attend, "prepare": nothing,
                                   "fetch_values": nothing, "merge_columns": nothing, "merge_tagged": nothing, "spans_of_row": nothing},
        "persistent.step_consumer": {"live_of": lambda *_: 255, "embed_phase": nothing, "add_phase": nothing, "sample_phase": nothing, "finish_phase": nothing,
                                   "load_norm": nothing},
        "persistent.draft_dense": {"live_of": lambda *_: 255},
        "persistent.draft_phases": {"attend": attend, "prepare": nothing, "fetch_values": nothing, "merge_columns": nothing,
                                    "merge_tagged": nothing, "spans_of_row": nothing},
        "persistent.draft_consumer": {"live_of": lambda *_: 255, **dict.fromkeys((
            "embed_phase", "add_phase", "sample_phase", "draft_embed_phase", "draft_sample_phase", "choose_phase", "accept_phase", "append_phase"), nothing)},
    }
    kernel = Kernel(programs, consumers=code.PARTITIONS, present=sorted({*range(0, programs, every), programs - 1}), cheap=cheap,
                    language={"allocate_shared_memory": _allocate, "store": nothing},
                    mbarrier={"expect": expect}, copy=lambda desc, at, barrier, target: _count_box(desc, at, barrier, target, int(desc[0, 0])))
    sizes = {"list_tiles": 2 * programs, "list_experts": 2 * programs * code.TILES, "list_pairs": 2 * programs * code.TILES * 8,
             "list_weights": 2 * programs * code.TILES * 8,
             "residual": code.C * code.D}

    def memory(types: Any) -> Any:
        return type(types)(**{name: torch.zeros(sizes.get(name, 1), dtype=torch.float32 if kind == "*fp32" else torch.int32)
                              for name, kind in types._asdict().items()})

    # instead of weights: bytes of a box
    descriptors = [torch.tensor([[size]]) for size in (4096,) * 5 + (4 * code.up.SCALE_BOX, 4096, 4 * code.down.SCALE_BOX) + (4096,) * (6 if draft else 0)]
    if draft_code is None:
        kernel.launch(tuple(descriptors), memory(POINTER_TYPES), num_layers, num_steps, 1, 1, 1000, 0, 1, 1, code=code)
    else:
        kernel.launch(tuple(descriptors), memory(POINTER_TYPES), num_layers, draft_code.LAYERS, num_steps, 1, 1, 1000, 0, 1, int(drafts), -1, 1, code=code,
                      draft=(memory(DRAFT_POINTER_TYPES), draft_code))
    return counts

