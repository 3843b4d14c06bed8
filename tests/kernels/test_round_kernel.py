"""The kernel of rounds without a GPU: in threads against its twin and against plain decoding, its counts at the sizes of real models, and what the compiler
makes of it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from moe_compile import mma_loops
from round_checks import RoundCase, check_resident_rounds, check_round_phases, check_step, check_text
from round_compile import DRAFTS, ROUND_VARIANTS, build_rounds
from rounds_on_cpu import MODELS, RoundsOnCpu
from step_compile import SHAPES, VARIANTS, layouts_of_shape
from step_counts import count_stages
from torch import Tensor

from kilotok.kernels.persistent import StepInputs, StepState, StepWeights
from kilotok.kernels.persistent.attention import AttentionForm
from kilotok.kernels.persistent.draft_code import ROUND_PHASES, round_code
from kilotok.kernels.persistent.draft_model import DraftState, DraftWeights
from kilotok.kernels.persistent.round_inputs import TILE, RoundColumn, RoundInputs
from kilotok.kernels.persistent.rounds import RoundKernel
from kilotok.kernels.persistent.step import StepKernel
from kilotok.kernels.persistent.step_code import PHASES, REGISTERS_OF_TWO, SHARED_BYTES, SHARED_BYTES_OF_TWO

DRAFT_BUFFERS = ("residual_CD", "qkv_SCW", "mixed_CW", "inter_CF", "context_CD", "keys_SCA", "confidence_C", "cache")
STEP_BUFFERS = ("residual_CD", "qkv_SCW", "mixed_CW", "normed_CD", "logits_CV", "features_CXD", "cache")


def assert_like_the_twin(run: RoundsOnCpu, *, context: bool = True) -> None:
    """What either wrote, within fp32 rounding, a bf16 neighbour now and then; nothing else was written."""
    for mine, twins, names in ((run.state, run.twin_state, STEP_BUFFERS), (run.draft_state, run.draft_twin_state, DRAFT_BUFFERS)):
        for name in names:
            got, expected = getattr(mine, name).float(), getattr(twins, name).float()
            assert torch.equal(got.isnan(), expected.isnan()), f"{name}: other elements are written"
            there = ~expected.isnan()
            error = float((got[there] - expected[there]).norm() / expected[there].norm().clamp(min=1e-30))
            assert error <= 2e-3, f"{name}: relative error {error:.1e}"
    for name in ("candidates_C", "verify_S", "committed_S"):
        assert getattr(run.draft_state, name).tolist() == getattr(run.draft_twin_state, name).tolist(), name


CASES: dict[str, tuple[str, dict[str, int], int, list[RoundColumn | None]]] = {
    # a greedy sequence from its first token on, and one with a context over a page's end, picked by temperature
    "two sequences": ("plain", {"num_columns": 16, "partitions": 2, "programs": 1}, 2, [
        RoundColumn(token_id=5, slot=1, position=0, limit=7), RoundColumn(token_id=9, slot=3, position=124, temperature=3.0, seed=2**63 + 5, limit=4)]),
    # until the context is full, and a round beyond
    "the end of the context": ("window, short block, other heads", {"partitions": 1}, 4, [
        RoundColumn(token_id=5, slot=2, position=295, temperature=4.0, seed=3)]),
    "causal": ("causal, sums of qkv and keys", {"partitions": 1}, 1, [RoundColumn(token_id=5, slot=1, position=3, temperature=3.0, seed=1, limit=3)]),
}


@pytest.mark.parametrize("name", CASES)
def test_resident_rounds_are_the_twins(name: str) -> None:
    model, form, rounds, columns = CASES[name]
    run, inputs = RoundsOnCpu(model, **form), RoundInputs.of(columns)
    for column in columns:
        if column is not None:
            run.read(column.slot, column.position)
    run.rounds.set_rounds(inputs)
    run.launch(rounds=rounds)
    tokens, verified = run.twin.run_rounds(inputs, rounds)
    assert (run.tokens_so_far().tolist(), run.verified_so_far().tolist()) == (tokens.tolist(), verified.tolist())
    assert_like_the_twin(run)
    if name == "two sequences":
        assert int((tokens[:, 8:] >= 0).sum()) > rounds, "no proposal was accepted"
    if name == "the end of the context":
        assert verified[:, 0].tolist()[-1] == -1 and int((tokens >= 0).sum()) == 5, "it must have met the end"


def test_every_phase_is_the_twins() -> None:
    """Launches, each from the memory that the one before left, over a page's end; then the resident kernel's bits. Attention is merged by all."""
    run = RoundsOnCpu("one layer", partitions=1, programs=2, form=AttentionForm(keys=64, last_merges=False))
    case = run.case(context=125)
    assert {name for name, _ in run.round_plan()} == {*ROUND_PHASES, *PHASES} - {"finish"}
    inputs = case.inputs(seed=1, limit=5, temperature=3.0)
    check_round_phases(case, inputs)
    check_resident_rounds(case, inputs, repeats=1)


def test_the_text_is_that_of_plain_decoding() -> None:
    """Token by token, and so are both caches, bit by bit; and two rounds of a launch are those of two launches."""
    run = RoundsOnCpu("one layer", partitions=2, programs=1)
    case = run.case(context=126)
    tokens_a_round = check_text(case, case.inputs(seed=11, limit=4, temperature=2.0), num_rounds=2)
    assert 1 < tokens_a_round < 5, "all or none of the proposals came true"


def test_steps_without_drafts_are_the_twins_and_complete_the_context() -> None:
    """A prompt's columns beside another sequence's token."""
    run, inputs = RoundsOnCpu("one layer", partitions=2, programs=2), StepInputs.dead(8)
    for column, (token, slot, position) in {0: (5, 1, 127), 1: (6, 1, 128), 2: (7, 1, 129), 6: (8, 3, 0)}.items():
        inputs.set(column, token_id=token, slot=slot, position=position)
    run.read(1, 127)
    run.rounds.set_columns(inputs)
    run.launch(drafts=False)
    run.twin.step(inputs)
    live = inputs.slots_C >= 0
    assert run.tokens_so_far().tolist() == [torch.where(live, run.twin_state.next_C, -1).tolist()] and run.verified_so_far().tolist() == [[-1]]
    assert_like_the_twin(run)


def test_the_host_or_a_fault_ends_the_rounds() -> None:
    for word in ("stop", "fault"):
        run = RoundsOnCpu("one layer", partitions=1, programs=1)
        run.rounds.set_rounds(RoundInputs.of([RoundColumn(token_id=5, slot=1, position=0)]))
        (run.memory.host_stop if word == "stop" else run.state.fault)[0] = 1
        run.launch(rounds=5)
        assert len(run.tokens_so_far()) == 1, word


# --- choice and acceptance alone ---


def _set_best(run: RoundsOnCpu, tokens_C: Tensor, g: torch.Generator) -> None:
    """As sampling leaves it: in one slice the token, in the others lower scores."""
    memory = run.memory
    memory.best_CS.copy_(torch.rand(memory.best_CS.shape, generator=g))
    memory.best_ids_CS.copy_(torch.randint(100, memory.best_ids_CS.shape, generator=g))
    memory.best_CS[torch.arange(len(tokens_C)), 3] = 2.0
    memory.best_ids_CS[torch.arange(len(tokens_C)), 3] = tokens_C.int()


@pytest.mark.parametrize("model", ["plain", "window, short block, other heads"])
def test_choice_and_acceptance_are_the_twins(model: str) -> None:
    """Random proposals, probabilities, costs and limits; dead tiles, anchors near the context's end and behind it; tokens that agree more or less."""
    run, g = RoundsOnCpu(model, num_columns=32, programs=1, partitions=1), torch.Generator().manual_seed(2)
    draft, twin = run.draft_state, run.draft_twin_state
    lengths, counts = set(), set()
    for trial in range(40):
        positions = [int(torch.randint(280, (1,), generator=g)), 298 - trial % 9, [299, 300][trial % 2], 5]
        inputs = RoundInputs.of([RoundColumn(token_id=trial, slot=slot, position=position, limit=int(torch.randint(8, (1,), generator=g)), temperature=1.0)
                                 if slot != 1 or trial % 3 else None for slot, position in enumerate(positions)])
        cost = 1 + torch.rand(8, generator=g).cumsum(0) * (0.2 if trial % 2 else -0.01)
        scale = 2 * torch.rand(8, generator=g)
        for state in (draft, twin):
            state.cost_8.copy_(cost)
            state.scale_8.copy_(scale)
        run.rounds.set_rounds(inputs)
        proposals = torch.randint(100, (32,), generator=g)
        _set_best(run, proposals, g)
        shares = run.rounds.shares_3CS
        shares[0] = torch.randn(shares[0].shape, generator=g)
        shares[0][:, 3] += 4 + 4 * torch.rand(32, generator=g)
        shares[1] = shares[0] + torch.rand(shares[0].shape, generator=g)
        shares[2] = 1 + torch.rand(shares[0].shape, generator=g)
        run.launch(phase="choose")
        block = run.twin.block(inputs).slots_C >= 0
        first = torch.arange(32) % TILE == 0
        expected = torch.where(first, inputs.ids_S.repeat_interleave(TILE), proposals.int())
        assert draft.candidates_C[block].tolist() == expected[block].tolist()
        masses = shares[2] * shares[1].exp()
        probability = torch.where(first, 1.0, shares[0][:, 3].exp() / masses.sum(1))
        assert torch.allclose(draft.confidence_C[block], probability[block], rtol=1e-5)
        twin.candidates_C.copy_(draft.candidates_C)
        twin.confidence_C.copy_(draft.confidence_C)
        columns = run.twin.choose(inputs)
        assert draft.verify_S.tolist() == twin.verify_S.tolist()
        lengths.update(draft.verify_S.tolist())
        words = run.rounds.words_W8C[0]
        live = columns.slots_C >= 0
        assert words[1].tolist() == columns.slots_C.tolist()
        assert words[:3, live].tolist() == columns.words_8C[:3, live].tolist() and words[3:, live].tolist() == columns.words_8C[3:, live].tolist()

        given = draft.candidates_C.roll(-1).where(torch.rand(32, generator=g) < 0.9, proposals.int())
        _set_best(run, given, g)
        run.state.next_C.fill_(-7)
        run.twin_state.next_C.copy_(torch.where(live, given, -7))
        run.launch(phase="accept")
        assert run.state.next_C.tolist() == run.twin_state.next_C.tolist()
        run.twin.accept(inputs)
        assert draft.committed_S.tolist() == twin.committed_S.tolist()
        counts.update(draft.committed_S.tolist())
        kept = run.twin.committed(columns)
        assert run.rounds.words_W8C[2, 1].tolist() == kept.slots_C.tolist()
        assert run.rounds.words_W8C[2, 2][kept.slots_C >= 0].tolist() == kept.positions_C[kept.slots_C >= 0].tolist()
        block = run.twin.block(inputs)
        live = block.slots_C >= 0
        assert run.rounds.words_W8C[1, 1].tolist() == block.slots_C.tolist()
        assert run.rounds.words_W8C[1, 2][live].tolist() == block.positions_C[live].tolist()
        assert run.rounds.words_W8C[1, 0][live & first].tolist() == block.ids_C[live & first].tolist()
    assert lengths == set(range(-1, draft.shape.block_size)) and counts == set(range(draft.shape.block_size + 1)), "not every number was met"


def test_an_assumed_number_is_accepted_as_far_as_it_was_verified() -> None:
    run, g = RoundsOnCpu(num_columns=8, programs=1, partitions=1), torch.Generator().manual_seed(2)
    for assumed, limit, committed in ((3, 7, 4), (7, 2, 3), (0, 5, 1)):
        run.rounds.set_rounds(RoundInputs.of([RoundColumn(token_id=1, slot=0, position=20, limit=limit)]))
        _set_best(run, torch.arange(8), g)
        run.rounds.shares_3CS.fill_(1.0)
        run.launch(phase="choose")
        _set_best(run, torch.arange(50, 58), g)
        run.launch(phase="accept", assumed=assumed)
        assert int(run.draft_state.committed_S) == committed
        assert run.rounds.words_W8C[1, [0, 2], 0].tolist() == [50 + committed - 1, 20 + committed]


# --- counts ---


@pytest.mark.parametrize("variant", ROUND_VARIANTS)
@pytest.mark.parametrize(("programs", "num_columns"), [(1, 8), (5, 16)])
def test_producers_and_consumers_agree(programs: int, num_columns: int, variant: str) -> None:
    """Of every program, to the end of two rounds and of two steps without drafts, with routing lists that differ from consumer to consumer."""
    shape, draft = MODELS["causal, sums of qkv and keys"]
    for drafts in (True, False):
        counts = count_stages(shape, num_columns=num_columns, programs=programs, num_layers=2, num_steps=2, seed=programs, variant=VARIANTS[variant],
                              draft=draft, drafts=drafts)
        assert counts["copied"] == counts["released"] > 0


@pytest.mark.slow
def test_producers_and_consumers_agree_at_the_size_of_a_real_model() -> None:
    """Every sixth of 264 programs, and the last, of one layer of the target and of the draft, with a small head."""
    shape, draft = replace(SHAPES["Qwen3-30B-A3B"], vocab_size=5000), replace(DRAFTS["Qwen3-30B-A3B"], num_layers=1, mask_token_id=4)
    counts = count_stages(shape, num_columns=8, programs=132, num_layers=1, num_steps=1, seed=3, variant=VARIANTS["two programs"], draft=draft, every=6)
    assert counts["copied"] == counts["released"] > 0


# --- what the compiler makes of it ---


@pytest.mark.parametrize("name", ["pocket", pytest.param("Qwen3-30B-A3B", marks=pytest.mark.slow)])
def test_two_programs_of_rounds_fit_an_sm(name: str) -> None:
    """Within a step's shared memory and registers; one loop for all dense products, the target's and the draft's, and nothing is spilled in it."""
    built = build_rounds(name)
    assert built.shared_bytes <= SHARED_BYTES_OF_TWO, str(built)
    assert built.registers == REGISTERS_OF_TWO and built.local_bytes == 0 and built.stack_bytes <= 416, str(built)
    loops = mma_loops(built.sass)
    assert len(loops) <= 4, [str(loop) for loop in loops]     # dense, gate and up, down, attention
    assert all(loop.local_accesses <= 4 for loop in loops), [str(loop) for loop in loops if loop.local_accesses > 4]
    assert built.code_bytes <= 172 * 1024, f"{built.code_bytes} bytes of code"     # of which a layer of the target takes what it takes in a step


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen3-30B-A3B"])
def test_rounds_of_two_consumers_fit_an_sm(name: str) -> None:
    built = build_rounds(name, variant=VARIANTS["rolled"])
    assert built.shared_bytes <= SHARED_BYTES and built.registers == 96 and built.local_bytes == 0 and built.stack_bytes <= 384, str(built)
    assert all(loop.local_accesses <= 4 for loop in mma_loops(built.sass)), str(built)


@pytest.mark.parametrize("phase", [pytest.param(phase, marks=() if phase in ("draft_gate_up", "draft_attention", "choose", "append") else pytest.mark.slow)
                                   for phase in ROUND_PHASES])
def test_launches_of_phases_fit_an_sm(phase: str) -> None:
    built = build_rounds("pocket", phase=phase)
    assert built.shared_bytes <= SHARED_BYTES_OF_TWO and built.local_bytes == 0 and built.stack_bytes <= 160, str(built)


def test_what_does_not_fit_is_refused() -> None:
    shape, draft = MODELS["plain"]
    with pytest.raises(NotImplementedError, match="of a shape with rolled=True"):
        plain = replace(shape, rolled=False)
        round_code(plain, draft, layouts=layouts_of_shape(plain), num_columns=8, programs=132)
    with pytest.raises(ValueError, match="hidden_size must be the target's, 96"):
        round_code(shape, replace(draft, hidden_size=128), layouts=layouts_of_shape(shape), num_columns=8, programs=132)
    weights, state = StepWeights.random(shape, seed=1, device="cpu"), StepState.of(shape, num_columns=8, num_slots=1, num_pages=3, device="cpu")
    drafts = DraftWeights.random(draft, seed=1, device="cpu")
    with pytest.raises(NotImplementedError, match="built for sm_90"):
        RoundKernel(weights, state, drafts, DraftState.of(draft, state))
    wide = StepState.of(shape, num_columns=16, num_slots=1, num_pages=3, device="cpu")
    with pytest.raises(ValueError, match="as wide as the step"):
        RoundKernel(weights, state, drafts, DraftState.of(draft, wide))


def test_sequences_outside_the_context_are_refused() -> None:
    kernel: Any = object.__new__(RoundKernel)
    run = RoundsOnCpu(num_columns=16, programs=1, partitions=1)
    kernel.code, kernel.shape, kernel.state, kernel.max_steps, kernel.rounds = run.code, run.weights.shape, run.state, 16, run.rounds
    good = RoundColumn(token_id=1, slot=3, position=299)
    kernel.set_rounds(RoundInputs.of([good, None]), num_rounds=16)
    for columns, rounds, words in (
        ([good], 1, r"must be int32 \[9, 2\], a sequence for every eight columns"), ([good, None], 17, "num_rounds must be 1 to 16"),
        ([None, replace(good, slot=4)], 1, "sequence 1 is at position 299 of slot 4; slots are 0..3"),
        ([None, replace(good, position=300)], 1, "positions 0..299"),
    ):
        with pytest.raises(ValueError, match=words):
            kernel.set_rounds(RoundInputs.of(columns), num_rounds=rounds)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU")


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("variant", ROUND_VARIANTS)
def test_the_pocket_on_a_gpu(variant: str) -> None:
    """Phase by phase against the twin, then the resident kernel, then the text; bench_round.py --check has the rest."""
    case = RoundCase.of(SHAPES["pocket"], DRAFTS["pocket"], num_columns=16, seed=7, context=250, variant=ROUND_VARIANTS[variant])
    inputs = case.inputs(seed=1, limit=5, temperature=2.0)
    check_round_phases(case, inputs, rounds=2)
    check_resident_rounds(case, inputs, repeats=5)
    check_text(case, inputs, num_rounds=4)
    check_step(case, StepKernel(case.weights, case.state, **ROUND_VARIANTS[variant].kernel))
