"""Recipes: what loads, which message each mistake gets, and the frozen list of options."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from kilotok.train.config import BaselinesConfig, DataConfig, LossConfig, OptimConfig, QATRecipe, QATTrainerConfig, QuantConfig, Source
from kilotok.train.recipe import RecipeError, load_recipe, option_names, to_yaml

ROOT = Path(__file__).parents[2]
QAT_RECIPES = sorted(p for p in (ROOT / "recipes").rglob("*.yaml") if "quant" in yaml.safe_load(p.read_text()))

OPTIONS = [   # frozen: a renamed option breaks recipes and command lines that people have
    "model", "run",
    "quant", "quant.scale_mode", "quant.trainable", "quant.backward", "quant.experts", "quant.keep", "quant.keep_format", "quant.sensitivity",
    "quant.bits_per_weight", "quant.granularity", "quant.shared_experts", "quant.attention", "quant.router", "quant.activations", "quant.expected",
    "loss", "loss.kl_weight", "loss.ce_weight", "loss.hidden_mse_weight", "loss.hidden_layers", "loss.chunk_rows", "loss.teacher_offload",
    "optim", "optim.lr", "optim.betas", "optim.weight_decay", "optim.warmup_steps", "optim.final_lr_ratio", "optim.max_grad_norm",
    "data", "data.train", "data.heldout", "data.sequence_length", "data.heldout_rows",
    "trainer", "trainer.max_steps", "trainer.batch_size", "trainer.accumulate_grad_batches", "trainer.precision", "trainer.accelerator",
    "trainer.devices", "trainer.checkpoint_every_steps", "trainer.log_every_steps", "trainer.val_every_steps", "trainer.wandb_project", "trainer.seed",
    "trainer.strategy", "trainer.num_nodes", "trainer.gradient_checkpointing",
    "baselines", "baselines.scale_modes", "baselines.control",
]
SOURCE_KEYS = ["domain", "weight", "stdlib", "hub", "hub_config", "split", "path", "text", "prompt", "response", "tools", "documents", "part"]


def base() -> dict[str, Any]:
    return {"model": "m", "run": "r",
            "data": {"train": [{"domain": "code", "path": "x.jsonl", "text": "text"}, {"domain": "math", "hub": "h", "prompt": "q"}],
                     "heldout": [{"domain": "code", "stdlib": True}]}}


def changed(key: str, value: Any) -> dict[str, Any]:
    """base() with `a.b[0].c` set."""
    raw = base()
    node: Any = raw
    *parents, last = key.replace("[", ".#").replace("]", "").split(".")
    for part in parents:
        node = node[int(part[1:])] if part[0] == "#" else node.setdefault(part, {})
    node[int(last[1:]) if last[0] == "#" else last] = value
    return raw


def load(tmp_path: Path, raw: dict[str, Any] | str, *overrides: str) -> QATRecipe:
    path = tmp_path / "r.yaml"
    path.write_text(raw if isinstance(raw, str) else yaml.safe_dump(raw))
    return load_recipe(QATRecipe, path=path, overrides=list(overrides))


def message(tmp_path: Path, raw: dict[str, Any] | str, *overrides: str) -> str:
    with pytest.raises(ValueError) as caught:
        load(tmp_path, raw, *overrides)
    return str(caught.value)


def test_option_names_are_frozen() -> None:
    assert list(option_names(QATRecipe)) == OPTIONS


def test_source_keys_are_frozen() -> None:
    assert [f.name for f in dataclasses.fields(Source)] == SOURCE_KEYS


def test_there_is_a_qat_recipe() -> None:
    assert ROOT / "recipes/pocket/qat.yaml" in QAT_RECIPES


@pytest.mark.parametrize("path", QAT_RECIPES, ids=lambda p: p.name)
def test_recipe_of_the_repository_loads(path: Path) -> None:
    recipe = load_recipe(QATRecipe, path=path, overrides=[])
    raw = yaml.safe_load(path.read_text())
    assert recipe.run == raw["run"]
    assert [s.domain for s in recipe.data.train] == [s["domain"] for s in raw["data"]["train"]]
    ours = [s.path for s in (*recipe.data.train, *recipe.data.heldout) if s.path is not None and s.path.startswith("recipes/")]
    assert [p for p in ours if not (ROOT / p).exists()] == []


def test_a_file_names_only_what_differs(tmp_path: Path) -> None:
    recipe = load(tmp_path, changed("trainer.max_steps", 7))
    assert recipe == QATRecipe(
        model="m", run="r", quant=QuantConfig(), loss=LossConfig(), optim=OptimConfig(), trainer=QATTrainerConfig(max_steps=7), baselines=BaselinesConfig(),
        data=DataConfig(train=[Source(domain="code", path="x.jsonl", text="text"), Source(domain="math", hub="h", prompt="q")],
                        heldout=[Source(domain="code", stdlib=True)]))


@pytest.mark.parametrize(("key", "nearest"), [
    ("modle", "model"),
    ("trainers", "trainer"),
    ("trainer.max_step", "trainer.max_steps"),
    ("quant.scalemode", "quant.scale_mode"),
    ("data.heldout_row", "data.heldout_rows"),
    ("data.train[0].weigth", "data.train[0].weight"),
    ("data.heldout[0].promt", "data.heldout[0].prompt"),
])
def test_unknown_key_names_the_nearest(tmp_path: Path, key: str, nearest: str) -> None:
    assert message(tmp_path, changed(key, 1)) == f"{tmp_path / 'r.yaml'}: unknown key {key!r}. Did you mean {nearest!r}?"


def test_unknown_key_without_a_near_one_lists_them_all(tmp_path: Path) -> None:
    assert message(tmp_path, changed("zzzqqq", 1)) == \
        f"{tmp_path / 'r.yaml'}: unknown key 'zzzqqq'. Valid: baselines, data, loss, model, optim, quant, run, trainer."


@pytest.mark.parametrize(("option", "nearest"), [
    ("--trainer.max_step", "--trainer.max_steps"),
    ("--max_steps", "--trainer.max_steps"),
    ("--optim.lrr=1", "--optim.lr"),
])
def test_unknown_override_names_the_nearest(tmp_path: Path, option: str, nearest: str) -> None:
    assert message(tmp_path, base(), *([option] if "=" in option else [option, "3"])) == \
        f"{option.split('=')[0]}: no such option. Did you mean {nearest!r}?"


def test_abbreviated_override_is_refused(tmp_path: Path) -> None:
    assert "--trainer.max: no such option" in message(tmp_path, base(), "--trainer.max", "3")


@pytest.mark.parametrize(("key", "value", "got"), [
    ("trainer.max_steps", "many", "many"),
    ("trainer.max_steps", 1.5, "1.5"),
    ("trainer.max_steps", True, "True"),
    ("trainer.max_steps", None, "null"),
    ("trainer.seed", None, "null"),
    ("trainer.precision", "fp16", "fp16"),
    ("optim.betas", [0.9], "0.9"),
    ("optim", "fast", "fast"),
    ("quant", 3, "3"),
    ("quant", None, "null"),
    ("data.train", 5, "5"),
    ("data.train[0]", 5, "5"),
    ("data.train[0].part", "test", "test"),
    ("model", 5, "5"),
])
def test_wrong_type_names_the_key_and_the_value(tmp_path: Path, key: str, value: Any, got: str) -> None:
    said = message(tmp_path, changed(key, value))
    parent, _, leaf = key.rpartition(".")
    if "[" in parent:   # the parser names the list and the key apart
        assert f'"{parent.split("[")[0]}"' in said and f'"{leaf}"' in said
    else:
        assert key.split("[")[0] in said
    assert got in said


@pytest.mark.parametrize(("key", "value", "expected"), [
    ("trainer.max_steps", -1, "trainer.max_steps: must be positive; got -1."),
    ("trainer.batch_size", 0, "trainer.batch_size: must be positive; got 0."),
    ("loss.chunk_rows", 0, "loss.chunk_rows: must be positive; got 0."),
    ("loss.kl_weight", 0.0, "loss: kl_weight, ce_weight and hidden_mse_weight must not all be zero; got 0.0, 0.0 and 0.0. There would be nothing to train on."),
    ("optim.lr", -1.0, "optim.lr: must be positive; got -1.0."),
    ("data.sequence_length", 0, "data.sequence_length: must be positive; got 0."),
    ("data.heldout_rows", -2, "data.heldout_rows: must be positive; got -2."),
    ("data.train[0].path", None, "data source 'code': needs one of stdlib: true, hub: NAME or path: FILE; got none."),
    ("data.train[0].stdlib", True, "data source 'code': stdlib excludes hub and path; got 'x.jsonl'."),
    ("data.train[0].prompt", "q", "data source 'code': give text or prompt, not both; got 'text' and 'q'."),
    ("data.train[1].weight", 0.0, "data source 'math': weight: must be positive; got 0.0."),
])
def test_invalid_value_gives_the_config_s_message(tmp_path: Path, key: str, value: Any, expected: str) -> None:
    assert message(tmp_path, changed(key, value)) == expected


def test_scale_mode_names_the_valid_ones(tmp_path: Path) -> None:
    said = message(tmp_path, changed("quant.scale_mode", "foo"))
    assert "quant.scale_mode" in said and "foo" in said
    assert all(mode in said for mode in ("even", "floor", "rceil", "mse"))
    with pytest.raises(ValueError, match=r"^quant.scale_mode: must be one of even, floor, rceil, mse; got 'foo'\.$"):
        QuantConfig(scale_mode="foo")   # type: ignore[arg-type]


@pytest.mark.parametrize(("key", "value"), [   # none can work: each is an error without a key later on, most after the run was made, or is ignored
    ("optim.lr", float("nan")),
    ("optim.betas", [2.0, 3.0]),
    ("optim.max_grad_norm", -1.0),
    ("optim.weight_decay", -1.0),
    ("trainer.seed", -1),
    ("trainer.val_every_steps", 0),
    ("data.train[0].weight", float("nan")),
])
def test_number_out_of_range_is_refused_by_name(tmp_path: Path, key: str, value: Any) -> None:
    assert key.split(".")[-1] in message(tmp_path, changed(key, value))


def test_missing_key_is_named(tmp_path: Path) -> None:
    raw = base()
    del raw["model"]
    assert message(tmp_path, raw) == f"{tmp_path / 'r.yaml'}: the following arguments are required: model"


def test_missing_file(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(RecipeError) as caught:
            load_recipe(QATRecipe, path=path, overrides=[])
        assert str(caught.value) == f"recipe: no file at {path}. Give the path of a YAML recipe, such as those in recipes/."


def test_not_yaml(tmp_path: Path) -> None:
    assert message(tmp_path, "model: [1\n").startswith(f"{tmp_path / 'r.yaml'}: not valid YAML: ")


def test_not_text(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"model\.safetensors: "):
        load_recipe(QATRecipe, path=path, overrides=[])


@pytest.mark.parametrize(("text", "kind"), [("- model: m\n", "list"), ("hello\n", "str"), ("", "NoneType")])
def test_not_a_mapping(tmp_path: Path, text: str, kind: str) -> None:
    assert message(tmp_path, text) == \
        f"{tmp_path / 'r.yaml'}: a recipe is a mapping of keys to values; got {kind}. See recipes/ for examples."


@pytest.mark.parametrize(("overrides", "key", "expected"), [
    (["--trainer.max_steps", "3"], "trainer.max_steps", 3),
    (["--trainer.max_steps=3"], "trainer.max_steps", 3),
    (["--trainer.max_steps", "3", "--trainer.max_steps", "4"], "trainer.max_steps", 4),
    (["--optim.lr", "1e-3"], "optim.lr", 1e-3),
    (["--optim.betas", "[0.5, 0.6]"], "optim.betas", (0.5, 0.6)),
    (["--optim.max_grad_norm", "null"], "optim.max_grad_norm", None),
    (["--run", "123"], "run", "123"),
    (["--quant.scale_mode", "floor"], "quant.scale_mode", "floor"),
    (["--data.heldout", "[{domain: z, path: z.txt}, {domain: y, path: y.txt}]"], "data.heldout",
     [Source(domain="z", path="z.txt"), Source(domain="y", path="y.txt")]),
    (["--data.heldout", "[{domain: code, path: z.txt}]"], "data.heldout", [Source(domain="code", path="z.txt")]),   # as long as the file's list
])
def test_override_wins_over_the_file(tmp_path: Path, overrides: list[str], key: str, expected: Any) -> None:
    raw = base()
    raw |= {"trainer": {"max_steps": 9, "batch_size": 5}, "optim": {"lr": 0.5, "betas": [0.1, 0.2], "max_grad_norm": 2.0}, "quant": {"scale_mode": "rceil"}}
    value: Any = load(tmp_path, raw, *overrides)
    assert value.trainer.batch_size == 5   # its neighbours stay as the file has them
    for part in key.split("."):
        value = getattr(value, part)
    assert value == expected


def test_override_of_a_wrong_type_names_the_key(tmp_path: Path) -> None:
    said = message(tmp_path, base(), "--trainer.max_steps", "many")
    assert '"trainer.max_steps"' in said and "many" in said


@pytest.mark.parametrize("overrides", [
    [],
    ["--optim.lr", "1e-5", "--optim.betas", "[0.5, 0.75]", "--optim.max_grad_norm", "null", "--trainer.val_every_steps", "3"],
    ["--run", "a: b #c"],
    ["--run", "123"],
    ["--run", "null"],
    ["--run", "1e3"],   # a string to PyYAML, which leaves it without quotes, and a number to the parser
], ids=" ".join)
def test_to_yaml_round_trips(tmp_path: Path, overrides: list[str]) -> None:
    recipe = load(tmp_path, base(), *overrides)
    assert load(tmp_path, to_yaml(recipe)) == recipe


def test_to_yaml_names_every_option(tmp_path: Path) -> None:
    plain = yaml.safe_load(to_yaml(load(tmp_path, base())))
    named = [name for key, value in plain.items() for name in (key, *(f"{key}.{k}" for k in value if isinstance(value, dict)))]
    assert named == OPTIONS
    assert list(plain["data"]["train"][0]) == SOURCE_KEYS
