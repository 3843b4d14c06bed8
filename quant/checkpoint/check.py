"""Whether a parent's files are the model its config describes: every tensor there, of the right shape, none left over."""

from typing import Any

from ..archs import build_model
from ..plan import QuantPlan
from .reader import CheckpointReader


def require_fitting_parent(reader: CheckpointReader, *, config: Any, plan: QuantPlan) -> None:
    """ValueError naming the first tensor that is missing, has another shape, or is an expert the config does not have.

    transformers would fill a missing tensor with random values and go on. Tensors beyond the model (an MTP layer, buffers) are
    allowed: the export copies them.
    """
    expected: dict[str, tuple[int, ...]] = {}
    fused = {e.name: e.shape for e in plan.experts}
    for name, parameter in build_model(config, device="meta").named_parameters():
        if name not in fused:
            expected[name] = tuple(parameter.shape)
            continue
        num_experts, rows, columns = fused[name]
        for parts in plan.arch.disk_names(name, num_experts=num_experts):
            expected.update(dict.fromkeys(parts, (rows // len(parts), columns)))
    for name, shape in expected.items():
        if name not in reader:
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            raise ValueError(f"{reader.directory}: no tensor named {name}, which the config asks for. The checkpoint is incomplete, or stores its experts in "
                             "another layout than one tensor an expert and projection.")
        found = reader.info(name)[1]
        if found != shape:
            raise ValueError(f"{reader.directory}: {name} has shape {found}; its config.json asks for {shape}. They do not belong together.")
    for name in reader.names:
        if plan.arch.expert_slice(name) is not None and name not in expected:
            raise ValueError(f"{reader.directory}: {name} is an expert that its config.json does not have (num_hidden_layers or num_experts too small). "
                             "They do not belong together.")
