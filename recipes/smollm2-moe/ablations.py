"""The recipe of SmolLM2-MoE's draft against others at one small budget: same answers, seed and steps, one option changed at a time.

    python recipes/smollm2-moe/ablations.py --target build/smollm2/mxfp4 --parent build/smollm2/moe \\
        --responses runs/smollm2-draft/responses --out runs/ablations

The rows `specforge` and `speculators` are those projects' published settings (SpecForge 0.2.0, speculators 0.9.0) run by this trainer, not their
code. What it has no option for and is left as here: the final norm starts from the target's (theirs: ones), and speculators' labels are the target's
likeliest token (here: the answer's, which is the same in greedy answers). Runs that have finished are not run again.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

RECIPE = Path(__file__).with_name("distill.yaml")
OURS = ["--optim.warmup_steps=25"]
SPECFORGE = ["--optim.kind=adamw", "--optim.adamw_lr=6e-4", "--optim.betas=[0.9,0.999]", "--optim.adamw_weight_decay=0", "--optim.warmup_steps=0",
             "--optim.warmup_ratio=0.04", "--optim.final_lr_ratio=0", "--loss.ce_weight=1", "--loss.kl_weight=0", "--loss.decay_gamma=7",
             "--loss.anchors=512", "--loss.anchors_by=token",
             "--draft.sliding_window=null", "--draft.mask_embedding=false"]
SPECULATORS = ["--optim.muon_lr=1e-3", "--optim.muon_weight_decay=0.1", "--optim.adamw_lr=1e-3", "--optim.adamw_weight_decay=0.01",
               "--optim.betas=[0.9,0.999]", "--optim.schedule=linear", "--optim.warmup_steps=0", "--optim.warmup_ratio=0.01", "--optim.final_lr_ratio=0",
               "--loss.ce_weight=1", "--loss.kl_weight=0", "--loss.weighting=dpace", "--loss.dpace_alpha=0.5", "--loss.anchors=512", "--loss.anchors_by=token",
               "--draft.sliding_window=2048", "--draft.causal=always", "--draft.mask_embedding=false", "--draft.target_layer_ids=[1,14,26]"]
ROWS: dict[str, tuple[str, list[str]]] = {
    "ours": ("this recipe", OURS),
    "anchors-512": ("512 anchors a row instead of 4096", [*OURS, "--loss.anchors=512"]),
    "adamw-1e-3": ("AdamW at 1e-3 instead of Muon", [*OURS, "--optim.kind=adamw", "--optim.adamw_lr=1e-3"]),
    "adamw-3e-3": ("AdamW at 3e-3 instead of Muon", [*OURS, "--optim.kind=adamw"]),
    "parent": ("states and distribution of the bf16 parent", OURS),
    "specforge": ("SpecForge's published settings", SPECFORGE),
    "speculators": ("speculators' published settings", SPECULATORS),
}


def command(name: str, args: argparse.Namespace) -> list[str]:
    run = args.out / name
    overrides = [*ROWS[name][1], *([f"--features_from={args.parent}"] if name == "parent" else [])]
    return [sys.executable, "-m", "kilotok.train.cli", "dflash-distill", str(RECIPE), f"--target={args.target}", f"--run={run}", f"--out={run / 'draft'}",
            f"--data.responses={args.responses}", f"--trainer.max_steps={args.steps}", f"--trainer.checkpoint_every_steps={args.steps}",
            "--data.heldout_prompts=1", "--data.heldout_tree_budget=null", *(f"--{o}" for o in args.set), *overrides,
            *(["--resume"] if run.is_dir() else [])]


def table(args: argparse.Namespace) -> str:
    """Acceptance lengths by the walk, a row a run."""
    lines = []
    for name, (title, _) in ROWS.items():
        path = args.out / name / "meta.json"
        meta = json.loads(path.read_text()) if path.is_file() else {}
        if "after" not in meta:
            lines.append(f"| {title} | {'not run' if name not in args.rows else 'not finished'} |")
            continue
        domains = list(meta["after"])
        if not lines or not lines[0].startswith("| settings"):
            lines[:0] = [f"| settings | {' | '.join(domains)} | untrained |", "|---" * (len(domains) + 2) + "|"]
        cells = " | ".join(f"{meta['after'][d]['walk']['acceptance_length']:.3f}" for d in domains)
        lines.append(f"| {title} | {cells} | {meta['before']['all']['walk']['acceptance_length']:.3f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--parent", type=Path, required=True, help="the bf16 model that the target was quantized from")
    parser.add_argument("--responses", type=Path, required=True, help="answers that all runs share; made by the first run where they are missing")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; the steps are the same, only slower")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE",
                        help="overrides of every run, such as trainer.accelerator=cpu; a row's own options go before them")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    waiting, failed = list(args.rows), []
    running: dict[str, subprocess.Popen[bytes]] = {}
    while waiting or running:
        while waiting and len(running) < args.jobs:
            name = waiting.pop(0)
            with (args.out / f"{name}.log").open("w") as log:
                running[name] = subprocess.Popen(command(name, args), stdout=log, stderr=subprocess.STDOUT)
            print(f"{name}: started", flush=True)
        for name, process in list(running.items()):
            try:
                status = process.wait(timeout=1)
            except subprocess.TimeoutExpired:
                continue
            del running[name]
            print(f"{name}: {'done' if status == 0 else f'failed with status {status}, see {args.out / name}.log'}", flush=True)
            failed += [name] if status else []
    print(table(args))
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
