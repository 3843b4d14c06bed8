"""Text from tokens: the same as decoding all at once, in bounded work, and cut before a stop string."""

import random
from typing import Any

import pytest
from served_fake import TOKENIZER

from kilotok.runtime.server.text import MAX_HELD, Detokenizer, StopStrings

SPECIAL = [0, 1, 2, 3]
BYTES = [i for i in range(4, 260) if len(TOKENIZER.convert_ids_to_tokens(i)) == 1]   # the vocabulary's single bytes
TEXTS = [
    "plain words, then code: def f(x):\n    return x\n", "\u00e9 \u00df \u00f1 \u00e5", "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8",
    "\U0001f600\U0001f603\U0001f44d\U0001f3fd",                                   # emoji, the last with a skin tone
    "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 family",        # one emoji of seven characters
    "a\u0301 combining", "\u0627\u0644\u0639\u0631\u0628\u064a\u0629 \u05e2\u05d1\u05e8\u05d9\u05ea", "mixed \U0001f600 and \u65e5 and \u00e9.",
    "\ufffd a real replacement \ufffd\ufffd character \ufffd", "\U0001f600" * 30, "", " ", "\n\n\n", "<tool_call>{}</tool_call>"]


class Counting:
    """The tokenizer, remembering how many tokens every decode was given."""

    def __init__(self) -> None:
        self.added_tokens_decoder = TOKENIZER.added_tokens_decoder
        self.sizes: list[int] = []

    def __len__(self) -> int:
        return len(TOKENIZER)

    def decode(self, tokens: list[int], **options: Any) -> str:
        self.sizes.append(len(tokens))
        return TOKENIZER.decode(tokens, **options)


def pieces_of(tokens: list[int], tokenizer: Any = TOKENIZER) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(t) for t in tokens), detokenizer.flush()]


def at_once(tokens: list[int]) -> str:
    return TOKENIZER.decode(tokens, skip_special_tokens=True)


def test_single_bytes_are_known() -> None:
    assert len(BYTES) == 256 and sorted(BYTE_TOKENS.values()) == BYTES


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(text: str) -> None:
    tokens = TOKENIZER(text)["input_ids"]
    pieces = pieces_of(tokens)
    assert "".join(pieces) == at_once(tokens) == text
    if "\ufffd" not in text:
        assert pieces[-1] == "" and not any("\ufffd" in p for p in pieces)   # nothing was given out half


@pytest.mark.parametrize("seed", range(12))
def test_random_tokens_equal_the_full_decode(seed: int) -> None:
    """Whole vocabulary, single bytes (mostly no UTF-8) and pieces of real text, with special tokens between; cut at any place."""
    draw = random.Random(seed)
    for _ in range(40):
        tokens: list[int] = []
        while len(tokens) < 60:
            kind = draw.randrange(4)
            if kind == 0:
                tokens += draw.choices(range(len(TOKENIZER)), k=draw.randint(1, 10))
            elif kind == 1:
                tokens += draw.choices(BYTES, k=draw.randint(1, 25))
            elif kind == 2:
                real = TOKENIZER(draw.choice(TEXTS))["input_ids"]
                start = draw.randint(0, len(real))
                tokens += real[start:start + draw.randint(0, 12)]
            else:
                tokens += draw.choices(SPECIAL, k=draw.randint(1, 3))
        assert "".join(pieces_of(tokens)) == at_once(tokens), tokens


@pytest.mark.parametrize("byte", [0x80, 0xBF, 0xC3, 0xE6, 0xF0, 0xFF, 0xED])
def test_endless_invalid_bytes_are_given_out(byte: int) -> None:
    token = BYTE_TOKENS[byte]
    detokenizer = Detokenizer(TOKENIZER)
    given = sum(len(detokenizer.push(token)) for _ in range(100))
    assert given >= 100 - MAX_HELD
    assert given + len(detokenizer.flush()) == len(at_once([token] * 100)) == 100


def test_special_tokens_inside_a_character_do_not_break_it() -> None:
    first, *rest = TOKENIZER("\u00e9")["input_ids"]
    tokens = [first, *SPECIAL * 10, *rest]
    assert "".join(pieces_of(tokens)) == at_once(tokens) == "\u00e9"


def test_tokens_that_the_tokenizer_lacks_inside_a_character_do_not_break_it() -> None:
    """A model may have more tokens than its tokenizer: rows that only fill up the embedding."""
    padding = [len(TOKENIZER) + 5] * 10
    for text in ("\u00e9", "\u65e5"):
        first, *rest = [BYTE_TOKENS[b] for b in text.encode()]
        tokens = [first, *padding, *rest]
        assert "".join(pieces_of(tokens)) == at_once(tokens) == text


def test_an_incomplete_character_comes_at_the_end() -> None:
    first, *_ = TOKENIZER("\u65e5")["input_ids"]
    assert pieces_of([*TOKENIZER("ab")["input_ids"], first])[-1] == "\ufffd"


def test_work_for_a_token_does_not_grow() -> None:
    draw = random.Random(0)
    tokenizer = Counting()
    pieces_of(draw.choices([*range(len(TOKENIZER)), *BYTES * 16], k=2000), tokenizer)
    assert max(tokenizer.sizes) <= 2 * MAX_HELD
    assert len(tokenizer.sizes) < 2000 * 6


def _byte_letters() -> dict[int, str]:
    """How a byte-level vocabulary writes each byte: printable ones as they are, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {b: chr(b) for b in printable}
    for i, byte in enumerate(b for b in range(256) if b not in letters):
        letters[byte] = chr(256 + i)
    return letters


BYTE_TOKENS = {byte: TOKENIZER.convert_tokens_to_ids(letter) for byte, letter in _byte_letters().items()}


# --- stop strings ---


def cut(text: str, stops: tuple[str, ...]) -> tuple[str, bool]:
    """Letter by letter: at the first end of a stop string, before the longest that ends there."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stops if text[:end].endswith(s)]
        if ending:
            return text[:end - len(max(ending, key=len))], True
    return text, False


def streamed(parts: list[str], stops: tuple[str, ...]) -> tuple[str, bool]:
    finder, given = StopStrings(stops), ""
    for part in parts:
        text, hit = finder.push(part)
        given += text
        assert cut(given, stops)[1] is False
        if hit:
            return given, True
    return given + finder.flush(), False


@pytest.mark.parametrize(("parts", "stops", "expected"), [
    (["abc", "def"], ("cd",), ("ab", True)),               # over a border
    (["a", "b", "c", "d", "e"], ("abcx",), ("abcde", False)),   # held back and given out after all
    (["abab", "abac"], ("abac",), ("abab", True)),         # a false start inside the true one
    (["xabcdy"], ("abcd", "bc"), ("xa", True)),            # the first to be complete
    (["xabcy"], ("abc", "bc"), ("x", True)),               # both at once: the longer
    (["ab"], ("abc",), ("ab", False)),                     # the text ends within a stop string
    (["one\n", "\ntwo"], ("\n\n",), ("one", True)),
    (["\u00e9\U0001f600", "\u65e5"], ("\U0001f600\u65e5",), ("\u00e9", True)),
    (["stop"], ("stop",), ("", True)),
    (["text"], (), ("text", False)),
])
def test_named_cases(parts: list[str], stops: tuple[str, ...], expected: tuple[str, bool]) -> None:
    assert streamed(parts, stops) == expected == cut("".join(parts), stops)


def test_random_texts_are_cut_as_letter_by_letter() -> None:
    draw = random.Random(1)
    hits = 0
    for _ in range(4000):
        text = "".join(draw.choices("abc", k=draw.randint(0, 14)))
        stops = tuple("".join(draw.choices("abc", k=draw.randint(1, 5))) for _ in range(draw.randint(0, 4)))
        parts, rest = [], text
        while rest:
            size = draw.randint(1, 4)
            parts.append(rest[:size])
            rest = rest[size:]
        result = streamed(parts, stops)
        assert result == cut(text, stops), (parts, stops)
        hits += result[1]
    assert 1000 < hits < 3900   # both outcomes were tried


def test_text_that_cannot_become_a_stop_string_is_not_held_back() -> None:
    finder = StopStrings(("\n\nUser:",))
    assert finder.push("a line\n") == ("a line", False)
    assert finder.push("b") == ("\nb", False)
    assert finder.flush() == ""
