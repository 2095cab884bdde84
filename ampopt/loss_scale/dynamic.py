"""The loss scale that is lowered after overflows, and raised after a run of finite steps."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ampopt.loss_scale.arguments import check_count, check_flag, check_scale_number
from ampopt.loss_scale.base import Device, LossScale, host_may_read
from ampopt.loss_scale.presets import PRESETS
from ampopt.loss_scale.schedule import Schedule, check_entries
from ampopt_kernels import torch_language
from ampopt_kernels.policy import next_scale as _policy_next_scale
from ampopt_kernels.tensors import widest
from ampopt_kernels.transfers import carried

__all__ = ["DynamicLossScale"]


_advance = torch_language.bind(_policy_next_scale)


_SMALLEST = 2.0**-24
"""float16's smallest number: what is 1 before it is scaled by less ends as 0 there."""


class Collapse:
    """What a scale and all its successors know of its end: whether it was said."""

    def __init__(self) -> None:
        """Begin unsaid."""
        self._said = False

    def say_once(self, value: float, start: float, floor: float) -> None:
        """Warn if ``value`` is at the floor, or of no use to float16, and was once above."""
        at_floor = value <= floor
        if self._said or value >= start or not (at_floor or value < _SMALLEST):
            return
        self._said = True
        where = f", its floor (min_scale={floor:g})" if at_floor else ""
        warnings.warn(
            f"the loss scale has fallen from {start:g} to {value:g}{where}: steps overflow again "
            "and again, as a rule from NaN in the data or the parameters, which no scale mends. "
            "float16 gradients may all be 0 under such a scale, and a step that is taken with them "
            "only decays the weights. Run a batch under ampopt.first_nonfinite(model) to see where "
            "it begins; mend that, and go on from a checkpoint, scale included",
            stacklevel=4,
        )


class DynamicLossScale(LossScale):
    """A scale that is lowered after overflows and raised after a run of finite steps.

    With the defaults it is the schedule of ``torch.amp.GradScaler``. Counting in float64 and
    storing float32, one step does this::

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

    Differs from torch: the scale has a floor, by default ``2**-126``, below which its reciprocal
    would overflow float32. GradScaler goes on to 0, and stays there.

    A floor does not make such a scale useful: a run that overflows again and again trains nothing,
    and once the overflows end, float16 gradients are 0 for a long time, for a scale that was halved
    45 times takes 45 times ``growth_interval`` steps to come back. So a scale that has fallen to
    its floor, or below ``2**-24``, warns, once with all its successors, when the host has the
    number anyway: on the CPU at the step, elsewhere at :meth:`item`, :meth:`state_dict`, or
    :attr:`ampopt.StepResult.skipped`. Nothing waits to find out.

    Who leaves ``torch.amp.GradScaler`` in the middle of a run goes on where it stopped with
    ``scale.load_state_dict(scaler.state_dict())``.

    Example:
        >>> scale = DynamicLossScale(init_scale=8.0, growth_interval=2)
        >>> scale.next(found_inf=1.0).item()
        4.0
        >>> scale.next(0.0).next(0.0).item()
        16.0
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
        """Make a scale. Scales and bounds are rounded to float32.

        Args:
            init_scale: what it starts from; in float32's normal range.
            growth_factor: what it is multiplied by on growth; more than 1.
            backoff_factor: what it is multiplied by after overflows; between 0 and 1.
            growth_interval: finite steps without an overflow among them before it grows.
            hysteresis: overflows it takes to lower the scale.
            hysteresis_mode: when the count of overflows starts again. ``"consecutive"``: at any
                finite step; once used up, each further overflow in a row lowers the scale.
                ``"cumulative"``: only when the scale grows. ``"per_backoff"``: at any finite step
                and after each decrease, so that every decrease takes ``hysteresis`` overflows.
            min_scale: the floor, at least ``2**-126``.
            max_scale: the ceiling; infinite for none but float32's own.
            growth_offsets: ``(first, period)``, for systems that count otherwise: the first growth
                is at finite step ``growth_interval + first`` counted from the start or the last
                overflow, later ones every ``growth_interval + period`` steps. ``first >= period``.
            device: where it lives; ``None`` for where it is first used.

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
        """A scale with the constants and the counting of another system.

        First growth and period are those of the system, at its defaults and with overrides::

            name          init   N     first, period  hysteresis        floor   ceiling
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

        All double and halve, but paddle-fleet backs off by 0.8. Where there is no floor, ours is
        ``2**-126``. What a system does besides on the host, such as raising at its floor, is left
        out: ``ampopt.loss_scale.presets`` says so for each, and which file it was read from.

        Args:
            name: one of the names above; "paddle" is its eager ``GradScaler``.
            overrides: arguments of :class:`DynamicLossScale`; ``growth_interval`` is N.

        Raises:
            ValueError: there is no such name.
        """
        preset = PRESETS.get(name) if isinstance(name, str) else None
        if preset is None:
            raise ValueError(f"name must be one of {', '.join(map(repr, PRESETS))}, got {name!r}")
        return cls(**{**preset.settings, **overrides})

    def next(self, found_inf: Any) -> "DynamicLossScale":
        """The scale that follows this one; see :meth:`LossScale.next`."""
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
            # Nothing waits for a CPU tensor, and the same body on numbers takes an eighth of the
            # time (18 against 137 microseconds).
            found = flag.item() if isinstance(flag, Tensor) else flag
            new = _advance(
                self._value.item(), *self._counters.tolist(), found, self._schedule.policy
            )
            return self._successor(*self._tensors(*new))
        device, dtype = self._value.device, widest(self._value.device)
        if isinstance(flag, Tensor):
            flag = carried(flag.reshape(()), device, dtype)
        else:
            flag = torch.full((), flag, dtype=dtype, device=device)
        value, *counters = _advance(
            self._value.to(dtype),
            *self._counters.to(dtype).unbind(),
            flag,
            self._schedule.policy,
        )
        return self._successor(value.to(torch.float32), torch.stack(counters).to(torch.int32))

    def item(self) -> float:
        """The scale as a Python number; see :meth:`LossScale.item`. Synchronizes."""
        value = super().item()
        self._collapse.say_once(value, self._schedule.init_scale, self._schedule.min_scale)
        return value

    def _warn_if_collapsed(self) -> None:
        """Warn, once, of a scale that has fallen to its floor or below ``2**-24``. Synchronizes."""
        self.item()

    def state_dict(self) -> dict[str, Any]:
        """All there is to save, as plain Python objects. Synchronizes."""
        assert self._counters is not None
        growth, budget = self._counters.tolist()
        return {
            "type": type(self).__name__,
            "scale": self.item(),
            "growth": growth,
            "budget": budget,
            **self._settings(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Become the scale that was saved; see :meth:`LossScale.load_state_dict`."""
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
                f"growth must be less than {schedule.first_growth}, the finite step at which the "
                f"scale grows, got {growth}"
            )
        # "per_backoff" never leaves the budget empty.
        least = 1 if schedule.hysteresis_mode == "per_backoff" else 0
        budget = check_count("budget", entries["budget"], least)
        if budget > schedule.hysteresis:
            raise ValueError(
                f"budget must be at most hysteresis={schedule.hysteresis}, got {budget}"
            )

        tensors = self._tensors(scale, growth, budget)
        value, counters = (carried(t, self._value.device) for t in tensors)
        self._schedule, self._policy = schedule, schedule.policy
        self._set(value, counters, self._placed)

    def _successor(self, value: Tensor, counters: Tensor) -> "DynamicLossScale":
        new = type(self).__new__(type(self))
        new._schedule, new._collapse = self._schedule, self._collapse
        new._policy = self._policy
        new._set(value, counters, self._placed)
        return new

    def _settings(self) -> dict[str, Any]:
        return self._schedule.settings()

    @staticmethod
    def _tensors(value: float, growth: float, budget: float) -> tuple[Tensor, Tensor]:
        # A default device set by the caller is not the scale's.
        return (
            torch.tensor(value, dtype=torch.float32, device="cpu"),
            torch.tensor((growth, budget), dtype=torch.int32, device="cpu"),
        )
