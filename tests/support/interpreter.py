"""Triton's interpreter without its detours, which take most of its time; what it computes stays the same.

At each launch and each call of a device function it replaces the functions of ``triton.language`` anew, hundreds of
them. And at each operation it computes anew what depends on shapes, types and numbers alone, and whether an integer
overflows, which it then does not tell.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any


@functools.cache
def make_quick() -> None:
    """Take the detours out of the interpreter, once; nothing changes where Triton is built otherwise.

    Call it after ``TRITON_INTERPRET=1`` is set.
    """
    changes = (_replace_once, _look_for_no_overflow, _remember_shapes, _remember_types, _remember_operands)
    for change in (*changes, _call_at_once):
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


def _look_for_no_overflow() -> None:
    """Leave out the search for overflows, of which only the debug mode hears."""
    from triton.runtime.interpreter import interpreter_builder

    if not interpreter_builder.options.debug:
        interpreter_builder.options = replace(interpreter_builder.options, sanitize_overflow=False)


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
    """Look NumPy's type of a number up once."""
    from triton.runtime import interpreter

    look_up = interpreter._get_np_dtype
    names: dict[str, Any] = {}

    def looked_up(kind: Any) -> Any:
        if kind.name not in names:
            names[kind.name] = look_up(kind)
        return names[kind.name]

    interpreter._get_np_dtype = looked_up


def _remember_operands() -> None:
    """Cast no operand to the type that it has, and make the block of a number once a type and shape."""
    from triton.language import core, semantic
    from triton.runtime import interpreter

    Tensor, Semantic = core.tensor, semantic.TritonSemantic
    check, cast, common = Semantic.binary_op_type_checking_impl, Semantic.cast, Semantic.computation_type_impl
    integers = {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)} | {"int1"}
    plain = integers | {"fp32", "fp64"}  # of two such operands of one type none is cast
    numbers: dict[tuple[Any, ...], Any] = {}  # tensors
    types: dict[tuple[Any, ...], Any] = {}
    bytes_of: dict[str, float] = {}

    def checked(
        self: Any,
        lhs: Any,
        rhs: Any,
        lhs_ptr: bool = False,
        rhs_ptr: bool = False,
        cast: bool = True,
        div: bool = False,
    ) -> Any:
        if type(lhs) is Tensor and type(rhs) is Tensor:
            one, two = lhs.dtype.name, rhs.dtype.name
            if (one == two and one in plain) or (lhs_ptr and two in integers and one.startswith("pointer")):
                return self.broadcast_impl_value(lhs, rhs)
        elif type(lhs) is Tensor and type(rhs) in (int, float):
            key = lhs.dtype.name, getattr(lhs.type, "sizes", ()), repr(rhs), lhs_ptr, cast, div
            if key in numbers:
                return lhs, numbers[key]
            mine, theirs = check(self, lhs, rhs, lhs_ptr, rhs_ptr, cast, div)
            if mine is lhs:
                numbers[key] = theirs
            return mine, theirs
        return check(self, lhs, rhs, lhs_ptr, rhs_ptr, cast, div)

    def cast_other(self: Any, input: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:
        return input if input.dtype.name == dst_ty.scalar.name else cast(self, input, dst_ty, fp_downcast_rounding)

    def common_type(self: Any, a_ty: Any, a_is_scalar: bool, b_ty: Any, b_is_scalar: bool, div_or_mod: bool) -> Any:
        key = a_ty.name, a_is_scalar, b_ty.name, b_is_scalar, div_or_mod
        if key not in types:
            types[key] = common(self, a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod)
        return types[key]

    def fits(data: Any, kind: Any) -> bool:
        if kind.name not in bytes_of:
            bytes_of[kind.name] = float("inf") if kind.is_ptr() else max(8, kind.primitive_bitwidth) // 8
        return bool(data.itemsize <= bytes_of[kind.name])

    Semantic.binary_op_type_checking_impl, Semantic.cast, Semantic.computation_type_impl = (
        checked,
        cast_other,
        common_type,
    )
    interpreter._validate_np_data_size = fits


def _call_at_once() -> None:
    """Call the functions of the language without their wrappers, which ask for what is always given."""
    from triton.language import core
    from triton.runtime import interpreter

    Tensor, semantic, unwrap = core.tensor, interpreter.interpreter_semantic, core._unwrap_if_constexpr
    wrapper = core.builtin(lambda: None).__code__
    bare = {Tensor, int, float, bool, str, type(None), core.dtype}

    def unwrapped(o: Any) -> Any:
        return o if type(o) in bare else unwrap(o)

    def patched(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = member.__wrapped__ if getattr(member, "__code__", None) is wrapper else member

        def called(*arguments: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return function(*arguments, **options)

        scope.set_attr(obj, name, called)

    core._unwrap_if_constexpr, interpreter._patch_attr = unwrapped, patched
