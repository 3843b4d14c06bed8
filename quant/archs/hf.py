"""The doors to transformers: configs, models, tokenizers, and the registry of experts functions."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS


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


def use_experts_function(model: nn.Module, *, name: str, function: Callable[..., torch.Tensor]) -> None:
    """Route every experts module of `model` through `function(module, hidden, top_k_index, top_k_weights)`."""
    ALL_EXPERTS_FUNCTIONS.register(name, function)
    model.set_experts_implementation(name)  # type: ignore[operator]


def experts_function(name: str) -> Callable[..., torch.Tensor]:
    """A registered experts function of transformers, such as grouped_mm."""
    function: Callable[..., torch.Tensor] = ALL_EXPERTS_FUNCTIONS[name]
    return function
