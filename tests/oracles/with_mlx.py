"""Run in an environment of its own, which has mlx-lm and no torch: `with_mlx.py FOLDER OUT ID...` writes fp32 logits.

mlx-lm's Kimi Linear builds MLA's inner norm with rms_norm_eps, the published code with 1e-6 (its K3 as well); the
comparison is of everything else, so the norm is given the published eps.
"""

import sys
from pathlib import Path

import mlx.core as mx  # type: ignore[import-not-found, unused-ignore]
from mlx_lm.utils import load_model  # type: ignore[import-not-found, unused-ignore]

INNER_EPS = 1e-6


def main() -> None:
    folder, out, *ids = sys.argv[1:]
    model, _ = load_model(Path(folder))
    for layer in model.layers:
        if hasattr(layer.self_attn, "kv_a_layernorm"):
            layer.self_attn.kv_a_layernorm.eps = INNER_EPS
    logits = model(mx.array([[int(token) for token in ids]]))[0].astype(mx.float32)
    mx.save_safetensors(out, {"logits": logits})


if __name__ == "__main__":
    main()
