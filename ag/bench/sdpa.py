"""torch's attention pinned to one implementation: left alone it chooses, and not the same by version and card."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def pinned(backend: str | None) -> AbstractContextManager[None]:
    """Return a context in which ``scaled_dot_product_attention`` has this implementation alone; None: its choice.

    What the implementation cannot do, such as a mask, is a RuntimeError there.
    """
    return nullcontext() if backend is None else sdpa_kernel(BACKENDS[backend])
