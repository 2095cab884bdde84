"""Tensors, optimizers and random state compared bit by bit: how a test says "nothing changed"."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Bits", "assert_close", "bits", "everything", "group_entries", "state_of"]


class Bits(NamedTuple):
    """A tensor's values as bytes, so that NaN equals itself and -0 is not 0."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    data: bytes
    shown: str


def bits(value: Any) -> Any:
    """``value`` with every tensor in it, however deep, as :class:`Bits`; compare with ``==``."""
    if isinstance(value, Tensor):
        value = value.detach()
        if value.is_sparse:
            value = value.coalesce()
            return bits((value.indices(), value.values()))
        plain = value.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        data = bytes(plain.view(-1).view(torch.uint8).tolist()) if plain.numel() else b""
        return Bits(value.dtype, tuple(value.shape), data, repr(value.tolist()))
    if isinstance(value, Mapping):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(item) for item in value]
    return repr(value) if isinstance(value, float) else value  # repr: NaN equals itself


def group_entries(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The hyperparameters of every group."""
    return [
        {key: bits(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def state_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The state of every parameter, in the order of the groups."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [bits(dict(optimizer.state[p])) if p in optimizer.state else None for p in params]


def everything(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All that a skipped or abandoned step must leave as it was, random state included."""
    return {
        "parameters": [bits(p) for group in optimizer.param_groups for p in group["params"]],
        "state": state_of(optimizer),
        "groups": group_entries(optimizer),
        "random": bits(torch.get_rng_state()),
    }


def assert_close(actual: Tensor, expected: Tensor, *, ulps: float = 8.0, size: float = 0.0) -> None:
    """``actual`` is within a few units in the last place of ``expected``.

    Args:
        actual: a tensor.
        expected: of the same dtype and shape.
        ulps: units in the last place of the largest magnitude that went into an element.
        size: that magnitude, where it is more than the element's own: sums cancel.
    """
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    eps = torch.finfo(expected.dtype).eps
    wide = torch.complex128 if expected.is_complex() else torch.float64
    torch.testing.assert_close(
        actual.detach().to(wide),
        expected.detach().to(wide),
        rtol=ulps * eps,
        atol=ulps * eps * max(size, torch.finfo(expected.dtype).tiny),
        equal_nan=True,
    )
