"""The model in fp64, token by token, written from the papers' equations only: shares no code with forkpoint.model."""

import torch
from torch import Tensor

from forkpoint.model.config import ModelConfig


def reference_logits(config: ModelConfig, weights: dict[str, Tensor], ids: list[int]) -> Tensor:
    """Logits [T, vocab] fp64 of a whole sequence."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    x = w["model.embed_tokens.weight"][ids]
    for layer, kind in enumerate(config.layer_kinds):
        own = {
            k.removeprefix(f"model.layers.{layer}."): t for k, t in w.items() if k.startswith(f"model.layers.{layer}.")
        }
        attend = _kda if kind == "kda" else _mla
        x = x + attend(config, own, _rms(x, own["input_layernorm.weight"], config.rms_norm_eps))
        h = _rms(x, own["post_attention_layernorm.weight"], config.rms_norm_eps)
        gate, up = h @ own["mlp.gate_proj.weight"].T, h @ own["mlp.up_proj.weight"].T
        x = x + (torch.nn.functional.silu(gate) * up) @ own["mlp.down_proj.weight"].T
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return _rms(x, w["model.norm.weight"], config.rms_norm_eps) @ head.T


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def _conv(x: Tensor, taps: Tensor) -> Tensor:
    padded = torch.cat([x.new_zeros(3, x.shape[1]), x])
    total = sum(padded[j : j + len(x)] * taps.reshape(-1, 4)[:, j] for j in range(4))
    assert isinstance(total, Tensor)
    return torch.nn.functional.silu(total)


def _kda(config: ModelConfig, w: dict[str, Tensor], h: Tensor) -> Tensor:
    heads, key, value, length = config.kda_heads, config.kda_key_dim, config.kda_value_dim, len(h)

    def project(name: str, x: Tensor = h) -> Tensor:
        return x @ w[f"self_attn.{name}_proj.weight"].T

    q, k, v = (_conv(project(n), w[f"self_attn.{n}_conv1d.weight"]) for n in "qkv")
    q, k, v = q.view(length, heads, key), k.view(length, heads, key), v.view(length, heads, value)
    q = q / torch.sqrt((q * q).sum(-1, keepdim=True) + 1e-6) / key**0.5
    k = k / torch.sqrt((k * k).sum(-1, keepdim=True) + 1e-6)
    z = project("f_b", project("f_a")) + w["self_attn.dt_bias"]
    z, rate = z.view(length, heads, key), w["self_attn.A_log"].reshape(-1)[:heads].exp()[:, None]
    if config.gate_lower_bound is None:
        log_decay = -rate * torch.nn.functional.softplus(z, threshold=200)
    else:
        log_decay = config.gate_lower_bound * torch.sigmoid(rate * z)
    beta, decay = torch.sigmoid(project("b")), log_decay.exp()
    state, out = h.new_zeros(heads, key, value), h.new_zeros(length, heads, value)
    for t in range(length):
        state = decay[t][..., None] * state
        error = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("h,hk,hv->hkv", beta[t], k[t], error)
        out[t] = torch.einsum("hkv,hk->hv", state, q[t])
    gate = project("g") if config.full_rank_gate else project("g_b", project("g_a"))
    out = _rms(out, w["self_attn.o_norm.weight"], config.rms_norm_eps) * torch.sigmoid(gate.view(length, heads, value))
    return project("o", out.reshape(length, -1))


def _mla(config: ModelConfig, w: dict[str, Tensor], h: Tensor) -> Tensor:
    heads, nope, rope, rank = config.mla_heads, config.qk_nope_head_dim, config.qk_rope_head_dim, config.kv_lora_rank
    length = len(h)
    if config.q_lora_rank is None:
        q = h @ w["self_attn.q_proj.weight"].T
    else:
        low = _rms(h @ w["self_attn.q_a_proj.weight"].T, w["self_attn.q_a_layernorm.weight"], 1e-6)
        q = low @ w["self_attn.q_b_proj.weight"].T
    compressed = h @ w["self_attn.kv_a_proj_with_mqa.weight"].T
    latent = _rms(compressed[:, :rank], w["self_attn.kv_a_layernorm.weight"], 1e-6)
    expanded = (latent @ w["self_attn.kv_b_proj.weight"].T).view(length, heads, -1)
    shared = compressed[:, None, rank:].expand(-1, heads, -1)
    key, value = torch.cat([expanded[..., :nope], shared], -1), expanded[..., nope:]
    scores = torch.einsum("qhd,khd->hqk", q.view(length, heads, nope + rope), key) / (nope + rope) ** 0.5
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    probabilities = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    out = torch.einsum("hqk,khd->qhd", probabilities, value).reshape(length, -1)
    if config.mla_output_gate:
        out = out * torch.sigmoid(h @ w["self_attn.g_proj.weight"].T)
    return out @ w["self_attn.o_proj.weight"].T
