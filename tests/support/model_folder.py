"""Writes random models as Hugging Face folders with the published tensor names and shapes."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from forkpoint.model.config import ModelConfig

CONTROL = ("<|pad|>", "<|bos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|tool|>")


def published_tensors(
    config: ModelConfig, weights: dict[str, Tensor], dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Weights in the shapes that Kimi Linear's files have: conv [C, 1, 4], A_log [1, 1, H, 1]."""
    shaped: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if name.endswith("conv1d.weight"):
            tensor = tensor[:, None]
        elif name.endswith("A_log"):
            tensor = tensor.view(1, 1, config.kda_heads, 1)
        shaped[name] = tensor.contiguous() if tensor.dtype == torch.uint8 else tensor.to(dtype).contiguous()
    return shaped


def write_config(folder: Path, config: ModelConfig) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config.raw), indent=2))


def write_tokenizer(folder: Path, names: tuple[str, ...] = CONTROL, tokenizer_class: str = "ByteTokenizer") -> None:
    """A byte tokenizer whose control tokens `names` have the ids 256 and up."""
    tokens = {str(256 + index): {"content": name, "special": True} for index, name in enumerate(names)}
    raw = {"tokenizer_class": tokenizer_class, "added_tokens_decoder": tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps(raw))


def write_folder(
    folder: Path, config: ModelConfig, weights: dict[str, Tensor], dtype: torch.dtype = torch.float32
) -> Path:
    """config.json, model.safetensors and tokenizer_config.json; returns `folder`."""
    write_config(folder, config)
    write_tokenizer(folder)
    save_file(published_tensors(config, weights, dtype), folder / "model.safetensors")
    return folder


def write_shards(folder: Path, tensors: dict[str, Tensor], shards: int) -> dict[str, str]:
    """Tensors dealt over `shards` files and their index; returns the index's weight map."""
    names = sorted(tensors)
    weight_map = {name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(names)}
    for file in sorted(set(weight_map.values())):
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map
