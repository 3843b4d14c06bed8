"""GGUF files as sources: weights bit for bit, the order of rotary rows, quantized blocks, config, tokenizer, and what is refused."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from tolerances import assert_equal
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from kilotok.quant.archs.gguf import IN_A_LAYER, WHOLE_MODEL, read_gguf
from kilotok.train.build_config import BuildRecipe
from kilotok.train.build_moe import run_build
from kilotok.train.recipe import load_recipe

POCKET = Path(__file__).parents[2] / "recipes" / "pocket" / "model"
gguf = pytest.importorskip("gguf", reason="the package gguf is not installed (a development extra)")
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16


def dense_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=4096, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM, max_position_embeddings=256, initializer_range=0.15, tie_word_embeddings=True, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5e4}, bos_token_id=1, eos_token_id=2, pad_token_id=0)).eval()


def rows_in_gguf(heads: int) -> list[int]:
    """Row of the Hugging Face weight that stands at each place in the file: a rotary pair lies side by side."""
    return [h * HEAD_DIM + j * HEAD_DIM // 2 + i for h in range(heads) for i in range(HEAD_DIM // 2) for j in range(2)]


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write the model as a GGUF file; `extra` sets metadata on the writer, `quantized` names tensors stored as Q4_1."""

    def write_file(
        model: LlamaForCausalLM, *, architecture: str = "llama", pre: str = "smollm", extra: Callable[[Any], None] = lambda w: None,
        tensors: dict[str, np.ndarray] | None = None, quantized: tuple[str, ...] = (),
    ) -> Path:
        path, config = tmp_path / "model.gguf", model.config
        writer = gguf.GGUFWriter(path, architecture)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_rope_dimension_count(HEAD_DIM)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        tokenizer = json.loads((POCKET / "tokenizer.json").read_text())
        special = {t["id"] for t in tokenizer["added_tokens"]}
        names = sorted({**tokenizer["model"]["vocab"], **{t["content"]: t["id"] for t in tokenizer["added_tokens"]}}.items(), key=lambda item: item[1])
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list([name for name, _ in names])
        writer.add_token_types([3 if i in special else 1 for i in range(len(names))])
        writer.add_token_merges([" ".join(m) for m in tokenizer["model"]["merges"]])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_pad_token_id(0)
        writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}")
        extra(writer)
        state = {k: v.detach().numpy() for k, v in model.state_dict().items()}
        found = {name: state[ours] for name, ours in WHOLE_MODEL.items() if ours != "lm_head.weight"}
        for layer in range(config.num_hidden_layers):
            for part, ours in IN_A_LAYER.items():
                found[f"blk.{layer}.{part}.weight"] = state[f"model.layers.{layer}.{ours}.weight"]
            for part, heads in (("attn_q", HEADS), ("attn_k", KV_HEADS)):
                found[f"blk.{layer}.{part}.weight"] = found[f"blk.{layer}.{part}.weight"][rows_in_gguf(heads)]
        for name, values in {**found, **(tensors or {})}.items():
            if name in quantized:
                kind = gguf.GGMLQuantizationType.Q4_1
                writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
            else:
                writer.add_tensor(name, np.ascontiguousarray(values))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write_file


def test_weights_and_config_come_out_as_they_went_in(write: Callable[..., Path]) -> None:
    model = dense_model()
    found = read_gguf(write(model)).model
    for name, weight in model.state_dict().items():
        assert_equal(found.state_dict()[name], weight, what=name)
    got, expected = found.config.to_dict(), model.config.to_dict()
    not_in_a_gguf = ("dtype", "architectures", "initializer_range")
    assert {k: (got[k], v) for k, v in expected.items() if got[k] != v and k not in not_in_a_gguf} == {}
    ids = torch.arange(3, 60)[None]
    assert_equal(found(input_ids=ids).logits, model(input_ids=ids).logits)


def test_q4_1_blocks_are_scale_times_code_plus_minimum(write: Callable[..., Path]) -> None:
    """A block of 32 weights: fp16 scale, fp16 minimum, 16 bytes whose low nibbles are the first 16 codes."""
    name = "blk.1.ffn_up.weight"
    path = write(dense_model(), quantized=(name,))
    (raw,) = (t for t in gguf.GGUFReader(path).tensors if t.name == name)
    blocks = np.asarray(raw.data).reshape(-1, 20)
    scale, minimum = (blocks[:, i: i + 2].copy().view(np.float16).astype(np.float32) for i in (0, 2))
    codes = np.concatenate((blocks[:, 4:] & 15, blocks[:, 4:] >> 4), axis=1).astype(np.float32)
    expected = torch.from_numpy(scale * codes + minimum).view(128, 64)
    assert_equal(read_gguf(path).model.state_dict()["model.layers.1.mlp.up_proj.weight"], expected)


def test_an_untied_head_is_read(write: Callable[..., Path]) -> None:
    head = np.arange(4096 * 64, dtype=np.float32).reshape(4096, 64) / 1e5
    found = read_gguf(write(dense_model(), tensors={"output.weight": head})).model
    assert found.config.tie_word_embeddings is False
    assert_equal(found.state_dict()["lm_head.weight"], torch.from_numpy(head))


TEXTS = ["def f(x):\n    return x + 12\n", "In 1984 , 3.5 % of 1,000  people", "a\n\n\n12", "  7\t8",
         "\u4f60\u597d \u00bd caf\u00e9 \U0001f600", "<|im_start|>user\nhi<|im_end|>", ""]


def test_the_tokenizer_gives_the_ids_of_the_one_it_came_from(write: Callable[..., Path]) -> None:
    """The pocket's own tokenizer splits every digit off, as `smollm` says; with `gpt-2` a blank run before a digit is cut elsewhere."""
    own, read = AutoTokenizer.from_pretrained(POCKET), read_gguf(write(dense_model())).tokenizer
    for text in TEXTS:
        assert read(text)["input_ids"] == own(text)["input_ids"], text
        assert read.decode(read(text)["input_ids"]) == text
    assert (read.eos_token_id, read.pad_token_id, read.bos_token_id) == (2, 0, 1)
    assert read.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<|im_start|>user\nhi<|im_end|>\n"


def test_the_digit_rule_is_the_file_s(write: Callable[..., Path]) -> None:
    own, read = AutoTokenizer.from_pretrained(POCKET), read_gguf(write(dense_model(), pre="gpt-2")).tokenizer
    assert read("a    12")["input_ids"] != own("a    12")["input_ids"]
    assert read("def f(x):")["input_ids"] == own("def f(x):")["input_ids"]


def test_build_moe_takes_a_gguf_file(write: Callable[..., Path], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("def add(a, b):\n    return a + b\n" * 40)
    source = {"domain": "text", "path": str(text)}
    recipe = tmp_path / "build.yaml"
    recipe.write_text(yaml.safe_dump({
        "source": str(write(dense_model())), "out": str(tmp_path / "out"), "rows": 2, "noise": 0.0, "heal": {"accelerator": "cpu"},
        "data": {"sequence_length": 32, "heldout_rows": 2, "train": [source], "heldout": [source]}}))
    record = run_build(load_recipe(BuildRecipe, path=recipe, overrides=[]))
    assert record["source"]["kind"] == "GGUF" and len(record["source"]["sha256"]) == 64 and record["source"]["gguf"]
    assert record["check"]["argmax_agreement"] == 1.0 and record["stages"]["built"]["quality"]["text"]["kl"] < 1e-6
    assert json.loads((tmp_path / "out" / "config.json").read_text())["rope_parameters"]["rope_theta"] == 5e4


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"architecture": "qwen3"}, "architecture must be llama; got 'qwen3'"),
    ({"pre": "llama-bpe"}, "of kind 'llama-bpe'"),
    ({"extra": lambda w: w.add_add_bos_token(True)}, "add_bos_token True"),
    ({"extra": lambda w: w.add_rope_scaling_factor(8.0)}, r"llama\.rope\.scaling\.factor: scaled rotary positions"),
    ({"tensors": {"blk.0.attn_q.bias": np.zeros(64, dtype=np.float32)}}, r"tensor 'blk\.0\.attn_q\.bias' is no part of a dense Llama"),
    ({"tensors": {"blk.0.ffn_up.weight": np.zeros((64, 64), dtype=np.float32)}}, "do not fit its own metadata"),
]


@pytest.mark.parametrize(("how", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_files_of_another_kind_are_refused(how: dict[str, Any], message: str, write: Callable[..., Path]) -> None:
    with pytest.raises((NotImplementedError, ValueError), match=message):
        read_gguf(write(dense_model(), **how))


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, write: Callable[..., Path]) -> None:
    path = write(dense_model())
    path.write_bytes(path.read_bytes()[:2_000])
    with pytest.raises(ValueError, match="cannot be read as GGUF"):
        read_gguf(path)
    path.write_bytes(b"PK\x03\x04" * 100)
    with pytest.raises(ValueError, match="cannot be read as GGUF"):
        read_gguf(path)


def test_without_the_gguf_package_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(NotImplementedError, match="pip install gguf"):
        read_gguf(tmp_path / "x.gguf")
