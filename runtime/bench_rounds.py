"""`kilotok bench engine --draft`: a round of the resident kernel - a block of drafts, the step that verifies it, its acceptance - by how much is verified.

    step          without drafts, one column a sequence; it leaves the draft's context complete, as every step beside drafts does
    round         one launch that verifies v proposals; the median, with p20 and p80
    in a row      several rounds a launch; per round
    graph         the phases of a round as launches of their own in a CUDA graph
    floor         bytes of the round over the read stream of the same run: of a step of v + 1 columns, and the draft's weights, head, keys and values, logits
    round / step  tokens that a round must commit on average to be as fast as steps: where drafting begins to pay

How many proposals are accepted decides what a round is worth, and random weights say nothing of it: with `--assume-acceptance` tokens/s are printed for that
many tokens a round, labelled as assumed. Anchors go on by what is really accepted, so contexts of rounds in a row differ by a few tokens.

Legend: S sequences, v proposals that are verified.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..dflash.checkpoint import DRAFT_DIRECTORY
from ..kernels.persistent import Column, DraftShape, DraftState, DraftWeights, RoundColumn, RoundInputs, StepInputs, StepState, StepWeights
from ..kernels.persistent.attention import COLUMNS
from ..kernels.persistent.draft_model import DRAFT_MATRICES
from ..kernels.persistent.plan import CHUNK
from ..kernels.persistent.round_inputs import MAX_LIMIT, TILE

REPEATS = 30
ROUNDS_IN_A_ROW = 16
PHASE_REPEATS = 5


@dataclass(frozen=True, kw_only=True)
class MeasuredRound:
    """Rounds of one number of sequences that verify v proposals, or None: steps without drafts. Times in us."""

    sequences: int
    verified: int | None
    us: list[float]                 # ascending
    row_us: float
    graph_us: list[float] | None    # None: not measured, as it is a step's of the other table
    phases_us: dict[str, float]
    distinct: list[int]             # experts read by the target's step, by layer
    num_bytes: int

    @property
    def best_us(self) -> float:
        return min(statistics.median(self.us), self.row_us)


def rounds_context(context: int) -> int:
    """Positions that a run at this context reaches at most, in whole chunks of the cache."""
    return -(-(context + TILE * ROUNDS_IN_A_ROW) // CHUNK) * CHUNK


def measure_rounds(weights: StepWeights, draft: DraftWeights, sequences: int, *, context: int, seed: int, machine: Any,
                   step_bytes: Callable[..., dict[str, int]]) -> list[MeasuredRound]:
    """A step without drafts, then rounds that verify 0..7, on caches of random keys and values.

    machine: of bench.py, whose `round_kernel` is made. step_bytes: what a step moves.
    """
    shape, chunks = weights.shape, -(-weights.shape.max_length // CHUNK)
    width = min(c for c in COLUMNS if c >= TILE * sequences)
    state = StepState.of(shape, num_columns=width, num_slots=sequences, num_pages=sequences * chunks, device=machine.device)
    state.pages_SP.copy_(torch.arange(sequences * chunks, dtype=torch.int32).view(sequences, chunks))
    drafts = DraftState.of(draft.shape, state)
    for cache in (state.cache, drafts.cache):
        cache.normal_(generator=torch.Generator(device=machine.device).manual_seed(seed))
    ids = torch.randint(shape.vocab_size, (sequences,), generator=torch.Generator().manual_seed(seed)).tolist()
    kernel, stamped = (machine.round_kernel(weights, state, draft, drafts, profile=profile) for profile in (False, True))

    def once(run: Callable[[Any, int], None], *, verified: int | None, graph_us: list[float] | None) -> MeasuredRound:
        """run: so many rounds of a kernel."""
        us = machine.timed_us(lambda: run(kernel, 1), REPEATS)
        kernel.check_fault()
        distinct = state.distinct_L.tolist()
        row_us = statistics.median(machine.timed_us(lambda: run(kernel, ROUNDS_IN_A_ROW), PHASE_REPEATS)) / ROUNDS_IN_A_ROW
        kernel.check_fault()
        phases = []
        for _ in range(PHASE_REPEATS + 1 if verified is not None else 0):       # the first one compiles
            run(stamped, 1)
            stamped.check_fault()
            phases.append(stamped.phase_us())
        num_bytes = sum(step_bytes(weights, distinct=distinct, columns=sequences * (1 + (verified or 0)), sequences=sequences, context=context).values())
        if verified is not None:
            num_bytes += sum(draft_bytes(draft, weights, sequences=sequences, context=context).values())
        return MeasuredRound(sequences=sequences, verified=verified, us=us, row_us=row_us, graph_us=graph_us, distinct=distinct, num_bytes=num_bytes,
                             phases_us={name: statistics.median(one[name] for one in phases[1:]) for name in (phases[0] if phases else ())})

    tiles = [StepInputs.dead(TILE) for _ in range(width // TILE)]
    for s, token in enumerate(ids):
        tiles[s].set(0, **vars(Column(token_id=token, slot=s, position=context - 1)))
    columns = StepInputs(words_8C=torch.cat([tile.words_8C for tile in tiles], 1))
    found = [once(lambda k, n: k.run(columns, num_steps=n), verified=None, graph_us=None)]
    for v in range(draft.shape.block_size):
        live = [RoundColumn(token_id=token, slot=s, position=context - 1, limit=v) for s, token in enumerate(ids)]
        inputs = RoundInputs.of([*live, *[None] * (width // TILE - sequences)])
        kernel.set_rounds(inputs)
        graph = kernel.capture_rounds()

        def replay(inputs: RoundInputs = inputs, graph: Any = graph) -> None:
            kernel.set_rounds(inputs)       # a round moves its anchors
            graph.replay()

        graph_us = machine.timed_us(replay, REPEATS)
        kernel.check_fault()
        found.append(once(lambda k, n, inputs=inputs: k.run_rounds(inputs, num_rounds=n), verified=v, graph_us=graph_us))  # type: ignore[misc]
    return found


def draft_bytes(draft: DraftWeights, weights: StepWeights, *, sequences: int, context: int) -> dict[str, int]:
    """What a round moves besides its step: the draft's matrices with the pad of their layouts, the target's head again, keys and values, logits."""
    shape: DraftShape = draft.shape
    heads = shape.heads
    seen = context if heads.window is None else min(context, heads.window)
    return {"draft weights": 4 * sum(getattr(draft, name).words.numel() for name in DRAFT_MATRICES), "head": 4 * weights.head.words.numel(),
            "draft's keys and values": sequences * seen * 2 * heads.num_kv_heads * heads.head_dim * 2 * shape.num_layers,
            "logits": 4 * sequences * MAX_LIMIT * weights.shape.vocab_size}


def rounds_table(rows: Sequence[MeasuredRound], *, stream: float, assumed: Sequence[float]) -> list[str]:
    """Markdown: a line for steps and one for every v, then the phases of the longest round. assumed: tokens that a round commits, for columns of tokens/s."""
    header = ["S", "verified", "us a round (p20, p80)", "in a row", "CUDA graph (p20, p80)", "MB", "floor, us", "of the stream", "experts a layer",
              "round / step",
              *(f"tokens/s if a round committed {length:g} (assumed)" for length in assumed)]
    lines = [_line(header), "|---" * len(header) + "|"]
    step_us = 0.0
    for row in rows:
        if row.verified is None:
            step_us = row.best_us
        floor = row.num_bytes / stream * 1e6
        cells = [row.sequences, "no draft" if row.verified is None else row.verified, _spread(row.us), f"{row.row_us:.1f}",
                 "-" if row.graph_us is None else _spread(row.graph_us), f"{row.num_bytes / 1e6:.1f}", f"{floor:.1f}", f"{100 * floor / row.best_us:.1f} %",
                 f"{statistics.mean(row.distinct):.1f}", f"{row.best_us / step_us:.2f}"]
        for length in assumed:
            if row.verified is None:
                cells.append(f"{row.sequences / row.best_us * 1e6:.1f} (1, measured)")
            else:
                cells.append(f"{row.sequences * length / row.best_us * 1e6:.1f}" if length <= row.verified + 1 else "-")
        lines.append(_line(cells))
    longest = max(rows, key=lambda row: -1 if row.verified is None else row.verified)
    lines += ["", _line([f"us, S = {longest.sequences}, {longest.verified} verified, summed over layers", "us"]), "|---|---|"]
    lines += [_line([name, f"{us:.1f}"]) for name, us in longest.phases_us.items()]
    return [*lines, _line(["sum", f"{sum(longest.phases_us.values()):.1f}"])]


def _line(cells: Sequence[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _spread(times: Sequence[float]) -> str:
    return f"{statistics.median(times):.1f} ({times[len(times) // 5]:.1f}, {times[-1 - len(times) // 5]:.1f})"


def draft_directory(directory: Path) -> Path:
    """Errors: ValueError for a directory without a draft."""
    found = directory / DRAFT_DIRECTORY
    if not found.is_dir():
        raise ValueError(f"--draft: {directory} has no {DRAFT_DIRECTORY}/. Distill one (`train dflash-distill`), or name a shape for random weights.")
    return found
