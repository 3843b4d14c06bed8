"""A drafter at the pace that pays: how far each round of a request drafts, learned from the rounds of all.

`Speculation` is what an engine has learned on its executor: what rounds cost (draft_costs.py), how far a draft's confidence can be believed (speculate.py),
and where drafting pays (draft_gate.py). A `PacedDrafter` stands between a request's draft-verify loop and its draft head, and shortens what the head
proposes; with a fixed length it only cuts. The loop is the same for all of them, and so is the text.

Costs are those of a round at n sequences that decode together. Sequences of one step pay for each other's columns, so a step's time is booked under the
mean number of proposals of its sequences: a sequence then chooses as if all chose alike, which is what makes the sum of their tokens largest.
A request with a domain key shares the gate of its key (chains and trees have their own); one without has its own, which starts in the state that all
rounds without a key have led to.

While a gate is closed the draft head computes nothing, but it will need the context when it comes back. So the target's features of the committed
positions are kept and handed over in pieces of FLUSH_ROWS positions, or when the next draft is due: its context is always complete, in bounded
memory, and its weights are read once for many positions.

Where the executor drafts itself (rounds of the resident kernel), a `DevicePace` says how far the rounds of a request go, and the executor is told the same
costs; its kernel takes the draft's confidence as it is. Its context is kept complete by every step, drafted or not.
"""

import math
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..dflash.generate import ConfidentDrafter, Drafter, Round, TreeDrafter
from ..dflash.sampling import Sampling
from ..dflash.tree import DraftTree, chain
from ..kernels.persistent.round_inputs import MAX_LIMIT
from .batching import RESIDENT_STEPS, Turn
from .draft_costs import MIN_ROUNDS, PLAIN, CostCurve
from .draft_gate import Gate
from .speculate import Calibration, best_length, expected_tokens

DraftLength = Literal["auto"] | int
AUTO: DraftLength = "auto"
MAX_DRAFT_LENGTH = 63     # as MAX_TREE_BUDGET: with the anchor the columns of the widest step
MAX_DOMAINS = 64          # whose gates are remembered, those used last
FLUSH_ROWS = 64           # positions that wait for a draft head
NO_DOMAIN = ""
MEASURED_ROUNDS = 4       # of a turn of the executor's own drafts, for its time
TO_THE_LIMIT = tuple(range(MAX_LIMIT + 1, 0, -1))     # costs by which no round verifies less than it may


def read_draft_length(value: object) -> DraftLength:
    """From an option or a field. Errors: ValueError."""
    if value == AUTO:
        return AUTO
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    if type(number) is not int or not 0 <= number <= MAX_DRAFT_LENGTH:
        raise ValueError(f"draft_length: must be 'auto' or lie in 0..{MAX_DRAFT_LENGTH}; got {value!r}. 0 decodes without a draft; "
                         "what is beyond the head's drafts means all of them.")
    return number


class Kind(NamedTuple):
    """Of a request: whether it drafts trees, whether its text is sampled."""

    is_tree: bool
    is_sampled: bool


@dataclass(frozen=True, kw_only=True)
class GateState:
    """As metrics show it. gain: tokens per second with drafts over without, of the newest `num_rounds` drafted rounds; None: not measured."""

    is_open: bool
    gain: float | None
    num_rounds: int


@dataclass(frozen=True, kw_only=True)
class DraftState:
    """What was measured so far, all of it."""

    rounds_drafted: int                                     # a draft was made, however little of it was verified
    rounds_plain: int                                       # none was made, of requests that have a draft head
    proposals_verified: int
    switched_off: int
    switched_on: int
    requests_on: int                                        # under way, with a draft head, whose gate is open
    requests_off: int
    gates: Mapping[tuple[str, bool], GateState]             # by (domain key, is_tree); NO_DOMAIN: how a request without one starts
    scales: Mapping[Kind, Mapping[int, tuple[float, int]]]  # by depth: observed acceptances by confidence, and of how many proposals
    costs_s: Mapping[tuple[bool, int], Mapping[int, float]] # by (is_tree, sequences together): median time of a round by proposals, PLAIN among them

    @property
    def verify_length(self) -> float | None:
        """Proposals verified in a round that drafted, on average."""
        return self.proposals_verified / self.rounds_drafted if self.rounds_drafted else None


@dataclass(frozen=True, kw_only=True)
class _Decision:
    """Of one round. tree: what was verified; None: no draft was made. draft_s: what it took; nan: not typical."""

    tree: DraftTree | None = None
    draft_s: float = 0.0


class Speculation:
    """What one engine knows of its drafts. Written by the engine's thread, read by any (`state`)."""

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.num_together = 1       # sequences that decode in a step; told by the engine
        self.drafting_s = 0.0       # spent in drafters so far
        self._curves: dict[tuple[bool, int], CostCurve] = {}
        self._calibrations: dict[Kind, Calibration] = {}
        self._shared = {is_tree: Gate() for is_tree in (False, True)}      # of rounds without a domain key
        self._gates: OrderedDict[tuple[str, bool], Gate] = OrderedDict()
        self._live: weakref.WeakSet[PacedDrafter | DevicePace] = weakref.WeakSet()
        self._lock = threading.RLock()
        self._drafted = self._plain = self._verified = self._num_off = self._num_on = 0

    def pace(self, drafter: Drafter, *, length: DraftLength | None, domain: str | None, is_tree: bool, is_sampled: bool) -> "PacedDrafter":
        """length: None for all that the drafter gives. Errors: NotImplementedError for "auto" and a chain of a drafter that tells no confidences."""
        with self._lock:
            paced = PacedDrafter(drafter, self, length=length, gates=self._gates_of(domain, is_tree=is_tree), kind=Kind(is_tree, is_sampled))
            self._live.add(paced)
        return paced

    def _gates_of(self, domain: str | None, *, is_tree: bool) -> tuple[Gate, ...]:
        if domain is None:
            return self._shared[is_tree].copy(), self._shared[is_tree]
        gate = self._gates.setdefault((domain, is_tree), Gate())
        self._gates.move_to_end((domain, is_tree))
        if len(self._gates) > MAX_DOMAINS:
            self._gates.popitem(last=False)
        return (gate,)

    # --- drafts that the executor makes itself, in rounds without the host ---

    def pace_device(self, *, length: DraftLength | None, domain: str | None, is_sampled: bool) -> "DevicePace":
        """length: None for all that the executor's draft gives."""
        with self._lock:
            paced = DevicePace(length=length, gates=self._gates_of(domain, is_tree=False), kind=Kind(False, is_sampled))
            self._live.add(paced)
        return paced

    def device_turn(self, paces: Sequence["DevicePace"]) -> tuple[list[int], Sequence[float], int]:
        """For a turn at the present number of sequences: each request's limit (0: plain steps), costs of rounds that verify 0..MAX_LIMIT, and how many rounds
        it has at most.

        Costs that fall take each request's limit: beside a fixed length, and while full rounds are to be measured. What is to be measured takes few rounds.
        """
        curve, limits = self.curve(is_tree=False), [pace.limit for pace in paces]
        if not all(pace.length == AUTO for pace in paces):
            return limits, TO_THE_LIMIT, RESIDENT_STEPS
        if curve.wants_plain():
            return [0] * len(paces), TO_THE_LIMIT, MEASURED_ROUNDS
        if not any(limits):
            return limits, TO_THE_LIMIT, RESIDENT_STEPS
        costs = None if curve.wants_full(MAX_LIMIT) else curve.costs(MAX_LIMIT)
        return (limits, TO_THE_LIMIT, MEASURED_ROUNDS) if costs is None else (limits, [cost.seconds for cost in costs], RESIDENT_STEPS)

    def learn_turn(self, seconds: float, turn: Turn, *, num_columns: int) -> None:
        """What a turn of decoding took; booked under the mean of what its rounds verified, as they are not timed one by one, as often as a median wants.

        num_columns: the most that a request had in it. A step in which another request verified a draft of the host's is no plain one, and says nothing.
        """
        if turn.num_drafted is None and num_columns > 1:
            return
        with self._lock:
            for _ in range(min(turn.num_rounds, MIN_ROUNDS) if seconds > 0 else 0):
                self.curve(is_tree=False).add(PLAIN if turn.num_drafted is None else round(turn.num_drafted), seconds / turn.num_rounds)

    def learn_device(self, pace: "DevicePace", done: Round, *, is_drafted: bool) -> None:
        """A round of a request that the executor drafts for. is_drafted: a draft was asked for; without, it is a plain step, or a round of limit 0."""
        with self._lock:
            if not is_drafted:
                self._plain += 1
                for gate in pace.gates:
                    gate.wants_draft()      # which counts the round
                return
            self._drafted += 1
            self._verified += done.num_drafted
            if pace.length == AUTO:
                self._judge(pace, len(done.tokens), verified=done.num_drafted, curve=self.curve(is_tree=False))

    def curve(self, *, is_tree: bool) -> CostCurve:
        """At the present number of sequences."""
        with self._lock:
            return self._curves.setdefault((is_tree, self.num_together), CostCurve())

    def calibration(self, kind: Kind) -> Calibration:
        with self._lock:
            return self._calibrations.setdefault(kind, Calibration())

    def learn(self, paced: "PacedDrafter", done: Round, *, step_s: float, num_columns: float | None = None) -> None:
        """A decode round of a request. step_s: what it took without drafting; nan: not its own time. num_columns: mean of the sequences in its step."""
        with self._lock:
            decision = paced.take_decision()
            curve = self.curve(is_tree=paced.kind.is_tree)
            if decision.tree is None:
                self._plain += 1
                if step_s > 0:
                    curve.add(PLAIN, step_s)
                return
            self._drafted += 1
            self._verified += len(decision.tree)
            draft_s = self.num_together * decision.draft_s
            if step_s + draft_s > 0:
                curve.add(len(decision.tree) if num_columns is None else round(num_columns) - 1, step_s + draft_s, draft_s=draft_s)
            if decision.tree.confidences is not None:
                self.calibration(paced.kind).add_round(decision.tree, done.tokens)
            if paced.length == AUTO:
                self._judge(paced, len(done.tokens), verified=len(decision.tree), curve=curve)

    def _judge(self, paced: "PacedDrafter | DevicePace", num_tokens: int, *, verified: int, curve: CostCurve) -> None:
        costs, plain_s = curve.costs(verified), curve.plain_s
        if costs is None or plain_s is None:
            return
        closed, opened = paced.gates[0].num_closed, paced.gates[0].num_opened
        for gate in paced.gates:
            gate.add(tokens=num_tokens, cost=costs[-1].seconds / plain_s)
        self._num_off += paced.gates[0].num_closed - closed
        self._num_on += paced.gates[0].num_opened - opened

    def state(self) -> DraftState:
        with self._lock:
            auto = [one.gates[0].is_open for one in self._live if one.length == AUTO]
            gates = {}
            for key, gate in (*(((NO_DOMAIN, is_tree), gate) for is_tree, gate in self._shared.items()), *self._gates.items()):
                gain, count = gate.gain or (None, 0)
                gates[key] = GateState(is_open=gate.is_open, gain=gain, num_rounds=count)
            return DraftState(
                rounds_drafted=self._drafted, rounds_plain=self._plain, proposals_verified=self._verified, switched_off=self._num_off,
                switched_on=self._num_on, requests_on=sum(auto), requests_off=len(auto) - sum(auto), gates=gates,
                scales={kind: {depth: (c.scale(depth), count) for depth, count in sorted(c.counts.items())} for kind, c in self._calibrations.items()},
                costs_s={key: curve.medians() for key, curve in self._curves.items()})


class DevicePace:
    """How far the rounds of one request go, where the executor drafts itself: it chooses by cost, at the draft's word, up to a limit."""

    def __init__(self, *, length: DraftLength | None, gates: tuple[Gate, ...], kind: Kind) -> None:
        self.length, self.gates, self.kind = length, gates, kind

    @property
    def limit(self) -> int:
        """Proposals that its next rounds verify at most; 0 where its gate is closed."""
        if self.length == AUTO:
            return MAX_LIMIT if self.gates[0].is_due else 0
        return MAX_LIMIT if self.length is None else min(MAX_LIMIT, int(self.length))


class PacedDrafter:
    """A Drafter and TreeDrafter that proposes the first of what another one does, or nothing."""

    def __init__(self, drafter: Drafter, speculation: Speculation, *, length: DraftLength | None, gates: tuple[Gate, ...], kind: Kind) -> None:
        if length == AUTO and not kind.is_tree and not isinstance(drafter, ConfidentDrafter):
            raise NotImplementedError(f"draft_length: 'auto' needs a draft head that tells its confidences; {type(drafter).__name__} does not. Give a number.")
        self.drafter, self.length, self.gates, self.kind = drafter, length, gates, kind
        self._propose_chain = drafter.propose_chain if isinstance(drafter, ConfidentDrafter) else None      # asked once: a protocol is slow to check
        self._propose_tree = drafter.propose_tree if isinstance(drafter, TreeDrafter) else None
        self.num_drafts = drafter.num_drafts if length is None or length == AUTO else min(drafter.num_drafts, int(length))
        self._speculation = speculation
        self._pending = _Decision()
        self._decisions: deque[_Decision] = deque()
        self._kept: list[Tensor] = []
        self._has_prompt = False

    def take_decision(self) -> _Decision:
        """Of the oldest round that was committed and not yet learned from."""
        return self._decisions.popleft()

    def observe(self, features_TF: Tensor) -> None:
        """The prompt's features, then those of every round: so a call ends a round."""
        is_due = self.length != AUTO or (self._pending.tree is not None if self._has_prompt else self.gates[0].is_open)
        if self._has_prompt:
            self._decisions.append(self._pending)
        self._has_prompt, self._pending = True, _Decision()
        self._kept.append(features_TF)
        if is_due or sum(rows.shape[0] for rows in self._kept) >= FLUSH_ROWS:
            self._hand_over()

    def propose(self, anchor: int, *, count: int, sampling: Sampling) -> list[int]:
        if self.length != AUTO:
            return list(self._draft(lambda: chain(self.drafter.propose(anchor, count=count, sampling=sampling))).token_ids)
        propose_chain = self._propose_chain
        assert propose_chain is not None, "checked at the start"
        return list(self._paced(lambda: propose_chain(anchor, count=count, sampling=sampling), most=self.num_drafts).token_ids)

    def propose_tree(self, anchor: int, *, count: int, budget: int, sampling: Sampling) -> DraftTree:
        propose_tree = self._propose_tree
        assert propose_tree is not None, "the engine paces trees of drafters that know them"

        def make() -> DraftTree:
            return propose_tree(anchor, count=count, budget=budget, sampling=sampling)

        return self._draft(make) if self.length != AUTO else self._paced(make, most=budget)

    def _paced(self, make: Callable[[], DraftTree], *, most: int) -> DraftTree:
        """As much of a draft as pays; none where the gate is closed, or where plain decoding is to be measured. most: proposals of a full draft."""
        is_wanted, *_ = [gate.wants_draft() for gate in self.gates]   # all of them count the round
        curve = self._speculation.curve(is_tree=self.kind.is_tree)
        if not is_wanted or curve.wants_plain():
            return chain(())
        tree = self._draft(make)
        if tree.confidences is None:
            raise NotImplementedError(f"draft_length: 'auto' needs a draft head that tells its confidences; {type(self.drafter).__name__} does not. "
                                      "Give a number.")
        if len(tree) == most and curve.wants_full(most):
            return tree
        costs = curve.costs(len(tree))
        if costs is not None:
            scales = self._speculation.calibration(self.kind).scales(max(tree.depths, default=0))
            tree = tree.first(best_length(expected_tokens(tree, scales=scales), [cost.seconds for cost in costs]))
            self._pending = replace(self._pending, tree=tree)
        return tree

    def _draft(self, make: Callable[[], DraftTree]) -> DraftTree:
        """Ask the drafter, and note what it took."""
        speculation = self._speculation
        start, has_backlog = speculation.clock(), bool(self._kept)
        self._hand_over()
        begun = speculation.clock()
        tree = make()
        end = speculation.clock()
        speculation.drafting_s += end - start
        self._pending = _Decision(tree=tree, draft_s=math.nan if has_backlog else end - begun)
        return tree

    def _hand_over(self) -> None:
        if self._kept:
            self.drafter.observe(self._kept[0] if len(self._kept) == 1 else torch.cat(self._kept))
            self._kept.clear()
