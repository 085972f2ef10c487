"""Triton's interpreter at a third of its time, with the same results.

At each launch and each call of a device function the interpreter replaces hundreds of functions of ``triton.language``.
At each operation it recomputes values that depend on types and shapes alone. It checks a sum of integers for overflow
with nine more operations, and ignores the result; here an overflow is an error.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def make_quick() -> None:
    """Take the detours out of the interpreter, once; nothing changes where Triton is built otherwise.

    Call it after ``TRITON_INTERPRET=1`` is set.
    """
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    if hasattr(interpreter, "made_quick"):  # in the process of which this one is a fork
        return
    interpreter.made_quick = True
    for change in (_replace_once, _remember_shapes, _remember_types, _sum_once):
        try:
            change()
        except (ImportError, AttributeError):
            continue


def _replace_once() -> None:
    """Replace the functions of each language module once, and leave them so: nothing else runs in such a process."""
    from triton.runtime import interpreter

    replace_all = interpreter._patch_lang
    done: set[int] = set()  # the modules of the device functions that were met

    def replaced(function: Any) -> Any:
        if id(function.__globals__) not in done:
            done.add(id(function.__globals__))
            replace_all(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = replaced


def _remember_shapes() -> None:
    """Make the parts of a block's type, and those of a tensor that follow from it, once a shape."""
    from triton.language import core, semantic

    Block, Tensor, Semantic = core.block_type, core.tensor, semantic.TritonSemantic
    make_block, make_tensor, broadcast = Block.__init__, Tensor.__init__, Semantic.broadcast_impl_value
    blocks: dict[tuple[Any, str], dict[str, Any]] = {}  # what a block's type holds
    others: dict[tuple[Any, str], Any] = {}  # types of blocks
    tensors: dict[tuple[int, ...], tuple[Any, Any]] = {}  # a shape's tuple and the number of its elements

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple(shape), element_ty.name
        if key not in blocks:
            make_block(self, element_ty, shape)
            self.sizes = tuple(self.shape)
            blocks[key] = dict(self.__dict__)
        else:
            self.__dict__.update(blocks[key])

    def with_element(self: Any, scalar_ty: Any) -> Any:
        key = self.sizes, scalar_ty.name
        if key not in others:
            others[key] = Block(scalar_ty, self.shape)
        return others[key]

    def tensor(self: Any, handle: Any, type: Any) -> None:
        sizes = getattr(type, "sizes", ())
        if sizes not in tensors:
            make_tensor(self, handle, type)
            tensors[sizes] = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = tensors[sizes]

    def broadcast_two(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        if getattr(lhs.type, "sizes", ()) == getattr(rhs.type, "sizes", ()):
            return lhs, rhs
        pair: tuple[Any, Any] = broadcast(self, lhs, rhs)
        return pair

    Block.__init__, Tensor.__init__, Semantic.broadcast_impl_value = block, tensor, broadcast_two
    Block.with_element_ty, Block.to_ir = with_element, lambda self, builder: self


def _remember_types() -> None:
    """Find numpy's type once a type, and leave two operands alone that have one type and shape."""
    from triton.language import core, semantic
    from triton.runtime import interpreter

    Tensor, Semantic = core.tensor, semantic.TritonSemantic
    numpy_type, cast, checked = interpreter._get_np_dtype, Semantic.cast, Semantic.binary_op_type_checking_impl
    known: dict[str, Any] = {}

    def numpy_type_of(type: Any) -> Any:
        if type.name not in known:
            known[type.name] = numpy_type(type)
        return known[type.name]

    def cast_other(self: Any, input: Any, dst_ty: Any, *rounding: Any) -> Any:
        return input if input.dtype is dst_ty else cast(self, input, dst_ty, *rounding)

    def check_others(self: Any, lhs: Any, rhs: Any, *given: bool, **named: bool) -> Any:
        alike = isinstance(lhs, Tensor) and isinstance(rhs, Tensor) and lhs.dtype is rhs.dtype
        divided = given[3:] or named.get("div_or_mod")
        if alike and lhs.shape == rhs.shape and not (divided or lhs.dtype.is_ptr()):
            return lhs, rhs
        return checked(self, lhs, rhs, *given, **named)

    interpreter._get_np_dtype = numpy_type_of
    Semantic.cast, Semantic.binary_op_type_checking_impl = cast_other, check_others


def _sum_once() -> None:
    """Compute sums and products of integers in 64 bits too, and raise the error that Triton raises when it debugs."""
    from triton.language import semantic

    operations = {"add": np.add, "sub": np.subtract, "mul": np.multiply}

    def sanitized(self: Any, lhs: Any, rhs: Any, operation: Any) -> None:
        type = lhs.dtype
        assert type.is_int() and type == rhs.dtype, f"expected two integers of one type, got {type} and {rhs.dtype}"
        if type.int_bitwidth < 64:
            x, y = (operand.handle.data.astype(np.int64) for operand in (lhs, rhs))
            exact = operations[operation.__name__](x, y)
            inside = type.get_int_min_value() <= exact.min() and exact.max() <= type.get_int_max_value()
            assert inside, f"int{type.int_bitwidth} overflow detected for operation {operation.__name__}"

    assert semantic.TritonSemantic.binary_op_sanitize_overflow_impl
    semantic.TritonSemantic.binary_op_sanitize_overflow_impl = sanitized
