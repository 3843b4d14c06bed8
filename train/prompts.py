"""Prompts by domain: chat turns from data sources, and the beginnings of passages of plain text."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .config import Source
from .data import describe_source, read_source
from .packing import spread

CHARS_A_TOKEN = 16     # more than any tokenizer of text averages: how far to read for a number of tokens
REFERENCE_TOKENS = 256   # of the text after a plain prompt, kept as its reference


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt as tokens, and as the row that another program can send it with."""

    domain: str
    ids: tuple[int, ...]
    row: dict[str, Any]     # id, domain, prompt or messages (and tools), reference


def read_prompts(source: Source, *, tokenizer: Any, prompt_tokens: int, per_document: int) -> list[Prompt]:
    """The prompts of a source, in its order; a plain-text document gives up to `per_document`.

    Errors: ValueError when there is none, or the tokenizer has no chat template and turns are asked for.
    """
    found: list[Prompt] = []
    chats: list[tuple[str, str, dict[str, Any]]] = []
    for name, document in read_source(source):
        if isinstance(document, str):
            found.extend(_text_prompts(name, document, source, tokenizer=tokenizer, tokens=prompt_tokens, count=per_document))
        else:
            chats.append(_render(name, document, source, tokenizer=tokenizer))
    found.extend(_chat_prompts(chats, source, tokenizer=tokenizer))
    if not found:
        raise ValueError(f"data source {source.domain!r}: no prompt found in {describe_source(source)} ({source.part}). Add text, or leave the source out.")
    return found


def pick_heldout(prompts: Sequence[Prompt], *, limit: int) -> list[Prompt]:
    """At most `limit` prompts, spread evenly."""
    return [prompts[i] for i in spread(len(prompts), limit=limit)]


def to_jsonl(prompts: Sequence[Prompt]) -> str:
    return "".join(json.dumps(p.row, ensure_ascii=False) + "\n" for p in prompts)


def sha256_of_prompts(prompts: Sequence[Prompt]) -> str:
    """One hash over all prompts' tokens, in order."""
    return hashlib.sha256(json.dumps([(p.domain, p.ids) for p in prompts]).encode()).hexdigest()


def _render(name: str, document: dict[str, Any], source: Source, *, tokenizer: Any) -> tuple[str, str, dict[str, Any]]:
    """The first turn's text, the prompt as the chat template renders it, and its row."""
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(f"data source {source.domain!r}: the target's tokenizer has no chat template, so turns cannot be rendered. "
                         "Use text: COLUMN instead of prompt.")
    turns = document["messages"]
    # the form in which clients send tools, so that the draft learns on the prompts that are served
    tools = [t if "function" in t else {"type": "function", "function": t} for t in document["tools"] or []] or None
    text = tokenizer.apply_chat_template(turns[:1], tools=tools, tokenize=False, add_generation_prompt=True)
    row: dict[str, Any] = {"id": _identifier(name), "domain": source.domain, "messages": turns[:1]}
    if tools:
        row["tools"] = tools
    row["reference"] = turns[1]["content"] if len(turns) > 1 else None
    return turns[0]["content"], text, row


def _chat_prompts(chats: Sequence[tuple[str, str, dict[str, Any]]], source: Source, *, tokenizer: Any) -> list[Prompt]:
    """All in one call of the tokenizer: one each costs milliseconds, and far more where several processes do it at once."""
    if not chats:
        return []
    prompts = []
    encoded = tokenizer([text for _, text, _ in chats], add_special_tokens=False, verbose=False)["input_ids"]
    for (content, text, row), tokens in zip(chats, encoded, strict=True):
        ids = tuple(tokens)
        _refuse_second_template(content, text, ids, tokenizer=tokenizer, where=f"data source {source.domain!r}, prompt {row['id']!r}")
        prompts.append(Prompt(domain=source.domain, ids=ids, row=row))
    return prompts


def _refuse_second_template(content: str, text: str, ids: tuple[int, ...], *, tokenizer: Any, where: str) -> None:
    """ValueError for a turn that was rendered before, and for a template that begins with two BOS tokens."""
    before = text[:text.find(content)].strip() if content in text else ""
    opening = tokenizer.decode(ids[:1]).strip() if ids[0] in tokenizer.all_special_ids else before   # a turn rendered otherwise still opens like this one
    if opening and content.lstrip().startswith(opening):
        raise ValueError(f"{where}: begins with {opening!r:.60}, as the chat template's own text does: it was rendered before. Give the turn as plain text.")
    if tokenizer.bos_token_id is not None and ids[:2] == (tokenizer.bos_token_id,) * 2:
        raise ValueError(f"{where}: the chat template begins with two {tokenizer.bos_token!r}. Remove one from the template.")


def _text_prompts(name: str, text: str, source: Source, *, tokenizer: Any, tokens: int, count: int) -> list[Prompt]:
    """Passages that begin at a line, evenly spaced, with `tokens` tokens of text and at least as many after them."""
    starts = [0, *(i + 1 for i, c in enumerate(text) if c == "\n" and i + 1 < len(text) and text[i + 1] not in "\r\n")]
    found = []
    for number in spread(len(starts), limit=count):
        passage = text[starts[number]:starts[number] + CHARS_A_TOKEN * (tokens + REFERENCE_TOKENS)]
        ids = _encode(tokenizer, passage)
        if len(ids) < 2 * tokens:
            continue
        # trailing blanks go: they would be tokens of their own here and part of the next token in the text
        prompt = tokenizer.decode(ids[:tokens]).rstrip()
        if not prompt or not passage.startswith(prompt):   # cut inside a character, or not reversible
            continue
        reference = tokenizer.decode(_encode(tokenizer, passage[len(prompt):])[:REFERENCE_TOKENS]).rstrip("\ufffd")   # of a character cut in two
        found.append(Prompt(domain=source.domain, ids=_encode(tokenizer, prompt),
                            row={"id": _identifier(f"{name}:{starts[number]}"), "domain": source.domain, "prompt": prompt, "reference": reference}))
    return found


def _encode(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _identifier(name: str) -> str:
    """A short name that stays the same: the document's own if it is short, else the start and a hash."""
    return name if len(name) <= 60 and "\n" not in name else f"{' '.join(name.split())[:40]} {hashlib.sha256(name.encode()).hexdigest()[:8]}"
