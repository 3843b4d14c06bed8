"""The whole product on the pocket model: QAT, export, inspect, distill, serve, validate, one table. Run by `make demo`.

Each stage is the command a user would type; this script only calls them, asks the server one question, reads the export back
with the exporter's own reader, and puts the figures that the commands wrote into one table.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import openai
import torch

from kilotok.quant.archs import load_model, load_tokenizer
from kilotok.quant.checkpoint import CheckpointReader, load_exported_model
from kilotok.quant.quality import Quality, measure_quality, pool
from kilotok.train.config import QATRecipe
from kilotok.train.data import heldout_rows
from kilotok.train.recipe import load_recipe

HERE = Path(__file__).parent
QUESTION = "A farmer has 3 fields with 12 cows in each. How many cows are there?"
PROMPTS = 6   # a domain, in every way to decode: eight ways with the draft, of which the three with trees take the most time
DOMAINS = ("code", "math", "chat", "agent", "all")


def installed(command: str) -> str:
    """A command of this environment, whatever else is on the PATH."""
    return str(Path(sys.executable).with_name(command))


def stage(title: str, command: list[str]) -> None:
    """Run one command, echoed; leave with its status if it fails."""
    print(f"\n== {title}\n$ {' '.join(command)}", flush=True)
    began = time.time()
    status = subprocess.run([installed(command[0]), *command[1:]]).returncode
    if status:
        raise SystemExit(status)
    print(f"   {time.time() - began:.0f} s", flush=True)


def measure_export(out: Path, *, recipe: QATRecipe) -> dict[str, Quality]:
    """Held-out quality of the exported directory, read from its packed bytes."""
    t = recipe.trainer
    rows_by_domain = heldout_rows(recipe.data, tokenizer=load_tokenizer(out))
    model = load_exported_model(out, dtype=torch.float32)
    parent = load_model(Path(recipe.model), dtype=torch.float32)
    return {d: measure_quality(model, parent=parent, rows=rows, rows_per_batch=t.batch_size, chunk_rows=recipe.loss.chunk_rows)
            for d, rows in rows_by_domain.items()}


def check_export(out: Path, run: Path) -> dict[str, Quality]:
    """Measure the export and compare with what training measured; leave if they differ by more than rounding."""
    print("\n== 4. The export, re-read from its bytes and measured again", flush=True)
    reread = measure_export(out, recipe=load_recipe(QATRecipe, path=run / "recipe.yaml", overrides=[]))
    trained = {d: q["perplexity"] for d, q in json.loads((run / "meta.json").read_text())["qat"].items()}
    for domain, q in reread.items():
        print(f"   {domain:<8} perplexity {q.perplexity:.4f}, in training {trained[domain]:.4f}")
    largest = max(abs(q.perplexity / trained[d] - 1) for d, q in reread.items())
    if largest > 1e-5:   # the same weights and operations; only the order of fp32 sums may differ
        raise SystemExit(f"error: the export measures {largest:.1e} away from the trained model, more than fp32 rounding. Please report this.")
    return reread


def ask(out: Path) -> None:
    """Start `kilotok serve`, ask one question through the openai client, with and without the draft, and stop it."""
    command = ["kilotok", "serve", str(out), "--port", "0"]
    print(f"\n== 6. Serve it, and ask\n$ {' '.join(command)}", flush=True)
    with subprocess.Popen([installed(command[0]), *command[1:]], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            for line in server.stdout:
                print(f"   {line}", end="")
                if "listening on" in line:
                    break
            else:
                raise SystemExit("error: the server ended before it was ready")
            client = openai.OpenAI(base_url=f"{line.split()[-1]}/v1", api_key="unused")
            print(f"   question: {QUESTION}")
            for decode in ("draft", "plain"):
                answer = client.chat.completions.create(model=out.name, messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=48,
                                                        extra_body={"decode": decode})
                print(f"   {decode}: {answer.choices[0].message.content!r}")
        finally:
            server.terminate()


def number(figure: dict[str, Any], key: str, form: str) -> str:
    """A figure of the report; a dash where it says `not measured`."""
    return format(figure[key], form) if key in figure else "-"


def table(meta: dict[str, Any], reread: dict[str, Quality], report: dict[str, Any], *, files: dict[str, int], report_path: Path) -> str:
    """The one table: what QAT, the draft and the server did, by domain."""
    rtn = {d: Quality(**{k: q[k] for k in ("tokens", "kl", "cross_entropy", "parent_cross_entropy")}) for d, q in meta["round_to_nearest"].items()}
    rtn["all"], qat = pool(list(rtn.values())), {**reread, "all": pool(list(reread.values()))}
    speeds = {mode: report["speed"][mode] for mode in ("draft", "plain", "plain one column")}
    lines = [f"{'held-out':<8} | {'perplexity':^29} | {'KL to parent':^16} | {'acceptance length':^17} | {'tokens/s':^25} | speed-up over",
             f"{'':<8} | {'parent':>9} {'rounded':>9} {'QAT':>9} | {'rounded':>8} {'QAT':>7} | {'raw':>7} {'no loops':>9} | "
             f"{'draft':>7} {'plain':>7} {'1-column':>9} | the faster plain"]
    for d in DOMAINS:
        a = report["acceptance"]["greedy"][d]
        rates = [number(speeds[mode][d]["decode"], "tokens_per_s", ".1f") for mode in speeds]
        up = number(report["speed_up"]["greedy"][d], "speed_up", ".2f")
        lines.append(f"{d:<8} | {qat[d].parent_perplexity:>9.3f} {rtn[d].perplexity:>9.3f} {qat[d].perplexity:>9.3f} | "
                     f"{rtn[d].kl:>8.4f} {qat[d].kl:>7.4f} | {number(a['raw'], 'length', '.2f'):>7} {number(a['repeats_cut'], 'length', '.2f'):>9} | "
                     f"{rates[0]:>7} {rates[1]:>7} {rates[2]:>9} | {up}x")
    counts = "; ".join(f"{kind} {c['equal']} of {c['total']}" for kind, c in report["lossless"].items())
    lines.append(f"lossless: {'yes' if report['ok'] else 'NO'} (texts equal with and without the draft: {counts})")
    lines.append(f"sizes: parent {files['parent']:,} bytes, export {files['export']:,}, draft {files['draft']:,}")
    lines.append("rounded: the parent's experts rounded to nearest, untrained; no loops: text cut at the third repeat of an 8-gram; "
                 "plain: one token a step under the column rule; 1-column: without it")
    lines.append(f"report: {report_path}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write; an earlier demo there is replaced")
    parser.add_argument("--distill", nargs="*", default=[], help="overrides of distill.yaml, written without the dashes: trainer.max_steps=10")
    parser.add_argument("--validate", nargs="*", default=[], help="options of kilotok validate, written so: prompts-per-domain=2")
    parser.add_argument("overrides", nargs="*", help="overrides of qat.yaml, after --: -- --trainer.max_steps 10")
    args = parser.parse_args()
    began = time.time()
    run, out, draft_run = args.out / "run", args.out / "pocket-mxfp4", args.out / "draft-run"
    for old in (run, out, draft_run):
        shutil.rmtree(old, ignore_errors=True)
    stage("1. QAT of the experts, distilled from the bf16 parent", ["train", "qat", str(HERE / "qat.yaml"), "--run", str(run), *args.overrides])
    stage("2. Export with packed experts, compared with the run", ["kilotok", "export", str(run), str(out)])
    stage("3. What the directory holds", ["kilotok", "inspect", str(out)])
    reread = check_export(out, run)
    stage("5. Distill the draft head on the export's own answers, from the shipped draft",
          ["train", "dflash-distill", str(HERE / "distill.yaml"), "--target", str(out), "--run", str(draft_run), *(f"--{o}" for o in args.distill)])
    ask(out)
    stage(f"7. Validate: lossless, acceptance, speed, quality ({PROMPTS} prompts a domain; `kilotok validate` alone asks 13: "
          "trees are slow on the reference executor, which reads them path by path)",
          ["kilotok", "validate", str(out), "--prompts-per-domain", str(PROMPTS), "--max-tokens", "32", "--quality-tokens", "256",
           *(f"--{o}" for o in args.validate)])
    report = json.loads((out / "validation" / "report.json").read_text())
    files = {"parent": CheckpointReader(HERE / "model").num_bytes, "export": CheckpointReader(out).num_bytes,
             "draft": CheckpointReader(out / "dflash").num_bytes}
    meta = json.loads((run / "meta.json").read_text())
    print(f"\n== The pocket, end to end\n{table(meta, reread, report, files=files, report_path=out / 'validation' / 'report.html')}\n"
          f"{time.time() - began:.0f} s in all", flush=True)


if __name__ == "__main__":
    main()
