"""Schedule-free AdamW."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ampopt.elementwise import ElementwiseOptimizer
from ampopt.optim._hyperparameters import check_betas, check_flags, check_lr, check_not_negative
from ampopt_kernels import rules

__all__ = ["ScheduleFreeAdamW"]


class ScheduleFreeAdamW(ElementwiseOptimizer):
    """Schedule-free AdamW, which needs no learning rate schedule: it averages its own steps.

    Defazio et al., The Road Less Scheduled (2405.15682). Steps are those of ``AdamWScheduleFree``
    of facebookresearch/schedule_free, with its defaults. Parameters are in one of two modes::

        optimizer.train()   where gradients are taken; as it begins, and where alone it steps
        optimizer.eval()    the average: to evaluate the model, and to save it for use

    A mode is kept in the param groups, and so in ``state_dict``. To go there and back rounds
    parameters, as they are stored; keep ``master_weights`` of those in half precision.

    Args:
        params: parameters or param groups, as for torch's optimizers.
        lr: the learning rate, which may be a one-element tensor.
        betas: of the way from ``z`` to the average at which gradients are taken, above 0; and of
            the average of squared gradients.
        eps: added to the denominator.
        weight_decay: of where gradients are taken, multiplied by ``lr``.
        warmup_steps: over which the learning rate grows to ``lr``.
        r: the power of the step count that weighs a step in the average.
        weight_lr_power: the power of the largest learning rate so far that weighs it, too.
        maximize: go up.
        master_weights: keep a float32 master of each float16 and bfloat16 parameter, as
            :class:`ampopt.ElementwiseOptimizer` says. Also an option of a param group.
        param_rounding: ``"stochastic"`` rounds bfloat16 parameters without masters so, as
            :class:`ampopt.ElementwiseOptimizer` says. Also an option of a param group.
        process_group: the ranks that decide together; see :class:`ampopt.Optimizer`.

    Raises:
        TypeError: a hyperparameter is no number, or no bool.
        ValueError: one is out of range.

    Differs from there: it begins in the mode to train in; each parameter counts its own steps and
    weights, in its state, where there a group does; a step in the mode to evaluate in is a
    ``RuntimeError``; ``maximize``; arithmetic on float16 and bfloat16 parameters is float32,
    rounded once at the end.
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
        master_weights: bool = False,
        param_rounding: str = "nearest",
        process_group: Any = None,
    ) -> None:
        """Make the optimizer; see the class."""
        check_lr(lr)
        check_betas(betas)
        if not betas[0] > 0.0:
            raise ValueError(
                f"Invalid beta parameter at index 0: {betas[0]}; it must be above 0, or there "
                "would be no way from where gradients are taken to the average"
            )
        check_not_negative(
            eps=eps,
            weight_decay=weight_decay,
            warmup_steps=warmup_steps,
            weight_lr_power=weight_lr_power,
        )
        check_flags(maximize=maximize)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "warmup_steps": warmup_steps,
            "r": r,
            "weight_lr_power": weight_lr_power,
            "maximize": maximize,
            "train_mode": True,
        }
        super().__init__(
            params,
            defaults,
            master_weights=master_weights,
            param_rounding=param_rounding,
            process_group=process_group,
        )

    def train(self) -> None:
        """Have parameters where gradients are taken. Does not synchronize."""
        self._switch(True)

    def eval(self) -> None:
        """Have parameters at the average. Does not synchronize."""
        self._switch(False)

    def check_step(self) -> None:
        """Refuse a step with the gradients of an average."""
        if not all(group["train_mode"] for group in self.param_groups):
            raise RuntimeError(
                f"{type(self).__name__} is in its mode to evaluate in, where parameters are "
                "averages: call train() before the forward pass of a step"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, in the mode of the others."""
        if self.param_groups:
            param_group.setdefault("train_mode", self.param_groups[0]["train_mode"])
        super().add_param_group(param_group)

    @torch.no_grad()
    def _switch(self, train: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] == train:
                continue
            group["train_mode"] = train
            beta1, _ = group["betas"]
            to_z = 1 - beta1 if train else 1 - 1 / beta1
            for param, full in self.params_and_masters(group):
                if (z := self.state.get(param, {}).get("z")) is not None:
                    full.lerp_(z, to_z)
                    if full is not param:
                        param.copy_(full)
