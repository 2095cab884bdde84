"""What a rule cannot step with: refused, or warned of, before a step has changed anything."""

import warnings
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ampopt._step import dtensor, gradients
from ampopt._step.masters import has_masters, needs_master
from ampopt._step.param_rounding import PARAM_ROUNDING, check_rounding, is_stochastic
from ampopt._step.torch_private import check_for_fused, overlaps_itself
from ampopt._step.variants import Variants, kind_of
from ampopt_kernels.check_rule.on_numbers import try_out
from ampopt_kernels.rule import Rule

__all__ = ["Checks"]

_FUSED_IN_TORCH = (torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Classes whose ``fused=True`` torch refuses for some parameters, at the first step."""


class Checks:
    """Of the parameters and gradients of one optimizer, and of its rule."""

    def __init__(self, optimizer: torch.optim.Optimizer, rule: Rule | None) -> None:
        """Begin.

        Args:
            optimizer: to check, which is not kept alive.
            rule: to step by; ``None`` for that of the optimizer.
        """
        self._optimizer, self._rule_given = weakref.ref(optimizer), rule
        self._dtypes = WeakIdKeyDictionary()  # weak, for an identity is used again
        self._warned_of_float16 = False

    @property
    def _owner(self) -> Any:
        return self._optimizer()

    @property
    def _rule(self) -> Rule:
        return self._owner.rule if self._rule_given is None else self._rule_given

    def need_torch(self) -> bool:
        """Whether this step has to be torch's own: differentiable, or sparse.

        Raises:
            RuntimeError: gradients are such, and neither the rule nor torch takes them.
        """
        optimizer = self._owner
        if optimizer.defaults.get("differentiable"):
            return True
        for index, param in gradients.present(optimizer.param_groups):
            assert param.grad is not None
            if param.grad.layout != torch.strided:
                group, how = optimizer.param_groups[index], ""
                if has_masters(group):
                    how = " with master_weights=True"
                elif is_stochastic(group):
                    how = " with param_rounding='stochastic'"
                if optimizer.sparse_gradients and not how:
                    return True
                how *= optimizer.sparse_gradients
                raise RuntimeError(
                    f"{type(optimizer).__name__}{how} does not support sparse gradients, which "
                    f"{gradients.name_of(optimizer.param_groups, param)} has; make the layer with "
                    "sparse=False, or choose an optimizer that takes them"
                )
        return False

    def check_plannable(self) -> None:
        """Refuse what no plan can be made for, before anything has changed.

        Raises:
            RuntimeError: see :func:`ampopt._step.gradients.held`; a parameter was cast, or is
                expanded; ``fused=True`` with one that torch's fused step refuses; the rule breaks
                its word.
            TypeError: see :func:`ampopt._step.gradients.held`.
            ValueError: a group is to be rounded in no way that there is.
        """
        optimizer = self._owner
        groups, rule = optimizer.param_groups, self._rule
        for group in groups:
            check_rounding(group.get(PARAM_ROUNDING, "nearest"))
        gradients.check(groups)
        self.check_dtypes()
        present = gradients.present(groups)
        variants = Variants(rule, groups, present)
        for flags, hyper in zip(variants.flags(groups), variants.hyper(groups), strict=True):
            try_out(rule, flags, len(hyper), type(optimizer).__name__)
        for group, param in present:
            _check_written_once(groups, param)
            if rule.averages is not None:
                self._check_rows(group, param)
            if groups[group].get("fused") and isinstance(optimizer, _FUSED_IN_TORCH):
                check_for_fused(param)

    def _check_rows(self, index: int, param: Tensor) -> None:
        """Refuse a parameter that has no rows, where states are of rows, or that is complex."""
        groups, name = self._owner.param_groups, type(self._owner).__name__
        which = gradients.name_of(groups, param)
        if param.is_complex():
            raise RuntimeError(
                f"{name} does not support complex parameters, as {which} is: leave it to another "
                "optimizer"
            )
        flags = self._rule.flag_values(groups[index], kind_of(groups[index], param))
        kept = [part.name for part in self._rule.marginals_for(flags)]
        if kept and param.ndim < 2:
            raise RuntimeError(
                f"{name} keeps {', '.join(kept)} of rows and columns, which {which}, of shape "
                f"{tuple(param.shape)}, has not: give the rule a flag for such parameters, by "
                "Rule.entries, and these states when='not FLAG'"
            )

    def remember_dtypes(self) -> None:
        """Remember the dtype of each parameter, to notice a model that is cast later."""
        for group in self._owner.param_groups:
            for param in group["params"]:
                self._dtypes.setdefault(param, param.dtype)

    def check_dtypes(self) -> None:
        """Refuse parameters that were cast since the optimizer was made."""
        self.remember_dtypes()
        groups = self._owner.param_groups
        for group in groups:
            for param in group["params"]:
                made_with = self._dtypes[param]
                if param.dtype != made_with:
                    raise RuntimeError(
                        f"{gradients.name_of(groups, param)} was {made_with} when the "
                        f"optimizer was made and is {param.dtype} now: cast the model first and "
                        "make the optimizer then (with master_weights=True it keeps float32 "
                        "masters of half-precision parameters)"
                    )

    def warn_of_float16(self) -> None:
        """Warn once of a state that is to be kept in float16."""
        if self._warned_of_float16:
            return
        optimizer = self._owner
        for index, param in gradients.present(optimizer.param_groups):
            group = optimizer.param_groups[index]
            if param.dtype != torch.float16 or needs_master(group, param):
                continue
            flags = self._rule.flag_values(group, kind_of(group, param))
            states = (*self._rule.state_for(flags), *self._rule.marginals_for(flags))
            states = [part for part in states if part.dtype in (None, torch.float16)]
            if states:
                self._warned_of_float16 = True
                warnings.warn(
                    f"{type(optimizer).__name__} keeps {', '.join(part.name for part in states)} "
                    f"of {gradients.name_of(optimizer.param_groups, param)} in float16, as torch's "
                    "optimizers do: small values become zero there, such as squares of gradients "
                    "below 2**-12, and steps then are much too long. Pass master_weights=True, or "
                    "keep the parameters in float32 and run the model under torch.autocast",
                    UserWarning,
                    stacklevel=2,
                )
                return


def _check_written_once(groups: list[dict[str, Any]], param: Tensor) -> None:
    if overlaps_itself(dtensor.local(param)):
        raise RuntimeError(
            f"{gradients.name_of(groups, param)} is expanded: several of its elements share one "
            "place in memory, and each would be updated; make it of expanded.clone()"
        )
