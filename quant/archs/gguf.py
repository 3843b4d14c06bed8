"""A dense Llama-class model out of one GGUF file: weights, config, tokenizer and chat template.

transformers can read such files too, but only with `accelerate` installed, with other results from version to version (5.17 takes
the begin token for the end token), and without the digit rule of the `smollm` tokenizer. This reader takes the file's own words.

What differs from a Hugging Face checkpoint: names; quantized tensors (Q4_1 and the like), which are dequantized to fp32 exactly as
the format says; and the rows of q_proj and k_proj. GGUF pairs the two halves of a rotary pair in neighbouring rows, transformers
keeps all first halves before all second halves: row 2 i + j of a head is row i + j * head_dim / 2 there.
"""

import json
import re
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

WHOLE_MODEL = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", "output.weight": "lm_head.weight"}
IN_A_LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj"}
CONTROL, USER_DEFINED = 3, 4                                           # tokenizer.ggml.token_type
SPLITS_DIGITS = {"smollm": True, "gpt-2": False, "default": False}     # tokenizer.ggml.pre -> every digit is a piece of its own


class DenseModel(NamedTuple):
    """A model in fp32, in evaluation mode, and its tokenizer."""

    model: nn.Module
    tokenizer: Any


def read_gguf(path: Path) -> DenseModel:
    """The Llama-class model of a GGUF file.

    Errors: FileNotFoundError, ValueError for a file that is no GGUF, NotImplementedError for another architecture, tensor or tokenizer
        and where the package `gguf` is missing.
    """
    if not path.is_file():
        raise FileNotFoundError(f"source: no file at {path.absolute()}. Give a GGUF file, or a Hugging Face directory.")
    try:
        import gguf
    except ImportError as error:
        raise NotImplementedError(f"source: {path}: GGUF files are read with the package `gguf`, which is not installed. "
                                  "Run `pip install gguf`, or give a Hugging Face directory.") from error
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, IndexError) as error:
        raise ValueError(f"source: {path} cannot be read as GGUF ({error}). It is truncated or another kind of file: get it again.") from error
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    names = {t.name for t in reader.tensors}
    config: Any = gguf_config(fields, tied="output.weight" not in names, where=str(path))
    state: dict[str, Tensor] = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy()).float()
        name = _parameter_name(tensor.name, where=str(path))
        if name.endswith("q_proj.weight"):
            values = _halves_apart(values, heads=config.num_attention_heads)
        elif name.endswith("k_proj.weight"):
            values = _halves_apart(values, heads=config.num_key_value_heads)
        state[name] = values
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"source: {path}: its tensors do not fit its own metadata: {error}") from error
    return DenseModel(model.eval(), gguf_tokenizer(fields, where=str(path)))


def gguf_config(fields: dict[str, Any], *, tied: bool, where: str) -> LlamaConfig:
    """The transformers config that the metadata describes."""
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise NotImplementedError(f"source: {where}: the architecture must be llama; got {architecture!r}. Only dense Llama-class models are read.")
    scaled = sorted(k for k in fields if k.startswith("llama.rope.scaling"))
    if scaled:
        raise NotImplementedError(f"source: {where}: {scaled[0]}: scaled rotary positions are not read from a GGUF. Use the Hugging Face checkpoint.")

    def get(key: str) -> Any:
        if f"llama.{key}" not in fields:
            raise ValueError(f"source: {where}: no llama.{key} in its metadata. The file is incomplete: get it again.")
        return fields[f"llama.{key}"]

    heads = get("attention.head_count")
    return LlamaConfig(
        vocab_size=len(fields["tokenizer.ggml.tokens"]), hidden_size=get("embedding_length"), intermediate_size=get("feed_forward_length"),
        num_hidden_layers=get("block_count"), num_attention_heads=heads, num_key_value_heads=fields.get("llama.attention.head_count_kv", heads),
        head_dim=fields.get("llama.rope.dimension_count", get("embedding_length") // heads), max_position_embeddings=get("context_length"),
        rms_norm_eps=_short(get("attention.layer_norm_rms_epsilon")),
        rope_parameters={"rope_type": "default", "rope_theta": fields.get("llama.rope.freq_base", 10000.0)}, tie_word_embeddings=tied,
        bos_token_id=fields.get("tokenizer.ggml.bos_token_id"), eos_token_id=fields.get("tokenizer.ggml.eos_token_id"),
        pad_token_id=fields.get("tokenizer.ggml.padding_token_id"))


def gguf_tokenizer(fields: dict[str, Any], *, where: str) -> Any:
    """The byte-level BPE tokenizer of the metadata, with its chat template."""
    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or pre not in SPLITS_DIGITS or fields.get("tokenizer.ggml.add_bos_token"):
        raise NotImplementedError(
            f"source: {where}: the tokenizer must be byte-level BPE (gpt2) of kind {', '.join(SPLITS_DIGITS)} that adds no begin token; "
            f"got {kind!r} of kind {pre!r}, add_bos_token {bool(fields.get('tokenizer.ggml.add_bos_token'))}. Use the Hugging Face checkpoint.")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    split = [{"type": "Digits", "individual_digits": True}] if SPLITS_DIGITS[pre] else []
    added = [{"id": i, "content": tokens[i], "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": kind == CONTROL}
             for i, kind in enumerate(fields.get("tokenizer.ggml.token_type", [])) if kind in (CONTROL, USER_DEFINED)]
    described = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*split, byte_level]}, "post_processor": None, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "", "end_of_word_suffix": "", "fuse_unk": False,
                  "byte_fallback": False, "ignore_merges": False, "vocab": {t: i for i, t in enumerate(tokens)},
                  "merges": [m.split(" ") for m in fields["tokenizer.ggml.merges"]]}}
    special = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id", "pad_token": "padding_token_id"}
    chosen = {name: tokens[fields[f"tokenizer.ggml.{key}"]] for name, key in special.items() if f"tokenizer.ggml.{key}" in fields}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tokenizer.json"
        file.write_text(json.dumps(described), encoding="utf-8")
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file), clean_up_tokenization_spaces=False, **chosen)
    tokenizer.chat_template = fields.get("tokenizer.chat_template")
    return tokenizer


def _parameter_name(name: str, *, where: str) -> str:
    match = re.fullmatch(r"blk\.(?P<layer>\d+)\.(?P<part>\w+)\.weight", name)
    if name in WHOLE_MODEL:
        return WHOLE_MODEL[name]
    if match is None or match["part"] not in IN_A_LAYER:
        raise NotImplementedError(f"source: {where}: tensor {name!r} is no part of a dense Llama without biases. Only those are read.")
    return f"model.layers.{match['layer']}.{IN_A_LAYER[match['part']]}.weight"


def _halves_apart(weight: Tensor, *, heads: int) -> Tensor:
    """Rows of each head from neighbouring pairs to first halves, then second halves."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _short(value: float) -> float:
    """The shortest decimal that is the same fp32 number: 9.999999747378752e-06 was written as 1e-05."""
    return float(f"{value:.7g}")
