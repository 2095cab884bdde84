"""The loss scale that falls after overflows and grows after a run of finite steps."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from ampopt._argument_checks import check_count
from ampopt._warnings import warn_user
from ampopt.loss_scale.arguments import check_flag, check_scale_number
from ampopt.loss_scale.base import Device, LossScale, host_may_read
from ampopt.loss_scale.presets import PRESETS
from ampopt.loss_scale.schedule import Schedule, check_entries
from ampopt_kernels import torch_language
from ampopt_kernels.devices import to_device
from ampopt_kernels.next_scale import next_scale as _policy_next_scale
from ampopt_kernels.tensors import widest

__all__ = ["DynamicLossScale"]


_advance = torch_language.bind(_policy_next_scale)


_SMALLEST = 2.0**-24
"""float16's smallest positive number: under a smaller scale, even a gradient of 1 becomes 0."""


class Collapse:
    """Warns once that a scale has fallen too low; shared by a scale and all scales after it."""

    def __init__(self) -> None:
        """Start without a warning issued."""
        self._has_warned = False

    def say_once(self, value: float, start: float, floor: float) -> None:
        """Warn if ``value`` is at ``floor``, or too small for float16, and less than ``start``."""
        at_floor = value <= floor
        if self._has_warned or value >= start or not (at_floor or value < _SMALLEST):
            return
        self._has_warned = True
        where = f", its floor (min_scale={floor:g})" if at_floor else ""
        warn_user(
            f"the loss scale has fallen from {start:g} to {value:g}{where}: one step after another "
            "overflowed. The usual cause is inf or NaN in the data or the parameters, which no "
            "scale prevents. float16 gradients may all be 0 under such a scale. Run a batch under "
            "ampopt.first_nonfinite(model) to find the first module that returns inf or NaN, fix "
            "it, and restart from a checkpoint before the fall, its loss scale included",
        )


class DynamicLossScale(LossScale):
    """A scale that falls after overflows and grows after a run of finite steps.

    With the defaults it follows the schedule of ``torch.amp.GradScaler``, but never falls below
    ``min_scale``::

        scale = ampopt.DynamicLossScale()
        scale_outputs(loss, scale).backward()
        _, found_inf, scale = optimizer.unscale_and_step(grads_scaled_by=scale)

    The state is ``value``, ``growth`` (0 at first) and ``budget`` (``hysteresis`` at first). One
    step does this, computed in float64 and stored as float32::

        if found_inf > 0:
            growth, budget = 0, budget - 1
            if budget <= 0:
                value = max(value * backoff_factor, min_scale)
                if hysteresis_mode == "per_backoff": budget = hysteresis
        else:
            growth += 1
            if hysteresis_mode != "cumulative": budget = hysteresis
            if growth == growth_interval:
                value = min(value * growth_factor, max_scale), unless float32 cannot hold it
                growth, budget = 0, hysteresis

    A fall to ``min_scale``, or below ``2**-24``, warns once (:doc:`/guides/watching`). See also
    :doc:`/guides/loss_scales`, and :meth:`like` for the settings of other systems.
    """

    _schedule: Schedule
    _collapse: Collapse

    def __init__(
        self,
        *,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 1,
        hysteresis_mode: str = "consecutive",
        min_scale: float = 2.0**-126,
        max_scale: float = float("inf"),
        growth_offsets: tuple[int, int] = (0, 0),
        device: Device | None = None,
    ) -> None:
        """Check the settings. Scales and bounds are rounded to float32.

        Args:
            init_scale: the first scale; in float32's normal range.
            growth_factor: the factor by which the scale grows; more than 1.
            backoff_factor: the factor by which it falls after overflows; between 0 and 1.
            growth_interval: the number of finite steps in a row after which it grows.
            hysteresis: how many overflows it takes to lower the scale.
            hysteresis_mode: when the count of overflows starts again. ``"consecutive"``: at any
                finite step; after ``hysteresis`` overflows in a row, each further one in that row
                lowers the scale again. ``"cumulative"``: only when the scale grows.
                ``"per_backoff"``: at any finite step and after each decrease, so that every
                decrease takes ``hysteresis`` overflows.
            min_scale: the floor, at least ``2**-126``.
            max_scale: the ceiling; if infinite, float32's largest number is the only limit.
            growth_offsets: ``(first, period)``, for systems that count differently: the scale first
                grows after ``growth_interval + first`` finite steps since the start or the last
                overflow, then after every ``growth_interval + period``. ``first >= period``.
            device: the device of the scale; ``None`` for the device where it is first used.

        Raises:
            TypeError: an argument is of the wrong type.
            ValueError: an argument is out of range.
        """
        self._schedule = Schedule(
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            hysteresis=hysteresis,
            hysteresis_mode=hysteresis_mode,
            min_scale=min_scale,
            max_scale=max_scale,
            growth_offsets=growth_offsets,
        )
        self._collapse = Collapse()
        self._policy = self._schedule.policy
        value, counters = self._tensors(self._schedule.init_scale, 0, self._schedule.hysteresis)
        self._set(value, counters, placed=False)
        if device is not None:
            self._place(device)

    @classmethod
    def like(cls, name: str, **overrides: Any) -> "DynamicLossScale":
        """A scale with the settings and the counting of another system.

        The column "grows after" has the finite steps from the start or an overflow to a growth, and
        from one growth to the next; ``N`` is ``growth_interval``, also where you override it::

            name          init   N     grows after    hysteresis        floor   ceiling
            torch         2**16  2000  N, N           1                 -       -
            apex          2**16  2000  N, N           1                 -       2**24
            deepspeed     2**16  1000  N + 1, N       2, "cumulative"   1       -
            megatron      2**32  1000  N, N           2, "cumulative"   1       -
            paddle        2**16  2000  N, N           1, "per_backoff"  -       -
            paddle-fleet  2**15  1000  N, N           2, "per_backoff"  1       -
            mindspore     2**24  2000  N, N           1                 1       -
            nnabla        8      2000  N + 2, N + 1   1                 -       -
            keras         2**15  2000  N, N           1                 -       -
            jmp           2**15  2000  N, N           1                 1       -
            flax          2**16  2000  N + 1, N + 1   1                 2**-126 float32's largest

        All of them double and halve the scale, except that paddle-fleet multiplies it by 0.8
        instead of halving it. Systems without a floor have ``2**-126`` here.
        The comments in ``ampopt/loss_scale/presets.py`` name the source file of each schedule, and
        the behaviour that is left out, such as raising an error at the floor.

        Args:
            name: a name from the table; "paddle" is Paddle's eager ``GradScaler``.
            overrides: arguments of :class:`DynamicLossScale`; ``growth_interval`` is N.

        Raises:
            ValueError: ``name`` is not in the table.
        """
        if not isinstance(name, str) or name not in PRESETS:
            raise ValueError(f"name must be one of {', '.join(map(repr, PRESETS))}, got {name!r}")
        return cls(**{**PRESETS[name], **overrides})

    def next(self, found_inf: Any) -> "DynamicLossScale":
        """The scale after one more step; see :meth:`LossScale.next`."""
        flag = check_flag(found_inf)
        if isinstance(flag, Tensor):
            if not self._placed:
                self._place(flag.device)
            elif self._value.is_cpu and not flag.is_cpu:
                raise ValueError(
                    f"found_inf is on {flag.device} and the loss scale on cpu, which would have to "
                    f"wait for it. Make the scale with device={str(flag.device)!r}."
                )
        assert self._counters is not None
        if host_may_read(self._value, flag):
            # Reading a CPU tensor costs nothing, and Python numbers are several times faster here
            # than 0-d tensors.
            flag_value = flag.item() if isinstance(flag, Tensor) else flag
            new = _advance(
                self._value.item(), *self._counters.tolist(), flag_value, self._schedule.policy
            )
            return self._with(*self._tensors(*new))
        device, dtype = self._value.device, widest(self._value.device)
        if isinstance(flag, Tensor):
            flag = to_device(flag.reshape(()), device, dtype)
        else:
            flag = torch.full((), flag, dtype=dtype, device=device)
        value, *counters = _advance(
            self._value.to(dtype),
            *self._counters.to(dtype).unbind(),
            flag,
            self._schedule.policy,
        )
        return self._with(value.to(torch.float32), torch.stack(counters).to(torch.int32))

    def item(self) -> float:
        """The scale as a Python number; see :meth:`LossScale.item`. Synchronizes.

        Warns once if the scale has fallen to ``min_scale`` or below ``2**-24``.
        """
        value = super().item()
        self._collapse.say_once(value, self._schedule.init_scale, self._schedule.min_scale)
        return value

    def state_dict(self) -> dict[str, Any]:
        """All that has to be saved, as plain Python objects. Synchronizes."""
        assert self._counters is not None
        growth, budget = self._counters.tolist()
        return {
            "type": type(self).__name__,
            "scale": self.item(),
            "growth": growth,
            "budget": budget,
            **self._settings(),
        }

    def grad_scaler_state_dict(self) -> dict[str, Any]:
        """The state as torch's scaler takes it; see :meth:`LossScale.grad_scaler_state_dict`."""
        state = self.state_dict()
        names = ("scale", "growth_factor", "backoff_factor", "growth_interval")
        # torch compares with ==, so a counter beyond the interval would never grow the scale.
        growth = min(state["growth"], state["growth_interval"] - 1)
        return {**{name: state[name] for name in names}, "_growth_tracker": growth}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load value, counters and settings, of this class or of a ``torch.amp.GradScaler``.

        For the argument, see :meth:`LossScale.load_state_dict`.
        """
        own = ("scale", "growth", "budget")
        entries = check_entries(self, state_dict, (*own, *self._settings()))
        schedule = Schedule(**{k: v for k, v in entries.items() if k not in own})
        scale = check_scale_number(entries["scale"], "scale")
        if not schedule.min_scale <= scale <= schedule.max_scale:
            raise ValueError(
                f"scale must be from min_scale={schedule.min_scale!r} to "
                f"max_scale={schedule.max_scale!r}, got {scale!r}"
            )
        growth = check_count("growth", entries["growth"], least=0)
        if growth >= schedule.first_growth:
            raise ValueError(
                f"growth, the finite steps counted so far, must be less than "
                f"{schedule.first_growth}, the number at which the scale grows, got {growth}"
            )
        # With "per_backoff" the budget is refilled in the step that uses it up, so it is never 0.
        least = 1 if schedule.hysteresis_mode == "per_backoff" else 0
        budget = check_count("budget", entries["budget"], least)
        if budget > schedule.hysteresis:
            raise ValueError(
                "budget, the overflows left before the scale falls, must be at most "
                f"hysteresis={schedule.hysteresis}, got {budget}"
            )

        tensors = self._tensors(scale, growth, budget)
        value, counters = (to_device(t, self._value.device) for t in tensors)
        self._schedule, self._policy, self._collapse = schedule, schedule.policy, Collapse()
        self._set(value, counters, self._placed)

    def _settings(self) -> dict[str, Any]:
        """The arguments of the constructor, without ``device``."""
        return asdict(self._schedule)

    @staticmethod
    def _tensors(value: float, growth: float, budget: float) -> tuple[Tensor, Tensor]:
        """Value (float32, 0-d) and counters (int32, of shape (2,)), on the CPU."""
        # Say device="cpu", because torch.set_default_device must not place the scale.
        return (
            torch.tensor(value, dtype=torch.float32, device="cpu"),
            torch.tensor((growth, budget), dtype=torch.int32, device="cpu"),
        )
