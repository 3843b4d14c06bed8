"""What a directory becomes when it is served, and the directories that are refused, each with its reason."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import export_experts, save_tiny_moe
from safetensors.torch import load_file, save_file
from tolerances import FP32_EPS, Bound, assert_equal, assert_within
from transformers import AutoTokenizer, OlmoeConfig, OlmoeForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM

from kilotok.dflash.checkpoint import DRAFT_METADATA, target_record, write_draft
from kilotok.dflash.config import DraftConfig
from kilotok.dflash.drafter import DFlashDrafter
from kilotok.dflash.model import DraftModel
from kilotok.quant.archs import load_model
from kilotok.quant.checkpoint import load_exported_model, sha256_of_weights
from kilotok.runtime.archs import graph_of
from kilotok.runtime.graph import ModelGraph
from kilotok.runtime.loading import load_served
from kilotok.runtime.weights import load_executor

FP32 = Bound(maximum=64 * FP32_EPS, rms=16 * FP32_EPS, reason="fp32 sums in another order, through all layers")
PLAIN: dict[str, Any] = {"name": None, "use_draft": True, "device": "cpu", "dtype": None}


def add_draft(out: Path, *, target: Path | None = None, **changes: Any) -> Path:
    """A random draft in out/dflash, made for `target` (None: for out itself)."""
    shape = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
             "vocab_size": 4096, "target_layer_ids": (1, 0), "num_target_layers": 2, "mask_token_id": 3, "sliding_window": 16, **changes}
    model = DraftModel(DraftConfig(**shape))
    model.initialize(generator=torch.Generator().manual_seed(0), final_norm_D=torch.ones(shape["hidden_size"]))
    (out / "dflash").mkdir()
    write_draft(out / "dflash", model, metadata={"target": target_record(target or out)})
    return out / "dflash"


@pytest.fixture(scope="session")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two exports of one random parent, and the parent."""
    root = tmp_path_factory.mktemp("exports")
    parent = save_tiny_moe(root / "parent")
    return {"parent": parent, "tiny": export_experts(parent, root / "tiny"), "other": export_experts(parent, root / "other", move=0.05)}


@pytest.fixture
def out(exports: dict[str, Path], tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(exports["tiny"], tmp_path / "served-model"))


def change_json(path: Path, **changes: Any) -> None:
    """None removes a key."""
    raw = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))


def remove_tensor(directory: Path, name: str) -> None:
    state = load_file(directory / "model.safetensors")
    del state[name]
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})


# ---- what is served


def test_without_a_draft(out: Path) -> None:
    served = load_served(out, **PLAIN)
    sha256 = sha256_of_weights(out)
    assert served.make_drafter is None and served.name == "served-model" and served.max_length == 512 and served.executor.max_length == 512
    assert served.fingerprint == f"{sha256[:12]}-float32"
    rule = served.description.pop("column_rule")
    assert rule.startswith("tiles of 8 columns, cache chunks of 128, a token in ")
    assert served.description.pop("executor_reason") == "the persistent one does not run: the device is cpu"
    assert served.description == {
        "executor": "reference (plain torch)", "device": "cpu", "dtype": "float32", "model": "served-model", "weights_sha256": sha256, "max_length": 512,
        "draft": "draft: none in dflash/; plain decoding", "threads": torch.get_num_threads()}
    assert served.tokenizer("def f(x):")["input_ids"] == AutoTokenizer.from_pretrained(out)("def f(x):")["input_ids"]
    assert served.executor.open().read([5, 6]).features_TF.shape == (2, 0)  # type: ignore[attr-defined]


def test_the_executor_computes_with_the_packed_experts(exports: dict[str, Path]) -> None:
    model = load_exported_model(exports["tiny"], dtype=torch.float32)
    ids = torch.randint(4, 4096, (40,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, parent = model(ids[None]).logits[0], load_model(exports["parent"], dtype=torch.float32)(ids[None]).logits[0]
    executor = load_executor(exports["tiny"], device="cpu", dtype=torch.float32)
    assert_within(executor.open().read(ids.tolist()).logits_TV, expected, bound=FP32, what="logits")
    assert float((expected - parent).abs().max()) > 0.01   # quantization did change them
    for i, layer in enumerate(executor.weights.layers):
        experts = model.model.layers[i].mlp.experts  # type: ignore[union-attr, index]
        assert_equal(layer.gate_up, experts.gate_up_proj.detach(), bits=True)  # type: ignore[union-attr, operator]
        assert_equal(layer.down, experts.down_proj.detach(), bits=True)  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_with_a_draft_of_its_own(out: Path, dtype: str) -> None:
    draft_dir = add_draft(out)
    served = load_served(out, **{**PLAIN, "name": "tiny", "dtype": dtype})
    sha256 = sha256_of_weights(out)
    assert served.name == served.description["model"] == "tiny" and served.fingerprint == f"{sha256[:12]}-{dtype}" and served.description["dtype"] == dtype
    assert served.description["draft"] == f"draft {draft_dir}: distilled from these weights ({sha256[:12]}, scale_mode even)"
    step = served.executor.open().read([5, 6, 7])
    assert served.executor.taps == (1, 0)  # type: ignore[attr-defined]
    assert step.features_TF.shape == (3, 2 * 64) and step.logits_TV.dtype == getattr(torch, dtype)
    assert served.make_drafter is not None
    first, second = served.make_drafter(), served.make_drafter()
    assert isinstance(first, DFlashDrafter) and first is not second and first.model is second.model  # type: ignore[attr-defined]
    assert first.num_drafts == 7 and first.model.fc.weight.dtype == getattr(torch, dtype)
    first.observe(step.features_TF)
    assert first.logits(8).shape == (7, 4096)


def test_the_draft_can_be_left_out_even_one_that_does_not_fit(out: Path, exports: dict[str, Path]) -> None:
    add_draft(out, target=exports["other"])
    served = load_served(out, **{**PLAIN, "use_draft": False})
    assert served.make_drafter is None and served.description["draft"] == "draft: left out (--no-draft); plain decoding"


def test_a_draft_of_another_tool_is_taken_by_its_shapes_and_the_line_says_so(out: Path) -> None:
    draft_dir = add_draft(out)
    (draft_dir / DRAFT_METADATA).unlink()
    served = load_served(out, **PLAIN)
    assert served.make_drafter is not None
    assert served.description["draft"] == f"draft {draft_dir}: no {DRAFT_METADATA}, so whether it was made for this target is not known; its shapes fit"


@pytest.mark.parametrize(("generation", "config", "expected"), [
    ([2, 0], 7, {2, 0}), (5, 7, {5}), (None, 7, {7}), (None, None, set()), ("no file", [7, 8], {7, 8})])
def test_end_tokens(out: Path, generation: Any, config: Any, expected: set[int]) -> None:
    change_json(out / "config.json", eos_token_id=config)
    if generation == "no file":
        (out / "generation_config.json").unlink()
    else:
        change_json(out / "generation_config.json", eos_token_id=generation)
    assert load_served(out, **PLAIN).eos_ids == expected


# ---- drafts that do not fit


def refused(directory: Path, error: type[Exception], message: str, **changes: Any) -> None:
    with pytest.raises(error, match=message):
        load_served(directory, **{**PLAIN, **changes})


def test_a_draft_for_other_weights(out: Path, exports: dict[str, Path]) -> None:
    draft_dir = add_draft(out, target=exports["other"])
    mine, theirs = sha256_of_weights(exports["other"])[:12], sha256_of_weights(out)[:12]
    refused(out, ValueError, f"^draft: {draft_dir} was distilled from other \\(weights {mine}\\); {out} has weights {theirs}\\. "
                             r"Distill a draft for this target: train dflash-distill\.$")


def test_a_draft_for_another_scale_mode(out: Path, exports: dict[str, Path], tmp_path: Path) -> None:
    draft_dir = add_draft(out, target=export_experts(exports["parent"], tmp_path / "floor", scale_mode="floor"))
    refused(out, ValueError, f"^draft: {draft_dir} was distilled from a target with scale_mode floor; {out} has even\\. ")


def test_a_draft_whose_taps_were_changed(out: Path) -> None:
    draft_dir = add_draft(out)
    raw = json.loads((draft_dir / "config.json").read_text())
    change_json(draft_dir / "config.json", dflash_config={**raw["dflash_config"], "target_layer_ids": [0, 1]})
    refused(out, ValueError,
            rf"^draft: {draft_dir}: config\.json taps layers \[0, 1\], the draft was trained on \[1, 0\] \({DRAFT_METADATA}\)\. Restore config\.json\.$")


@pytest.mark.parametrize(("changes", "name", "mine", "theirs"), [
    ({"hidden_size": 48}, "hidden_size", 48, 64), ({"vocab_size": 8192}, "vocab_size", 8192, 4096), ({"num_target_layers": 3}, "num_target_layers", 3, 2)])
def test_a_draft_of_other_shapes(out: Path, changes: dict[str, int], name: str, mine: int, theirs: int) -> None:
    add_draft(out, **changes)
    refused(out, ValueError, rf"^draft: .* is for a target with {name} {mine}; .* has {theirs}\. ")


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_an_incomplete_draft(out: Path, missing: str) -> None:
    (add_draft(out) / missing).unlink()
    refused(out, FileNotFoundError, rf"no {'safetensors file' if missing.startswith('model') else missing}\. Give the directory of a DFlash draft head\.$")


# ---- directories that cannot be served


@pytest.mark.parametrize("family", ["olmoe", "qwen2_moe"])
def test_a_family_that_is_exported_but_does_not_run(family: str, tmp_path: Path, exports: dict[str, Path]) -> None:
    shape: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "num_experts": 2,
                             "num_experts_per_tok": 1, "vocab_size": 4096, "intermediate_size": 32, "moe_intermediate_size": 32,
                             "shared_expert_intermediate_size": 32, "pad_token_id": 0, "eos_token_id": 2}
    config, model = (OlmoeConfig, OlmoeForCausalLM) if family == "olmoe" else (Qwen2MoeConfig, Qwen2MoeForCausalLM)
    model(config(**shape)).to(torch.bfloat16).save_pretrained(tmp_path / "parent")
    AutoTokenizer.from_pretrained(exports["parent"]).save_pretrained(tmp_path / "parent")
    out = export_experts(tmp_path / "parent", tmp_path / "out")
    refused(out, NotImplementedError,
            f"^{out}: the reference executor runs qwen3_moe, mixtral; got model_type '{family}'\\. Other families need one file in runtime/archs/; ")


@pytest.mark.parametrize(("key", "value"), [
    ("mlp_only_layers", [1]), ("decoder_sparse_step", 2), ("use_sliding_window", True), ("attention_bias", True), ("hidden_act", "gelu"),
    ("rope_parameters", {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}), ("rope_scaling", {"type": "linear", "factor": 2.0})])
def test_a_variant_that_does_not_run(exports: dict[str, Path], key: str, value: Any) -> None:
    config = json.loads((exports["tiny"] / "config.json").read_text())
    with pytest.raises(NotImplementedError, match=f"^here: {key} is {re.escape(repr(value))}; the reference executor runs Qwen3-MoE with experts in every "):
        graph_of({**config, key: value}, where="here")


def test_the_graph_of_a_config_old_and_new() -> None:
    new = {"model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24,
           "num_local_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True, "rms_norm_eps": 1e-5, "vocab_size": 100,
           "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "max_position_embeddings": 77, "tie_word_embeddings": True}
    graph = ModelGraph(hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=24, num_experts=5, experts_per_token=3, expert_hidden=32,
                       normalize_router_weights=True, rms_eps=1e-5, rope_theta=5e5, vocab_size=100, max_length=77, tied_head=True)
    assert graph_of(new, where="here") == graph
    old = {k: v for k, v in new.items() if k not in ("num_local_experts", "rope_parameters")} | {"num_experts": 5, "rope_theta": 5e5, "rope_scaling": None}
    assert graph_of(old, where="here") == graph
    bare = {k: v for k, v in old.items() if k not in ("head_dim", "norm_topk_prob", "tie_word_embeddings")}
    found = graph_of(bare, where="here")
    assert (found.head_dim, found.normalize_router_weights, found.tied_head) == (16, False, False)
    for key in ("rope_theta", "num_experts"):
        with pytest.raises(ValueError, match=rf"^here: no {key}.*\. The config is incomplete\.$"):
            graph_of({k: v for k, v in old.items() if k != key}, where="here")


def test_missing_and_damaged_files(out: Path, tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", FileNotFoundError, rf"^{tmp_path / 'nowhere'}: no such directory\. Give a directory written by `kilotok export`\.$")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", FileNotFoundError, rf"^{tmp_path / 'empty' / 'config.json'}: not there\. ")
    weights = out / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:1000])
    refused(out, ValueError, rf"^{weights}: cannot be read as safetensors ")
    weights.unlink()
    refused(out, FileNotFoundError, rf"^{out}: no model\.safetensors and no model\.safetensors\.index\.json\. ")
    weights.write_bytes(whole)
    for text, error in (("{", "not readable as JSON "), ("[1]", r"must be a JSON object; got list\. Restore it\.$")):
        (out / "config.json").write_text(text)
        refused(out, ValueError, rf"^{out / 'config.json'}: {error}")


@pytest.mark.parametrize(("name", "message"), [
    ("model.norm.weight", r"no tensor named model\.norm\.weight\. The checkpoint is incomplete or of another family\.$"),
    ("model.layers.1.mlp.experts.2.up_proj.weight_packed", r"model\.layers\.1\.mlp\.experts\.2\.up_proj\.weight_scale has no weight beside it\. "),
    ("model.layers.0.self_attn.q_norm.weight", r"no tensor named model\.layers\.0\.self_attn\.q_norm\.weight\. ")])
def test_a_missing_tensor_is_named(out: Path, name: str, message: str) -> None:
    remove_tensor(out, name)
    refused(out, ValueError, f"^{out}: {message}")


def test_weights_of_another_config_are_named_with_both_shapes(out: Path) -> None:
    change_json(out / "config.json", num_experts_per_tok=2, num_local_experts=3)
    refused(out, ValueError,
            rf"^{out}: model\.layers\.0\.mlp\.gate\.weight has shape \(4, 64\); its config\.json asks for \(3, 64\)\. They do not belong together\.$")
    change_json(out / "config.json", num_local_experts=4, moe_intermediate_size=16)
    refused(out, ValueError,
            rf"^{out}: model\.layers\.0\.mlp\.experts\.gate_up_proj has shape \(4, 64, 64\); its config\.json asks for \(4, 32, 64\)\. ")


def test_a_device_that_is_not_there(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused(out, ValueError, r"^device: cuda asked for, but torch sees no CUDA device\. Use cpu, or install a CUDA build of torch\.$", device="cuda")


@pytest.mark.parametrize("keep_format", ["bf16", "mxfp8"])
def test_layers_kept_at_higher_precision_are_served_as_they_were_trained(keep_format: str, tmp_path: Path) -> None:
    parent = save_tiny_moe(tmp_path / "parent")
    out = export_experts(parent, tmp_path / "out", quant={"keep": ["model.layers.1.*"], "keep_format": keep_format})
    model = load_exported_model(out, dtype=torch.float32)
    executor = load_executor(out, device="cpu", dtype=torch.float32)
    experts = dict(model.named_parameters())
    for i, layer in enumerate(executor.weights.layers):
        assert torch.equal(layer.gate_up, experts[f"model.layers.{i}.mlp.experts.gate_up_proj"])
        assert torch.equal(layer.down, experts[f"model.layers.{i}.mlp.experts.down_proj"])
