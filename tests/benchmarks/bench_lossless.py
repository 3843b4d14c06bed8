"""Whether drafting is invisible: every drafter, chains and trees, fixed and adaptive lengths, greedy and sampled, against plain decoding on one executor.

    python tests/benchmarks/bench_lossless.py EXPORT --draft recipes/pocket/draft [--prompts 100] [--tokens 128] [--executor auto] [--device auto]

EXPORT is a directory of `kilotok export`; its head need not fit, as the text must be the same under any. Drafters: that head (trained), one of random
weights, one that is never right and one that always is, and that head in the persistent kernel's own rounds (kernel: chains, sampled by temperature alone).
The prompts are the shortest of recipes/prompts, four domains in turns. One row a case: texts that are equal, rounds, proposals verified a round
(adaptive: over the rounds that drafted), tokens a round, times that drafting was switched off. Exit status 1 if any text differs. Times are not measured
here.
"""

import argparse
import json
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from lossless_cases import DRAFTERS, LENGTHS, SAMPLINGS, SHAPES, drafter_factory, how_to_draft, requests_for, run_all  # noqa: E402

from kilotok.dflash.checkpoint import read_draft  # noqa: E402
from kilotok.dflash.drafter import DFlashDrafter  # noqa: E402
from kilotok.dflash.generate import Drafter  # noqa: E402
from kilotok.dflash.metrics import acceptance_length  # noqa: E402
from kilotok.dflash.model import DraftModel  # noqa: E402
from kilotok.quant.archs import load_tokenizer  # noqa: E402
from kilotok.runtime.executors import choose_executor, load_best_executor  # noqa: E402
from kilotok.runtime.pacing import DraftLength  # noqa: E402

DOMAINS = ("code", "math", "chat", "agent")


def prompts_of(directory: Path, *, count: int) -> list[tuple[int, ...]]:
    tokenizer = load_tokenizer(directory)
    of_domain = []
    for domain in DOMAINS:
        rows = [json.loads(line)["prompt"] for line in (ROOT / "recipes" / "prompts" / f"{domain}.jsonl").read_text(encoding="utf-8").splitlines()]
        of_domain.append(sorted((tuple(tokenizer(row, add_special_tokens=False)["input_ids"]) for row in rows), key=len))
    found = [ids for together in zip(*of_domain, strict=False) for ids in together][:count]
    if len(found) < count:
        raise SystemExit(f"--prompts: there are {len(found)}; got {count}.")
    return found


def heads_of(draft_dir: Path, *, executor: object) -> dict[str, Callable[[], Drafter]]:
    embedding, head = executor.embedding_VD, executor.head_VD  # type: ignore[attr-defined]
    trained = read_draft(draft_dir, dtype=embedding.dtype).to(embedding.device)
    random = DraftModel(trained.config).eval()
    random.initialize(generator=torch.Generator().manual_seed(0), final_norm_D=trained.norm.weight.detach().float().cpu())
    random = random.to(embedding.device, embedding.dtype)

    def make(model: DraftModel) -> Callable[[], Drafter]:
        return lambda: DFlashDrafter(model, embedding_VD=embedding, head_VD=head)

    return {"trained": make(trained), "random": make(random)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("export", type=Path)
    parser.add_argument("--draft", type=Path, help="default: EXPORT/dflash")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--max-running", type=int, default=8)
    parser.add_argument("--executor", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--drafters", nargs="+", choices=(*DRAFTERS, "kernel"), default=(*DRAFTERS, "kernel"))
    args = parser.parse_args(argv)
    draft_dir = args.draft or args.export / "dflash"
    taps = read_draft(draft_dir, dtype=torch.float32).config.target_layer_ids
    choice = choose_executor(args.export, executor=args.executor, device=args.device)
    executor, reason = load_best_executor(args.export, choice, dtype=None, taps=taps, num_slots=args.max_running, may_fall_back=args.executor == "auto")
    prompts = prompts_of(args.export, count=args.prompts)
    said = executor.description
    print(f"{args.export.name}: {said['executor']}, {said['device']}, {said['dtype']}, because {reason}; torch {torch.__version__}, Python "
          f"{platform.python_version()}; {len(prompts)} prompts of {min(map(len, prompts))} to {max(map(len, prompts))} tokens, {args.tokens} tokens each, "
          f"{args.max_running} at a time\n")
    print("| drafter | shape | length | sampling | texts equal | rounds | verified a round | tokens a round | switched off |\n" + "|---" * 9 + "|")
    plain = {s: run_all(executor, requests_for(prompts, sampling=s, max_tokens=args.tokens), make_drafter=None, max_running=args.max_running)[0]
             for s in SAMPLINGS}
    heads, wrong = heads_of(draft_dir, executor=executor), 0

    def row(drafter: str, shape: str, length: DraftLength, sampling: str, *, runs: Any, expected: list[list[int]], make: Callable[[], Drafter]) -> int:
        asked = requests_for(prompts, sampling=sampling, max_tokens=args.tokens, **how_to_draft(shape, length))
        texts, rounds, state = run_all(runs, asked, make_drafter=make, max_running=args.max_running)
        equal = sum(a == b for a, b in zip(texts, expected, strict=True))
        every = [one for of_text in rounds for one in of_text if not one.is_prefill]
        print(f"| {drafter} | {shape} | {length} | {sampling} | {equal} of {len(texts)} | {len(every)} | {state.verify_length or 0:.2f} | "
              f"{acceptance_length(every):.2f} | {state.switched_off} |", flush=True)
        return len(texts) - equal

    for drafter in (d for d in args.drafters if d != "kernel"):
        for shape in SHAPES:
            for length in LENGTHS:
                for sampling in SAMPLINGS:
                    make = drafter_factory(drafter, prompts=prompts, texts=plain[sampling], vocab_size=executor.head_VD.shape[0], heads=heads)
                    wrong += row(drafter, shape, length, sampling, runs=executor, expected=plain[sampling], make=make)
    if "kernel" in args.drafters:
        own, _ = load_best_executor(args.export, choice, dtype=None, taps=taps, num_slots=args.max_running, may_fall_back=args.executor == "auto",
                                    draft_dir=draft_dir)
        if not getattr(own, "has_rounds", False):
            print(f"| kernel | not run: {own.description['executor']} has no rounds of its own for this head |" + " |" * 7)
        else:
            for sampling in ("greedy", "temperature"):
                asked = requests_for(prompts, sampling=sampling, max_tokens=args.tokens)
                expected = run_all(own, asked, make_drafter=None, max_running=args.max_running)[0]
                wrong += sum(row("kernel", "chain", length, sampling, runs=own, expected=expected, make=heads["trained"]) for length in LENGTHS)
    print(f"\n{'all texts are equal' if not wrong else f'{wrong} texts DIFFER'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
