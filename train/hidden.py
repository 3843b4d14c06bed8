"""The distance of hidden states: how far the student is from its parent before the head reads them.

    hidden_mse = mean over tokens and dims of (student - parent)**2, of the final hidden states (after the last norm), plus the same of the
                 output of every layer asked for

in fp32. Layer outputs are taken by hooks while student and parent run anyway. They are not normed: in most models their size, and so their
term, grows with depth.

Legend: T tokens, D hidden.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn


@contextlib.contextmanager
def layer_outputs(model: nn.Module, *, layers: Sequence[int]) -> Iterator[list[Tensor]]:
    """Outputs [T, D] of decoder layers, in the order given, once the model has run inside; empty until then."""
    outputs: list[Tensor] = []
    found: dict[int, Tensor] = {}

    def hook(index: int) -> Any:
        def take(module: nn.Module, args: Any, output: Any) -> None:
            state: Tensor = output[0] if isinstance(output, tuple) else output
            found[index] = state.flatten(0, 1)
            if len(found) == len(layers):
                outputs[:] = [found[i] for i in layers]
        return take

    handles = [model.model.layers[i].register_forward_hook(hook(i)) for i in layers]  # type: ignore[union-attr, index]
    try:
        yield outputs
    finally:   # off before backward, where a checkpointed layer runs a second time
        for handle in handles:
            handle.remove()


def hidden_mse(student_TD: Sequence[Tensor], *, teacher_TD: Sequence[Tensor]) -> Tensor:
    """Sum over the pairs of their mean squared distance, an fp32 scalar; gradients reach the student's."""
    terms = [(s.float() - t.detach().float()).square().mean() for s, t in zip(student_TD, teacher_TD, strict=True)]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
