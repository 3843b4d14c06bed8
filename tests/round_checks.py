"""What must hold of a kernel of rounds on a GPU; the test and the benchmark share it. The first wrong phase is named.

A case's kernel is a RoundKernel, or a stand-in with its methods (`test_round_kernel.py` has one on a CPU).
"""

import sys
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from round_compile import ROUND_VARIANTS
from step_checks import BITS, BUFFERS, MOST_APART, assert_same, poison, tensors
from step_compile import Variant
from torch import Tensor

from kilotok.kernels.persistent import StepInputs, StepRef, StepShape, StepState, StepWeights
from kilotok.kernels.persistent.draft_model import DraftShape, DraftState, DraftWeights
from kilotok.kernels.persistent.draft_ref import OBSERVE_PHASES, RoundRef
from kilotok.kernels.persistent.plan import CHUNK
from kilotok.kernels.persistent.round_inputs import TILE, RoundColumn, RoundInputs
from kilotok.kernels.persistent.rounds import RoundKernel
from kilotok.kernels.persistent.router import choose_ref
from kilotok.kernels.persistent.step import StepKernel
from kilotok.kernels.persistent.step_ref import sample_ref

# what a draft's phase writes; of the step's state the logits alone
DRAFT_WRITTEN = {"draft_embed": ("residual_CD",), "draft_qkv": ("qkv_SCW",), "draft_attention": ("mixed_CW", "cache"), "draft_out": ("residual_CD",),
                 "draft_gate_up": ("inter_CF",), "draft_down": ("residual_CD",), "draft_head": (), "draft_sample": (), "fc": ("context_CD",),
                 "keys": ("keys_SCA",), "append": ("cache",)}
DRAFT_BUFFERS = ("residual_CD", "qkv_SCW", "mixed_CW", "inter_CF", "context_CD", "keys_SCA", "confidence_C")
CLOSE_CHOICE = 2 * MOST_APART           # of a router's logits, by their root mean square
MOST_APART_STEP = 5 * MOST_APART       # of the target's step as a whole: the roundings of its layers add up
# An exponential of the device is within 2**-21; the sum of a vocabulary's, of logits that are rounded apart
MOST_APART_CONFIDENCE = 1e-2


def poison_draft(state: DraftState) -> None:
    """NaN in every buffer of a round; the cache stays."""
    for name in DRAFT_BUFFERS:
        getattr(state, name).fill_(torch.nan)
    for tensor in (state.attention.mixed, state.attention.stats):
        tensor.fill_(torch.nan)
    for tensor in (state.candidates_C, state.verify_S, state.committed_S):
        tensor.fill_(-7)


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@dataclass(frozen=True, kw_only=True)
class RoundCase:
    """Random weights, and sequences with a context of random keys and values; positions without one are NaN. Slot i is the i-th sequence's."""

    weights: StepWeights
    draft_weights: DraftWeights
    state: StepState
    draft_state: DraftState
    twin: RoundRef
    kernel: Any
    caches: tuple[Tensor, Tensor]      # of target and draft, at the start
    context: int

    @staticmethod
    def of(shape: StepShape, draft: DraftShape, *, num_columns: int, seed: int, context: int, variant: Variant = ROUND_VARIANTS["two programs"],
           profile: bool = False) -> "RoundCase":
        """On the current GPU; every proposal is expected to come true, so that limits decide how many are verified."""
        shape = replace(shape, rolled=True)
        weights, draft_weights = StepWeights.random(shape, seed=seed, device="cuda"), DraftWeights.random(draft, seed=seed, device="cuda")
        slots, width = num_columns // TILE, -(-shape.max_length // CHUNK)
        states = [StepState.of(shape, num_columns=num_columns, num_slots=slots, num_pages=slots * width, device="cuda") for _ in range(2)]
        g = torch.Generator(device="cuda").manual_seed(seed)
        table = torch.randperm(slots * width, generator=g, device="cuda").to(torch.int32).view(slots, width)
        drafts = [DraftState.of(draft, state) for state in states]
        caches = []
        found: tuple[StepState | DraftState, ...] = (states[0], drafts[0])
        for one in found:
            cache = torch.randn(one.cache.shape, generator=g, device="cuda").to(torch.bfloat16)
            cache[:, table[:, context // CHUNK].long(), :, :, context % CHUNK:] = torch.nan
            cache[:, table[:, context // CHUNK + 1:].flatten().long()] = torch.nan
            caches.append(cache)
        for state, its in zip(states, drafts, strict=True):
            state.pages_SP.copy_(table)
            its.scale_8.fill_(1e30)
        kernel = RoundKernel(weights, states[0], draft_weights, drafts[0], profile=profile, **variant.kernel)
        return RoundCase(weights=weights, draft_weights=draft_weights, state=states[0], draft_state=drafts[0], kernel=kernel, context=context,
                         twin=RoundRef(weights, states[1], draft_weights, drafts[1]), caches=(caches[0], caches[1]))

    def inputs(self, *, seed: int, limit: int, temperature: float = 0.0, live: int | None = None) -> RoundInputs:
        """Anchors behind the context, of the first `live` tiles."""
        count = self.kernel.code.C // TILE
        g = torch.Generator().manual_seed(seed)
        ids = torch.randint(self.weights.shape.vocab_size, (count,), generator=g).tolist()
        return RoundInputs.of([RoundColumn(token_id=token, slot=i, position=self.context, limit=limit, temperature=temperature, seed=seed * 2**32 + i)
                               if i < (count if live is None else live) else None for i, token in enumerate(ids)])

    def fresh(self, inputs: RoundInputs | None = None, *, num_rounds: int = 1) -> None:
        """Poisoned memory, the context, and if given the sequences of the next round."""
        poison(self.state)
        poison_draft(self.draft_state)
        for mine, cache in ((self.state.cache, self.caches[0]), (self.draft_state.cache, self.caches[1])):
            mine.copy_(cache)
        if inputs is not None:
            self.kernel.set_rounds(inputs, num_rounds=num_rounds)

    def results(self) -> dict[str, Tensor]:
        """Bits of what a round leaves, and the words of the next."""
        found = {f"step's {name}": getattr(self.state, name) for name in (*BUFFERS, "next_C", "cache", "distinct_L")}
        found |= {f"draft's {name}": getattr(self.draft_state, name) for name in (*DRAFT_BUFFERS, "cache", "candidates_C", "verify_S", "committed_S")}
        found["words"] = self.kernel.rounds.words_W8C
        return {name: tensor.view(BITS[tensor.dtype]).clone() for name, tensor in found.items()}

    def columns(self, words: int) -> StepInputs:
        """The columns of a set of words, as they are now."""
        return StepInputs(words_8C=self.kernel.rounds.words_W8C[words].clone())


def _compare(got: Tensor, expected: Tensor, where: str, *, bound: float = MOST_APART) -> float:
    """NaN in the same places, and elsewhere within the bound; returns the error."""
    assert torch.equal(got.isnan(), expected.isnan()), f"{where}: other elements are written"
    there = ~expected.isnan()
    error = float((got[there].double() - expected[there].double()).norm() / expected[there].double().norm().clamp(min=1e-30))
    assert error <= bound, f"{where} is {error:.1e} apart"
    return error


def close_choices(case: RoundCase, columns: StepInputs) -> Tensor:
    """Runs the target's step on the twin, its phases at once (step_checks.py has them one by one). Returns which columns came so close to choosing another
    expert that the kernel may: what follows is then another column's, as right as the twin's."""
    live = (columns.slots_C >= 0).nonzero().flatten().tolist()
    gaps: list[float] = []

    def watched(logits_CE: Tensor, slots_C: Tensor, *, experts_per_token: int, normalize: bool) -> tuple[Tensor, Tensor]:
        top = logits_CE.double().sort(dim=-1, descending=True).values[0]
        gaps.append(float((top[experts_per_token - 1] - top[experts_per_token]) / logits_CE.double().norm()) * len(top) ** 0.5)
        return choose_ref(logits_CE, slots_C, experts_per_token=experts_per_token, normalize=normalize)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[StepRef.__module__], "choose_ref", watched)
        StepRef.step(case.twin, columns)
    close = torch.zeros(len(columns.slots_C), dtype=torch.bool)
    close[live] = (torch.tensor(gaps).view(-1, len(live)) < CLOSE_CHOICE).any(0)
    return close


def check_round_phases(case: RoundCase, inputs: RoundInputs, *, rounds: int = 1) -> float:
    """Each launch of a round against the twin's phase on the memory that it found; the target's step as a whole. Returns the largest relative error."""
    case.fresh(inputs, num_rounds=rounds)
    draft, twin, worst = case.draft_state, case.twin.draft_state, 0.0
    ours = RoundInputs(words_9S=inputs.words_9S.clone().to(draft.verify_S.device))
    for number in range(rounds):
        picked = torch.full_like(case.state.next_C, -7)
        for name, layer in case.kernel.round_plan():
            where = f"round {number}, phase {name} of layer {layer}"
            if name == "embed" or name.startswith("draft_") or name in ("choose", "accept", *OBSERVE_PHASES):
                for mine, its in ((case.state, case.twin.state), (draft, twin)):
                    for (_, a), (_, b) in zip(tensors(its), tensors(mine), strict=True):       # type: ignore[arg-type]
                        a.copy_(b)
                columns = case.columns(1 if name.startswith("draft_") else 2 if name in OBSERVE_PHASES else 0)
            case.kernel.phase(name, layer=layer)
            wait()
            assert not int(case.state.fault), f"{where}: fault"
            if name == "embed":
                close = close_choices(case, columns)
            elif name == "sample":
                live = columns.slots_C >= 0
                for c in live.nonzero().flatten().tolist():
                    token = sample_ref(case.state.logits_CV[c], temperature=float(columns.temperatures_C[c]), top_p=1.0, top_k=0, seed=columns.seeds()[c],
                                       position=int(columns.positions_C[c]) + 1)
                    picked[c] = token
                compared = live & ~close.to(live.device)
                assert bool(compared.any()), f"{where}: no column is left to compare"
                for buffer in ("logits_CV", "features_CXD"):
                    worst = max(worst, _compare(getattr(case.state, buffer)[compared], getattr(case.twin.state, buffer)[compared],
                                                    f"{where}: {buffer}", bound=MOST_APART_STEP))
                worst = max(worst, _compare(case.state.cache, case.twin.state.cache, f"{where}: cache", bound=MOST_APART_STEP))
            elif name == "choose":
                expected = case.twin.choose(ours)
                assert draft.verify_S.tolist() == twin.verify_S.tolist(), f"{where}: {draft.verify_S.tolist()} of {twin.verify_S.tolist()}"
                live = expected.slots_C >= 0
                got = case.columns(0)
                assert torch.equal(got.slots_C, expected.slots_C) and torch.equal(got.words_8C[:, live], expected.words_8C[:, live]), f"{where}: words"
            elif name == "accept":
                live = columns.slots_C >= 0
                assert case.state.next_C[live].tolist() == picked[live].tolist(), f"{where}: {case.state.next_C.tolist()} of {picked.tolist()}"
                case.twin.state.next_C.copy_(picked)
                case.twin.accept(ours)
                assert draft.committed_S.tolist() == twin.committed_S.tolist(), f"{where}: {draft.committed_S.tolist()} of {twin.committed_S.tolist()}"
                assert torch.equal(case.columns(2).slots_C, case.twin.committed(columns).slots_C), f"{where}: committed columns"
                assert torch.equal(case.columns(1).slots_C, case.twin.block(ours).slots_C), f"{where}: slots of the next round"
            elif name in DRAFT_WRITTEN:
                case.twin.phase(name, columns, layer=layer)
                for buffer in DRAFT_WRITTEN[name]:
                    if buffer == "mixed_CW" and (case.kernel.code.TAGGED or not case.kernel.code.LAST_MERGES):
                        continue    # it is there behind the merge
                    worst = max(worst, _compare(getattr(draft, buffer), getattr(twin, buffer), f"{where}: {buffer}"))
                if name == "draft_head":
                    live = columns.slots_C >= 0
                    worst = max(worst, _compare(case.state.logits_CV[live], case.twin.state.logits_CV[live], f"{where}: logits"))
                if name == "draft_sample":
                    case.kernel.phase("choose")        # which puts the slices together
                    wait()
                    assert draft.candidates_C.tolist() == twin.candidates_C.tolist(), f"{where}: proposals"
                    _compare(draft.confidence_C, twin.confidence_C, f"{where}: probabilities", bound=MOST_APART_CONFIDENCE)
    return worst


def check_resident_rounds(case: RoundCase, inputs: RoundInputs, *, repeats: int) -> None:
    """The resident kernel has the bits of the launches, every time."""
    case.fresh(inputs)
    case.kernel.round_launches()
    wait()
    expected = case.results()
    for i in range(repeats):
        case.fresh(inputs)
        case.kernel.run_rounds(inputs)
        case.kernel.check_fault()
        assert_same(case.results(), expected, f"resident round {i} of {repeats} against launches")


def check_rounds(case: RoundCase, inputs: RoundInputs, *, num_rounds: int) -> tuple[list[list[int]], list[list[int]]]:
    """Several rounds in one launch are as many launches, bit by bit. Returns tokens and numbers of verified proposals."""
    case.fresh(inputs, num_rounds=num_rounds)
    case.kernel.run_rounds(inputs, num_rounds=num_rounds)
    case.kernel.check_fault()
    tokens, verified = case.kernel.tokens_so_far().tolist(), case.kernel.verified_so_far().tolist()
    expected = case.results()
    case.fresh(inputs)
    apart: tuple[list[list[int]], list[list[int]]] = ([], [])
    for number in range(num_rounds):
        if number:
            case.kernel.memory.ring_count[0] = 0
            case.kernel.relaunch_rounds()
        else:
            case.kernel.run_rounds(inputs)
        case.kernel.check_fault()
        apart[0].extend(case.kernel.tokens_so_far().tolist())
        apart[1].extend(case.kernel.verified_so_far().tolist())
    assert apart == (tokens, verified), f"{num_rounds} rounds in one launch gave {tokens}, one at a time {apart[0]}"
    assert_same(case.results(), expected, f"{num_rounds} rounds in one launch against one at a time")
    return tokens, verified


def check_text(case: RoundCase, inputs: RoundInputs, *, num_rounds: int) -> float:
    """Each sequence's text is that of plain decoding, and both caches hold the same bits at its positions. Returns tokens a round and sequence."""
    tokens, _ = check_rounds(case, inputs, num_rounds=num_rounds)
    caches = case.state.cache.clone(), case.draft_state.cache.clone()
    texts = [[token for row in tokens for token in row[i * TILE:(i + 1) * TILE] if token >= 0] for i in range(case.kernel.code.C // TILE)]
    plain = StepInputs.dead(case.kernel.code.C)
    for i, text in enumerate(texts):
        if text:
            plain.words_8C[:, i * TILE + i % TILE] = inputs.words_9S[:8, i].cpu()
    case.fresh()
    case.kernel.run(plain, num_steps=max(map(len, texts)))
    case.kernel.check_fault()
    rows = case.kernel.tokens_so_far().tolist()
    for i, text in enumerate(texts):
        assert [row[i * TILE + i % TILE] for row in rows][:len(text)] == text, f"sequence {i}: the text of rounds is {text}, of plain decoding {rows}"
        for cache, plain_cache in zip(caches, (case.state.cache, case.draft_state.cache), strict=True):
            for position in range(case.context, case.context + len(text)):
                page = int(case.state.pages_SP[i, position // CHUNK])
                a, b = (c[:, page, :, :, position % CHUNK].view(torch.int16) for c in (cache, plain_cache))
                assert torch.equal(a, b), f"sequence {i}: a cache differs at position {position}"
    return sum(map(len, texts)) / num_rounds / max(1, sum(bool(text) for text in texts))


def check_step(case: RoundCase, other: StepKernel) -> None:
    """A step of columns of any kind leaves the bits of a kernel without a draft, over the same weights and state."""
    inputs = StepInputs.dead(case.kernel.code.C)
    for i in range(case.kernel.code.C // TILE):
        for n in range(5 if i % 2 == 0 else 1):
            inputs.set(i * TILE + i + n, token_id=3 * i + n, slot=i, position=case.context + n, temperature=1.0, seed=i)
    found = []
    for kernel in (case.kernel, other):
        case.fresh()
        kernel.run(inputs)
        kernel.check_fault()
        found.append({name: bits for name, bits in case.results().items() if name.startswith("step's")})
    assert_same(found[0], found[1], "a step of the kernel of rounds against a kernel without a draft")
