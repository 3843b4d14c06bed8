"""The whole pipeline on the pocket model: QAT, export, inspect, re-read, one table. Run by `make demo`.

Each stage is the command a user would type; this script only calls them, reads the export back with the exporter's own
reader, and measures it with the code that measured the training run.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

from kilotok.quant.archs import load_model, load_tokenizer
from kilotok.quant.checkpoint import CheckpointReader, load_exported_model
from kilotok.quant.quality import Quality, measure_quality, pool
from kilotok.train.config import QATRecipe
from kilotok.train.data import heldout_rows
from kilotok.train.recipe import load_recipe
from kilotok.train.report import qat_table

RECIPE = Path(__file__).with_name("qat.yaml")


def stage(title: str, command: list[str]) -> None:
    """Run one command, echoed; leave with its status if it fails."""
    print(f"\n== {title}\n$ {' '.join(command)}", flush=True)
    began = time.time()
    status = subprocess.run([str(Path(sys.executable).with_name(command[0])), *command[1:]]).returncode
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write; an earlier demo there is replaced")
    parser.add_argument("overrides", nargs="*", help="recipe overrides, such as -- --trainer.max_steps 10")
    args = parser.parse_args()
    began = time.time()
    run, out = args.out / "run", args.out / "pocket-mxfp4"
    for old in (run, out):
        shutil.rmtree(old, ignore_errors=True)
    stage("1. QAT of the experts, distilled from the bf16 parent", ["train", "qat", str(RECIPE), "--run", str(run), *args.overrides])
    stage("2. Export with packed experts, compared with the run", ["kilotok", "export", str(run), str(out)])
    stage("3. What the directory holds", ["kilotok", "inspect", str(out)])
    print("\n== 4. The export, re-read from its bytes and measured again", flush=True)
    recipe = load_recipe(QATRecipe, path=run / "recipe.yaml", overrides=[])
    meta = json.loads((run / "meta.json").read_text())
    reread = measure_export(out, recipe=recipe)
    trained = {d: q["perplexity"] for d, q in meta["qat"].items()}
    for domain, q in reread.items():
        print(f"   {domain:<8} perplexity {q.perplexity:.4f}, in training {trained[domain]:.4f}")
    largest = max(abs(q.perplexity / trained[d] - 1) for d, q in reread.items())
    if largest > 1e-5:   # the same weights and operations; only the order of fp32 sums may differ
        raise SystemExit(f"error: the export measures {largest:.1e} away from the trained model, more than fp32 rounding. Please report this.")
    meta["qat"] = {d: q.to_json() for d, q in reread.items()}
    print(f"\n{qat_table(meta)}")
    files = CheckpointReader(Path(recipe.model)).num_bytes, CheckpointReader(out).num_bytes
    print(f"files: {files[0]:,} bytes -> {files[1]:,} bytes; QAT column measured on {out}; all domains pooled: "
          f"perplexity {pool(list(reread.values())).perplexity:.4f}; {time.time() - began:.0f} s in all")


if __name__ == "__main__":
    main()
