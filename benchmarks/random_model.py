"""A model of Kimi Linear's geometry with random weights, as a folder to serve: `python -m benchmarks.random_model DIR`.

Its state is as large as the published model's: 20 KDA layers of 32 heads, 7 MLA layers with latents of 576. Its FFNs
are dense and small, its tokens are bytes, and a greedy stream never ends a turn: it fits one GPU twice.
"""

import argparse
from pathlib import Path
from typing import Any, Final

import torch

from tests.support.model_folder import write_folder
from tests.support.random_model import random_config, random_weights

KIMI_LINEAR: Final[dict[str, Any]] = {
    "layers": 27,
    "mla_layers": [4, 8, 12, 16, 20, 24, 27],
    "heads": 32,
    "key_dim": 128,
    "hidden_size": 2304,
    "intermediate_size": 2304,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
CONTROL_BEGIN: Final = 256
"""The least id that is no byte."""
SMALL: Final[dict[str, Any]] = {"layers": 4, "heads": 2, "key_dim": 16}
"""To try what uses it on a CPU."""


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.random_model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--small", action="store_true", help="a few thousand weights")
    given = parser.parse_args()
    sizes = SMALL if given.small else KIMI_LINEAR
    config = random_config("softplus", vocab_size=272, model_max_length=1 << 20, dtype="bfloat16", **sizes)
    weights = random_weights(config)
    # Logits of 0 are never the largest: a greedy stream does not end by itself.
    weights["lm_head.weight"][CONTROL_BEGIN:] = 0
    write_folder(given.folder, config, weights, torch.bfloat16)


if __name__ == "__main__":
    main()
