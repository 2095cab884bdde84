"""Invariants: a loss scale changes nothing about a step except whether it overflows."""

from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st

import ampopt
from ampopt.testing import strategies
from ampopt.testing.bits import assert_same, bits
from ampopt.testing.blueprints import History, Scale, elements, set_gradients
from ampopt.testing.claims import Claims
from ampopt.testing.invariant import invariant
from ampopt.testing.invariants.examples import ending_well, finite, scales, ways
from ampopt.testing.invariants.training import (
    WAYS,
    assert_goes_on,
    assert_same_training,
    assert_scale_changes_nothing,
    start,
    step_by,
    train,
)
from ampopt.testing.making import storing

__all__ = ["Scaling"]


class Scaling(Claims):
    """Loss scales, and steps under a scale that do not overflow."""

    @invariant(history=finite, scale=scales, way=ways)
    def test_a_power_of_two_changes_no_bit(
        self, make: Any, history: History, scale: Scale, way: str
    ) -> None:
        """Under a power of two as scale, finite steps equal ``step()`` on unscaled gradients.

        Multiplying by a power of two is exact, so any difference is a bug: an epsilon, a decay or a
        threshold that was applied to scaled gradients. Such a run trains with other hyperparameters
        than it was given, and they change whenever the scale does.
        """
        assert_scale_changes_nothing(make, history, scale, way)

    @invariant(
        history=lambda cls: cls.histories(overflows=False, max_steps=1, kind="edge"),
        scale=strategies.any_scales(),
        kind=st.sampled_from(["number", "tensor", "static", "dynamic"]),
    )
    def test_unscale_divides_gradients_by_the_scale(
        self, make: Any, history: History, scale: float, kind: Any
    ) -> None:
        """After ``unscale``, ``p.grad`` is the gradient divided by the scale, within two ulps.

        This holds for any scale of any kind. The float16 reciprocal of a small scale overflows, and
        that of a large one underflows; a clipping threshold then means something else than was set.
        """
        trained = start(make, history)
        set_gradients(trained.params, history.steps[0])
        gradients = [None if p.grad is None else values_of(p.grad) for p in trained.params]
        result = trained.optimizer.unscale(grads_scaled_by=Scale(kind, scale).make())
        overflows = []
        for p, before in zip(trained.params, gradients, strict=True):
            if before is None:
                continue
            assert p.grad is not None
            info, expected = torch.finfo(p.dtype), before.double() / scale
            # Next to the largest finite number, rounding decides whether there is an overflow.
            assume(not ((expected.abs() / info.max - 1).abs() < 4 * info.eps).any())
            overflows.append((expected.abs() > info.max).any().item())
            actual = values_of(p.grad).double()
            tolerance = 2 * info.eps * expected.abs() + 2 * info.smallest_normal * info.eps
            inside = expected.abs() <= info.max
            assert ((actual - expected).abs() <= tolerance)[inside].all(), (
                f"{before.tolist()} scaled by {scale} was unscaled to {actual.tolist()}"
            )
        assert bool(result.found_inf > 0) is any(overflows)

    @invariant(history=ending_well, exponent=st.integers(-20, 20))
    def test_split_is_joined(self, make: Any, history: History, exponent: int) -> None:
        """``unscale`` and then ``step_after_unscale`` equals ``unscale_and_step``, scales included.

        Adding clipping to a loop needs the two calls, and must change nothing else. An optimizer
        that unscales twice trains on gradients 65536 times too small.
        """
        scale = Scale("dynamic", 2.0**exponent)
        one, other = (train(make, history, scale, way) for way in WAYS)
        assert_same_training(one, other, "one call differs from two")
        assert one.scales == other.scales

    @invariant(history=finite, way=ways)
    def test_no_scale_is_step(self, make: Any, history: History, way: str) -> None:
        """With ``grads_scaled_by=None``, the call is ``step()`` and the returned scale is ``None``.

        So one loop serves with and without scaling, and a comparison of the two compares nothing
        else.
        """
        trained = train(make, history, Scale("none"), way)
        assert trained.scales == [None] * len(history.steps)
        assert_same_training(trained, train(make, history, way=None), "None is not step()")

    # --- clipping --------------------------------------------------------------------------------

    @invariant(history=finite, exponent=st.integers(-20, 20))
    def test_clipping_does_not_depend_on_the_scale(
        self, make: Any, history: History, exponent: int
    ) -> None:
        """``max_norm`` bounds the norm of unscaled gradients, whatever the scale.

        Clipping scaled gradients shrinks all of them to almost nothing while the scale is large:
        the run looks like one with a tiny learning rate.
        """
        runs = []
        for number in (1.0, 2.0**exponent):
            trained = start(make, history)
            for step in history.steps:
                set_gradients(trained.params, step, number)
                trained.optimizer.unscale_and_step(grads_scaled_by=number, max_norm=0.5)
            runs.append(trained)
        assert_same_training(runs[0], runs[1], f"clipped under a scale of 2**{exponent}")
        norms = [bits(trained.optimizer.grad_norm) for trained in runs]
        assert_same(norms[1], norms[0], "grad_norm depends on the scale")

    @invariant(
        history=lambda cls: finite(cls, max_steps=1, dtypes=(torch.float32,), absent=False),
        norm=st.integers(10, 14),
        limit=st.integers(-4, 16),
    )
    def test_max_norm_is_clip_grad_norm(
        self, make: Any, history: History, norm: int, limit: int
    ) -> None:
        """``max_norm=`` equals ``clip_grad_norm_`` between the two calls.

        The gradient has one nonzero element, a power of two, so that both are exact.
        """
        (step,) = history.steps
        assume(any(g and g.numel for g in step))
        at = next(i for i, g in enumerate(step) if g and g.numel)
        runs = []
        for clip in (False, True):
            trained = start(make, history)
            set_gradients(trained.params, step, 0.0)
            values = elements(trained.params[at].grad)
            values[(0,) * values.ndim] = 2.0 ** (norm + 3)
            if clip:
                trained.optimizer.unscale(grads_scaled_by=8.0)
                # As clip_grad_norm_ does, which cannot take the norm of sparse gradients itself.
                total = torch.tensor(2.0**norm)
                torch.nn.utils.clip_grads_with_norm_(trained.params, 2.0**limit, total)
                trained.optimizer.step_after_unscale()
            else:
                trained.optimizer.unscale_and_step(grads_scaled_by=8.0, max_norm=2.0**limit)
                grad_norm = float(trained.optimizer.grad_norm)
                assert grad_norm == 2.0**norm, f"grad_norm is {grad_norm}, not {2.0**norm}"
            runs.append(trained)
        assert_same_training(runs[0], runs[1], "max_norm differs from clip_grad_norm_")

    # --- the scale to use next -------------------------------------------------------------------

    @invariant(
        history=lambda cls: cls.histories(absent=False),
        floor=st.integers(-3, 0),
        ceiling=st.integers(0, 3),
        interval=st.integers(1, 3),
        way=ways,
    )
    def test_the_scale_follows_its_schedule_within_its_bounds(
        self, make: Any, history: History, floor: int, ceiling: int, interval: int, way: str
    ) -> None:
        """A dynamic scale halves on overflow, doubles after finite steps, and keeps its bounds.

        The next scale must keep the bounds and the growth counter of the one before; a scale that
        reaches 0 stays there, and every later step is skipped.
        """
        scale: Any = ampopt.DynamicLossScale(
            init_scale=1.0,
            growth_interval=interval,
            min_scale=2.0**floor,
            max_scale=2.0**ceiling,
        )
        expected, finite_steps, trained = 1.0, 0, start(make, history)
        for step, overflows in zip(history.steps, history.overflows, strict=True):
            old_scale = scale
            result = step_by(trained, step, scale, way)
            scale = result.scale
            has_gradients = any(p.grad is not None for p in trained.params)
            if overflows:
                expected, finite_steps = max(expected / 2, 2.0**floor), 0
            elif has_gradients and not any(g and g.numel for g in step):
                return  # whether gradients without elements count is unspecified
            elif has_gradients:
                finite_steps += 1
                if finite_steps == interval:
                    expected, finite_steps = min(expected * 2, 2.0**ceiling), 0
            assert float(scale) == expected, (
                f"after {'an overflow' if overflows else 'a finite step'} the scale is "
                f"{float(scale)}, not {expected}"
            )
            assert scale.state_dict()["growth"] == finite_steps
            assert float(old_scale) == float(old_scale.value), (
                "the scale that was passed in has changed"
            )

    # --- claims that are off by default ----------------------------------------------------------

    @invariant(
        claim="half_precision",
        history=lambda cls: ending_well(cls, dtypes=cls.half_precision),
        exponent=st.integers(-4, 10),
        master_bits=st.sampled_from([0, 32, 24]),
    )
    def test_half_precision_parameters(
        self, make: Any, history: History, exponent: int, master_bits: int = 0
    ) -> None:
        """bfloat16 and float16 parameters: skipped steps and powers of two change nothing.

        Small gradients that are unscaled in float16 underflow, which scaling is meant to prevent.
        An optimizer of a rule has master weights of ``master_bits``, or none if that is 0.
        """
        if master_bits:
            make = storing(make, master_weights=True, master_bits=master_bits)
        assert_goes_on(make, history, 1.0, "unscale_and_step")
        scale = Scale("number", 2.0**exponent)
        assert_scale_changes_nothing(make, history, scale, "unscale_and_step")

    @invariant(
        claim="complex_parameters",
        history=lambda cls: ending_well(cls, dtypes=(torch.complex64,)),
        scale=scales,
        way=ways,
    )
    def test_complex_parameters(self, make: Any, history: History, scale: Scale, way: str) -> None:
        """Complex parameters: skipped steps and powers of two change nothing.

        The real or the imaginary part of a gradient may overflow.
        """
        assert_goes_on(make, history, scale.number, way)
        assert_scale_changes_nothing(make, history, scale, way)

    @invariant(
        claim="sparse_gradients",
        history=lambda cls: ending_well(
            cls,
            sparse=True,
            of_shapes=strategies.shapes(min_dims=1, max_dims=2, min_side=1),
        ),
        scale=scales,
        way=ways,
    )
    def test_sparse_gradients(self, make: Any, history: History, scale: Scale, way: str) -> None:
        """Sparse gradients, coalesced or not: skipped steps and powers of two change nothing.

        An embedding's gradient has a row for each occurrence of a token, and equal indices are
        summed.
        """
        assert_goes_on(make, history, scale.number, way)
        assert_scale_changes_nothing(make, history, scale, way)


def values_of(grad: torch.Tensor) -> torch.Tensor:
    """Copy the elements of a dense or sparse gradient."""
    return (grad.coalesce().values() if grad.is_sparse else grad).detach().clone()
