"""Triton's interpreter without its detours, which take most of its time; what it computes stays the same.

At each launch and each call of a device function it replaces the functions of ``triton.language`` anew, hundreds of
them. And at each operation it computes anew what depends on shapes alone.
"""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def make_quick() -> None:
    """Take the detours out of the interpreter, once; nothing changes where Triton is built otherwise.

    Call it after ``TRITON_INTERPRET=1`` is set.
    """
    for change in (_replace_once, _remember_shapes):
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
