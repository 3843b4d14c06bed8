"""The step kernel without a GPU: its composition in threads against the twin, its counts at the sizes of real models, and what the compiler makes of it."""

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import step_on_cpu
import torch
from conftest import ROOT
from moe_compile import mma_loops
from round_compile import round_code_of
from step_checks import Case, check_ends, check_phases, check_resident
from step_compile import SHAPES, VARIANTS, build_step, layouts_of_shape
from step_counts import count_stages
from step_on_cpu import Kernel
from steps_on_cpu import MODELS, SMALL, OnCpu, assert_like_the_twin, inputs_of, state_of
from torch import Tensor
from triton.runtime.errors import OutOfResources

from kilotok.kernels.mx.layouts import choose_layout
from kilotok.kernels.persistent import StepWeights, step
from kilotok.kernels.persistent.attention import FORM
from kilotok.kernels.persistent.step import StepKernel
from kilotok.kernels.persistent.step_code import PHASES, REGISTERS_OF_TWO, SHARED_BYTES, SHARED_BYTES_OF_TWO, DenseCode, ExpertCode, StepCode
from kilotok.kernels.sampling import gumbel_noise_ref

FORMS = [(name, partitions) for name, shape in MODELS.items() for partitions in ((2, 1) if shape.rolled else (2,))]


@pytest.mark.parametrize(("name", "partitions"), FORMS)
def test_resident_steps_are_the_twins(name: str, partitions: int) -> None:
    """Three steps in one launch, of three sequences and dead columns between them; tokens arrive in the host's ring."""
    run = OnCpu(MODELS[name], partitions=partitions)
    inputs = inputs_of({0: (5, 1, 0), 2: (7, 2, 0), 5: (9, 0, 0)})
    run.memory.words_8C.copy_(inputs.words_8C)
    run.launch(num_steps=3)
    tokens = run.twin.run_steps(inputs, 3)
    assert int(run.memory.ring_count) == 3
    assert run.memory.ring_tokens_NC[:3].tolist() == tokens.tolist()
    assert_like_the_twin(run, inputs.slots_C >= 0)


@pytest.mark.parametrize(("name", "partitions"), FORMS)
def test_launches_of_phases_are_bitwise_the_resident_kernel(name: str, partitions: int) -> None:
    """A verify block of one sequence beside another sequence, both behind a context that is there."""
    resident, launches = (OnCpu(MODELS[name], partitions=partitions) for _ in range(2))
    columns = {0: (5, 1, 130), 1: (6, 1, 131), 2: (7, 1, 132), 6: (8, 3, 4)}
    cache = torch.randn(resident.state.cache.shape, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    inputs = inputs_of(columns)
    for run in (resident, launches):
        run.state.cache.copy_(cache)
        run.twin_state.cache.copy_(cache)
        run.memory.words_8C.copy_(inputs.words_8C)
    resident.launch()
    launches.launches()
    resident.twin.step(inputs)
    live = inputs.slots_C >= 0
    assert_like_the_twin(resident, live)
    for field in ("residual_CD", "qkv_CW", "mixed_CW", "normed_CD", "router_logits_CE", "logits_CV", "features_CXD", "cache", "next_C", "distinct_L"):
        a, b = (getattr(run.state, field).float().nan_to_num(7.0) for run in (resident, launches))
        assert torch.equal(a, b), f"{field} differs"


def test_every_form_of_the_experts_code_gives_the_same_bits() -> None:
    """Stages in one body of code or not, 1, 2 or 4 of them between two sums over the warps, one list an SM or two; 16 columns."""
    shape = replace(SMALL, hidden_size=320, num_layers=1, expert_hidden=512, num_experts=3, experts_per_token=2)
    columns = {c: (5 + c, c, 0) for c in range(16) if c not in (3, 11)}
    runs = [OnCpu(shape, num_columns=16, parts=parts, rolled=rolled, one_list=one_list) for parts, rolled, one_list in (
        (4, True, False), (2, True, True), (1, True, False), (4, False, True))]
    assert {run.code.down.DEPTH_WARPS for run in runs} == {2} and runs[0].code.down.PARTS == 4, "nothing would be added over warps"
    for run in runs:
        run.memory.words_8C.copy_(inputs_of(columns, num_columns=16).words_8C)
        run.launch()
    live = runs[0].memory.words_8C[1] >= 0
    runs[0].twin.step(inputs_of(columns, num_columns=16))
    assert_like_the_twin(runs[0], live)
    for run in runs[1:]:
        assert torch.equal(run.state.residual_CD[live], runs[0].state.residual_CD[live])
        assert torch.equal(run.state.logits_CV[live], runs[0].state.logits_CV[live])


def test_the_bits_do_not_depend_on_how_many_programs_attend() -> None:
    """All three, or the first alone, for a block of eight behind a context: whole there, and in parts where there are programs for them."""
    runs = [OnCpu(replace(SMALL, num_layers=1), form=replace(FORM, share=share)) for share in (1, 3)]
    inputs = inputs_of({c: (5 + c, 1, 130 + c) for c in range(8)})
    cache = torch.randn(runs[0].state.cache.shape, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    for run in runs:
        run.state.cache.copy_(cache)
        run.memory.words_8C.copy_(inputs.words_8C)
        run.launch()
    assert [run.code.ATTENDING for run in runs] == [3, 1] and torch.equal(*(run.state.logits_CV for run in runs))
    runs[0].twin_state.cache.copy_(cache)
    runs[0].twin.step(inputs)
    assert_like_the_twin(runs[0], inputs.slots_C >= 0)


def test_a_column_does_not_depend_on_how_many_the_step_has() -> None:
    """The same two sequences in a step of 8 and, in other places, of 16."""
    small, large = OnCpu(SMALL), OnCpu(SMALL, num_columns=16)
    pages = large.state.pages_SP[:8]
    small.state.pages_SP.copy_(pages % small.state.cache.shape[1])
    for run, columns, n in ((small, {1: (5, 1, 0), 3: (7, 2, 0)}, 8), (large, {12: (5, 1, 0), 4: (7, 2, 0), 7: (1, 3, 0), 15: (2, 9, 0)}, 16)):
        run.memory.words_8C.copy_(inputs_of(columns, num_columns=n).words_8C)
        run.launch(num_steps=2)
    assert torch.equal(small.state.logits_CV[[1, 3]], large.state.logits_CV[[12, 4]])
    assert small.memory.ring_tokens_NC[:2, [1, 3]].tolist() == large.memory.ring_tokens_NC[:2, [12, 4]].tolist()


def test_the_host_ends_the_residence() -> None:
    run = OnCpu(SMALL)
    run.memory.words_8C.copy_(inputs_of({0: (5, 1, 0)}).words_8C)
    run.memory.host_stop[0] = 1
    run.launch(num_steps=5)
    assert int(run.memory.ring_count) == 1


def test_after_a_fault_the_kernel_ends() -> None:
    """A fault word that is set ends it behind the step, whatever the others do."""
    run = OnCpu(SMALL)
    run.memory.words_8C.copy_(inputs_of({0: (5, 1, 0)}).words_8C)
    run.state.fault[0] = 1
    run.launch(num_steps=5)
    assert int(run.memory.ring_count) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("name", "variant"), [
    ("Qwen3-30B-A3B", "pairs"), ("SmolLM2-MoE", "rolled"), ("Qwen3-30B-A3B", "two programs"), ("Qwen3-30B-A3B", "rolled")])
def test_producers_and_consumers_agree_at_the_sizes_of_real_models(name: str, variant: str) -> None:
    """Every sixth of 132 or 264 programs, and the last, to the end of two steps (of one layer; of Qwen3 with a small head), with routing lists that differ
    from consumer to consumer."""
    shape = SHAPES[name] if name != "Qwen3-30B-A3B" else replace(SHAPES[name], vocab_size=5000)
    counts = count_stages(shape, num_columns=8, programs=132, num_layers=1, num_steps=2, seed=3, variant=VARIANTS[variant], every=6)
    assert counts["copied"] == counts["released"] > 0


@pytest.mark.parametrize("one_list", [False, True])
@pytest.mark.parametrize(("programs", "num_columns"), [(1, 8), (5, 16), (7, 64)])
def test_producers_and_consumers_agree(programs: int, num_columns: int, one_list: bool) -> None:
    """The same for a small model on few programs, for every number of columns, over two layers and three steps."""
    counts = count_stages(SMALL, num_columns=num_columns, programs=programs, num_layers=2, num_steps=3, seed=programs, one_list=one_list)
    assert counts["copied"] == counts["released"] > 0


@pytest.mark.parametrize("variant", ["rolled", "two programs"])
@pytest.mark.parametrize(("programs", "num_columns"), [(1, 8), (5, 16), (7, 64)])
def test_producers_and_consumers_of_rolled_products_agree(programs: int, num_columns: int, variant: str) -> None:
    counts = count_stages(replace(SMALL, hidden_size=1024), num_columns=num_columns, programs=programs, num_layers=2, num_steps=3, seed=programs,
                          variant=VARIANTS[variant])
    assert counts["copied"] == counts["released"] > 0


def test_a_lost_arrival_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the two tests above rest on: when nobody can go on, the waits end with an error, however long a step takes."""
    change, number = step_on_cpu.Barrier.change, iter(range(10**9))

    def lossy(barrier: step_on_cpu.Barrier, *, arrivals: int = 0, expected: int = 0, copied: int = 0) -> None:
        if not (arrivals and not expected and next(number) == 100):
            change(barrier, arrivals=arrivals, expected=expected, copied=copied)

    monkeypatch.setattr(step_on_cpu.Barrier, "change", lossy)
    with pytest.raises(step_on_cpu.Stuck, match=r"program \d, _(consumer|producer) .*waits for parity|barrier \d+ over the grid, where \d of 10 are"):
        count_stages(SMALL, num_columns=8, programs=5, num_layers=2, num_steps=3, seed=1)


class Unsigned:
    """32-bit unsigned numbers as the device has them."""

    def __init__(self, values: Tensor) -> None:
        self.values = values & 0xFFFFFFFF

    def __mul__(self, other: "Unsigned") -> "Unsigned":
        low, high = self.values * (other.values & 0xFFFF), self.values * (other.values >> 16)     # 48 bits each
        return Unsigned(low + ((high & 0xFFFF) << 16))

    def __add__(self, other: "Unsigned") -> "Unsigned":
        return Unsigned(self.values + other.values)

    def __xor__(self, other: "Unsigned") -> "Unsigned":
        return Unsigned(self.values ^ other.values)

    def high(self, other: "Unsigned") -> "Unsigned":
        return Unsigned(torch.tensor([a * b >> 32 for a, b in zip(self.values.tolist(), other.values.tolist(), strict=True)]))

    def to(self, dtype: torch.dtype) -> Tensor:
        return self.values.to(dtype)


def test_the_devices_noise_is_the_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit, for tokens at both ends of a vocabulary and a seed of 64 bits."""
    seed, position, tokens = 0xFEDCBA9876543210 >> 1, 4711, torch.tensor([0, 1, 2, 3, 4, 7, 1022, 151935], dtype=torch.int32)
    sample = Kernel(1, language={
        "uint32": "u32", "umulhi": Unsigned.high, "zeros_like": lambda x: Unsigned(x.values * 0), "full_like": lambda x, v: Unsigned(x.values * 0 + v),
        "where": lambda c, a, b: Unsigned(torch.where(c, a.values, b.values)), "log": torch.log}).modules["persistent.sample_device"]
    to = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda x, kind, *more: Unsigned(x.long().expand(len(tokens))) if kind == "u32" else to(x, kind, *more))
    got = sample._gumbel(tokens, *(torch.tensor(word) for word in (position, seed & 0xFFFFFFFF, seed >> 32)))
    monkeypatch.undo()
    assert got.tolist() == gumbel_noise_ref(seed=seed, positions=[position], vocab_size=151936)[0][tokens.long()].tolist()


# --- what the compiler makes of it ---


def test_device_code_is_given_numbers() -> None:
    """Triton 3.6 takes no string and no object among a code's fields as an argument of a function; 3.7 does. The name of a phase is only compared."""
    matrices = set[str]()
    for code in round_code_of("pocket"):
        assert {name for name, value in vars(code).items() if not isinstance(value, (int, float, DenseCode, ExpertCode))} == {"PHASE"}
        matrices |= {name for name, value in vars(code).items() if isinstance(value, (DenseCode, ExpertCode))}
    given = re.compile(rf"[(,] ?[ST]\.({'|'.join(matrices)}|PHASE)[,)]")
    lines = [(path.name, line) for path in (ROOT / "kernels" / "persistent").glob("*.py") for line in path.read_text().splitlines()]
    found = [f"{name}: {line.strip()}" for name, line in lines if given.search(line)]
    assert not found, found


@pytest.mark.parametrize("name", ["pocket", pytest.param("SmolLM2-MoE", marks=pytest.mark.slow), pytest.param("Qwen3-30B-A3B", marks=pytest.mark.slow)])
def test_the_unrolled_kernel_fits_an_sm(name: str) -> None:
    """Shared memory, registers, and products that do not wait for the stack. What is spilled are numbers that a phase begins with: a few loads an item."""
    built = build_step(name)
    assert built.shared_bytes <= SHARED_BYTES, str(built)
    assert built.registers == 96 and built.local_bytes == 0 and built.stack_bytes <= 512, str(built)
    loops = mma_loops(built.sass)
    assert len(loops) >= 12, "four dense products and two of experts, of two consumers"
    assert all(loop.local_accesses <= 4 for loop in loops), [str(loop) for loop in loops if loop.local_accesses > 4]
    # A stage of experts is a loop of 12 MMAs or more. What stands outside its block is done once in four stages; the pocket's gate and up do it in every one.
    most = 20.5 if name == "pocket" else 18.5
    assert all(loop.per_mma_in_blocks <= most for loop in loops if loop.num_mma >= 12), [str(loop) for loop in loops]


@pytest.mark.parametrize("name", ["pocket", pytest.param("SmolLM2-MoE", marks=pytest.mark.slow), pytest.param("Qwen3-30B-A3B", marks=pytest.mark.slow)])
def test_the_resident_kernel_fits_an_sm(name: str) -> None:
    """The form that is served; likewise, with one loop for all dense products of a consumer."""
    built = build_step(name, variant=VARIANTS["rolled"])
    assert built.shared_bytes <= SHARED_BYTES, str(built)
    assert built.registers == 96 and built.local_bytes == 0 and built.stack_bytes <= 256, str(built)
    assert built.code_bytes <= 188 * 1024, f"{built.code_bytes} bytes of code"
    loops = mma_loops(built.sass)
    assert 6 <= len(loops) <= 8, "dense, gate and up, down, and attention, of two consumers"
    assert all(loop.local_accesses <= 4 for loop in loops), [str(loop) for loop in loops if loop.local_accesses > 4]
    most = 20.5 if name == "pocket" else 18.5
    assert all(loop.per_mma_in_blocks <= most for loop in loops if loop.num_mma >= 12), [str(loop) for loop in loops]


@pytest.mark.parametrize("name", ["pocket", pytest.param("SmolLM2-MoE", marks=pytest.mark.slow), pytest.param("Qwen3-30B-A3B", marks=pytest.mark.slow)])
def test_two_programs_fit_an_sm(name: str) -> None:
    """Half the shared memory and registers each; all their code, which is the same, in the 128 KB of the instruction cache; one loop for all dense products."""
    built = build_step(name, variant=VARIANTS["two programs"])
    assert built.shared_bytes <= SHARED_BYTES_OF_TWO, str(built)
    assert built.registers == REGISTERS_OF_TWO and 2 * 384 * built.registers <= 65536 and built.local_bytes == 0 and built.stack_bytes <= 320, str(built)
    assert built.code_bytes <= 112 * 1024, f"{built.code_bytes} bytes of code"
    loops = mma_loops(built.sass)
    assert len(loops) <= 4, [str(loop) for loop in loops]     # dense, gate and up, down, attention
    assert all(loop.local_accesses <= 4 for loop in loops), [str(loop) for loop in loops if loop.local_accesses > 4]


@pytest.mark.parametrize("variant", ["pairs", "rolled", "two programs"])
@pytest.mark.parametrize("phase", PHASES)
def test_launches_of_phases_fit_an_sm(phase: str, variant: str) -> None:
    built = build_step("pocket", phase=phase, variant=VARIANTS[variant])
    limit = SHARED_BYTES_OF_TWO if variant == "two programs" else SHARED_BYTES
    assert built.shared_bytes <= limit and built.local_bytes == 0 and built.stack_bytes <= 160, str(built)


def test_shapes_that_do_not_fit_are_refused() -> None:
    shape = SHAPES["SmolLM2-MoE"]
    with pytest.raises(NotImplementedError, match="Choose the layouts with max_steps=6"):
        StepCode.of(shape, layouts=layouts_of_shape(shape) | {"gate_up": choose_layout(768, 576)}, num_columns=8, programs=132)
    with pytest.raises(NotImplementedError, match="takes 1 of them"):
        StepCode.of(shape, layouts=layouts_of_shape(shape) | {"out": replace(shape.dense_layout("out"), splits=3, num_blocks=1)}, num_columns=8, programs=132)
    with pytest.raises(NotImplementedError, match="Pack the weights of a shape with rolled=True"):
        StepCode.of(shape, layouts=layouts_of_shape(shape), num_columns=8, programs=264, partitions=1)
    weights, state = StepWeights.random(SMALL, seed=1, device="cpu"), state_of(SMALL, 8)
    with pytest.raises(NotImplementedError, match="built for sm_90"):
        StepKernel(weights, state)


def test_a_model_that_an_sm_does_not_hold_is_refused_at_its_first_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*_: object, **__: object) -> None:
        raise OutOfResources(300_000, 232_448, "shared memory")

    kernel: Any = object.__new__(StepKernel)
    kernel.programs, kernel._arguments = 132, lambda code: ((), {})
    monkeypatch.setattr(step, "step_kernel", {(132,): too_large})
    with pytest.raises(NotImplementedError, match=r"^StepKernel: a step of 16 columns of this model takes more than an SM has .*Required: 300000, "
                                                  r"Hardware limit: 232448.*The reference executor runs anywhere"):
        kernel._launch(SimpleNamespace(C=16))


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU")


@needs_gpu
@pytest.mark.gpu
def test_the_pocket_on_a_gpu() -> None:
    """Phase by phase against the twin, then the resident kernel; bench_step.py --check has the rest."""
    case = Case(SHAPES["pocket"], num_columns=8, seed=7, context=130)
    inputs = case.inputs([(0, 1), (2, 4), (7, 1)], seed=1)
    check_phases(case, inputs)
    check_resident(case, inputs, repeats=10)
    check_ends(case, case.inputs([(c, 1) for c in range(8)], seed=2))
