"""Trains the tiny model on one GPU: `python -m forkpoint.model.tiny.train --out DIR`.

Forward and backward of KDA come from fla-core 0.6 (`pip install fla-core==0.6.0 einops`), for training only; the rest
is torch, with the pointwise parts compiled. The schedule follows the clock, so a run ends on time whatever the machine:
its length is part of the recipe. `--device cpu --steps 2 --length 128 --tokens 256` runs the same code with the plain
recurrence, to check it.
"""

import argparse
import math
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from forkpoint.model.tiny import data, network
from forkpoint.model.tiny.network import DIM, HEADS, KDA_LAYERS, LAYERS, Q_HEADS

HERE = Path(__file__).parent
KEPT_FP32 = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight")
TOKENS_A_STEP = 73_728  # 144 x 512 = 36 x 2048 = 16 x 4608 = 8 x 9216: compiled parts see one shape

# (share of the time, {row length: chance})
PHASES = ((0.15, {512: 1.0}), (0.20, {2048: 1.0}), (0.65, {4608: 0.85, 9216: 0.15}))


def stored(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as the file holds them: bf16, but fp32 for conv taps, the gates' constants and the output norm."""
    return {
        n: t.detach().to("cpu", torch.float32 if n.endswith(KEPT_FP32) else torch.bfloat16).contiguous()
        for n, t in weights.items()
    }


def save(weights: dict[str, Tensor], folder: Path) -> None:
    """Writes the Hugging Face style folder; the weights appear whole or not at all."""
    save_file(stored(weights), folder / "model.tmp", metadata={"format": "pt"})
    (folder / "model.tmp").replace(folder / "model.safetensors")
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        if (HERE / name).exists() and folder != HERE:
            shutil.copyfile(HERE / name, folder / name)


def fla_kda(q: Tensor, k: Tensor, v: Tensor, z: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """`naive_kda` by fla-core's chunked kernels."""
    from fla.ops.kda import chunk_kda  # pyright: ignore[reportMissingImports]

    o: Tensor = chunk_kda(
        *(q, k, v, z, beta),
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        safe_gate=True,
        lower_bound=network.LOWER_BOUND,
        A_log=A_log,
        dt_bias=dt_bias,
        disable_recompute=True,
    )[0]
    return o


class Trainer:
    """Weights, their forward pass and the optimiser."""

    def __init__(self, weights: dict[str, Tensor], device: str, compiled: bool) -> None:
        self.device = device
        self.weights = {n: t.to(device).requires_grad_() for n, t in weights.items()}
        self.layers = [self._under(f"model.layers.{i}.") for i in range(LAYERS)]
        self.kda = network.naive_kda if device == "cpu" else fla_kda
        wrap: Callable[[Any], Any] = torch.compile(dynamic=False) if compiled else lambda f: f
        self.embed, self.head = wrap(network.embed), wrap(network.head)
        self.kda_before, self.kda_after = wrap(network.kda_before), wrap(network.kda_after)
        self.mla_before, self.mla_after = wrap(network.mla_before), wrap(network.mla_after)
        decayed = [t for n, t in self.weights.items() if n.endswith("proj.weight") or "with_mqa" in n]
        rest = [t for n, t in self.weights.items() if not (n.endswith("proj.weight") or "with_mqa" in n)]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), fused=device != "cpu")
        self.table = torch.arange(256, device=device)
        for byte, token in data.PLACEHOLDERS.items():
            self.table[byte] = token

    def _under(self, prefix: str) -> dict[str, Tensor]:
        return {n.removeprefix(prefix): t for n, t in self.weights.items() if n.startswith(prefix)}

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """ids, targets [B, T] -> loss of each token [B·T], whether it was right [B·T]."""
        batch, length = ids.shape
        place = torch.arange(length, device=self.device).repeat(batch)
        x = self.embed(ids.flatten(), self.weights["model.embed_tokens.weight"])
        for index, w in enumerate(self.layers):
            if index in KDA_LAYERS:
                q, k, v, z, beta, gate = self.kda_before(x, place, w)
                q, k, v, z = (t.view(batch, length, HEADS, DIM) for t in (q, k, v, z))
                beta = beta.view(batch, length, HEADS)
                o = self.kda(q, k, v, z, beta, w["self_attn.A_log"], w["self_attn.dt_bias"])
                x = self.kda_after(x, o.reshape(batch * length, -1), gate, w)
            else:
                q, k, v, gate = self.mla_before(x, w)
                q, k, v = (t.view(batch, length, Q_HEADS, -1).transpose(1, 2) for t in (q, k, v))
                o = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
                x = self.mla_after(x, o.reshape(batch * length, Q_HEADS, -1), gate, w)
        loss, right = self.head(x, targets.flatten(), self.weights["model.norm.weight"], self.weights["lm_head.weight"])
        return loss, right

    def step(self, tokens: bytes, weights: bytes, rows: int, rate: float) -> Tensor:
        """One optimiser step; returns text loss, answer loss, answer accuracy and gradient norm, not waited for."""
        ids = self.table[torch.frombuffer(bytearray(tokens), dtype=torch.uint8).to(self.device).long()].view(rows, -1)
        tenths = torch.frombuffer(bytearray(weights), dtype=torch.uint8).to(self.device)
        weight = tenths.view(rows, -1)[:, 1:].flatten() / 10.0
        loss, right = self.forward(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        total = (loss * weight).sum() / weight.sum()
        self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(total)
        norm = torch.nn.utils.clip_grad_norm_(self.weights.values(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        with torch.no_grad():
            text, answer = (weight == 1.0).float(), (weight == 10.0).float()
            text, answer = text / text.sum().clamp(min=1), answer / answer.sum().clamp(min=1)
            return torch.stack([(loss * text).sum(), (loss * answer).sum(), (right * answer).sum(), norm])


@dataclass
class Plan:
    """The schedule: what row length and learning rate hold at a share of the run."""

    seed: int
    peak: float
    warmup: int

    def length(self, progress: float, step: int) -> int:
        for share, lengths in PHASES:
            if progress < share or share == PHASES[-1][0]:
                return Random(f"length {self.seed} {step}").choices(list(lengths), list(lengths.values()))[0]
            progress -= share
        raise AssertionError("unreachable")

    def rate(self, progress: float, step: int) -> float:
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        return self.peak * min(1.0, (step + 1) / self.warmup) * max(cosine, 0.005)


class Feeder:
    """Batches made ahead by worker processes, in order; started before the GPU is touched, because workers fork."""

    def __init__(self, seed: int, tokens: int, workers: int) -> None:
        self.seed, self.tokens = seed, tokens
        self.pool = ProcessPoolExecutor(workers, mp_context=get_context("fork"))
        self.pool.submit(data.corpus, "train").result()

    def batches(self, length_of: Callable[[int], int]) -> Iterator[tuple[bytes, bytes, int]]:
        ahead: deque[tuple[Future[tuple[bytes, bytes]], int]] = deque()
        step = 0
        while True:
            while len(ahead) < 8:
                length = length_of(step)
                rows = max(1, self.tokens // length)
                ahead.append((self.pool.submit(data.training_batch, self.seed, step, rows, length), rows))
                step += 1
            future, rows = ahead.popleft()
            yield *future.result(), rows


def cut_autotuning(limit: int) -> None:
    """Keeps at most `limit` configurations of each of fla's kernels: minutes of tuning do not pay in a short run."""
    import fla.ops.kda  # noqa: F401  # pyright: ignore[reportMissingImports]
    from triton.runtime.autotuner import Autotuner  # pyright: ignore[reportMissingImports]

    for name, module in list(sys.modules.items()):
        for kernel in list(vars(module).values()) if name.startswith("fla.") else ():
            while kernel is not None and not isinstance(kernel, Autotuner):
                kernel = getattr(kernel, "fn", None) if type(kernel).__module__.startswith("triton") else None
            if kernel is not None and len(kernel.configs) > limit:
                kernel.configs = kernel.configs[:: -(-len(kernel.configs) // limit)]


def check_kernels() -> None:
    """fla's forward and backward against the recurrent definition; raises when they differ by more than bf16 does."""
    torch.manual_seed(1)
    shape = (2, 200, HEADS, DIM)
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    inputs += [
        torch.rand(shape[:3], device="cuda"),
        torch.randn(HEADS, device="cuda") * 0.3,
        torch.randn(HEADS * DIM, device="cuda") - 4,
    ]
    pull = torch.randn(shape, device="cuda")
    results = []
    for kernel in (network.naive_kda, fla_kda):
        leaves = [t.clone().requires_grad_() for t in inputs]
        out = kernel(*leaves)
        torch.autograd.backward((out.float() * pull).sum())
        results.append([out, *(t.grad for t in leaves)])
    for name, want, got in zip(("o", "dq", "dk", "dv", "dz", "dbeta", "dA_log", "ddt_bias"), *results, strict=True):
        assert want is not None and got is not None
        error = ((got.float() - want.float()).norm() / want.float().norm()).item()
        print(f"kernel check {name}: {error:.1e}", flush=True)
        if not error < 3e-2:
            raise RuntimeError(f"fla's {name} is off by {error:.1e}")


def warm_up(trainer: Trainer, seed: int) -> None:
    """One step of each shape with no effect, so that compiling and tuning stay out of the schedule."""
    for length in sorted({n for _, lengths in PHASES for n in lengths}):
        began = once = time.perf_counter()
        rows = TOKENS_A_STEP // length
        batch = data.training_batch(seed + 1, 0, rows, length)
        for _ in range(3):
            once = time.perf_counter()
            trainer.step(*batch, rows, 0.0).tolist()
        now = time.perf_counter()
        print(f"warm-up, rows of {length}: {now - began:.0f} s, then {1e3 * (now - once):.0f} ms a step", flush=True)
    trainer.optimizer.state.clear()


def train(trainer: Trainer, feeder: Feeder, plan: Plan, args: argparse.Namespace) -> None:
    """Runs the schedule, prints progress, saves about once a minute and at the end."""
    began = saved = time.perf_counter()

    def progress(step: int) -> float:
        share: float = step / args.steps if args.steps else (time.perf_counter() - began) / args.seconds
        return share

    batches = feeder.batches(lambda step: args.length or plan.length(progress(step), step))
    step = 0
    while progress(step) < 1.0:
        tokens, weights, rows = next(batches)
        numbers = trainer.step(tokens, weights, rows, plan.rate(progress(step), step))
        step += 1
        if step % 100 == 0 or args.steps:
            text, answer, right, norm = numbers.tolist()
            if not math.isfinite(text + norm):
                raise RuntimeError(f"loss diverged at step {step}")
            head = f"{time.perf_counter() - began:5.0f} s step {step:5d} rows of {len(tokens) // rows - 1}"
            print(f"{head}: text {text:.3f} answers {answer:.3f} right {right:.3f} norm {norm:.2f}", flush=True)
        if time.perf_counter() - saved > 60:
            save(trainer.weights, args.out)
            saved = time.perf_counter()
    save(trainer.weights, args.out)
    print(f"trained {step} steps in {time.perf_counter() - began:.0f} s", flush=True)
    feeder.pool.shutdown(cancel_futures=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--seconds", type=float, default=430.0, help="training time, warm-up apart")
    parser.add_argument("--steps", type=int, default=0, help="steps instead of seconds")
    parser.add_argument("--length", type=int, default=0, help="one row length instead of the schedule (for checks)")
    parser.add_argument("--tokens", type=int, default=TOKENS_A_STEP)
    parser.add_argument("--peak", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=Path, help="folder whose weights to start from")
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    feeder = Feeder(args.seed, args.tokens, 1 if args.device == "cpu" else 6)
    fresh = network.initial_weights(args.seed)
    if args.start:
        fresh = {n: t.float() for n, t in load_file(args.start / "model.safetensors").items()}
    print(
        f"{sum(t.numel() for t in fresh.values()):,} parameters, {len(data.corpus('train')):,} bytes of source",
        flush=True,
    )
    trainer = Trainer(fresh, args.device, compiled=args.device == "cuda" and not args.no_compile)
    if args.device == "cuda":
        cut_autotuning(6)
        warm_up(trainer, args.seed)
        check_kernels()
    train(trainer, feeder, Plan(args.seed, args.peak, warmup=100), args)


if __name__ == "__main__":
    main()
