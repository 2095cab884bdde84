"""What a contract class claims of its optimizer."""

from collections.abc import Iterator
from typing import Any, ClassVar

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from ampopt.testing import failures, strategies
from ampopt.testing.blueprints import History
from ampopt.testing.invariant import as_test, marked_function, run_once, settings_of

__all__ = ["QUICK", "Claims"]

QUICK = hypothesis.settings(max_examples=10, stateful_step_count=10)
"""Settings for a contract while its optimizer is being written: a tenth of the examples."""


class Claims:
    """The features that a contract class claims of its optimizer.

    A claim is a class attribute that a subclass may override. An invariant that depends on a false
    claim is skipped, and pytest reports it as "not claimed: ..." with the attribute's name. Each
    claim is listed with its type, its default, and what is tested if it is true or set.

    Attributes:
        options (strategy or None, default None): a strategy of keyword arguments for ``make``.
            Every invariant is tested with options drawn from it.
        shapes (strategy, default ``strategies.shapes(boundaries=(64, 1024))``): a strategy of the
            parameters' shapes.
        dtypes (tuple of dtypes, default float32 and float64): dtypes of parameters in every
            invariant.
        half_precision (tuple of dtypes, default empty): any of bfloat16 and float16. Parameters of
            these dtypes train under a scale as without one.
        complex_parameters (bool, default False): complex64 parameters train under a scale.
        dense_gradients (bool, default True): gradients are strided tensors. If false, every
            gradient is a sparse COO tensor.
        sparse_gradients (bool, default False): sparse COO gradients are accepted, also uncoalesced.
        plain_steps (bool, default True): the optimizer steps without a closure.
        closures (bool, default True): the optimizer steps with a closure, which is run again with a
            lower scale while its gradients overflow.
        any_layout (bool, default True): parameters and gradients may be transposed, strided or
            channels-last.
        layout_changes_no_bit (bool, default True): a step gives the same bits in every layout. Set
            it to False if the step computes norms or sums in memory order.
        elementwise (bool, default True): the update of an element depends on no other element, nor
            on its place in the parameter. Set it to False for norms, matrices, sums and noise.
            Tested only if ``any_layout`` and ``layout_changes_no_bit`` are True as well.
        several_groups (bool, default True): the optimizer takes several param groups.
        continuous (bool, default True): small changes of gradients change a step little, so
            training in the parameter's dtype stays near a float64 reference. Set it to False if the
            step uses signs, rounds coarsely or draws random numbers.
        independent_parameters (bool, default True): the update of a parameter depends on no other
            parameter, nor on the order of parameters and groups.
        zero_lr_is_still (bool, default True): with a learning rate of 0 no parameter changes, not
            even by rounding, as by ``0.9 * p + 0.1 * z`` where ``z`` equals ``p``.
        finite_steps (bool, default True): steps with finite gradients leave parameters finite.
        huge_gradients (bool, default True): a step accepts finite gradients of any size. Set it to
            False for an optimizer whose linear algebra raises on huge numbers.
        tensor_learning_rates (bool or None, default None): ``group["lr"]`` may be a tensor, and
            another one in each step. ``None`` means True for subclasses of
            :class:`ampopt.ElementwiseOptimizer`, else False.
        modes (tuple of str, default empty): names of methods that switch the optimizer's mode, such
            as ``("train", "eval")``. The optimizer starts in the first. In any other mode a step
            must raise ``RuntimeError`` and change nothing, a checkpoint must keep the mode, and
            switching to the mode that it is in must change nothing.
        calls (tuple of str, default empty): names of further methods, called between
            steps, such as ``"update_hessian"``. A method with a parameter ``grads_scaled_by`` is
            called while gradients are present: it must return ``(found_inf, scale)``, change
            nothing if gradients overflow, and otherwise do what it does without a scale on unscaled
            gradients. Other methods are called without arguments.
        leaves_gradients (bool, default True): ``step_after_unscale`` does not write to ``p.grad``,
            nor keep it as a state.
        checkpoints (bool, default True): ``state_dict`` holds the whole state, and ``torch.load``
            reads it with its default, ``weights_only=True``.
        deepcopies (bool, default True): ``copy.deepcopy`` of optimizer and parameters trains like
            the original.
        grad_scaler (bool, default True): ``torch.amp.GradScaler`` may step the optimizer.
        accumulates (bool, default True): a step on gradients that ``accumulate`` summed equals a
            step on their sum in ``p.grad``.
        sync_free (bool, default False): from the second step on, an accelerator's tensors are
            stepped without synchronization.
        on_device (tuple of bool, default ``(False, True)``): examples run as on the CPU (False),
            and as on an accelerator (True); see :func:`ampopt.testing.as_on_a_device`.
        state_bits (tuple of int, default ``(32, 16, 8)``): each example draws one of these. An
            optimizer of a rule then keeps its states in that many bits, even those of small
            parameters. The number is 32 where gradients are sparse, and in invariants that need
            ``independent_parameters`` or ``elementwise``, since random rounding depends on the
            place of an element in the optimizer.
        settings (hypothesis.settings or None, default None): Hypothesis settings of this class.
            ``None`` means the active profile's; ``ampopt.testing.QUICK`` draws a tenth of the
            examples of Hypothesis's default.
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
    elementwise: ClassVar[bool] = True
    several_groups: ClassVar[bool] = True
    continuous: ClassVar[bool] = True
    independent_parameters: ClassVar[bool] = True
    zero_lr_is_still: ClassVar[bool] = True
    finite_steps: ClassVar[bool] = True
    huge_gradients: ClassVar[bool] = True
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
    state_bits: ClassVar[tuple[int, ...]] = (32, 16, 8)
    settings: ClassVar[hypothesis.settings | None] = None
    failure: failures.Failure | None = None

    @pytest.fixture(autouse=True)
    def _summed_up(self, request: pytest.FixtureRequest) -> Iterator[None]:
        """Record a failure for the summary at the end of pytest's report."""
        yield
        if self.failure is not None:
            failures.summary_of(request.config).note(type(self).__name__, self.failure)

    def make(self, params: Any) -> Any:
        """Return the optimizer to test. Every contract class must override this method.

        Args:
            params: a list of parameters, or of param groups, as any torch optimizer takes.
        """
        raise NotImplementedError(f"define make(self, params) in {type(self).__name__}")

    def reference(self, params: Any, **options: Any) -> torch.optim.Optimizer:
        """Return an optimizer of float64 ``params`` that you trust, to compare with.

        **Without an override, wrong mathematics passes**: by default this is the optimizer that
        ``make`` returns, so only errors of its own dtype and of call sequences are found. Return
        another implementation to find more: torch's, if yours is a faster version of it, or ten
        lines in a loop over parameters. Only ``step()``, ``add_param_group`` and the methods in
        ``modes`` and ``calls`` are called, and ``lr`` of its groups is set.

        Args:
            params: a list of parameters, or of param groups.
            options: the keyword arguments that ``make`` got.
        """
        return self.make(params, **options)

    @classmethod
    def histories(cls, **changes: Any) -> st.SearchStrategy[History]:
        """Strategy of trainings within what the class claims.

        Args:
            changes: arguments of :func:`ampopt.testing.strategies.histories` that override the
                claims.
        """
        settings: dict[str, Any] = {
            "dtypes": cls.dtypes,
            "of_shapes": cls.shapes,
            "groups": cls.several_groups,
            "layouts": cls.any_layout,
            "sparse": not cls.dense_gradients,
        }
        return strategies.histories(**{**settings, **changes})

    def replay(self, test: str, **arguments: Any) -> None:
        """Run one invariant on one example; a failure prints the call.

        Args:
            test: name of the invariant.
            arguments: the example.
        """
        run_once(self, marked_function(type(self), test), **arguments)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Replace each invariant by a test that draws its arguments.

        Hypothesis needs a new test function for each class.
        """
        super().__init_subclass__(**kwargs)
        if cls.make is Claims.make:
            return
        settings = settings_of(cls)
        for name in dir(cls):
            if name.startswith("test") and (body := marked_function(cls, name)) is not None:
                setattr(cls, name, as_test(cls, name, body, settings))
