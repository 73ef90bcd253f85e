"""Logits of Hugging Face transformers' own Kimi Linear, from a folder."""

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def transformers_logits(folder: Path, ids: list[int]) -> Tensor:
    """Logits [T, vocab] in fp32 with eager attention; every tensor of the folder is used, and none is missing."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers warns about kernels that a CPU has no use for
        from transformers import AutoModelForCausalLM  # imported here: it takes four seconds

        load: Any = AutoModelForCausalLM.from_pretrained
        model, report = load(folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
        with torch.no_grad():
            logits: Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
    return logits
