"""Bodies of the two POST endpoints. What OpenAI's API allows and we cannot do is refused here, never ignored."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, model_validator

from ..engine import MAX_TREE_BUDGET, DecodeMode
from ..pacing import AUTO, MAX_DRAFT_LENGTH, DraftLength
from .body import parse_json
from .errors import ApiError, FieldError, shown, unknown_field

MAX_STOPS = 4   # as in OpenAI's API


def _only(*allowed: Any, remedy: str) -> AfterValidator:
    """A field that OpenAI defines and of which we can do only these values."""
    def check(value: Any) -> Any:
        if not any(type(value) is type(a) and value == a for a in allowed):   # True == 1 in Python, not in JSON
            rule = f"only {shown(allowed[0])} is supported" if allowed else "not supported"
            raise ValueError(f"{rule}; got {shown(value)}. {remedy}")
        return value
    return AfterValidator(check)


def _stop(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise ValueError(f"must be a string or up to {MAX_STOPS} strings, none of them empty; got {shown(value)}.")
    return tuple(stops)


def _draft_length(value: Any) -> DraftLength:
    if value != AUTO and (type(value) is not int or not 0 <= value <= MAX_DRAFT_LENGTH):
        raise ValueError(f"must be {AUTO!r} or a number in 0..{MAX_DRAFT_LENGTH}; got {shown(value)}.")
    return value  # type: ignore[no-any-return]


def _prompt(value: Any) -> str | list[int]:
    single = value[0] if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list) else value
    if isinstance(single, str) or (isinstance(single, list) and all(type(i) is int for i in single)):
        return single
    if isinstance(value, list) and len(value) > 1 and all(isinstance(v, str | list) for v in value):
        raise ValueError(f"one prompt a request is supported; got {len(value)}. Send a request for each.")
    raise ValueError(f"must be a string or a list of token ids; got {shown(value)}.")


def _content(value: Any) -> str:
    """Text of a message; the parts of a list are joined as they are."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError(f"must be a string or a list of text parts; got {shown(value)}.")
    for i, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise ValueError(f"part {i}: content of type {kind!r} is not supported. Send parts of type 'text'.")
        if kind is None or set(part) != {"type", "text"} or not isinstance(part["text"], str):
            raise ValueError(f'part {i}: must be {{"type": "text", "text": "..."}}; got {shown(part)}.')
    return "".join(part["text"] for part in value)


def _arguments(value: Any) -> dict[str, Any]:
    """Arguments of a call: JSON text in OpenAI's API, an object for chat templates."""
    try:
        parsed = parse_json(value, where="arguments") if isinstance(value, str) else None
    except ApiError as error:
        raise ValueError(f"must be the JSON text of an object: {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"must be the JSON text of an object; got {shown(value)}.")
    return parsed


def _tool(value: Any) -> dict[str, Any]:
    """A tool as the client wrote it: the chat template decides what it shows of it."""
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise ValueError(f'must be {{"type": "function", "function": {{...}}}}; got {shown(value)}.')
    if value["type"] != "function":
        raise ValueError(f"a tool of type {value['type']!r} is not supported. Describe it as a function.")
    function = value.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"function must be an object with a name; got {shown(function)}.")
    if function.get("strict"):
        raise ValueError("strict is not supported: answers are not held to a schema. Leave it out.")
    return value


class _Object(BaseModel):
    """A JSON object: strict types, no other fields, null the same as left out."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _fields(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name in data:
            if name not in cls.model_fields:
                raise unknown_field(name, cls.model_fields)
        return {name: value for name, value in data.items() if value is not None or cls.model_fields[name].is_required()}


class StreamOptions(_Object):
    include_usage: bool = False


class _Request(_Object):
    """Fields of both endpoints."""

    model: str
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=1)
    seed: int | None = Field(default=None, ge=0, le=2**63 - 1)
    stop: Annotated[tuple[str, ...], PlainValidator(_stop)] = ()
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    decode: DecodeMode | None = None
    tree_budget: int | None = Field(default=None, ge=1, le=MAX_TREE_BUDGET)
    draft_length: Annotated[DraftLength | None, PlainValidator(_draft_length)] = None
    domain: str | None = Field(default=None, min_length=1, max_length=64)
    ignore_eos: bool = False
    return_token_ids: bool = False
    n: Annotated[Any, _only(1, remedy="Send several requests.")] = 1
    presence_penalty: Annotated[Any, _only(0, 0.0, remedy="Leave it out.")] = 0
    frequency_penalty: Annotated[Any, _only(0, 0.0, remedy="Leave it out.")] = 0
    logit_bias: Annotated[Any, _only({}, remedy="Leave it out.")] = None
    logprobs: Annotated[Any, _only(False, remedy="Leave it out.")] = False

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> "_Request":
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "only with a stream. Set stream to true, or leave it out.")
        return self

    @property
    def token_limit(self) -> int | None:
        """What the client asked for."""
        return self.max_tokens


class CompletionRequest(_Request):
    prompt: Annotated[str | list[int], PlainValidator(_prompt)]
    echo: Annotated[Any, _only(False, remedy="Put the prompt before the text yourself.")] = False
    suffix: Annotated[Any, _only(remedy="Leave it out: text is only continued, not filled in.")] = None
    best_of: Annotated[Any, _only(1, remedy="Send several requests.")] = 1


class Function(_Object):
    name: str
    arguments: Annotated[dict[str, Any], PlainValidator(_arguments)]


class ToolCall(_Object):
    id: str | None = None
    type: Literal["function"] = "function"
    function: Function


class Message(_Object):
    role: Literal["system", "user", "assistant", "tool"]
    content: Annotated[str | None, PlainValidator(_content)] = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    # OpenAI's client writes these as null when an answer is sent back as a message
    refusal: Annotated[Any, _only(remedy="Leave it out.")] = None
    annotations: Annotated[Any, _only(remedy="Leave it out.")] = None
    audio: Annotated[Any, _only(remedy="Leave it out.")] = None
    function_call: Annotated[Any, _only(remedy="Use tool_calls.")] = None

    @model_validator(mode="after")
    def _fits_the_role(self) -> "Message":
        if self.content is None and not self.tool_calls:
            raise FieldError("content", "must be given.")
        if self.tool_calls is not None and self.role != "assistant":
            raise FieldError("tool_calls", f"only the assistant calls tools; got role {self.role!r}.")
        if self.tool_call_id is not None and self.role != "tool":
            raise FieldError("tool_call_id", f"only with role 'tool'; got role {self.role!r}.")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it."""
        given = self.model_dump(include={"role", "name", "tool_calls", "tool_call_id"}, exclude_none=True)
        return {**given, "content": self.content or ""}


class ChatRequest(_Request):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    tools: list[Annotated[dict[str, Any], PlainValidator(_tool)]] = []
    tool_choice: Annotated[Any, _only("auto", "none", remedy="Use 'auto', or 'none' to leave the tools out.")] = "auto"
    parallel_tool_calls: Annotated[Any, _only(True, remedy="Leave it out.")] = True
    response_format: Annotated[Any, _only({"type": "text"}, remedy="Leave it out, and ask for the format in a message.")] = None
    top_logprobs: Annotated[Any, _only(remedy="Leave it out.")] = None

    @model_validator(mode="after")
    def _one_limit(self) -> "ChatRequest":
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise FieldError("max_completion_tokens", f"another name of max_tokens, which is {self.max_tokens}; got {self.max_completion_tokens}. Send one.")
        return self

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens
