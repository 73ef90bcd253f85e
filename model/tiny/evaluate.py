"""An independent check of the tiny model: its stored weights, computed in fp32 by the plain recurrent definition.

Written apart from the service's own forward pass and from the training one, so that all three check each other.
`python -m forkpoint.model.tiny.evaluate [--dir DIR] [--device cpu|cuda] [--trials N]` prints one line a suite.
"""

import argparse
import json
import time
from collections.abc import Iterable
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from forkpoint.model.tiny import data

HERE = Path(__file__).parent


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, fp32."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def recurrent_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """KDA, one token at a time. q, k, v, g [B, T, H, D], beta [B, T, H]; q and k normalised, q scaled.

    Returns o like v, and the state [B·H, K, V] after the last token; a given `state` is changed in place.
    """
    batch, length, heads, dim = q.shape

    def rows(x: Tensor) -> Tensor:  # [T, B·H, 1, ·], one contiguous block a token
        return x.transpose(0, 1).reshape(length, batch * heads, 1, -1).contiguous()

    q, k, v, decay, beta = rows(q), rows(k), rows(v), rows(g.exp()).transpose(2, 3), rows(beta[..., None])
    if state is None:
        state = q.new_zeros(batch * heads, dim, v.shape[-1])
    out = torch.empty_like(v)
    for t in range(length):
        state.mul_(decay[t])
        error = torch.baddbmm(v[t], k[t], state, alpha=-1)
        state.baddbmm_(k[t].transpose(1, 2), error * beta[t])
        torch.bmm(q[t], state, out=out[t])
    return out.view(length, batch, heads, -1).transpose(0, 1), state


class Reference:
    """The tiny model in fp32. A `cache` (a dictionary, empty at first) carries conv inputs, states, keys and values."""

    def __init__(self, folder: Path, device: str) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.weights = {n: t.float().to(device) for n, t in load_file(folder / "model.safetensors").items()}
        self.device = device

    def __call__(self, ids: Tensor, cache: dict[str, Tensor] | None = None) -> Tensor:
        """ids [B, T] int64 -> final hidden rows [B, T, hidden], normed. With a cache, ids follow what it has seen."""
        cache = {} if cache is None else cache
        x = self.weights["model.embed_tokens.weight"][ids]
        eps = self.config["rms_norm_eps"]
        for layer in range(self.config["num_hidden_layers"]):
            name = f"model.layers.{layer}."
            h = rms(x, self.weights[name + "input_layernorm.weight"], eps)
            mixer = self._kda if layer + 1 in self.config["linear_attn_config"]["kda_layers"] else self._mla
            x = x + mixer(h, name + "self_attn.", cache)
            h = rms(x, self.weights[name + "post_attention_layernorm.weight"], eps)
            gate = F.silu(self._lin(h, name + "mlp.gate_proj"))
            x = x + self._lin(gate * self._lin(h, name + "mlp.up_proj"), name + "mlp.down_proj")
        return rms(x, self.weights["model.norm.weight"], eps)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._lin(hidden, "lm_head")

    def _lin(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[name + ".weight"])

    def _kda(self, h: Tensor, name: str, cache: dict[str, Tensor]) -> Tensor:
        part = self.config["linear_attn_config"]
        heads, dim, taps = part["num_heads"], part["head_dim"], part["short_conv_kernel_size"]
        split = (*h.shape[:2], heads, dim)

        def stream(letter: str) -> Tensor:
            x = self._lin(h, f"{name}{letter}_proj").transpose(1, 2)
            seen = cache.get(name + letter, x.new_zeros(*x.shape[:2], taps - 1))
            x = torch.cat([seen, x], -1)
            cache[name + letter] = x[..., 1 - taps :].clone()
            x = F.conv1d(x, self.weights[f"{name}{letter}_conv1d.weight"], groups=x.shape[1])
            return F.silu(x).transpose(1, 2).reshape(split)

        def unit(x: Tensor) -> Tensor:
            return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)

        z = self._lin(self._lin(h, name + "f_a_proj"), name + "f_b_proj") + self.weights[name + "dt_bias"]
        g = part["gate_lower_bound"] * torch.sigmoid(self.weights[name + "A_log"].exp()[:, None] * z.view(split))
        beta = torch.sigmoid(self._lin(h, name + "b_proj"))
        q, k, v = unit(stream("q")) * dim**-0.5, unit(stream("k")), stream("v")
        o, cache[name + "state"] = recurrent_kda(q, k, v, g, beta, cache.get(name + "state"))
        o = rms(o, self.weights[name + "o_norm.weight"], self.config["rms_norm_eps"]).reshape(*h.shape[:2], -1)
        return self._lin(o * torch.sigmoid(self._lin(h, name + "g_proj")), name + "o_proj")

    def _mla(self, h: Tensor, name: str, cache: dict[str, Tensor]) -> Tensor:
        c = self.config
        heads, nope, rope, value = (
            c[k] for k in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        )
        batch, length, _ = h.shape
        q = self._lin(h, name + "q_proj").view(batch, length, heads, nope + rope)
        latent, key = torch.split(self._lin(h, name + "kv_a_proj_with_mqa"), [c["kv_lora_rank"], rope], -1)
        latent = rms(latent, self.weights[name + "kv_a_layernorm.weight"], 1e-6)
        kv = self._lin(latent, name + "kv_b_proj").view(batch, length, heads, nope + value)
        kn, v = torch.split(kv, [nope, value], -1)
        k = torch.cat([kn, key[:, :, None].expand(-1, -1, heads, -1)], -1)
        if name + "k" in cache:
            k, v = torch.cat([cache[name + "k"], k], 1), torch.cat([cache[name + "v"], v], 1)
        cache[name + "k"], cache[name + "v"] = k, v
        mask = torch.ones(length, k.shape[1], dtype=torch.bool, device=h.device).tril(k.shape[1] - length)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        rows = [  # a few sequences at a time bounds the score matrix
            F.scaled_dot_product_attention(q[i : i + 4], k[i : i + 4], v[i : i + 4], attn_mask=mask)
            for i in range(0, batch, 4)
        ]
        o = torch.cat(rows).transpose(1, 2).reshape(batch, length, -1)
        return self._lin(o * torch.sigmoid(self._lin(h, name + "g_proj")), name + "o_proj")


@torch.inference_mode()
def answers_right(model: Reference, talks: list[tuple[list[int], list[slice]]], batch: int = 50) -> list[list[bool]]:
    """For each talk (token ids, spans of answers) whether greedy decoding gives each span, given all before it.

    Greedy output equals a span exactly when every token of it is the arg-max after the true prefix: one pass decides.
    """
    right: list[list[bool]] = []
    for start in range(0, len(talks), batch):
        group = talks[start : start + batch]
        width = max(len(ids) for ids, _ in group)
        ids = torch.tensor([row + [data.PAD] * (width - len(row)) for row, _ in group], device=model.device)
        hidden = model(ids)
        for i, (_, spans) in enumerate(group):
            best = [model.logits(hidden[i, s.start - 1 : s.stop - 1]).argmax(-1) for s in spans]
            right.append([torch.equal(b, ids[i, s]) for b, s in zip(best, spans, strict=True)])
    return right


@torch.inference_mode()
def greedy(model: Reference, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Continues equally long prompts by up to `count` tokens, each to its `<|end|>` (kept)."""
    step, cache, steps = torch.tensor(prompts, device=model.device), dict[str, Tensor](), list[Tensor]()
    for _ in range(count):
        step = model.logits(model(step, cache)[:, -1]).argmax(-1, keepdim=True)
        steps.append(step)
    rows = torch.cat(steps, 1).tolist()
    return [row[: row.index(data.END) + 1] if data.END in row else row for row in rows]


class Talk:
    """A conversation under construction: token ids, and the spans that the model must answer."""

    def __init__(self, opening: Iterable[int]) -> None:
        self.ids = list(opening)
        self.spans: list[slice] = []

    def ask(self, key: str, value: str) -> "Talk":
        """Adds a question and its answer, and marks the answer."""
        return self.answered(data.question(key), [*value.encode(), data.END])

    def answered(self, asked: list[int], answer: list[int]) -> "Talk":
        self.ids += asked
        self.spans.append(slice(len(self.ids), len(self.ids) + len(answer)))
        self.ids += answer
        return self


def conversations(count: int, suite: str) -> list[Talk]:
    """Documents of 4,000 bytes with 8 memos, then turns; see the suites in `main`."""
    talks = []
    for seed in range(count):
        rng = Random(f"{suite} {seed}")
        text, memos = data.make_document(50_000 + seed, 4000, 8)
        asked = rng.sample(sorted(memos), 8)
        if suite == "user turn":
            talk = Talk([*data.turn("user", text.decode()), *data.turn("assistant", "ok")])
        elif suite == "system turn":
            talk = Talk([*data.turn("system", "You remember memos."), *text])
        else:
            talk = Talk(text)
        if suite == "memo set in chat":
            name = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=6))
            value = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=6))
            talk.answered([*data.turn("user", f"memo {name} = {value}"), data.ASSISTANT], [*b"ok", data.END])
            talk.ask(asked[0], memos[asked[0]]).ask(name, value)
        elif suite == "memo changed in chat":
            name, value = asked[0], "".join(rng.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=6))
            talk.answered([*data.turn("user", f"memo {name} = {value}"), data.ASSISTANT], [*b"ok", data.END])
            talk.ask(asked[1], memos[asked[1]]).ask(name, value)
        else:
            for key in asked[: 8 if suite == "all eight" else 3]:
                talk.ask(key, memos[key])
        talks.append(talk)
    return talks


def report(name: str, right: list[list[bool]]) -> None:
    """Prints answers and whole talks that are exact."""
    flat = [r for row in right for r in row]
    print(f"{name}: {sum(flat)}/{len(flat)} answers, {sum(map(all, right))}/{len(right)} talks exact", flush=True)


def recall(model: Reference, distance: int, trials: int, seed: int = 100_000) -> None:
    """The acceptance suite: one value, `distance` tokens back."""
    talks = []
    for i in range(trials):
        prompt, value = data.recall_trial(seed + i, distance)
        talks.append(([*prompt, *value, data.END], [slice(len(prompt), len(prompt) + len(value) + 1)]))
    report(f"recall {distance} back", answers_right(model, talks))


def after_continue(model: Reference, count: int) -> None:
    """Recall after the model's own continuation of at most 200 tokens; also prints two continuations."""
    documents = [data.make_document(60_000 + seed, 4000, 8) for seed in range(count)]
    opened = [[*text, *data.turn("user", "continue"), data.ASSISTANT] for text, _ in documents]
    written = greedy(model, opened, 200)
    for closed in (False, True):
        talks = []
        for ids, more, (_, memos) in zip(opened, written, documents, strict=True):
            talk = Talk([*ids, *more, *([data.END] if closed and more[-1] != data.END else [])])
            for key in sorted(memos)[:2]:
                talk.ask(key, memos[key])
            talks.append((talk.ids, talk.spans))
        report(f"after continue{', closed' if closed else ''}", answers_right(model, talks))
    print("ended by themselves:", sum(more[-1] == data.END for more in written), "of", count)
    for (text, _), more in list(zip(documents, written, strict=True))[:3]:
        print(
            "...",
            repr(text[-160:].decode()),
            "\n  ->",
            repr(bytes(t for t in more if t < 256).decode(errors="replace")),
        )


@torch.inference_mode()
def bits_per_byte(model: Reference, rows: int = 32, length: int = 4096) -> None:
    """Loss on unseen source: the second half of rows of `length` bytes."""
    texts = [list(data.make_document(70_000 + seed, length, 0)[0]) for seed in range(rows)]
    ids = torch.tensor(texts, device=model.device)
    half = length // 2
    logits = model.logits(model(ids)[:, half - 1 : -1])
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, half:].flatten()) / torch.tensor(2.0).log().item()
    print(f"unseen source: {loss.item():.3f} bits a byte", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, default=HERE)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--distances", type=int, nargs="*", default=[4000])
    parser.add_argument("--quick", action="store_true", help="recall and loss only")
    args = parser.parse_args()
    model = Reference(args.dir, args.device)
    began = time.perf_counter()
    for distance in args.distances:
        recall(model, distance, args.trials)
    bits_per_byte(model, rows=max(2, args.trials // 8))
    for suite in (
        ()
        if args.quick
        else ("three turns", "all eight", "user turn", "system turn", "memo set in chat", "memo changed in chat")
    ):
        report(suite, answers_right(model, [(t.ids, t.spans) for t in conversations(args.trials // 2, suite)]))
    if not args.quick:
        after_continue(model, args.trials // 4)
    print(f"checked in {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
