"""The read stream reads every word once, however it is launched."""

import functools
import operator

import pytest
import torch
from interpreted import run_in_interpreter

from kilotok.kernels.persistent import read_stream
from kilotok.kernels.persistent.read_stream import xor_words, xor_words_ref


def run_interpreted() -> None:
    words = torch.randint(-2**31, 2**31 - 1, (7 * 64,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    for programs, per_sm in ((1, 1), (3, 1), (2, 2), (9, 1)):    # fewer, and more, than there are blocks
        found = xor_words(words, launch=(64, 2, 4, per_sm), programs=programs)
        total = functools.reduce(operator.xor, found.tolist())
        print(programs, per_sm, len(found), total == xor_words_ref(words), total == xor_words_ref(words[:-1]))


def test_the_interpreted_kernel_reads_every_word_once() -> None:
    assert run_in_interpreter("test_read_stream") == ["1 1 64 True False", "3 1 192 True False", "2 2 256 True False", "9 1 576 True False"]


def test_by_hand_and_what_is_refused() -> None:
    assert xor_words_ref(torch.tensor([5, 3, -1], dtype=torch.int32)) == 5 ^ 3 ^ -1
    for words in (torch.zeros(4097, dtype=torch.int32), torch.zeros(4096)):
        with pytest.raises(ValueError, match=r"^xor_words: words must be contiguous int32, a multiple of 4096;"):
            xor_words(words, programs=1)
    assert all(block % 1024 == 0 for block, *_ in read_stream.LAUNCHES)
