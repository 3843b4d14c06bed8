"""From a request to the token ids of its prompt, and to how many may follow."""

from typing import Any

from .errors import ApiError
from .schemas import ChatRequest, CompletionRequest

COMPLETION_TOKENS = 16   # OpenAI's default of max_tokens for completions; a chat gets what is left of the context


def encode_prompt(tokenizer: Any, request: CompletionRequest | ChatRequest) -> tuple[int, ...]:
    """Token ids of a prompt.

    Errors: ApiError 400 for an empty one, ids outside the vocabulary, and messages that the chat template cannot render.
    """
    if isinstance(request, ChatRequest):
        field, ids = "messages", _encode(tokenizer, _render(tokenizer, request), add_special_tokens=False)   # the template writes those itself
    else:
        field, ids = "prompt", request.prompt if isinstance(request.prompt, list) else _encode(tokenizer, request.prompt, add_special_tokens=True)
    size = len(tokenizer)
    bad = next((i for i, token in enumerate(ids) if not 0 <= token < size), None)
    if bad is not None:
        raise ApiError(400, f"prompt[{bad}]: token ids lie in 0..{size - 1}; got {ids[bad]}.", param=f"prompt[{bad}]")
    if not ids:
        raise ApiError(400, f"{field}: must hold at least one token; got none.", param=field)
    return tuple(ids)


def fit_tokens(request: CompletionRequest | ChatRequest, *, prompt_tokens: int, max_length: int) -> int:
    """How many tokens to generate at most.

    Errors: ApiError 400, context_length_exceeded, when the prompt leaves no room, or less than asked for.
    """
    room, limit = max_length - prompt_tokens, request.token_limit
    if room < 1 or (limit is not None and limit > room):
        field = "messages" if isinstance(request, ChatRequest) else "prompt"
        asked = "" if limit is None else f" and {limit} to generate"
        raise ApiError(400, f"{field}: prompt and answer must fit the model's context of {max_length} tokens; got {prompt_tokens} in the prompt{asked}. "
                            f"{'Shorten the prompt.' if room < 1 else f'Shorten the prompt, or ask for at most {room} tokens.'}",
                       param=field, code="context_length_exceeded")
    if limit is None:
        return room if isinstance(request, ChatRequest) else min(room, COMPLETION_TOKENS)
    return limit


def _encode(tokenizer: Any, text: str, *, add_special_tokens: bool) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]   # verbose warns of long texts; we refuse them
    return ids


def _render(tokenizer: Any, request: ChatRequest) -> str:
    tools = request.tools if request.tool_choice != "none" else []
    if not tokenizer.chat_template:
        raise ApiError(400, "messages: this model has no chat template. Use /v1/completions.", param="messages")
    try:
        template = tokenizer.get_chat_template(tools=tools or None)
        if tools and "tools" not in template:
            raise ApiError(400, "tools: this model's chat template does not show tools. Describe them in a message.", param="tools")
        text: str = tokenizer.apply_chat_template([m.for_template() for m in request.messages], tools=tools or None, chat_template=template,
                                                  add_generation_prompt=True, tokenize=False)
    except ApiError:
        raise
    except Exception as error:   # a template is a program of the model's author, and raises what it likes at messages it does not expect
        raise ApiError(400, f"messages: the model's chat template refuses them: {type(error).__name__}: {error}.", param="messages") from error
    return text
