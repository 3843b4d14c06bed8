"""Prompts: passages are the document's own text, chat prompts are what a server makes of the row, names stay the same."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from conftest import POCKET, ROOT
from transformers import AutoTokenizer

from kilotok.runtime.server.prompt import encode_prompt
from kilotok.runtime.server.schemas import ChatRequest, CompletionRequest
from kilotok.train.config import Source
from kilotok.train.packing import spread
from kilotok.train.prompts import CHARS_A_TOKEN, REFERENCE_TOKENS, Prompt, pick_heldout, read_prompts, sha256_of_prompts, to_jsonl

TOKENS = 8
DOCUMENTS = {   # in accents.txt some cuts fall inside a character: no prompt there
    "code.py": "".join(f"class Stack{i}:\n    def push(self, item):\n\n        self.items.append(item + {i})\n" for i in range(30)),
    "blank_lines.txt": "\n\n\n  indented and first\n\n\n" + "one line of words that ends with blanks   \n\n" * 20,
    "windows.txt": "a line of text with a carriage return\r\n\r\nand the next one\r\n" * 12,
    "tabs.txt": "\tkey\tvalue and some more words\n" * 20,
    "accents.txt": "".join(f"{'na' * (i % 5)}\u00efve caf\u00e9 \u2014 \u65e5\u672c\u8a9e\n" for i in range(8)),
    "emoji.txt": "\U0001f600\U0001f680 and \U0001f9ea\U0001f600\n" * 10,
    "one_long_line.txt": "word " * 400,
    "control.txt": "<|im_start|>user\nhello there, how are you?<|im_end|>\n" * 12,
    "short.txt": "too short\n",
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(POCKET)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in DOCUMENTS.items():
        (tmp_path / name).write_bytes(text.encode())
    return tmp_path


def encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def read_text(folder: Path, tokenizer: Any, *, tokens: int = TOKENS, per_document: int = 1000) -> dict[str, dict[int, Prompt]]:
    """File -> start in its text -> prompt."""
    source = Source(domain="text", path=str(folder))
    found: dict[str, dict[int, Prompt]] = {}
    for p in read_prompts(source, tokenizer=tokenizer, prompt_tokens=tokens, per_document=per_document):
        name, _, start = p.row["id"].rpartition(":")
        assert int(start) not in found.setdefault(name, {})
        found[name][int(start)] = p
    return found


def line_starts(text: str) -> list[int]:
    """0, and where a line begins that is not empty."""
    starts = [0]
    position = 0
    for line in text.split("\n"):
        if position and position < len(text) and line.strip("\r"):
            starts.append(position)
        position += len(line) + 1
    return starts


def text_of(folder: Path, name: str) -> str:
    return (folder / name).read_text(encoding="utf-8")   # as the source reads it: \r\n is a line's end like another


def test_passages_are_the_document_s_own_text(folder: Path, tokenizer: Any) -> None:
    found = read_text(folder, tokenizer)
    assert set(found) == set(DOCUMENTS) - {"short.txt"}
    for name, prompts in found.items():
        text = text_of(folder, name)
        for start, p in prompts.items():
            where = f"{name}:{start}"
            assert p.domain == p.row["domain"] == "text" and set(p.row) == {"id", "domain", "prompt", "reference"}
            prompt, reference = p.row["prompt"], p.row["reference"]
            assert start in line_starts(text), where
            assert prompt and prompt == prompt.rstrip(), where
            assert text[start:].startswith(prompt), where
            assert p.ids == tuple(encode(tokenizer, prompt)), where
            ids = encode(tokenizer, text[start:])
            assert len(ids) >= 2 * TOKENS, where
            assert prompt == tokenizer.decode(ids[:TOKENS]).rstrip(), f"{where}: not the first {TOKENS} tokens"
            assert text[start + len(prompt):].startswith(reference), where


@pytest.mark.parametrize("name", ["code.py", "windows.txt", "one_long_line.txt"])
def test_every_line_with_room_behind_it_gives_a_passage(name: str, folder: Path, tokenizer: Any) -> None:
    text = text_of(folder, name)
    expected = [s for s in line_starts(text) if len(encode(tokenizer, text[s:])) >= 2 * TOKENS]
    assert sorted(read_text(folder, tokenizer)[name]) == expected


def test_passages_are_spread_over_the_document(folder: Path, tokenizer: Any) -> None:
    text = text_of(folder, "code.py")
    starts = line_starts(text)
    assert list(read_text(folder, tokenizer, per_document=5)["code.py"]) == [starts[i] for i in spread(len(starts), limit=5)]


def test_references_end_after_so_many_tokens(folder: Path, tokenizer: Any) -> None:
    prompts = read_text(folder, tokenizer)["code.py"]
    text = text_of(folder, "code.py")
    rest = encode(tokenizer, text[len(prompts[0].row["prompt"]):])
    assert len(rest) > REFERENCE_TOKENS
    assert prompts[0].row["reference"] == tokenizer.decode(rest[:REFERENCE_TOKENS])
    last = max(prompts)
    assert text[last:] == prompts[last].row["prompt"] + prompts[last].row["reference"]   # all there is


def test_prompts_do_not_depend_on_text_far_behind_them(tmp_path: Path, tokenizer: Any) -> None:
    """Only so much of a long document is tokenized; a prompt is the same in a document cut there."""
    window = CHARS_A_TOKEN * (TOKENS + REFERENCE_TOKENS)
    line = "the quick brown fox jumps over the lazy dog\n"
    long = line * (4 * window // len(line))
    for name, text in (("long", long), ("cut", long[:window])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text.txt").write_text(text)
    a, b = (read_text(tmp_path / name, tokenizer, per_document=1)["text.txt"][0] for name in ("long", "cut"))
    assert a == b and len(a.row["reference"]) > 100


def test_references_are_not_cut_inside_a_character(tmp_path: Path, tokenizer: Any) -> None:
    text = "\U0001f600\U0001f680 and \U0001f9ea\U0001f600\n" * 100
    (tmp_path / "emoji.txt").write_text(text, encoding="utf-8")
    prompts = read_text(tmp_path, tokenizer)["emoji.txt"]
    assert len(prompts) > 50
    assert [s for s, p in prompts.items() if not text[s:].startswith(p.row["prompt"] + p.row["reference"])] == []


def chat_source(tmp_path: Path, rows: list[dict[str, Any]], **columns: str) -> Source:
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return Source(domain="agent", path=str(path), prompt="prompt", **columns)  # type: ignore[arg-type]


WEATHER = {"name": "get_weather", "description": "Weather.", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TIMER = {"name": "set_timer", "description": "Timer.", "parameters": {"type": "object", "properties": {"minutes": {"type": "integer"}}}}
CHAT_ROWS: list[dict[str, Any]] = [
    {"prompt": "What is the weather in Lisbon?", "tools": [WEATHER], "response": "Sunny."},
    {"prompt": "Time the pasta: 9 min.", "tools": [{"type": "function", "function": TIMER}, WEATHER], "response": "Done."},
    {"prompt": "No tools.\nTwo lines, caf\u00e9 \U0001f600  ", "tools": None, "response": ""},
    {"prompt": "An empty list of tools.", "tools": [], "response": "Yes."},
]
# shows tools as they are given, as most models' templates do: another form of the tool would be another prompt
STRICT_TEMPLATE = ("{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
                   "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
                   "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


@pytest.mark.parametrize("template", [None, STRICT_TEMPLATE], ids=["pocket", "tools_as_given"])
def test_a_server_given_the_row_makes_the_same_tokens(template: str | None, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(POCKET)
    if template is not None:
        tokenizer.chat_template = template
    source = chat_source(tmp_path, CHAT_ROWS, response="response", tools="tools")
    prompts = read_prompts(source, tokenizer=tokenizer, prompt_tokens=TOKENS, per_document=1)
    assert [p.row["messages"] for p in prompts] == [[{"role": "user", "content": r["prompt"]}] for r in CHAT_ROWS]
    assert [p.row["reference"] for p in prompts] == [r["response"] for r in CHAT_ROWS]
    wrapped = {"type": "function", "function": WEATHER}
    assert [p.row.get("tools") for p in prompts] == [[wrapped], [{"type": "function", "function": TIMER}, wrapped], None, None]
    for p in prompts:
        text = tokenizer.apply_chat_template(p.row["messages"], tools=p.row.get("tools"), tokenize=False, add_generation_prompt=True)
        assert text.endswith("<|im_start|>assistant\n") and p.row["messages"][0]["content"] in text
        assert list(p.ids) == encode(tokenizer, text)
        request = {k: v for k, v in json.loads(json.dumps(p.row)).items() if k in ("messages", "tools")}
        assert encode_prompt(tokenizer, ChatRequest.model_validate({"model": "m", **request})) == p.ids
    assert '"get_weather"' in tokenizer.decode(prompts[0].ids) and '"set_timer"' in tokenizer.decode(prompts[1].ids)


def test_a_server_given_a_plain_prompt_makes_the_same_tokens(folder: Path, tokenizer: Any) -> None:
    for prompts in read_text(folder, tokenizer, per_document=3).values():
        for p in prompts.values():
            assert encode_prompt(tokenizer, CompletionRequest.model_validate({"model": "m", "prompt": p.row["prompt"]})) == p.ids


def test_without_a_response_there_is_no_reference(tmp_path: Path, tokenizer: Any) -> None:
    source = chat_source(tmp_path, CHAT_ROWS[2:])
    (first, _) = read_prompts(source, tokenizer=tokenizer, prompt_tokens=TOKENS, per_document=1)
    assert first.row["reference"] is None and "tools" not in first.row


def test_turns_need_a_chat_template(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(POCKET)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"^data source 'agent': the target's tokenizer has no chat template.*text: COLUMN"):
        read_prompts(chat_source(tmp_path, CHAT_ROWS), tokenizer=tokenizer, prompt_tokens=TOKENS, per_document=1)


def test_a_source_without_a_prompt_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "short.txt").write_text("too short\n")
    with pytest.raises(ValueError, match=r"^data source 'x': no prompt found in .*short\.txt \(all\)\. Add text, or leave the source out\.$"):
        read_prompts(Source(domain="x", path=str(tmp_path / "short.txt")), tokenizer=tokenizer, prompt_tokens=TOKENS, per_document=4)


def test_names_stay_the_same(tmp_path: Path, tokenizer: Any) -> None:
    """People compare figures by them: a short name is the prompt itself, a long one its start and a hash."""
    long = "Explain, in plain words and with an example, what a\ncheckpoint is good for."
    rows = [{"prompt": "x" * 60}, {"prompt": "x" * 61}, {"prompt": long}, {"prompt": "two\nlines"}]
    prompts = read_prompts(chat_source(tmp_path, rows), tokenizer=tokenizer, prompt_tokens=TOKENS, per_document=1)
    assert [p.row["id"] for p in prompts] == [
        "x" * 60, f"{'x' * 40} {hashlib.sha256(('x' * 61).encode()).hexdigest()[:8]}",
        "Explain, in plain words and with an exam 186f3071", "two lines " + hashlib.sha256(b"two\nlines").hexdigest()[:8]]


def test_the_prompts_of_the_repository_have_names_of_their_own(tokenizer: Any) -> None:
    for domain, tools in (("code", None), ("math", None), ("chat", None), ("agent", "tools")):
        for path in (ROOT / "recipes/prompts", ROOT / "recipes/pocket/heldout"):
            source = Source(domain=domain, path=str(path / f"{domain}.jsonl"), prompt="prompt", tools=tools)
            prompts = read_prompts(source, tokenizer=tokenizer, prompt_tokens=TOKENS, per_document=1)
            assert len({p.row["id"] for p in prompts}) == len(prompts) >= 12, source.path


def some(count: int, *, domain: str = "d") -> list[Prompt]:
    return [Prompt(domain=domain, ids=(i, i + 1), row={"id": f"{i}", "prompt": f"caf\u00e9 {i}\n"}) for i in range(count)]


def test_held_out_prompts_are_spread_evenly() -> None:
    prompts = some(10)
    assert pick_heldout(prompts, limit=4) == [prompts[i] for i in (0, 2, 5, 7)]
    assert pick_heldout(prompts, limit=20) == prompts


def test_rows_are_written_one_a_line() -> None:
    text = to_jsonl(some(3))
    assert text.count("\n") == 3 and text.endswith("\n") and "caf\u00e9" in text
    assert [json.loads(line) for line in text.splitlines()] == [p.row for p in some(3)]


def test_the_hash_sees_tokens_order_and_domain_and_nothing_else() -> None:
    prompts = some(3)
    same = [Prompt(domain=p.domain, ids=p.ids, row={"id": "other"}) for p in prompts]
    assert sha256_of_prompts(prompts) == sha256_of_prompts(same)
    others = [prompts[::-1], prompts[:2], some(3, domain="e"), [*prompts[:2], Prompt(domain="d", ids=(2, 4), row={})],
              [*prompts[:2], Prompt(domain="d", ids=(2,), row={}), Prompt(domain="d", ids=(3,), row={})]]
    assert len({sha256_of_prompts(p) for p in (prompts, *others)}) == 6
