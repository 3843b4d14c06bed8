"""The doors to transformers: configs, models, tokenizers, and the names its checkpoints have on disk."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, revert_weight_conversion
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

GROUPED = "grouped_mm_in_decoding"   # what transformers calls grouped products while it decodes within `grouped_while_decoding`


def check_model_dir(path: Path) -> Path:
    """`path` when it holds a Hugging Face model; FileNotFoundError saying what is missing otherwise."""
    if not path.is_dir():
        raise FileNotFoundError(f"model: no directory at {path.absolute()}. Give the path of a Hugging Face checkpoint (config.json and *.safetensors); "
                                "a model on the Hub is downloaded first, with `hf download NAME --local-dir DIR`.")
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"model: {path.absolute()} has no config.json. Give the path of a Hugging Face checkpoint.")
    return path


def load_config(path: Path) -> Any:
    """The transformers config of a local checkpoint."""
    check_model_dir(path)
    try:
        json.loads((path / "config.json").read_text())
        return AutoConfig.from_pretrained(path)
    except ValueError as error:
        raise ValueError(f"model: {path / 'config.json'} does not describe a model that transformers knows: {error}") from error


def build_model(config: Any, *, device: str) -> nn.Module:
    """The causal language model of a config, weights uninitialised on `meta` or random elsewhere."""
    with torch.device(device):
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def empty_model(config: Any, *, dtype: torch.dtype) -> nn.Module:
    """The model of a config without memory, in evaluation mode, its parameters in `dtype`; buffers keep theirs."""
    model = build_model(config, device="meta")
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.dtype != dtype:
                module._parameters[name] = nn.Parameter(parameter.detach().to(dtype), requires_grad=parameter.requires_grad)
    model.tie_weights()   # type: ignore[operator]
    return model.eval()


def load_model(path: Path, *, dtype: torch.dtype) -> nn.Module:
    """The model of a local, unquantized checkpoint, in evaluation mode."""
    check_model_dir(path)
    try:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    except SafetensorError as error:
        raise ValueError(f"model: a safetensors file in {path} cannot be read ({error}). It is truncated or damaged: copy or download it again.") from error
    return model.eval()


def load_tokenizer(path: Path) -> Any:
    return AutoTokenizer.from_pretrained(check_model_dir(path))


def memory_names(model: nn.Module, disk_names: Sequence[str]) -> dict[str, str]:
    """Checkpoint names -> names in memory, by the conversions transformers loads this family with.

    A tensor that is merged with others on loading gets the name of the merged one; one that has a name of the model's keeps it.
    """
    own = set(model.state_dict())
    transforms = get_model_conversion_mapping(model)   # type: ignore[arg-type]
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    found = {}
    for name in disk_names:
        key = name
        for renaming in renamings if name not in own else ():
            key = renaming.rename_source_key(key)[0]
        for converter in converters:
            key, matched = converter.rename_source_key(key)
            if matched is not None:
                break
        found[name] = key
    return found


def to_disk_state(model: nn.Module, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state dict under checkpoint names, as `save_pretrained` would write it."""
    converted: dict[str, torch.Tensor] = revert_weight_conversion(model, state)   # type: ignore[arg-type]
    return converted


def model_from_state(config: Any, state: dict[str, torch.Tensor], *, dtype: torch.dtype, where: str) -> nn.Module:
    """The model of a config with the tensors of a checkpoint, by checkpoint names, in evaluation mode.

    Errors: ValueError naming tensors that are missing, left over or of another shape.
    """
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    try:
        model, report = kind.from_pretrained(None, config=config, state_dict=state, dtype=dtype, output_loading_info=True)
    except RuntimeError as error:   # transformers reports shapes that do not fit so
        raise ValueError(f"{where}: tensors do not fit the config: {' '.join(str(error).split())[:300]}") from error
    missing, unexpected = sorted(report["missing_keys"]), sorted(report["unexpected_keys"])
    if missing or unexpected or report.get("mismatched_keys"):
        raise ValueError(f"{where}: tensors do not fit the config: missing {missing[:3]}, unexpected {unexpected[:3]}, "
                         f"other shape {sorted(report.get('mismatched_keys') or [])[:3]}.")
    loaded: nn.Module = model.eval()
    return loaded


@contextmanager
def grouped_while_decoding(model: nn.Module) -> Iterator[None]:
    """Within it transformers keeps grouped products of experts while it decodes.

    By itself it changes from `grouped_mm` to `batched_mm` there, which copies the experts' weights for every row: quicker for a few rows, and for the
    hundreds of a batch nearly all of the time. It leaves implementations of other names alone.
    """
    ALL_EXPERTS_FUNCTIONS.register(GROUPED, grouped_mm_experts_forward)
    before = model.get_experts_implementation() if hasattr(model, "get_experts_implementation") else {}   # type: ignore[operator]
    if "grouped_mm" not in before.values():
        yield
        return
    model.set_experts_implementation({part: GROUPED if name == "grouped_mm" else name for part, name in before.items()})   # type: ignore[operator]
    try:
        yield
    finally:
        model.set_experts_implementation(before)   # type: ignore[operator]
