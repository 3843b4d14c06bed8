"""Requests that the executor drafts for in rounds without the host, on the twin: texts, rounds and events are those of drafts that the host verifies."""

import itertools
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_checks import Heard, Knowing, V, prompt_of, submit_together
from persistent_checks import check_rounds
from step_models import TINY, tiny_weights
from tolerances import assert_equal

from kilotok.dflash.generate import Drafter, Round, generate
from kilotok.dflash.sampling import Sampling
from kilotok.kernels.persistent import DraftShape, DraftState, DraftWeights, Heads, RoundInputs, RoundRef, StepInputs, StepState
from kilotok.kernels.persistent.round_inputs import TILE
from kilotok.runtime.batching import Turn
from kilotok.runtime.draft_costs import PLAIN as PLAIN_STEP
from kilotok.runtime.engine import Engine, Finished, Request
from kilotok.runtime.executors import require_same_text
from kilotok.runtime.pacing import NO_DOMAIN, TO_THE_LIMIT, DevicePace, Speculation
from kilotok.runtime.persistent import Chunk, PersistentExecutor, RoundRunner

DRAFT = DraftShape(hidden_size=64, num_layers=1, heads=Heads(num_heads=4, num_kv_heads=2, head_dim=32, rms_eps=1e-6, window=20), intermediate_size=64,
                   num_taps=2, mask_token_id=7, rms_eps=1e-6, rope_theta=1e4, max_length=TINY.max_length)
MAX_TOKENS = 14
LENGTH = 11     # of prompts that are read in as many steps
HOW = (Sampling(), Sampling(temperature=0.9, seed=2**41 + 1), Sampling(), Sampling(temperature=1.1, seed=4))


class Rounds(RoundRef):
    """A twin that writes down what it ran, and proposes what a script says behind a token at a position."""

    def __init__(self, state: StepState, drafts: DraftState, *, draft: DraftWeights, script: dict[tuple[int, int], list[int]], log: list[Any]) -> None:
        super().__init__(tiny_weights(), state, draft, drafts)
        self.script, self.log, self.fail_in = script, log, math.inf

    def step(self, inputs: StepInputs) -> None:
        self.log.append("step")
        super().step(inputs)

    def run_rounds(self, inputs: RoundInputs, num_rounds: int, *, stopped: Callable[[], bool] = lambda: False) -> Any:
        self.log.append((num_rounds, int((inputs.slots_S >= 0).sum())))
        return super().run_rounds(inputs, num_rounds, stopped=stopped)

    def round(self, inputs: RoundInputs) -> torch.Tensor:
        self.fail_in -= 1
        if self.fail_in <= 0:
            self.fail_in = math.inf
            raise RuntimeError("step: a barrier was given up")
        return super().round(inputs)

    def draft(self, inputs: RoundInputs) -> None:
        super().draft(inputs)
        for s in inputs.live(max_length=TINY.max_length):
            proposals = self.script.get((int(inputs.ids_S[s]), int(inputs.positions_S[s])))
            if proposals is not None:
                self.draft_state.candidates_C[s * TILE + 1:(s + 1) * TILE] = torch.tensor(proposals, dtype=torch.int32)


def executor_of(script: dict[tuple[int, int], list[int]] | None = None, **options: Any) -> tuple[PersistentExecutor, list[Any]]:
    draft, log = DraftWeights.random(DRAFT, seed=5, device="cpu"), list[Any]()
    return PersistentExecutor(tiny_weights(), draft=draft, make_runner=lambda state, drafts: Rounds(state, drafts, draft=draft, script=script or {}, log=log),
                              **options), log


def asked(n: int, **changes: Any) -> Request:
    g = torch.Generator().manual_seed(n + 50)
    return Request(**{"prompt": tuple(torch.randint(V, (LENGTH,), generator=g).tolist()), "max_tokens": 30, "sampling": HOW[n], "eos_ids": frozenset(),
                      "decode": "draft", **changes})


def rounds_of(request: Request, *, drafter: Drafter | None = None) -> list[Round]:
    """On a sequence of its own, verified by the host."""
    sequence = PLAIN.open()
    found = list(generate(sequence, prompt=request.prompt, drafter=drafter, sampling=request.sampling, max_tokens=request.max_tokens, eos_ids=request.eos_ids))
    sequence.close()
    return found


def tokens_of(rounds: list[Round]) -> list[int]:
    return [t for done in rounds for t in done.tokens]


PLAIN = executor_of(num_slots=1)[0]


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    """Of each request, without a draft, a little longer than any test wants it."""
    return [tokens_of(rounds_of(asked(n, max_tokens=40))) for n in range(4)]


def knowing(text: list[int], *, length: int = LENGTH) -> Knowing:
    return Knowing(text, prompt_length=length, kind="random", vocab_size=V)


@pytest.fixture(scope="module")
def script(texts: list[list[int]]) -> dict[tuple[int, int], list[int]]:
    """What `Knowing` drafters of these texts propose."""
    found = {}
    for text in texts:
        for done in range(1, len(text) - 8):
            drafter = knowing(text)
            drafter.position = LENGTH + done - 1
            found[text[done - 1], LENGTH + done - 1] = drafter.propose(text[done - 1], count=7, sampling=Sampling())
    return found


@pytest.fixture
def start() -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(executor: PersistentExecutor, *, make_drafter: Any = lambda: pytest.fail("a drafter on the host"), **options: Any) -> Engine:
        engines.append(Engine(executor, make_drafter=make_drafter, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def heard_rounds(heard: Heard) -> list[Round]:
    return [event for event in heard.events if isinstance(event, Round)]


@pytest.mark.parametrize(("count", "num_columns"), [(1, 8), (3, 32), (4, 64)])
def test_rounds_without_the_host_are_the_rounds_that_it_would_verify(count: int, num_columns: int, start: Callable[..., Engine], texts: list[list[int]],
                                                                     script: dict[tuple[int, int], list[int]]) -> None:
    executor, log = executor_of(script, num_columns=num_columns)
    requests = [asked(n, max_tokens=30 - 4 * n) for n in range(count)]
    heard = submit_together(start(executor), requests)
    assert [one.end() for one in heard] == [Finished(reason="length")] * count
    for n, one in enumerate(heard):
        assert heard_rounds(one) == rounds_of(requests[n], drafter=knowing(texts[n])) and one.tokens == texts[n][:30 - 4 * n]
        assert 0 < sum(r.num_accepted for r in heard_rounds(one)) < sum(r.num_drafted for r in heard_rounds(one))
    rounds = [entry for entry in log if entry != "step"]
    assert max(number for number, _ in rounds) > 1 and rounds[0][1] == count
    assert len([entry for entry in log if entry == "step"]) <= 2 + count, "a prompt of two pieces, and last tokens"
    assert executor.pool.num_free == executor.pool.num_pages and not executor.pool.slots


def test_a_request_without_a_draft_takes_part_and_verifies_nothing(start: Callable[..., Engine], texts: list[list[int]],
                                                                   script: dict[tuple[int, int], list[int]]) -> None:
    executor, log = executor_of(script)
    heard = submit_together(start(executor), [asked(0), asked(1, decode="plain"), asked(2)])
    assert [one.end().reason for one in heard] == ["length"] * 3 and [one.tokens for one in heard] == [text[:30] for text in texts[:3]]
    assert {r.num_drafted for r in heard_rounds(heard[1])} == {0} and sum(r.num_accepted for r in heard_rounds(heard[2])) > 0
    assert any(entry[1] == 3 for entry in log if entry != "step")


def test_more_requests_than_tiles_go_on_in_steps(start: Callable[..., Engine], texts: list[list[int]], script: dict[tuple[int, int], list[int]]) -> None:
    executor, log = executor_of(script, num_columns=16)
    heard = submit_together(start(executor), [asked(n, max_tokens=8 if n == 2 else 20) for n in range(3)])
    assert [one.end().reason for one in heard] == ["length"] * 3 and [one.tokens for one in heard] == [texts[n][:8 if n == 2 else 20] for n in range(3)]
    assert {entry[1] for entry in log if entry != "step"} <= {1, 2} and any(entry == "step" for entry in log[4:])
    assert sum(r.num_accepted for r in heard_rounds(heard[0])) > 0


def test_an_end_token_among_what_a_round_committed_ends_the_text_there(start: Callable[..., Engine], texts: list[list[int]],
                                                                       script: dict[tuple[int, int], list[int]]) -> None:
    for place in range(2, 16):
        eos = frozenset({texts[1][place]})
        executor, _ = executor_of(script)
        (heard,) = submit_together(start(executor), [asked(1, eos_ids=eos)])
        assert heard.end() == Finished(reason="stop") and heard.tokens == texts[1][:texts[1].index(texts[1][place]) + 1]
        assert heard_rounds(heard) == rounds_of(asked(1, eos_ids=eos), drafter=knowing(texts[1]))
        assert executor.pool.num_free == executor.pool.num_pages


def test_a_request_that_is_cancelled_ends_the_launch_and_changes_nobody(start: Callable[..., Engine], texts: list[list[int]],
                                                                       script: dict[tuple[int, int], list[int]]) -> None:
    executor, log = executor_of(script)
    engine, heard = start(executor), [Heard(), Heard()]
    submit_together(engine, [asked(0), asked(1)], heard)
    tickets: list[Any] = []

    class Cancelling(Rounds):
        def round(self, inputs: RoundInputs) -> torch.Tensor:
            tickets[0].cancel()
            return super().round(inputs)

    heard[1].end()
    del log[:]
    executor.runner(16).__class__ = Cancelling
    heard = [Heard(), Heard()]
    with engine._changed:
        tickets += [engine.submit(asked(n), heard[n]) for n in (0, 1)]
    assert heard[0].end() == Finished(reason="cancelled") and heard[1].end() == Finished(reason="length")
    assert heard[1].tokens == texts[1][:30] and heard[0].tokens == texts[0][:len(heard[0].tokens)] and len(heard[0].tokens) < 12
    assert executor.pool.num_free == executor.pool.num_pages


def test_after_rounds_that_failed_the_next_request_is_served(start: Callable[..., Engine], texts: list[list[int]],
                                                             script: dict[tuple[int, int], list[int]]) -> None:
    executor, _ = executor_of(script)
    engine = start(executor)
    executor.runner(16).fail_in = 2  # type: ignore[attr-defined]
    heard = submit_together(engine, [asked(0), asked(1)])
    assert [one.end() for one in heard] == [Finished(reason="error", error="RuntimeError: step: a barrier was given up")] * 2
    (after,) = submit_together(engine, [asked(1)])
    assert after.end().reason == "length" and after.tokens == texts[1][:30]
    assert engine.failure is None and executor.pool.num_free == executor.pool.num_pages


@pytest.mark.parametrize("how", ["tree", "top_p"])
def test_what_rounds_do_not_do_is_drafted_on_the_host_and_said_once(how: str, start: Callable[..., Engine], caplog: pytest.LogCaptureFixture) -> None:
    changes: dict[str, Any] = {"decode": "tree", "tree_budget": 9} if how == "tree" else {"sampling": Sampling(temperature=0.9, top_p=0.8, seed=3)}
    asks = [asked(n, **changes, max_tokens=MAX_TOKENS) for n in (0, 2)]
    expected = [tokens_of(rounds_of(replace(one, max_tokens=MAX_TOKENS + 9))) for one in asks]
    drafters = iter([knowing(text) for text in expected])
    with caplog.at_level(logging.WARNING):
        executor, log = executor_of()
        heard = submit_together(start(executor, make_drafter=lambda: next(drafters)), asks)
        assert [one.end().reason for one in heard] == ["length"] * 2
    assert [one.tokens for one in heard] == [text[:MAX_TOKENS] for text in expected] and set(log) == {"step"}
    assert sum(r.num_accepted for r in heard_rounds(heard[0])) > 0
    assert [record.getMessage() for record in caplog.records if "draft head in torch" in record.getMessage()] != []
    assert len([r for r in caplog.records if "draft head in torch" in r.getMessage()]) == 1


def test_a_text_fills_the_context_in_rounds(start: Callable[..., Engine]) -> None:
    request = asked(1, prompt=tuple(i % V for i in range(TINY.max_length - 12)), max_tokens=50)
    expected = tokens_of(rounds_of(request))
    right = {(token, TINY.max_length - 12 + i): [*expected[i + 1:], *[0] * 7][:7] for i, token in enumerate(expected)}
    executor, _ = executor_of(right, num_slots=1)
    (heard,) = submit_together(start(executor), [request])
    assert heard.end() == Finished(reason="length") and heard.tokens == expected and len(expected) == 12
    assert [len(r.tokens) for r in heard_rounds(heard)] == [1, 8, 3]


def test_rounds_never_want_more_pages_than_the_request_was_let_in_with(start: Callable[..., Engine], script: dict[tuple[int, int], list[int]],
                                                                       texts: list[list[int]]) -> None:
    """Each ends in a page of its own; the block behind its end reaches the next one."""
    executor, _ = executor_of(script, num_pages=3)
    fits = 128 - LENGTH - 8
    assert executor.fits([LENGTH + fits] * 3) and not executor.fits([LENGTH + fits + 1] * 2)
    heard = submit_together(start(executor), [asked(0), asked(1), asked(2, max_tokens=fits + 1)])
    for n in range(2):
        assert heard[n].end().reason == "length" and heard[n].tokens == texts[n][:30]
    assert heard[2].end().reason == "length" and len(heard[2].tokens) == fits + 1


def test_steps_between_rounds_leave_the_drafts_context_whole(texts: list[list[int]], script: dict[tuple[int, int], list[int]]) -> None:
    executor, _ = executor_of(script, num_slots=2)
    sequence, plain, text, prompt = executor.open(), executor.open(), texts[0], asked(0).prompt
    sequence.read(prompt)
    done = 1
    for number in (2, 0, 1, 0, 2):
        chunk = Chunk(sequence=sequence, ids=(text[done - 1],), position=sequence.length, sampling=Sampling(), last_only=False)
        if number:
            (rounds,) = executor.run_rounds([chunk], number, limits=[7], stopped=lambda: False)
            found = [t for tokens, _ in rounds for t in tokens]
            sequence.length += len(found)
        else:
            found = [int(sequence.read([text[done - 1]]).logits_TV[0].argmax())]
        assert found == text[done:done + len(found)]
        done += len(found)
    assert isinstance(executor.runner(8), RoundRunner) and done > 12
    plain.read([*prompt, *text[:done - 1]])
    assert plain.length == sequence.length
    for cache in (executor._state.cache, executor._drafts.cache):  # type: ignore[union-attr]
        rows = [cache[:, executor.pool.pages(one.slot)[0], :, :, :one.length] for one in (sequence, plain)]
        assert_equal(rows[0], rows[1], bits=True)


def test_rounds_of_any_number_between_steps_have_the_tokens_of_plain_decoding() -> None:
    assert check_rounds(executor_of(num_slots=2)[0], list(range(9)), num_tokens=40) >= 1


def test_costs_decide_how_many_proposals_are_verified_and_nothing_else(start: Callable[..., Engine], texts: list[list[int]],
                                                                       script: dict[tuple[int, int], list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    executor, _ = executor_of(script)
    executor.set_draft_costs(scale_8=[1] * 8)
    for cost, drafted in (((1, *[1e6] * 7), {0}), ((9, 9, 9, 1, 9, 9, 9, 9), {3})):
        monkeypatch.setattr(Speculation, "device_turn", lambda self, paces, cost=cost: ([7] * len(paces), cost, 8))
        (heard,) = submit_together(start(executor), [asked(0, max_tokens=16)])
        assert heard.end().reason == "length" and heard.tokens == texts[0][:16]
        assert {r.num_drafted for r in heard_rounds(heard)[1:-4]} == drafted
    for wrong in ([1.0] * 7, [1.0] * 7 + [0.0], [math.nan] * 8):
        with pytest.raises(ValueError, match=r"^executor: cost_8 must be 8 numbers above 0; got"):
            executor.set_draft_costs(cost_8=wrong)
    with pytest.raises(ValueError, match=r"^executor: scale_8 is for a draft head in the kernel"):
        PersistentExecutor(tiny_weights(), make_runner=lambda state: None).set_draft_costs(scale_8=[1] * 8)  # type: ignore[arg-type, return-value]


def test_where_rounds_do_not_pay_steps_are_taken_and_rounds_are_tried_again(start: Callable[..., Engine], texts: list[list[int]]) -> None:
    """Simulated time, in which a round of a random draft takes as long as five steps: the gate closes, and the text is what it was."""
    executor, _ = executor_of()
    engine = start(executor)
    clock = itertools.count()
    seconds = {"now": 0.0}
    real_steps, real_rounds = executor.run_steps, executor.run_rounds

    def steps(*args: Any, **how: Any) -> Any:
        found = real_steps(*args, **how)
        seconds["now"] += max(map(len, found))
        return found

    def rounds(*args: Any, **how: Any) -> Any:
        found = real_rounds(*args, **how)
        seconds["now"] += 5 * max(map(len, found))
        return found

    executor.run_steps, executor.run_rounds = steps, rounds  # type: ignore[method-assign]
    engine.speculation.clock = lambda: seconds["now"] + 1e-9 * next(clock)
    for _ in range(2):
        (heard,) = submit_together(engine, [asked(0, max_tokens=40, draft_length="auto")])
        assert heard.end().reason == "length" and heard.tokens == texts[0]
    state = engine.speculation.state()
    assert state.switched_off >= 1 and state.rounds_plain > state.rounds_drafted >= 16
    gate = state.gates[NO_DOMAIN, False]
    assert not gate.is_open and gate.gain is not None and gate.gain < 0.5
    costs = state.costs_s[False, 1]
    assert costs[PLAIN_STEP] == pytest.approx(1, abs=0.01) and costs[7] == pytest.approx(5, abs=0.01)


def test_rounds_that_give_another_text_are_refused_at_the_start(script: dict[tuple[int, int], list[int]]) -> None:
    executor, _ = executor_of(script, num_slots=1)
    require_same_text(executor)
    real = executor.run_rounds
    executor.run_rounds = lambda *args, **how: [[((*tokens[:-1], V - 1), v) for tokens, v in one] for one in real(*args, **how)]  # type: ignore[method-assign]
    with pytest.raises(NotImplementedError, match=r"^rounds on this GPU give another text than steps"):
        require_same_text(executor)
    assert executor.pool.num_slots == 1 and executor.open().slot == 0, "the slot is free again"


def test_a_turn_of_rounds_is_what_its_requests_and_the_costs_so_far_say() -> None:
    speculation = Speculation()

    def pace(length: Any) -> DevicePace:
        return speculation.pace_device(length=length, domain=None, is_sampled=False)

    auto = [pace("auto"), pace("auto")]
    assert speculation.device_turn([*auto, pace(3)]) == ([7, 7, 3], TO_THE_LIMIT, 16), "a fixed length is kept, whatever is to be measured"
    assert speculation.device_turn(auto) == ([0, 0], TO_THE_LIMIT, 4), "plain steps are measured first"
    speculation.learn_turn(9.0, Turn([], 4, None), num_columns=3)
    assert not speculation.state().costs_s[False, 1], "beside a draft that the host verified no step is plain"
    speculation.learn_turn(4.0, Turn([], 4, None), num_columns=1)
    assert speculation.device_turn(auto) == ([7, 7], TO_THE_LIMIT, 4), "then full rounds"
    speculation.learn_turn(8.0, Turn([], 4, 7.0), num_columns=1)
    limits, costs, most = speculation.device_turn(auto)
    assert (limits, most) == ([7, 7], 16) and costs[7] == 2.0 and sorted(costs) == list(costs)
    speculation.learn_turn(float("nan"), Turn([], 4, 7.0), num_columns=1)
    speculation.learn_turn(1.0, Turn([], 0, None), num_columns=1)
    assert speculation.state().costs_s[False, 1] == {PLAIN_STEP: 1.0, 7: 2.0}, "a turn that failed, or that was not its own, says nothing"
    auto[0].gates[0].is_open = False
    assert speculation.device_turn(auto)[0] == [0, 7]


def test_a_fixed_length_is_what_rounds_verify(start: Callable[..., Engine], texts: list[list[int]]) -> None:
    executor, _ = executor_of()
    engine = start(executor)
    for length in (0, 2):
        (heard,) = submit_together(engine, [asked(1, max_tokens=14, draft_length=length)])
        assert heard.end().reason == "length" and heard.tokens == texts[1][:14]
        assert {r.num_drafted for r in heard_rounds(heard)[1:-3]} == {length}


def test_prompts_of_any_length_are_read_beside_rounds(start: Callable[..., Engine]) -> None:
    """Whoever decodes while another reads its prompt goes a token a step, and then drafts with a context that is whole."""
    requests = [asked(n, prompt=prompt_of(n + 1), sampling=HOW[n % 2], max_tokens=10) for n in range(4)]
    executor, log = executor_of()
    heard = submit_together(start(executor), requests)
    assert [one.end().reason for one in heard] == ["length"] * 4
    assert [one.tokens for one in heard] == [tokens_of(rounds_of(one)) for one in requests]
    assert any(entry != "step" for entry in log)
