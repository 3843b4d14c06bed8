"""Reads a request's JSON object and refuses what JSON or UTF-8 does not allow, before any field is looked at."""

import json
import math
import re
from typing import Any, NoReturn

from fastapi import Request

from .errors import ApiError, path_of, shown

MAX_BODY_BYTES = 16 * 2**20   # text of a million tokens is about 4 MB; what is larger is not a prompt
LONE_SURROGATE = re.compile("[\ud800-\udfff]")


async def read_object(request: Request) -> dict[str, Any]:
    """The body of a POST.

    Errors: ApiError 413 for one over MAX_BODY_BYTES, 400 for everything else that is not a JSON object in UTF-8.
    """
    # A browser sends any other type across origins without asking the server first.
    kind = request.headers.get("content-type", "")
    if kind.split(";")[0].strip().lower() != "application/json":
        raise ApiError(400, f"Content-Type: must be application/json; got {kind or 'none'}. Send the header 'Content-Type: application/json'.")
    value = parse_json(await _read(request), where="body")
    if not isinstance(value, dict):
        raise ApiError(400, f"body: must be a JSON object; got {shown(value)}.")
    return value


def parse_json(text: bytes | str, *, where: str) -> Any:
    """Strict JSON: no NaN, no infinity, no number beyond a double, no half of a surrogate pair.

    Errors: ApiError 400 that names `where`, or the place in it.
    """
    try:
        text = text.decode() if isinstance(text, bytes) else text
        value = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
        lone = _lone_surrogate(value, ()) if "\\ud" in text.lower() else None   # only an escape can write one
    except UnicodeDecodeError as error:
        raise ApiError(400, f"{where}: must be UTF-8; byte {error.start} is not.") from error
    except RecursionError as error:
        raise ApiError(400, f"{where}: nested too deeply.") from error
    except ValueError as error:   # malformed, or one of the two refusals below
        raise ApiError(400, f"{where}: not valid JSON: {error}.") from error
    if lone is not None:
        place = path_of(lone) or where
        raise ApiError(400, f"{place}: half of a surrogate pair, which is no character. Send both halves, or the character itself.", param=place)
    return value


async def _read(request: Request) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > MAX_BODY_BYTES:
        raise _too_large(f"{declared} bytes")
    parts, size, more = [], 0, True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ApiError(400, "body: the client left before it was sent.")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MAX_BODY_BYTES:
            raise _too_large("more")
        more = message.get("more_body", False)
    return b"".join(parts)


def _too_large(got: str) -> ApiError:
    return ApiError(413, f"body: at most {MAX_BODY_BYTES} bytes; got {got}. Shorten the prompt.")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:40]} is beyond what a double holds")
    return number


def _lone_surrogate(value: Any, path: tuple[int | str, ...]) -> tuple[int | str, ...] | None:
    """Path of the first text that UTF-8 cannot write; of a key: its object's."""
    if isinstance(value, str):
        return path if LONE_SURROGATE.search(value) else None
    if isinstance(value, dict):
        if any(_lone_surrogate(key, path) is not None for key in value):
            return path
        return next((found for key, item in value.items() if (found := _lone_surrogate(item, (*path, key))) is not None), None)
    if isinstance(value, list):
        return next((found for i, item in enumerate(value) if (found := _lone_surrogate(item, (*path, i))) is not None), None)
    return None
