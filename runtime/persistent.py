"""The persistent executor: sequences on a step that computes up to 64 token columns of several sequences at once.

What computes a step is a runner: the resident kernel on a GPU (kernels/persistent), or its twin on a CPU, for tests. The executor owns the cache's
pages, cuts reads into columns, at most 8 of a sequence a step, and hands back logits, features and the tokens that the step picked.

The column rule is the kernel's: a column's operations depend on its own inputs alone, not on the width of the step, its neighbours or their number. So
text is the same with and without a draft, alone and among others, and in whatever pieces a prompt was read; nothing here has to see to it.

A step's width is the smallest that holds its columns: runners of every width share one cache.

With a draft head in the kernel (kernels/persistent/round_inputs.py) several rounds of draft, verify and accept run without the host. Every step then also
takes the draft's context, so that sequences can change between steps and rounds at any time.

Legend: C columns, T tokens, X taps, D hidden, V vocabulary.
"""

import logging
import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..dflash.generate import Read, ReadTree, TargetStep
from ..dflash.sampling import Sampling
from ..dflash.tree import ANCHOR, DraftTree
from ..kernels.persistent import Column, DraftState, DraftWeights, RoundColumn, RoundInputs, StepInputs, StepState, StepWeights, unpack_dense
from ..kernels.persistent.attention import COLUMNS
from ..kernels.persistent.plan import CHUNK, RUN_COLUMNS
from .kv_pages import PagePool, pages_for

logger = logging.getLogger(__name__)


class StepRunner(Protocol):
    """Computes steps on one state."""

    state: StepState

    def step(self, inputs: StepInputs) -> None:
        """One step of inputs on the host; what it gives is in `state` for work that follows on the device.

        Errors: RuntimeError for a step that failed, such as a barrier that was given up; the next step can be run.
        """


@runtime_checkable
class ResidentRunner(StepRunner, Protocol):
    """One that can run several steps without the host."""

    def run_steps(self, inputs: StepInputs, num_steps: int, *, stopped: Callable[[], bool]) -> Tensor:
        """Each column's next token becomes its next input: int32 [steps, C], -1 in dead columns. Fewer steps if `stopped` says so on the way."""


@runtime_checkable
class RoundRunner(ResidentRunner, Protocol):
    """One that has a draft head, and can run several rounds without the host. All its steps take the draft's context."""

    def run_rounds(self, inputs: RoundInputs, num_rounds: int, *, stopped: Callable[[], bool]) -> tuple[Tensor, Tensor]:
        """(tokens, verified): of every round the committed tokens, int32 [R, C], of sequence s from column 8 s on, and how many proposals were verified, int32
        [R, S]; both -1 where there are none. One round at least, and fewer than asked for if `stopped` says so on the way."""


def kernel_picks(sampling: Sampling) -> bool:
    """Whether the kernel picks tokens so, several steps or rounds in a row: greedy, or with a temperature alone."""
    return sampling.temperature == 0 or (sampling.top_k is None and sampling.top_p == 1)


class PersistentExecutor:
    """Weights, pages and runners; sequences come from `open`.

    make_runner: of a state, and of the draft's where there is one; a runner is made for every width when it is first needed.
    num_columns: of the widest step, of 8, 16, 32 and 64. num_pages: of 128 positions, for all sequences together.
    picks: whether runners pick tokens so; where not, they are picked from the logits on the host, and it is said once.
    draft: a draft head for rounds, if the runners have it.
    Errors: ValueError for numbers that do not fit together.
    """

    def __init__(self, weights: StepWeights, *, make_runner: Callable[..., StepRunner], num_slots: int = 8, num_columns: int = 64,
                 num_pages: int | None = None, picks: Callable[[Sampling], bool] = lambda sampling: True, name: str = "persistent",
                 draft: DraftWeights | None = None) -> None:
        shape = weights.shape
        whole = pages_for(shape.max_length)
        num_pages = num_slots * whole if num_pages is None else num_pages
        if num_columns not in COLUMNS:
            raise ValueError(f"executor: a step has {', '.join(map(str, COLUMNS))} columns; got {num_columns}.")
        if num_pages < whole:
            raise ValueError(f"executor: a sequence of the whole context ({shape.max_length}) takes {whole} pages of {CHUNK} positions; got {num_pages}. "
                             "Give the cache more memory or shorten the context.")
        self.weights, self.num_columns, self.max_length, self.name = weights, num_columns, shape.max_length, name
        self.pool = PagePool(num_pages=num_pages, num_slots=num_slots, max_length=shape.max_length)
        self.device = weights.embedding_VD.device
        self._make_runner, self._picks, self._said = make_runner, picks, set[str]()
        self._state = StepState.of(shape, num_columns=min(COLUMNS), num_slots=num_slots, num_pages=num_pages, device=self.device)
        self._drafts = None if draft is None else DraftState.of(draft.shape, self._state)
        self._runners: dict[int, StepRunner] = {}
        self._head: Tensor | None = None

    @property
    def embedding_VD(self) -> Tensor:
        return self.weights.embedding_VD

    @property
    def head_VD(self) -> Tensor:
        """In rows, for a draft head; made when first asked for."""
        if self._head is None:
            self._head = unpack_dense(self.weights.head)
        return self._head

    @property
    def description(self) -> dict[str, str]:
        return {"executor": self.name, "device": str(self.device), "dtype": "bfloat16",
                "column_rule": f"steps of up to {self.num_columns} columns in tiles of 8, cache chunks of {CHUNK}, a token in any column",
                **({"rounds": "drafted without the host, for chains that are greedy or sampled by temperature alone"} if self.has_rounds else {})}

    @property
    def can_reside(self) -> bool:
        """Whether several steps can be run without the host."""
        return isinstance(self.runner(min(COLUMNS)), ResidentRunner)

    @property
    def has_rounds(self) -> bool:
        """Whether the runners have a draft head."""
        return self._drafts is not None and isinstance(self.runner(min(COLUMNS)), RoundRunner)

    def can_pick(self, sampling: Sampling) -> bool:
        """Whether a step itself picks tokens so."""
        if self._picks(sampling):
            return True
        self._say_once(f"the step on the device does not pick tokens with {sampling}: they are picked from the logits on the host", about="picks")
        return False

    def can_round(self, sampling: Sampling) -> bool:
        """Whether a sequence that is sampled so can take part in rounds."""
        return self.has_rounds and kernel_picks(sampling)

    def can_draft(self, sampling: Sampling, *, is_tree: bool = False) -> bool:
        """Whether rounds can draft for a request; where they could not for this one, it is said once."""
        if not self.has_rounds:
            if self._drafts is not None:
                self._say_once("the step does not run rounds here: the draft head in torch drafts, and a step at a time verifies", about="rounds at all")
            return False
        if is_tree:
            self._say_once("draft trees are made by the draft head in torch, and verified a step at a time", about="trees")
        elif not kernel_picks(sampling):
            self._say_once(f"rounds on the device do not pick tokens with {sampling}: the draft head in torch drafts them, and they are verified a step at a "
                           "time", about="rounds")
        return not is_tree and kernel_picks(sampling)

    def _say_once(self, what: str, *, about: str) -> None:
        if about not in self._said:
            logger.warning("executor: %s", what)
        self._said.add(about)

    def set_draft_costs(self, *, cost_8: Sequence[float] | None = None, scale_8: Sequence[float] | None = None) -> None:
        """What rounds choose the number of proposals by from now on; None: as before, at first all that may be, at the draft's word.

        cost_8: time of a round that verifies 0..7, in any unit; scale_8: what the draft's probability of proposal n is multiplied with, at n.
        Errors: ValueError unless it is 8 numbers above 0, or without a draft head.
        """
        for name, given in (("cost_8", cost_8), ("scale_8", scale_8)):
            if given is None:
                continue
            if self._drafts is None:
                raise ValueError(f"executor: {name} is for a draft head in the kernel, which this executor has not.")
            if len(given) != RUN_COLUMNS or not all(0 < x < math.inf for x in given):
                raise ValueError(f"executor: {name} must be {RUN_COLUMNS} numbers above 0; got {list(given)}.")
            getattr(self._drafts, name).copy_(torch.tensor(given))

    def fits(self, lengths: Sequence[int]) -> bool:
        """Whether sequences that grow to so many tokens have slots and pages together; with a draft head a block behind their ends too."""
        ahead = 0 if self._drafts is None else RUN_COLUMNS
        return len(lengths) <= self.pool.num_slots and sum(pages_for(min(n + ahead, self.max_length)) for n in lengths) <= self.pool.num_pages

    def open(self, *, one_column: bool = False) -> "PersistentSequence":
        """An empty sequence; close it, or its slot is taken for ever. one_column: as without it, as nothing is gained.

        Errors: OutOfPages if all slots are taken.
        """
        return PersistentSequence(self, slot=self.pool.open())

    def runner(self, columns: int) -> StepRunner:
        """The narrowest one for so many columns."""
        width = min(c for c in COLUMNS if c >= columns)
        if width not in self._runners:
            states: list[Any] = [self._state, *([] if self._drafts is None else [self._drafts])]
            self._runners[width] = self._make_runner(*(state if width == min(COLUMNS) else state.wider(width) for state in states))
        return self._runners[width]

    @torch.inference_mode()
    def step(self, chunks: Sequence["Chunk"]) -> list[TargetStep]:
        """One step of the model over all of these; of each what a Target says, of the last row's logits only where nothing else is asked for.

        Errors: RuntimeError as StepRunner.
        """
        runner, inputs = self._prepare(chunks)
        runner.step(inputs)
        state, steps, start = runner.state, list[TargetStep](), 0
        tokens = state.next_C.tolist()
        for chunk in chunks:
            stop = start + len(chunk.ids)
            rows = slice(stop - 1 if chunk.last_only else start, stop)
            steps.append(TargetStep(logits_TV=state.logits_CV[rows].clone(), features_TF=state.features_CXD[start:stop].flatten(1).clone(),
                                    tokens_T=tuple(tokens[rows]) if self.can_pick(chunk.sampling) else None))
            start = stop
        return steps

    @torch.inference_mode()
    def run_steps(self, chunks: Sequence["Chunk"], num_steps: int, *, stopped: Callable[[], bool]) -> list[list[int]]:
        """Plain decoding of several steps at once: of each chunk, which has one column, the tokens of every step.

        The pages of all these positions are taken first. Errors: as `step`.
        """
        for chunk in chunks:
            assert len(chunk.ids) == 1, "several steps in a row are of one column a sequence"
            chunk.sequence.reserve(chunk.position + num_steps)
        runner, inputs = self._prepare(chunks)
        assert isinstance(runner, ResidentRunner)
        found: list[list[int]] = runner.run_steps(inputs, num_steps, stopped=stopped)[:, :len(chunks)].T.tolist()
        return found

    @torch.inference_mode()
    def run_rounds(self, chunks: Sequence["Chunk"], num_rounds: int, *, limits: Sequence[int], stopped: Callable[[], bool]
                   ) -> list[list[tuple[tuple[int, ...], int]]]:
        """Several rounds at once: of each chunk, which has one column, what every round committed and how many proposals it verified.

        The pages of all positions that they can reach are taken first. limits: proposals verified at most, 0..7, of each. Errors: as `step`.
        """
        sequences: list[RoundColumn | None] = []
        for chunk, limit in zip(chunks, limits, strict=True):
            assert len(chunk.ids) == 1, "a round begins with one token a sequence"
            s = chunk.sampling
            chunk.sequence.reserve(min(chunk.position + RUN_COLUMNS * num_rounds, self.max_length))
            sequences.append(RoundColumn(token_id=chunk.ids[0], slot=chunk.sequence.slot, position=chunk.position, temperature=s.temperature, top_p=s.top_p,
                                         top_k=s.top_k, seed=s.seed, limit=limit))
        runner = self.runner(RUN_COLUMNS * len(chunks))
        assert isinstance(runner, RoundRunner)
        sequences += [None] * (runner.state.num_columns // RUN_COLUMNS - len(chunks))
        tokens_RC, verified_RS = runner.run_rounds(RoundInputs.of(sequences), num_rounds, stopped=stopped)
        return [[(tuple(t for t in tokens[s * RUN_COLUMNS:(s + 1) * RUN_COLUMNS] if t >= 0), verified[s])
                 for tokens, verified in zip(tokens_RC.tolist(), verified_RS.tolist(), strict=True) if verified[s] >= 0] for s in range(len(chunks))]

    def _prepare(self, chunks: Sequence["Chunk"]) -> tuple[StepRunner, StepInputs]:
        columns: list[Column | None] = []
        for chunk in chunks:
            s = chunk.sampling
            columns += [Column(token_id=token, slot=chunk.sequence.slot, position=chunk.position + i, temperature=s.temperature, top_p=s.top_p, top_k=s.top_k,
                               seed=s.seed) for i, token in enumerate(chunk.ids)]
        assert 1 <= len(columns) <= self.num_columns, f"a step of {len(columns)} columns"
        runner = self.runner(len(columns))
        columns += [None] * (runner.state.num_columns - len(columns))
        return runner, StepInputs.of(columns)

    def set_pages(self, slot: int, pages: dict[int, int]) -> None:
        """New entries of the page table."""
        for chunk, page in pages.items():
            self._state.pages_SP[slot, chunk] = page

    def rows_at(self, slot: int, position: int) -> Tensor:
        """Keys and values of a position in all layers, [layers, 2, heads, head_dim]: the cache's own memory."""
        return self._state.cache[:, self.pool.pages(slot)[position // CHUNK], :, :, position % CHUNK]


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Columns that a sequence wants in a step: tokens at consecutive positions from its length on."""

    sequence: "PersistentSequence"
    ids: tuple[int, ...]        # 1..8
    position: int
    sampling: Sampling
    last_only: bool             # part of a prompt: fewer tokens will do, and only the last one's logits count

    def first(self, count: int) -> "Chunk":
        return replace(self, ids=self.ids[:count])


Reading = Generator[Chunk, TargetStep, TargetStep]


class PersistentSequence:
    """One sequence: a TreeTarget of the draft-verify loop, and a Batched one of the engine.

    Pages are taken before positions are read and given back by `close`: a rewound position is written again soon.
    """

    def __init__(self, executor: PersistentExecutor, *, slot: int) -> None:
        self.executor, self.slot, self.max_length = executor, slot, executor.max_length
        self.length = 0
        self._open = True
        self._tree: list[Tensor] | None = None     # keys and values of the anchor and the nodes of the tree just read

    def close(self) -> None:
        """Give back slot and pages. A second time does nothing."""
        if self._open:
            self._open = False
            self.executor.pool.close(self.slot)

    def reserve(self, length: int) -> None:
        """Have pages for so many positions. Errors: OutOfPages; ValueError for a sequence that is closed."""
        if not self._open:
            raise ValueError("read: the sequence is closed. Open another.")
        more = length - self.executor.pool.length(self.slot)
        if more > 0:
            self.executor.set_pages(self.slot, self.executor.pool.append(self.slot, more))

    def rewind(self, length: int) -> None:
        """Forget the tokens at positions >= length. Errors: ValueError for a length that is not there."""
        if not 0 <= length <= self.length:
            raise ValueError(f"rewind: must be to 0..{self.length}, the tokens read; got {length}.")
        self.length, self._tree = length, None

    def read(self, ids: Sequence[int], *, last_logits_only: bool = False) -> TargetStep:
        """Read tokens at the next positions, alone. Errors: ValueError beyond the context, for no token or an unknown one; OutOfPages.

        The step's own picks are left out: who calls this picks from the logits.
        """
        return self._alone(self.reading(Read(ids, last_logits_only, Sampling())))._replace(tokens_T=None)

    def read_tree(self, anchor: int, tree: DraftTree) -> TargetStep:
        """Read an anchor and the nodes below it; `keep` then says which were accepted. Errors: as `read`."""
        return self._alone(self.reading(ReadTree(anchor, tree, Sampling())))._replace(tokens_T=None)

    @torch.inference_mode()
    def keep(self, path: Sequence[int]) -> None:
        """Of the tree just read, keep the anchor and these nodes: the rows of plain decoding, put where plain decoding has them."""
        assert self._tree is not None, "keep needs a tree that was read"
        for place, node in enumerate(path, 1):
            self.executor.rows_at(self.slot, self.length + place).copy_(self._tree[node + 1])
        self.executor.rows_at(self.slot, self.length).copy_(self._tree[0])
        self.length, self._tree = self.length + 1 + len(path), None

    def reading(self, wish: Read | ReadTree) -> Reading:
        """What a wish of the loop takes: yields the columns wanted next and is sent the step of as many of them as were computed. Errors: as `read`."""
        self._tree = None
        if isinstance(wish, Read):
            return self._reading(tuple(wish.ids), sampling=wish.sampling, last_only=wish.last_logits_only)
        return self._reading_tree(wish)

    def _reading(self, ids: tuple[int, ...], *, sampling: Sampling, last_only: bool) -> Reading:
        vocab_size = self.executor.weights.shape.vocab_size
        if any(not 0 <= i < vocab_size for i in ids):
            raise ValueError(f"read: token ids lie in 0..{vocab_size - 1}; got {list(ids)}.")
        if not ids or self.length + len(ids) > self.max_length:
            raise ValueError(f"read: takes 1 to {self.max_length - self.length} tokens more (context {self.max_length}); got {len(ids)}.")
        steps: list[TargetStep] = []
        while ids:
            some = ids[:RUN_COLUMNS]
            self.reserve(self.length + len(some))
            step = yield Chunk(sequence=self, ids=some, position=self.length, sampling=sampling, last_only=last_only)
            self.length += len(step.features_TF)
            ids = ids[len(step.features_TF):]
            steps.append(step)
        if len(steps) == 1:
            return steps[0]
        features = torch.cat([step.features_TF for step in steps])
        if last_only:
            return steps[-1]._replace(features_TF=features)
        return TargetStep(logits_TV=torch.cat([step.logits_TV for step in steps]), features_TF=features,
                          tokens_T=_together([step.tokens_T for step in steps]))

    def _reading_tree(self, wish: ReadTree) -> Reading:
        """Path by path, depth first, each branch over the rows of the one before: every node's column is the very one of plain decoding."""
        tree, start = wish.tree, self.length
        at: dict[int, tuple[TargetStep, int]] = {}
        rows: dict[int, Tensor] = {}
        for run in tree.runs():
            self.length = first = start + (0 if run[0] == ANCHOR else tree.depths[run[0]])
            ids = tuple(wish.anchor if node == ANCHOR else tree.token_ids[node] for node in run)
            step = yield from self._reading(ids, sampling=wish.sampling, last_only=False)
            for t, node in enumerate(run):
                at[node] = step, t
                rows[node] = self.executor.rows_at(self.slot, first + t).clone()   # the next branch takes its place
        self.length = start
        nodes = range(ANCHOR, len(tree))
        self._tree = [rows[node] for node in nodes]
        found = [at[node] for node in nodes]
        return TargetStep(logits_TV=torch.stack([step.logits_TV[t] for step, t in found]), features_TF=torch.stack([step.features_TF[t] for step, t in found]),
                          tokens_T=_together([step.tokens_T and step.tokens_T[t:t + 1] for step, t in found]))

    def _alone(self, reading: Reading) -> TargetStep:
        try:
            chunk = next(reading)
            while True:
                chunk = reading.send(self.executor.step([chunk])[0])
        except StopIteration as done:
            step: TargetStep = done.value
            return step


def _together(parts: Sequence[tuple[int, ...] | None]) -> tuple[int, ...] | None:
    """None if any is."""
    known = [part for part in parts if part is not None]
    return tuple(token for part in known for token in part) if len(known) == len(parts) else None
