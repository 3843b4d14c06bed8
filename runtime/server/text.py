"""Text from tokens, as they come.

A token of a byte-level vocabulary is a run of bytes that may end inside a character. Its text is then not known yet: the
decoder writes U+FFFD for what is incomplete. So tokens are held back while their text ends in U+FFFD, and given out together
once it does not. A decoder may also treat the first token in its own way (no space before a first word), so the tokens given
out last are decoded again as context before the new ones. Work for a token does not grow with the text before it.

Bytes that are no UTF-8 at all would be held back for ever. Every token has a byte and no character more than four, so among
the last few tokens there is a place where no character is cut; it shows in that the texts of both sides add up to that
of the whole. What lies before it is given out. The result equals decoding all tokens at once.
"""

from typing import Any

MAX_HELD = 8    # tokens held back before a place to cut is looked for; an incomplete character has at most three
REPLACEMENT = "\ufffd"


class Detokenizer:
    """Turns the tokens of one answer into text; special tokens, and those the tokenizer lacks, have none."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._size = len(tokenizer)   # a model may have more tokens: rows that only fill up its embedding
        self._context: list[int] = []
        self._context_text = ""
        self._held: list[int] = []

    def push(self, token: int) -> str:
        """Text that this token completes."""
        if token in self._special or token >= self._size:
            return ""
        self._held.append(token)
        whole = self._decode(self._context + self._held)
        if not whole.endswith(REPLACEMENT):
            return self._give(len(self._held), whole)
        if len(self._held) < MAX_HELD:
            return ""
        count = self._cut(whole)
        return self._give(count, self._decode(self._context + self._held[:count]))

    def flush(self) -> str:
        """Text of what is held back, complete or not."""
        return self._give(len(self._held), self._decode(self._context + self._held)) if self._held else ""

    def _cut(self, whole: str) -> int:
        """The last number of held tokens that end with a character; all, if the decoder does not split at all."""
        for count in range(len(self._held) - 1, 0, -1):
            if self._decode(self._context + self._held[:count]) + self._decode(self._held[count:]) == whole:
                return count
        return len(self._held)

    def _give(self, count: int, whole: str) -> str:
        text = whole[len(self._context_text):]
        self._context, self._held = self._held[:count], self._held[count:]
        self._context_text = self._decode(self._context)
        return text

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


class StopStrings:
    """Cuts a text before the first stop string that is complete in it, holding back what may become one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Text that is free of stop strings, and whether one was found after it."""
        held = self._held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := held.find(stop)) >= 0]
        if found:
            _, start = min(found)   # the first to be complete, and of those the longest: the same however the text was cut into tokens
            self._held = ""
            return held[:start], True
        keep = next((n for n in range(min(len(held), self._longest - 1), 0, -1) if any(s.startswith(held[-n:]) for s in self._stops)), 0)
        self._held = held[len(held) - keep:]
        return held[:len(held) - keep], False

    def flush(self) -> str:
        """What was held back and became no stop string."""
        held, self._held = self._held, ""
        return held
