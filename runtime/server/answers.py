"""OpenAI's answer objects, with our extension `kilotok` in every one."""

import json
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from ...dflash.metrics import counts_of
from ..engine import DecodeMode
from ..pacing import DraftLength
from .generation import Generation

DONE = "data: [DONE]\n\n"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What all objects of one answer share."""

    chat: bool
    model: str
    fingerprint: str
    seed: int
    decode: DecodeMode
    tree_budget: int | None     # None: no tree, or one of the head's number of drafts
    draft_length: DraftLength | None    # None: all that the head drafts, or no draft
    domain: str | None          # under which drafting is switched
    include_usage: bool         # of a stream
    return_token_ids: bool
    created: int = field(default_factory=lambda: int(time.time()))
    key: str = field(default_factory=lambda: uuid.uuid4().hex)

    def whole(self, generation: Generation, text: str) -> dict[str, Any]:
        """The answer to a request without a stream."""
        content = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        return {**self._head("chat.completion" if self.chat else "text_completion"), "choices": [_choice(content, generation.finish_reason)],
                "usage": _usage(generation), "kilotok": self._extension(generation if self.return_token_ids else None)}

    def opening(self) -> dict[str, Any]:
        """The first chunk of a chat: who speaks."""
        return self._chunk({"delta": {"role": "assistant", "content": ""}})

    def delta(self, text: str) -> dict[str, Any]:
        """A chunk with text."""
        return self._chunk({"delta": {"content": text}} if self.chat else {"text": text})

    def closing(self, generation: Generation) -> dict[str, Any]:
        """The chunk with the reason; it has no text."""
        return self._chunk({"delta": {}} if self.chat else {"text": ""}, ended=generation)

    def usage(self, generation: Generation) -> dict[str, Any]:
        """The chunk after it, for include_usage."""
        return {**self._head(self._chunk_kind), "choices": [], "usage": _usage(generation), "kilotok": self._extension()}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self.key}", "object": kind, "created": self.created, "model": self.model,
                "system_fingerprint": self.fingerprint}

    def _chunk(self, content: dict[str, Any], *, ended: Generation | None = None) -> dict[str, Any]:
        chunk = {**self._head(self._chunk_kind), "choices": [_choice(content, ended.finish_reason if ended else None)],
                 "kilotok": self._extension(ended if self.return_token_ids else None)}
        return {**chunk, "usage": None} if self.include_usage else chunk

    def _extension(self, generation: Generation | None = None) -> dict[str, Any]:
        known: dict[str, Any] = {"seed": self.seed, "decode": self.decode, **({} if self.tree_budget is None else {"tree_budget": self.tree_budget}),
                                 **({} if self.draft_length is None else {"draft_length": self.draft_length}),
                                 **({} if self.domain is None else {"domain": self.domain})}
        if generation is None:
            return known
        return {**known, "token_ids": generation.token_ids, "rounds": [counts_of(r) for r in generation.rounds]}


def event(data: dict[str, Any]) -> str:
    """One server-sent event. ASCII: clients split lines at characters that JSON need not escape."""
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n"


def _choice(content: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
    return {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}


def _usage(generation: Generation) -> dict[str, Any]:
    prompt, completion = generation.prompt_tokens, len(generation.token_ids)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
            "completion_tokens_details": {"accepted_prediction_tokens": generation.num_accepted,
                                          "rejected_prediction_tokens": generation.num_drafted - generation.num_accepted}}
