"""Tagged words (kernels/persistent/tagged.py) between threads: what their inline assembly does, for step_on_cpu.py."""

import re
import threading
from collections.abc import Callable
from typing import Any

import torch
from gluon_on_cpu import Pointer
from torch import Tensor

_LOADS = re.compile(r"// (\d+) words at (\d+) places, (\d+) words apart")
_SPANS = re.compile(r"// (\d+) words of (\d+) spans, (\d+) words apart")
_changed = threading.Condition()


def store(pointer: Pointer, bits: Tensor, tag: Any, live: Tensor) -> Tensor:
    """Value and tag of every live element at once."""
    offset, live = pointer.at(live != 0)
    bits, tag, _ = torch.broadcast_tensors(bits, torch.as_tensor(tag, dtype=torch.int32), offset)
    places = offset[live]
    assert bool((places % 2 == 0).all()) and len(places.unique()) == len(places), "a word is aligned, and two lanes have no word in common"
    with _changed:
        pointer.memory.view(torch.int32).view(-1, 2)[places // 2] = torch.stack([bits[live], tag[live]], -1)
        _changed.notify_all()
    return offset * 0


def expected(found: Tensor, tags: Tensor) -> bool:
    """Whether a reader takes words with these tags."""
    return torch.equal(found, tags)


def loads(ptx: str) -> bool:
    return _LOADS.search(ptx) is not None


def loads_spans(ptx: str) -> bool:
    return _SPANS.search(ptx) is not None


def load(ptx: str, operands: list[Any], wait: Callable[..., bool]) -> tuple[Tensor, ...]:
    """Waits until all words of live elements have the tag; gives up, and sets the fault word, when nobody can write them or the fault word is set."""
    found = _LOADS.search(ptx)
    assert found is not None
    together, num_places, stride = map(int, found.groups())
    pointer, live, tag, fault, _polls = operands
    first, live = pointer.at(live != 0)
    tags = torch.as_tensor(tag, dtype=torch.int32).expand(first.shape)
    groups = first.view(-1, together)
    assert first.shape[-1] % together == 0 and bool((groups == groups[:, :1]).all()), "elements of a lane have the address of the first"
    own = torch.arange(first.shape[-1]) % together
    places = [torch.where(live, first + 2 * (place * stride + own), 0) for place in range(num_places)]
    assert not bool(live.any()) or max(int(at.max()) for at in places) + 1 < len(pointer.memory), "a word outside of its tensor"
    words, fault_word = pointer.memory.view(torch.int32), fault.memory

    def there() -> bool:
        return all(expected(words[at[live] + 1], tags[live]) for at in places)

    with _changed:
        gave_up = wait(_changed, lambda: there() or bool(fault_word[0]), f"{int(live.sum()) * num_places} words with tag {int(tags.flatten()[0])}")
        values = tuple(torch.where(live, words[at], 0) for at in places)
    if gave_up:
        fault_word[0] = 1
    return values


def load_spans(ptx: str, operands: list[Any], wait: Callable[..., bool]) -> tuple[Tensor, ...]:
    """The same for `_poll_spans` of merge_device.py: of each element the words of its first spans, so many as it has; 0 of the others."""
    found = _SPANS.search(ptx)
    assert found is not None
    words_of, spans, stride = map(int, found.groups())
    pointer, count, tag, fault, _polls = operands
    first, count, tags = torch.broadcast_tensors(torch.as_tensor(pointer.offset), count, tag)
    words, fault_word = pointer.memory.view(torch.int32), fault.memory
    live = [count > i // words_of for i in range(spans * words_of)]
    places = [torch.where(live[i], first + 2 * (i // words_of * stride + i % words_of), 0) for i in range(spans * words_of)]
    assert bool((first % (2 * words_of) == 0).all()) and max(int(at.max()) for at in places) + 1 < len(words), "a word unaligned, or outside of its tensor"

    def there() -> bool:
        return all(expected(words[at[mask] + 1], tags[mask]) for at, mask in zip(places, live, strict=True))

    with _changed:
        gave_up = wait(_changed, lambda: there() or bool(fault_word[0]), f"words of {int(count.max())} spans with tag {int(tags.flatten()[0])}")
        values = tuple(torch.where(mask, words[at], 0) for at, mask in zip(places, live, strict=True))
    if gave_up:
        fault_word[0] = 1
    return values
