"""Train the pocket model from nothing: corpus, tokenizer, weights, held-out bits per byte, samples.

    python recipes/pocket/pretrain.py recipes/pocket/pretrain.yaml --data_root DIR --out OUT

Writes OUT/corpus/ (reused when it is there), OUT/model/ (a Hugging Face checkpoint) and OUT/record.json.
bf16 weights with fp32 masters in the optimizer: what is evaluated is bit for bit what is saved.
"""

import argparse
import json
import math
import platform
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from transformers import AutoTokenizer, GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

sys.path.insert(0, str(Path(__file__).parent))
import corpus

# A prompt must not end in white space: the tokenizer joins a line break to the indentation that follows it.
SAMPLES = ["def is_prime(n):", "class Stack:\n    def __init__(self):", "import os\nimport sys\n\n\ndef main(argv):", "def read_file(path):"]
CHAT_SAMPLES = ["A farmer has 3 fields with 12 cows in each field. He sells 8 cows. How many cows does he have left?",
                "Tom buys 4 boxes of pens. Each box has 6 pens and costs $3. How much does he pay in total?",
                "Write a function to find the largest number in a list.", "What is a good way to learn a language?"]


class Batches:
    """Random windows of each domain's token stream, domains drawn by weight; the generator is keyed by (seed, step)."""

    def __init__(self, folder: Path, part: str, weights: dict[str, float], *, length: int, seed: int) -> None:
        self.streams = {d: torch.from_numpy(np.load(folder / f"tokens_{part}_{d}.npy").astype(np.int64)) for d in weights}
        self.weights = np.array(list(weights.values())) / sum(weights.values())
        self.length, self.seed = length, seed

    def rows(self, step: int, count: int) -> torch.Tensor:
        """int64 [count, length]."""
        rng = np.random.default_rng([self.seed, step])
        domains = list(self.streams)
        picked = []
        for d in rng.choice(len(domains), size=count, p=self.weights):
            stream = self.streams[domains[d]]
            start = int(rng.integers(0, len(stream) - self.length))
            picked.append(stream[start: start + self.length])
        return torch.stack(picked)


@torch.no_grad()
def bits_per_byte(model: Any, folder: Path, domains: list[str], *, part: str, length: int, max_tokens: int | None = None) -> dict[str, float]:
    """Held-out bits per byte of text by domain: tokens in windows of `length`."""
    counts = json.loads((folder / "corpus.json").read_text())
    device = next(model.parameters()).device
    result = {}
    for domain in domains:
        stream = torch.from_numpy(np.load(folder / f"tokens_{part}_{domain}.npy")[:max_tokens].astype(np.int64))
        nats, tokens = 0.0, 0
        starts = torch.arange(0, len(stream) - length - 1, length)   # the last, shorter window is left out
        windows = torch.stack([stream[s: s + length + 1] for s in starts])
        for rows in windows.split(16):
            rows = rows.to(device)
            logits = model(input_ids=rows[:, :-1]).logits.float()
            nats += float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum"))
            tokens += rows[:, 1:].numel()
        bytes_per_token = counts[domain][part]["bytes"] / counts[domain][part]["tokens"]
        result[domain] = nats / math.log(2) / tokens / bytes_per_token
    return result


def train(recipe: dict[str, Any], folder: Path, device: torch.device) -> tuple[Any, list[dict[str, Any]]]:
    """The trained bf16 model and its log."""
    cfg, shape = recipe["train"], dict(recipe["model"])
    torch.manual_seed(recipe["seed"])
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    end, stop = tokenizer.pad_token_id, tokenizer.eos_token_id
    theta = shape.pop("rope_theta")
    config = Qwen3MoeConfig(
        vocab_size=recipe["tokenizer"]["vocab_size"], intermediate_size=2 * shape["moe_intermediate_size"], norm_topk_prob=True,
        tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": theta}, output_router_logits=True,
        router_aux_loss_coef=cfg["router_aux_loss_coef"], use_cache=False, bos_token_id=None, eos_token_id=stop,
        pad_token_id=end, **shape)
    model: Any = Qwen3MoeForCausalLM(config)
    model.to(device, torch.bfloat16)
    params = list(model.parameters())
    masters = [p.detach().float().clone() for p in params]
    # norms and the (tied) embedding are not decayed: their scale is a choice of the data, not a memory of it
    decayed = [m.dim() >= 2 and m.shape[0] != config.vocab_size for m in masters]
    groups = [{"params": [m for m, d in zip(masters, decayed, strict=True) if d], "weight_decay": cfg["weight_decay"]},
              {"params": [m for m, d in zip(masters, decayed, strict=True) if not d], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=cfg["lr"], betas=tuple(cfg["betas"]), fused=device.type == "cuda")
    weights = {d: g["weight"] for d, g in recipe["corpus"].items()}
    batches = Batches(folder, "train", weights, length=cfg["sequence_length"] + 1, seed=recipe["seed"])
    log: list[dict[str, Any]] = []
    began = time.time()
    for step in range(cfg["max_steps"]):
        # warm up, hold, then fall linearly to zero over the last 40 %
        scale = min(1.0, (step + 1) / cfg["warmup_steps"], (cfg["max_steps"] - step) / (0.4 * cfg["max_steps"]))
        for group in optimizer.param_groups:
            group["lr"] = cfg["lr"] * scale
        rows = batches.rows(step, cfg["sequences_per_step"]).to(device, non_blocking=True)
        inputs, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        output = model(input_ids=inputs, labels=targets, shift_labels=targets)
        output.loss.backward()
        for master, p in zip(masters, params, strict=True):
            assert p.grad is not None
            master.grad, p.grad = p.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, cfg["max_grad_norm"])
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(params, masters)
        if (step + 1) % 100 == 0 or step == 0:
            print(f"step {step + 1} loss {float(output.loss):.4f} {time.time() - began:.0f} s", flush=True)
        if (step + 1) % cfg["eval_every"] == 0:
            held_out = bits_per_byte(model, folder, list(weights), part="heldout", length=cfg["sequence_length"])
            log.append({"step": step + 1, "loss": float(output.loss), "heldout_bits_per_byte": held_out, "seconds": time.time() - began})
            print("held out bits per byte", {d: round(v, 4) for d, v in held_out.items()}, flush=True)
    model.config.output_router_logits, model.config.use_cache = False, True
    model.config.router_aux_loss_coef = 0.001
    model.generation_config = GenerationConfig(eos_token_id=[stop, end], pad_token_id=end)
    return model, log


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--data_root", type=Path, help="folder that holds the corpus files of the recipe")
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="default: this Python's")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, help="reuse a corpus folder; default OUT/corpus")
    parser.add_argument("--corpus_only", action="store_true")
    parser.add_argument("--set", nargs="*", default=[], help="train.key=value")
    args = parser.parse_args()
    recipe = yaml.safe_load(args.recipe.read_text())
    for item in args.set:
        key, value = item.removeprefix("train.").split("=")
        if key not in recipe["train"]:
            raise SystemExit(f"--set {item}: no such key; one of {sorted(recipe['train'])}")
        recipe["train"][key] = yaml.safe_load(value)
    folder = args.corpus or args.out / "corpus"
    if not (folder / "corpus.json").exists():
        corpus.build(recipe, stdlib=args.stdlib, data_root=args.data_root, out=folder)
    print((folder / "corpus.json").read_text())
    if args.corpus_only:
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, log = train(recipe, folder, device)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    model.save_pretrained(args.out / "model")
    tokenizer.save_pretrained(args.out / "model")
    length, domains = recipe["train"]["sequence_length"], list(recipe["corpus"])
    record = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()}, "train": recipe["train"],
        "corpus": json.loads((folder / "corpus.json").read_text()), "log": log,
        "heldout_bits_per_byte": bits_per_byte(model, folder, domains, part="heldout", length=length),
        "train_bits_per_byte": bits_per_byte(model, folder, domains, part="train", length=length, max_tokens=300_000)}
    (args.out / "record.json").write_text(json.dumps(record, indent=2) + "\n")
    print({k: record[k] for k in ("heldout_bits_per_byte", "train_bits_per_byte")})
    prompts = SAMPLES + [tokenizer.apply_chat_template([{"role": "user", "content": c}], tokenize=False, add_generation_prompt=True)
                         for c in CHAT_SAMPLES]
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"].to(device)
        for sampling in ({"do_sample": False}, {"do_sample": True, "temperature": 0.7, "top_p": 0.95}):
            torch.manual_seed(recipe["seed"])
            text = model.generate(ids, max_new_tokens=160, **sampling)
            print("-" * 80 + f"\n{sampling}\n{tokenizer.decode(text[0])}", flush=True)


if __name__ == "__main__":
    main()
