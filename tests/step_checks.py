"""What must hold of the step kernel on a GPU; the test and the benchmark share it. The first wrong phase is named."""

from collections.abc import Iterator
from dataclasses import fields, replace

import torch
from step_compile import VARIANTS, Variant
from torch import Tensor

from kilotok.kernels.persistent import StepInputs, StepRef, StepShape, StepState, StepWeights
from kilotok.kernels.persistent.plan import CHUNK
from kilotok.kernels.persistent.router import router_ref
from kilotok.kernels.persistent.step import StepKernel, layer_phases
from kilotok.kernels.persistent.step_device import step_kernel
from kilotok.kernels.persistent.step_ref import sample_ref

# Relative, in norm: fp32 sums are within 1e-6; one normalized activation in ten thousand, and now and then a weight or a mixed value of attention, is
# rounded to the other bf16 neighbour, 2**-8 away.
MOST_APART = 2e-3
WRITTEN = {"embed": ("residual_CD",), "qkv": ("qkv_CW",), "attention": ("mixed_CW", "cache"), "merge": ("mixed_CW",), "out": ("residual_CD",),
           "router": ("router_logits_CE", "normed_CD"), "add": ("residual_CD", "features_CXD"), "head": ("logits_CV",)}
BUFFERS = ("residual_CD", "qkv_CW", "mixed_CW", "normed_CD", "router_logits_CE", "logits_CV", "features_CXD")
_MEMORY = {"qkv_CW": "qkv_SCW", "router_logits_CE": "router_logits_SCE"}    # properties of the state, and the sums behind them
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.int32: torch.int32}


def tensors(state: StepState) -> Iterator[tuple[str, Tensor]]:
    for field in fields(state):
        if isinstance(value := getattr(state, field.name), Tensor):
            yield field.name, value


def poison(state: StepState) -> None:
    """NaN in every buffer of a step; the cache stays."""
    for name in (*BUFFERS, "inter_MCF", "partials_RD"):
        getattr(state, _MEMORY.get(name, name)).fill_(torch.nan)
    for tensor in (state.attention.mixed, state.attention.stats):
        tensor.fill_(torch.nan)
    state.next_C.fill_(-7)
    state.distinct_L.fill_(-7)


class Case:
    """Random weights, and sequences with a context of random keys and values; positions without one are NaN."""

    def __init__(self, shape: StepShape, *, num_columns: int, seed: int, context: int, profile: bool = False,
                 variant: Variant = VARIANTS["pairs"]) -> None:
        shape = replace(shape, rolled=variant.rolled)
        self.shape, self.context = shape, context
        self.weights = StepWeights.random(shape, seed=seed, device="cuda")
        pages = -(-shape.max_length // CHUNK)
        self.state, self.twin_state = (StepState.of(shape, num_columns=num_columns, num_slots=num_columns, num_pages=num_columns * pages, device="cuda")
                                       for _ in range(2))
        g = torch.Generator(device="cuda").manual_seed(seed)
        table = torch.randperm(num_columns * pages, generator=g, device="cuda").to(torch.int32).view(num_columns, pages)
        for state in (self.state, self.twin_state):
            state.pages_SP.copy_(table)
        self.cache = torch.randn(self.state.cache.shape, generator=g, device="cuda").to(torch.bfloat16)
        self.cache[:, table[:, context // CHUNK].long(), :, :, context % CHUNK:] = torch.nan
        self.cache[:, table[:, context // CHUNK + 1:].flatten().long()] = torch.nan
        self.kernel = StepKernel(self.weights, self.state, profile=profile, **variant.kernel)
        self.twin = StepRef(self.weights, self.twin_state, dtype=torch.float32)

    def inputs(self, sequences: list[tuple[int, int]], *, seed: int = 0, temperature: float = 0.0) -> StepInputs:
        """sequences: (first column, columns); each continues its context, in a slot of its own."""
        inputs = StepInputs.dead(self.state.num_columns)
        g = torch.Generator().manual_seed(seed)
        for slot, (first, count) in enumerate(sequences):
            for t in range(count):
                inputs.set(first + t, token_id=int(torch.randint(self.shape.vocab_size, (1,), generator=g)), slot=slot, position=self.context + t,
                           temperature=temperature, seed=seed * 2**32 + 3 * first + 1)
        return inputs

    def fresh(self, inputs: StepInputs, **numbers: int) -> None:
        poison(self.state)
        self.state.cache.copy_(self.cache)
        self.kernel.set_inputs(inputs, **numbers)

    def results(self, live: Tensor) -> dict[str, Tensor]:
        """Bits of what a step leaves of live columns; the whole cache."""
        found = {name: getattr(self.state, name)[live] for name in (*BUFFERS, "next_C")} | {"cache": self.state.cache, "distinct_L": self.state.distinct_L}
        return {name: tensor.view(BITS[tensor.dtype]).clone() for name, tensor in found.items()}


def live_of(inputs: StepInputs) -> Tensor:
    return torch.as_tensor(inputs.slots_C >= 0).cuda()


def _apart(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)) if expected.numel() else 0.0


def check_phases(case: Case, inputs: StepInputs) -> float:
    """Each launch against the twin's phase on the memory that it found. Returns the largest relative error."""
    case.fresh(inputs)
    state, twin, live, on_device = case.state, case.twin_state, live_of(inputs), StepInputs(words_8C=inputs.words_8C.cuda())
    worst = 0.0

    def copy() -> None:
        for (_, a), (_, b) in zip(tensors(twin), tensors(state), strict=True):
            a.copy_(b)

    def compare(name: str, layer: int, phase: str) -> None:
        nonlocal worst
        where = f"phase {name} of layer {layer}"
        torch.cuda.synchronize()
        assert not int(state.fault), f"{where}: fault"
        for buffer in WRITTEN.get(name, ()):
            if buffer == "mixed_CW" and name == "attention" and "merge" in layer_phases(case.kernel.code):
                continue    # it is there behind the merge
            got, expected = getattr(state, buffer), getattr(twin, buffer)
            if buffer == "cache":
                assert torch.equal(got.isnan(), expected.isnan()), f"{where}: the cache is written elsewhere"
                got, expected = got.nan_to_num(0.0), expected.nan_to_num(0.0)
            else:
                assert bool(got[~live].isnan().all()), f"{where}: {buffer} of a dead column is written"
                got, expected = got[live], expected[live]
                if buffer == "features_CXD":
                    got, expected = (x[:, [i for i, tap in enumerate(case.shape.taps) if tap == layer]] for x in (got, expected))
            error = _apart(got, expected)
            assert error <= MOST_APART, f"{where}: {buffer} is {error:.1e} apart; columns {_columns_apart(got, expected) if buffer != 'cache' else ''}"
            worst = max(worst, error)

    def lists(layer: int) -> None:
        memory, where, stride = case.kernel.memory, f"routing list of layer {layer}", 2 if case.kernel.code.ONE_LIST else 1
        torch.cuda.synchronize()
        number, routing = int(memory.list_tiles_R[0]), case.twin_state.routing
        assert bool((memory.list_tiles_R[::stride] == number).all()), f"{where}: programs have different numbers of tiles"
        assert number == int(routing.num_tiles), f"{where}: {number} tiles, of {int(routing.num_tiles)}"
        for what, mine, theirs in (("experts", memory.list_experts_RM, routing.experts_M), ("pairs", memory.list_pairs_RM8, routing.pairs_MC),
                                   ("weights", memory.list_weights_RM8, routing.weights_MC)):
            assert bool((mine[::stride] == mine[:1]).all()), f"{where}: programs have different {what}"
            assert _apart(mine[0, :number], theirs[:number]) <= 1e-5, f"{where}: {what}"
        assert int(state.distinct_L[layer]) == int(twin.distinct_L[layer]), f"{where}: distinct experts"

    for name, layer in case.kernel.plan():
        if name in ("embed", "qkv", "attention", "out", "router", "head"):
            copy()
            case.twin.phase(name, on_device, layer=layer)
        elif name == "gate_up":
            copy()
            routing = router_ref(twin.router_logits_CE, on_device.slots_C, experts_per_token=case.shape.experts_per_token,
                                 normalize=case.shape.normalize_router_weights)
            for into, made in zip(twin.routing.tensors(), routing.tensors(), strict=True):
                into.copy_(made)
            twin.distinct_L[layer] = len(set(routing.experts_M.tolist()) - {-1})
            case.twin.phase("experts", on_device, layer=layer)
        case.kernel.phase(name, layer=layer)
        if name == "gate_up":
            lists(layer)
            inter = [x.inter_MCF[:int(case.twin_state.routing.num_tiles)][case.twin_state.routing.pairs_MC[:int(case.twin_state.routing.num_tiles)] >= 0]
                     for x in (state, twin)]
            error = _apart(*inter)
            assert error <= MOST_APART, f"phase gate_up of layer {layer}: activated channels are {error:.1e} apart"
            worst = max(worst, error)
        else:
            compare(name, layer, name)
    torch.cuda.synchronize()
    for c in live.nonzero().flatten().tolist():
        expected = _token(state, inputs, c)
        assert int(state.next_C[c]) == expected, f"phase sample: column {c} gives {int(state.next_C[c])}, not {expected}"
    return worst


def _columns_apart(got: Tensor, expected: Tensor) -> list[int]:
    return [i for i in range(len(got)) if _apart(got[i], expected[i]) > MOST_APART]


def _token(state: StepState, inputs: StepInputs, column: int) -> int:
    return sample_ref(state.logits_CV[column], temperature=float(inputs.temperatures_C[column]), top_p=1.0, top_k=0, seed=inputs.seeds()[column],
                      position=int(inputs.positions_C[column]) + 1)


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    wrong = [name for name, bits in expected.items() if not torch.equal(got[name], bits)]
    assert not wrong, f"{what}: {', '.join(wrong)} differ; of {wrong[0]} {int((got[wrong[0]] != expected[wrong[0]]).sum())} elements"


def check_resident(case: Case, inputs: StepInputs, *, repeats: int) -> None:
    """The resident kernel has the bits of the launches, every time."""
    live = live_of(inputs)
    case.fresh(inputs)
    case.kernel.launches()
    torch.cuda.synchronize()
    expected = case.results(live)
    for i in range(repeats):
        case.fresh(inputs)
        case.kernel.run(inputs)
        case.kernel.check_fault()
        assert_same(case.results(live), expected, f"resident run {i} of {repeats} against launches")


def check_steps(case: Case, inputs: StepInputs, *, num_steps: int) -> None:
    """Several steps in one launch are as many launches, token by token."""
    live = live_of(inputs)
    case.fresh(inputs)
    words = inputs.words_8C.clone()
    tokens = []
    for _ in range(num_steps):
        case.kernel.run(StepInputs(words_8C=words))
        case.kernel.check_fault()
        words = words.clone()
        words[0] = torch.where(inputs.slots_C >= 0, case.state.next_C.cpu(), words[0])
        words[2] += (inputs.slots_C >= 0).to(torch.int32)
        tokens.append(torch.where(inputs.slots_C >= 0, case.state.next_C.cpu(), -1))
    expected = case.results(live)
    case.fresh(inputs, num_steps=num_steps)
    case.kernel.run(inputs, num_steps=num_steps)
    case.kernel.check_fault()
    arrived = case.kernel.tokens_so_far()
    assert arrived.tolist() == torch.stack(tokens).tolist(), f"tokens of {num_steps} steps in one launch: {arrived.tolist()}, of one at a time {tokens}"
    assert_same(case.results(live), expected, f"{num_steps} steps in one launch against one at a time")


def check_same(case: Case, inputs: StepInputs, other: StepKernel, *, what: str) -> None:
    """Another kernel over the same weights and state gives the same bits."""
    found = []
    for kernel in (case.kernel, other):
        case.fresh(inputs)
        kernel.run(inputs)
        kernel.check_fault()
        found.append(case.results(live_of(inputs)))
    assert_same(found[1], found[0], what)


def check_alone(case: Case, inputs: StepInputs, *, column: int, place: int) -> None:
    """A sequence of one column has the same logits alone and in another place."""
    case.fresh(inputs)
    case.kernel.run(inputs)
    case.kernel.check_fault()
    expected = case.state.logits_CV[column].clone()
    alone = StepInputs.dead(case.state.num_columns)
    alone.words_8C[:, place] = inputs.words_8C[:, column]
    case.fresh(alone)
    case.kernel.run(alone)
    case.kernel.check_fault()
    assert torch.equal(case.state.logits_CV[place], expected), f"column {column} alone in place {place}: logits differ"


def check_ends(case: Case, inputs: StepInputs) -> None:
    """A host's word ends the residence; a barrier that nobody completes is an error with a name, and the next step is right."""
    case.fresh(inputs, num_steps=8)
    case.kernel.memory.host_stop[0] = 1
    case.kernel.memory.ring_count[0] = 0
    case.kernel.relaunch(num_steps=8)
    case.kernel.check_fault()
    assert int(case.kernel.memory.ring_count) == 1, f"the host's word ended it after {int(case.kernel.memory.ring_count)} steps"
    polls, case.kernel.polls = case.kernel.polls, 4096
    try:
        case.fresh(inputs)
        arguments, options = case.kernel._arguments(case.kernel.code)
        step_kernel[(case.kernel.programs - 1,)](*arguments, **options)      # one program never comes
        try:
            case.kernel.check_fault()
        except RuntimeError as error:
            assert "gave up" in str(error)
        else:
            raise AssertionError("a barrier that nobody completes raised no error")
    finally:
        case.kernel.polls = polls
    check_resident(case, inputs, repeats=1)
