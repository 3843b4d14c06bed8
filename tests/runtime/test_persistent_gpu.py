"""The persistent executor on the kernel, where there is a Hopper GPU: the pocket against the reference, bits, residence; a little of each on the twin."""

from pathlib import Path

import pytest
import torch
from conftest import POCKET, ROOT, export_experts
from persistent_checks import agreement, check_bits, check_residence, check_rounds, pocket_texts
from step_models import twin_executor, weights_of_directory

from kilotok.runtime.executors import load_persistent
from kilotok.runtime.gpu import find_gpu, obstacle_of
from kilotok.runtime.persistent import PersistentExecutor
from kilotok.runtime.weights import load_executor

sm90 = pytest.mark.skipif(obstacle_of(find_gpu()) is not None, reason=f"needs an sm_90 GPU: {obstacle_of(find_gpu())}")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_experts(POCKET, tmp_path_factory.mktemp("pocket") / "out")


@pytest.fixture(scope="module")
def on_gpu(out: Path) -> PersistentExecutor:
    return load_persistent(out, taps=(2, 4, 5), num_slots=8)


def test_a_few_texts_on_the_twin_agree_with_the_reference(out: Path) -> None:
    executor, _ = twin_executor(weights_of_directory(out))
    found = agreement(executor, load_executor(out, device="cpu", dtype=torch.float32), pocket_texts(count=4, length=32))
    assert found.positions == 128 and found.agreed > 0.97 and found.mean_kl < 3e-3 and found.largest_relative_gap < 4, found


def test_bits_and_residence_on_the_twin() -> None:
    ids = torch.randint(300, (29,), generator=torch.Generator().manual_seed(2)).tolist()
    check_bits(twin_executor(num_slots=8)[0], ids, widths=(8, 16, 64))
    check_residence(twin_executor(resident=True)[0], ids[:5], num_tokens=20)


@sm90
def test_a_hundred_texts_agree_with_the_reference(out: Path, on_gpu: PersistentExecutor) -> None:
    texts = pocket_texts(count=100, length=128)
    found = agreement(on_gpu, load_executor(out, device="cuda", dtype=torch.float32), texts)
    print(found)
    # Where a router's tie falls the other way a position's logits move by several times the mean: its own noise is what its gap is compared with.
    assert found.agreed >= 0.985 and found.mean_kl <= 1e-3 and found.largest_relative_gap < 4, found


@sm90
def test_bits_do_not_depend_on_pieces_neighbours_or_width(on_gpu: PersistentExecutor) -> None:
    for text in pocket_texts(count=4, length=150):
        check_bits(on_gpu, text, widths=(8, 16, 32, 64))


@sm90
def test_tokens_do_not_depend_on_the_steps_a_launch(on_gpu: PersistentExecutor) -> None:
    check_residence(on_gpu, pocket_texts(count=1, length=40)[0], num_tokens=60)


@sm90
def test_tokens_of_rounds_are_those_of_plain_decoding(out: Path) -> None:
    executor = load_persistent(out, taps=(2, 4, 5), num_slots=8, draft_dir=ROOT / "recipes/pocket/draft")
    assert executor.has_rounds
    for text in pocket_texts(count=4, length=40):
        assert check_rounds(executor, text, num_tokens=64) > 1.5
