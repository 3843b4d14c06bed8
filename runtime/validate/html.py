"""The report as one HTML file: verdict, plots, every table. No script, and nothing is loaded from anywhere."""

from html import escape

from . import plots
from .stats import reason_of
from .tables import Report, Table, tables, verdict

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2228; background: #ffffff; max-width: 72rem; margin: 0 auto; padding: 1.5rem; }
h1 { font-size: 1.6rem; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem; border-bottom: 1px solid #d4dae0; padding-bottom: .25rem; }
p { margin: .4rem 0; max-width: 60rem; }
.note, .made { color: #4d5864; font-size: .9rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(14rem, 1fr)); gap: .8rem; margin: 1.2rem 0; padding: 0; list-style: none; }
.cards li { border: 1px solid #d4dae0; border-top: 4px solid #1f5a99; border-radius: 4px; padding: .7rem .9rem; background: #f8fafc; }
.cards li.good { border-top-color: #2b7a4b; }
.cards li.bad { border-top-color: #b3261e; background: #fdf1f0; }
.cards .label { display: block; color: #4d5864; }
.cards .value { display: block; font-size: 1.5rem; font-weight: 600; }
.cards .remark { display: block; color: #4d5864; font-size: .85rem; overflow-wrap: anywhere; }
.failures { border-left: 4px solid #b3261e; background: #fdf1f0; padding: .6rem 1rem; }
figure { margin: 1.2rem 0; }
figure svg { display: block; width: 100%; max-width: 62rem; height: auto; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid #e4e8ec; }
th { color: #4d5864; font-weight: 600; }
td { overflow-wrap: anywhere; min-width: 3.2rem; }
tr.pooled td { font-weight: 600; }
summary { cursor: pointer; margin: 1rem 0 .5rem; }
"""


def render_html(report: Report) -> str:
    """The whole report. All text of the report is escaped; characters beyond ASCII become references, whatever reads the file."""
    made = report["provenance"]
    body = [f"<h1>Validation of {escape(made['model'])}</h1>",
            f'<p class="made">{escape(made["date"])} &middot; {escape(made["device"])} &middot; kilotok {escape(made["versions"]["kilotok"])}</p>',
            _cards(report), _failures(report), *(f"<figure>{svg}</figure>" for svg in _plots(report)),
            *(_section(table) for table in tables(report)), _requests(report)]
    head = ('<meta charset="utf-8">\n<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>Validation of {escape(made['model'])}</title>\n<style>{STYLE}</style>")
    content = "\n".join(filter(None, body))
    page = f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{content}\n</body>\n</html>\n'
    return page.encode("ascii", "xmlcharrefreplace").decode("ascii")


def _cards(report: Report) -> str:
    kinds = {"yes": "good", "NO": "bad"}
    return '<ul class="cards">' + "".join(
        f'<li class="{kinds.get(value, "plain")}"><span class="label">{escape(label)}</span><span class="value">{escape(value)}</span>'
        f'<span class="remark">{escape(remark)}</span></li>' for label, value, remark in verdict(report)) + "</ul>"


def _failures(report: Report) -> str:
    return "".join(f'<p class="failures">{escape(failure)}</p>' for failure in report["failures"])


def _plots(report: Report) -> list[str]:
    drawn = []
    if all(reason_of(figure) is None for figure in report["acceptance"].values()):
        drawn += [plots.acceptance_plot(report["acceptance"]), plots.position_plot(report["acceptance"]["greedy"])]
    return [*drawn, plots.speed_plot(report["speed"]), plots.first_token_plot(report["speed"])]


def _section(table: Table) -> str:
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return f"<section><h2>{escape(table.title)}</h2>{note}{_table(table)}</section>"


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(h)}</th>' for h in table.header)
    rows = "".join(f"<tr{_row_class(row)}>{''.join(f'<td>{escape(c)}</td>' for c in row)}</tr>\n" for row in table.rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{rows}</tbody></table></div>'


def _row_class(row: tuple[str, ...]) -> str:
    return ' class="pooled"' if "all" in row[:2] else ""


def _requests(report: Report) -> str:
    rows = []
    for r in report["requests"]:
        decode = r["rounds"][1:]   # the first is the prefill
        rows.append((r["prompt_id"], r["domain"], r["mode"], str(r["prompt_tokens"]), str(len(r["token_ids"])), str(len(decode)),
                     str(sum(d for d, *_ in decode)), str(sum(a for _, a, *_ in decode)),
                     f"{r['first_token_s'] * 1e3:.1f}", f"{r['total_s'] * 1e3:.1f}", r["finish_reason"]))
    table = Table(title="Requests", rows=tuple(rows), header=("prompt", "domain", "mode", "prompt tokens", "tokens", "decode rounds", "drafted", "accepted",
                                                              "first token ms", "total ms", "end"))
    return f"<section><h2>Requests</h2><details><summary>All {len(rows)} measured requests</summary>{_table(table)}</details></section>"
