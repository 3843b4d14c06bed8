"""The requests that are measured: every prompt in every mode, modes back to back.

All modes of a prompt run one after the other, so a machine that warms up or is shared slows all of them alike; which mode
comes first moves on from prompt to prompt. Before that, one request per mode warms the server up and is not counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..engine import DecodeMode
from ..pacing import AUTO, MAX_DRAFT_LENGTH, DraftLength
from .client import Answer, Client
from .prompts import Prompt

TOP_P = 0.95
MAX_DOMAIN_CHARS = 64   # what a request takes


@dataclass(frozen=True, kw_only=True)
class Mode:
    """One way to decode."""

    name: str
    decode: DecodeMode
    sampled: bool
    tree_budget: int | None = None   # of decode "tree"; None: as many nodes as the chain has links
    is_adaptive: bool = False        # as much of each draft as pays, and none where drafting does not, by domain


DRAFT, PLAIN, PLAIN_ONE_COLUMN, SAMPLED_DRAFT, SAMPLED_PLAIN = "draft", "plain", "plain one column", "sampled draft", "sampled plain"
ADAPTIVE, SAMPLED_ADAPTIVE = "adaptive draft", "sampled adaptive draft"
TREE, WIDE_TREE, SAMPLED_TREE = "tree", "wide tree", "sampled tree"
WIDE_TREE_BUDGET = 15   # with the anchor two tiles of 8 columns
MODES = (
    Mode(name=DRAFT, decode="draft", sampled=False), Mode(name=PLAIN, decode="plain", sampled=False),
    Mode(name=PLAIN_ONE_COLUMN, decode="plain_one_column", sampled=False),
    Mode(name=SAMPLED_DRAFT, decode="draft", sampled=True), Mode(name=SAMPLED_PLAIN, decode="plain", sampled=True),
    Mode(name=TREE, decode="tree", sampled=False), Mode(name=WIDE_TREE, decode="tree", sampled=False, tree_budget=WIDE_TREE_BUDGET),
    Mode(name=SAMPLED_TREE, decode="tree", sampled=True),
    Mode(name=ADAPTIVE, decode="draft", sampled=False, is_adaptive=True), Mode(name=SAMPLED_ADAPTIVE, decode="draft", sampled=True, is_adaptive=True),
)


def modes_for(*, has_draft: bool, draft_length: DraftLength = AUTO) -> tuple[Mode, ...]:
    """With a number for a length there is nothing adaptive to measure."""
    return tuple(m for m in MODES if (has_draft or m.decode not in ("draft", "tree")) and (draft_length == AUTO or not m.is_adaptive))


def run_probes(client: Client, prompts: Sequence[Prompt], *, modes: Sequence[Mode], max_tokens: int, temperature: float,
               draft_length: DraftLength = AUTO) -> list[Answer]:
    """Answers in the order they were measured, one progress line a prompt.

    draft_length: of the modes that are not adaptive; "auto": all that the head drafts.
    """
    for mode in modes:
        _ask(client, prompts[0], mode=mode, seed=0, max_tokens=max_tokens, temperature=temperature, draft_length=draft_length)
    answers: list[Answer] = []
    for index, prompt in enumerate(prompts):
        turn = index % len(modes)
        ordered = (*modes[turn:], *modes[:turn])
        got = {m.name: _ask(client, prompt, mode=m, seed=index, max_tokens=max_tokens, temperature=temperature, draft_length=draft_length) for m in ordered}
        answers += got.values()
        speeds = ", ".join(f"{m.name} {_speed_text(got[m.name])}" for m in modes)
        print(f"prompt {index + 1}/{len(prompts)} {prompt.id}: {speeds}", flush=True)
    return answers


def _ask(client: Client, prompt: Prompt, *, mode: Mode, seed: int, max_tokens: int, temperature: float, draft_length: DraftLength) -> Answer:
    fields: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0}
    if mode.sampled:
        fields.update(temperature=temperature, top_p=TOP_P, seed=seed)
    extensions: dict[str, Any] = {"decode": mode.decode, **({} if mode.tree_budget is None else {"tree_budget": mode.tree_budget})}
    if mode.is_adaptive:
        extensions.update(draft_length=AUTO, domain=prompt.domain[:MAX_DOMAIN_CHARS])
    elif mode.decode in ("draft", "tree"):
        extensions["draft_length"] = MAX_DRAFT_LENGTH if draft_length == AUTO else draft_length
    return client.ask(prompt, mode=mode.name, fields=fields, extensions=extensions)


def _speed_text(answer: Answer) -> str:
    return f"{answer.decode_tokens / answer.decode_s:.1f} tokens/s" if answer.decode_tokens and answer.decode_s > 0 else f"{len(answer.token_ids)} token"
