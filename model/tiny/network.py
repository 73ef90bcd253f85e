"""The tiny model's training network: fresh weights, and its layers as pure functions over flat bf16 rows.

Rows of all sequences are flat, [N, C] with N constant, so that each function compiles once whatever the row length;
only KDA and attention see sequences. `naive_kda` is KDA's definition; `train.py` takes fla-core's chunked kernels.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

HERE = Path(__file__).parent
CONFIG: dict[str, Any] = json.loads((HERE / "config.json").read_text())
HIDDEN, VOCAB, LAYERS, EPS = (CONFIG[k] for k in ("hidden_size", "vocab_size", "num_hidden_layers", "rms_norm_eps"))
KDA_LAYERS = [n - 1 for n in CONFIG["linear_attn_config"]["kda_layers"]]
HEADS, DIM, TAPS = (CONFIG["linear_attn_config"][k] for k in ("num_heads", "head_dim", "short_conv_kernel_size"))
LOWER_BOUND: float = CONFIG["linear_attn_config"]["gate_lower_bound"]
Q_HEADS, NOPE, ROPE, VALUE = (
    CONFIG[k] for k in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
)
LATENT, FFN = CONFIG["kv_lora_rank"], CONFIG["intermediate_size"]


def initial_weights(seed: int) -> dict[str, Tensor]:
    """Fresh fp32 weights under their published names."""
    torch.manual_seed(seed)
    weights: dict[str, Tensor] = {}

    def linear(name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        weights[name + ".weight"] = torch.randn(rows, columns) * (gain * columns**-0.5)

    def ones(name: str, size: int) -> None:
        weights[name + ".weight"] = torch.ones(size)

    out_gain = (2 * LAYERS) ** -0.5
    weights["model.embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN) * 0.5
    for layer in range(LAYERS):
        name = f"model.layers.{layer}."
        attn = name + "self_attn."
        ones(name + "input_layernorm", HIDDEN)
        ones(name + "post_attention_layernorm", HIDDEN)
        if layer in KDA_LAYERS:
            width = HEADS * DIM
            for letter in "qkv":
                linear(f"{attn}{letter}_proj", width, HIDDEN)
                weights[f"{attn}{letter}_conv1d.weight"] = torch.empty(width, 1, TAPS).uniform_(-0.5, 0.5)
            linear(attn + "f_a_proj", DIM, HIDDEN)
            linear(attn + "f_b_proj", width, DIM)
            linear(attn + "b_proj", HEADS, HIDDEN)
            linear(attn + "g_proj", width, HIDDEN)
            ones(attn + "o_norm", DIM)
            # gates from -0.0003 to -0.5 a token: memories of a few to some thousand tokens
            share = torch.exp(torch.empty(width).uniform_(math.log(3e-4), math.log(0.5))) / -LOWER_BOUND
            weights[attn + "dt_bias"] = torch.logit(share)
            weights[attn + "A_log"] = torch.zeros(HEADS)
            linear(attn + "o_proj", HIDDEN, width, out_gain)
        else:
            linear(attn + "q_proj", Q_HEADS * (NOPE + ROPE), HIDDEN)
            linear(attn + "kv_a_proj_with_mqa", LATENT + ROPE, HIDDEN)
            ones(attn + "kv_a_layernorm", LATENT)
            linear(attn + "kv_b_proj", Q_HEADS * (NOPE + VALUE), LATENT)
            linear(attn + "g_proj", Q_HEADS * VALUE, HIDDEN)
            linear(attn + "o_proj", HIDDEN, Q_HEADS * VALUE, out_gain)
        linear(name + "mlp.gate_proj", FFN, HIDDEN)
        linear(name + "mlp.up_proj", FFN, HIDDEN)
        linear(name + "mlp.down_proj", HIDDEN, FFN, out_gain)
    ones("model.norm", HIDDEN)
    linear("lm_head", VOCAB, HIDDEN, 0.3)
    return weights


def rounded(weight: Tensor) -> Tensor:
    """A weight as stored (bf16) and used in fp32; gradients pass straight through."""
    return weight + (weight.bfloat16().float() - weight).detach()


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def lin(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x.bfloat16(), weight.bfloat16())


def conv(x: Tensor, weight: Tensor, place: Tensor) -> Tensor:
    """Causal conv and SiLU on flat rows x [N, C]; `place` [N] is each row's position in its sequence."""
    x = x.float()
    out = x * weight[:, 0, -1]
    for back in range(1, TAPS):
        shifted = F.pad(x, (0, 0, back, 0))[: x.shape[0]]
        out = out + torch.where(place[:, None] >= back, shifted, 0.0) * weight[:, 0, -1 - back]
    return F.silu(out).bfloat16()


def ffn(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    h = rms(x, rounded(w["post_attention_layernorm.weight"]), EPS)
    gate = F.silu(lin(h, w["mlp.gate_proj.weight"]).float())
    return x + lin(gate * lin(h, w["mlp.up_proj.weight"]).float(), w["mlp.down_proj.weight"])


def kda_before(x: Tensor, place: Tensor, w: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """x [N, hidden] fp32 -> q, k, v, z [N, C] bf16, beta [N, heads] fp32, output gate logits [N, C]."""
    h = rms(x, rounded(w["input_layernorm.weight"]), EPS).bfloat16()
    q, k, v = (conv(lin(h, w[f"self_attn.{n}_proj.weight"]), w[f"self_attn.{n}_conv1d.weight"], place) for n in "qkv")
    z = lin(lin(h, w["self_attn.f_a_proj.weight"]), w["self_attn.f_b_proj.weight"])
    beta = torch.sigmoid(lin(h, w["self_attn.b_proj.weight"]).float())
    return q, k, v, z, beta, lin(h, w["self_attn.g_proj.weight"])


def kda_after(x: Tensor, o: Tensor, gate: Tensor, w: dict[str, Tensor]) -> Tensor:
    o = rms(o.float().view(-1, HEADS, DIM), w["self_attn.o_norm.weight"], EPS).view(o.shape)
    return ffn(x + lin(o * torch.sigmoid(gate.float()), w["self_attn.o_proj.weight"]), w)


def mla_before(x: Tensor, w: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """x [N, hidden] -> q, k, v [N, heads, 96] bf16 (v padded, so that flash attention takes it), output gate logits."""
    h = rms(x, rounded(w["input_layernorm.weight"]), EPS).bfloat16()
    q = lin(h, w["self_attn.q_proj.weight"]).view(-1, Q_HEADS, NOPE + ROPE)
    latent, key = torch.split(lin(h, w["self_attn.kv_a_proj_with_mqa.weight"]), [LATENT, ROPE], -1)
    latent = rms(latent.float(), rounded(w["self_attn.kv_a_layernorm.weight"]), 1e-6)
    kv = lin(latent, w["self_attn.kv_b_proj.weight"]).view(-1, Q_HEADS, NOPE + VALUE)
    kn, v = torch.split(kv, [NOPE, VALUE], -1)
    k = torch.cat([kn, key[:, None].expand(-1, Q_HEADS, -1)], -1)
    return q, k, F.pad(v, (0, NOPE + ROPE - VALUE)), lin(h, w["self_attn.g_proj.weight"])


def mla_after(x: Tensor, o: Tensor, gate: Tensor, w: dict[str, Tensor]) -> Tensor:
    o = o[..., :VALUE].reshape(-1, Q_HEADS * VALUE).float()
    return ffn(x + lin(o * torch.sigmoid(gate.float()), w["self_attn.o_proj.weight"]), w)


def embed(ids: Tensor, weight: Tensor) -> Tensor:
    return F.embedding(ids, rounded(weight))


def head(x: Tensor, targets: Tensor, norm: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Loss of each token [N] fp32, and whether its target is the arg-max."""
    logits = lin(rms(x, rounded(norm), EPS), weight).float()
    return F.cross_entropy(logits, targets, reduction="none"), logits.argmax(-1) == targets


def naive_kda(q: Tensor, k: Tensor, v: Tensor, z: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """The recurrent definition with autograd; q, k, v, z [B, T, H, D], beta [B, T, H]."""
    q, k, v, z = (t.float() for t in (q, k, v, z))
    q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    decay = torch.exp(LOWER_BOUND * torch.sigmoid(A_log.exp()[:, None] * (z + dt_bias.view(HEADS, DIM))))
    state = q.new_zeros(q.shape[0], HEADS, DIM, DIM)
    out = []
    for t in range(q.shape[1]):
        state = state * decay[:, t, :, :, None]
        error = v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + (beta[:, t, :, None] * k[:, t])[..., None] * error[:, :, None]
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t] * DIM**-0.5))
    return torch.stack(out, 1)
