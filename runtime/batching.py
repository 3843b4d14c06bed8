"""Several requests in one step: what an executor that can do so looks like, and a request as such an engine sees it.

A request's draft-verify loop says what it wants read (dflash/generate.py), its sequence cuts that into columns, and every turn of the engine takes
columns of as many requests as a step holds (schedule.py). A request moves on when its columns have come back, so one that verifies drafts, one that
decodes plainly and one that reads its prompt go side by side, and none of them can tell.

Where nobody reads a prompt and no draft is made here, a turn is several steps that the device runs alone; or several rounds, if its own draft head
drafts for a request. A request without a draft takes part in rounds as one that verifies nothing.
"""

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from ..dflash.generate import Loop, Read, ReadTree, Round, Target, TargetStep
from ..kernels.persistent.plan import RUN_COLUMNS
from .schedule import Want, choose_columns

# Steps or rounds at most between two looks at the queue: a request that arrives waits for the one in flight alone where the device can be stopped.
RESIDENT_STEPS = 16


class Columns(Protocol):
    """Tokens that a sequence wants to read at once."""

    @property
    def ids(self) -> tuple[int, ...]: ...

    @property
    def last_only(self) -> bool:
        """Fewer of them will do."""

    @property
    def sampling(self) -> Any: ...

    def first(self, count: int) -> "Columns":
        """The first few of them."""


class BatchedTarget(Target, Protocol):
    """A sequence whose reads are cut into columns of common steps."""

    def reading(self, wish: Read | ReadTree) -> Generator[Any, TargetStep, TargetStep]:
        """Yields Columns, is sent their step, returns the step of the whole wish."""

    def close(self) -> None: ...


@runtime_checkable
class BatchExecutor(Protocol):
    """An executor whose steps take columns of several sequences."""

    max_length: int
    num_columns: int

    @property
    def can_reside(self) -> bool:
        """Whether `run_steps` is there."""

    def open(self, *, one_column: bool = False) -> BatchedTarget: ...

    def fits(self, lengths: Sequence[int]) -> bool:
        """Whether sequences that grow to so many tokens can be open together."""

    def can_pick(self, sampling: Any) -> bool:
        """Whether a step picks tokens so."""

    def can_round(self, sampling: Any) -> bool:
        """Whether `run_rounds` is there, for a sequence sampled so."""

    def can_draft(self, sampling: Any, *, is_tree: bool = False) -> bool:
        """Whether `run_rounds` drafts for a request."""

    def step(self, chunks: Sequence[Any]) -> list[TargetStep]: ...

    def run_steps(self, chunks: Sequence[Any], num_steps: int, *, stopped: Callable[[], bool]) -> list[list[int]]: ...

    def set_draft_costs(self, *, cost_8: Sequence[float]) -> None:
        """What rounds choose the number of proposals by."""

    def run_rounds(self, chunks: Sequence[Any], num_rounds: int, *, limits: Sequence[int], stopped: Callable[[], bool]
                   ) -> list[list[tuple[tuple[int, ...], int]]]: ...


class Task:
    """A request at work on a sequence.

    is_plain: its loop has no drafter. limit: proposals of the executor's own draft that it has verified a round, at most; 0 for none.
    wanted: the columns it waits for; None once it is over. error: what ended it, if its loop, its drafter or a step failed.
    """

    def __init__(self, target: BatchedTarget, loop: Loop, *, max_tokens: int, is_plain: bool, limit: int = 0) -> None:
        self.target, self.is_plain, self.limit, self._loop, self._left = target, is_plain, limit, loop, max_tokens
        self.wanted: Columns | None = None
        self.error: Exception | None = None
        self._rounds: list[Round] = []
        self._reading: Generator[Any, TargetStep, TargetStep] | None = None
        self._go_on(None)

    @property
    def tokens_left(self) -> int:
        """That it can still commit at most, one a step."""
        return min(self._left, self.target.max_length - 1 - self.target.length)

    def take_rounds(self) -> list[Round]:
        """Committed since the last time."""
        rounds, self._rounds = self._rounds, []
        return rounds

    def answer(self, step: TargetStep) -> None:
        """The step of the columns that were wanted, or of the first of them."""
        assert self._reading is not None, "nothing was wanted"
        self.wanted = None
        try:
            self.wanted = self._reading.send(step)
        except StopIteration as done:
            self._go_on(done.value)
        except Exception as error:   # one bad request must not take the others down
            self.fail(error)

    def fail(self, error: Exception) -> None:
        self.wanted, self.error = None, error

    def _go_on(self, step: TargetStep | None) -> None:
        """Run the loop up to its next wish, or its end."""
        try:
            event = self._loop.send(step)
            while isinstance(event, Round):
                self._rounds.append(event)
                self._left -= len(event.tokens)
                event = self._loop.send(None)
            self._reading = self.target.reading(event)
            self.wanted = next(self._reading)
        except StopIteration:
            return
        except Exception as error:
            self.fail(error)


class Turn(NamedTuple):
    """What a turn was."""

    tasks: list[Task]           # those that took part, in their order
    num_rounds: int             # steps or rounds that ran; 0: it failed
    num_drafted: float | None   # proposals verified a round by a sequence, on average; None: steps, without the executor's own draft


def run_turn(executor: BatchExecutor, tasks: Sequence[Task], *, stopped: Callable[[], bool], most: int = RESIDENT_STEPS) -> Turn:
    """One step, or several steps or rounds, at most so many, where no task needs the host in between.

    tasks: all want columns; those that waited longest first. stopped: whether anybody else wants something of the executor.
    """
    num_rounds = min(most, _resident_rounds(executor, tasks))
    if num_rounds > 0:
        return _draft(executor, tasks, num_rounds=num_rounds, stopped=stopped)
    num_steps = min(most, _resident_steps(executor, tasks))
    if num_steps > 1 and not stopped():
        return _reside(executor, tasks, num_steps=num_steps, stopped=stopped)
    wanted = [_wanted(task) for task in tasks]
    chosen = choose_columns([Want(columns=len(w.ids), divisible=w.last_only) for w in wanted], num_columns=executor.num_columns)
    took_part = [tasks[place] for place, _ in chosen]
    try:
        steps = executor.step([wanted[place].first(count) for place, count in chosen])
    except Exception as error:
        return _failed(took_part, error)
    for task, step in zip(took_part, steps, strict=True):
        task.answer(step)
    return Turn(took_part, 1, None)


def _failed(tasks: Sequence[Task], error: Exception) -> Turn:
    for task in tasks:
        task.fail(error)
    return Turn(list(tasks), 0, None)


def _resident_steps(executor: BatchExecutor, tasks: Sequence[Task]) -> int:
    """How many steps all tasks can go without the host."""
    if not executor.can_reside or len(tasks) > executor.num_columns:
        return 1
    if not all(task.is_plain and not _wanted(task).last_only and executor.can_pick(_wanted(task).sampling) for task in tasks):
        return 1
    return min(RESIDENT_STEPS, *(task.tokens_left for task in tasks))


def _resident_rounds(executor: BatchExecutor, tasks: Sequence[Task]) -> int:
    """How many rounds all tasks can go without the host, none of them beyond its last token; 0: there is nothing to draft, or not for all of these."""
    if len(tasks) * RUN_COLUMNS > executor.num_columns or not any(_limit(task) > 0 for task in tasks):
        return 0
    if not all(task.is_plain and not _wanted(task).last_only and executor.can_round(_wanted(task).sampling) for task in tasks):
        return 0
    return max(1, min(RESIDENT_STEPS, *(task.tokens_left // RUN_COLUMNS for task in tasks)))


def _limit(task: Task) -> int:
    """Proposals and a token behind them are what it has left."""
    return min(task.limit, task.tokens_left - 1)


def _draft(executor: BatchExecutor, tasks: Sequence[Task], *, num_rounds: int, stopped: Callable[[], bool]) -> Turn:
    try:
        found = executor.run_rounds([_wanted(task) for task in tasks], num_rounds, limits=[_limit(task) for task in tasks], stopped=stopped)
    except Exception as error:
        return _failed(tasks, error)
    for task, rounds in zip(tasks, found, strict=True):
        for tokens, num_drafted in rounds:
            if task.wanted is None:
                break   # it ended on the way: what the device read further is forgotten with the sequence
            task.answer(TargetStep(logits_TV=torch.empty(1, 0), features_TF=torch.empty(len(tokens), 0), tokens_T=tokens, num_drafted=num_drafted))
    verified = [num_drafted for rounds in found for _, num_drafted in rounds]
    return Turn(list(tasks), max(len(rounds) for rounds in found), sum(verified) / max(1, len(verified)))


def _reside(executor: BatchExecutor, tasks: Sequence[Task], *, num_steps: int, stopped: Callable[[], bool]) -> Turn:
    try:
        found = executor.run_steps([_wanted(task) for task in tasks], num_steps, stopped=stopped)
    except Exception as error:
        return _failed(tasks, error)
    nothing = torch.empty(1, 0)
    for task, tokens in zip(tasks, found, strict=True):
        for token in tokens:
            if task.wanted is None:
                break   # it ended on the way: what the device read further is forgotten with the sequence
            task.answer(TargetStep(logits_TV=nothing, features_TF=nothing, tokens_T=(token,)))
    return Turn(list(tasks), max(map(len, found)), None)


def _wanted(task: Task) -> Columns:
    assert task.wanted is not None, "a task in a turn wants columns"
    return task.wanted
