"""From messages to the prompt: what the chat template is given, and what it refuses."""

from types import SimpleNamespace
from typing import Any

import pytest
from served_fake import TOKENIZER

from kilotok.runtime.server.errors import ApiError
from kilotok.runtime.server.prompt import encode_prompt
from kilotok.runtime.server.schemas import ChatRequest, CompletionRequest

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}


def rendered(messages: list[dict[str, Any]], **fields: Any) -> str:
    return TOKENIZER.decode(encode_prompt(TOKENIZER, ChatRequest.model_validate({"model": "m", "messages": messages, **fields})))


def templated(template: str) -> Any:
    """The tokenizer with another chat template."""
    def apply(messages: Any, **options: Any) -> str:
        return TOKENIZER.apply_chat_template(messages, **options)

    return SimpleNamespace(chat_template=template, get_chat_template=lambda tools: template, apply_chat_template=apply)


def test_a_chat_is_rendered_for_the_assistant_to_answer() -> None:
    assert rendered([{"role": "system", "content": "Be kind."}, USER]) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_text_parts_are_joined_as_they_are() -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert rendered([{"role": "user", "content": parts, "name": "ann"}]) == rendered([USER])
    assert rendered([{"role": "user", "content": []}]) == rendered([{"role": "user", "content": ""}])


def test_tools_calls_and_results() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": [2]}'}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "3", "tool_call_id": "c1"}]
    assert rendered(messages, tools=[TOOL]) == (
        '<|im_start|>system\nTools:\n{"name": "add", "description": "adds", "parameters": {"type": "object"}}\n<|im_end|>\n'
        '<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n")


def test_tool_choice_none_leaves_the_tools_out() -> None:
    assert rendered([USER], tools=[TOOL], tool_choice="none") == rendered([USER]) != rendered([USER], tools=[TOOL], tool_choice="auto")


@pytest.mark.parametrize(("tokenizer", "fields", "param", "words"), [
    (SimpleNamespace(chat_template=None), {}, "messages", "this model has no chat template. Use /v1/completions."),
    (templated("{{ raise_exception('roles must alternate') }}"), {}, "messages", "chat template refuses them: TemplateError: roles must alternate."),
    (templated("{{ messages[5].content }}"), {}, "messages", "UndefinedError"),
    (templated("{{ messages[0].content + 1 }}"), {}, "messages", "TypeError"),
    (templated("{% if"), {}, "messages", "TemplateSyntaxError"),
    (templated("{{ messages[0].content }}"), {"tools": [TOOL]}, "tools", "does not show tools"),
])
def test_what_a_template_refuses_is_400(tokenizer: Any, fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(ApiError, match=words) as refused:
        encode_prompt(tokenizer, ChatRequest.model_validate({"model": "m", "messages": [USER], **fields}))
    assert (refused.value.status, refused.value.param) == (400, param)


def test_completions_get_the_special_tokens_of_the_tokenizer_and_chats_do_not() -> None:
    seen = []

    class Bos:
        chat_template, get_chat_template = "x", staticmethod(TOKENIZER.get_chat_template)
        apply_chat_template = staticmethod(TOKENIZER.apply_chat_template)

        def __len__(self) -> int:
            return 10

        def __call__(self, text: str, *, add_special_tokens: bool, **options: Any) -> dict[str, list[int]]:
            seen.append(add_special_tokens)
            return {"input_ids": [1, 5] if add_special_tokens else [5]}

    assert encode_prompt(Bos(), CompletionRequest(model="m", prompt="a")) == (1, 5)
    assert encode_prompt(Bos(), CompletionRequest(model="m", prompt=[5])) == (5,)
    assert encode_prompt(Bos(), ChatRequest.model_validate({"model": "m", "messages": [USER]})) == (5,)
    assert seen == [True, False]
