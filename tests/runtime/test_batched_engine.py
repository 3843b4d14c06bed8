"""Requests that share the steps of an executor: every text is the one alone, whoever else runs, drafts, cancels or fails."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_checks import Heard, Knowing, V, prompt_of, submit_together
from step_models import TINY, Counted, twin_executor
from torch import Tensor

from kilotok.dflash.config import DraftConfig
from kilotok.dflash.drafter import DFlashDrafter
from kilotok.dflash.generate import Drafter, generate
from kilotok.dflash.model import DraftModel
from kilotok.dflash.sampling import Sampling
from kilotok.runtime.engine import Engine, Finished, Request
from kilotok.runtime.persistent import PersistentExecutor

MAX_TOKENS = 14


def request(number: int, **changes: Any) -> Request:
    sampling = Sampling() if number % 3 == 0 else Sampling(temperature=0.9, seed=number, top_k=40 if number % 3 == 1 else None)
    return Request(**{"prompt": prompt_of(number), "max_tokens": MAX_TOKENS, "sampling": sampling, "eos_ids": frozenset(), "decode": "plain", **changes})


def alone(asked: Request, *, drafter: Drafter | None = None) -> list[int]:
    sequence = twin_executor(num_slots=1)[0].open()
    return [t for r in generate(sequence, prompt=asked.prompt, drafter=drafter, sampling=asked.sampling, max_tokens=asked.max_tokens,
                                eos_ids=asked.eos_ids) for t in r.tokens]


@pytest.fixture(scope="module")
def texts() -> dict[int, list[int]]:
    """Of every request, without a draft, by its number."""
    return {n: alone(request(n)) for n in range(8)}


@pytest.fixture
def start() -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(executor: PersistentExecutor, **options: Any) -> Engine:
        engines.append(Engine(executor, **{"make_drafter": None, **options}))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def oracles(texts: dict[int, list[int]], numbers: list[int], *, kind: str = "random") -> Callable[[], Drafter]:
    """The drafters of these requests, in the order in which they are opened."""
    waiting = iter(numbers)

    def make() -> Drafter:
        n = next(waiting)
        return Knowing(texts[n], prompt_length=len(prompt_of(n)), kind=kind, vocab_size=V)

    return make


def test_the_texts_are_worth_comparing(texts: dict[int, list[int]]) -> None:
    assert {len(text) for text in texts.values()} == {MAX_TOKENS} and len({tuple(text) for text in texts.values()}) == 8


@pytest.mark.parametrize("num_columns", [8, 64])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_plain_requests_of_any_number_have_the_text_they_have_alone(count: int, num_columns: int, start: Callable[..., Engine],
                                                                    texts: dict[int, list[int]]) -> None:
    executor, log = twin_executor(num_columns=num_columns)
    heard = submit_together(start(executor), [request(n) for n in range(count)])
    assert [one.end() for one in heard] == [Finished(reason="length")] * count
    assert [one.tokens for one in heard] == [texts[n] for n in range(count)]
    columns = sum(len(prompt_of(n)) + MAX_TOKENS - 1 for n in range(count))
    assert sum(map(len, log)) == columns and len(log) < columns / min(count, 4) + 4, "requests did not share steps"
    assert executor.pool.num_free == executor.pool.num_pages and not executor.pool.slots


@pytest.mark.parametrize("decodes", [("draft",) * 8, ("tree",) * 8, ("plain", "draft", "tree", "draft", "plain", "tree", "draft", "tree")],
                         ids=["chains", "trees", "mixed"])
@pytest.mark.parametrize("num_columns", [8, 64])
def test_drafts_of_concurrent_requests_leave_no_trace_in_any_text(decodes: tuple[str, ...], num_columns: int, start: Callable[..., Engine],
                                                                  texts: dict[int, list[int]]) -> None:
    executor, log = twin_executor(num_columns=num_columns)
    drafting = [n for n in range(8) if decodes[n] != "plain"]
    engine = start(executor, make_drafter=oracles(texts, drafting))
    heard = submit_together(engine, [request(n, decode=decodes[n], tree_budget=9 if decodes[n] == "tree" else None) for n in range(8)])
    assert [one.end() for one in heard] == [Finished(reason="length")] * 8
    assert [one.tokens for one in heard] == [texts[n] for n in range(8)]
    rounds = [event for n in drafting for event in heard[n].events if not isinstance(event, Finished)]
    assert 0 < sum(r.num_accepted for r in rounds) < sum(r.num_drafted for r in rounds)
    assert all(max(step.count(slot) for slot in step) <= 8 for step in log) and max(map(len, log)) > (num_columns // 2)


def test_requests_that_want_whole_steps_have_them_in_turn(start: Callable[..., Engine], texts: dict[int, list[int]]) -> None:
    """Eight columns, and three requests that verify seven drafts each, none of which is right."""
    class Wrong(Knowing):
        def propose(self, anchor: int, *, count: int, sampling: Sampling) -> list[int]:
            return [(t + 1) % V for t in super().propose(anchor, count=count, sampling=sampling)][:1] * count

    order, numbers = list[int](), [0, 3, 6]
    names = iter(numbers)

    def make() -> Drafter:
        n = next(names)
        return Wrong(texts[n] + [0] * 9, prompt_length=len(prompt_of(n)), kind="random", vocab_size=V)

    engine = start(twin_executor(num_columns=8)[0], make_drafter=make)
    listeners = [Heard(on_round=lambda tokens, n=n: order.append(n)) for n in numbers]  # type: ignore[misc]
    heard = submit_together(engine, [request(n, decode="draft") for n in numbers], listeners)
    assert [one.end().reason for one in heard] == ["length"] * 3 and [one.tokens for one in heard] == [texts[n] for n in numbers]
    begun = max(order.index(n) for n in numbers)
    assert all(set(order[i:i + 4]) == set(numbers) for i in range(begun, begun + 6)), order


def test_a_draft_head_gets_the_features_of_its_own_request(start: Callable[..., Engine], texts: dict[int, list[int]]) -> None:
    """An untrained one: its proposals depend on the features, so rounds that are alike had the same ones."""
    config = DraftConfig(hidden_size=TINY.hidden_size, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
                         vocab_size=V, target_layer_ids=TINY.taps, num_target_layers=TINY.num_layers, mask_token_id=3, sliding_window=64)
    draft = DraftModel(config).eval()
    draft.initialize(generator=torch.Generator().manual_seed(0), final_norm_D=torch.ones(TINY.hidden_size))
    executor, _ = twin_executor()
    proposed: dict[tuple[int, ...], list[Tensor]] = {}

    class Noted(DFlashDrafter):
        def __init__(self, key: tuple[int, ...]) -> None:
            super().__init__(draft, embedding_VD=executor.embedding_VD.float(), head_VD=executor.head_VD.float())
            self.key = key

        def observe(self, features_TF: Tensor) -> None:
            proposed.setdefault(self.key, []).append(features_TF)
            super().observe(features_TF)

    names = iter([(n, "together") for n in range(4)])
    heard = submit_together(start(executor, make_drafter=lambda: Noted(next(names))), [request(n, decode="draft") for n in range(4)])  # type: ignore[arg-type]
    for n, one in enumerate(heard):
        assert one.end().reason == "length" and one.tokens == texts[n]
        assert alone(request(n), drafter=Noted((n, "alone"))) == texts[n]  # type: ignore[arg-type]
        together, by_itself = (torch.cat(proposed[n, how]) for how in ("together", "alone"))  # type: ignore[index]
        assert torch.equal(together, by_itself)


def test_an_end_token_ends_a_text_where_it_ends_alone(start: Callable[..., Engine], texts: dict[int, list[int]]) -> None:
    for resident in (False, True):
        executor, _ = twin_executor(resident=resident)
        requests = [request(n, eos_ids=frozenset({texts[n][3 + n]})) for n in range(4)]
        heard = submit_together(start(executor), requests)
        assert [one.end() for one in heard] == [Finished(reason="stop")] * 4
        assert [one.tokens for one in heard] == [alone(r) for r in requests]
        assert all(1 <= len(one.tokens) < MAX_TOKENS for one in heard)


@pytest.mark.parametrize("resident", [False, True], ids=["stepwise", "resident"])
def test_a_request_that_is_cancelled_frees_its_place_and_changes_nobody(resident: bool, start: Callable[..., Engine], texts: dict[int, list[int]]) -> None:
    executor, _ = twin_executor(resident=resident, num_slots=4)
    engine = start(executor, make_drafter=oracles(texts, [1, 3, 5]), max_running=4)
    heard = [Heard() for _ in range(6)]
    tickets: list[Any] = []
    with engine._changed:
        for n, one in enumerate(heard):
            tickets.append(engine.submit(request(n, decode="draft" if n % 2 else "plain"), one))
    heard[2].on_round = lambda tokens: [tickets[n].cancel() for n in (1, 2)] if tokens >= 4 else None  # type: ignore[assignment, return-value]
    for n, one in enumerate(heard):
        end = one.end()
        assert one.tokens == texts[n][:len(one.tokens)]
        assert end.reason == ("cancelled" if n == 2 else end.reason) and (n in (1, 2) or (end.reason == "length" and len(one.tokens) == MAX_TOKENS))
    engine.close()
    assert executor.pool.num_free == executor.pool.num_pages and not executor.pool.slots


def test_requests_wait_until_their_pages_are_free(start: Callable[..., Engine], texts: dict[int, list[int]]) -> None:
    """Four pages: one request of the whole context, which takes three, and one short one go together; the next long one waits for the first."""
    executor, log = twin_executor(num_slots=8, num_pages=4)
    requests = [request(0, max_tokens=260), request(1), request(2, max_tokens=260), request(3)]
    heard = submit_together(start(executor), [replace(r, eos_ids=frozenset(texts[n][5:6])) if n in (0, 2) else r for n, r in enumerate(requests)])
    assert [one.end().reason for one in heard] == ["stop", "length", "stop", "length"]
    assert [one.tokens for one in heard] == [texts[n][:texts[n].index(texts[n][5]) + 1] if n in (0, 2) else texts[n] for n in range(4)]
    assert max(len(set(step)) for step in log) == 2
    assert executor.pool.num_free == 4


def test_resident_steps_are_taken_where_all_decode_plainly_and_give_the_same_texts(start: Callable[..., Engine], texts: dict[int, list[int]],
                                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[tuple[int, int]] = []
    real = PersistentExecutor.run_steps

    def noted(self: PersistentExecutor, chunks: Any, num_steps: int, **how: Any) -> list[list[int]]:
        found = real(self, chunks, num_steps, **how)
        lengths.append((len(chunks), len(found[0])))
        return found

    monkeypatch.setattr(PersistentExecutor, "run_steps", noted)
    executor, _ = twin_executor(resident=True)
    heard = submit_together(start(executor), [request(n) for n in range(3)])
    assert [one.end().reason for one in heard] == ["length"] * 3 and [one.tokens for one in heard] == [texts[n] for n in range(3)]
    assert lengths and max(n for _, n in lengths) > 3 and {chunks for chunks, _ in lengths} <= {1, 2, 3}
    del lengths[:]
    engine = start(twin_executor(resident=True)[0], make_drafter=oracles(texts, [1]))
    heard = submit_together(engine, [request(0), request(1, decode="draft")])
    assert [one.end().reason for one in heard] == ["length"] * 2 and [one.tokens for one in heard] == [texts[0], texts[1]]
    assert all(chunks == 1 for chunks, _ in lengths), "with a draft beside it nobody is resident"


def test_a_late_request_ends_the_residence_of_the_others(start: Callable[..., Engine], texts: dict[int, list[int]]) -> None:
    executor, log = twin_executor(resident=True)
    engine, late = start(executor), Heard()
    first = Heard(on_round=lambda tokens: engine.submit(request(1), late) if tokens == 1 else None)  # type: ignore[arg-type, return-value]
    submit_together(engine, [request(0)], [first])
    assert (first.end().reason, late.end().reason) == ("length", "length")
    assert (first.tokens, late.tokens) == (texts[0], texts[1])
    assert any(len(set(step)) == 2 for step in log), "they never shared a step"


def test_a_step_that_fails_ends_those_in_it_and_the_next_request_is_served(start: Callable[..., Engine], texts: dict[int, list[int]]) -> None:
    executor, _ = twin_executor()
    engine = start(executor)

    def fail_next(tokens: int) -> None:
        twin = executor.runner(8).twin  # type: ignore[attr-defined]
        assert isinstance(twin, Counted)
        twin.fail_next = tokens == 2

    heard = submit_together(engine, [request(0), request(1)], [Heard(on_round=fail_next), Heard()])
    assert [one.end() for one in heard] == [Finished(reason="error", error="RuntimeError: step: a barrier was given up")] * 2
    assert heard[0].tokens == texts[0][:2]
    (after,) = submit_together(engine, [request(2)])
    assert after.end().reason == "length" and after.tokens == texts[2]
    assert engine.failure is None and executor.pool.num_free == executor.pool.num_pages


def test_a_drafter_that_fails_ends_its_request_alone(start: Callable[..., Engine], texts: dict[int, list[int]]) -> None:
    class Broken(Knowing):
        def propose(self, anchor: int, *, count: int, sampling: Sampling) -> list[int]:
            if self.position > self.prompt_length + 2:
                raise ArithmeticError("lost")
            return super().propose(anchor, count=1, sampling=sampling)

    executor, _ = twin_executor()
    engine = start(executor, make_drafter=lambda: Broken(texts[0], prompt_length=len(prompt_of(0)), kind="random", vocab_size=V))
    heard = submit_together(engine, [request(0, decode="draft"), request(1)])
    assert heard[0].end() == Finished(reason="error", error="ArithmeticError: lost") and heard[0].tokens == texts[0][:len(heard[0].tokens)] != []
    assert heard[1].end().reason == "length" and heard[1].tokens == texts[1]


def test_a_text_that_fills_the_context_ends_there(start: Callable[..., Engine]) -> None:
    asked = replace(request(1), prompt=tuple(i % V for i in range(TINY.max_length - 4)), max_tokens=50)
    for resident in (False, True):
        (heard,) = submit_together(start(twin_executor(resident=resident)[0]), [asked])
        assert heard.end() == Finished(reason="length") and len(heard.tokens) == 4 and heard.tokens == alone(asked)
