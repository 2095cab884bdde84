"""What a contract's class says of its optimizer, and how its invariants become tests."""

import functools
import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.errors import HypothesisException
from hypothesis.vendor.pretty import pretty

import ampopt
from ampopt.testing import failures, strategies
from ampopt.testing.blueprints import History
from ampopt.testing.device import as_on_a_device

__all__ = ["Claims", "Make", "apart", "check_claims", "invariant", "maker", "settings_of"]

Make = Callable[[Any], Any]
"""Makes the optimizer of parameters or groups."""

_SNIPPET = """\
To run this example again, put it beside {cls}:

import torch
from math import inf, nan
from ampopt.testing import Blueprint, History, Scale

def {test}_again():
    {cls}().replay(
        {test!r},
{arguments}
    )
"""


def invariant(*, claim: str | tuple[str, ...] = (), **arguments: Callable[[Any], Any]) -> Any:
    """Mark a method ``test(self, make, **arguments)`` as an invariant of optimizers.

    Args:
        claim: attributes of the contract; where one is false, the test is reported as not claimed.
        arguments: for each argument, a function of the contract's class that gives the strategy to
            draw it from.
    """
    claims = (claim,) if isinstance(claim, str) else claim

    def mark(body: Callable[..., None]) -> Callable[..., None]:
        body._invariant = (claims, arguments)  # type: ignore[attr-defined]
        return body

    return mark


class Claims:
    """What is claimed of an optimizer: each attribute may be set in a subclass.

    An invariant that needs what is not claimed is in pytest's report as skipped, "not claimed: ..."
    and the attribute's name.

    Attributes:
        options: a strategy of keyword arguments that ``make`` is given, for an optimizer to be
            tested with any of its hyperparameters; ``None`` for none.
        shapes: a strategy of shapes that parameters may have.
        dtypes: that parameters may have, in every invariant.
        half_precision: bfloat16 and float16, whichever the optimizer takes parameters of.
        complex_parameters: it takes complex64.
        dense_gradients: it takes ordinary gradients.
        sparse_gradients: it takes sparse COO gradients.
        plain_steps: it steps without a closure.
        closures: it steps with one.
        any_layout: parameters and gradients may be transposed, strided or channels-last.
        layout_changes_no_bit: in whatever layout, a step gives the same bits; not so where it takes
            norms or sums, in the order that elements lie in.
        several_groups: it takes several param groups.
        continuous: a step changes little where gradients change little, so that rounding errors do
            not decide where a training goes; not so where it takes signs, rounds coarsely or draws
            random numbers.
        independent_parameters: what happens to a parameter depends on no other one, so that neither
            their order nor their groups matter.
        zero_lr_is_still: with a learning rate of 0 no parameter moves.
        finite_steps: steps with finite gradients leave parameters finite.
        tensor_learning_rates: the learning rate of a group may be a tensor, and a new one each
            step; ``None`` for what its kind does: a rule takes them.
        modes: names of methods that switch its mode, such as ``("train", "eval")``. It begins in
            the first, and in another a step is a ``RuntimeError``.
        calls: names of further methods that a training calls, such as ``"update_hessian"``. One
            that takes ``grads_scaled_by`` is called with gradients, and has to be skipped as a step
            is and to return the flag and the next scale; without it, it does the same with
            gradients that carry no scale. Others are called with nothing.
        leaves_gradients: a step writes to no ``p.grad``.
        checkpoints: ``state_dict`` holds all there is, and ``torch.load`` takes it by default.
        deepcopies: ``copy.deepcopy`` of optimizer and parameters works.
        grad_scaler: ``torch.amp.GradScaler`` may step it.
        accumulates: what ``accumulate`` adds up may stand for the gradients of a step.
        sync_free: on a device its control points never wait for it.
        on_device: examples are run as on the CPU (``False``) and as on a device (``True``); see
            :func:`ampopt.testing.as_on_a_device`.
        settings: Hypothesis settings in place of those of the profile; ``None`` for the profile's.
    """

    options: ClassVar[st.SearchStrategy[dict[str, Any]] | None] = None
    shapes: ClassVar[st.SearchStrategy[tuple[int, ...]]] = strategies.shapes(boundaries=(64, 1024))
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.float64)
    half_precision: ClassVar[tuple[torch.dtype, ...]] = ()
    complex_parameters: ClassVar[bool] = False
    dense_gradients: ClassVar[bool] = True
    sparse_gradients: ClassVar[bool] = False
    plain_steps: ClassVar[bool] = True
    closures: ClassVar[bool] = True
    any_layout: ClassVar[bool] = True
    layout_changes_no_bit: ClassVar[bool] = True
    several_groups: ClassVar[bool] = True
    continuous: ClassVar[bool] = True
    independent_parameters: ClassVar[bool] = True
    zero_lr_is_still: ClassVar[bool] = True
    finite_steps: ClassVar[bool] = True
    tensor_learning_rates: ClassVar[bool | None] = None
    modes: ClassVar[tuple[str, ...]] = ()
    calls: ClassVar[tuple[str, ...]] = ()
    leaves_gradients: ClassVar[bool] = True
    checkpoints: ClassVar[bool] = True
    deepcopies: ClassVar[bool] = True
    grad_scaler: ClassVar[bool] = True
    accumulates: ClassVar[bool] = True
    sync_free: ClassVar[bool] = False
    on_device: ClassVar[tuple[bool, ...]] = (False, True)
    settings: ClassVar[hypothesis.settings | None] = None
    failure: failures.Failure | None = None

    @pytest.fixture(autouse=True)
    def _summed_up(self, request: pytest.FixtureRequest) -> Iterator[None]:
        """What fails is told once more at the end of pytest's report."""
        yield
        if self.failure is not None:
            failures.summary_of(request.config).note(type(self).__name__, self.failure)

    def make(self, params: Any) -> Any:
        """The optimizer of ``params``, which is what any torch optimizer takes.

        Args:
            params: a list of parameters, or of groups.
        """
        raise NotImplementedError(f"define make(self, params) in {type(self).__name__}")

    def reference(self, params: Any, **options: Any) -> torch.optim.Optimizer:
        """An optimizer to trust, of float64 ``params``, that should end where yours does.

        **Without it, wrong mathematics passes**: by default it is yours, as ``make`` makes it, and
        only what float32 and a sequence of calls do to it is seen. Another implementation shows
        more, such as torch's where yours is a faster one, or ten lines without a kernel. Only
        ``step()``, ``add_param_group``, ``modes`` and ``calls`` are called, and ``lr`` of its
        groups is set.

        Args:
            params: a list of parameters, or of groups.
            options: those that ``make`` was given.
        """
        return self.make(params, **options)

    @classmethod
    def histories(cls, **changed: Any) -> st.SearchStrategy[History]:
        """Histories of parameters and gradients that the optimizer claims to take."""
        settings: dict[str, Any] = {
            "dtypes": cls.dtypes,
            "of_shapes": cls.shapes,
            "groups": cls.several_groups,
            "layouts": cls.any_layout,
            "sparse": not cls.dense_gradients,
        }
        return strategies.histories(**{**settings, **changed})

    def replay(self, test: str, **arguments: Any) -> None:
        """Run one invariant on one example, as a failure prints it.

        Args:
            test: the name of the invariant.
            arguments: its example.
        """
        claims, _ = _marked(type(self), test)._invariant
        _run(self, _marked(type(self), test), claims, **arguments)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Make a test of each invariant, a new one for each class, as Hypothesis wants it."""
        super().__init_subclass__(**kwargs)
        for name in dir(cls):
            body = _marked(cls, name)
            if body is not None and cls.make is not Claims.make:
                setattr(cls, name, _as_test(cls, name, body))


def _marked(cls: type, name: str) -> Any:
    """The invariant that the method ``name`` is, or was made a test of; ``None`` if it is none."""
    found = inspect.getattr_static(cls, name)
    found = getattr(found, "_body", found)
    return found if hasattr(found, "_invariant") else None


def _as_test(cls: Any, name: str, body: Any) -> Any:
    claims, arguments = body._invariant
    if not all(getattr(cls, claim) for claim in claims):

        def test(self: Any) -> None:
            check_claims(cls, claims)

    else:

        def run(self: Any, **drawn: Any) -> None:
            __tracebackhide__ = True
            try:
                _run(self, body, claims, **drawn)
            except HypothesisException:
                raise
            except (Exception, pytest.fail.Exception) as error:
                lines = [f"        {key}={_code(value)}," for key, value in drawn.items()]
                hypothesis.note(
                    _SNIPPET.format(cls=cls.__name__, test=name, arguments="\n".join(lines))
                )
                error.example = drawn  # type: ignore[attr-defined]
                self.failure = failures.of_example(name, error, drawn, claims)
                for explanation in self.failure.explanations:
                    hypothesis.note(f"If it is not meant to: {explanation} in {cls.__name__}.")
                raise

        draws = {key: of(cls) for key, of in arguments.items()}
        if cls.options is not None:
            draws["options"] = cls.options
        draws["on_device"] = st.sampled_from(cls.on_device)
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
            + [inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY) for key in draws]
        )
        # Hypothesis knows a test, and its database of examples, by these.
        run.__name__, run.__qualname__ = name, f"{cls.__qualname__}.{name}"
        run.__module__, run.__doc__ = cls.__module__, body.__doc__
        test = settings_of(cls)(hypothesis.given(**draws)(run))

    test.__name__, test.__qualname__ = name, f"{cls.__qualname__}.{name}"
    test.__doc__ = body.__doc__
    test._body = body  # type: ignore[attr-defined]
    return test


def check_claims(cls: type[Claims], claims: tuple[str, ...]) -> None:
    """Skip the test that runs, if one of ``claims`` is not made."""
    missing = [claim for claim in claims if not getattr(cls, claim)]
    if missing:
        pytest.skip(f"not claimed: {', '.join(missing)}")


def settings_of(cls: type[Claims]) -> hypothesis.settings:
    """Those of the profile, without what optimizers do not go with."""
    given = cls.settings or hypothesis.settings()
    return hypothesis.settings(
        given,
        deadline=None,  # the first step of an optimizer may compile a kernel
        # To explain a failure, every line of torch that is run would be traced, for minutes.
        phases=[phase for phase in given.phases if phase is not hypothesis.Phase.explain],
    )


def _code(value: Any) -> str:
    return pretty(value).replace("\n", "\n        ")


def _run(
    self: Any,
    body: Callable[..., None],
    claims: tuple[str, ...],
    *,
    options: dict[str, Any] | None = None,
    on_device: bool = False,
    **drawn: Any,
) -> None:
    with apart(), as_on_a_device() if on_device else _as_it_is():
        functools.partial(body, self, maker(self, options or {}))(**drawn)


def maker(contract: Claims, options: dict[str, Any], *, of_reference: bool = False) -> Make:
    """What makes the optimizer, or the reference, with ``options`` of its own each time."""
    if of_reference:
        make, kind, must_be = contract.reference, torch.optim.Optimizer, "a torch.optim.Optimizer"
    else:
        make, kind, must_be = contract.make, ampopt.Optimizer, "an ampopt.Optimizer"

    def made(params: Any) -> Any:
        # A learning rate in a tensor is written to.
        own = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        optimizer = make(params, **own)
        if not isinstance(optimizer, kind):
            raise TypeError(
                f"{make.__name__} must return {must_be}, got {type(optimizer).__name__}: derive "
                f"the class from {must_be.split()[1]}"
            )
        return optimizer

    return made


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield


@contextmanager
def apart() -> Iterator[None]:
    """Leaves random state as it was, and gives NaN to whoever reads what nobody has written."""
    python, poisoned = random.getstate(), torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    deterministic = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    # torch makes sparse tensors of its own, and warns if it is not said whether to check them.
    with torch.random.fork_rng(devices=[]), torch.sparse.check_sparse_tensor_invariants():
        torch.use_deterministic_algorithms(True, warn_only=warns)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
        try:
            yield
        finally:
            random.setstate(python)
            torch.utils.deterministic.fill_uninitialized_memory = poisoned  # type: ignore[attr-defined]
            torch.use_deterministic_algorithms(deterministic, warn_only=warns)
