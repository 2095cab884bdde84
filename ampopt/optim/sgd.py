"""Stochastic gradient descent."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from ampopt._step.gradients import params_of
from ampopt.elementwise import ElementwiseOptimizer
from ampopt.options import RuleOptions
from ampopt_kernels import rules
from ampopt_kernels.state import codes_key, scale_key

__all__ = ["SGD"]


(_STEPPED,) = (part.name for part in rules.sgd.scalar_state)
_BUFFER = "momentum_buffer"


def _dampens(group: dict[str, Any]) -> bool:
    """Whether a step of ``group`` needs the flag, as its momentum is dampened."""
    return bool(rules.sgd.scalar_state_for(rules.sgd.flag_values(group)))


def _drop_initial(state: dict[str, Any]) -> None:
    """Remove flag and buffer if no step was applied: torch makes the buffer in the first one."""
    has_stepped = state[_STEPPED]
    if not (has_stepped.is_meta or has_stepped > 0):
        for name in (_STEPPED, _BUFFER, codes_key(_BUFFER), scale_key(_BUFFER)):
            state.pop(name, None)


class SGD(ElementwiseOptimizer, torch.optim.SGD):
    """``torch.optim.SGD`` with loss scaling, overflow tests and skips built in.

    Constructor, defaults and results are torch's. With sparse gradients, torch's own step runs. The
    methods for loss scaling are those of :class:`ampopt.Optimizer`::

        optimizer = ampopt.SGD(model.parameters())
        ampopt.scale_outputs(loss, scale).backward()
        _, found_inf, scale = optimizer.unscale_and_step(grads_scaled_by=scale)

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov, maximize: as in
            ``torch.optim.SGD``.
        foreach, fused: accepted and ignored; :func:`ampopt.set_backend` decides how a step
            runs. Exception: with ``fused=True``, parameters that torch's fused kernel does not
            support, such as complex ones, raise at the first step.
        differentiable: run torch's own step.
        **options: see :class:`ampopt.options.RuleOptions`.

    Differs from torch: with dampening, ``optimizer.state`` also has a flag ``stepped``, from which
    the device knows whether a step is the first of a parameter. ``state_dict()`` has only
    entries that torch's has: it omits the flag, and the ``momentum_buffer`` of a parameter whose
    steps were all skipped. It synchronizes, to read the flags. Updates of float16 and bfloat16
    parameters are computed in float32 and rounded once.
    """

    rule = rules.sgd
    sparse_gradients = True

    if TYPE_CHECKING:  # type checkers see torch's arguments, with ampopt's

        def __init__(
            self,
            params: ParamsT,
            lr: float | Tensor = 0.001,
            momentum: float = 0,
            dampening: float = 0,
            weight_decay: float | Tensor = 0,
            nesterov: bool = False,
            *,
            maximize: bool = False,
            foreach: bool | None = None,
            differentiable: bool = False,
            fused: bool | None = None,
            **options: Unpack[RuleOptions],
        ) -> None:
            """Make the optimizer; see the class."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Support loading, copying and pickling."""
        super().__setstate__(state)
        self._complete_states()

    def _prepare_torchs_step(self) -> None:
        """Remove the buffers that skipped steps have made: torch dampens a step that finds one.

        Synchronizes if there is dampening.
        """
        for param in params_of(self.param_groups):
            if _STEPPED in self.state.get(param, {}):
                _drop_initial(self.state[param])

    def _complete_states(self) -> None:
        """Add the flag ``stepped`` where it is needed and missing."""
        for param in params_of(filter(_dampens, self.param_groups)):
            state = self.state.get(param, {})
            buffer = state.get(_BUFFER, state.get(codes_key(_BUFFER)))
            if buffer is not None:
                # torch makes the buffer in the first step, so there was one.
                state.setdefault(_STEPPED, torch.ones((), device=buffer.device))

    def initialize_states(self) -> None:
        """Make every state; see :meth:`ampopt.Optimizer.initialize_states`.

        Raises:
            NotImplementedError: a group has momentum and dampening. Then a parameter has no buffer
                in ``state_dict()`` before its first step, as in torch.
        """
        if any(map(_dampens, self.param_groups)):
            raise NotImplementedError(
                "initialize_states: with dampening, a parameter has no momentum_buffer in "
                "state_dict() before its first step, as in torch"
            )
        super().initialize_states()

    def state_dict(self) -> dict[str, Any]:
        """The state, as torch's. Synchronizes if there is dampening."""
        state_dict = super().state_dict()
        states = state_dict["state"]
        for key in params_of(state_dict["param_groups"]):
            if _STEPPED in states.get(key, {}):
                states[key] = state = states[key].copy()
                _drop_initial(state)
                state.pop(_STEPPED, None)
                if not state:
                    del states[key]
        return state_dict
