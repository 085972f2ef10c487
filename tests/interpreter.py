"""Triton's interpreter without its detours, which take most of its time; what it computes stays the same.

At each call of a device function it replaces the functions of ``triton.language`` anew, hundreds of them; they stay
replaced until the launch ends, so that once a launch is enough. And at each operation it computes anew what depends on
a shape or a type alone, and whether an integer overflows, which it then does not tell.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any


def make_quick() -> None:
    """Take the detours out of the interpreter; nothing changes where Triton is built otherwise.

    Call it after ``TRITON_INTERPRET=1`` is set.
    """
    for change in (_replace_once_a_launch, _look_for_no_overflow, _remember_shapes, _remember_types):
        try:
            change()
        except (ImportError, AttributeError):
            continue


def _replace_once_a_launch() -> None:
    """Let a launch replace the functions of each language module once."""
    from triton.runtime import interpreter

    replace_all, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    done: set[int] = set()  # the modules of the device functions that this launch has met

    def replaced(function: Any) -> Any:
        if id(function.__globals__) in done:
            return None
        done.add(id(function.__globals__))
        return replace_all(function)

    def launched(self: Any, *arguments: Any, **options: Any) -> None:
        done.clear()  # the last launch has put the functions back
        launch(self, *arguments, **options)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = replaced, launched


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
    blocks: dict[tuple[int, ...], tuple[Any, Any]] = {}  # a shape's tuple and the number of its elements
    tensors: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(shape)
        if not all(type(size) is int for size in sizes):
            make_block(self, element_ty, shape)
            sizes = tuple(self.shape)
        elif sizes not in blocks:
            make_block(self, element_ty, shape)
            blocks[sizes] = self.shape, self.numel
        else:
            self.element_ty = element_ty
            self.shape, self.numel = blocks[sizes]
            self.name = f"<{sizes}, {element_ty.name}>"
        self.sizes = sizes

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
