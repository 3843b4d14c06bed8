"""The validation's client and figures on the real server, over HTTP, with a model whose drafts are right by a known pattern."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from served_fake import TOKENIZER, FakeDrafter, WrongDrafter, make_served, running

from kilotok.runtime.validate.client import Answer, Client, Server, has_text_by
from kilotok.runtime.validate.figures import failures_of, summarize
from kilotok.runtime.validate.probes import modes_for, run_probes
from kilotok.runtime.validate.prompts import Prompt

PROMPTS = (
    Prompt(id="code-1", domain="code", prompt="def add(a, b):"), Prompt(id="code-2", domain="code", prompt="0123"),
    Prompt(id="chat-1", domain="chat", messages=({"role": "user", "content": "Hi"},)),
    Prompt(id="agent-1", domain="agent", messages=({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tides?"}),
           tools=({"type": "function", "function": {"name": "tide", "description": "d", "parameters": {}}},)),
)


def ask(*, make_drafter: Callable[[], Any] | None, prompts: tuple[Prompt, ...] = PROMPTS) -> list[Answer]:
    with running(make_served(make_drafter=make_drafter)) as server:
        alive = cast(Server, SimpleNamespace(url=server.url, require_alive=lambda while_doing: None))
        with Client(alive, has_text=has_text_by(TOKENIZER)) as client:
            assert client.model == "fake" and client.health()["status"] == "ok"
            return run_probes(client, prompts, modes=modes_for(has_draft=make_drafter is not None), max_tokens=24, temperature=0.8)


def test_drafts_change_no_text_and_are_counted() -> None:
    answers = ask(make_drafter=FakeDrafter)
    assert len(answers) == 10 * len(PROMPTS) and {a.finish_reason for a in answers} <= {"stop", "length"}
    figures = summarize(answers, no_draft=None)
    assert failures_of(figures) == []
    assert [(c["equal"], c["total"]) for c in (*figures["lossless"].values(), figures["one_column"])] == [(4, 4)] * 8
    for kind in ("greedy", "sampled"):
        accepted = figures["acceptance"][kind]["all"]
        assert 2 < accepted["raw"]["length"] < 8    # positions divisible by five are drafted wrong: five tokens a round in the long run
        assert sum(p["accepted"] for p in accepted["positions"]) + accepted["raw"]["rounds"] >= accepted["raw"]["tokens"]
    for kind, ways in figures["trees"].items():
        chain, tree, *_ = (domains["all"] for domains in ways.values())
        assert chain["raw"] == figures["acceptance"][kind]["all"]["raw"] and chain["verified"]["mean"] <= tree["verified"]["mean"]
        assert chain["verified"]["most"] == tree["verified"]["most"] == 8
    assert figures["trees"]["greedy"]["wide tree"]["all"]["verified"]["most"] == 16
    for domains in figures["adaptive"].values():
        verified = domains["all"]["verified"]
        assert verified["length"] <= 7 and verified["rounds"] > 20 and 0 < verified["share_drafted"] < 1   # plain decoding is measured first
    assert {a.prompt_tokens for a in answers if a.prompt_id == "code-2"} == {len(TOKENIZER("0123")["input_ids"])}
    assert all(0 < a.first_token_s <= a.last_token_s <= a.total_s and 1 <= a.first_text_tokens <= len(a.token_ids) for a in answers)


def test_drafts_that_are_never_right_have_length_one() -> None:
    figures = summarize(ask(make_drafter=WrongDrafter, prompts=PROMPTS[:2]), no_draft=None)
    assert figures["acceptance"]["greedy"]["all"]["raw"]["length"] == 1.0 and failures_of(figures) == []
    assert [p["rate"] for p in figures["acceptance"]["greedy"]["all"]["positions"]] == [0.0] * 7


def test_a_server_without_a_draft_is_asked_for_none() -> None:
    answers = ask(make_drafter=None, prompts=PROMPTS[:1])
    assert [a.mode for a in answers] == ["plain", "plain one column", "sampled plain"]


def test_a_prompt_that_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"^prompt long: the server refuses it \(prompt: prompt and answer must fit the model's context of 256 tokens; got"):
        ask(make_drafter=None, prompts=(Prompt(id="long", domain="code", prompt="word " * 300),))
