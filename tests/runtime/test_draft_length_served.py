"""Draft lengths over HTTP: what a request may ask, what it is told, and what the metrics show. No model."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from served_fake import FakeDrafter, Running, WrongDrafter, make_served, running


@pytest.fixture(scope="module")
def up() -> Iterator[Running]:
    with running(make_served(draft_length="auto")) as server:
        yield server


def ask(up: Running, *, status: int = 200, **fields: Any) -> dict[str, Any]:
    body = {"model": "fake", "prompt": "def add(a, b):", "max_tokens": 40, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **fields}
    answer = httpx.post(f"{up.url}/v1/completions", json=body, timeout=30)
    assert answer.status_code == status, answer.text
    found: dict[str, Any] = answer.json()
    return found


def samples(up: Running, name: str) -> dict[tuple[str, ...], float]:
    """By the labels but the model's, in order of their names."""
    text = httpx.get(f"{up.url}/metrics").text
    return {tuple(v for k, v in sorted(s.labels.items()) if k != "model_name"): s.value
            for family in text_string_to_metric_families(text) for s in family.samples if s.name == name}


def test_every_length_gives_the_same_text_and_the_answer_says_which(up: Running) -> None:
    plain = ask(up, decode="plain")
    assert "draft_length" not in plain["kilotok"] and "domain" not in plain["kilotok"]
    for length in ("auto", 0, 1, 3, 7, 63):
        for decode in ("draft", "tree"):
            said = ask(up, decode=decode, draft_length=length, domain="code")["kilotok"]
            assert said["token_ids"] == plain["kilotok"]["token_ids"], (length, decode)
            assert (said["draft_length"], said["domain"]) == (length, "code")
            if decode == "draft" and length != "auto":
                assert max(r[0] for r in said["rounds"]) == min(7, length)


def test_a_request_that_does_not_say_has_the_servers_length(up: Running) -> None:
    assert ask(up)["kilotok"]["draft_length"] == "auto"
    with running(make_served(draft_length=2)) as other:
        said = ask(other)["kilotok"]
        assert said["draft_length"] == 2 and max(r[0] for r in said["rounds"]) == 2
    with running(make_served()) as other:
        said = ask(other)["kilotok"]
        assert "draft_length" not in said and max(r[0] for r in said["rounds"]) == 7


@pytest.mark.parametrize(("fields", "param", "message"), [
    ({"draft_length": 64}, "draft_length", "draft_length: must be 'auto' or a number in 0..63; got 64."),
    ({"draft_length": -1}, "draft_length", "draft_length: must be 'auto' or a number in 0..63; got -1."),
    ({"draft_length": "7"}, "draft_length", 'draft_length: must be \'auto\' or a number in 0..63; got "7".'),
    ({"draft_length": True}, "draft_length", "draft_length: must be 'auto' or a number in 0..63; got true."),
    ({"draft_length": 3, "decode": "plain"}, "draft_length",
     "draft_length: only with decode 'draft' or 'tree'; this request's is 'plain'. Set it, or leave the length out."),
    ({"domain": ""}, "domain", None), ({"domain": "x" * 65}, "domain", None)])
def test_what_is_no_length_is_refused(up: Running, fields: dict[str, Any], param: str, message: str | None) -> None:
    error = ask(up, status=400, **fields)["error"]
    assert error["param"] == param and (message is None or error["message"] == message)


def test_metrics_show_what_was_measured() -> None:
    with running(make_served(draft_length="auto", make_drafter=FakeDrafter, step_s=0.002)) as server:
        assert samples(server, "kilotok:verify_length") == {} and samples(server, "kilotok:draft_gain") == {}
        assert samples(server, "kilotok:drafting") == {("draft", ""): 1, ("tree", ""): 1}
        for _ in range(3):
            ask(server, domain="code")
        rounds = samples(server, "kilotok:draft_rounds_total")
        assert rounds["yes",] > 5 and rounds["no",] >= 3
        assert 0 < samples(server, "kilotok:verify_length")[()] <= 7
        assert samples(server, "kilotok:drafting")["draft", "code"] == 1 and samples(server, "kilotok:draft_gain")["draft", "code"] > 0
        scales = samples(server, "kilotok:draft_confidence_scale")
        assert {key[:1] for key in scales} == {("draft",)} and {"0", "1"} <= {key[1] for key in scales} and {key[2] for key in scales} == {"greedy"}
        times = samples(server, "kilotok:round_seconds")
        assert times["draft", "none drafted", "1"] >= 0.002 and ("draft", "7", "1") in times
        health = httpx.get(f"{server.url}/health").json()["drafting"]
        assert health["rounds_drafted"] == rounds["yes",] and health["gates"][0]["domain"] == "code" and health["round_ms"][0]["sequences"] == 1


def test_a_draft_that_is_never_right_is_switched_off_for_its_domain() -> None:
    with running(make_served(draft_length="auto", make_drafter=WrongDrafter, step_s=0.001)) as server:
        texts = [ask(server, domain="code", max_tokens=60)["kilotok"]["token_ids"] for _ in range(2)]
        assert texts[0] == texts[1] == ask(server, decode="plain", max_tokens=60)["kilotok"]["token_ids"]
        # its draft costs next to nothing, so whether it loses is a matter of microseconds: only the counts must fit the state
        switches, is_on = samples(server, "kilotok:drafting_switches_total"), samples(server, "kilotok:drafting")["draft", "code"]
        assert switches["off",] - switches["on",] == 1 - is_on
