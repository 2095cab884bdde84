"""Invariant: states in few bits are near those that they stand for."""

import functools
import unittest
from collections.abc import Iterator
from typing import Any

import torch
from hypothesis import strategies as st

import ampopt
from ampopt._step.declared_states import DeclaredStates
from ampopt.testing.blueprints import History
from ampopt.testing.claims import Claims
from ampopt.testing.invariant import invariant
from ampopt.testing.invariants.examples import finite
from ampopt.testing.invariants.training import Trained, start, step_by
from ampopt.testing.making import storing
from ampopt_kernels import State
from ampopt_kernels.codecs import Codec, decoded, encoded

__all__ = ["SmallStates"]

_NEAR = 1 / 8
_LEAST = 2.0**-20
"""Parts of the largest magnitude of a block: how far a number may be moved, and down to which one a
state that is declared positive is not 0."""
_BIAS = 2.0**-9
"""How far the mean of stored numbers may be from that of the numbers themselves, as a part of it:
more than rounding 8 bits to nearest moves the mean of many, less than cutting them off does."""


class SmallStates(Claims):
    """States that an update rule keeps in few bits."""

    @invariant(
        history=lambda cls: finite(cls, dtypes=(torch.float32,), kind="uneven"),
        bits=lambda cls: st.sampled_from(cls.state_bits),
    )
    def test_small_states_are_near_full_ones(self, make: Any, history: History, bits: int) -> None:
        """A state in 8 or 16 bits is near the same state in 32 bits, and where that is 0, it is 0.

        A state that is declared ``positive``, which steps divide by, is never negative, and is not
        0 where the other is not. If negative numbers are stored as 0, the momentum of half of the
        elements is lost; if small second moments are, the next step is thousands of times too long.
        And numbers are kept without a bias, which would grow with every step.
        """
        exact, small = start(make, history), storing(make, state_bits=bits)
        if not isinstance(exact.optimizer, ampopt.ElementwiseOptimizer):
            raise unittest.SkipTest("not a rule")
        for step in history.steps:
            step_by(exact, step, None)
            training = Trained(exact.params, small(history.grouped(exact.params)))
            training.optimizer.load_state_dict(exact.optimizer.state_dict())
            states = ampopt.full_state_dict(training.optimizer)["state"]
            for i, part, codec in _small_states_of(training.optimizer):
                _check_bias(part, codec)
                full = exact.optimizer.state.get(exact.params[i], {}).get(part.name)
                if full is not None:
                    _check_near(states[i][part.name], full, part, codec, f"parameter {i}")


def _small_states_of(optimizer: Any) -> Iterator[tuple[int, State, Codec]]:
    """For each state that is kept in few bits: the index of its parameter, and its codec."""
    placed = ((group, param) for group in optimizer.param_groups for param in group["params"])
    for i, (group, param) in enumerate(placed):
        for part, codec in DeclaredStates.of(optimizer.rule, group, param).by_codec.items():
            if codec is not None:
                yield i, part, codec


@functools.cache
def _check_bias(part: State, codec: Codec) -> None:
    """Compare the mean of what the codec stores, over many numbers and draws, with their mean."""
    draws = ((torch.arange(64) + 0.5) / 64).repeat_interleave(4096)
    numbers = torch.linspace(2.0**-8, 1.0, 4096).repeat(64)
    for x in (numbers,) if part.positive else (numbers, -numbers):
        codes, scales = encoded(x, codec, draws)
        ratio = (decoded(codes, codec, scales).mean() / x.mean()).item()
        if abs(ratio - 1) > _BIAS:
            raise AssertionError(
                f"the numbers that state {part.name!r} keeps are on average {ratio:.4g} times as "
                f"large as those to be kept, from {x[0].item():g} to {x[-1].item():g}: decode must "
                "undo encode, and encode must round by tl.floor(y + u)"
            )


def _check_near(
    values: torch.Tensor, full: torch.Tensor, part: State, codec: Codec, what: str
) -> None:
    """Compare the ``values`` of a state with those of ``full`` precision."""
    # The state of a parameter with sparse gradients is sparse.
    values, full = (x.detach().to_dense().reshape(-1) for x in (values, full))
    if not full.isfinite().all():
        return
    if part.positive and (full < 0).any():
        raise AssertionError(
            f"state {part.name!r} of {what} becomes negative, {full.min().item():.6g}, "
            f"which few bits keep as 0: remove positive=True from State({part.name!r}, ...)"
        )
    blocks = full.abs().split(codec.block)
    largest = torch.cat(
        [block.amax().expand(len(block)) for block in blocks if len(block)] or [full]
    )
    near = (values - full).abs() <= _NEAR * largest + 2.0**-126
    near &= (full != 0) | (values == 0)
    if part.positive:
        near &= (values != 0) | (full <= _LEAST * largest + 2.0**-126)
    if not near.all():
        at = int((~near).nonzero()[0])
        raise AssertionError(
            f"element {at} of state {part.name!r} of {what} is {full[at].item():.6g} with "
            f"state_bits=32, but is kept as {values[at].item():.6g}; the largest magnitude in its "
            f"block is {largest[at].item():.6g}"
        )
