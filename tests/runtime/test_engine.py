"""The engine's worker: whose turn it is, who waits, and what one request's failure does to the others. No model."""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from kilotok.dflash.generate import Round, TargetStep
from kilotok.dflash.sampling import Sampling
from kilotok.runtime import engine as module
from kilotok.runtime.engine import Engine, Event, Finished, Request, Ticket

VOCAB_SIZE = 64
MAX_LENGTH = 32
WAIT_S = 20   # for what must happen; a broken engine fails a test by it


class Counting:
    """A target whose every next token is the last one plus one; named by its prompt's first token."""

    def __init__(self, executor: "FakeExecutor", *, one_column: bool) -> None:
        self.executor, self.one_column, self.max_length = executor, one_column, executor.max_length
        self.tokens: list[int] = []

    @property
    def length(self) -> int:
        return len(self.tokens)

    def read(self, ids: Sequence[int], *, last_logits_only: bool = False) -> TargetStep:
        self.tokens += ids
        self.executor.reads.append(self.tokens[0])
        self.executor.on_read(self)
        logits = torch.zeros(1 if last_logits_only else len(ids), VOCAB_SIZE)
        for row, token in zip(logits, ids[-len(logits):], strict=True):
            row[(token + 1) % VOCAB_SIZE] = 1.0
        return TargetStep(logits_TV=logits, features_TF=torch.zeros(len(ids), 0))

    def rewind(self, length: int) -> None:
        del self.tokens[length:]


@dataclass
class FakeExecutor:
    """Holds every `open` until the test lets it go, so that what arrives meanwhile is the test's choice."""

    max_length: int = MAX_LENGTH
    entered: threading.Event = field(default_factory=threading.Event)
    gate: threading.Event = field(default_factory=threading.Event)
    on_open: Callable[[], None] = lambda: None
    on_read: Callable[[Counting], None] = lambda target: None
    reads: list[int] = field(default_factory=list)       # names in order of reading
    opened: list[Counting] = field(default_factory=list)

    def open(self, *, one_column: bool = False) -> Counting:
        self.entered.set()
        assert self.gate.wait(WAIT_S)
        self.on_open()
        self.opened.append(Counting(self, one_column=one_column))
        return self.opened[-1]


@dataclass
class Listener:
    """What a request heard."""

    events: list[Event] = field(default_factory=list)
    finished: threading.Event = field(default_factory=threading.Event)
    on_event: Callable[[Event], None] = lambda event: None

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Finished):
            self.finished.set()
        self.on_event(event)

    def result(self) -> tuple[list[int], Finished]:
        """(tokens, how it ended), once it has; exactly one Finished, at the end."""
        assert self.finished.wait(WAIT_S)
        *rounds, end = self.events
        assert isinstance(end, Finished) and all(isinstance(r, Round) for r in rounds)
        return [t for r in rounds for t in r.tokens], end  # type: ignore[union-attr]


def request(name: int, *, max_tokens: int = 3, **changes: Any) -> Request:
    return Request(**{"prompt": (name,), "max_tokens": max_tokens, "sampling": Sampling(), "eos_ids": frozenset(), "decode": "plain", **changes})


@pytest.fixture
def executor() -> FakeExecutor:
    return FakeExecutor()


@pytest.fixture
def start(executor: FakeExecutor) -> Iterator[Callable[..., Engine]]:
    """Engines that are closed after the test."""
    engines: list[Engine] = []

    def make(**options: Any) -> Engine:
        engines.append(Engine(executor, **{"make_drafter": None, **options}))
        return engines[-1]

    yield make
    executor.gate.set()
    for engine in engines:
        engine.close()


def submit_all(engine: Engine, *requests: Request, listeners: Sequence[Listener] = ()) -> list[tuple[Ticket, Listener]]:
    """The first has its turn, held at the gate, when the others arrive."""
    found = []
    for number, one in enumerate(requests):
        listener = listeners[number] if listeners else Listener()
        found.append((engine.submit(one, listener), listener))
        assert engine.executor.entered.wait(WAIT_S)  # type: ignore[attr-defined]
    return found


def test_each_in_turn_gets_one_round_so_a_short_answer_overtakes_a_long_one(executor: FakeExecutor, start: Callable[..., Engine]) -> None:
    order: list[str] = []
    listeners = [Listener(on_event=lambda event, n=n: order.append(f"{n}{'.' if isinstance(event, Finished) else ''}")) for n in (1, 20, 40)]  # type: ignore[misc]
    submit_all(start(), request(1, max_tokens=6), request(20, max_tokens=2), request(40, max_tokens=4), listeners=listeners)
    executor.gate.set()
    texts = [listener.result() for listener in listeners]
    assert texts == [(tokens, Finished(reason="length")) for tokens in ([2, 3, 4, 5, 6, 7], [21, 22], [41, 42, 43, 44])]
    # the first was alone at first; those who came join behind it, and each has one round a turn
    assert " ".join(order) == "1 1 20 40 1 20 40 1 20. 40 1 40 1 40. 1."


def test_at_most_max_running_are_open_and_the_others_wait_in_order_of_arrival(executor: FakeExecutor, start: Callable[..., Engine]) -> None:
    engine, seen, running, names = start(max_running=2), [], [], (1, 10, 20, 30, 40)
    pairs: list[tuple[Ticket, Listener]] = []
    executor.on_read = lambda target: seen.append((engine.num_running, engine.num_waiting))
    executor.on_open = lambda: running.append(len(executor.opened) - sum(listener.finished.is_set() for _, listener in pairs))
    pairs += submit_all(engine, *(request(n, max_tokens=4) for n in names))
    assert engine.num_waiting == 4
    executor.gate.set()
    assert [listener.result() for _, listener in pairs] == [([n + i for i in range(1, 5)], Finished(reason="length")) for n in names]
    assert [target.tokens[0] for target in executor.opened] == list(names)
    assert running == [0, 1, 1, 1, 1]   # others that run when one is opened: never more, and no fewer
    assert seen[:2] == [(1, 4), (2, 3)] and max(r for r, _ in seen) == 2


def test_a_single_one_at_a_time(executor: FakeExecutor, start: Callable[..., Engine]) -> None:
    engine = start(max_running=1)
    pairs = submit_all(engine, request(1), request(20))
    executor.gate.set()
    assert [listener.result()[0] for _, listener in pairs] == [[2, 3, 4], [21, 22, 23]]
    assert executor.reads == [1, 1, 1, 20, 20, 20]


def test_modes_open_what_they_ask_for_and_only_draft_gets_a_drafter(executor: FakeExecutor, start: Callable[..., Engine]) -> None:
    made: list[Any] = []

    class Ahead:
        """Right about the next two."""

        num_drafts = 2

        def __init__(self) -> None:
            made.append(self)

        def observe(self, features_TF: torch.Tensor) -> None:
            pass

        def propose(self, anchor: int, *, count: int, sampling: Sampling) -> list[int]:
            return [anchor + 1, anchor + 2][:count]

    engine = start(make_drafter=Ahead)
    executor.gate.set()
    expected = {"draft": ([1, 3, 3], False, 1), "plain": ([1] * 7, False, 1), "plain_one_column": ([1] * 7, True, 1)}
    for mode, (lengths, one_column, drafters) in expected.items():
        ((_, listener),) = submit_all(engine, request(1, max_tokens=7, decode=mode))
        assert listener.result() == ([2, 3, 4, 5, 6, 7, 8], Finished(reason="length"))
        assert [len(e.tokens) for e in listener.events[:-1]] == lengths  # type: ignore[union-attr]
        assert executor.opened[-1].one_column is one_column and len(made) == drafters
    submit_all(engine, request(1, decode="draft"))[0][1].result()
    assert len(made) == 2   # each request has its own


def test_an_end_token_stops_and_the_last_round_says_so(executor: FakeExecutor, start: Callable[..., Engine]) -> None:
    executor.gate.set()
    engine = start()
    for eos, tokens in ((5, [2, 3, 4, 5]), (2, [2])):
        ((_, listener),) = submit_all(engine, request(1, max_tokens=10, eos_ids=frozenset({eos, 60})))
        assert listener.result() == (tokens, Finished(reason="stop"))
        assert [e.stopped for e in listener.events[:-1]] == [False] * (len(tokens) - 1) + [True]  # type: ignore[union-attr]


def test_the_context_ends_a_text(executor: FakeExecutor, start: Callable[..., Engine]) -> None:
    executor.gate.set()
    ((_, listener),) = submit_all(start(), request(1, max_tokens=1000))
    tokens, end = listener.result()
    assert end == Finished(reason="length") and len(tokens) == MAX_LENGTH - 1   # with the prompt's token, the context


# ---- cancelling


def test_cancelling_a_running_request_ends_it_at_its_next_turn(executor: FakeExecutor, start: Callable[..., Engine]) -> None:
    tickets: list[Ticket] = []
    listener, other = Listener(on_event=lambda event: tickets[0].cancel() if len(listener.events) == 3 else None), Listener()
    tickets += [ticket for ticket, _ in submit_all(start(), request(1, max_tokens=20), request(30, max_tokens=6), listeners=[listener, other])]
    executor.gate.set()
    assert listener.result() == ([2, 3, 4], Finished(reason="cancelled"))
    assert other.result() == ([31, 32, 33, 34, 35, 36], Finished(reason="length"))
    assert executor.reads.count(1) == 3


def test_a_request_cancelled_while_it_waits_is_never_opened(executor: FakeExecutor, start: Callable[..., Engine]) -> None:
    engine = start(max_running=1)
    (_, first), (ticket, second), (_, third) = submit_all(engine, request(1), request(20), request(40))
    ticket.cancel()
    executor.gate.set()
    assert second.result() == ([], Finished(reason="cancelled"))
    assert first.result()[1] == third.result()[1] == Finished(reason="length")
    assert [target.tokens[0] for target in executor.opened] == [1, 40]


# ---- failures reach the request they belong to


def expect_error(engine: Engine, bad: Request, *, error: str, tokens: list[int]) -> None:
    (_, before), (_, broken), (_, after) = submit_all(engine, request(30), bad, request(40))
    engine.executor.gate.set()  # type: ignore[attr-defined]
    assert broken.result() == (tokens, Finished(reason="error", error=error))
    assert before.result() == ([31, 32, 33], Finished(reason="length")) and after.result() == ([41, 42, 43], Finished(reason="length"))
    assert engine.failure is None
    assert submit_all(engine, request(50))[0][1].result() == ([51, 52, 53], Finished(reason="length"))


def test_a_read_that_fails(executor: FakeExecutor, start: Callable[..., Engine], caplog: pytest.LogCaptureFixture) -> None:
    def fail(target: Counting) -> None:
        if target.tokens[0] == 1 and target.length == 3:
            raise ArithmeticError("not a number")

    executor.on_read = fail
    with caplog.at_level(logging.ERROR, logger=module.__name__):
        expect_error(start(), request(1), error="ArithmeticError: not a number", tokens=[2, 3])
    assert [r.message for r in caplog.records] == ["a request failed"] and caplog.records[0].exc_info is not None


def test_an_open_that_fails(executor: FakeExecutor, start: Callable[..., Engine]) -> None:
    count = iter(range(10))

    def fail() -> None:
        if next(count) == 1:   # the second to open
            raise MemoryError("no room for a cache")

    executor.on_open = fail
    expect_error(start(), request(1), error="MemoryError: no room for a cache", tokens=[])


def test_a_drafter_that_cannot_be_made(executor: FakeExecutor, start: Callable[..., Engine]) -> None:
    def fail() -> Any:
        raise ValueError("a bad draft")

    expect_error(start(make_drafter=fail), request(1, decode="draft"), error="ValueError: a bad draft", tokens=[])


def test_a_listener_that_fails_ends_its_own_request(executor: FakeExecutor, start: Callable[..., Engine]) -> None:
    def fail(event: Event) -> None:
        raise ConnectionError("nobody there")

    engine = start()
    (ticket, broken), (_, other) = submit_all(engine, request(1, max_tokens=20), request(30, max_tokens=5), listeners=[Listener(on_event=fail), Listener()])
    executor.gate.set()
    assert other.result() == ([31, 32, 33, 34, 35], Finished(reason="length"))
    assert broken.result() == ([2], Finished(reason="cancelled")) and ticket.cancelled.is_set()
    assert executor.reads.count(1) == 1 and engine.failure is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_that_dies_tells_everyone_and_takes_no_more(executor: FakeExecutor, start: Callable[..., Engine]) -> None:
    def fail(target: Counting) -> None:
        if target.tokens[0] == 20:
            raise SystemExit("the device is gone")

    executor.on_read = fail
    engine = start(max_running=2)
    pairs = submit_all(engine, request(1, max_tokens=20), request(20), request(40))
    executor.gate.set()
    end = Finished(reason="error", error="SystemExit: the device is gone")
    results = [listener.result() for _, listener in pairs]
    assert [r[1] for r in results] == [end] * 3 and results[1][0] == results[2][0] == []
    assert engine.failure == "SystemExit: the device is gone"
    engine._thread.join(WAIT_S)
    with pytest.raises(RuntimeError, match=r"^engine: not running \(SystemExit: the device is gone\)\. Restart the server\.$"):
        engine.submit(request(1), Listener())
    engine.close()
    assert engine.num_waiting == 0


# ---- closing


def test_closing_cancels_the_running_and_the_waiting_after_the_round_in_flight(executor: FakeExecutor, start: Callable[..., Engine]) -> None:
    engine = start(max_running=2)
    reading = threading.Event()

    def on_read(target: Counting) -> None:
        if executor.reads == [1, 1, 10]:
            reading.set()
            while not engine._closed:
                pass

    executor.on_read = on_read
    pairs = submit_all(engine, *(request(n, max_tokens=25) for n in (1, 10, 30)))
    executor.gate.set()
    assert reading.wait(WAIT_S)
    engine.close()
    assert [listener.result() for _, listener in pairs] == [([2, 3], Finished(reason="cancelled")), ([11], Finished(reason="cancelled")),
                                                            ([], Finished(reason="cancelled"))]
    assert engine.failure is None and engine.num_waiting == 0 and not engine._thread.is_alive()
    with pytest.raises(RuntimeError, match=r"^engine: not running \(closed\)\. Restart the server\.$"):
        engine.submit(request(1), Listener())
    engine.close()   # again: nothing to do


# ---- what submit refuses


@pytest.mark.parametrize(("changes", "message"), [
    ({"prompt": ()}, r"^prompt: must hold at least one token; got none\.$"),
    ({"prompt": (1,) * MAX_LENGTH}, r"^prompt: 32 tokens leave no room in the model's context of 32 tokens\. Shorten the prompt\.$"),
    ({"decode": "draft"}, r"^decode: 'draft' asked for, but this server runs without a draft head\. Leave the field out, or start it with one\.$")])
def test_a_request_that_cannot_run_is_refused(changes: dict[str, Any], message: str, executor: FakeExecutor, start: Callable[..., Engine]) -> None:
    engine, listener = start(), Listener()
    with pytest.raises(ValueError, match=message):
        engine.submit(request(1, **changes), listener)
    assert engine.num_waiting == 0 and listener.events == []
    executor.gate.set()
    ((_, longest),) = submit_all(engine, request(1, prompt=(1,) * (MAX_LENGTH - 1)))
    assert longest.result() == ([2], Finished(reason="length"))


def test_max_running_must_be_positive(executor: FakeExecutor) -> None:
    threads = threading.active_count()
    with pytest.raises(ValueError, match=r"^engine: max_running must be at least 1; got 0\.$"):
        Engine(executor, make_drafter=None, max_running=0)
    assert threading.active_count() == threads
