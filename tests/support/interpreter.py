"""Triton's interpreter without its detours, which take most of its time; what it computes stays the same.

At each launch and each call of a device function it replaces the functions of ``triton.language`` anew, hundreds of
them. At each operation it computes anew what depends on types and shapes alone. And whether a sum of integers overflows
it finds out with nine more of its own operations, and tells nobody: here that is an error.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np


@functools.cache
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
    for change in (_replace_once, _remember_shapes, _remember_types, _know_types, _call_at_once, _sum_once):
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
    """Find once, for each pair of types, what becomes of two operands: their common type and shape.

    A number's tensor is made once too. A tensor that is smaller than the other keeps its numbers as they are, which
    numpy repeats by itself.
    """
    from triton.language import core, semantic
    from triton.runtime import interpreter

    Tensor, Semantic = core.tensor, semantic.TritonSemantic
    cast, checked = Semantic.cast, Semantic.binary_op_type_checking_impl
    plans: dict[tuple[Any, ...], tuple[Any, ...]] = {}  # of both operands: the type to cast to, the type then, or all

    def name(operand: Any) -> Any:
        """Name a tensor's type, or a number; two zeros differ in their sign."""
        return operand.type.name if isinstance(operand, Tensor) else (type(operand), operand or str(operand))

    def plan(operand: Any, found: Any) -> tuple[Any, Any, Any]:
        if not isinstance(operand, Tensor):
            found.handle.data.flags.writeable = False
            return None, None, found
        return None if found.dtype is operand.dtype else found.dtype, found.type, None

    def follow(self: Any, operand: Any, dtype: Any, kind: Any, constant: Any) -> Any:
        if constant is not None:
            return constant
        if dtype is not None:
            operand = self.cast(operand, dtype)
        return operand if operand.type is kind else Tensor(operand.handle, kind)

    def check(self: Any, lhs: Any, rhs: Any, *given: bool, **named: bool) -> Any:
        key = name(lhs), name(rhs), given, *named.items()
        if key in plans:
            left, right = plans[key]
            return follow(self, lhs, *left), follow(self, rhs, *right)
        found = checked(self, lhs, rhs, *given, **named)
        if isinstance(lhs, Tensor) or isinstance(rhs, Tensor):
            plans[key] = plan(lhs, found[0]), plan(rhs, found[1])
        return found

    plain = {"fp16", "fp32", "fp64"} | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}

    def cast_plain(self: Any, input: Any, dst_ty: Any, *rounding: Any) -> Any:
        source, target = input.dtype, dst_ty.scalar
        if source is target:
            return input
        apart = source.name != target.name and target.name in plain and (source.name in plain or source.name == "int1")
        if not apart or any(rounding):
            return cast(self, input, dst_ty, *rounding)
        data = input.handle.data.astype(interpreter._get_np_dtype(target))
        return Tensor(interpreter.TensorHandle(data, target), input.type.with_element_ty(target))

    Semantic.cast, Semantic.binary_op_type_checking_impl = cast_plain, check


def _know_types() -> None:
    """Find numpy's type once a type, whether a number fits it, and whether it is one of integers."""
    from triton.language import core
    from triton.runtime import interpreter

    numpy_type, fits, equal = interpreter._get_np_dtype, interpreter._validate_np_data_size, core.dtype.__eq__
    known: dict[str, Any] = {}
    fitting: set[tuple[int, str]] = set()
    integers = frozenset(core.dtype.SINT_TYPES + core.dtype.UINT_TYPES)

    def numpy_type_of(type: Any) -> Any:
        if type.name not in known:
            known[type.name] = numpy_type(type)
        return known[type.name]

    def known_to_fit(data: Any, type: Any) -> bool:
        key = data.itemsize, type.name
        if key not in fitting and fits(data, type):
            fitting.add(key)
        return key in fitting

    interpreter._get_np_dtype, interpreter._validate_np_data_size = numpy_type_of, known_to_fit
    core.dtype.is_int = lambda self: self.name in integers
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)


def _call_at_once() -> None:
    """Call a builtin function without the two around it, and take tensors and numbers for what they are."""
    from triton.language import core
    from triton.runtime import interpreter

    around = core.builtin(lambda: None).__code__
    unwrap, bare = core._unwrap_if_constexpr, {core.tensor, bool, int, float, type(None)}

    def patch(place: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        inside = member.__wrapped__ if getattr(member, "__code__", None) is around else member

        def called(*arguments: Any, **named: Any) -> Any:
            named["_semantic"] = interpreter.interpreter_semantic
            return inside(*arguments, **named)

        scope.set_attr(place, name, called)

    interpreter._patch_attr = patch
    core._unwrap_if_constexpr = lambda x: x if type(x) in bare else unwrap(x)


def _sum_once() -> None:
    """Compute sums and products of integers in 64 bits too, and raise the error that Triton raises when it debugs."""
    from triton.language import semantic

    operations = {"add": np.add, "sub": np.subtract, "mul": np.multiply}

    def sanitized(self: Any, lhs: Any, rhs: Any, operation: Any) -> None:
        type = lhs.dtype
        assert type.is_int() and type == rhs.dtype, f"expected two integers of one type, got {type} and {rhs.dtype}"
        if type.int_bitwidth < 64:
            exact = operations[operation.__name__](lhs.handle.data, rhs.handle.data, dtype=np.int64)
            inside = type.get_int_min_value() <= exact.min() and exact.max() <= type.get_int_max_value()
            assert inside, f"int{type.int_bitwidth} overflow detected for operation {operation.__name__}"

    assert semantic.TritonSemantic.binary_op_sanitize_overflow_impl
    semantic.TritonSemantic.binary_op_sanitize_overflow_impl = sanitized
