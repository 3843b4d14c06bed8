"""Acceptance of a draft head whose matrices are held in fewer bits, beside the bytes a round would read of them.

    python tests/benchmarks/bench_draft_precision.py EXPORT [--draft DIR] [--heldout FILE] [--prompts 10] [--tokens 64]

The head's matrices are rounded to what a format would hold and computed with in the executor's dtype, on the reference executor: so acceptance is that of
the format, and no time is. Formats: bf16, FP8 with a factor a row (fp8_channel, here), FP8 by 128 x 128 tile, MXFP8 and MXFP4 (quant/formats). Norms,
sinks and the target's embedding and LM head stay as they are; what the head reads of the target's LM head a round is the same in every row, and is not
in the bytes. Acceptance length is over decode rounds of all 7 drafts, raw and with text cut at the third repeat of an 8-gram; prompts are
DRAFT/heldout.jsonl or FILE (as of `kilotok validate --prompts`), N a domain. bf16 is the figure to compare with, in the same run.
"""

import argparse
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from lossless_cases import SAMPLINGS, run_all, sampling_of  # noqa: E402

from kilotok.dflash.checkpoint import read_draft  # noqa: E402
from kilotok.dflash.drafter import DFlashDrafter  # noqa: E402
from kilotok.dflash.generate import Round  # noqa: E402
from kilotok.dflash.metrics import acceptance_length, without_repeats  # noqa: E402
from kilotok.dflash.model import DraftModel  # noqa: E402
from kilotok.quant.archs import load_tokenizer  # noqa: E402
from kilotok.quant.formats import find_format  # noqa: E402
from kilotok.runtime.engine import Request  # noqa: E402
from kilotok.runtime.validate.prompts import choose, read_prompts  # noqa: E402
from kilotok.runtime.weights import load_executor  # noqa: E402

E4M3_MAX = 448.0


@dataclass(frozen=True)
class Precision:
    name: str
    fake_quant: Callable[[Tensor], Tensor]
    num_bytes: Callable[[tuple[int, ...]], int]


def fp8_channel(weight: Tensor) -> Tensor:
    """E4M3 with an fp32 factor for each output row."""
    w = weight.float()
    scale = (w.abs().amax(1, keepdim=True) / E4M3_MAX).clamp_min(torch.finfo(torch.float32).tiny)
    return (w / scale).to(torch.float8_e4m3fn).float() * scale


def of_format(name: str) -> Precision:
    fmt = find_format(name)

    def fake_quant(weight: Tensor) -> Tensor:
        return fmt.fake_quant(weight, name="draft", scale_mode="even", dim=-1, dtype=torch.float32, faults=None)

    return Precision(name, fake_quant, fmt.num_bytes)


PRECISIONS = (
    Precision("bf16", lambda w: w.bfloat16().float(), lambda shape: 2 * shape[0] * shape[1]),
    Precision("fp8_channel", fp8_channel, lambda shape: shape[0] * shape[1] + 4 * shape[0]),
    of_format("fp8_block"), of_format("mxfp8"), of_format("mxfp4"))


def rounded(draft_dir: Path, precision: Precision) -> tuple[DraftModel, int, float]:
    """(the head with its matrices rounded, their bytes in the format, the relative error of the weights in RMS)."""
    draft = read_draft(draft_dir, dtype=torch.float32)
    num_bytes, error, total = 0, 0.0, 0.0
    for module in draft.modules():
        if isinstance(module, nn.Linear):
            weight = module.weight.data
            found = precision.fake_quant(weight)
            num_bytes += precision.num_bytes(tuple(weight.shape))
            error += float((found - weight).square().sum())
            total += float(weight.square().sum())
            module.weight.data = found
    return draft, num_bytes, (error / total) ** 0.5


def prompts_of(export: Path, path: Path, *, per_domain: int) -> list[tuple[str, tuple[int, ...]]]:
    """Held-out prompts of the export, spread evenly over each domain, as the server would encode them."""
    tokenizer, found = load_tokenizer(export), []
    for row in choose(read_prompts(path), per_domain=per_domain):
        text = row.prompt
        if text is None:
            tools = list(row.tools) if row.tools is not None else None
            text = tokenizer.apply_chat_template(list(row.messages or ()), tools=tools, tokenize=False, add_generation_prompt=True)
        found.append((row.domain, tuple(tokenizer(text, add_special_tokens=row.prompt is not None)["input_ids"])))
    return found


def length_of(rounds: Sequence[Sequence[Round]], *, cut: bool) -> float:
    return acceptance_length([r for of_text in rounds for r in (without_repeats(of_text) if cut else of_text)])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("export", type=Path)
    parser.add_argument("--draft", type=Path, help="default: EXPORT/dflash")
    parser.add_argument("--heldout", type=Path, help="default: DRAFT/heldout.jsonl")
    parser.add_argument("--prompts", type=int, default=10, help="a domain")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--samplings", nargs="+", choices=SAMPLINGS, default=SAMPLINGS)
    parser.add_argument("--formats", nargs="+", choices=[p.name for p in PRECISIONS], default=[p.name for p in PRECISIONS])
    args = parser.parse_args(argv)
    draft_dir = args.draft or args.export / "dflash"
    config = read_draft(draft_dir, dtype=torch.float32).config
    executor = load_executor(args.export, device="cpu", dtype=torch.float32, taps=config.target_layer_ids)
    prompts = prompts_of(args.export, args.heldout or draft_dir / "heldout.jsonl", per_domain=args.prompts)
    domains = tuple(dict.fromkeys(domain for domain, _ in prompts))
    print(f"{args.export.name} with {draft_dir.name}: CPU ({platform.processor() or platform.machine()}), torch {torch.__version__}, Python "
          f"{platform.python_version()}, {torch.get_num_threads()} threads, reference executor, fp32; draft: {config.num_hidden_layers} layers, hidden "
          f"{config.hidden_size}, {config.num_drafts} drafts; {args.prompts} prompts a domain, {args.tokens} tokens each. Speed is not measured.\n")
    print("| matrices | bytes | weight error | sampling | " + " | ".join(domains) + " | all | repeats cut | rounds |\n" + "|---" * (len(domains) + 7) + "|")
    eos = frozenset[int]()
    for precision in (p for p in PRECISIONS if p.name in args.formats):
        draft, num_bytes, error = rounded(draft_dir, precision)
        for sampling in args.samplings:
            asked = [Request(prompt=ids, max_tokens=args.tokens, sampling=sampling_of(sampling, n), eos_ids=eos, decode="draft")
                     for n, (_, ids) in enumerate(prompts)]
            start = time.perf_counter()
            _, rounds, _ = run_all(executor, asked, make_drafter=lambda model=draft: DFlashDrafter(model, embedding_VD=executor.embedding_VD,
                                                                                                  head_VD=executor.head_VD), max_running=1)
            of_domain = [length_of([r for r, (d, _) in zip(rounds, prompts, strict=True) if d == domain], cut=False) for domain in domains]
            print(f"| {precision.name} | {num_bytes:,} | {error:.4f} | {sampling} | " + " | ".join(f"{x:.3f}" for x in of_domain)
                  + f" | {length_of(rounds, cut=False):.3f} | {length_of(rounds, cut=True):.3f} | {sum(not r.is_prefill for t in rounds for r in t)} |",
                  flush=True)
            print(f"# {precision.name} {sampling}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
