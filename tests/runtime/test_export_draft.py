"""`kilotok export` of a distillation run: what it says of the draft is what the run's record holds."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kilotok.dflash.checkpoint import read_draft
from kilotok.dflash.config import DraftConfig
from kilotok.dflash.model import DraftModel
from kilotok.runtime.cli import main as kilotok

STEPS = 3


def write_run(directory: Path, *, step: int, complete: bool, length: float | None = 2.5, **options: Any) -> DraftModel:
    """meta.json and the newest checkpoint, as a run leaves them."""
    config = DraftConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=100,
                         target_layer_ids=(0, 1), num_target_layers=2, mask_token_id=3, **options)
    draft = DraftModel(config)
    draft.initialize(generator=torch.Generator().manual_seed(0), final_norm_D=torch.ones(64))
    meta = {"kind": "dflash-distill", "status": "running", "max_steps": STEPS, "versions": {}, "draft_config": config.to_json(),
            "target": {"name": "tiny", "sha256": "0" * 64, "scale_mode": "even"}}
    if complete:
        meta |= {"status": "complete", "draft": str(directory / "finished"), "after": {"all": {"acceptance_length_repeats_cut": length}}}
    (directory / "checkpoints").mkdir(parents=True)
    (directory / "meta.json").write_text(json.dumps(meta))
    torch.save({"state_dict": {f"draft.{name}": w for name, w in draft.state_dict().items()}}, directory / "checkpoints" / f"step-{step:08d}.ckpt")
    return draft


@pytest.mark.parametrize(("step", "complete", "length", "said"), [
    (STEPS, True, 2.5, "its acceptance was measured: 2.500 tokens a round on held-out prompts"),
    (STEPS, True, None, "its acceptance was measured, on no rounds"),
    (STEPS, False, None, "its acceptance at this step was not measured"),
    (1, False, None, "its acceptance at this step was not measured")])
def test_what_is_said_of_acceptance_is_what_was_measured(step: int, complete: bool, length: float | None, said: str, tmp_path: Path,
                                                         capsys: pytest.CaptureFixture[str]) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    draft = write_run(run, step=step, complete=complete, length=length)
    assert kilotok(["export", str(run), str(out)]) == 0
    assert capsys.readouterr().out == f"{out}: the draft of {run} at step {step} of {STEPS}; {said}\n"
    written = read_draft(out, dtype=torch.float32).state_dict()
    assert all(torch.equal(w.bfloat16(), written[name].bfloat16()) for name, w in draft.state_dict().items())


@pytest.mark.parametrize("complete", [True, False])
def test_a_reduced_vocabulary_is_where_the_finished_run_wrote_it(complete: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    write_run(run, step=STEPS, complete=complete, draft_vocab_size=50)
    assert kilotok(["export", str(run), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.endswith(f"It is finished: use what it wrote to {run / 'finished'}.\n" if complete else "Continue it with --resume.\n")
    assert error.startswith(f"error: {run}: a draft with a reduced vocabulary") and error.count("--resume") == (not complete)
    assert not (tmp_path / "out").exists()
