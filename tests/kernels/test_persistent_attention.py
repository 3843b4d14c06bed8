"""Decode attention: the twin against the reference executor, the device code's text on the CPU, what the compiler makes of it, and a GPU."""

import dataclasses
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_checks import DEAD, HEADS, Case, case_of, check_alone, check_case, check_placed, poisoned, run_on_cpu, run_on_gpu
from conftest import POCKET
from gluon_on_cpu import launch, on_cpu
from persistent_compile import build_attend, build_merge, build_plan, build_resident
from tolerances import Bound, assert_equal, assert_within
from torch import Tensor
from torch.nn import functional as F

from kilotok.kernels.persistent.attention import AttentionForm, AttentionWorkspace, Heads, Step, attention, attention_ref, plan_columns, rope_table
from kilotok.kernels.persistent.plan import CHUNK, Plan, check_columns, chunks_of, num_classes, num_spans, plan_ref, span_of
from kilotok.runtime.reference import ReferenceSequence
from kilotok.runtime.weights import load_executor

FP64 = Bound(maximum=1e-12, rms=1e-13, reason="the same float64 operations, exp2 for exp, sums in another order")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
# A verify block over a chunk's end, one inside a chunk, a single column far out (spans of two chunks), one at position 0.
MIXED = ((1, 126), (1, 127), (1, 128), DEAD, (0, 4250), DEAD, (2, 0), (2, 1))
NEAR = tuple((slot, 600 if slot == 0 else position) for slot, position in MIXED)
BLOCK = tuple((0, 253 + t) for t in range(8))
# The one that a step takes first, the one of two programs an SM, and one whose items have all columns of a run.
FORMS = (AttentionForm(), AttentionForm(keys=64, last_merges=False), AttentionForm(queries=64))


def window(name: str, size: int) -> Heads:
    return dataclasses.replace(HEADS[name], window=size)


# --- twins ---


def test_the_twin_equals_the_reference_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer of the pocket, from its raw products, over three chunks: tiles of 8 columns and single tokens."""
    executor = load_executor(POCKET, device="cpu", dtype=torch.float64)
    g = executor.graph
    heads = Heads(num_heads=g.num_heads, num_kv_heads=g.num_kv_heads, head_dim=g.head_dim, rms_eps=g.rms_eps)
    cos, sin = rope_table(head_dim=g.head_dim, theta=g.rope_theta, max_length=g.max_length)
    assert_equal(cos.double(), executor.cos)
    assert_equal(sin.double(), executor.sin)
    pages = torch.randperm(4).to(torch.int32).view(1, 4)
    caches = [torch.full(heads.cache_shape(4), torch.nan, dtype=torch.float64) for _ in range(g.num_layers)]
    original, compared = ReferenceSequence._attention, 0

    def compare(self: ReferenceSequence, h: Tensor, index: int, step: Any) -> Tensor:
        nonlocal compared
        expected, layer = original(self, h, index, step), executor.weights.layers[index]
        slots, positions = torch.full((len(h),), -1), torch.zeros(len(h))
        slots[step.live], positions[step.live] = 0, torch.arange(step.start, step.start + step.count).float()
        got = attention_ref(F.linear(h, layer.qkv), Step(slots_C=slots.int(), positions_C=positions.int(), pages_SP=pages), heads=heads, cache=caches[index],
                            cos_LK=cos, sin_LK=sin, qk_norm=layer.qk_norm, rounded=None, dtype=torch.float64)
        assert_within(got[step.live], expected[step.live], bound=FP64)
        compared += step.count
        return expected

    monkeypatch.setattr(ReferenceSequence, "_attention", compare)
    ids = torch.randint(g.vocab_size, (270,), generator=torch.Generator().manual_seed(1)).tolist()
    sequence = executor.open()
    sequence.read(ids[:125])
    for token in ids[125:131]:
        sequence.read([token])
    sequence.read(ids[131:])
    assert compared == 270 * g.num_layers


# --- the plan ---


def test_spans_are_absolute_and_cover_every_chunk_once() -> None:
    chunks = [chunk for span in range(num_spans(2048 * CHUNK)) for chunk in range(*chunks_of(span))]
    assert chunks == list(range(2048))
    assert all(chunks_of(span_of(chunk))[0] <= chunk < chunks_of(span_of(chunk))[1] for chunk in chunks)
    assert [num_spans(n) for n in (1, 128, 129, 4096, 4097, 32768, 131072)] == [1, 1, 2, 32, 33, 80, 112]
    assert [num_classes(n) for n in (1, 4096, 4097, 8192, 8193, 32768)] == [1, 1, 2, 2, 3, 4]


def columns_of(rng: random.Random, num_columns: int, max_length: int) -> list[tuple[int, int]]:
    """Random runs with dead columns between."""
    columns: list[tuple[int, int]] = []
    for slot in rng.sample(range(64), 64):
        if rng.random() < 0.3:
            columns.append(DEAD)
        count = rng.choice((1, 1, 2, 5, 8))
        start = rng.randrange(max_length - count + 1)
        columns.extend((slot, start + t) for t in range(count))
    columns = columns[:num_columns]
    check_columns(*map(list, zip(*columns, strict=True)), max_length=max_length, num_sequences=64)
    return columns


@pytest.mark.parametrize("num_columns", [8, 16, 32, 64])
@pytest.mark.parametrize(("window", "causal"), [(None, True), (1, True), (200, True), (9000, True), (None, False), (200, False)])
def test_the_device_plan_is_the_twin_and_holds_every_visible_chunk_once(num_columns: int, window: int | None, causal: bool) -> None:
    rng = random.Random(num_columns)
    for max_length in (300, 4096, 20000, 131072):
        columns = columns_of(rng, num_columns, max_length)
        slots, positions = (torch.tensor(part, dtype=torch.int32) for part in zip(*columns, strict=True))
        at_once, part_columns = rng.choice((0, 9, 33, 100)), rng.choice((1, 2, 8))
        expected = plan_ref(slots, positions, max_length=max_length, window=window, at_once=at_once, part_columns=part_columns, causal=causal)
        got = Plan.empty(num_columns=num_columns, max_length=max_length, device=slots.device)
        launch(on_cpu("plan").plan_kernel, 1, slots, positions, got.rows_N8, got.num_rows, got.spans_C, C=num_columns, CLASSES=num_classes(max_length),
               WINDOW=window or 0, AT_ONCE=at_once, PART_COLUMNS=part_columns, CAUSAL=causal, NUM_WARPS=8)
        count = int(expected.num_rows)
        assert_equal(got.num_rows, expected.num_rows)
        assert_equal(got.spans_C, expected.spans_C)
        assert_equal(got.rows_N8[:count], expected.rows_N8[:count])
        sizes = [end - first for *_, first, end, _, _ in expected.rows_N8[:count].tolist()]
        if window is None:   # the largest first, but for the last span of a run, which may be short
            assert sorted(sizes[:1], reverse=True) == sizes[:1]
        for c, (slot, position) in enumerate(columns):
            mine = [row for row in expected.rows_N8[:count].tolist() if 0 <= c - row[0] - (row[1] >> 8 & 255) < row[1] & 255]
            seen = sorted(chunk for row in mine for chunk in range(row[4], row[5]))
            first = 0 if window is None else max(0, position - window + 1) // CHUNK
            assert (len(mine), len(set(seen))) == (int(expected.spans_C[c]), len(seen))
            last = position if causal else max(p for s, p in columns if s == slot)
            assert slot < 0 or set(range(first, last // CHUNK + 1)) <= set(seen)
            assert causal or {row[1] >> 16 for row in mine} <= {sum(s == slot for s, _ in columns)}


def test_columns_that_are_no_runs_are_refused() -> None:
    for slots, positions, words in (
        ([0, 1, 0], [4, 4, 5], "neighbours at consecutive positions; got slot 0 again in column 2"),
        ([0, 0, -1], [4, 6, 0], "got slot 0 again in column 1"),
        ([0] * 9, list(range(9)), "at most 8 columns in a step; slot 0 has more"),
        ([0], [4096], "column 0 is position 4096 .* positions 0..4095"), ([0], [-1], "position -1"), ([3], [0], r"slot 3; slots are 0..2"),
    ):
        with pytest.raises(ValueError, match=words):
            check_columns(slots, positions, max_length=4096, num_sequences=3)


# --- the device code, program after program on the CPU ---


@pytest.mark.parametrize(("heads", "columns"), [
    (HEADS["pocket"], MIXED), (HEADS["Qwen3-30B-A3B"], NEAR), (HEADS["Qwen3-30B-A3B"], BLOCK), (HEADS["SmolLM2-MoE"], NEAR), (HEADS["SmolLM2-MoE"], BLOCK),
    (window("pocket", 3), BLOCK), (window("SmolLM2-MoE", 130), NEAR), (window("pocket", 150), MIXED)])
def test_the_device_code_gives_the_twin(heads: Heads, columns: tuple[tuple[int, int], ...]) -> None:
    for form in FORMS:
        check_case(case_of(heads, columns, max_length=4864), run_on_cpu, form)


@pytest.mark.parametrize(("heads", "columns"), [(HEADS["pocket"], MIXED), (window("pocket", 100), BLOCK), (HEADS["SmolLM2-MoE"], BLOCK)],
                         ids=["mixed", "window", "block"])
def test_a_column_has_the_same_bits_alone_and_among_others(heads: Heads, columns: tuple[tuple[int, int], ...]) -> None:
    case = case_of(heads, columns, max_length=4864, seed=3)
    for form in FORMS:
        check_alone(case, run_on_cpu, form)
        check_placed(case, run_on_cpu, form, num_columns=32)


@pytest.mark.parametrize(("heads", "columns", "form"), [
    (HEADS["pocket"], NEAR, FORMS[0]), (window("SmolLM2-MoE", 130), NEAR, FORMS[1]), (window("pocket", 9), tuple((0, 121 + t) for t in range(8)), FORMS[0])])
def test_a_block_whose_columns_see_each_other(heads: Heads, columns: tuple[tuple[int, int], ...], form: AttentionForm) -> None:
    """Both ways, over a chunk's end; cut in parts or whole the same bits."""
    case = dataclasses.replace(case_of(heads, columns, max_length=768, seed=2), causal=False)
    check_case(case, run_on_cpu, form)
    out, cache = run_on_cpu(case, form=form)
    whole, whole_cache = run_on_cpu(case, form=form, programs=1)
    assert_equal(whole, out, bits=True, what="parts of another size")
    assert_equal(whole_cache, cache, bits=True, what="the cache of parts of another size")


def test_bf16_products_are_taken_as_they_are() -> None:
    case = case_of(HEADS["pocket"], NEAR, max_length=768, dtype=torch.bfloat16)
    wide = dataclasses.replace(case, qkv_CW=case.qkv_CW.float())
    assert_equal(run_on_cpu(case, form=FORMS[0])[0], run_on_cpu(wide, form=FORMS[0])[0], bits=True)


def test_no_live_column() -> None:
    case = case_of(HEADS["pocket"], (DEAD,) * 8, max_length=256)
    out, cache = run_on_cpu(case, form=FORMS[0])
    assert bool(out.isnan().all()) and bool(cache.isnan().all())
    assert_equal(case.twin()[0], torch.zeros(8, 256))


# --- refusals ---


def test_what_would_write_outside_is_refused_before_a_launch() -> None:
    case = case_of(HEADS["pocket"], MIXED, max_length=4864)
    space = poisoned(case)

    def call(case: Case = case, space: AttentionWorkspace = space, out: Tensor | None = None) -> None:
        attention(case.qkv_CW, case.step, heads=case.heads, cache=case.cache, cos_LK=case.cos_LK, sin_LK=case.sin_LK, workspace=space,
                  out_CW=torch.empty(8, 256, dtype=torch.bfloat16) if out is None else out, qk_norm=case.qk_norm)

    with pytest.raises(NotImplementedError, match="attention: the kernel is built for sm_90"):
        call()
    seven = dataclasses.replace(case.step, slots_C=case.step.slots_C[:7].contiguous())
    checks: tuple[tuple[Callable[[], None], str], ...] = (
        (lambda: call(out=torch.empty(8, 256)), "out must be contiguous"),
        (lambda: call(dataclasses.replace(case, qkv_CW=case.qkv_CW[:, :-1])), "qkv must be"),
        (lambda: call(dataclasses.replace(case, qk_norm=None)), "need qk_norm"),
        (lambda: call(dataclasses.replace(case, cache=case.cache.float())), "cache must be"),
        (lambda: call(dataclasses.replace(case, step=seven)), "a step has 8, 16, 32, 64 columns; got 7"),
        (lambda: call(space=dataclasses.replace(space, arrivals=space.arrivals[1:])), "the workspace's arrivals must be"),
        (lambda: plan_columns(seven, heads=case.heads, workspace=space, max_length=4864), "a step has 8, 16, 32, 64 columns"),
        (lambda: AttentionWorkspace.of(case.heads, num_columns=12, max_length=4864, device=case.cache.device) and None, "got 12"),
        (lambda: AttentionForm(keys=32) and None, "keys are 64 or 128, queries 16, 32 or 64, share is 1 or more; got 32, 16, 1"),
        (lambda: AttentionForm(share=0) and None, "share is 1 or more; got 128, 16, 0"),
        (lambda: Heads(num_heads=9, num_kv_heads=4, head_dim=64) and None, "num_heads must be a multiple"),
        (lambda: Heads(num_heads=8, num_kv_heads=4, head_dim=64, window=0) and None, "window must be at least 1"),
    )
    for refused, words in checks:
        with pytest.raises(ValueError, match=words):
            refused()
    for heads in ({"head_dim": 80}, {"num_heads": 68}):
        with pytest.raises(NotImplementedError, match="built for head_dim 32, 64 or 128"):
            Heads(**{"num_heads": 8, "num_kv_heads": 4, "head_dim": 64} | heads)


# --- compiled ---


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(("name", "num_columns"), [(name, 8) for name in HEADS] + [("Qwen3-30B-A3B", 64)])
def test_compiled_for_sm_90(name: str, num_columns: int, form: AttentionForm) -> None:
    heads = HEADS[name]
    # 168 registers: what a thread has in a kernel of 384, eight warps and a producer. All columns at once take more.
    attend, merge = build_attend(heads, num_columns=num_columns, form=form, maxnreg=168), build_merge(heads, num_columns=num_columns)
    assert merge.stack_bytes == merge.local_bytes == attend.local_bytes == 0, f"spills: {attend}, {merge}"
    assert attend.stack_bytes <= (256 if form.queries == 64 else 0), f"spills: {attend}"
    assert attend.shared_bytes <= {(128, 16): 77, (64, 16): 43, (128, 64): 102}[form.keys, form.queries] * 1024, str(attend)
    width = max(64, heads.head_dim)
    assert attend.ptx.count("wgmma.mma_async") == heads.head_dim // 16 + form.keys // 16
    # Sixteen bytes each, the number that is read in a register: the others are zeros. Keys of the first item, keys and values of every block.
    assert attend.ptx.count("cp.async.cg.shared.global") == attend.ptx.count(", 0x10, %r") == (2 * heads.head_dim + width) * form.keys // 8 // 256
    assert len(re.findall(r"atom\S*\.acq_rel\S*\.gpu|atom\S*\.gpu\S*\.acq_rel\S*", attend.ptx)) == form.last_merges and "atom.global.add.f" not in attend.ptx


def test_the_code_is_short() -> None:
    """A layer of a resident step is to fit the instruction cache of an SM, 128 KB."""
    heads = HEADS["Qwen3-30B-A3B"]
    assert build_attend(heads, num_columns=8, form=AttentionForm(last_merges=False), maxnreg=168).code_bytes <= 18 * 1024
    assert build_attend(heads, num_columns=8, maxnreg=168).code_bytes <= 22 * 1024


def test_a_block_that_is_not_causal_compiles_alike() -> None:
    heads = dataclasses.replace(HEADS["Qwen3-30B-A3B"], window=1024)
    causal, block = (build_attend(heads, num_columns=8, maxnreg=168, causal=causal) for causal in (True, False))
    assert block.stack_bytes == block.local_bytes == 0 and block.code_bytes <= causal.code_bytes + 1024, f"{block}, and causal {causal}"


@pytest.mark.parametrize("num_columns", [8, 64])
def test_the_plan_compiles(num_columns: int) -> None:
    for window in (None, 4096):
        built = build_plan(num_columns=num_columns, max_length=131072, window=window)
        assert built.local_bytes == 0 and built.stack_bytes <= 16, f"spills more than four words a step: {built}"


@pytest.mark.parametrize("form", FORMS[:2], ids=str)
def test_the_phases_fit_a_kernel_of_one_producer_and_eight_consumer_warps(form: AttentionForm) -> None:
    built = build_resident(HEADS["Qwen3-30B-A3B"], num_columns=8, max_length=32768, num_experts=128, experts_per_token=8, form=form)
    assert built.stack_bytes == built.local_bytes == 0 and built.registers == 168, f"spills: {built}"
    assert built.shared_bytes <= (227 - 105) * 1024, f"no room for a ring of 105 KB: {built}"


# --- on a GPU ---


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("heads", [*HEADS.values(), window("Qwen3-30B-A3B", 128), window("pocket", 3)], ids=str)
def test_gpu_against_the_twin_and_bit_by_bit(heads: Heads) -> None:
    seed = torch.seed() % 2**31
    for columns, length in ((MIXED, 4864), (BLOCK, 4864), (tuple((0, 33000 + t) for t in range(8)), 40960)):
        case = case_of(heads, columns, max_length=length, seed=seed, device="cuda")
        for form in FORMS:
            check_case(case, run_on_gpu, form)
            check_alone(case, run_on_gpu, form)
            check_placed(case, run_on_gpu, form, num_columns=64)
            check_case(dataclasses.replace(case, causal=False), run_on_gpu, form)
