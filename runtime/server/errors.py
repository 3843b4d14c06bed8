"""Errors as OpenAI clients expect them: {"error": {"message", "type", "param", "code"}} under a fitting status."""

import difflib
import json
from collections.abc import Collection, Iterable
from typing import Any

from fastapi.responses import JSONResponse
from pydantic import ValidationError

# fields of OpenAI's API that have no counterpart here; others that we lack are checked by value in schemas.py
OPENAI_FIELDS = frozenset((
    "audio", "function_call", "functions", "metadata", "modalities", "moderation", "prediction", "prompt_cache_key", "prompt_cache_retention",
    "reasoning_effort", "safety_identifier", "service_tier", "store", "verbosity", "web_search_options"))


class ApiError(Exception):
    """Ends a request with this status and body."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def body(self) -> dict[str, dict[str, str | None]]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self, headers: dict[str, str] | None = None) -> JSONResponse:
        return JSONResponse(self.body, status_code=self.status, headers=headers)


class FieldError(ValueError):
    """Raised by a validator of a whole object: the error belongs to this field of it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def unknown_field(field: str, known: Collection[str]) -> FieldError:
    """The error of a field that the object does not have."""
    if field in OPENAI_FIELDS:
        return FieldError(field, "this field of OpenAI's API is not supported. Leave it out.")
    near = difflib.get_close_matches(field, known, n=1)
    return FieldError(field, f"unknown field. Did you mean {near[0]!r}?" if near else f"unknown field. Known are {', '.join(sorted(known))}.")


def from_validation(error: ValidationError) -> ApiError:
    """The first failure, as 400, named by its path in the body."""
    failures = error.errors(include_url=False)
    first = failures[0]
    cause = first.get("ctx", {}).get("error")
    param = path_of((*first["loc"], cause.field) if isinstance(cause, FieldError) else first["loc"])
    if isinstance(cause, ValueError):
        message = str(cause)
    elif first["type"] == "missing":
        message = "must be given."
    else:
        message = f"{first['msg'].replace('Input should be', 'must be')}; got {shown(first['input'])}."
    return ApiError(400, f"{param or 'body'}: {message}", param=param or None)


def path_of(location: Iterable[int | str]) -> str:
    """`messages[0].content` for ("messages", 0, "content")."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")


def shown(value: Any) -> str:
    """A value as the client wrote it, cut to a readable length."""
    try:
        text = json.dumps(value[:80] if isinstance(value, str | list) else value, default=str)   # a body may hold millions
    except RecursionError:
        return "something deeply nested"
    return text if len(text) <= 80 else f"{text[:77]}..."
