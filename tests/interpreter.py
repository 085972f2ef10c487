"""Triton's interpreter, which takes twice the time that it needs, made quicker.

At each call of a device function it replaces the functions of ``triton.language`` anew, hundreds of them; they stay
replaced until the launch ends, so that once a launch is enough.
"""

from __future__ import annotations

from typing import Any


def replace_once_a_launch() -> None:
    """Let a launch replace the functions of each language module once; nothing changes where Triton is built otherwise.

    Call it after ``TRITON_INTERPRET=1`` is set.
    """
    try:
        from triton.runtime import interpreter

        replace, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    except (ImportError, AttributeError):
        return
    done: set[int] = set()  # the modules of the device functions that this launch has met

    def replaced(function: Any) -> Any:
        if id(function.__globals__) in done:
            return None
        done.add(id(function.__globals__))
        return replace(function)

    def launched(self: Any, *arguments: Any, **options: Any) -> None:
        done.clear()  # the last launch has put the functions back
        launch(self, *arguments, **options)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = replaced, launched
