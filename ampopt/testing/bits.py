"""Bitwise comparison of tensors, optimizers and random state."""

import ctypes
import itertools
import random
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampopt._step.gradients import params_of
from ampopt_kernels.rule import MASTER

__all__ = [
    "Bits",
    "assert_bitwise_unchanged",
    "assert_close",
    "assert_same",
    "bits",
    "element_at",
    "everything",
    "state_of",
]

_SHOWN = 16
"""How many elements of a tensor a failure message shows."""
_PLACES = 5
"""How many of the places that differ a failure message shows."""


class Bits(NamedTuple):
    """The values of a tensor as bytes: NaN equals NaN, and -0 differs from 0."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    data: bytes

    @property
    def values(self) -> Tensor:
        """The elements as a flat tensor on the CPU."""
        if not self.data:
            return torch.empty(0, dtype=self.dtype, device="cpu")
        return torch.frombuffer(bytearray(self.data), dtype=self.dtype)

    @property
    def shown(self) -> str:
        """The values as text, shortened for large tensors."""
        values = self.values
        if len(values) <= _SHOWN:
            return repr(values.view(self.shape).tolist())
        return f"{values[:_SHOWN].tolist()!r} and {len(values) - _SHOWN} more"

    def __repr__(self) -> str:
        """The values as text, with dtype and shape."""
        return f"<{str(self.dtype).removeprefix('torch.')} {list(self.shape)}: {self.shown}>"


def bits(value: Any) -> Any:
    """Return ``value`` with each tensor in it as :class:`Bits`, to be compared with ``==``.

    Tensors are found in nested mappings, lists, deques and tuples. Synchronizes.
    """
    if isinstance(value, Tensor):
        value = value.detach()
        if value.is_sparse:
            value = value.coalesce()
            return bits((value.indices(), value.values()))
        plain = value.resolve_conj().resolve_neg().cpu().contiguous()
        if type(plain) is Tensor:
            data = ctypes.string_at(plain.data_ptr(), plain.nbytes)
        else:  # the data pointer of a subclass may not lead to its values; a DTensor raises here
            data = bytes(plain.view(-1).view(torch.uint8).tolist())
        return Bits(value.dtype, tuple(value.shape), data)
    if isinstance(value, Mapping):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return [bits(item) for item in value]
    return repr(value) if isinstance(value, float) else value  # repr: NaN equals itself


def state_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The state of every parameter of ``optimizer``, in the order of the groups."""
    params = params_of(optimizer.param_groups)
    return [bits(dict(optimizer.state[p])) if p in optimizer.state else None for p in params]


def everything(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All of ``optimizer`` that a skipped step must not change, and the random state, as bits."""
    params = list(params_of(optimizer.param_groups))
    param_set = set(params)
    return {
        "parameters": bits(params),
        "state": state_of(optimizer),
        "other state": [bits(v) for key, v in optimizer.state.items() if key not in param_set],
        "groups": [
            {key: bits(value) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ],
        "random": (bits(torch.get_rng_state()), random.getstate()),
    }


def assert_same(actual: Any, expected: Any, what: str) -> None:
    """Check that two results of :func:`bits` are equal.

    Args:
        actual: the result under test.
        expected: the result to compare with.
        what: the first words of the error message.

    Raises:
        AssertionError: they differ. The message names the first places that differ, and in a tensor
            the first element.
    """
    if actual != expected:
        differences = list(_differences(actual, expected, ""))
        n_more = len(differences) - _PLACES
        more = [f"  and in {n_more} more places"] if n_more > 0 else []
        raise AssertionError("\n".join([f"{what}:", *differences[:_PLACES], *more]))


def _differences(actual: Any, expected: Any, where: str) -> Iterator[str]:
    """A line for each place, named from ``where``, in which the two structures differ."""
    if isinstance(actual, Mapping) and isinstance(expected, Mapping):
        for key in {**expected, **actual}:
            yield from _differences(actual.get(key), expected.get(key), f"{where}[{key!r}]")
    elif isinstance(actual, list) and isinstance(expected, list) and len(actual) == len(expected):
        for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
            yield from _differences(one, other, f"{where}[{index}]")
    elif actual == expected:
        return
    elif isinstance(actual, Bits) and isinstance(expected, Bits) and actual[:2] == expected[:2]:
        yield "  " + _first_difference(actual, expected, where or "it")
    else:
        actual_text, expected_text = repr(actual), repr(expected)
        if len(actual_text) + len(expected_text) > 2000:  # a random generator's state
            actual_text, expected_text = "other bits", "what was expected"
        yield f"  {where or 'it'} is {actual_text}, not {expected_text}"


def _first_difference(actual: Bits, expected: Bits, where: str) -> str:
    """The first element that differs between two tensors, and how many do."""
    size, n = actual.dtype.itemsize, len(actual.values)
    places = [
        i
        for i in range(n)
        if actual.data[i * size : (i + 1) * size] != expected.data[i * size : (i + 1) * size]
    ]
    element = element_at(map(int, torch.unravel_index(torch.tensor(places[0]), actual.shape)))
    rest = f" ({len(places)} of {n} elements differ)" if n > 1 else ""
    actual_value, expected_value = (
        values[places[0]].item() for values in (actual.values, expected.values)
    )
    return f"{where}{element} is {actual_value}, not {expected_value}{rest}"


def element_at(index: Iterable[int]) -> str:
    """``"[2, 0]"`` for the element with the index ``(2, 0)``; empty for that of a 0-d tensor."""
    text = ", ".join(map(str, index))
    return f"[{text}]" if text else ""


@contextmanager
def assert_bitwise_unchanged(
    optimizer: torch.optim.Optimizer, what: str = "the block changed what it must leave unchanged"
) -> Iterator[None]:
    """Check that a ``with`` block leaves an optimizer bitwise unchanged.

    Checks parameters, their states, the entries of param groups, and the random state of torch's
    CPU generator and of Python's ``random``. Gradients may change. As in a skipped first step, a
    parameter without states may get the initial ones of ``optimizer.initialize_states()``, or its
    master alone, or any states where only ``step()`` can make them. Synchronizes.

    Example:
        >>> with assert_bitwise_unchanged(optimizer):  # doctest: +SKIP
        ...     train_step(batch_that_overflows)

    Args:
        optimizer: any ``torch.optim.Optimizer``.
        what: the first words of the error message.

    Raises:
        AssertionError: something changed. The message names the first entries that differ, with
            their new and old values.
    """
    before = everything(optimizer)
    yield
    after = everything(optimizer)
    for name, initial in _initial_states(optimizer, before, after).items():
        entries = itertools.zip_longest(before[name], after[name], initial)
        before[name] = [one if new and not old else old for old, new, one in entries]
    assert_same(after, before, what)


def _initial_states(optimizer: Any, before: Any, after: Any) -> dict[str, list[Any]]:
    """What the entries of :func:`everything` with states may have where they were empty."""
    found = {name: after[name] for name in ("state", "other state")}
    if not hasattr(optimizer, "initialize_states") or found.items() <= before.items():
        return {}
    state, params = optimizer.state, params_of(optimizer.param_groups)
    kept = {p: dict(state[p]) for p, old in zip(params, before["state"], strict=False) if old}
    optimizer.state = defaultdict(dict, kept)
    try:
        optimizer.initialize_states()
        states = zip(state_of(optimizer), after["state"], strict=True)
        return {"state": list(itertools.starmap(_made, states))}
    except NotImplementedError:
        return found
    finally:
        optimizer.state = state


def _made(initial: Any, new: Any) -> Any:
    """The part of the ``initial`` states of a parameter that a skipped first step makes.

    It makes all of them, or, if the class has a ``step()`` of its own, the master alone.
    """
    makes_master_alone = initial and new and {MASTER} == new.keys() <= initial.keys()
    return {MASTER: initial[MASTER]} if makes_master_alone else initial


def assert_close(actual: Tensor, expected: Tensor, *, ulps: float = 8.0, size: float = 0.0) -> None:
    """Check that ``actual`` is within a few ulps of ``expected``. The devices may differ.

    Args:
        actual: the tensor under test.
        expected: a tensor of the same dtype and shape.
        ulps: the tolerance, in ulps of the larger of the element and ``size``.
        size: the largest magnitude that went into an element, where cancellation makes the element
            itself smaller.
    """
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    eps = torch.finfo(expected.dtype).eps
    wide = torch.complex128 if expected.is_complex() else torch.float64
    torch.testing.assert_close(
        actual.detach().to("cpu", wide),
        expected.detach().to("cpu", wide),
        rtol=ulps * eps,
        atol=ulps * eps * max(size, torch.finfo(expected.dtype).tiny),
        equal_nan=True,
    )
