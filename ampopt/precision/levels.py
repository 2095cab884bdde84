"""``Precision``: the dtypes and the loss scaling of a training run as one value."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ampopt.loss_scale.base import LossScale
from ampopt.loss_scale.dynamic import DynamicLossScale
from ampopt.loss_scale.static import StaticLossScale
from ampopt.options import MASTER_BITS, MASTER_WEIGHTS, STATE_BITS
from ampopt.precision.autocast import autocast, check_names
from ampopt.precision.cast import (
    NORMS,
    Model,
    as_tuple,
    cast,
    check_dtypes,
    run_kept_in_float32,
)
from ampopt.precision.presets import LEVELS

__all__ = ["Precision"]

_OPTIONS = (MASTER_WEIGHTS, STATE_BITS, MASTER_BITS)
"""The options of the optimizer that are fields of :class:`Precision`."""


@dataclass(frozen=True)
class Precision:
    """A precision policy, like an "opt level" of apex or a policy of Keras and jmp.

    Four lines use all of it::

        p = ampopt.Precision.like("O2")
        p.prepare(model)
        optimizer = ampopt.AdamW(model.parameters(), lr=1e-3, **p.optimizer_options)
        step = ampopt.TrainStep(model, loss_fn, optimizer, precision=p)

    In your own loop, use ``with p.autocast("cuda")`` around model and loss, and start with ``scale
    = p.loss_scale()``. Nothing here synchronizes.

    Attributes:
        param_dtype: the dtype of parameters and inputs, which :func:`ampopt.cast` converts to.
            Default float32.
        compute_dtype: the dtype of autocast. Default float32. Autocast is off if it equals
            ``param_dtype`` and ``allow`` and ``deny`` are empty.
        output_dtype: the dtype to cast the model's results to; ``None``, the default, for no cast.
        keep: the modules that stay in float32: types, names or modules, as for :func:`ampopt.cast`.
            By default all norms (``ampopt.NORMS``). Where autocast is on, they run without it.
        allow: names of operators that autocast runs in ``compute_dtype``, in addition to torch's.
        deny: names of operators that autocast runs in float32, in addition to torch's.
        master_weights: whether the optimizer keeps float32 master weights. Default ``False``.
        state_bits: how many bits the optimizer keeps its states in: 32, the default, 16 or 8; see
            :class:`ampopt.ElementwiseOptimizer`.
        master_bits: how many bits a master weight has: 32, the default, or 24; see
            :class:`ampopt.ElementwiseOptimizer`.
        scaling: how the loss is scaled: ``None``, the default, for no scaling; a number for a
            static scale; a name of :meth:`ampopt.DynamicLossScale.like`; or a function that returns
            a new scale.

    Raises:
        TypeError: a value is of the wrong type.
        ValueError: a value is not allowed, or two of them do not go together.
    """

    param_dtype: torch.dtype = torch.float32
    compute_dtype: torch.dtype = torch.float32
    output_dtype: torch.dtype | None = None
    keep: tuple[Any, ...] = NORMS
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    master_weights: bool = False
    state_bits: int = 32
    master_bits: int = 32
    scaling: float | str | Callable[[], LossScale] | None = None

    def __post_init__(self) -> None:
        """Check the values, and convert collections to tuples."""
        for name in ("keep", "allow", "deny"):
            object.__setattr__(self, name, as_tuple(name, getattr(self, name)))
        check_dtypes(param_dtype=self.param_dtype, compute_dtype=self.compute_dtype)
        if self.output_dtype is not None:
            check_dtypes(output_dtype=self.output_dtype)
        wide = self.compute_dtype.itemsize > 2  # autocast takes dtypes of 2 bytes only
        if wide and (self.allow or self.deny or self.compute_dtype != self.param_dtype):
            raise ValueError(
                "compute_dtype must be torch.float16 or torch.bfloat16, or, without allow and "
                f"deny, equal to param_dtype, got {self.compute_dtype}"
            )
        for option in _OPTIONS:
            option.check(option.of(vars(self)))
        if self.master_weights and self.param_dtype.itemsize > 2:
            raise ValueError(f"{self.param_dtype} parameters need no master_weights: omit it")
        if MASTER_BITS.is_set(vars(self)) and not self.master_weights:
            raise ValueError(f"master_bits={self.master_bits} needs master_weights=True")
        check_names(self.allow, self.deny)
        if not callable(self.scaling):
            self.loss_scale()

    @classmethod
    def like(cls, name: str, /, **overrides: Any) -> "Precision":
        """The policy that another system has under this name.

        Args:
            name: ``"O0"`` to ``"O3"`` as in apex, ``"torch"``, ``"paddle-O1"``, ``"paddle-O2"``,
                ``"fleet"``, ``"mindspore-O0"``, ``"mindspore-O2"``, ``"mindspore-O3"`` or
                ``"nnabla-half"``. ``ampopt.precision.presets`` lists the source of each, and what
                it omits.
            overrides: fields to replace, such as ``compute_dtype=torch.bfloat16``. ``allow`` and
                ``deny`` add to the lists of the policy. A name that is added to one list is
                removed from the other.

        Raises:
            TypeError: an override is not a field, or of the wrong type.
            ValueError: ``name`` is unknown; or as for the class.
        """
        if name not in LEVELS:
            raise ValueError(f"no level is called {name!r}: choose one of {sorted(LEVELS)}")
        level = LEVELS[name]
        added = {field: as_tuple(field, overrides.get(field, ())) for field in ("allow", "deny")}
        for field, other in (("allow", "deny"), ("deny", "allow")):
            left = [one for one in level.get(field, ()) if one not in added[other]]
            overrides[field] = tuple(dict.fromkeys([*left, *added[field]]))
        return cls(**{**level, **overrides})

    def prepare(self, model: Model) -> Model:
        """Convert ``model`` in place, by :func:`ampopt.cast`, and return it.

        Where autocast is on, the modules that match ``keep`` run without it, in float32, as by
        :func:`ampopt.run_in`; a module with a ``run_in`` of its own keeps it. A second call
        replaces the first.
        """
        cast(model, self.param_dtype, self.keep, self.output_dtype)
        if self._autocasts:
            run_kept_in_float32(model, self.keep)
        return model

    @property
    def _autocasts(self) -> bool:
        """Whether autocast is on."""
        return bool(self.compute_dtype != self.param_dtype or self.allow or self.deny)

    def autocast(self, device_type: str) -> contextlib.AbstractContextManager[Any]:
        """The context in which to call the model and the loss function.

        Args:
            device_type: the device type of the model, such as ``"cuda"``.
        """
        if self._autocasts:
            return autocast(device_type, self.compute_dtype, self.allow, self.deny)
        return contextlib.nullcontext()

    @property
    def optimizer_options(self) -> dict[str, Any]:
        """Keyword arguments for the optimizer: ``AdamW(params, **precision.optimizer_options)``."""
        return {o.name: o.of(vars(self)) for o in _OPTIONS if o.is_set(vars(self))}

    def loss_scale(self) -> LossScale | None:
        """A new loss scale to start with; ``None`` for no scaling."""
        if isinstance(self.scaling, str):
            return DynamicLossScale.like(self.scaling)
        if not callable(self.scaling):
            return None if self.scaling is None else StaticLossScale(self.scaling)
        scale = self.scaling()
        if not isinstance(scale, LossScale):
            raise TypeError(f"scaling must return a LossScale, got {type(scale).__name__}")
        return scale
