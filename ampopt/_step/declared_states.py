"""What a rule declares for the states of one parameter."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampopt._step.hyperparameters import kind_of
from ampopt._step.small_states import RANDOM_KEY, codecs_of, has_codes
from ampopt.options import needs_master, rounds_stochastically
from ampopt_kernels.codecs import Codec
from ampopt_kernels.rule import MASTER, Rule, State
from ampopt_kernels.state import scale_key

__all__ = ["DeclaredStates"]


class DeclaredStates(NamedTuple):
    """The states that a rule declares for one parameter.

    Attributes:
        rule: the update rule.
        group: the param group of the parameter.
        param: the parameter.
        flags: the flags of the rule for the parameter.
        codecs: the codec of each elementwise state, or ``None``.
    """

    rule: Rule
    group: dict[str, Any]
    param: Tensor
    flags: tuple[bool, ...]
    codecs: tuple[Codec | None, ...]

    @classmethod
    def of(cls, rule: Rule, group: dict[str, Any], param: Tensor) -> "DeclaredStates":
        """The states of ``param`` of ``group`` under the present options."""
        flags = rule.flag_values(group, kind_of(group, param))
        return cls(rule, group, param, flags, codecs_of(rule, flags, group, param))

    @property
    def has_master(self) -> bool:
        """Whether the parameter has a master."""
        return needs_master(self.group, self.param)

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of states in full precision; ``None`` for any, at first the parameter's.

        It is float32 beside a master, and where the parameter is rounded stochastically: rounded to
        nearest, such states would lose small changes.
        """
        is_wide = self.has_master or rounds_stochastically(self.group, self.param)
        return torch.float32 if is_wide else None

    @property
    def tensors(self) -> tuple[State, ...]:
        """The states that are tensors of one or more dimensions."""
        elementwise = self.rule.state_for(self.flags)
        return (*elementwise, *self.rule.row_column_states_for(self.flags))

    @property
    def scalars(self) -> tuple[State, ...]:
        """The scalar states."""
        return self.rule.scalar_state_for(self.flags)

    def keys_in(self, state: dict[str, Any]) -> list[str]:
        """The keys of the tensors in ``state`` that a step reads or writes."""
        keys = [MASTER] * self.has_master
        for part in self.tensors:
            keys.append(part.name)
            if state.get(part.name) is not None and has_codes(state, part):
                keys.append(scale_key(part.name))
        keys += (RANDOM_KEY, *(part.name for part in self.scalars))
        return [key for key in keys if isinstance(state.get(key), Tensor)]

    @property
    def by_codec(self) -> dict[State, Codec | None]:
        """The codec of each elementwise state."""
        return dict(zip(self.rule.state_for(self.flags), self.codecs, strict=True))
