"""What options add to a draft on disk: mask vector, reduced vocabulary, a head or embedding of its own, other names; and a warm start keeps all of it."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from published_drafts import DEEPSEEK_V4_FLASH, MIMO_PRO
from safetensors.torch import load_file, save_file
from tolerances import assert_equal
from torch import Tensor

from kilotok.dflash.checkpoint import MASK_EMBEDDING, read_config, read_draft, write_draft
from kilotok.dflash.config import DraftConfig
from kilotok.dflash.drafter import DFlashDrafter
from kilotok.dflash.model import DraftModel
from kilotok.train.distill_config import DraftShape
from kilotok.train.draft_shape import resolve_shape

CONFIG = DraftConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=4096,
                     target_layer_ids=(1, 0), num_target_layers=2, mask_token_id=4090, sliding_window=32)
HEAD, EMBEDDING = (torch.randn(4096, 64, generator=torch.Generator().manual_seed(s)).bfloat16().float() for s in (1, 2))   # the target's
FEATURES = torch.randn(40, 128, generator=torch.Generator().manual_seed(3))
DRAFTED = 500


def make_draft(**options: Any) -> DraftModel:
    draft, generator = DraftModel(dataclasses.replace(CONFIG, **options)), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator).mul_(parameter.shape[-1] ** -0.5).bfloat16())
        if draft.draft_ids is not None:
            draft.draft_ids.copy_(torch.randperm(4096, generator=generator)[:DRAFTED].sort().values)
    return draft.eval()


def written(directory: Path, draft: DraftModel) -> Path:
    directory.mkdir(exist_ok=True)
    write_draft(directory, draft, metadata={"target": {}}, head_VD=HEAD)
    return directory


def edit(directory: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    state = load_file(directory / "model.safetensors")
    change(state)
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})


def edit_config(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    raw = json.loads((directory / "config.json").read_text())
    change(raw)
    (directory / "config.json").write_text(json.dumps(raw))


def read(directory: Path) -> DraftModel:
    return read_draft(directory, dtype=torch.float32)


def logits(draft: DraftModel, *, embedding: Tensor = EMBEDDING, head: Tensor = HEAD) -> Tensor:
    """[7, 4096] of a drafter at work."""
    drafter = DFlashDrafter(draft, embedding_VD=embedding, head_VD=head)
    drafter.observe(FEATURES)
    return drafter.logits(77)


# --- a trained mask vector ---


@pytest.fixture
def masked(tmp_path: Path) -> Path:
    return written(tmp_path / "masked", make_draft(mask_embedding=True))


def test_the_mask_vector_lies_beside_the_weights_as_vllm_and_sglang_read_it(masked: Path) -> None:
    """A dict, for SGLang refuses a bare tensor, with a vector, for vLLM flattens what it finds; and the mask token's id, which both compare."""
    stored = torch.load(masked / MASK_EMBEDDING, weights_only=True)
    draft = make_draft(mask_embedding=True)
    assert set(stored) == {"embedding", "mask_token_id"} and stored["mask_token_id"] == 4090 and type(stored["mask_token_id"]) is int
    assert_equal(stored["embedding"], draft.mask_embedding.detach().bfloat16(), bits=True)   # type: ignore[union-attr]
    assert not any("mask" in name for name in load_file(masked / "model.safetensors"))   # vLLM stops at such a tensor
    assert json.loads((masked / "config.json").read_text())["dflash_config"]["mask_embedding"] is True
    again = read(masked)
    assert again.config == draft.config
    for name, weight in draft.state_dict().items():
        assert_equal(again.state_dict()[name], weight, what=name, bits=True)
    assert_equal(logits(again), logits(draft), bits=True)


def test_a_bare_vector_is_read_too(masked: Path) -> None:
    expected = logits(read(masked))
    vector = torch.load(masked / MASK_EMBEDDING, weights_only=True)["embedding"]
    for form in (vector, vector[None], {"embedding": vector[None, None], "mask_token_id": 4090}):
        torch.save(form, masked / MASK_EMBEDDING)
        assert_equal(logits(read(masked)), expected, bits=True)


@pytest.mark.parametrize(("stored", "message"), [
    ({"embedding": torch.zeros(64), "mask_token_id": 4089}, r"is for mask token 4089; config\.json has 4090\. They do not belong together\."),
    ({"embedding": torch.zeros(64)}, r"is for mask token None; config\.json has 4090"),
    ({"embedding": torch.zeros(8, 64), "mask_token_id": 4090}, r"must hold one vector of 64; got \(8, 64\)\. One vector a position is not supported\."),
    (torch.zeros(7, 64), r"must hold one vector of 64; got \(7, 64\)"), (torch.zeros(32), r"must hold one vector of 64; got \(32,\)"),
    ({"mask_token_id": 4090}, r"must hold one vector of 64; got NoneType"), ([1.0], r"must hold one vector of 64; got list"),
])
def test_a_mask_vector_that_does_not_belong_is_refused(masked: Path, stored: Any, message: str) -> None:
    torch.save(stored, masked / MASK_EMBEDDING)
    with pytest.raises(ValueError, match=rf"mask_embedding\.pt: {message}"):
        read(masked)


def test_a_damaged_mask_vector_is_refused(masked: Path) -> None:
    path = masked / MASK_EMBEDDING
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"mask_embedding\.pt: cannot be read \(.*\)\. It is damaged: copy it again\."):
        read(masked)
    torch.save({"embedding": torch.full((64,), torch.nan), "mask_token_id": 4090}, path)
    with pytest.raises(ValueError, match=r"masked: mask_embedding holds NaN or infinity\. The draft is damaged"):
        read(masked)
    draft = make_draft(mask_embedding=True)
    with torch.no_grad():
        draft.mask_embedding[3] = torch.inf   # type: ignore[index]
    with pytest.raises(ValueError, match=r"^draft: mask_embedding\.pt holds NaN or infinity: the run has diverged\."):
        written(masked, draft)


def test_a_missing_mask_vector_is_an_error(masked: Path) -> None:
    """Without it hardly a draft is accepted, and nothing else shows it."""
    (masked / MASK_EMBEDDING).unlink()
    for reader in (read_config, read):
        with pytest.raises(FileNotFoundError, match=r"masked: config\.json names a trained mask embedding, and mask_embedding\.pt is missing"):
            reader(masked)


def test_a_mask_vector_that_the_config_does_not_name_is_used(masked: Path) -> None:
    """Other tools' configs have no word for it; engines look for the file."""
    expected = logits(read(masked))
    edit_config(masked, lambda raw: raw["dflash_config"].pop("mask_embedding"))
    assert read_config(masked).mask_embedding
    assert_equal(logits(read(masked)), expected, bits=True)
    (masked / MASK_EMBEDDING).unlink()
    assert not torch.equal(logits(read(masked)), expected)


# --- a reduced vocabulary ---


@pytest.fixture
def reduced(tmp_path: Path) -> Path:
    return written(tmp_path / "reduced", make_draft(draft_vocab_size=DRAFTED))


def test_a_reduced_vocabulary_is_stored_as_offsets_marks_and_head_rows(reduced: Path) -> None:
    """For vLLM the target's id is the draft's plus d2t."""
    state, draft = load_file(reduced / "model.safetensors"), make_draft(draft_vocab_size=DRAFTED)
    ids = draft.draft_ids
    assert ids is not None and state["d2t"].dtype == torch.int64 and state["t2d"].dtype == torch.bool
    assert_equal(torch.arange(DRAFTED) + state["d2t"], ids)
    assert_equal(state["t2d"].nonzero().flatten(), ids)
    assert state["t2d"].shape == (4096,)
    assert_equal(state["lm_head.weight"], HEAD[ids].bfloat16(), bits=True)
    assert json.loads((reduced / "config.json").read_text())["draft_vocab_size"] == DRAFTED
    again = read(reduced)
    assert again.config == draft.config
    assert_equal(again.draft_ids, ids)   # type: ignore[arg-type]
    found = logits(again)
    assert_equal(found, logits(draft), bits=True)   # by its own rows, and by the target's
    assert_equal(found[0].isfinite().nonzero().flatten(), ids)


def test_the_tables_that_a_reader_can_do_without(reduced: Path) -> None:
    expected = logits(read(reduced))
    edit(reduced, lambda state: state.pop("t2d"))
    assert_equal(logits(read(reduced)), expected, bits=True)


def test_writing_what_was_read_gives_the_same_bytes(reduced: Path, masked: Path, tmp_path: Path) -> None:
    for directory in (reduced, masked):
        again = tmp_path / f"{directory.name}-again"
        again.mkdir()
        write_draft(again, read(directory), metadata={"target": {}})   # no head given: it has its rows
        for name in ("model.safetensors", "config.json"):
            assert (again / name).read_bytes() == (directory / name).read_bytes()
    assert torch.equal(*(torch.load(d / MASK_EMBEDDING, weights_only=True)["embedding"] for d in (masked, tmp_path / "masked-again")))


ORDER = r"d2t must give different target ids in ascending order, those that t2d marks\. The draft is damaged: restore it\."


@pytest.mark.parametrize(("change", "message"), [
    (lambda s: s["d2t"].__setitem__(slice(10, 12), s["d2t"][[11, 10]] + torch.tensor([1, -1])), ORDER),   # two ids the other way round
    (lambda s: s["d2t"].__setitem__(10, s["d2t"][9] - 1), ORDER),                                           # one id twice
    (lambda s: s["d2t"].__setitem__(0, -1), ORDER), (lambda s: s["d2t"].__setitem__(-1, 4096 - 499), ORDER),  # below and beyond the vocabulary
    (lambda s: s["t2d"].logical_not_(), ORDER), (lambda s: s["t2d"].__setitem__(slice(None), False), ORDER),
    (lambda s: s.pop("d2t"), r"draft_vocab_size 500 needs a tensor d2t of that length; got none\."),
    (lambda s: s.update(d2t=s["d2t"][1:].clone()), r"draft_vocab_size 500 needs a tensor d2t of that length; got \(499,\)\."),
    (lambda s: s.pop("lm_head.weight"), r"a draft with a reduced vocabulary brings its head rows; lm_head\.weight is missing\."),
    (lambda s: s.update({"lm_head.weight": s["lm_head.weight"][1:].clone()}), r"lm_head\.weight has shape \(499, 64\); its config\.json asks for \(500, 64\)"),
    (lambda s: s["lm_head.weight"].__setitem__((3, 5), torch.nan), r"lm_head\.weight holds NaN or infinity"),
])
def test_damaged_tables_are_refused(reduced: Path, change: Callable[[dict[str, Tensor]], Any], message: str) -> None:
    edit(reduced, change)
    with pytest.raises(ValueError, match=rf"reduced: {message}"):
        read(reduced)


@pytest.mark.parametrize("left", ["d2t", "t2d"])
def test_tables_without_their_size_in_the_config_are_refused(reduced: Path, left: str) -> None:
    edit_config(reduced, lambda raw: raw.pop("draft_vocab_size"))
    edit(reduced, lambda state: [state.pop(name) for name in {"d2t", "t2d"} - {left}])
    with pytest.raises(ValueError, match=r"has a table for a reduced vocabulary \(d2t, t2d\), but config\.json has no draft_vocab_size\. Restore"):
        read(reduced)


def test_a_reduced_vocabulary_is_not_written_without_its_head_rows(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^draft: with a reduced vocabulary the target's head is needed, whose rows go with the draft; got none\."):
        write_draft(tmp_path, make_draft(draft_vocab_size=DRAFTED), metadata={"target": {}})
    assert not list(tmp_path.iterdir())


# --- a head or an embedding of its own ---


def test_a_draft_s_own_head_and_embedding_are_used_and_written_again(tmp_path: Path) -> None:
    own_head, own_embedding = HEAD.flip(0), EMBEDDING.flip(0)
    directory = written(tmp_path / "plain", make_draft())
    plain = read(directory)
    edit(directory, lambda state: state.update({"lm_head.weight": own_head.bfloat16()}))
    assert_equal(logits(read(directory)), logits(plain, head=own_head), bits=True)
    edit(directory, lambda state: state.update({"embed_tokens.weight": own_embedding.bfloat16()}))
    both = read(directory)
    expected = logits(plain, head=own_head, embedding=own_embedding)
    assert_equal(logits(both), expected, bits=True)
    assert_equal(logits(both, head=torch.zeros_like(HEAD), embedding=torch.zeros_like(EMBEDDING)), expected, bits=True)   # the target's are not looked at
    for other in (logits(plain), logits(plain, head=own_head), logits(plain, embedding=own_embedding)):
        assert not torch.equal(other, expected)
    assert_equal(logits(read(written(tmp_path / "again", both))), expected, bits=True)
    assert load_file(tmp_path / "again" / "model.safetensors").keys() == load_file(directory / "model.safetensors").keys()


# --- other names ---


@pytest.mark.parametrize("prefix", ["", "model."])
def test_aliases_are_read(tmp_path: Path, prefix: str) -> None:
    """The names of Muse-Glimmer's assistant and of a single middle layer, as vLLM and SGLang translate them."""
    directory = written(tmp_path / "one", make_draft(num_hidden_layers=1))
    expected = read(directory).state_dict()
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}

    def alias(name: str) -> str:
        return prefix + names.get(name, name.replace("layers.0.", "midlayer."))

    state = {alias(name): tensor for name, tensor in load_file(directory / "model.safetensors").items()}
    assert sum("midlayer." in name for name in state) == 11 and f"{prefix}encoder.fc.weight" in state
    save_file(state, directory / "model.safetensors")
    for name, weight in read(directory).state_dict().items():
        assert_equal(weight, expected[name], what=name, bits=True)


@pytest.mark.parametrize(("alias", "name"), [("encoder.fc.weight", "fc.weight"), ("midlayer.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight"),
                                             ("model.norm.weight", "norm.weight")])
def test_a_tensor_under_two_names_is_refused(tmp_path: Path, alias: str, name: str) -> None:
    directory = written(tmp_path / "twice", make_draft())
    edit(directory, lambda state: state.update({alias: state[name].clone()}))
    with pytest.raises(ValueError, match=rf"twice: tensor {name} is there twice"):
        read(directory)


# --- a warm start ---


class NoTokenizer:
    """A warm start takes its mask token from the draft."""


def released(directory: Path, raw: dict[str, Any], **options: Any) -> DraftModel:
    """A checkpoint as its publisher has it: that config.json, the tensors of the options, nothing of ours."""
    draft = make_draft(**options)
    written(directory, draft)
    (directory / "kilotok_draft.json").unlink()
    (directory / "config.json").write_text(json.dumps(raw))
    return draft


def target_of(c: DraftConfig, *, num_hidden_layers: int) -> Any:
    shape = {"hidden_size": c.hidden_size, "vocab_size": c.vocab_size, "num_hidden_layers": num_hidden_layers}
    return SimpleNamespace(**shape, to_dict=lambda: shape)


TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "vocab_size": 4096}
def test_a_warm_start_keeps_what_the_released_draft_has(tmp_path: Path) -> None:
    """ModelOpt#2149: taps, sinks, causality, window and rope are the checkpoint's, not the recipe's or the rule's defaults."""
    raw = {**MIMO_PRO, **TINY, "v_head_dim": 16, "num_target_layers": 6, "sliding_window": 32,
           "dflash_config": {**MIMO_PRO["dflash_config"], "target_layer_ids": [5, 0], "mask_token_id": 4090, "swa_window_size": 32}}
    options = {"attention_sinks": True, "attention_value_scale": 0.612, "partial_rotary_factor": 0.5, "rope_theta": 10000.0, "rms_norm_eps": 1e-5}
    draft = released(tmp_path / "mimo", raw, **options)
    shape, origin = resolve_shape(DraftShape(init_from=str(tmp_path / "mimo")), config=target_of(CONFIG, num_hidden_layers=6),
                                  tokenizer=NoTokenizer())
    assert origin == f"warm start from {tmp_path / 'mimo'}, of unknown origin"
    assert (shape.target_layer_ids, shape.causal, shape.sliding_window, shape.full_attention_layers, shape.block_size) == ((5, 0), "never", 32, (), 8)
    assert (shape.attention_sinks, shape.attention_value_scale, shape.rotary_dim, shape.rms_norm_eps, shape.mask_token_id) == (True, 0.612, 8, 1e-5, 4090)
    started = read(tmp_path / "mimo")
    assert started.config == shape
    sinks = [name for name in started.state_dict() if name.endswith("attention_sink_bias")]
    assert len(sinks) == 2 and all(bool(started.state_dict()[name].any()) for name in sinks)
    for name, weight in draft.state_dict().items():
        assert_equal(started.state_dict()[name], weight, what=name, bits=True)
    again = read(written(tmp_path / "again", started))
    assert again.config == shape
    assert_equal(logits(again), logits(started), bits=True)


def test_a_warm_start_refuses_a_recipe_that_asks_for_another_shape(tmp_path: Path) -> None:
    """All options that would do nothing are named at once; those that the draft has are no contradiction."""
    released(tmp_path / "small", {**MIMO_PRO, **TINY, "v_head_dim": 16, "num_target_layers": 6, "sliding_window": 32,
             "dflash_config": {**MIMO_PRO["dflash_config"], "target_layer_ids": [5, 0], "mask_token_id": 4090, "swa_window_size": 32}})
    there = read_config(tmp_path / "small")
    target = target_of(CONFIG, num_hidden_layers=6)

    def resolved(**options: Any) -> DraftConfig:
        return resolve_shape(DraftShape(init_from=str(tmp_path / "small"), **options), config=target, tokenizer=NoTokenizer())[0]

    agreeing = {"target_layer_ids": [5, 0], "sliding_window": 32, "mask_token_id": 4090, "num_hidden_layers": 2, "logit_softcap": 0,
                "draft_vocab_size": there.vocab_size}
    assert resolved(**agreeing) == there
    others = {"target_layer_ids": [3, 4], "causal": "always", "block_size": 4, "num_attention_heads": 2, "draft_vocab_size": 500, "logit_softcap": 30.0,
              "full_attention_layers": [1]}
    for name, value in others.items():
        with pytest.raises(ValueError, match=rf"^draft\.init_from: .*contradicts: draft\.{name} {re.escape(str(value))} \(there: "):
            resolved(**{name: value})
    with pytest.raises(ValueError, match=r"draft\.block_size 4 .*draft\.causal always "):
        resolved(**others)


def test_a_warm_start_learns_how_deep_its_target_is(tmp_path: Path) -> None:
    """Speculators does not say it, and z-lab's package cannot read a draft that does not."""
    raw = {**DEEPSEEK_V4_FLASH, "mask_token_id": 4090, "target_hidden_size": 64, "draft_vocab_size": DRAFTED, "aux_hidden_state_layer_ids": [2, 1],
           "transformer_layer_config": {**DEEPSEEK_V4_FLASH["transformer_layer_config"], **TINY, "layer_types": ["sliding_attention"] * 2,
                                        "sliding_window": 32}}
    released(tmp_path / "speculators", raw, draft_vocab_size=DRAFTED)
    assert read_config(tmp_path / "speculators").num_target_layers is None
    shape, _ = resolve_shape(DraftShape(init_from=str(tmp_path / "speculators")), config=target_of(CONFIG, num_hidden_layers=6),
                             tokenizer=NoTokenizer())
    assert (shape.num_target_layers, shape.target_layer_ids, shape.causal, shape.draft_vocab_size) == (6, (1, 0), "always", DRAFTED)
    assert dataclasses.replace(shape, num_target_layers=None) == read_config(tmp_path / "speculators")
    assert shape.to_json()["num_target_layers"] == 6
