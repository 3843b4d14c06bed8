"""The pocket with its draft, served over HTTP from the persistent executor on the twin of its step: every way to decode gives one text."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import POCKET, ROOT, export_experts
from served_fake import running
from step_models import weights_of_directory
from torch import Tensor

from kilotok.dflash.checkpoint import DRAFT_METADATA
from kilotok.kernels.persistent import RoundInputs, RoundRef, StepInputs
from kilotok.runtime import executors, loading
from kilotok.runtime.draft_weights import read_draft_weights
from kilotok.runtime.gpu import Gpu
from kilotok.runtime.loading import load_served
from kilotok.runtime.persistent import PersistentExecutor

PROMPTS = ("def add(a, b):\n",)
HOW: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0}, "sampled": {"temperature": 0.8, "top_p": 0.9, "seed": 7}}
DECODES: tuple[dict[str, Any], ...] = ({"decode": "plain"}, {"decode": "draft"}, {"decode": "tree", "tree_budget": 9})


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped draft was made for another rounding of these experts: without its record it is taken by its shapes."""
    directory = export_experts(POCKET, tmp_path_factory.mktemp("pocket") / "out")
    shutil.copytree(ROOT / "recipes" / "pocket" / "draft", directory / "dflash")
    (directory / "dflash" / DRAFT_METADATA).unlink()
    return directory


def test_texts_of_concurrent_requests_do_not_depend_on_how_they_are_decoded(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[list[int]] = []
    rounds: list[int] = []

    class Rounds(RoundRef):
        def step(self, inputs: StepInputs) -> None:
            log.append([slot for slot in inputs.slots_C.tolist() if slot >= 0])
            super().step(inputs)

        def round(self, inputs: RoundInputs) -> Tensor:
            rounds.append(len(inputs.live(max_length=self.shape.max_length)))
            return super().round(inputs)

    def load(directory: Path, *, taps: tuple[int, ...], num_slots: int, draft_dir: Path | None = None) -> PersistentExecutor:
        assert draft_dir is not None
        weights = weights_of_directory(directory, taps=taps)
        draft = read_draft_weights(draft_dir, embedding_VD=weights.embedding_VD, max_length=weights.shape.max_length)
        return PersistentExecutor(weights, make_runner=lambda state, drafts: Rounds(weights, state, draft, drafts), num_slots=num_slots,
                                  picks=executors.kernel_picks, draft=draft)

    gpu, real = Gpu(name="NVIDIA H200", capability=(9, 0), shared_bytes=1 << 20, num_sms=132), executors.choose_executor
    monkeypatch.setattr(loading, "choose_executor", lambda *args, **options: real(*args, gpu=lambda: gpu, **options))
    monkeypatch.setattr(executors, "load_persistent", load)
    served = load_served(out, name="pocket", use_draft=True, device="auto", dtype=None)
    bodies = [{"model": "pocket", "prompt": prompt, "max_tokens": 10, "ignore_eos": True, "return_token_ids": True, **how, **decode}
              for prompt in PROMPTS for how in HOW.values() for decode in DECODES]
    with running(served) as up, httpx.Client(base_url=up.url, timeout=120) as client:
        health = client.get("/health").json()
        assert (health["executor"], health["executor_reason"]) == ("persistent", "NVIDIA H200 runs it")
        assert health["rounds"].startswith("drafted without the host")
        with ThreadPoolExecutor(len(bodies)) as pool:
            answers = list(pool.map(lambda body: client.post("/v1/completions", json=body).json(), bodies))
        again = client.post("/v1/completions", json=bodies[1] | {"draft_length": 7}).json()      # alone: nobody wants single steps
        assert 'kilotok:executor_info{executor="persistent",model_name="pocket"} 1.0' in client.get("/metrics").text
    texts = [answer["kilotok"]["token_ids"] for answer in answers]
    for first in range(0, len(texts), len(DECODES)):
        assert texts[first] == texts[first + 1] == texts[first + 2] and len(texts[first]) == 10
    assert len({tuple(text) for text in texts}) == 2
    assert again["kilotok"]["token_ids"] == texts[1] and len(rounds) >= len(again["kilotok"]["rounds"]) - 2 > 0
    assert sum(r[1] for answer in answers for r in answer["kilotok"]["rounds"]) > 2, "no draft was accepted"
    assert max(len(set(step)) for step in log) > 3, "requests did not share steps"
