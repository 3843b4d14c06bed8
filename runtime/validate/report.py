"""The report on disk: JSON with every figure and request, Markdown and HTML with the same tables."""

import json
from pathlib import Path

from ...quant.checkpoint import write_atomically
from .html import render_html
from .tables import Report, Table, tables, verdict


def write_report(report: Report, *, directory: Path) -> Path:
    """Write report.json, report.md and report.html, each in one step, over an older report; the path of the HTML file."""
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / "report.json", text=json.dumps(report, indent=1, allow_nan=False) + "\n")
    write_atomically(directory / "report.md", text=render_markdown(report) + "\n")
    write_atomically(directory / "report.html", text=render_html(report))
    return directory / "report.html"


def summary_markdown(report: Report) -> str:
    """The verdict as a Markdown table."""
    table = Table(title="", header=("", "value", "remark"), rows=tuple(verdict(report)))
    return "\n".join([*_table_lines(table), *(f"FAILED: {failure}" for failure in report["failures"])])


def render_markdown(report: Report) -> str:
    """The whole report, without the single requests."""
    lines = [f"# Validation of {_cell(report['provenance']['model'])}", "", summary_markdown(report)]
    for table in tables(report):
        lines += ["", f"## {table.title}", "", *_table_lines(table)]
        if table.note:
            lines += ["", _cell(table.note)]
    return "\n".join(lines)


def _table_lines(table: Table) -> list[str]:
    widths = [max(3, *(len(_cell(row[i])) for row in (table.header, *table.rows))) for i in range(len(table.header))]
    # long remarks would stretch every row of their column
    widths = [min(w, 40) for w in widths]

    def line(cells: tuple[str, ...]) -> str:
        return "| " + " | ".join(_cell(c).ljust(w) for c, w in zip(cells, widths, strict=True)) + " |"

    return [line(table.header), "|" + "|".join("-" * (w + 2) for w in widths) + "|", *(line(row) for row in table.rows)]


def _cell(text: str) -> str:
    """Text that cannot end a cell, a line or become HTML."""
    for character, replacement in (("\\", "\\\\"), ("|", "\\|"), ("<", "&lt;"), ("\r", " "), ("\n", " ")):
        text = text.replace(character, replacement)
    return text
