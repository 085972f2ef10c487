"""The product of a weight and one token's states, as fast as the weight can be read."""

from __future__ import annotations

from torch import Tensor

from ag.kernels.dispatch import pick
from ag.kernels.gemv import cpu
from ag.kernels.gemv.reference import reference_gemv


def gemv(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``weight @ x + bias`` for one token, ``[..., out]``.

    Args:
        x: states ``[..., in]``, of which there is one.
        weight: ``[out, in]`` of the same type.
        bias: ``[out]`` of the same type, or None.

    Raises:
        UserError: when AG_KERNELS names a version that cannot run here.
    """
    here = best_version() == "cpp" and cpu.unavailable(x, weight) is None
    return (cpu.gemv if here else reference_gemv)(x, weight, bias)


def best_version() -> str:
    """Return the version that :func:`gemv` runs on the CPU, where the tensors allow it: ``cpp`` or ``reference``."""
    return pick("gemv", {"cpp": cpu.KERNEL.failure(), "reference": None})
