"""The contracts of all built-in optimizers, with their claims."""

from typing import Any

import torch
from hypothesis import settings

import ampopt
from ampopt.testing import OptimizerContract, strategies
from support.strategies import fewer
from support.transcribed_optimizers import transcribed

__all__ = [
    "INTERPRETED",
    "OF_ONE_KERNEL",
    "OF_ONE_RULE",
    "OF_RULES",
    "OTHERS",
    "Small",
    "contract_of",
]

OF_KERNELS = (
    "a_finite_gradient_is_never_skipped",
    "a_power_of_two_changes_no_bit",
    "a_scale_on_the_device_that_is_no_scale_skips",
    "a_skipped_step_changes_nothing",
    "a_sum_of_flags_skips",
    "any_sequence_of_calls",
    "clipping_does_not_depend_on_the_scale",
    "complex_parameters",
    "gradients_are_judged_after_unscaling",
    "half_precision_parameters",
    "layout_does_not_matter",
    "max_norm_is_clip_grad_norm",
    "no_control_point_waits_for_the_device",
    "order_and_groups_of_parameters_do_not_matter",
    "split_is_joined",
    "the_scale_follows_its_schedule_within_its_bounds",
    "training_goes_on_as_if_skipped_steps_had_never_been",
    "unscale_divides_gradients_by_the_scale",
)
"""The invariants that a backend can break; all others are tested with ``eager`` only."""
OF_ANY_RULE = (
    "a_closure_is_gradients_and_a_step",
    "a_dynamic_scale_is_used_once",
    "a_failed_closure_changes_nothing",
    "a_finite_gradient_is_never_skipped",
    "a_loop_for_grad_scaler_gives_the_same",
    "a_replay_is_a_start_with_the_smaller_scale",
    "a_scale_changes_nothing_for_a_closure",
    "a_scale_on_the_device_that_is_no_scale_skips",
    "a_static_scale_may_let_overflows_pass",
    "a_step_leaves_gradients_alone",
    "a_sum_of_flags_skips",
    "calls_out_of_order_are_refused",
    "clipping_does_not_depend_on_the_scale",
    "each_group_has_its_own_learning_rate",
    "gradients_are_judged_after_unscaling",
    "max_norm_is_clip_grad_norm",
    "no_control_point_waits_for_the_device",
    "no_gradients_is_no_step",
    "no_scale_is_step",
    "order_and_groups_of_parameters_do_not_matter",
    "parameters_without_gradients_stay",
    "ranks_that_add_up_their_flags_agree",
    "replays_end",
    "split_is_joined",
    "step_after_unscale_may_be_step",
    "step_hooks_run_on_every_attempt",
    "the_scale_follows_its_schedule_within_its_bounds",
    "unscale_divides_gradients_by_the_scale",
    "zero_grad_discards_what_was_unscaled",
)
"""Those that depend on what all rules have in common: control points, groups, and the passes around
the rule. The others are about its mathematics and its states. That no rule waits is tested in
steps/test_no_sync.py."""
OTHERS = {
    name: None
    for name in dir(OptimizerContract)
    if name.startswith("test_") and name.removeprefix("test_") not in OF_KERNELS
}
"""Class attributes that remove the other invariants from a contract."""
OF_ONE_RULE: dict[str, Any] = {f"test_{name}": None for name in OF_ANY_RULE}
"""Class attributes that remove from the contract of a rule what those of other rules show."""
OF_ONE_KERNEL: dict[str, Any] = {
    **OF_ONE_RULE,
    "test_any_sequence_of_calls": None,
    "test_complex_parameters": None,
    "test_half_precision_parameters": None,
    "test_layout_does_not_matter": None,
}
"""Those, and what kernels load, store and keep between calls for any rule in the same way."""
assert all(hasattr(OptimizerContract, name) for name in OF_ONE_KERNEL)

INTERPRETED = settings(fewer(0.05), stateful_step_count=8)
"""Few and short examples, because each call of Triton's interpreter takes milliseconds."""

OF_RULES: dict[str, Any] = {
    "half_precision": (torch.bfloat16, torch.float16),
    "complex_parameters": True,
    "sync_free": True,
}
"""Claims of every optimizer with an update rule."""
_HAND_WRITTEN: dict[str, Any] = {"half_precision": (torch.bfloat16,)}
_OF_EACH: dict[str, dict[str, Any]] = {
    # A step uses the learning rate that the step before computed.
    "ASGD": {"zero_lr_is_still": False},
    "Adafactor": {"complex_parameters": False},
    # torch's LBFGS calls view() on gradients, and max(), which fails for empty ones.
    "LBFGS": {
        "any_layout": False,
        "shapes": strategies.shapes(min_side=1),
        "plain_steps": False,
        "half_precision": (),
        "several_groups": False,
        "independent_parameters": False,
    },
    # Norms are sums in memory order. If a gradient cancels to rounding noise, the step has full
    # length in a random direction.
    "LAMB": {"layout_changes_no_bit": False, "continuous": False},
    "LARS": {"layout_changes_no_bit": False, "continuous": False},
    "NovoGrad": {"layout_changes_no_bit": False, "continuous": False},
    # It steps by signs.
    "Lion": {"continuous": False},
    # torch's Muon divides by the number of rows, and by norms, and rounds to bfloat16.
    "Muon": {
        "continuous": False,
        "shapes": strategies.shapes(min_dims=2, max_dims=2, min_side=1),
        "layout_changes_no_bit": False,
    },
    # The learning rate is only the initial step size, and step sizes change by signs.
    "Rprop": {"continuous": False, "zero_lr_is_still": False},
    "ScheduleFreeAdamW": {"modes": ("train", "eval")},
    # It steps by signs before it has a Hessian estimate, and where that is 0.
    "Sophia": {"continuous": False, "calls": ("update_hessian",)},
    "SparseAdam": {
        "dense_gradients": False,
        "sparse_gradients": True,
        "layout_changes_no_bit": False,
        "shapes": strategies.shapes(min_dims=1, max_dims=2),
    },
}


class Small:
    """Mixin: short histories of small parameters, for slow contracts."""

    shapes = strategies.shapes(max_elements=4, max_dims=2)

    @classmethod
    def histories(cls, **changed: Any) -> Any:
        """The contract's histories, with at most two parameters and two steps."""
        return super().histories(**{"max_params": 2, "max_steps": 2, **changed})  # type: ignore


class _Adagrad(torch.optim.Adagrad):
    """torch's Adagrad, whose version 2.11 creates no state for groups that are added later."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for param in param_group["params"]:
            start = torch.full_like(param, param_group["initial_accumulator_value"])
            self.state[param] = {"step": torch.tensor(0.0), "sum": start.detach()}


def contract_of(
    cls: type[Any], suffix: str = "", bases: tuple[type[Any], ...] = (), **claims: Any
) -> type[OptimizerContract]:
    """Make the contract of a built-in optimizer, with any of its hyperparameters."""

    def make(self: Any, params: Any, **options: Any) -> Any:
        return cls(params, **options)

    def reference(self: Any, params: Any, **options: Any) -> Any:
        # An independent implementation: torch's, or the authors'.
        theirs = vars(torch.optim) | {"Adagrad": _Adagrad}
        trusted = theirs.get(cls.__name__) or transcribed(cls.__name__)
        return trusted(params, **{**options, "lr": float(options["lr"])})

    if claims.get("sparse_gradients"):  # torch refuses weight decay with sparse gradients
        claims["options"] = strategies.hyperparameters(cls).map(lambda o: {**o, "weight_decay": 0})
    by_rule = issubclass(cls, ampopt.ElementwiseOptimizer)
    attributes = {
        "make": make,
        "reference": reference,
        "options": strategies.hyperparameters(cls),
        **(OF_RULES if by_rule else _HAND_WRITTEN),
        **_OF_EACH.get(cls.__name__, {}),
        **claims,
    }
    return type(f"Test{cls.__name__}{suffix}", (*bases, OptimizerContract), attributes)
