"""`train build-moe`: a dense Llama becomes a mixture of experts that computes the same, is moved by noise and healed; what is refused."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tolerances import assert_equal
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from kilotok.quant.archs import load_model, load_tokenizer
from kilotok.quant.archs.split_dense import RouterInputs, router_rows
from kilotok.train import build_moe
from kilotok.train.build_config import BuildRecipe
from kilotok.train.build_moe import LOGIT_BOUND, compare_logits, run_build
from kilotok.train.recipe import load_recipe, option_names

ROOT = Path(__file__).parents[2]
POCKET = ROOT / "recipes" / "pocket" / "model"
SHAPE: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 256, "initializer_range": 0.15, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}
OPTIONS = [   # frozen: a renamed option breaks recipes and command lines that people have
    "source", "out", "shards", "replicas", "noise", "seed", "rows", "data", "data.train", "data.heldout", "data.sequence_length", "data.heldout_rows",
    "heal", "heal.max_steps", "heal.batch_size", "heal.accumulate_grad_batches", "heal.precision", "heal.accelerator", "heal.log_every_steps",
    "heal.chunk_rows", "heal.optim", "heal.optim.lr", "heal.optim.betas", "heal.optim.weight_decay", "heal.optim.warmup_steps",
    "heal.optim.final_lr_ratio", "heal.optim.max_grad_norm"]


def save_dense(folder: Path, **overrides: Any) -> Path:
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**{**SHAPE, **overrides})).to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(POCKET).save_pretrained(folder)
    return folder


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    return save_dense(tmp_path / "dense")


@pytest.fixture
def build(tmp_path: Path, dense: Path) -> Callable[..., dict[str, Any]]:
    """Run a build of the tiny Llama into tmp_path/out; keywords replace fields of the recipe."""
    text = tmp_path / "text.jsonl"
    lines = [f"def add_{i}(a, b):\n    return a + b + {i}\n\nThe {i}th town lies on a river, and has {7 * i} houses.\n" for i in range(60)]
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    source = {"domain": "text", "path": str(text), "text": "text"}
    raw: dict[str, Any] = {
        "source": str(dense), "out": str(tmp_path / "out"), "rows": 4,
        "data": {"sequence_length": 32, "heldout_rows": 8, "train": [{**source, "part": "train"}], "heldout": [{**source, "part": "heldout"}]},
        "heal": {"batch_size": 4, "accelerator": "cpu", "optim": {"lr": 3e-3}}}

    def run(*overrides: str) -> dict[str, Any]:
        path = tmp_path / "build.yaml"
        path.write_text(yaml.safe_dump(raw))
        return run_build(load_recipe(BuildRecipe, path=path, overrides=list(overrides)))

    return run


def token_rows(count: int = 4, length: int = 64) -> list[torch.Tensor]:
    return list(torch.randint(3, 4096, (count, length), generator=torch.Generator().manual_seed(1)))


def test_the_written_mixtral_computes_what_the_dense_source_does(build: Callable[..., dict[str, Any]], dense: Path, tmp_path: Path) -> None:
    """bf16 sources are kept exactly (a shard's down_proj times 4 is exact), so the directory itself is within the bound in fp32."""
    record = build("--noise", "0")
    moe = load_model(tmp_path / "out", dtype=torch.float32)
    assert moe.config.model_type == "mixtral" and moe.config.num_local_experts == 8 and moe.config.num_experts_per_tok == 4
    found = compare_logits(moe, dense=load_model(dense, dtype=torch.float32), rows=token_rows())
    assert found["max_logit_difference"] <= LOGIT_BOUND * found["max_logit"] and found["argmax_agreement"] == 1.0
    assert record["check"]["max_logit_difference"] <= record["check"]["bound"] and record["check"]["argmax_agreement"] == 1.0
    assert list(record["stages"]) == ["built", "written"] and record["stages"]["written"]["quality"]["text"]["kl"] < 1e-6


@pytest.mark.parametrize(("shards", "replicas"), [(2, 3), (1, 2), (4, 2)])
def test_every_expert_is_its_shard_bit_for_bit(shards: int, replicas: int, build: Callable[..., dict[str, Any]], dense: Path, tmp_path: Path) -> None:
    build("--noise", "0", "--shards", str(shards), "--replicas", str(replicas))
    moe, source = load_model(tmp_path / "out", dtype=torch.float32), load_model(dense, dtype=torch.float32)
    width = 128 // shards
    for layer, parent in zip(moe.model.layers, source.model.layers, strict=True):
        for expert in range(shards * replicas):
            units = slice(expert % shards * width, (expert % shards + 1) * width)
            gate, up = layer.mlp.experts.gate_up_proj[expert].chunk(2)
            assert_equal(gate, parent.mlp.gate_proj.weight[units])
            assert_equal(up, parent.mlp.up_proj.weight[units])
            assert_equal(layer.mlp.experts.down_proj[expert], parent.mlp.down_proj.weight[:, units] * shards)
        rows = layer.mlp.gate.weight.unflatten(0, (replicas, shards))
        assert_equal(rows, rows[:, :1].expand_as(rows))
    for name, weight in source.state_dict().items():
        if ".mlp." not in name:
            assert_equal(moe.state_dict()[name], weight, what=name)


def test_config_tokenizer_and_generation_settings_are_carried_over(build: Callable[..., dict[str, Any]], dense: Path, tmp_path: Path) -> None:
    build()
    config, parent = (json.loads((p / "config.json").read_text()) for p in (tmp_path / "out", dense))
    kept = ("rope_parameters", "max_position_embeddings", "rms_norm_eps", "head_dim", "hidden_act", "tie_word_embeddings", "eos_token_id", "vocab_size")
    assert {k: config[k] for k in kept} == {k: parent[k] for k in kept} and config["dtype"] == "bfloat16" and config["intermediate_size"] == 32
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == 2
    a, b = load_tokenizer(tmp_path / "out"), load_tokenizer(dense)
    assert a("def f(x): return 12")["input_ids"] == b("def f(x): return 12")["input_ids"] and a.chat_template == b.chat_template is not None


def test_load_is_nearly_uniform_and_a_token_takes_one_whole_replica(build: Callable[..., dict[str, Any]]) -> None:
    record = build("--heal.max_steps", "3")
    for stage in record["stages"].values():
        assert stage["whole_replica_share"] == 1.0
        for layer in stage["expert_load"]:
            assert len(layer) == 8 and sum(layer) == pytest.approx(1) and min(layer) > 0.06 and max(layer) < 0.19
            assert len(set(layer[:4])) == len(set(layer[4:])) == 1


def test_noise_moves_all_replicas_but_the_first(build: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """RMS of the noise: 5 % of the expert's, within 6 % (2,048 draws or more, and the rounding to bf16 beside them)."""
    build("--noise", "0", "--out", str(tmp_path / "exact"))
    record = build()
    exact, noised = load_model(tmp_path / "exact", dtype=torch.float32), load_model(tmp_path / "out", dtype=torch.float32)
    for name, weight in exact.named_parameters():
        moved = noised.get_parameter(name) - weight
        if ".experts." not in name:
            assert_equal(noised.get_parameter(name), weight, what=name)
            continue
        assert_equal(noised.get_parameter(name)[:4], weight[:4], what=name)
        ratio = moved[4:].square().mean((1, 2)).sqrt() / weight[4:].square().mean((1, 2)).sqrt()
        assert bool(((ratio > 0.047) & (ratio < 0.053)).all()), (name, ratio)
    kl = {stage: found["quality"]["text"]["kl"] for stage, found in record["stages"].items()}
    assert kl["built"] < 1e-6 < kl["noised"]


def test_healing_lowers_the_divergence_and_leaves_the_routers(build: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    build("--noise", "0.3", "--out", str(tmp_path / "noised"))
    record = build("--noise", "0.3", "--heal.max_steps", "80", "--heal.batch_size", "8", "--heal.optim.lr", "6e-4", "--heal.log_every_steps", "40")
    kl = {stage: found["quality"]["text"]["kl"] for stage, found in record["stages"].items()}
    assert kl["written"] < 0.7 * kl["noised"]
    assert [p["step"] for p in record["heal_curve"]] == [1, 40, 80]
    before, after = load_model(tmp_path / "noised", dtype=torch.float32), load_model(tmp_path / "out", dtype=torch.float32)
    for name, weight in before.named_parameters():
        assert torch.equal(weight, after.get_parameter(name)) == name.endswith("mlp.gate.weight"), name


def test_under_autocast_the_experts_compute_in_bf16_and_keep_fp32_masters(build: Callable[..., dict[str, Any]], dense: Path, tmp_path: Path) -> None:
    """In bf16 a token still takes one whole replica: opposite router rows leave no ties."""
    record = build("--heal.precision", "bf16-mixed", "--heal.max_steps", "2", "--heal.optim.lr", "1e-4")
    assert all(s["whole_replica_share"] == 1.0 and 0 < s["quality"]["text"]["kl"] < 0.01 for s in record["stages"].values())
    moe = load_model(tmp_path / "out", dtype=torch.float32)
    experts, seen = moe.model.layers[0].mlp.experts, []
    with build_moe.experts_in_bf16(moe):
        handle = experts.register_forward_pre_hook(lambda module, args: seen.append(module.down_proj.dtype))
        for precision in (torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False)):
            with precision:
                moe(input_ids=token_rows(1)[0][None]).logits.float().sum().backward()
        handle.remove()
    assert seen == [torch.bfloat16, torch.float32]
    assert isinstance(experts.down_proj, torch.nn.Parameter) and experts.down_proj.dtype == torch.float32 and experts.down_proj.grad is not None


def test_what_was_measured_is_what_was_written(build: Callable[..., dict[str, Any]], dense: Path, tmp_path: Path) -> None:
    record = build("--heal.max_steps", "2", "--rows", "1")
    moe, source = load_model(tmp_path / "out", dtype=torch.float32), load_model(dense, dtype=torch.float32)
    recipe = load_recipe(BuildRecipe, path=tmp_path / "build.yaml", overrides=[])
    rows = build_moe.TextData(recipe.data, tokenizer=load_tokenizer(dense), seed=0, batch_size=4, accumulate=1, max_steps=0).heldout["text"]
    again = build_moe.measure_quality(moe, parent=source, rows=rows, rows_per_batch=4)
    assert again.kl == pytest.approx(record["stages"]["written"]["quality"]["text"]["kl"], rel=1e-5)


def test_the_same_seed_gives_the_same_bytes(build: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    a, b = (build("--heal.max_steps", "3", "--seed", "7", "--out", str(tmp_path / name)) for name in ("a", "b"))
    other = build("--heal.max_steps", "3", "--seed", "8", "--out", str(tmp_path / "c"))
    files = sorted(p.name for p in (tmp_path / "a").iterdir())
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "build.json"} <= set(files)
    same = {name: (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in files if name != "build.json"}
    assert all(same.values()), same
    assert {k: v for k, v in a.items() if k != "recipe"} == {k: v for k, v in b.items() if k != "recipe"}
    assert json.loads((tmp_path / "a" / "build.json").read_text()) == json.loads(json.dumps(a))
    assert a["stages"]["written"]["quality"] != other["stages"]["written"]["quality"]


def test_router_rows_are_orthogonal_to_the_mean_and_two_are_opposite() -> None:
    mean = torch.randn(48, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    inputs = RouterInputs(mean_D=mean, square_length=90.0)
    for replicas in (2, 3):
        rows = router_rows(inputs, replicas=replicas, generator=torch.Generator().manual_seed(3)).double()
        assert float((rows @ mean).abs().max()) < 1e-5 and torch.allclose(rows.norm(dim=1), torch.full((replicas,), (48 / 90) ** 0.5, dtype=torch.float64))
    two = router_rows(inputs, replicas=2, generator=torch.Generator().manual_seed(3))
    assert_equal(two[0], -two[1])


def test_a_construction_that_computes_something_else_is_not_written(
        build: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = build_moe.mixtral_of

    def swapped(*args: Any, **kwargs: Any) -> Any:
        model = real(*args, **kwargs)
        down = model.model.layers[1].mlp.experts.down_proj
        with torch.no_grad():
            down[[4, 5]] = down[[5, 4]]
        return model

    monkeypatch.setattr(build_moe, "mixtral_of", swapped)
    with pytest.raises(RuntimeError, match=r"do not compute what the source computes: largest difference .* Nothing was written"):
        build()
    assert not (tmp_path / "out").exists()


REFUSED = [
    (["--shards", "3"], r"shards: must divide the model's intermediate_size; got 3 and 128\. Choose a divisor"),
    (["--shards", "8"], r"multiple of 32, one MX block.*got 128 / 8 = 16\. Choose fewer shards"),
    (["--shards", "0"], "shards: must be positive; got 0"),
    (["--replicas", "1"], r"replicas \(with one there is nothing to choose\): must be at least 2; got 1"),
    (["--noise", "-0.1"], "noise: must be at least 0"),
    (["--heal.max_steps", "-1"], "heal.max_steps .*must be at least 0"),
    (["--heal.optim.lr", "0"], "optim.lr: must be positive"),
    (["--seed", "-1"], "seed: must lie in"),
    (["--data.sequence_length", "257"], "beyond the model's max_position_embeddings, 256"),
    (["--source", "nowhere"], "source: no file at .*nowhere"),
    (["--heal.steps", "3"], "no such option"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED, ids=[" ".join(o) for o, _ in REFUSED])
def test_what_cannot_be_built_is_refused(overrides: list[str], message: str, build: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    with pytest.raises((ValueError, OSError), match=message):
        build(*overrides)
    assert not (tmp_path / "out").exists()


def test_an_out_that_exists_is_refused_and_untouched(build: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="Nothing is overwritten"):
        build()
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["thesis.txt"]


def test_a_gpu_that_is_not_there_is_refused(build: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no CUDA device"):
        build("--heal.accelerator", "gpu")


def test_other_models_are_refused(build: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    Qwen3ForCausalLM(Qwen3Config(**SHAPE)).save_pretrained(tmp_path / "qwen")
    with pytest.raises(ValueError, match=r"model_type must be llama.*got 'qwen3'"):
        build("--source", str(tmp_path / "qwen"))
    with pytest.raises(ValueError, match="mlp_bias must be false"):
        build("--source", str(save_dense(tmp_path / "biased", mlp_bias=True)))


def test_a_damaged_source_is_refused(build: Callable[..., dict[str, Any]], dense: Path) -> None:
    state = load_file(dense / "model.safetensors")
    state["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(state, dense / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight: weights must be finite; got nan at index \(3, 5\)"):
        build()


def test_options_are_frozen_and_the_shipped_recipe_loads() -> None:
    assert option_names(BuildRecipe) == OPTIONS
    recipe = load_recipe(BuildRecipe, path=ROOT / "recipes" / "smollm2-moe" / "build.yaml", overrides=[])
    assert (recipe.shards, recipe.replicas) == (4, 2) and recipe.heal.max_steps > 0
    sources = [dataclasses.asdict(s) for s in (*recipe.data.train, *recipe.data.heldout)]
    assert not [s["path"] for s in sources if s["path"] and Path(s["path"]).is_absolute()]
