"""SmolLM2-MoE's draft head from the exported model on: its answers by several processes on all cards, then the training on the first.

    python recipes/smollm2-moe/draft.py --target build/smollm2/mxfp4 --run runs/smollm2-draft --jobs 4

A process that answers leaves half of a card idle: token by token it waits for its own launches. Each of `--jobs` takes a share of the batches
(`data.shard`), a card in turn, and at most its part of that card's memory. Batches are files, so whatever ends early goes on where it was: a share that fails
(the card was full for a moment) is made up for by one process with nearly the whole card, and the command can be given again. On one H200 a batch of 1,024
prompts took 17 s in one process and 37 s in each of four: 1.8 times as many answers. Eight on two H200s made 11,663 greedy answers in 139 s.
"""

import argparse
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

RECIPE = Path(__file__).with_name("distill.yaml")


def arguments(options: argparse.Namespace, *, share: str | None = None) -> list[str]:
    """Of the `train` command: of a share of the answers, or of the training that reads all of them."""
    more = [] if share is None else [f"--data.shard={share}"]
    if share is None and options.run.is_dir():
        more.append("--resume")
    return ["dflash-distill", str(RECIPE), f"--target={options.target}", f"--run={options.run}", f"--data.responses={options.responses}", *more,
            *(f"--{o}" for o in options.set)]


def answer(options: argparse.Namespace) -> None:
    """All answers, by several processes; what a process that failed has left is made by one at the end."""
    shares = [f"{k}/{options.jobs}" for k in range(1, options.jobs + 1)]
    options.responses.parent.mkdir(parents=True, exist_ok=True)
    cards = cards_of(os.environ, count=torch.cuda.device_count())
    part = 0.94 / math.ceil(options.jobs / max(1, len(cards)))
    running = [start(options, share, part=part, card=cards[k % len(cards)] if cards else None) for k, share in enumerate(shares)]
    failed = [share for share, process in zip(shares, running, strict=True) if process.wait()]
    if failed:
        print(f"answers: share {', '.join(failed)} left early ({last_words(options, failed[0])}); one process makes what is missing", flush=True)
        if status := start(options, "1/1", part=0.94).wait():
            print(f"error: answers: {last_words(options, '1/1')}", file=sys.stderr)
            raise SystemExit(status)


def cards_of(environment: Mapping[str, str], *, count: int) -> list[str]:
    """What CUDA_VISIBLE_DEVICES may name, of `count` cards."""
    named = environment.get("CUDA_VISIBLE_DEVICES")
    return [str(i) for i in range(count)] if named is None else [name.strip() for name in named.split(",")][:count]


def log_of(options: argparse.Namespace, share: str) -> Path:
    return Path(options.responses.parent / f"{options.responses.name}-{share.replace('/', '-of-')}.log")


def last_words(options: argparse.Namespace, share: str) -> str:
    lines = log_of(options, share).read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "its log is empty")


def start(options: argparse.Namespace, share: str, *, part: float, card: str | None = None) -> "subprocess.Popen[bytes]":
    """part: of the card's memory. card: None for the first."""
    log = log_of(options, share)
    print(f"answers: share {share}, log {log}", flush=True)
    environment = {**os.environ} if card is None else {**os.environ, "CUDA_VISIBLE_DEVICES": card}
    with log.open("w") as out:
        return subprocess.Popen([sys.executable, __file__, "--share", str(part), *arguments(options, share=share)], stdout=out, stderr=subprocess.STDOUT,
                                env=environment)


def run_share(part: float, args: list[str]) -> int:
    from kilotok.train.cli import main as train

    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(part)
    return train(args)


def main() -> None:
    if sys.argv[1:2] == ["--share"]:
        raise SystemExit(run_share(float(sys.argv[2]), sys.argv[3:]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="the exported model")
    parser.add_argument("--run", type=Path, required=True, help="of the training; the draft goes to TARGET/dflash")
    parser.add_argument("--responses", type=Path, help="answers; default: RUN-responses")
    parser.add_argument("--jobs", type=int, default=4, help="processes that answer at a time (default 4; four a card are about as many as it keeps busy)")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of distill.yaml: loss.anchors=2816")
    options = parser.parse_args()
    if options.jobs < 1:
        raise SystemExit(f"error: --jobs must be at least 1; got {options.jobs}.")
    options.responses = options.responses or options.run.with_name(options.run.name + "-responses")
    answer(options)
    raise SystemExit(subprocess.run([sys.executable, "-m", "kilotok.train.cli", *arguments(options)]).returncode)


if __name__ == "__main__":
    main()
