"""An invariant: how a method becomes a test that Hypothesis draws examples for."""

import inspect
import unittest
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.control import current_build_context
from hypothesis.errors import HypothesisException
from hypothesis.vendor.pretty import pretty

from ampopt.testing import failures
from ampopt.testing.isolation import apart
from ampopt.testing.making import maker

__all__ = ["as_test", "check_claims", "invariant", "marked_function", "run_once", "settings_of"]

_SNIPPET = """\
To run this example again, paste this below {cls}:

import torch
from math import inf, nan
from ampopt.testing import Blueprint, History, Scale

def {test}_again():
    {cls}().replay(
        {test!r},
{arguments}
    )
"""


def invariant(*, claim: str | tuple[str, ...] = (), **arguments: Any) -> Any:
    """Mark a method ``test(self, make, **arguments)`` as an invariant of optimizers.

    Args:
        claim: names of attributes of :class:`Claims`. Where one of them is false, the test is
            reported as skipped, "not claimed". Unless ``closures`` is one, ``plain_steps`` is.
        arguments: for each argument of the method, the Hypothesis strategy that draws it, or a
            function from the contract class to one.
    """
    claims = (claim,) if isinstance(claim, str) else claim
    if "closures" not in claims:
        claims = ("plain_steps", *claims)

    def mark(body: Callable[..., None]) -> Callable[..., None]:
        body._invariant = claims, arguments  # type: ignore[attr-defined]
        body._body = body  # type: ignore[attr-defined]
        return body

    return mark


def marked_function(cls: type, name: str) -> Any:
    """The function marked by ``invariant`` that ``name`` is or wraps; ``None`` if there is none."""
    return getattr(inspect.getattr_static(cls, name), "_body", None)


def as_test(cls: Any, name: str, body: Any, settings: hypothesis.settings) -> Any:
    """The pytest test of an invariant: skipped if not claimed, else run by Hypothesis."""
    claims, _ = body._invariant

    def test(self: Any, example: dict[str, Any]) -> None:
        __tracebackhide__ = True
        try:
            run_once(self, body, **example)
        except HypothesisException:
            raise
        except (Exception, pytest.fail.Exception) as error:
            _explain(self, name, body, error, example)
            raise

    def not_claimed(self: Any) -> None:
        check_claims(cls, claims)

    claimed = all(getattr(cls, claim) for claim in claims)
    made: Any = test if claimed else not_claimed
    # Hypothesis identifies a test and its saved examples by these names.
    made.__name__, made.__qualname__ = name, f"{cls.__qualname__}.{name}"
    made.__module__, made.__doc__ = cls.__module__, body.__doc__
    if claimed:
        example = st.fixed_dictionaries(_draws(cls, body))
        made = settings(hypothesis.given(example=example)(test))
    made._body = body
    return made


def _draws(cls: Any, body: Any) -> dict[str, st.SearchStrategy[Any]]:
    """The strategy of each argument of an example."""
    claims, arguments = body._invariant
    draws = {
        key: drawn if isinstance(drawn, st.SearchStrategy) else drawn(cls)
        for key, drawn in arguments.items()
    }
    if cls.options is not None:
        draws["options"] = cls.options
    draws["on_device"] = st.sampled_from(cls.on_device)
    sparse = "sparse_gradients" in claims or not cls.dense_gradients
    by_place = {"independent_parameters", "elementwise"} & set(claims)
    if not (sparse or by_place or "bits" in draws):
        draws["state_bits"] = st.sampled_from(cls.state_bits)
    return draws


def _explain(contract: Any, name: str, body: Any, error: BaseException, example: Any) -> None:
    """Print how to run a failed example again and what explains it, once it is shrunk."""
    if not getattr(current_build_context(), "is_final", True):
        return
    cls, (claims, _) = type(contract).__name__, body._invariant
    lines = "\n".join(f"        {key}={_code(value)}," for key, value in example.items())
    hypothesis.note(_SNIPPET.format(cls=cls, test=name, arguments=lines))

    def passes(other: Mapping[str, Any]) -> bool:
        try:
            run_once(contract, body, **other)
        except (Exception, pytest.fail.Exception):
            return False
        return True

    contract.failure = failures.of_example(name, error, example, claims, passes)
    for explanation in contract.failure.explanations:
        hypothesis.note(f"If it is not meant to: {explanation} in {cls}.")


def check_claims(cls: type[Any], claims: tuple[str, ...]) -> None:
    """Skip the running test if ``cls`` does not claim all of ``claims``."""
    missing = [claim for claim in claims if not getattr(cls, claim)]
    if missing:
        raise unittest.SkipTest(f"not claimed: {', '.join(missing)}")  # pytest skips, too


def settings_of(cls: type[Any]) -> hypothesis.settings:
    """Settings of the class or profile, without deadline and without the explain phase."""
    settings = cls.settings or hypothesis.settings()
    return hypothesis.settings(
        settings,
        deadline=None,  # the first step of an optimizer may compile a kernel
        # To explain a failure, every line of torch that is run would be traced, for minutes.
        phases=[phase for phase in settings.phases if phase is not hypothesis.Phase.explain],
    )


def _code(value: Any) -> str:
    """``value`` as code, indented for the printed call."""
    return pretty(value).replace("\n", "\n        ")


def run_once(
    self: Any,
    body: Callable[..., None],
    *,
    options: Mapping[str, Any] = MappingProxyType({}),
    on_device: bool = False,
    state_bits: int = 32,
    **example: Any,
) -> None:
    """Run an invariant once on drawn arguments, on the CPU or as on a device."""
    make = maker(self, options, state_bits=state_bits)
    with apart(on_device):
        body(self, make, **example)
