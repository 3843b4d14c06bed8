"""A draft with every option at once: loaded as it was written, described by `kilotok inspect`, and the text stays the target's."""

from pathlib import Path

import pytest
import torch
from conftest import export_experts, save_tiny_moe
from safetensors.torch import load_file, save_file

from kilotok.dflash.checkpoint import MASK_EMBEDDING, target_record, write_draft
from kilotok.dflash.config import DraftConfig
from kilotok.dflash.drafter import DFlashDrafter
from kilotok.dflash.generate import Round, generate
from kilotok.dflash.model import DraftModel
from kilotok.dflash.sampling import Sampling
from kilotok.runtime.cli import main as kilotok
from kilotok.runtime.engine import MAX_TREE_BUDGET
from kilotok.runtime.loading import load_served
from kilotok.runtime.server.served import Served

PROMPT = tuple(torch.randint(4, 4096, (30,), generator=torch.Generator().manual_seed(5)).tolist())
CAP, DRAFTED = 5.0, 6
CONFIG = DraftConfig(
    hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=4096,
    target_layer_ids=(1, 0), num_target_layers=2, mask_token_id=3, sliding_window=16, full_attention_layers=(1,), causal="sliding", rope_theta=5e4,
    partial_rotary_factor=0.5, rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, attention_sinks=True,
    attention_value_scale=0.5, input_embedding_scale=2.0, output_multiplier=0.25, logit_softcap=CAP, mask_embedding=True, draft_vocab_size=DRAFTED)
SAMPLINGS = {"greedy": Sampling(), "sampled": Sampling(temperature=0.2, top_p=0.9, seed=3)}   # cool, so that the few tokens it drafts come up


def text_of(served: Served, *, sampling: Sampling, drafter: DFlashDrafter | None = None, budget: int | None = None) -> tuple[list[int], list[Round]]:
    rounds = list(generate(served.executor.open(), prompt=PROMPT, drafter=drafter, sampling=sampling, max_tokens=48, eos_ids=(), tree_budget=budget))
    return [t for r in rounds for t in r.tokens], rounds


@pytest.fixture(scope="module")
def draft() -> DraftModel:
    model, generator = DraftModel(CONFIG), torch.Generator().manual_seed(0)
    model.initialize(generator=generator, final_norm_D=torch.ones(64), mask_row_D=torch.randn(64, generator=generator))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("attention_sink_bias"):
                parameter.normal_(generator=generator)
            elif parameter.dim() == 2:
                parameter.mul_(10)   # so that what it sees decides what it says
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model.eval()


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory, draft: DraftModel) -> Path:
    """An export whose draft can propose the tokens that its own text has most, so that some are accepted."""
    root = tmp_path_factory.mktemp("options")
    directory = export_experts(save_tiny_moe(root / "parent"), root / "out")
    served = load_served(directory, name=None, use_draft=False, device="cpu", dtype=None)
    greedy, sampled = (text_of(served, sampling=s)[0] for s in SAMPLINGS.values())
    ids = torch.tensor([*greedy, *sampled]).bincount(minlength=4096).topk(DRAFTED).indices.sort().values
    draft.draft_ids = ids
    (directory / "dflash").mkdir()
    write_draft(directory / "dflash", draft, metadata={"target": target_record(directory)}, head_VD=served.executor.head_VD)   # type: ignore[attr-defined]
    return directory


@pytest.fixture(scope="module")
def served(out: Path) -> Served:
    return load_served(out, name=None, use_draft=True, device="cpu", dtype=None)


def test_it_is_loaded_with_every_option(served: Served, draft: DraftModel) -> None:
    assert served.make_drafter is not None
    loaded = served.make_drafter()
    assert isinstance(loaded, DFlashDrafter) and loaded.model.config == CONFIG
    ex = served.executor
    written = DFlashDrafter(draft, embedding_VD=ex.embedding_VD, head_VD=ex.head_VD.bfloat16().float())   # type: ignore[attr-defined]
    features = ex.open().read(PROMPT).features_TF
    for drafter in (loaded, written):
        drafter.observe(features)
    logits = loaded.logits(7)
    assert torch.equal(logits, written.logits(7))
    assert draft.draft_ids is not None
    drafted = logits[:, draft.draft_ids]
    assert 0.1 < float(drafted.abs().max()) < CAP and torch.equal(torch.isfinite(logits).sum(1), torch.full((7,), DRAFTED))


@pytest.mark.parametrize("name", ["layers.0.self_attn.attention_sink_bias", "lm_head.weight", MASK_EMBEDDING])
def test_what_an_option_stores_is_used(out: Path, served: Served, name: str, tmp_path: Path) -> None:
    """Another value of it in the files gives other logits."""
    for path in out.iterdir():
        if path.is_file():
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / "dflash").mkdir()
    for path in (out / "dflash").iterdir():
        (tmp_path / "dflash" / path.name).write_bytes(path.read_bytes())
    if name == MASK_EMBEDDING:
        torch.save({"embedding": torch.ones(64), "mask_token_id": 3}, tmp_path / "dflash" / name)
    else:
        state = load_file(tmp_path / "dflash" / "model.safetensors")
        state[name] = state[name] + 1
        save_file(state, tmp_path / "dflash" / "model.safetensors", metadata={"format": "pt"})
    changed = load_served(tmp_path, name=None, use_draft=True, device="cpu", dtype=None)
    logits = []
    for one in (served, changed):
        assert one.make_drafter is not None
        drafter = one.make_drafter()
        drafter.observe(one.executor.open().read(PROMPT).features_TF)
        logits.append(drafter.logits(7).nan_to_num(neginf=0))  # type: ignore[attr-defined]
    assert float((logits[0] - logits[1]).abs().max()) > 1e-3


@pytest.mark.parametrize("budget", [None, 7, 15], ids=["chain", "tree", "wide tree"])
@pytest.mark.parametrize("mode", SAMPLINGS)
def test_the_text_is_the_one_without_a_draft(served: Served, mode: str, budget: int | None) -> None:
    plain, _ = text_of(served, sampling=SAMPLINGS[mode])
    assert len(set(plain)) > 4 and served.make_drafter is not None
    text, rounds = text_of(served, sampling=SAMPLINGS[mode], drafter=served.make_drafter(), budget=budget)  # type: ignore[arg-type]
    assert text == plain
    assert sum(r.num_accepted for r in rounds) >= 3   # some proposals were taken, and some not
    assert any(r.num_accepted < r.num_drafted for r in rounds)


def test_inspect_shows_its_conventions(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kilotok(["inspect", str(out)]) == 0
    text = capsys.readouterr().out
    sha256 = target_record(out)["sha256"][:12]
    assert text[text.index("  draft head"):] == (
        "  draft head    in dflash/: 2 layers, hidden 64, 30 tensors, 45,896 weights\n"
        "    block       8 tokens, the anchor and 7 drafts\n"
        "    attention   window 16, layers [1] full, causal in layers with the window, 4 heads of 16, 2 KV, sinks, values times 0.5\n"
        "    rope        theta 50000, 8 of 16 dimensions turn, yarn (factor 4.0, original_max_position_embeddings 128)\n"
        "    taps        outputs of layers [1, 0] of 2\n"
        "    mask token  3, with a trained embedding of its own\n"
        "    embedding   of the target, times 2\n"
        "    logits      6 of 4,096 tokens, a head of its own, times 0.25, capped at 5\n"
        f"    made for    out (weights {sha256}, scale_mode even)\n")


def test_inspect_shows_the_shipped_draft_and_none(out: Path, pocket: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in pocket.iterdir():
        (tmp_path / path.name).symlink_to(path)
    assert kilotok(["inspect", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("\n  draft head    none\n")
    (tmp_path / "dflash").symlink_to(pocket.parent / "draft")
    assert kilotok(["inspect", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "\n    attention   window 128, non-causal, 8 heads of 32, 4 KV\n    rope        theta 10000\n" in text
    assert text.endswith("    taps        outputs of layers [2, 4, 5] of 6\n    mask token  3, the row of the embedding\n    embedding   of the target\n"
                         "    logits      all 4,096 tokens, the head of the target\n"
                         "    made for    pocket-mxfp4 (weights 12b2b1e8b804, scale_mode even), step 3000 of 4200\n")


def test_inspect_of_a_damaged_draft_shows_the_model_and_the_fault(out: Path, pocket: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in pocket.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "dflash").mkdir()
    assert kilotok(["inspect", str(tmp_path)]) == 2
    shown = capsys.readouterr()
    assert "  model         qwen3_moe" in shown.out and shown.err == (
        f"error: {tmp_path / 'dflash'}: no config.json. Give the directory of a DFlash draft head.\n")


# ---- trees that cannot be served


def test_trees_need_a_draft_head(out: Path, pocket: Path) -> None:
    with pytest.raises(ValueError, match=r"^tree_budget: needs a draft head; got 7, and draft: left out \(--no-draft\); plain decoding\. Leave it out\.$"):
        load_served(out, name=None, use_draft=False, device="cpu", dtype=None, tree_budget=7)
    with pytest.raises(ValueError, match=r"^tree_budget: needs a draft head; got 7, and draft: none in dflash/; plain decoding\. Leave it out\.$"):
        load_served(pocket, name=None, use_draft=True, device="cpu", dtype=None, tree_budget=7)


@pytest.mark.parametrize("budget", [-1, 0, MAX_TREE_BUDGET + 1])
def test_a_budget_out_of_range(out: Path, budget: int) -> None:
    with pytest.raises(ValueError, match=rf"^tree_budget: must lie in 1\.\.63; got {budget}\. Leave it out for chains\.$"):
        load_served(out, name=None, use_draft=True, device="cpu", dtype=None, tree_budget=budget)


@pytest.mark.parametrize("budget", [1, MAX_TREE_BUDGET])
def test_a_budget_that_is_served(out: Path, budget: int) -> None:
    assert load_served(out, name=None, use_draft=True, device="cpu", dtype=None, tree_budget=budget).tree_budget == budget
