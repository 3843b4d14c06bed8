"""The requests that are measured: every prompt in every mode, modes back to back.

All modes of a prompt run one after the other, so a machine that warms up or is shared slows all of them alike; which mode
comes first moves on from prompt to prompt. Before that, one request per mode warms the server up and is not counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..engine import DecodeMode
from .client import Answer, Client
from .prompts import Prompt

TOP_P = 0.95


@dataclass(frozen=True, kw_only=True)
class Mode:
    """One way to decode."""

    name: str
    decode: DecodeMode
    sampled: bool
    tree_budget: int | None = None   # of decode "tree"; None: as many nodes as the chain has links


DRAFT, PLAIN, PLAIN_ONE_COLUMN, SAMPLED_DRAFT, SAMPLED_PLAIN = "draft", "plain", "plain one column", "sampled draft", "sampled plain"
TREE, WIDE_TREE, SAMPLED_TREE = "tree", "wide tree", "sampled tree"
WIDE_TREE_BUDGET = 15   # with the anchor two tiles of 8 columns
MODES = (
    Mode(name=DRAFT, decode="draft", sampled=False), Mode(name=PLAIN, decode="plain", sampled=False),
    Mode(name=PLAIN_ONE_COLUMN, decode="plain_one_column", sampled=False),
    Mode(name=SAMPLED_DRAFT, decode="draft", sampled=True), Mode(name=SAMPLED_PLAIN, decode="plain", sampled=True),
    Mode(name=TREE, decode="tree", sampled=False), Mode(name=WIDE_TREE, decode="tree", sampled=False, tree_budget=WIDE_TREE_BUDGET),
    Mode(name=SAMPLED_TREE, decode="tree", sampled=True),
)


def modes_for(*, has_draft: bool) -> tuple[Mode, ...]:
    return tuple(m for m in MODES if has_draft or m.decode not in ("draft", "tree"))


def run_probes(client: Client, prompts: Sequence[Prompt], *, modes: Sequence[Mode], max_tokens: int, temperature: float) -> list[Answer]:
    """Answers in the order they were measured, one progress line a prompt."""
    for mode in modes:
        _ask(client, prompts[0], mode=mode, seed=0, max_tokens=max_tokens, temperature=temperature)
    answers: list[Answer] = []
    for index, prompt in enumerate(prompts):
        turn = index % len(modes)
        ordered = (*modes[turn:], *modes[:turn])
        got = {m.name: _ask(client, prompt, mode=m, seed=index, max_tokens=max_tokens, temperature=temperature) for m in ordered}
        answers += got.values()
        speeds = ", ".join(f"{m.name} {_speed_text(got[m.name])}" for m in modes)
        print(f"prompt {index + 1}/{len(prompts)} {prompt.id}: {speeds}", flush=True)
    return answers


def _ask(client: Client, prompt: Prompt, *, mode: Mode, seed: int, max_tokens: int, temperature: float) -> Answer:
    fields: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0}
    if mode.sampled:
        fields.update(temperature=temperature, top_p=TOP_P, seed=seed)
    extensions = {"decode": mode.decode, **({} if mode.tree_budget is None else {"tree_budget": mode.tree_budget})}
    return client.ask(prompt, mode=mode.name, fields=fields, extensions=extensions)


def _speed_text(answer: Answer) -> str:
    return f"{answer.decode_tokens / answer.decode_s:.1f} tokens/s" if answer.decode_tokens and answer.decode_s > 0 else f"{len(answer.token_ids)} token"
