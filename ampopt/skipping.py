"""``skip_when``: skip steps with an unusual gradient norm or loss, decided on the device."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ampopt._step.overflow import Check
from ampopt.loss_scale.arguments import check_count
from ampopt.optimizer import Optimizer
from ampopt_kernels.devices import to_device
from ampopt_kernels.skip_checks import CheckSettings
from ampopt_kernels.tensors import widest
from ampopt_kernels.watch_statistics import CAUSES

__all__ = ["skip_when"]

_WINDOWS: dict[str, dict[str, Any]] = {
    # OLMo-core, src/olmo_core/optim/skip_step_optimizer.py. If all values, the new one too, are
    # equal, it compares 0/0 with the limit, and skips; here such a step is not skipped.
    "olmo": {
        "length": 128,
        "first": 64,
        "latest": False,
        "correction": 1,
        "both_sides": True,
        "leaves_out": 0,
    },
    # llm.c, llmc/outlier_detector.h. The first two outliers in a row are not added to the window,
    # the third is. When llm.c removes an outlier from its window, it restores the old value one
    # place too far; that error is not repeated here.
    "llm.c": {
        "length": 64,
        "first": 65,
        "latest": True,
        "correction": 0,
        "both_sides": False,
        "leaves_out": 2,
    },
}
_DEVIATIONS = {"olmo": 6.0, "llm.c": None}


class skip_when:
    """Skip steps whose gradient norm, or loss, is an outlier, as steps that overflow are skipped.

    Without synchronizing: parameters and state stay bitwise the same, ``found_inf`` of the step is
    more than 0, and :class:`ampopt.Watch` records the cause. The loss scale stays the same, and
    the step is not counted towards its growth.

    Example:
        >>> handle = ampopt.skip_when(optimizer, norm_deviations=6.0, warmup=100)
        >>> ...  # train with optimizer.unscale_and_step(grads_scaled_by=scale), or TrainStep
        >>> handle.remove()

    The norm is that of all unscaled gradients before clipping. The loss is that of ``TrainStep``,
    or ``unscale_and_step(..., loss=loss)``; a loss of NaN is too large. After ``accumulate``, the
    norm is that of the sum, and the loss the one that is passed to the step.

    Never skipped: a plain ``step()`` without an ``unscale`` before it, a step with
    ``grads_scaled_by=None``, and a step under a scale with ``drop_overflow_update=False``.

    **Many ranks.** The norm is over all ranks of the process group. The loss is the mean over the
    ranks that pass one, by the all-reduce that the step makes anyway: NaN on one rank skips the
    step on all, and a rank without a loss, such as a pipeline stage, omits ``loss=``. Under
    ``DistributedDataParallel``, ``loss=`` and ``loss_deviations=`` need ``process_group=`` and
    ``replicated=True`` in the param groups; otherwise the step raises a ``RuntimeError``.

    As long as nothing is skipped, training is bitwise the same as without ``skip_when``.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        norm: float | None = None,
        norm_deviations: float | None = None,
        warmup: int = 100,
        loss: float | None = None,
        loss_deviations: float | None = None,
    ) -> None:
        """Skip steps from the next one on.

        Args:
            optimizer: the optimizer to skip steps of.
            norm: skip a step whose norm is larger than this.
            norm_deviations: skip a step whose norm is larger than mean + ``norm_deviations`` x
                standard deviation of the norms of earlier steps that were not skipped.
            warmup: the number of steps, at least 2, before anything is skipped by deviations.
            loss: skip a step whose loss is larger than this.
            loss_deviations: as ``norm_deviations``, for the loss.

        Raises:
            TypeError: ``optimizer`` is not an :class:`ampopt.Optimizer`, or its ``step`` requires a
                closure; a limit is not a number.
            ValueError: no limit was passed, or a limit is not positive.
        """
        limits = {"norm": norm, "loss": loss}
        deviations = {"norm": norm_deviations, "loss": loss_deviations}
        check_count("warmup", warmup, least=2)
        self._begin(optimizer, limits, deviations, lambda n: RunningStatistics(n, warmup), warmup)

    @classmethod
    def like(cls, name: str, optimizer: Optimizer, **overrides: float | None) -> "skip_when":
        """Skip as another system does.

        ``"olmo"``: OLMo-core's ``SkipStepOptimizer``. Skips if norm or loss is more than 6 standard
        deviations above or below the mean of the last 128 steps, from the 64th step on.

        ``"llm.c"``: its outlier detector. Skips if norm or loss is too far above the mean of the
        last 64 steps, including the new one. Pass ``norm_deviations`` or ``loss_deviations``: its
        options ``-sg`` and ``-sl`` have no default.

        As in both systems, the means include skipped steps. Unlike in both, they do not include
        steps that overflowed, nor a loss of NaN. A loss of NaN skips the step, as in OLMo-core, and
        unlike in llm.c.

        Args:
            name: ``"olmo"`` or ``"llm.c"``.
            optimizer: the optimizer to skip steps of.
            overrides: ``norm_deviations`` and ``loss_deviations``; ``None`` for no such limit.

        Raises:
            TypeError: see the class; or an override has another name.
            ValueError: ``name`` is unknown; or see the class.
        """
        if name not in _WINDOWS:
            raise ValueError(f"name must be one of {', '.join(map(repr, _WINDOWS))}, got {name!r}")
        other_names = overrides.keys() - {"norm_deviations", "loss_deviations"}
        if other_names:
            raise TypeError(f"overrides are norm_deviations and loss_deviations, got {other_names}")
        usual = _DEVIATIONS[name]
        deviations = {what: overrides.get(f"{what}_deviations", usual) for what in ("norm", "loss")}
        condition = cls.__new__(cls)
        limits = {"norm": None, "loss": None}
        condition._begin(
            optimizer, limits, deviations, lambda n: WindowStatistics(n, _WINDOWS[name]), name
        )
        return condition

    def remove(self) -> None:
        """Stop skipping steps for these causes."""
        ours = self.optimizer._ampopt
        ours.causes = tuple(cause for cause in ours.causes if cause is not self)

    def state_dict(self) -> dict[str, list[float]]:
        """The running statistics, for ``torch.load(weights_only=True)``. Synchronizes."""
        return {what: statistics.state_dict() for what, statistics in self._statistics.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load saved running statistics.

        Raises:
            TypeError: ``state_dict`` is not a dict.
            ValueError: ``state_dict`` is of other limits. Nothing has changed then.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"state_dict must be a dict, got {type(state_dict).__name__}")
        if set(state_dict) != set(self._statistics):
            raise ValueError(
                f"the state of this skip_when has exactly the entries {sorted(self._statistics)}, "
                f"got {sorted(map(str, state_dict))}"
            )
        for what, statistics in self._statistics.items():
            statistics.check(state_dict[what])
        for what, statistics in self._statistics.items():
            statistics.load(state_dict[what])

    # --- what a step reads ------------------------------------------------------------------------

    limits: tuple[float | None, float | None, float | None, float | None]
    """The arguments ``norm``, ``norm_deviations``, ``loss`` and ``loss_deviations``."""
    settings: str
    """All arguments as text. Ranks compare it, to detect that they were passed different ones."""

    @property
    def needs_norm(self) -> bool:
        """Whether a check needs the gradient norm."""
        return "norm" in self._quantities

    @property
    def needs_loss(self) -> bool:
        """Whether a check needs the loss."""
        return "loss" in self._quantities

    @property
    def needs_values(self) -> bool:
        """Whether a check tests a number other than the norm, which ``checks`` has to pass on."""
        windows = [isinstance(h, WindowStatistics) for h in self._statistics.values()]
        return self.needs_loss or any(windows)

    @property
    def needs_statistics(self) -> bool:
        """Whether a check reads running statistics."""
        return any(
            isinstance(statistics, RunningStatistics) for statistics in self._statistics.values()
        )

    def checks(
        self, squares: Tensor | None, loss: Tensor | None, device: torch.device
    ) -> list[Check]:
        """The checks of one step.

        Args:
            squares: sums of squares of parts of the gradients; ``None`` if no check needs the norm.
            loss: the loss of the step, 0-d, in the widest dtype of ``device``; ``None`` if no check
                needs it.
            device: the device on which the step is decided.
        """
        checks = []
        for what in self._quantities:
            statistics, limit = self._statistics.get(what), self._limits[what] or -1.0
            cause, of_norm = float(1 + CAUSES.index(what)), float(what == "norm")
            value = None if of_norm else loss
            if isinstance(statistics, WindowStatistics):  # evaluated by torch operations
                if squares is not None and of_norm:
                    value = squares.sum().sqrt()
                assert value is not None
                outlier = statistics.evaluate(value)
                settings = CheckSettings(cause, 0.5, 0.0, math.inf, of_norm=0.0)
                then = functools.partial(statistics.update_from, value, outlier)
                checks.append(Check(settings, outlier.to(widest(device)), then=then))
            elif isinstance(statistics, RunningStatistics):
                settings = CheckSettings(
                    cause, limit, statistics.deviations, statistics.warmup, of_norm
                )
                checks.append(Check(settings, value, statistics.numbers_on(device)))
            else:
                settings = CheckSettings(cause, limit, 0.0, math.inf, of_norm)
                checks.append(Check(settings, value))
        return checks

    def _begin(
        self,
        optimizer: Optimizer,
        limits: Mapping[str, float | None],
        deviations: Mapping[str, float | None],
        make_statistics: Any,
        settings: Any,
    ) -> None:
        """Check the arguments, and make this the check of ``optimizer``.

        Args:
            optimizer: the optimizer to skip steps of.
            limits: by ``"norm"`` and ``"loss"``, the largest value; ``None`` for no limit.
            deviations: by the same names, the largest deviation; ``None`` for no limit.
            make_statistics: makes the statistics of one value from its number of deviations.
            settings: the other arguments, for comparison between ranks.
        """
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"optimizer must be an ampopt.Optimizer, got {type(optimizer).__module__}."
                f"{type(optimizer).__name__}: import it from ampopt, or call "
                "ampopt.patch_optimizer(optimizer)"
            )
        if optimizer._ampopt.needs_closure:
            raise TypeError(
                f"{type(optimizer).__name__} evaluates the loss itself, several times a step, and "
                "cannot skip one of them: use skip_when with another optimizer"
            )
        for what in ("norm", "loss"):
            _check_limit(what, limits[what])
            _check_limit(f"{what}_deviations", deviations[what])
        self._limits = limits
        self.limits = (limits["norm"], deviations["norm"], limits["loss"], deviations["loss"])
        self.settings = repr((self.limits, settings))
        self._statistics: dict[str, Statistics] = {
            what: make_statistics(n) for what, n in deviations.items() if n is not None
        }
        self._quantities = [w for w in ("norm", "loss") if limits[w] or w in self._statistics]
        if not self._quantities:
            raise ValueError(
                "skip_when needs a cause: give norm, norm_deviations, loss or loss_deviations"
            )
        self.optimizer = optimizer
        ours = optimizer._ampopt
        ours.causes = (*ours.causes, self)


def _check_limit(name: str, value: Any) -> None:
    """Raise unless ``value`` is ``None``, or a positive and finite number."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number or None, got {type(value).__name__}")
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {value!r}")


# --- statistics of the norms or losses of earlier steps -------------------------------------------


class Statistics:
    """Statistics of earlier steps: one vector on the device, which is written in place."""

    def __init__(self, size: int) -> None:
        """Start with ``size`` zeros, on the CPU until the first value is checked."""
        self._numbers = torch.zeros(size, dtype=torch.float64, device="cpu")

    def numbers_on(self, device: torch.device) -> Tensor:
        """The vector, moved to ``device`` if it is elsewhere, in the widest dtype of ``device``."""
        if self._numbers.device != device:
            self._numbers = to_device(self._numbers, device, widest(device))
        return self._numbers

    def state_dict(self) -> list[float]:
        """The numbers of the vector. Synchronizes."""
        return self._numbers.tolist()

    def check(self, state: Sequence[float]) -> None:
        """Raise if :meth:`load` cannot load ``state``.

        Raises:
            ValueError: ``state`` is not a sequence of as many numbers as the vector has.
        """
        if not isinstance(state, Sequence) or len(state) != len(self._numbers):
            raise ValueError(
                f"statistics of earlier steps must have {len(self._numbers)} numbers, got {state!r}"
            )

    def load(self, state: Sequence[float]) -> None:
        """Replace the numbers by ``state``, which :meth:`state_dict` returned."""
        self._numbers.copy_(torch.tensor(state, dtype=torch.float64))


class RunningStatistics(Statistics):
    """Count, mean and sum of squared deviations over all steps that were applied.

    :mod:`ampopt_kernels.skip_checks` reads and updates the three numbers.
    """

    def __init__(self, deviations: float, warmup: int) -> None:
        """Start without any value.

        Args:
            deviations: a value is an outlier if it is more than this number of standard deviations
                above the mean.
            warmup: the number of applied steps before which no value is an outlier; at least 2.
        """
        super().__init__(3)
        self.deviations, self.warmup = deviations, warmup


class WindowStatistics(Statistics):
    """Mean and standard deviation over a window of the last steps, also skipped ones.

    Other systems compute them so. The vector has the number of values so far, the number of
    consecutive outliers, and a ring buffer of the last values.
    """

    def __init__(self, deviations: float, settings: Mapping[str, Any]) -> None:
        """Start with an empty window.

        Args:
            deviations: a value is an outlier if it is more than this number of standard deviations
                from the mean.
            settings: the rules of the other system: ``length``, the number of values in the window;
                ``first``, the number of the first value that is tested, counted from 1; ``latest``,
                whether the window includes the tested value; ``correction``, what is subtracted
                from the number of values in the variance; ``both_sides``, whether values below the
                mean may be outliers too; ``leaves_out``, how many consecutive outliers are not
                added to the window.
        """
        super().__init__(2 + settings["length"])
        self._deviations, self._settings = deviations, settings

    def _with(self, value: Tensor) -> Tensor:
        """The ring buffer, in which ``value`` replaces the oldest value."""
        ring = self._numbers[2:]
        at = torch.arange(len(ring), device=ring.device) == self._numbers[0] % len(ring)
        return torch.where(at, value, ring)

    def evaluate(self, value: Tensor) -> Tensor:
        """Whether ``value``, a 0-d tensor, is an outlier: bool, 0-d. Changes nothing."""
        settings, count = self._settings, self.numbers_on(value.device)[0]
        ring = self._with(value) if settings["latest"] else self._numbers[2:]
        n_values = (count + settings["latest"]).clamp(max=len(ring))
        is_used = torch.arange(len(ring), device=ring.device) < n_values
        mean = torch.where(is_used, ring, 0.0).sum() / n_values
        squares = torch.where(is_used, (ring - mean).square(), 0.0).sum()
        deviation = (squares / (n_values - settings["correction"])).sqrt()
        away = (value - mean).abs() if settings["both_sides"] else value - mean
        usual = away <= self._deviations * deviation  # NaN is an outlier
        return (count + 1 >= settings["first"]) & ~usual

    def update_from(self, value: Tensor, is_outlier: Tensor, finite: Tensor) -> None:
        """Add ``value`` to the window, unless it is one of the outliers that are not added.

        Changes nothing if ``value`` is not finite.

        Args:
            value: the value, 0-d.
            is_outlier: the result of :meth:`evaluate` for ``value``.
            finite: whether no gradient overflowed, bool, 0-d; if one did, nothing changes.
        """
        in_a_row = (self._numbers[1] + 1) * is_outlier
        is_added = ~is_outlier | (in_a_row > self._settings["leaves_out"])
        numbers = torch.stack([self._numbers[0] + is_added, in_a_row])
        new = torch.cat([numbers, torch.where(is_added, self._with(value), self._numbers[2:])])
        self._numbers.copy_(torch.where(finite & value.isfinite(), new, self._numbers))
