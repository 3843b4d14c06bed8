"""The shipped pocket model is what its README says."""

import json
import re
from pathlib import Path

import torch

from kilotok.quant.archs import load_config, load_model, load_tokenizer
from kilotok.quant.quality import measure_quality

ROOT = Path(__file__).parents[2]


def test_shape_size_and_divisibility(pocket: Path) -> None:
    config = load_config(pocket)
    assert config.model_type == "qwen3_moe" and config.num_experts == 8 and config.num_experts_per_tok == 2 and config.norm_topk_prob
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (256, 6, 8, 4, 32)
    for ranks in (1, 2, 4):   # tensor-parallel slices in whole MX blocks
        assert config.moe_intermediate_size % (32 * ranks) == 0 and config.hidden_size % (32 * ranks) == 0 and config.num_key_value_heads % ranks == 0
    model = load_model(pocket, dtype=torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) == 6_962_816
    assert (pocket / "model.safetensors").stat().st_size < 15_000_000


def test_tokenizer_is_lossless_and_its_template_has_tools(pocket: Path) -> None:
    tokenizer = load_tokenizer(pocket)
    assert len(tokenizer) == 4096 and tokenizer.mask_token == "<|mask|>"
    text = "def f(x):\n\treturn 3.14 * x  # caf\u00e9 \u4f60\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    turns = [{"role": "user", "content": "Hi"}]
    tools = [{"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}]
    rendered = tokenizer.apply_chat_template(turns, tools=tools, tokenize=False, add_generation_prompt=True)
    assert json.loads(re.findall(r"^\{.*\}$", rendered, flags=re.M)[0]) == tools[0] and rendered.endswith("<|im_start|>assistant\n")


def test_it_has_learned_its_domains(pocket: Path) -> None:
    """Perplexity on answers written for this project, far below what tokens alone give (4096) and than text in another order."""
    model, tokenizer = load_model(pocket, dtype=torch.float32), load_tokenizer(pocket)
    for domain, bound in (("math", 12), ("code", 25), ("agent", 15)):
        rows = [json.loads(line) for line in (ROOT / f"recipes/pocket/heldout/{domain}.jsonl").read_text().splitlines()]
        turns = [[{"role": "user", "content": r["prompt"]}, {"role": "assistant", "content": r["response"]}] for r in rows[:12]]
        texts = [tokenizer.apply_chat_template(t, tools=r.get("tools"), tokenize=False) for t, r in zip(turns, rows, strict=False)]
        ids = torch.tensor([i for t in texts for i in (*tokenizer(t)["input_ids"], tokenizer.pad_token_id)])
        shuffled = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))]
        inside = measure_quality(model, parent=model, rows=[ids[:513]]).perplexity
        assert inside < bound < 100 < measure_quality(model, parent=model, rows=[shuffled[:513]]).perplexity, domain


def test_the_records_quote_the_run_that_made_it() -> None:
    record = json.loads((ROOT / "recipes/pocket/record.json").read_text())
    readme = (ROOT / "recipes/pocket/README.md").read_text()
    for key, title in (("heldout_bits_per_byte", "held out"), ("train_bits_per_byte", "training text")):
        row = " | ".join(f"{record[key][d]:.3f}" for d in ("code", "math", "chat", "agent"))
        assert f"| {title} | {row} |" in readme
