"""Makes Triton's interpreter right for bf16, and its products independent of their neighbours.

The interpreter keeps bf16 as raw uint16: it would multiply bit patterns, and it truncates where a GPU rounds to the
nearest even. Here casts round, elementwise arithmetic in bf16 goes through fp32, and a product is summed term by term
in fp64 by elementwise operations, so that an entry depends on its row and column alone, as an MMA's does. (The order
and width of a real MMA's sum are the hardware's own: equal bits between block shapes are for a GPU test.)
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

FLOATS: Final = {tl.float16: np.float16, tl.float32: np.float32, tl.float64: np.float64}
_cast = InterpreterBuilder.cast_impl
_binary = InterpreterBuilder.binary_op
Values = npt.NDArray[Any]


def widen(bits: Values) -> Values:
    """bf16 bits (uint16) to fp32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values: Values) -> Values:
    """fp32 to bf16 bits, to the nearest even; NaN stays a NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def _as_floats(handle: Any) -> Values:
    data = handle.data
    return widen(data) if handle.dtype.scalar == tl.bfloat16 else data


def _cast_impl(self: Any, source: Any, target: Any) -> Any:
    if source.dtype.scalar == tl.bfloat16 and target.scalar != tl.bfloat16 and target.scalar in FLOATS:
        return TensorHandle(widen(source.data).astype(FLOATS[target.scalar]), target.scalar)
    if target.scalar == tl.bfloat16 and source.dtype.scalar in FLOATS:
        return TensorHandle(narrow(source.data.astype(np.float32)), tl.bfloat16)
    return _cast(self, source, target)


def _binary_op(self: Any, left: Any, right: Any, op: Any) -> Any:
    if left.dtype.scalar != tl.bfloat16:
        return _binary(self, left, right, op)
    result = op(widen(left.data), widen(right.data))
    if result.dtype == np.bool_:
        return TensorHandle(result, tl.int1)
    return TensorHandle(narrow(result), tl.bfloat16)


def product(left: Values, right: Values) -> Values:
    """left @ right in fp64, term by term: numpy reduces an outermost axis slice by slice."""
    total: Values = np.add.reduce(left.T.astype(np.float64)[:, :, None] * right.astype(np.float64)[:, None, :], axis=0)
    return total


def _dot(self: Any, a: Any, b: Any, accumulator: Any, precision: Any, imprecise: Any) -> Any:
    total = product(_as_floats(a), _as_floats(b)) + accumulator.data
    return TensorHandle(total.astype(np.float32), accumulator.dtype.scalar)


def install() -> None:
    """Patch the interpreter, for the whole process; safe to call again."""
    InterpreterBuilder.cast_impl = _cast_impl
    InterpreterBuilder.create_fp_to_fp = lambda self, source, target, rounding: _cast_impl(self, source, target)
    InterpreterBuilder.binary_op = _binary_op
    InterpreterBuilder.create_dot = _dot
