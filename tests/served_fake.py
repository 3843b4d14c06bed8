"""A model without weights for the server's tests: every next token is a fixed function of the tokens before it.

The target's logits favour words of a small list, so that answers are text with letters, emoji and an end token now and
then; the drafter knows the target and is right or wrong by a pattern of the position.
"""

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import uvicorn
from conftest import POCKET
from torch import Tensor
from transformers import AutoTokenizer

from kilotok.dflash.generate import TargetStep
from kilotok.dflash.sampling import Sampling, choose_tokens
from kilotok.dflash.tree import ANCHOR, DraftTree, chain
from kilotok.runtime.engine import Engine
from kilotok.runtime.serve import bind
from kilotok.runtime.server.app import create_app
from kilotok.runtime.server.served import Served

TOKENIZER = AutoTokenizer.from_pretrained(POCKET)
VOCAB_SIZE = 512     # of the model: the tokenizer's first tokens, bytes and short words; noise for all of them would be most of the tests' time
EOS = 2
NUM_DRAFTS = 7
MAX_LENGTH = 256
# tokens of these texts are likely; those of the emoji are parts of characters
TEXTS = ("def add(a, b):\n    return a + b\n", " the cat sat", "\u00e9 \u00df \u65e5\u672c \U0001f600", "0123")
LIKELY = sorted({i for text in TEXTS for i in TOKENIZER(text)["input_ids"] if i < VOCAB_SIZE})


def row_of(history: Sequence[int]) -> Tensor:
    """Logits after these tokens; greedy never ends by itself, sampling does at times."""
    digest = hashlib.blake2b(str(list(history[-3:])).encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
    row = torch.full((VOCAB_SIZE,), -30.0)
    row[LIKELY] = 4 * torch.rand(len(LIKELY), generator=generator)
    row[EOS] = 0.0
    return row


@dataclass
class FakeTarget:
    max_length: int
    step_s: float
    fails_at: int | None
    tokens: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.tokens)

    def read(self, ids: Sequence[int], *, last_logits_only: bool = False) -> TargetStep:
        time.sleep(self.step_s)
        rows = []
        for token in ids:
            if self.length == self.fails_at:
                raise ArithmeticError("a position that breaks the model")
            self.tokens.append(token)
            rows.append(row_of(self.tokens))
        logits = torch.stack(rows[-1:] if last_logits_only else rows)
        return TargetStep(logits_TV=logits, features_TF=torch.tensor(list(ids), dtype=torch.float32)[:, None])

    def rewind(self, length: int) -> None:
        del self.tokens[length:]

    def read_tree(self, anchor: int, tree: DraftTree) -> TargetStep:
        self.tree, start = (anchor, tree), self.length
        steps = []
        for node in range(ANCHOR, len(tree)):
            steps.append(self.read([anchor, *(tree.token_ids[n] for n in tree.path(node))]))
            self.rewind(start)
        return TargetStep(logits_TV=torch.stack([s.logits_TV[-1] for s in steps]), features_TF=torch.stack([s.features_TF[-1] for s in steps]))

    def keep(self, path: Sequence[int]) -> None:
        self.tokens += [self.tree[0], *(self.tree[1].token_ids[n] for n in path)]


@dataclass
class FakeExecutor:
    max_length: int = MAX_LENGTH
    step_s: float = 0.0
    fails_at: int | None = None   # the position that no sequence can read
    opened: list[bool] = field(default_factory=list)   # one_column of every sequence

    def open(self, *, one_column: bool = False) -> FakeTarget:
        self.opened.append(one_column)
        return FakeTarget(max_length=self.max_length, step_s=self.step_s, fails_at=self.fails_at)


class FakeDrafter:
    """Reads the tokens out of the features; the first proposal at a position divisible by five is wrong."""

    num_drafts = NUM_DRAFTS

    def __init__(self) -> None:
        self._tokens: list[int] = []

    def observe(self, features_TF: Tensor) -> None:
        self._tokens += [int(x) for x in features_TF[:, 0]]

    def propose(self, anchor: int, *, count: int, sampling: Sampling) -> list[int]:
        history = [*self._tokens, anchor]
        proposals: list[int] = []
        while len(proposals) < count and len(history) % 5:
            history += choose_tokens(row_of(history)[None], first_position=len(history), sampling=sampling)
            proposals.append(history[-1])
        return proposals + [0] * (count - len(proposals))   # what follows a wrong one is never looked at

    def propose_chain(self, anchor: int, *, count: int, sampling: Sampling) -> DraftTree:
        """As sure of every proposal as of the others."""
        return chain(self.propose(anchor, count=count, sampling=sampling), confidences=[0.8] * count)

    def propose_tree(self, anchor: int, *, count: int, budget: int, sampling: Sampling) -> DraftTree:
        """The chain, then siblings of its first token: the target's own pick, and likely ones."""
        proposals, history = self.propose(anchor, count=count, sampling=sampling)[:budget], [*self._tokens, anchor]
        pick = choose_tokens(row_of(history)[None], first_position=len(history), sampling=sampling)
        others = [t for t in dict.fromkeys((*pick, *LIKELY)) if t != proposals[0]][:budget - len(proposals)]
        return DraftTree(token_ids=(*proposals, *others), parents=(*range(ANCHOR, len(proposals) - 1), *[ANCHOR] * len(others)),
                         confidences=(*[0.5] * len(proposals), *[0.4 / max(1, len(others))] * len(others)))


class WrongDrafter(FakeDrafter):
    """Never right."""

    def propose(self, anchor: int, *, count: int, sampling: Sampling) -> list[int]:
        return [1] * count


def make_served(*, step_s: float = 0.0, fails_at: int | None = None, make_drafter: Callable[[], Any] | None = FakeDrafter, **changes: Any) -> Served:
    given = {"name": "fake", "executor": FakeExecutor(step_s=step_s, fails_at=fails_at), "make_drafter": make_drafter, "tokenizer": TOKENIZER,
             "eos_ids": frozenset({EOS}), "max_length": MAX_LENGTH, "fingerprint": "fp_test", "description": {"executor": "fake", "draft": "fake"}}
    return Served(**{**given, **changes})


@dataclass
class Running:
    """A server on a free port, in a thread of this process."""

    served: Served
    engine: Engine
    url: str

    def wait_idle(self, *, limit_s: float = 5.0) -> None:
        """Returns when no request is running or waiting."""
        end = time.monotonic() + limit_s
        while self.engine.num_running or self.engine.num_waiting:
            assert time.monotonic() < end, f"{self.engine.num_running} running, {self.engine.num_waiting} waiting after {limit_s} s"
            time.sleep(0.01)


@contextlib.contextmanager
def running(served: Served, *, max_running: int = 8) -> Iterator[Running]:
    """Serve over real HTTP while the block lasts."""
    engine = Engine(served.executor, make_drafter=served.make_drafter, max_running=max_running)
    server = uvicorn.Server(uvicorn.Config(create_app(served, engine=engine), log_level="warning", access_log=False, http="h11", lifespan="off",
                                           timeout_graceful_shutdown=1))
    with bind("127.0.0.1", 0) as sock:
        sock.listen()
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            yield Running(served=served, engine=engine, url=f"http://127.0.0.1:{sock.getsockname()[1]}")
        finally:
            server.should_exit = True
            thread.join()
            engine.close()
