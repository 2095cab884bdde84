"""Adagrad, a drop-in for ``torch.optim.Adagrad``."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from ampopt._step import gradients
from ampopt._step.declared_states import DeclaredStates
from ampopt._step.loading import convert_loaded
from ampopt._step.rule_state import state_of
from ampopt.elementwise import ElementwiseOptimizer
from ampopt.options import STATE_BITS, RuleOptions, needs_master
from ampopt_kernels import rules

__all__ = ["Adagrad"]


class Adagrad(ElementwiseOptimizer, torch.optim.Adagrad):
    """``torch.optim.Adagrad`` with loss scaling, overflow tests and skips built in.

    Constructor, defaults and results are torch's. With sparse gradients, torch's own step runs. The
    methods for loss scaling are those of :class:`ampopt.Optimizer`::

        optimizer = ampopt.Adagrad(model.parameters())
        ampopt.scale_outputs(loss, scale).backward()
        _, found_inf, scale = optimizer.unscale_and_step(grads_scaled_by=scale)

    Args:
        params, lr, lr_decay, weight_decay, initial_accumulator_value, eps, maximize: as in
            ``torch.optim.Adagrad``.
        foreach, fused: accepted and ignored; :func:`ampopt.set_backend` decides how a step
            runs. Exception: with ``fused=True``, parameters that torch's fused kernel does not
            support, such as complex ones, raise at the first step.
        differentiable: run torch's own step.
        **options: see :class:`ampopt.options.RuleOptions`.

    Differs from torch: the step count moves to the parameter's device at the first step. A group
    that is added later may have an ``initial_accumulator_value`` of its own; torch takes that of
    the constructor. Updates of float16 and bfloat16 parameters are computed in float32 and rounded
    once.
    """

    rule = rules.adagrad
    sparse_gradients = True

    if TYPE_CHECKING:  # type checkers see torch's arguments, with ampopt's

        def __init__(
            self,
            params: ParamsT,
            lr: float | Tensor = 0.01,
            lr_decay: float = 0,
            weight_decay: float = 0,
            initial_accumulator_value: float = 0,
            eps: float = 1e-10,
            foreach: bool | None = None,
            *,
            maximize: bool = False,
            differentiable: bool = False,
            fused: bool | None = None,
            **options: Unpack[RuleOptions],
        ) -> None:
            """Make the optimizer; see the class."""

    else:

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            """Make the optimizer; see the class."""
            super().__init__(*args, **kwargs)
            initial = self.defaults["initial_accumulator_value"]
            for group in self.param_groups:
                for param in group["params"]:
                    if needs_master(group, param):
                        # torch's sum has the parameter's dtype: its initial value was rounded.
                        state = self.state[param]
                        state["sum"] = torch.full_like(state["sum"], initial, dtype=torch.float32)
            if any(map(STATE_BITS.is_set, self.param_groups)):
                convert_loaded(self)

    def _prepare_torchs_step(self) -> None:
        """Make missing states: torch 2.11 makes none for a group that is added later."""
        for index, param in gradients.present(self.param_groups):
            if not self.state.get(param):
                state_of(self, DeclaredStates.of(self.rule, self.param_groups[index], param))
