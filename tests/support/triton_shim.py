"""Triton's interpreter made right: bf16 as the hardware has it, and products whose bits do not depend on the tile.

The interpreter multiplies the raw bit patterns of bf16 values, truncates fp32 to bf16, and gives a product to a BLAS
that picks its loop order by shape. `install` mends the three, so that a test on a CPU means what it says: bf16 rounds
to nearest even, and a product adds its terms one after another in fp32, each row and column by itself.

tf32 is not modelled: kernels must ask for "ieee", and a compile-only test looks at what they get.
"""

import importlib.util
from typing import Any, Final

import numpy as np
import torch
from pytest import MonkeyPatch

REASON: Final = "triton is not installed"
AVAILABLE: Final = importlib.util.find_spec("triton") is not None
INTERPRETED: Final = not torch.cuda.is_available()
"""With a GPU the same tests run the compiled kernels."""
DEVICE: Final = torch.device("cpu" if INTERPRETED else "cuda")


def widen(bits: Any) -> Any:
    """bf16 bit patterns (uint16) -> fp32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(x: Any) -> Any:
    """fp32 -> bf16 bit patterns (uint16), to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


def ordered_product(a: Any, b: Any, start: Any) -> Any:
    """start [M, N] + a [M, K] b [K, N] in the dtype of `start`.

    Terms are added in ascending order of K, and their sum to `start`: a kernel whose step over K follows the batch
    shows itself, whether or not the hardware would forgive it.
    """
    total = np.zeros_like(start)
    columns, lines = np.moveaxis(a.astype(total.dtype), -1, 0)[..., None], np.moveaxis(b.astype(total.dtype), -2, 0)
    term = np.empty_like(total)
    for column, line in zip(np.ascontiguousarray(columns), lines[..., None, :], strict=True):
        np.multiply(column, line, out=term)
        total += term
    return start + total


def install() -> None:
    """Turns the interpreter on for kernels that are imported from now on, and mends it. Twice is as good as once."""
    # triton's own helpers (tl.sum, ...) are decorated when it is first imported, so the switch must be there by then;
    # it must not stay in the environment, or servers that tests start would interpret too.
    with MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        import triton
        import triton.language as tl
    triton.knobs.propagate_env = False
    triton.knobs.runtime.interpret = True
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    if getattr(builder, "forkpoint_shim", False):
        return
    if not isinstance(tl.sum, interpreter.InterpretedFunction):
        raise RuntimeError("triton was imported before the interpreter was turned on")

    plain_cast, plain_binary, plain_unary = builder.cast_impl, builder.binary_op, builder.unary_op

    def is_bf16(value: Any) -> bool:
        return bool(value.dtype.scalar == tl.bfloat16)

    def as_fp32(value: Any) -> Any:
        return handle(widen(value.data), tl.float32) if is_bf16(value) else value

    def cast(self: Any, source: Any, target: Any) -> Any:
        if is_bf16(source):
            return source if target.scalar == tl.bfloat16 else plain_cast(self, as_fp32(source), target)
        if target.scalar == tl.bfloat16:
            return handle(narrow(source.data.astype(np.float32)), tl.bfloat16)
        return plain_cast(self, source, target)

    def cast_rounded(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        return cast(self, source, target)

    def binary(self: Any, left: Any, right: Any, op: Any) -> Any:
        if not is_bf16(left):
            return plain_binary(self, left, right, op)
        result = op(widen(left.data), widen(right.data))
        return handle(result if result.dtype == bool else narrow(result), left.dtype.scalar)

    def unary(self: Any, value: Any, op: Any) -> Any:
        if not is_bf16(value):
            return plain_unary(self, value, op)
        return handle(narrow(op(widen(value.data))), value.dtype.scalar)

    def dot(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
        return handle(ordered_product(as_fp32(a).data, as_fp32(b).data, d.data), d.dtype.scalar)

    def constant(self: Any, value: float) -> Any:
        return handle(narrow(np.array([value], dtype=np.float32)), tl.bfloat16)

    builder.cast_impl, builder.binary_op, builder.unary_op = cast, binary, unary
    builder.create_fp_to_fp, builder.create_dot = cast_rounded, dot
    builder.get_bf16 = constant
    builder.forkpoint_shim = True
