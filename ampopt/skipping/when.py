"""Further causes for which steps are skipped, judged on the device."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ampopt._step.overflow import Check
from ampopt.loss_scale.arguments import check_count
from ampopt.optimizer import Optimizer
from ampopt.skipping.histories import Running, RunningStatistics, WindowStatistics
from ampopt_kernels.ledger import CAUSES
from ampopt_kernels.skip_checks import CheckSettings
from ampopt_kernels.tensors import widest

__all__ = ["skip_when"]

_WINDOWS: dict[str, dict[str, Any]] = {
    # OLMo-core, src/olmo_core/optim/skip_step_optimizer.py. It judges by a quotient, which is NaN,
    # and skips, where all values were the same and the new one is too; here that is no cause.
    "olmo": {
        "length": 128,
        "first": 64,
        "latest": False,
        "correction": 1,
        "both_sides": True,
        "leaves_out": 0,
    },
    # llm.c, llmc/outlier_detector.h. Of two outliers in a row neither is taken in, the third is.
    # It puts an old value back one place too far, which is not done here.
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
    """Skip steps whose gradient norm, or loss, is out of the ordinary, as overflowed ones are.

    On the device, and without waiting: parameters and state stay bitwise as they are, ``found_inf``
    of the step is more than 0, and :class:`ampopt.Watch` says which cause it was. The loss scale
    stays as it is and counts such a step neither for nor against its growth. Example:
        >>> handle = ampopt.skip_when(optimizer, norm_deviations=6.0, warmup=100)
        >>> ...  # train with optimizer.unscale_and_step(grads_scaled_by=scale), or TrainStep
        >>> handle.remove()

    The norm is that of all unscaled gradients before clipping, of all ranks that decide together.
    The loss is that of ``TrainStep``, or ``unscale_and_step(..., loss=loss)``. Where ranks decide
    together it is the mean over those that give one, by the all-reduce that the step makes anyway:
    a loss that is NaN on one rank skips the step on all, and a rank that has none, as a stage of a
    pipeline, leaves ``loss=`` out. Under ``DistributedDataParallel`` the optimizer has to be told
    of the ranks, by ``process_group=`` and ``replicated=True`` in its param groups; without, the
    step is a ``RuntimeError`` that says so. Only what is judged can be skipped
    for a cause: not a plain ``step()``, nor ``grads_scaled_by=None``, a scale with
    ``drop_overflow_update=False``. What ``accumulate`` has added up is judged as one, where it is
    stepped with: the norm is that of the sum, and the loss the one that is given there. A loss that
    is NaN counts as too large, though the gradients be finite.

    Deviations are counted from the running mean of the steps that were taken. It is bitwise the
    same training as without, as long as nothing is skipped.
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
        """Skip from the next step on.

        Args:
            optimizer: whose steps.
            norm: skip a step whose norm is larger.
            norm_deviations: skip one whose norm is more standard deviations above the mean.
            warmup: steps to be taken before deviations are judged.
            loss: skip a step whose loss is larger.
            loss_deviations: as for the norm.

        Raises:
            TypeError: ``optimizer`` is no :class:`ampopt.Optimizer`, or one that evaluates its loss
                itself; a limit is no number.
            ValueError: there is no cause, or a limit is not positive.
        """
        limits = {"norm": norm, "loss": loss}
        deviations = {"norm": norm_deviations, "loss": loss_deviations}
        check_count("warmup", warmup, least=0)
        self._begin(optimizer, limits, deviations, lambda n: Running(n, warmup), warmup)

    @classmethod
    def like(cls, name: str, optimizer: Optimizer, **overrides: float | None) -> "skip_when":
        """Skip as another system does.

        ``"olmo"``: OLMo-core's ``SkipStepOptimizer``: norm or loss 6 deviations away from the mean
        of the last 128 steps, above or below, from the 64th step on. ``"llm.c"``: its outlier
        detector over 64 steps, the new one among them, for ``norm_deviations`` and
        ``loss_deviations`` that are given; its options ``-sg`` and ``-sl`` have no default. In both
        skipped steps are part of the history; here overflowed ones are not, nor is a loss that is
        NaN, for which the step is skipped here, as in OLMo-core; in llm.c it is not.

        Args:
            name: one of these.
            optimizer: whose steps.
            overrides: ``norm_deviations`` and ``loss_deviations``; ``None`` for none.

        Raises:
            TypeError: see the class.
            ValueError: there is no such name, or see the class.
        """
        if name not in _WINDOWS:
            raise ValueError(f"name must be one of {', '.join(map(repr, _WINDOWS))}, got {name!r}")
        unknown = overrides.keys() - {"norm_deviations", "loss_deviations"}
        if unknown:
            raise TypeError(f"overrides are norm_deviations and loss_deviations, got {unknown}")
        usual = _DEVIATIONS[name]
        deviations = {what: overrides.get(f"{what}_deviations", usual) for what in ("norm", "loss")}
        made = cls.__new__(cls)
        limits = {"norm": None, "loss": None}
        made._begin(
            optimizer, limits, deviations, lambda n: WindowStatistics(n, _WINDOWS[name]), name
        )
        return made

    def remove(self) -> None:
        """Skip for these causes no longer."""
        ours = self.optimizer._ampopt
        ours.causes = tuple(cause for cause in ours.causes if cause is not self)
        ours.invalidate_plan()

    def state_dict(self) -> dict[str, list[float]]:
        """What is usual so far, for ``torch.load(weights_only=True)``. Synchronizes."""
        return {what: history.state_dict() for what, history in self._histories.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what was usual.

        Raises:
            TypeError: ``state_dict`` is no dict.
            ValueError: it is of other causes. Nothing has changed then.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"state_dict must be a dict, got {type(state_dict).__name__}")
        if set(state_dict) != set(self._histories):
            raise ValueError(
                f"the state of this skip_when has exactly the entries {sorted(self._histories)}, "
                f"got {sorted(map(str, state_dict))}"
            )
        for what, history in self._histories.items():
            history.check(state_dict[what])
        for what, history in self._histories.items():
            history.load(state_dict[what])

    # --- what the step asks -----------------------------------------------------------------------

    limits: tuple[float | None, float | None, float | None, float | None]
    """Of the norm, its deviations, the loss and its deviations, as they were given."""
    settings: str
    """All that was given, the same on every rank that was given the same."""

    @property
    def needs_norm(self) -> bool:
        """Whether the norm is to be had."""
        return "norm" in self._watched

    @property
    def needs_loss(self) -> bool:
        """Whether the loss is to be had."""
        return "loss" in self._watched

    def checks(
        self, squares: Tensor | None, loss: Tensor | None, device: torch.device
    ) -> list[Check]:
        """The checks of one step.

        Args:
            squares: sums of squares of parts of the gradients, if this needs the norm.
            loss: of the step, ``widest``, 0-d, if this needs it.
            device: where the step is decided on.
        """
        checks = []
        for what in self._watched:
            history, limit = self._histories.get(what), self._limits[what] or -1.0
            cause, of_norm = float(1 + CAUSES.index(what)), float(what == "norm")
            value = None if of_norm else loss
            if isinstance(history, WindowStatistics):  # which torch operations evaluate
                if squares is not None and of_norm:
                    value = squares.sum().sqrt()
                assert value is not None
                outlier = history.evaluate(value)
                settings = CheckSettings(cause, 0.5, 0.0, math.inf, of_norm=0.0)
                then = functools.partial(history.update_from, value, outlier)
                checks.append(Check(settings, outlier.to(widest(device)), then=then))
            elif isinstance(history, Running):
                settings = CheckSettings(cause, limit, history.deviations, history.warmup, of_norm)
                checks.append(Check(settings, value, history.numbers_on(device)))
            else:
                settings = CheckSettings(cause, limit, 0.0, math.inf, of_norm)
                checks.append(Check(settings, value))
        return checks

    def _begin(
        self,
        optimizer: Optimizer,
        limits: Mapping[str, float | None],
        deviations: Mapping[str, float | None],
        history: Any,
        settings: Any,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"optimizer must be an ampopt.Optimizer, got {type(optimizer).__module__}."
                f"{type(optimizer).__name__}: import it from ampopt, or call "
                "ampopt.patch_optimizer(optimizer)"
            )
        if optimizer._ampopt.needs_closure:
            raise TypeError(
                f"{type(optimizer).__name__} evaluates the loss itself, several times a step, and "
                "cannot be told to skip one: use skip_when with another optimizer"
            )
        for what in ("norm", "loss"):
            _check_limit(what, limits[what])
            _check_limit(f"{what}_deviations", deviations[what])
        self._limits = limits
        self.limits = (limits["norm"], deviations["norm"], limits["loss"], deviations["loss"])
        self.settings = repr((self.limits, settings))
        self._histories: dict[str, RunningStatistics] = {
            what: history(n) for what, n in deviations.items() if n is not None
        }
        self._watched = [w for w in ("norm", "loss") if limits[w] or w in self._histories]
        if not self._watched:
            raise ValueError(
                "skip_when needs a cause: give norm, norm_deviations, loss or loss_deviations"
            )
        self.optimizer = optimizer
        ours = optimizer._ampopt
        ours.causes = (*ours.causes, self)
        ours.invalidate_plan()


def _check_limit(name: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number or None, got {type(value).__name__}")
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {value!r}")
