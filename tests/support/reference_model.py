"""Kimi Linear and Kimi K3 in fp64, written from the published equations only: shares no code with the product.

Reads a `config.json` and tensors as a folder holds them: with or without `language_model.`, conv weights with or
without their middle axis, `A_log` padded, experts as MXFP4.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Raw = Mapping[str, Any]
Weights = dict[str, Tensor]


def reference_logits(
    config: Raw, tensors: Mapping[str, Tensor], ids: Sequence[int], routes: Sequence[Tensor] | None = None
) -> Tensor:
    """Logits [T, vocab] fp64 of a whole sequence.

    `routes`: the experts that its tokens go to, [T, k] of each layer that has some, instead of those it would choose.
    """
    config = config.get("text_config", config)
    given = None if routes is None else iter(routes)
    w = {
        name.removeprefix("language_model."): t if t.dtype == torch.uint8 else t.double() for name, t in tensors.items()
    }
    mixed, eps = config.get("attn_res_block_size"), config.get("rms_norm_eps", 1e-5)
    x, bank = w["model.embed_tokens.weight"][list(ids)], list[Tensor]()
    for layer in range(config["num_hidden_layers"]):
        own = _inside(w, f"model.layers.{layer}.")
        h = _mix(bank, x, own, "self_attention_res", eps) if bank else x
        starts = mixed is not None and layer % mixed == 0
        if starts:
            bank.append(x)
        attend = _kda if layer + 1 in config["linear_attn_config"]["kda_layers"] else _mla
        delta = attend(config, _inside(own, "self_attn."), _rms(h, own["input_layernorm.weight"], eps))
        x = delta if starts else x + delta
        h = x if mixed is None else _mix(bank, x, own, "mlp_res", eps)
        h = _rms(h, own["post_attention_layernorm.weight"], eps)
        experts = _inside(own, "block_sparse_moe.")
        x = x + (_moe(config, experts, h, given) if experts else _glu(config, _inside(own, "mlp."), h))
    if mixed is not None:
        x = _mix(bank, x, w, "model.output_attn_res", eps)
    head = w["model.embed_tokens.weight"] if config.get("tie_word_embeddings") else w["lm_head.weight"]
    return _rms(x, w["model.norm.weight"], eps) @ head.T


def _inside(w: Weights, prefix: str) -> Weights:
    return {name.removeprefix(prefix): tensor for name, tensor in w.items() if name.startswith(prefix)}


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def _mix(bank: list[Tensor], x: Tensor, w: Weights, name: str, eps: float) -> Tensor:
    sources = torch.stack([*bank, x])
    keys = sources / torch.sqrt((sources * sources).mean(-1, keepdim=True) + eps)
    scores = keys @ (w[f"{name}_norm.weight"] * w[f"{name}_proj.weight"].reshape(-1))
    return (scores.softmax(0)[..., None] * sources).sum(0)


def _activate(config: Raw, gate: Tensor, up: Tensor) -> Tensor:
    if config.get("hidden_act", "silu") == "silu":
        return gate * torch.sigmoid(gate) * up
    beta, linear = config.get("activation_situ_beta"), config.get("activation_situ_linear_beta")
    beta = 1.0 if beta is None else beta
    up = up if linear is None else linear * torch.tanh(up / linear)
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * up


def _glu(config: Raw, w: Weights, x: Tensor) -> Tensor:
    gate, up = x @ w["gate_proj.weight"].T, x @ w["up_proj.weight"].T
    return _activate(config, gate, up) @ w["down_proj.weight"].T


def _moe(config: Raw, w: Weights, x: Tensor, given: Iterator[Tensor] | None) -> Tensor:
    scores = torch.sigmoid(x @ w["gate.weight"].T)
    if given is not None:
        chosen = next(given)
    else:
        chosen = (scores + w["gate.e_score_correction_bias"]).topk(config["num_experts_per_token"], dim=1).indices
    weights = scores.gather(1, chosen)
    if config.get("moe_renormalize", True) and chosen.shape[1] > 1:
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    shares = torch.zeros_like(scores).scatter(1, chosen, weights * config.get("routed_scaling_factor", 1.0))
    latent = config.get("routed_expert_hidden_size") is not None
    z = x @ w["routed_expert_down_proj.weight"].T if latent else x
    out = torch.zeros_like(z)
    for expert in range(config["num_experts"]):
        gate_up = [z @ _matrix(w, f"experts.{expert}.{name}").T for name in ("w1", "w3")]
        down = _matrix(w, f"experts.{expert}.w2")
        out = out + shares[:, expert : expert + 1] * (_activate(config, *gate_up) @ down.T)
    if latent and config.get("latent_moe_use_norm"):
        out = _rms(out, w["routed_expert_norm.weight"], config.get("rms_norm_eps", 1e-5))
    out = out @ w["routed_expert_up_proj.weight"].T if latent else out
    return out + _glu(config, _inside(w, "shared_experts."), x)


def _matrix(w: Weights, name: str) -> Tensor:
    """A matrix that is stored as it is, or as MXFP4: sign, two bits of exponent and one of mantissa an element."""
    if f"{name}.weight" in w:
        return w[f"{name}.weight"]
    packed, scales = w[f"{name}.weight_packed"].long(), w[f"{name}.weight_scale"].double()
    code = torch.stack((packed % 16, packed // 16), -1).flatten(1)
    sign, exponent, mantissa = 1.0 - 2.0 * (code // 8), code // 2 % 4, (code % 2).double()
    element = torch.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * torch.pow(2.0, exponent.double() - 1))
    return sign * element * torch.pow(2.0, scales - 127).repeat_interleave(32, dim=1)


def _conv(x: Tensor, taps: Tensor) -> Tensor:
    padded = torch.cat([x.new_zeros(3, x.shape[1]), x])
    total = sum(padded[j : j + len(x)] * taps.reshape(-1, 4)[:, j] for j in range(4))
    assert isinstance(total, Tensor)
    return total * torch.sigmoid(total)


def _kda(config: Raw, w: Weights, h: Tensor) -> Tensor:
    linear, length = config["linear_attn_config"], len(h)
    heads, key, bound = linear["num_heads"], linear["head_dim"], linear.get("gate_lower_bound")

    def project(name: str, x: Tensor = h) -> Tensor:
        return x @ w[f"{name}_proj.weight"].T

    q, k, v = (_conv(project(name), w[f"{name}_conv1d.weight"]).view(length, heads, -1) for name in "qkv")
    q = q / torch.sqrt((q * q).sum(-1, keepdim=True) + 1e-6) / key**0.5
    k = k / torch.sqrt((k * k).sum(-1, keepdim=True) + 1e-6)
    z = (project("f_b", project("f_a")) + w["dt_bias"]).view(length, heads, key)
    rate = w["A_log"].reshape(-1)[:heads].exp()[:, None]
    if bound is None:
        log_decay = -rate * torch.nn.functional.softplus(z, threshold=200)
    else:
        log_decay = bound * torch.sigmoid(rate * z)
    beta, decay = torch.sigmoid(project("b")), log_decay.exp()
    state, out = h.new_zeros(heads, key, v.shape[2]), torch.zeros_like(v)
    for t in range(length):
        state = decay[t][..., None] * state
        error = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("h,hk,hv->hkv", beta[t], k[t], error)
        out[t] = torch.einsum("hkv,hk->hv", state, q[t])
    gate = project("g") if linear.get("use_full_rank_gate") else project("g_b", project("g_a"))
    out = _rms(out, w["o_norm.weight"], config.get("rms_norm_eps", 1e-5)) * torch.sigmoid(gate.view(out.shape))
    return project("o", out.reshape(length, -1))


def _mla(config: Raw, w: Weights, h: Tensor) -> Tensor:
    heads, length, rank = config["num_attention_heads"], len(h), config["kv_lora_rank"]
    nope, width = config["qk_nope_head_dim"], config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    if config.get("q_lora_rank") is None:
        q = h @ w["q_proj.weight"].T
    else:
        q = _rms(h @ w["q_a_proj.weight"].T, w["q_a_layernorm.weight"], 1e-6) @ w["q_b_proj.weight"].T
    compressed = h @ w["kv_a_proj_with_mqa.weight"].T
    latent = _rms(compressed[:, :rank], w["kv_a_layernorm.weight"], 1e-6)
    expanded = (latent @ w["kv_b_proj.weight"].T).view(length, heads, -1)
    shared = compressed[:, None, rank:].expand(-1, heads, -1)
    key, value = torch.cat([expanded[..., :nope], shared], -1), expanded[..., nope:]
    scores = torch.einsum("qhd,khd->hqk", q.view(length, heads, width), key) / width**0.5
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    probabilities = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    out = torch.einsum("hqk,khd->qhd", probabilities, value).reshape(length, -1)
    if config.get("mla_use_output_gate"):
        out = out * torch.sigmoid(h @ w["g_proj.weight"].T)
    return out @ w["o_proj.weight"].T
