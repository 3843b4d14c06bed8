"""The numbers of the worked example are those of the code, and its page is linked."""

import doctest

from conftest import ROOT


def test_every_number_of_the_example_is_what_the_code_gives() -> None:
    failed, tried = doctest.testfile(str(ROOT / "recipes" / "DRAFTING.md"), module_relative=False)
    assert tried > 15 and failed == 0


def test_the_numbers_in_the_text_follow_from_those_of_the_example() -> None:
    text = (ROOT / "recipes" / "DRAFTING.md").read_text(encoding="utf-8")
    assert round(1000 / 2.690) == 372 and "against 372 without a draft" in text and "Plain decoding has 372" in text
    assert round(100 * (1064 / 1029 - 1)) == 3 and "leaving them out gains 3 %" in text
    assert round(100 * (1 - 277 / 372)) == 26 and "would lose a quarter" in text


def test_the_page_is_linked() -> None:
    for page in ("README.md", "recipes/README.md"):
        assert "DRAFTING.md" in (ROOT / page).read_text(encoding="utf-8")
