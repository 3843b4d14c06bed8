"""The report's files: self-contained, escaped, the same figures in all three."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from kilotok.runtime.validate.client import Answer, rounds_of
from kilotok.runtime.validate.figures import cost, failures_of, summarize
from kilotok.runtime.validate.probes import MODES
from kilotok.runtime.validate.report import render_markdown, summary_markdown, write_report
from kilotok.runtime.validate.stats import not_measured

EVIL = '<script src="http://evil/x.js">&|"\'\\$x$ \u00e9'
DOMAINS = ("code", "math", EVIL)


def answers() -> list[Answer]:
    found = []
    for i, domain in enumerate(DOMAINS):
        for n in range(3):
            for m in MODES:
                drafted = {"draft": [[0, 0, 1], [7, 3, 4], [7, 1, 2], [7, 0, 1]], "tree": [[0, 0, 1], [15, 3, 4, 7], [15, 2, 3, 3]]}
                triples = drafted.get(m.decode, [[0, 0, 1]] * 8)
                ids = tuple(range(100 * i + n, 100 * i + n + 8))
                rounds = rounds_of(triples, token_ids=ids, where="x")
                first = 0.01 * (n + 1)
                last = first + 7 / (200 if m.decode == "draft" else 100 - i)
                found.append(Answer(prompt_id=f"{domain}-{n}", domain=domain, mode=m.name, prompt_tokens=9, token_ids=ids, rounds=rounds, first_text_tokens=1,
                                    first_token_s=first, last_token_s=last, total_s=1.0, finish_reason="length"))
    return found


def synthetic(*, no_draft: str | None = None) -> dict[str, Any]:
    measured = [a for a in answers() if no_draft is None or "plain" in a.mode]
    figures = summarize(measured, no_draft=no_draft)
    domains = {d: {"tokens": 100, "perplexity": 8.5, "parent_perplexity": 8.25, "kl": 0.0123} for d in (*DOMAINS, "all")}
    return {
        "ok": True, "failures": failures_of(figures), **figures, "quality": {"domains": domains, "parent": EVIL},
        "sizes": {"weight_files_bytes": 7_000_000, "packed_experts_bytes": not_measured("no packed expert in the files"), "draft_files_bytes": 1_234_567},
        "settings": {"prompts": EVIL, "max_tokens": 8}, "cost": cost(figures["speed"], price_per_hour=3.6),
        "provenance": {"model": EVIL, "device": EVIL, "date": "2026-01-01T00:00:00+00:00", "command": EVIL,
                       "export": {"parent": {"sha256": "abc"}}, "draft": None, "server": {"executor": EVIL}, "versions": {"kilotok": "0.1.0"}},
        "requests": [{**{name: getattr(a, name) for name in ("prompt_id", "domain", "mode", "prompt_tokens", "token_ids", "first_token_s", "total_s")},
                      "finish_reason": "length", "rounds": [[r.num_drafted, r.num_accepted, len(r.tokens)] for r in a.rounds]} for a in measured]}


class Page(HTMLParser):
    """Tags, ids and visible text; notices unbalanced tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.ids, self.attributes, self.cells = [], [], [], []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, k, v or "") for k, v in attrs]
        self.ids += [v for k, v in attrs if k == "id"]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "td":
            self.cells.append(data)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a report; drawing one takes two seconds."""
    return write_report(synthetic(), directory=tmp_path_factory.mktemp("new") / "deep").parent


@pytest.fixture
def page_text(written: Path) -> str:
    return (written / "report.html").read_text()


def test_html_refers_to_nothing_outside_and_runs_nothing(page_text: str) -> None:
    page = Page(page_text)
    assert page.open == [] and not set(page.tags) & {"script", "link", "img", "iframe", "object", "image"}
    for tag, name, value in page.attributes:
        assert not name.startswith("on"), (tag, name)
        if name in ("src", "href", "xlink:href"):
            assert value.startswith("#") and value[1:] in page.ids, (tag, name, value)
    urls = re.findall(r"url\((.*?)\)", page_text)
    assert urls and all(u[0] == "#" and u[1:] in page.ids for u in urls)
    without_evil = page_text.replace("http://evil", "")
    assert "http" not in without_evil and "@import" not in page_text and page_text.isascii()


def test_html_escapes_and_shows_what_it_is_given(page_text: str) -> None:
    page = Page(page_text)
    assert "<script" not in page_text and EVIL in page.cells
    assert ("svg", "role", "img") in page.attributes
    labels = [v for tag, name, v in page.attributes if (tag, name) == ("svg", "aria-label")]
    assert [v.partition(".")[0] for v in labels] == ["Acceptance length by domain", "Acceptance by position, greedy", "Decode speed by domain and mode",
                                                     "Time to the first token by domain and mode"]
    assert "greedy, raw: code 2.33" in labels[0] and f"{EVIL} 2.33" in labels[0]
    assert len(page.ids) == len(set(page.ids))
    assert page_text.count("<figure>") == 4


def test_the_same_figures_in_all_three_files(written: Path) -> None:
    read = json.loads((written / "report.json").read_text(), parse_constant=pytest.fail)
    assert read == json.loads(json.dumps(synthetic()))
    cells = Page((written / "report.html").read_text()).cells
    markdown = (written / "report.md").read_text()
    for text in ("3.50", "16.00"):
        assert text in cells and text in markdown, text
    for text in ("2.33", "0.667 (18/27)", "7,000,000 bytes", "1,234,567 bytes", "not measured: no packed expert in the files", "8.2500", "0.01230", "2.02x"):
        assert text in cells and text in markdown, text


def test_markdown_rows_are_whole() -> None:
    """No text of the report can end a cell or a row: every table is a rectangle."""
    blocks = [b.splitlines() for b in re.split(r"\n\s*\n", render_markdown(synthetic())) if b.startswith("|")]
    assert len(blocks) == 13
    for lines in blocks:
        assert len({len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) for line in lines}) == 1, lines[0]
    assert "<script" not in render_markdown(synthetic())


def test_summary_names_failures() -> None:
    report = synthetic()
    text = summary_markdown(report)
    assert re.search(r"\| lossless +\| yes +\| texts equal with and without draft: greedy 9/9, sampled 9/9", text)
    assert re.search(r"\| speed-up +\| 2\.0\dx +\| tokens/s of draft by those of plain", text) and "FAILED" not in text
    report["lossless"]["greedy"] = {**report["lossless"]["greedy"], "equal": 8,
                                    "differences": [{"prompt": "p", "position": 4, "token": 1, "reference_token": 2}]}
    report["failures"] = failures_of(report)
    text = summary_markdown(report)
    assert re.search(r"\| lossless +\| NO ", text)
    assert "FAILED: not lossless, greedy: 1 of 9 texts differ with a draft; first p at position 4: token id 1, token id 2 in plain" in text


def test_what_was_not_measured_is_said_and_not_drawn(tmp_path: Path) -> None:
    report = {**synthetic(no_draft="no draft head in x/dflash"), "quality": not_measured("no held-out row has a reference"),
              "cost": not_measured("no decode speed")}
    text = write_report(report, directory=tmp_path).read_text()
    assert text.count("<figure>") == 2 and "Acceptance by position" not in text
    cells = Page(text).cells
    assert cells.count("not measured: no draft head in x/dflash") == 10   # greedy and sampled: lossless, acceptance, trees, adaptive, speed-up
    assert "not measured: no held-out row has a reference" in cells and "not measured: no decode speed" in cells


def test_a_failed_write_leaves_the_older_report(tmp_path: Path) -> None:
    for name in ("report.html", "report.json", "report.md"):
        (tmp_path / name).write_text("old")
    with pytest.raises(ValueError, match="Out of range float values"):
        write_report({**synthetic(), "bad": float("nan")}, directory=tmp_path)
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == dict.fromkeys(("report.html", "report.json", "report.md"), "old")
