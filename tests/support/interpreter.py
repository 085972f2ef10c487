"""Triton's interpreter without the detour that takes half of its time; what it computes stays the same."""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def make_quick() -> None:
    """Replace the functions of ``triton.language`` once, and leave them so: nothing else runs in such a process.

    The interpreter replaces hundreds of them anew at each launch and each call of a device function. Nothing changes
    where Triton is built otherwise. Call it after ``TRITON_INTERPRET=1`` is set.
    """
    try:
        from triton.runtime import interpreter

        replace_all = interpreter._patch_lang
    except (ImportError, AttributeError):
        return
    done: set[int] = set()  # the modules of the device functions that were met

    def replaced(function: Any) -> Any:
        if id(function.__globals__) not in done:
            done.add(id(function.__globals__))
            replace_all(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = replaced
