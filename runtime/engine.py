"""The engine: requests in, rounds of tokens out.

One worker thread owns the executor. Every live request has its own sequence, drafter and draft-verify loop; the worker
gives each in turn one round, so a long answer does not hold up a short one. Nothing is batched over requests: this engine
drives the reference executor, which is the embedded default and the oracle.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ..dflash.generate import Drafter, Round, Target, generate
from ..dflash.sampling import Sampling

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
                    while self._waiting and len(live) < self.max_running:
                        live.append(_Live(self._waiting.popleft()))
                    self._num_running = len(live)
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
            for ticket in left:
                _tell(ticket, Finished(reason="error" if self._failure else "cancelled", error=self._failure))

    def _start(self, request: Request) -> Iterator[Round]:
        drafter = self.make_drafter() if request.decode in ("draft", "tree") and self.make_drafter is not None else None
        budget = (request.tree_budget or drafter.num_drafts) if request.decode == "tree" and drafter is not None else None
        target = self.executor.open(one_column=request.decode == "plain_one_column")
        return generate(target, prompt=request.prompt, drafter=drafter, sampling=request.sampling, max_tokens=request.max_tokens,
                        eos_ids=request.eos_ids, tree_budget=budget)

    def _advance(self, one: "_Live") -> bool:
        """One round of a request; False when it is over."""
        ticket = one.ticket
        if ticket.cancelled.is_set():
            _tell(ticket, Finished(reason="cancelled"))
            return False
        try:
            if one.rounds is None:
                one.rounds = self._start(ticket.request)
            done = next(one.rounds, None)
        except Exception as error:   # one bad request must not take the others down
            logger.exception("a request failed")
            _tell(ticket, Finished(reason="error", error=f"{type(error).__name__}: {error}"))
            return False
        if done is None:
            _tell(ticket, Finished(reason="length"))
            return False
        _tell(ticket, done)
        if done.stopped:
            _tell(ticket, Finished(reason="stop"))
        return not done.stopped


@dataclass(eq=False)
class _Live:
    """A request in its turn; its rounds start with its first turn."""

    ticket: Ticket
    rounds: Iterator[Round] | None = None


def _tell(ticket: Ticket, event: Event) -> None:
    try:
        ticket.listener(event)
    except Exception:   # a closed event loop, or a listener's own fault: nobody listens, so stop working for it
        logger.debug("a listener failed", exc_info=True)
        ticket.cancel()

