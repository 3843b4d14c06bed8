"""The artifacts that later work starts from: the mixture of experts, a short QAT of it, and the exported MXFP4 directory.

OUT/moe (bf16), OUT/run (QAT run), OUT/mxfp4 (export). Seeded. On one H200 the build took 135 s and a QAT step 0.32 s; the whole was not
timed. Each stage is the command a user would type.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent


def stage(title: str, module: str, *arguments: str) -> None:
    """Run one command of kilotok, echoed; leave with its status if it fails."""
    command = [sys.executable, "-m", f"kilotok.{module}.cli", *arguments]
    print(f"\n== {title}\n$ {'train' if module == 'train' else 'kilotok'} {' '.join(arguments)}", flush=True)
    began = time.time()
    status = subprocess.run(command).returncode
    if status:
        raise SystemExit(status)
    print(f"   {time.time() - began:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", required=True, help="SmolLM2-135M-Instruct: the GGUF file or a Hugging Face directory")
    parser.add_argument("--out", type=Path, required=True, help="folder to write; it must not exist")
    parser.add_argument("--qat-steps", type=int, default=100, help="steps of 16,384 tokens (default 100)")
    parser.add_argument("--build", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of build.yaml: heal.max_steps=0")
    parser.add_argument("--qat", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of qat.yaml: trainer.batch_size=32")
    args = parser.parse_args()
    if args.out.exists():
        raise SystemExit(f"error: {args.out}: exists already. Choose another --out, or remove it.")
    began = time.time()
    moe, run, exported = (str(args.out / name) for name in ("moe", "run", "mxfp4"))
    stage("1. The mixture of experts", "train", "build-moe", str(HERE / "build.yaml"), "--source", args.source, "--out", moe, *(f"--{o}" for o in args.build))
    stage("2. A short QAT", "train", "qat", str(HERE / "qat.yaml"), "--model", moe, "--run", run, "--trainer.max_steps", str(args.qat_steps),
          "--trainer.checkpoint_every_steps", str(args.qat_steps), *(f"--{o}" for o in args.qat))
    stage("3. Export", "runtime", "export", run, exported)
    stage("4. What the directory holds", "runtime", "inspect", exported)
    print(f"\n{args.out}: {time.time() - began:.0f} s in all", flush=True)


if __name__ == "__main__":
    main()
