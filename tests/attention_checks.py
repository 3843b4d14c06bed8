"""Cases of decode attention and what must hold of whatever runs them: the device code on a CPU, or the kernel on a GPU."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from gluon_on_cpu import launch, on_cpu
from tolerances import Bound, assert_equal, assert_within
from torch import Tensor

from kilotok.kernels.persistent.attention import (
    AttentionForm,
    AttentionWorkspace,
    Heads,
    Step,
    attention,
    attention_constants,
    attention_ref,
    plan_columns,
    rope_table,
)
from kilotok.kernels.persistent.plan import CHUNK, check_columns, num_classes

HEADS = {
    "Qwen3-30B-A3B": Heads(num_heads=32, num_kv_heads=4, head_dim=128, rms_eps=1e-6),
    "SmolLM2-MoE": Heads(num_heads=9, num_kv_heads=3, head_dim=64),
    "pocket": Heads(num_heads=8, num_kv_heads=4, head_dim=32, rms_eps=1e-6),
}
DEAD = (-1, 0)
# Rounding of queries, keys, values and the result is the twin's; a sum in another order moves a few weights or results to the next bf16 number.
KERNEL = Bound(maximum=2.0**-7, rms=2.0**-10, reason="bf16 weights and results next to a tie, after fp32 sums in another order")
# Weights lose 2**-9 each, in random directions.
EXACT = Bound(maximum=2.0**-6, rms=2.0**-8, reason="weights and results rounded to bf16, against float64 on the same bf16 queries, keys and values")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step over a cache. Where nothing may be read, the cache is NaN. Not causal: columns see their whole run."""

    heads: Heads
    step: Step
    qkv_CW: Tensor
    cache: Tensor
    cos_LK: Tensor
    sin_LK: Tensor
    qk_norm: Tensor | None
    max_length: int
    causal: bool = True

    def sees(self) -> Tensor | None:
        """The last position that each column sees, where it is not its own."""
        if self.causal:
            return None
        slots, positions = self.step.slots_C.tolist(), self.step.positions_C.tolist()
        return torch.tensor([max(p for s, p in zip(slots, positions, strict=True) if s == slot) for slot in slots], dtype=torch.int32)

    def twin(self, *, dtype: torch.dtype = torch.float32, weights_exact: bool = False, keys: int = CHUNK) -> tuple[Tensor, Tensor]:
        """(output, the cache after it). weights_exact: nothing is rounded behind the bf16 queries, keys and values."""
        cache = self.cache.clone()
        out = attention_ref(self.qkv_CW, self.step, heads=self.heads, cache=cache, cos_LK=self.cos_LK, sin_LK=self.sin_LK, qk_norm=self.qk_norm, dtype=dtype,
                            rounded=torch.bfloat16, round_weights=not weights_exact, keys=keys, sees_C=self.sees())
        return out, cache

    def only(self, columns: Sequence[int]) -> "Case":
        """The same step with all other columns dead and their inputs NaN."""
        dead = torch.ones(len(self.step.slots_C), dtype=torch.bool, device=self.qkv_CW.device)
        dead[list(columns)] = False
        return replace(self, step=replace(self.step, slots_C=self.step.slots_C.masked_fill(dead, -1)),
                       qkv_CW=self.qkv_CW.masked_fill(dead.unsqueeze(1), torch.nan))


def case_of(heads: Heads, columns: Sequence[tuple[int, int]], *, max_length: int, seed: int = 0, device: str = "cpu",
            dtype: torch.dtype = torch.float32) -> Case:
    """(slot, position) of every column, slot -1 where it is dead."""
    slots, positions = (list(part) for part in zip(*columns, strict=True))
    num_slots, chunks = max(*slots, 0) + 1, -(-max_length // CHUNK)
    check_columns(slots, positions, max_length=max_length, num_sequences=num_slots)
    random = torch.Generator(device).manual_seed(seed)
    cos, sin = rope_table(head_dim=heads.head_dim, theta=1e4, max_length=max_length, device=torch.device(device))
    pages = torch.randperm(num_slots * chunks, generator=random, device=device).to(torch.int32).view(num_slots, chunks)
    cache = torch.full(heads.cache_shape(num_slots * chunks), torch.nan, dtype=torch.bfloat16, device=device)
    for slot in {s for s in slots if s >= 0}:
        start = min(p for s, p in columns if s == slot)
        for chunk in range(-(-start // CHUNK)):
            rows = min(CHUNK, start - chunk * CHUNK)
            shape = (2, heads.num_kv_heads, rows, heads.head_dim)
            cache[pages[slot, chunk], :, :, :rows] = torch.randn(shape, generator=random, device=device).to(torch.bfloat16)
    qkv = torch.randn(len(slots), heads.qkv_width, generator=random, device=device).to(dtype)
    norm = None
    if heads.rms_eps is not None:
        norm = torch.rand(heads.num_heads + heads.num_kv_heads, heads.head_dim, generator=random, device=device).add(0.5).to(torch.bfloat16)
    slots_C = torch.tensor(slots, dtype=torch.int32, device=device)
    qkv[slots_C < 0] = torch.nan
    return Case(heads=heads, step=Step(slots_C=slots_C, positions_C=torch.tensor(positions, dtype=torch.int32, device=device), pages_SP=pages), qkv_CW=qkv,
                cache=cache, cos_LK=cos, sin_LK=sin, qk_norm=norm, max_length=max_length)


Run = Callable[..., tuple[Tensor, Tensor]]


def poisoned(case: Case) -> AttentionWorkspace:
    space = AttentionWorkspace.of(case.heads, num_columns=len(case.step.slots_C), max_length=case.max_length, device=case.qkv_CW.device)
    space.mixed.fill_(torch.nan)
    space.stats.fill_(torch.nan)
    space.plan.rows_N8.fill_(-(2**30))
    space.plan.spans_C.fill_(-(2**30))
    return space


def run_on_cpu(case: Case, *, form: AttentionForm, seed: int = 0, programs: int = 29) -> tuple[Tensor, Tensor]:
    """(output, cache) of the device code, its programs in a random order. Dead columns of the output are NaN if nothing wrote them."""
    device, planning = on_cpu("attention_device"), on_cpu("plan")
    space, cache, columns = poisoned(case), case.cache.clone(), len(case.step.slots_C)
    plan, step = space.plan, case.step
    launch(planning.plan_kernel, 1, step.slots_C, step.positions_C, plan.rows_N8, plan.num_rows, plan.spans_C, C=columns,
           CLASSES=num_classes(case.max_length), WINDOW=case.heads.window or 0, NUM_WARPS=8, CAUSAL=case.causal,
           **form.plan_constants(case.heads, programs=programs))
    out = torch.full((columns, case.heads.num_heads * case.heads.head_dim), torch.nan, dtype=torch.bfloat16)
    launch(device.attend_kernel, programs, case.qkv_CW, case.qkv_CW if case.qk_norm is None else case.qk_norm, case.cos_LK, case.sin_LK, cache, step.pages_SP,
           plan.rows_N8, plan.num_rows, space.mixed, space.stats, space.arrivals, out, step.pages_SP.shape[1], plan.rows_N8, PROGRAMS=programs,
           STAMPED=False, CAUSAL=case.causal, NUM_WARPS=8, seed=seed, **form.constants(), **attention_constants(case.heads, num_columns=columns))
    if not form.last_merges:
        launch(device.merge_kernel, 5, space.mixed, space.stats, plan.spans_C, out, PROGRAMS=5, C=columns, H=case.heads.num_heads,
               G=case.heads.num_kv_heads, HALF=case.heads.head_dim // 2, NUM_WARPS=8, seed=seed)
    assert not space.arrivals.any(), "counters are zero between launches"
    return out, cache


def run_on_gpu(case: Case, *, form: AttentionForm, seed: int = 0) -> tuple[Tensor, Tensor]:
    """The kernels; `seed` changes nothing."""
    space, cache, columns = poisoned(case), case.cache.clone(), len(case.step.slots_C)
    out = torch.full((columns, case.heads.num_heads * case.heads.head_dim), torch.nan, dtype=torch.bfloat16, device=case.qkv_CW.device)
    plan_columns(case.step, heads=case.heads, workspace=space, max_length=case.max_length, form=form, causal=case.causal)
    attention(case.qkv_CW, case.step, heads=case.heads, cache=cache, cos_LK=case.cos_LK, sin_LK=case.sin_LK, workspace=space, out_CW=out,
              qk_norm=case.qk_norm, form=form, causal=case.causal)
    assert not space.arrivals.any(), "counters are zero between launches"
    return out, cache


def check_case(case: Case, run: Run, form: AttentionForm) -> None:
    """Output and cache against the twin and against float64; repeated runs bit by bit; dead columns untouched."""
    live = case.step.slots_C >= 0
    out, cache = run(case, form=form)
    twin, twin_cache = case.twin(keys=form.keys)
    assert_within(out[live], twin[live], bound=KERNEL, what="output")
    assert bool(out[~live].isnan().all()), "a dead column was written"
    assert_equal(cache.isnan(), twin_cache.isnan(), what="positions of the cache that hold something")
    assert_within(cache.nan_to_num(), twin_cache.nan_to_num(), bound=KERNEL, what="cache")
    assert_within(out[live], case.twin(dtype=torch.float64, weights_exact=True)[0][live], bound=EXACT, what="output against float64")
    for seed in (1, 2):
        again, cache_again = run(case, form=form, seed=seed)
        assert_equal(again, out, bits=True, what="output of another run")
        assert_equal(cache_again, cache, bits=True, what="cache of another run")


def check_alone(case: Case, run: Run, form: AttentionForm) -> None:
    """Every live column computed alone, behind the keys of those before it, gives the bits that it has among others."""
    out, cache = run(case, form=form)
    slots = case.step.slots_C.tolist()
    for c, slot in enumerate(slots):
        if slot < 0:
            continue
        earlier = [other for other in range(c) if slots[other] == slot]
        before = case.cache.clone()
        for other in earlier:
            position = int(case.step.positions_C[other])
            page = case.step.pages_SP[slot, position // CHUNK]
            before[page, :, :, position % CHUNK] = cache[page, :, :, position % CHUNK]
        alone, alone_cache = run(replace(case.only([c]), cache=before), form=form)
        position = int(case.step.positions_C[c])
        page = case.step.pages_SP[slot, position // CHUNK]
        assert_equal(alone[c], out[c], bits=True, what=f"column {c} alone")
        assert_equal(alone_cache[page, :, :, position % CHUNK], cache[page, :, :, position % CHUNK], bits=True, what=f"keys and values of column {c} alone")


def check_placed(case: Case, run: Run, form: AttentionForm, *, num_columns: int) -> None:
    """The same columns among more, at the end of a wider step: the same bits."""
    columns, more = len(case.step.slots_C), num_columns - len(case.step.slots_C)
    step = replace(case.step, slots_C=torch.nn.functional.pad(case.step.slots_C, (more, 0), value=-1),
                   positions_C=torch.nn.functional.pad(case.step.positions_C, (more, 0)))
    wide = replace(case, step=step, qkv_CW=torch.nn.functional.pad(case.qkv_CW, (0, 0, more, 0), value=torch.nan))
    assert_equal(run(wide, form=form)[0][-columns:], run(case, form=form)[0], bits=True, what=f"{columns} columns among {num_columns}")
