"""The engine: requests in, rounds of tokens out.

One worker thread owns the executor. Every live request has its own sequence, drafter and draft-verify loop. On an executor that
reads one sequence at a time (the reference, which is the embedded default and the oracle) the worker gives each in turn one round, so a long
answer does not hold up a short one. On one whose steps take columns of several sequences a turn is a step, and requests share it (batching.py).
"""

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from ..dflash.generate import Drafter, Round, Target, TreeDrafter, generate, wishes
from ..dflash.sampling import Sampling
from .batching import RESIDENT_STEPS, BatchExecutor, Task, run_turn
from .pacing import DevicePace, DraftLength, PacedDrafter, Speculation

logger = logging.getLogger(__name__)

DecodeMode = Literal["draft", "tree", "plain", "plain_one_column"]
MAX_TREE_BUDGET = 63   # with the anchor 64, the token columns of the widest step
FinishReason = Literal["stop", "length", "error", "cancelled"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt and how to continue it."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    eos_ids: frozenset[int]      # tokens that end the answer; empty to ignore them
    decode: DecodeMode           # plain_one_column gives up the column rule: faster without a draft, other last bits
    tree_budget: int | None = None   # with decode "tree": nodes verified a round; None: as many as the chain has links
    draft_length: DraftLength | None = None   # proposals verified a round, or positions of a tree, at most; "auto": as many as pay; None: all
    domain: str | None = None        # requests with the same one share whether drafting is on


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The last event of a request."""

    reason: FinishReason
    error: str | None = None


Event = Round | Finished


class Executor(Protocol):
    """What the engine needs of an executor."""

    max_length: int

    def open(self, *, one_column: bool = False) -> Target:
        """An empty sequence."""


@dataclass(eq=False)
class Ticket:
    """A submitted request: cancel it when nobody listens any more."""

    request: Request
    listener: Callable[[Event], None]
    cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        self.cancelled.set()


class Engine:
    """Runs requests, at most `max_running` at a time; the others wait in order of arrival."""

    def __init__(self, executor: Executor, *, make_drafter: Callable[[], Drafter] | None, max_running: int = 8) -> None:
        if max_running < 1:
            raise ValueError(f"engine: max_running must be at least 1; got {max_running}.")
        self.executor, self.make_drafter, self.max_running = executor, make_drafter, max_running
        self.speculation = Speculation()
        self._batch = executor if isinstance(executor, BatchExecutor) else None
        self._waiting: deque[Ticket] = deque()
        self._changed = threading.Condition()
        self._num_running = 0
        self._closed = False
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return self._num_running

    @property
    def failure(self) -> str | None:
        """Why the worker died; None while it is alive."""
        return self._failure or (None if self._thread.is_alive() or self._closed else "the engine's worker ended")

    def submit(self, request: Request, listener: Callable[[Event], None]) -> Ticket:
        """Queue a request; `listener` is called on the engine's thread with every Round and at last one Finished.

        Errors: ValueError for a prompt that does not fit or a draft that is not there; RuntimeError when the engine is down.
        """
        if not request.prompt:
            raise ValueError("prompt: must hold at least one token; got none.")
        if len(request.prompt) >= self.executor.max_length:
            raise ValueError(f"prompt: {len(request.prompt)} tokens leave no room in the model's context of {self.executor.max_length} tokens. "
                             "Shorten the prompt.")
        if request.decode in ("draft", "tree") and self.make_drafter is None:
            raise ValueError(f"decode: {request.decode!r} asked for, but this server runs without a draft head. Leave the field out, or start it with one.")
        ticket = Ticket(request=request, listener=listener)
        with self._changed:
            if self._closed or self.failure is not None:
                raise RuntimeError(f"engine: not running ({self.failure or 'closed'}). Restart the server.")
            self._waiting.append(ticket)
            self._changed.notify()
        return ticket

    def close(self) -> None:
        """Finish the rounds in flight, cancel everything, stop the worker."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        live: list[_Live] = []
        try:
            while True:
                with self._changed:
                    while not (self._closed or self._waiting or live):
                        self._changed.wait()
                    if self._closed:
                        break
                    while self._next_fits(live):
                        live.append(_Live(self._waiting.popleft()))
                    self._num_running = len(live)
                if self._batch is not None:
                    live = self._step_together(self._batch, live)
                else:
                    first = live[0]
                    if self._advance(first):
                        live.append(first)
                    live.pop(0)
                self._num_running = len(live)
        except BaseException as error:   # the worker must not die without a word
            self._failure = f"{type(error).__name__}: {error}"
            raise
        finally:
            with self._changed:
                left = [*(one.ticket for one in live), *self._waiting]
                self._waiting.clear()
                self._num_running = 0
            for one in live:
                one.close()
            for ticket in left:
                _tell(ticket, Finished(reason="error" if self._failure else "cancelled", error=self._failure))

    def _next_fits(self, live: list["_Live"]) -> bool:
        """Whether the first that waits can run beside these; where sequences share memory, whatever length they grow to."""
        if not self._waiting or len(live) >= self.max_running:
            return False
        requests = [*(one.ticket.request for one in live), self._waiting[0].request]
        return self._batch is None or self._batch.fits([len(r.prompt) + r.max_tokens for r in requests])

    def _how(self, request: Request, *, drafts_itself: bool = False) -> dict[str, Any]:
        """Of a request, what the draft-verify loop is told. drafts_itself: the executor, so that the loop has no drafter."""
        drafter = None if drafts_itself else self._drafter(request)
        budget = (request.tree_budget or drafter.num_drafts) if request.decode == "tree" and drafter is not None else None
        return {"prompt": request.prompt, "drafter": drafter, "sampling": request.sampling, "max_tokens": request.max_tokens, "eos_ids": request.eos_ids,
                "tree_budget": budget}

    def _drafter(self, request: Request) -> Drafter | None:
        if request.decode not in ("draft", "tree") or self.make_drafter is None or request.draft_length == 0:
            return None
        drafter, is_tree = self.make_drafter(), request.decode == "tree"
        if is_tree and not isinstance(drafter, TreeDrafter):
            return drafter   # which the loop refuses
        return self.speculation.pace(drafter, length=request.draft_length, domain=request.domain, is_tree=is_tree,
                                     is_sampled=request.sampling.temperature != 0)

    def _start(self, one: "_Live") -> Iterator[Round]:
        request = one.ticket.request
        how = self._how(request)
        one.pace(how["drafter"])
        return generate(self.executor.open(one_column=request.decode == "plain_one_column"), **how)

    def _step_together(self, executor: BatchExecutor, live: list["_Live"]) -> list["_Live"]:
        """One turn of all requests; those that go on, the ones that took part behind the others."""
        for one in live:
            if one.ticket.cancelled.is_set():
                _tell(one.ticket, Finished(reason="cancelled"))
                one.over = True
            elif one.task is None:
                self._open(executor, one)
        by_task = {one.task: one for one in live if not one.over and one.task is not None}

        def stopped() -> bool:
            return self._closed or self._next_fits(live) or any(one.ticket.cancelled.is_set() for one in by_task.values())

        took_part = self._turn(executor, by_task, stopped=stopped) if by_task else []
        for one in live:
            if one.over:
                one.close()
        return [one for one in live if not one.over and one not in took_part] + [one for one in took_part if not one.over]

    def _turn(self, executor: BatchExecutor, by_task: dict[Task, "_Live"], *, stopped: Callable[[], bool]) -> list["_Live"]:
        """One turn, what it took and what its requests committed; those that took part."""
        speculation = self.speculation
        wanted = {task: task.wanted for task in by_task}
        speculation.num_together = len(by_task)
        devices = {task: one.device for task, one in by_task.items() if one.device is not None}
        most = RESIDENT_STEPS
        if devices:
            limits, costs, most = speculation.device_turn(list(devices.values()))
            for task, limit in zip(devices, limits, strict=True):
                task.limit = limit
            if any(limits):
                executor.set_draft_costs(cost_8=costs)
        start, drafting_s = speculation.clock(), speculation.drafting_s
        turn = run_turn(executor, list(by_task), stopped=stopped, most=most)
        done = turn.tasks
        step_s = speculation.clock() - start - (speculation.drafting_s - drafting_s)
        columns = [len(w.ids) for task in done if (w := wanted[task]) is not None]
        is_decode = len(done) == len(by_task) and not any(w.last_only for task in done if (w := wanted[task]) is not None)
        if devices and is_decode:
            speculation.learn_turn(step_s, turn, num_columns=max(columns))
        for task in done:
            by_task[task].step_s += step_s if is_decode else math.nan
            by_task[task].num_turns += 1
            by_task[task].is_drafted = turn.num_drafted is not None and task.limit > 0
            self._report(by_task[task], num_columns=sum(columns) / len(columns))
        return [by_task[task] for task in done]

    def _open(self, executor: BatchExecutor, one: "_Live") -> None:
        """A request's sequence and loop."""
        request = one.ticket.request
        try:
            wants_draft = request.decode in ("draft", "tree") and request.draft_length != 0
            drafts_itself = wants_draft and executor.can_draft(request.sampling, is_tree=request.decode == "tree")
            how = self._how(request, drafts_itself=drafts_itself)
            target = executor.open(one_column=request.decode == "plain_one_column")
        except Exception as error:
            _fail(one.ticket, error)
            one.over = True
            return
        one.pace(how["drafter"])
        if drafts_itself:
            one.device = self.speculation.pace_device(length=request.draft_length, domain=request.domain, is_sampled=request.sampling.temperature != 0)
        one.task = Task(target, wishes(target, **how), max_tokens=request.max_tokens, is_plain=how["drafter"] is None)
        if one.task.wanted is None:
            self._report(one)

    def _report(self, one: "_Live", *, num_columns: float | None = None) -> None:
        """Tell a listener what its request has committed, and how it ended if it did. num_columns: mean of the requests in the step that committed it."""
        assert one.task is not None, "only a request that was opened has something to report"
        rounds = one.task.take_rounds()
        for done in rounds:
            _tell(one.ticket, done)
            if one.device is not None and not done.is_prefill:
                self.speculation.learn_device(one.device, done, is_drafted=one.is_drafted)
            self._learn(one, done, num_columns=num_columns if one.num_turns == 1 else None)
        if one.task.error is not None:
            _fail(one.ticket, one.task.error)
        elif one.task.wanted is None:
            _tell(one.ticket, Finished(reason="stop" if rounds and rounds[-1].stopped else "length"))
        one.over = one.task.wanted is None

    def _advance(self, one: "_Live") -> bool:
        """One round of a request; False when it is over."""
        ticket = one.ticket
        if ticket.cancelled.is_set():
            _tell(ticket, Finished(reason="cancelled"))
            return False
        start, drafting_s = self.speculation.clock(), self.speculation.drafting_s
        try:
            if one.rounds is None:
                one.rounds = self._start(one)
            done = next(one.rounds, None)
        except Exception as error:   # one bad request must not take the others down
            _fail(ticket, error)
            return False
        if done is None:
            _tell(ticket, Finished(reason="length"))
            return False
        _tell(ticket, done)
        one.step_s = self.speculation.clock() - start - (self.speculation.drafting_s - drafting_s)
        self._learn(one, done)
        if done.stopped:
            _tell(ticket, Finished(reason="stop"))
        return not done.stopped

    def _learn(self, one: "_Live", done: Round, *, num_columns: float | None = None) -> None:
        if one.paced is not None and not done.is_prefill:
            self.speculation.learn(one.paced, done, step_s=one.step_s, num_columns=num_columns)
        one.step_s, one.num_turns = 0.0, 0


@dataclass(eq=False)
class _Live:
    """A request in its turn; its rounds, or its task where requests share steps, start with its first turn."""

    ticket: Ticket
    rounds: Iterator[Round] | None = None
    task: Task | None = None
    over: bool = False
    paced: PacedDrafter | None = None
    device: DevicePace | None = None    # where the executor drafts itself
    step_s: float = 0.0     # of the round under way, without drafting; nan: other work was in it
    num_turns: int = 0      # it took so far
    is_drafted: bool = False    # its last turn was of the executor's own drafts

    def pace(self, drafter: Drafter | None) -> None:
        self.paced = drafter if isinstance(drafter, PacedDrafter) else None

    def close(self) -> None:
        if self.task is not None:
            self.task.target.close()


def _fail(ticket: Ticket, error: Exception) -> None:
    logger.error("a request failed", exc_info=error)
    _tell(ticket, Finished(reason="error", error=f"{type(error).__name__}: {error}"))


def _tell(ticket: Ticket, event: Event) -> None:
    try:
        ticket.listener(event)
    except Exception:   # a closed event loop, or a listener's own fault: nobody listens, so stop working for it
        logger.debug("a listener failed", exc_info=True)
        ticket.cancel()

