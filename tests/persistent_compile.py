"""The phases of a decode step built for sm_90 without a GPU."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kilotok.kernels.moe.layer import grid_barrier
from kilotok.kernels.persistent.attention import FORM, AttentionForm, Heads, attention_constants
from kilotok.kernels.persistent.attention_device import attend, attend_kernel, make_buffers, merge_columns, merge_kernel, prepare, spans_of_row
from kilotok.kernels.persistent.plan import num_classes, plan_kernel, plan_step
from kilotok.kernels.persistent.router import choose_and_route, make_tables, router_constants, router_kernel

# kernel arguments that are pointers, by what they point to; the others are i32
POINTERS = {name: kind for kind, names in {
    "*bf16": "norm_ptr cache_ptr out_ptr",
    "*fp32": "qkv_ptr cos_ptr sin_ptr mixed_ptr stats_ptr logits_ptr weights_ptr",
    "*i32": "pages_ptr rows_ptr num_rows_ptr spans_ptr arrivals_ptr slots_ptr positions_ptr num_tiles_ptr experts_ptr pairs_ptr num_experts_ptr barrier_ptr "
            "fault_ptr",
    "*i64": "stamps_ptr",
}.items() for name in names.split()}


@dataclass(frozen=True, kw_only=True)
class Built:
    """What the binary says of itself."""

    registers: int
    stack_bytes: int
    local_bytes: int
    shared_bytes: int
    code_bytes: int
    ptx: str

    def __str__(self) -> str:
        return (f"{self.registers} registers, {self.stack_bytes}+{self.local_bytes} bytes of stack and local memory, {self.shared_bytes / 1024:.1f} KB shared, "
                f"{self.code_bytes / 1024:.1f} KB of code")


def build(kernel: Any, constants: dict[str, Any], *, maxnreg: int | None = None) -> Built:
    """Compile for sm_90, for tensors on 16-byte boundaries."""
    constants = {**constants, "NUM_WARPS": 8}
    names = list(kernel.arg_names)
    assert set(constants) == {n for n in names if n.isupper()}, "a launch would miss or refuse some of these constants"
    signature = {n: "constexpr" if n in constants else POINTERS.get(n, "i32") for n in names}
    attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in POINTERS}
    source = GluonASTSource(kernel, signature, {n: constants[n] for n in names if n in constants}, attrs=attrs)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8} | ({"maxnreg": maxnreg} if maxnreg else {}))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run([triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        sass = subprocess.run([triton.knobs.nvidia.nvdisasm.path, "-c", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", usage)
    assert found is not None, usage
    registers, stack, local = map(int, found.groups())
    return Built(registers=registers, stack_bytes=stack, local_bytes=local, shared_bytes=compiled.metadata.shared,
                 code_bytes=16 * len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s", sass, re.M)), ptx=compiled.asm["ptx"])


@cache
def build_attend(heads: Heads, *, num_columns: int, form: AttentionForm = FORM, stamped: bool = False, maxnreg: int | None = None,
                 causal: bool = True) -> Built:
    constants = {**attention_constants(heads, num_columns=num_columns), **form.constants(), "PROGRAMS": 132, "STAMPED": stamped, "CAUSAL": causal}
    return build(attend_kernel, constants, maxnreg=maxnreg)


@cache
def build_merge(heads: Heads, *, num_columns: int) -> Built:
    return build(merge_kernel, {"PROGRAMS": 132, "C": num_columns, "H": heads.num_heads, "G": heads.num_kv_heads, "HALF": heads.head_dim // 2})


@cache
def build_plan(*, num_columns: int, max_length: int, window: int | None = None, causal: bool = True) -> Built:
    return build(plan_kernel, {"C": num_columns, "CLASSES": num_classes(max_length), "WINDOW": window or 0, "AT_ONCE": 33, "PART_COLUMNS": 4, "CAUSAL": causal})


@cache
def build_router(*, num_columns: int, num_experts: int, experts_per_token: int, normalize: bool = True) -> Built:
    constants = router_constants(num_columns=num_columns, experts_per_token=experts_per_token, num_experts=num_experts)
    return build(router_kernel, {**constants, "NORMALIZE": normalize})


# --- all phases in one kernel, as a resident step calls them ---


@gluon.jit
def _consumer(buffers, tables, step, plan, attention, routing, barrier_ptr, fault_ptr, num_layers, C: gl.constexpr, H: gl.constexpr, G: gl.constexpr,  # type: ignore
              HALF: gl.constexpr, SCALE: gl.constexpr, EPS: gl.constexpr, NORM: gl.constexpr, WINDOW: gl.constexpr, CLASSES: gl.constexpr,
              AT_ONCE: gl.constexpr, PART_COLUMNS: gl.constexpr, E: gl.constexpr, K: gl.constexpr, EXPERTS: gl.constexpr, TILES: gl.constexpr,
              PADDED_TILES: gl.constexpr, LAST_MERGES: gl.constexpr, KEYS: gl.constexpr, QUERIES: gl.constexpr, NUM_WARPS: gl.constexpr):
    slots_ptr, positions_ptr = step
    table, ends = tables
    rows_ptr, num_rows_ptr, spans_ptr = plan
    qkv_ptr, norm_ptr, cos_ptr, sin_ptr, cache_ptr, pages_ptr, mixed_ptr, stats_ptr, arrivals_ptr, out_ptr, num_pages = attention
    logits_ptr, num_tiles_ptr, experts_ptr, pairs_ptr, weights_ptr, num_experts_ptr = routing
    number = gl.program_id(0)
    if number == 0:
        plan_step(slots_ptr, positions_ptr, rows_ptr, num_rows_ptr, spans_ptr, C, CLASSES, WINDOW, AT_ONCE, PART_COLUMNS, NUM_WARPS)
    grid_barrier(barrier_ptr, fault_ptr, 0, 1, 132, NUM_WARPS)
    for _ in range(num_layers):
        item = prepare(buffers[0], norm_ptr, cache_ptr, pages_ptr, rows_ptr, num_rows_ptr, num_pages, number, H, G, HALF, NORM, KEYS, NUM_WARPS)
        spans = spans_of_row(spans_ptr, number, C, H, G)
        grid_barrier(barrier_ptr, fault_ptr, 0, 1, 132, NUM_WARPS)   # queries, keys and values are there
        attend(item, buffers, qkv_ptr, norm_ptr, cos_ptr, sin_ptr, cache_ptr, pages_ptr, rows_ptr, mixed_ptr, stats_ptr, arrivals_ptr, out_ptr, num_pages,
               number, rows_ptr, 132, C, H, G, HALF, SCALE, EPS, NORM, WINDOW, LAST_MERGES, KEYS, QUERIES, 1, False, NUM_WARPS)
        grid_barrier(barrier_ptr, fault_ptr, 0, 1, 132, NUM_WARPS)
        if not LAST_MERGES:
            merge_columns(mixed_ptr, stats_ptr, spans_ptr, out_ptr, number, spans, 132, C, H, G, HALF, NUM_WARPS)
            grid_barrier(barrier_ptr, fault_ptr, 0, 1, 132, NUM_WARPS)
        choose_and_route(logits_ptr, slots_ptr, table, ends, num_tiles_ptr + number, experts_ptr + number * TILES, pairs_ptr + number * (TILES * 8),
                         weights_ptr + number * (TILES * 8), num_experts_ptr + number * C, C, E, K, EXPERTS, TILES, PADDED_TILES, True, NUM_WARPS)


@gluon.jit
def _producer(go):  # type: ignore
    mbarrier.arrive(go, count=1)


@gluon.jit
def _resident_kernel(slots_ptr, positions_ptr, rows_ptr, num_rows_ptr, spans_ptr, qkv_ptr, norm_ptr, cos_ptr, sin_ptr, cache_ptr, pages_ptr,  # type: ignore
                     mixed_ptr, stats_ptr, arrivals_ptr, out_ptr, num_pages, logits_ptr, num_tiles_ptr, experts_ptr, pairs_ptr, weights_ptr, num_experts_ptr,
                     barrier_ptr, fault_ptr, num_layers, C: gl.constexpr, H: gl.constexpr, G: gl.constexpr, HALF: gl.constexpr, SCALE: gl.constexpr,
                     EPS: gl.constexpr, NORM: gl.constexpr, WINDOW: gl.constexpr, CLASSES: gl.constexpr, AT_ONCE: gl.constexpr,
                     PART_COLUMNS: gl.constexpr, E: gl.constexpr, K: gl.constexpr, EXPERTS: gl.constexpr, TILES: gl.constexpr, PADDED_TILES: gl.constexpr,
                     LAST_MERGES: gl.constexpr, KEYS: gl.constexpr, QUERIES: gl.constexpr, NUM_WARPS: gl.constexpr):
    buffers = make_buffers(HALF, KEYS, QUERIES)
    go = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(go, count=1)
    gl.warp_specialize([
        (_consumer, (buffers, make_tables(C, EXPERTS), (slots_ptr, positions_ptr), (rows_ptr, num_rows_ptr, spans_ptr),
                     (qkv_ptr, norm_ptr, cos_ptr, sin_ptr, cache_ptr, pages_ptr, mixed_ptr, stats_ptr, arrivals_ptr, out_ptr, num_pages),
                     (logits_ptr, num_tiles_ptr, experts_ptr, pairs_ptr, weights_ptr, num_experts_ptr), barrier_ptr, fault_ptr, num_layers, C, H, G, HALF,
                     SCALE, EPS, NORM, WINDOW, CLASSES, AT_ONCE, PART_COLUMNS, E, K, EXPERTS, TILES, PADDED_TILES, LAST_MERGES, KEYS, QUERIES, NUM_WARPS)),
        (_producer, (go,)),
    ], [1], [24])


@cache
def build_resident(heads: Heads, *, num_columns: int, max_length: int, num_experts: int, experts_per_token: int, form: AttentionForm = FORM) -> Built:
    """Plan, barriers over the grid, attention and router in the consumers of a specialised kernel, without the products between them."""
    return build(_resident_kernel, {**attention_constants(heads, num_columns=num_columns), **form.constants(), **form.plan_constants(heads, programs=132),
                                    "CLASSES": num_classes(max_length),
                                    **router_constants(num_columns=num_columns, experts_per_token=experts_per_token, num_experts=num_experts)})
