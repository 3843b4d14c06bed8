"""Held-out prompts by domain, read from a JSONL file and checked row by row before anything runs."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ALL = "all"     # heads the figures over every domain
KEYS = ("id", "domain", "prompt", "messages", "tools", "reference")


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A row of the file: plain text to continue, or the messages of a chat."""

    id: str
    domain: str
    prompt: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    tools: tuple[dict[str, Any], ...] | None = None
    reference: str | None = None     # the answer that perplexity and KL are measured on


def read_prompts(path: Path) -> list[Prompt]:
    """Every row of a file, in order. An id that an earlier row has gets its line number, so that each names one row.

    Errors: FileNotFoundError for no file, ValueError naming file, line and rule for a bad row, or for a file without rows.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no file with held-out prompts. Give one with --prompts FILE, or make a draft head with `train dflash-distill`, "
                                "which writes it.")
    rows: list[Prompt] = []
    taken: set[str] = set()
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: must be UTF-8 text; got other bytes ({error}). Save it as UTF-8.") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        row = _parse(line, where=where)
        name = row.id
        while name in taken:   # ids come from file names and questions, and two documents may share one
            name += f" (line {number})"
        taken.add(name)
        rows.append(dataclasses.replace(row, id=name))
    if not rows:
        raise ValueError(f"{path}: must hold at least one prompt; got none. Give another file with --prompts FILE.")
    return rows


def choose(rows: Sequence[Prompt], *, per_domain: int) -> list[Prompt]:
    """At most `per_domain` rows of each domain, spread evenly over its rows; domains in order of their first row."""
    domains: dict[str, list[Prompt]] = {}
    for row in rows:
        domains.setdefault(row.domain, []).append(row)
    chosen: list[Prompt] = []
    for members in domains.values():
        count = min(per_domain, len(members))
        chosen += [members[i * len(members) // count] for i in range(count)]
    return chosen


def _parse(line: str, *, where: str) -> Prompt:
    try:
        raw = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not readable as JSON ({error}). Each line is one JSON object.") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{where}: must be a JSON object; got {type(raw).__name__}. Write {{\"id\": ..., \"domain\": ..., \"prompt\": ...}}.")
    unknown = sorted(set(raw) - set(KEYS))
    if unknown:
        raise ValueError(f"{where}: unknown key {unknown[0]!r}; a row has {', '.join(KEYS)}. Remove or rename it.")
    name, domain = raw.get("id"), raw.get("domain")
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"{where}: id must be a text that is not empty; got {name!r}. Give every row one.")
    if not isinstance(domain, str) or not domain.strip() or not domain.isprintable() or domain == ALL:   # it heads rows of tables
        raise ValueError(f"{where}: domain must be one line of text other than {ALL!r}, which heads the figures over all of them; got {domain!r}. Rename it.")
    prompt, messages, tools, reference = (raw.get(key) for key in ("prompt", "messages", "tools", "reference"))
    if (prompt is None) == (messages is None):
        got = "neither" if prompt is None else "both"
        raise ValueError(f"{where}: exactly one of prompt and messages must be given; got {got}. Plain text goes into prompt, a chat into messages.")
    for key, value in (("prompt", prompt), ("reference", reference)):
        if value is not None and (not isinstance(value, str) or not value):
            raise ValueError(f"{where}: {key} must be a text that is not empty; got {value!r}. Leave the key out if there is none.")
    if messages is not None:
        _require_objects(messages, "messages", where=where)
        for message in messages:
            if not isinstance(message.get("role"), str):
                raise ValueError(f"{where}: every message needs a role; got {json.dumps(message)}. Write {{\"role\": \"user\", \"content\": ...}}.")
    if tools is not None:
        if messages is None:
            raise ValueError(f"{where}: tools go with messages; got them beside a plain prompt. Write the prompt as messages.")
        _require_objects(tools, "tools", where=where)
    return Prompt(id=_one_line(name), domain=domain, prompt=prompt, messages=None if messages is None else tuple(messages),
                  tools=None if tools is None else tuple(_as_function(t) for t in tools), reference=reference)


def _one_line(text: str) -> str:
    """A text as a name in tables and on a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in " ".join(text.split()))


def _as_function(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as OpenAI's API takes it; data sets often hold the bare function."""
    return {"type": "function", "function": tool} if "name" in tool and "function" not in tool else tool


def _require_objects(value: Any, key: str, *, where: str) -> None:
    if not isinstance(value, list) or not value or not all(isinstance(v, dict) for v in value):
        raise ValueError(f"{where}: {key} must be a list of objects that is not empty; got {json.dumps(value)}. Leave the key out if there are none.")
