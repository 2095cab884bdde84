"""Schedule-free AdamW."""

from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from ampopt._step.gradients import named_params
from ampopt.elementwise import ElementwiseOptimizer
from ampopt.optim._hyperparameters import checked
from ampopt.options import RuleOptions
from ampopt_kernels import rules

__all__ = ["ScheduleFreeAdamW"]


class ScheduleFreeAdamW(ElementwiseOptimizer):
    """Schedule-free AdamW: averages its own iterates instead of following a learning-rate schedule.

    Defazio et al., The Road Less Scheduled (2405.15682). This class takes the same steps as
    ``AdamWScheduleFree`` of facebookresearch/schedule_free, with the same defaults. Parameters are
    in one of two modes::

        optimizer.train()   the point where gradients are computed; the initial mode; steps need it
        optimizer.eval()    the average: to evaluate the model, and to save it for inference

    The mode is in the param groups, and so in ``state_dict``. Switching back and forth rounds the
    stored parameters; use ``master_weights`` for half-precision parameters.

    Args:
        params: parameters or param groups, as for torch's optimizers.
        lr: the learning rate, which may be a one-element tensor.
        betas: two numbers. The first says where gradients are computed: 0 would be at the iterate
            ``z``, 1 at the average; it must be above 0. The second is the decay rate of the average
            of squared gradients.
        eps: added to the denominator.
        weight_decay: weight decay, multiplied by ``lr``, of the point where gradients are computed.
        warmup_steps: number of steps in which the learning rate grows linearly to ``lr``.
        r: a step has the weight ``step**r * max_lr**weight_lr_power`` in the average, where
            ``max_lr`` is the largest learning rate so far.
        weight_lr_power: see ``r``.
        maximize: maximize the objective instead of minimizing it.
        **options: see :class:`ampopt.options.RuleOptions`.

    Raises:
        TypeError: a hyperparameter is not a number, or a flag is not a bool.
        ValueError: a hyperparameter is out of range.

    Differs from the original: it starts in training mode; steps and weights are counted for each
    parameter, in its state, not for each group; a step in evaluation mode is a ``RuntimeError``;
    ``maximize`` is new; updates of float16 and bfloat16 parameters are computed in float32 and
    rounded once.
    """

    rule = rules.schedule_free_adamw

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.0025,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        r: float = 0.0,
        weight_lr_power: float = 2.0,
        *,
        maximize: bool = False,
        **options: Unpack[RuleOptions],
    ) -> None:
        """Make the optimizer; see the class."""
        defaults = checked(ScheduleFreeAdamW, locals())
        if not betas[0] > 0.0:
            raise ValueError(
                f"Invalid beta parameter at index 0: {betas[0]}; it must be above 0; with 0, "
                "gradients would be computed at z, from which eval() cannot compute the average"
            )
        if warmup_steps % 1:
            raise ValueError(f"warmup_steps must be a whole number, got {warmup_steps!r}")
        super().__init__(params, {**defaults, "train_mode": True}, **options)

    def train(self) -> None:
        """Move the parameters to the point where gradients are computed. Does not synchronize."""
        self._switch(True)

    def eval(self) -> None:
        """Move the parameters to the average. Does not synchronize."""
        self._switch(False)

    def check_step(self) -> None:
        """Raise in evaluation mode, in which gradients are computed at the average."""
        if not all(group["train_mode"] for group in self.param_groups):
            raise RuntimeError(
                f"{type(self).__name__} is in evaluation mode, where parameters are "
                "averages: call train() before the forward pass of a step"
            )

    @torch.no_grad()
    def _switch(self, train: bool) -> None:
        """Move the parameters of all groups that are in the other mode, and set their mode."""
        for index, members in groupby(named_params(self.param_groups), itemgetter(0)):
            if (group := self.param_groups[index])["train_mode"] != train:
                named = ((name, param) for _, param, name in members)
                self._ampopt.runner.checks.check_states(self.rule, group, named)
        for group in self.param_groups:
            if group["train_mode"] == train:
                continue
            group["train_mode"] = train
            beta1, _ = group["betas"]
            to_z = 1 - beta1 if train else 1 - 1 / beta1
            for param, full in self.params_and_masters(group):
                if (z := self.state.get(param, {}).get("z")) is not None:
                    # z is float32 for parameters that are rounded at random.
                    full.copy_(full.to(z.dtype).lerp_(z, to_z))
                    param.copy_(full)
