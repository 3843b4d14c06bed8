"""What must hold of a persistent executor whatever runs its steps: the twin on a CPU, on a little; the kernel on a GPU, on all of it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from conftest import POCKET, ROOT
from tolerances import assert_equal
from torch import Tensor

from kilotok.dflash.sampling import Sampling
from kilotok.quant.archs import load_tokenizer
from kilotok.runtime.persistent import Chunk, PersistentExecutor
from kilotok.runtime.reference import ReferenceExecutor

NO_SAMPLING = Sampling()


def pocket_texts(*, count: int, length: int) -> list[list[int]]:
    """Excerpts of shipped prompts and held-out answers of all domains, in turn."""
    tokenizer, texts = load_tokenizer(POCKET), list[list[int]]()
    for domain in ("code", "math", "chat", "agent"):
        lines = [line for folder in ("prompts", "pocket/heldout") for line in (ROOT / "recipes" / folder / f"{domain}.jsonl").read_text().splitlines()]
        parts = [row["prompt"] + "\n" + row.get("response", "") for row in map(json.loads, lines)]
        ids = [i for part in parts for i in tokenizer(part)["input_ids"]]
        texts.append(ids)
    longest = max(map(len, texts)) // length
    found = [ids[n * length:(n + 1) * length] for n in range(longest) for ids in texts if (n + 1) * length <= len(ids)]
    assert len(found) >= count, f"{len(found)} excerpts of {length} tokens"
    return found[:count]


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Teacher-forced, over all positions of some texts."""

    positions: int
    agreed: float               # share of positions whose argmax is the reference's
    noise: float                # RMS of the difference of logits
    largest_gap: float          # of the reference's top two, where the argmax differs; 0 if it never does
    largest_relative_gap: float     # the same in RMS differences of that position
    mean_kl: float              # from the reference

    def __str__(self) -> str:
        return (f"{self.positions} positions: argmax agrees on {100 * self.agreed:.2f} %, logit noise {self.noise:.4f}, largest top-2 gap of a disagreement "
                f"{self.largest_gap:.4f} ({self.largest_gap / self.noise:.1f} times the noise, {self.largest_relative_gap:.1f} times that of its position), "
                f"mean KL {self.mean_kl:.2e}")


def agreement(executor: PersistentExecutor, reference: ReferenceExecutor, texts: Sequence[Sequence[int]]) -> Agreement:
    gaps, relative, squares, kl, agreed, positions = [0.0], [0.0], 0.0, 0.0, 0, 0
    for ids in texts:
        sequence = executor.open()
        got = sequence.read(ids).logits_TV.double()
        sequence.close()
        expected = reference.open().read(ids).logits_TV.double().to(got.device)
        noise_T = (got - expected).square().mean(-1).sqrt()
        differ = got.argmax(-1) != expected.argmax(-1)
        top = expected.topk(2, dim=-1).values
        gap_T = top[:, 0] - top[:, 1]
        gaps += gap_T[differ].tolist()
        relative += (gap_T / noise_T)[differ].tolist()
        squares += float((got - expected).square().mean(-1).sum())
        log_expected = expected.log_softmax(-1)
        kl += float((log_expected.exp() * (log_expected - got.log_softmax(-1))).sum())
        agreed += int((~differ).sum())
        positions += len(ids)
    return Agreement(positions=positions, agreed=agreed / positions, noise=(squares / positions)**0.5, largest_gap=max(gaps),
                     largest_relative_gap=max(relative), mean_kl=kl / positions)


def check_bits(executor: PersistentExecutor, ids: Sequence[int], *, widths: Sequence[int]) -> None:
    """The logits of every position of a text are the same bits read token by token, eight at a time, behind a prefix that was computed again, and beside
    as many other sequences as each width holds."""
    sequence = executor.open()
    alone = torch.cat([sequence.read([token]).logits_TV for token in ids])
    sequence.rewind(0)
    assert_equal(sequence.read(ids).logits_TV, alone, bits=True, what="eight at a time")
    sequence.rewind(len(ids) // 2 + 1)
    sequence.read([i ^ 1 for i in ids[len(ids) // 2 + 1:]])
    sequence.rewind(len(ids) // 3)
    assert_equal(sequence.read(ids[len(ids) // 3:]).logits_TV, alone[len(ids) // 3:], bits=True, what="behind a prefix that was computed again")
    sequence.close()
    for width in widths:
        others = [executor.open() for _ in range(width // 8 - 1)]
        sequence, found, start = executor.open(), list[Tensor](), 0
        while start < len(ids):
            part = tuple(ids[start:start + 8])
            chunks = []
            for n, one in enumerate([*others[:len(others) // 2], sequence, *others[len(others) // 2:]]):
                tokens = part if one is sequence else tuple(ids[(start + 3 * n + i) % len(ids)] for i in range(8))
                one.reserve(start + 8)
                chunks.append(Chunk(sequence=one, ids=tokens, position=start, sampling=NO_SAMPLING, last_only=False))
            found.append(executor.step(chunks)[len(others) // 2].logits_TV)
            start += 8
        assert_equal(torch.cat(found), alone, bits=True, what=f"in steps of {width} columns")
        for one in (*others, sequence):
            one.close()


def check_residence(executor: PersistentExecutor, ids: Sequence[int], *, num_tokens: int) -> None:
    """Tokens of plain decoding do not depend on how many steps go without the host, greedy and sampled, two sequences at a time."""
    samplings = (NO_SAMPLING, Sampling(temperature=0.8, seed=5))
    texts: list[list[list[int]]] = []
    for num_steps in (1, 5, 16):
        sequences, found = [executor.open() for _ in samplings], [list[int](), list[int]()]
        for sequence in sequences:
            sequence.read(ids)
        tokens, position = [ids[-1]] * 2, len(ids)
        while len(found[0]) < num_tokens:
            count = min(num_steps, num_tokens - len(found[0]))
            chunks = [Chunk(sequence=s, ids=(t,), position=position, sampling=how, last_only=False)
                      for s, t, how in zip(sequences, tokens, samplings, strict=True)]
            more = executor.run_steps(chunks, count, stopped=lambda: False)
            assert {len(m) for m in more} == {count}
            for text, m in zip(found, more, strict=True):
                text += m
            tokens, position = [m[-1] for m in more], position + count
        for sequence in sequences:
            sequence.close()
        texts.append(found)
    assert texts[0] == texts[1] == texts[2] and texts[0][0] != texts[0][1]


def check_rounds(executor: PersistentExecutor, ids: Sequence[int], *, num_tokens: int) -> float:
    """Tokens of rounds are those of plain decoding, greedy and sampled, two sequences and one at a time, whatever number of rounds goes without the host and
    with single steps in between. num_tokens: as many as steps can go without it. Returns committed tokens a round."""
    samplings = (NO_SAMPLING, Sampling(temperature=0.8, seed=5))
    expected, committed, rounds = list[list[int]](), 0, 0
    for how in samplings:
        sequence = executor.open()
        sequence.read(ids)
        expected.append(executor.run_steps([Chunk(sequence=sequence, ids=(ids[-1],), position=len(ids), sampling=how, last_only=False)], num_tokens,
                                           stopped=lambda: False)[0])
        sequence.close()
    for places, num_rounds in (((0, 1), 1), ((0, 1), 4), ((1,), 2)):
        sequences, found = [executor.open() for _ in places], [list[int]() for _ in places]
        for sequence in sequences:
            sequence.read(ids)
        turn = 0
        while min(map(len, found)) < num_tokens - 8 * num_rounds:
            chunks = [Chunk(sequence=s, ids=(text[-1] if text else ids[-1],), position=s.length, sampling=samplings[place], last_only=False)
                      for s, text, place in zip(sequences, found, places, strict=True)]
            turn += 1
            if turn % 3 == 0:
                more = executor.run_steps(chunks, 1, stopped=lambda: False)
            else:
                done = executor.run_rounds(chunks, num_rounds, limits=[7] * len(places), stopped=lambda: False)
                more = [[t for tokens, _ in one for t in tokens] for one in done]
                committed, rounds = committed + sum(map(len, more)), rounds + sum(map(len, done))
            for sequence, text, m in zip(sequences, found, more, strict=True):
                text += m
                sequence.length += len(m)
        for sequence, text, place in zip(sequences, found, places, strict=True):
            assert text[:num_tokens] == expected[place][:len(text)], f"{num_rounds} rounds at a time"
            sequence.close()
    return committed / rounds
