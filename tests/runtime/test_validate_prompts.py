"""Held-out prompts: what a file may hold, and how rows are chosen from it."""

import json
from pathlib import Path
from typing import Any

import pytest

from kilotok.runtime.validate.options import ValidateOptions
from kilotok.runtime.validate.prompts import Prompt, choose, read_prompts

GOOD: dict[str, Any] = {"id": "a", "domain": "code", "prompt": "def f():"}
CHAT: dict[str, Any] = {"id": "b", "domain": "agent", "messages": [{"role": "user", "content": "Hi"}], "tools": [{"name": "t"}], "reference": "Hello"}


def write(tmp_path: Path, *rows: Any) -> Path:
    path = tmp_path / "heldout.jsonl"
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


def test_rows_of_both_kinds(tmp_path: Path) -> None:
    nothing = {"id": "c", "domain": "code", "prompt": "x\u2028y", "messages": None, "tools": None, "reference": None}   # a line separator ends no row
    path = write(tmp_path, GOOD, "", CHAT, json.dumps(nothing, ensure_ascii=False))
    assert read_prompts(path) == [
        Prompt(id="a", domain="code", prompt="def f():"),
        Prompt(id="b", domain="agent", messages=({"role": "user", "content": "Hi"},), tools=({"type": "function", "function": {"name": "t"}},),
               reference="Hello"),
        Prompt(id="c", domain="code", prompt="x\u2028y")]


@pytest.mark.parametrize(("row", "message"), [
    ("{", r"not readable as JSON"),
    ([1], r"must be a JSON object; got list"),
    ({**GOOD, "text": "x"}, r"unknown key 'text'; a row has id, domain, prompt, messages, tools, reference"),
    ({"domain": "code", "prompt": "x"}, r"id must be a text that is not empty; got None"),
    ({**GOOD, "domain": "co\nde"}, r"domain must be one line of text other than 'all', which .*; got 'co\\nde'\. Rename it"),
    ({**GOOD, "domain": "\ud800"}, r"domain must be one line of text"),
    ({**GOOD, "domain": "all"}, r"domain must be one line of text other than 'all', which .*; got 'all'"),
    ({"id": "x", "domain": "code"}, r"exactly one of prompt and messages must be given; got neither"),
    ({**CHAT, "prompt": "x"}, r"exactly one of prompt and messages must be given; got both"),
    ({**GOOD, "prompt": ""}, r"prompt must be a text that is not empty; got ''"),
    ({**GOOD, "prompt": [1, 2]}, r"prompt must be a text that is not empty; got \[1, 2\]"),
    ({**GOOD, "reference": 3}, r"reference must be a text that is not empty; got 3"),
    ({**CHAT, "messages": []}, r"messages must be a list of objects that is not empty; got \[\]"),
    ({**CHAT, "messages": "Hi"}, r"messages must be a list of objects that is not empty; got \"Hi\""),
    ({**CHAT, "messages": [{"content": "Hi"}]}, r"every message needs a role; got \{\"content\": \"Hi\"\}"),
    ({**CHAT, "tools": []}, r"tools must be a list of objects that is not empty"),
    ({**GOOD, "tools": [{"name": "t"}]}, r"tools go with messages"),
])
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, row: Any, message: str) -> None:
    path = write(tmp_path, GOOD, "", row)
    with pytest.raises(ValueError, match=rf"heldout\.jsonl:3: {message}"):
        read_prompts(path)


def test_ids_become_names_that_are_unique_and_safe_to_print(tmp_path: Path) -> None:
    rows = [{**GOOD, "id": name} for name in ("a", "a", "a", " What's\tthis\n?", "\u001b[2J\ud800")]
    assert [p.id for p in read_prompts(write(tmp_path, *rows))] == ["a", "a (line 2)", "a (line 3)", "What's this ?", "\\x1b[2J\\ud800"]


def test_a_file_that_is_not_there_empty_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl: no file with held-out prompts\. Give one with --prompts FILE"):
        read_prompts(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="must hold at least one prompt; got none"):
        read_prompts(write(tmp_path, "", "  "))
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="must be UTF-8 text"):
        read_prompts(tmp_path / "bytes.jsonl")


def test_rows_are_spread_evenly_over_each_domain() -> None:
    rows = [Prompt(id=f"{d}{i}", domain=d, prompt="x") for i in range(7) for d in ("code", "math")] + [Prompt(id="chat0", domain="chat", prompt="x")]
    assert [p.id for p in choose(rows, per_domain=3)] == ["code0", "code2", "code4", "math0", "math2", "math4", "chat0"]
    assert [p.id for p in choose(rows, per_domain=99)] == [p.id for d in ("code", "math", "chat") for p in rows if p.domain == d]


@pytest.mark.parametrize(("field", "value", "message"), [
    ("prompts_per_domain", 0, "at least 1; got 0"), ("max_tokens", 1, "at least 2; got 1"), ("quality_tokens", 0, "at least 1; got 0"),
    ("threads", 0, "at least 1; got 0"), ("temperature", 0.0, r"lie in \(0, 100\]; got 0.0"), ("temperature", float("nan"), "got nan"),
    ("price_per_hour", -1.0, "must be a price; got -1.0"), ("price_per_hour", float("inf"), "must be a price; got inf"),
    ("device", "tpu", "one of auto, cpu, cuda; got 'tpu'"), ("executor", "fast", "one of auto, reference, persistent; got 'fast'"),
])
def test_options_are_checked(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^validate\.{field}: .*{message}"):
        ValidateOptions(out=Path("out"), **{field: value})
