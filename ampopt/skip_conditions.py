"""``skip_when``: skip steps with an unusual gradient norm or loss, decided on the device."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampopt._argument_checks import check_count, check_number
from ampopt.optimizer import Optimizer, check_optimizer
from ampopt_kernels.devices import to_device
from ampopt_kernels.step_decision import RUNNING, Check, Window
from ampopt_kernels.tensors import widest
from ampopt_kernels.watch_statistics import number_of_cause

__all__ = ["skip_when"]


class _System(NamedTuple):
    """How another system finds outliers.

    Attributes:
        deviations: its default; ``None`` if it has none.
        first: the number of the first value that is tested, counted from 1.
        both_sides: whether values below the mean may be outliers too.
        window: the last values, of which mean and deviation are computed; also of skipped steps.
    """

    deviations: float | None
    first: int
    both_sides: bool
    window: Window


_SYSTEMS = {
    # OLMo-core, src/olmo_core/optim/skip_step_optimizer.py. If all values, the new one too, are
    # equal, it compares 0/0 with the limit, and skips; here such a step is not skipped.
    "olmo": _System(6.0, 64, True, Window(128, latest=0, correction=1, leaves_out=0)),
    # llm.c, llmc/outlier_detector.h. The first two outliers in a row are not added to the window,
    # the third is. When llm.c removes an outlier from its window, it restores the old value one
    # place too far; that error is not repeated here.
    "llm.c": _System(None, 65, False, Window(64, latest=1, correction=0, leaves_out=2)),
}


class skip_when:
    """Skip steps whose gradient norm or loss is an outlier, in the way that overflows are skipped.

    In a skipped step, parameters and state stay bitwise the same, ``found_inf`` is more than 0, and
    :class:`ampopt.Watch` records the cause. The loss scale stays the same, and does not count the
    step towards its growth. Does not synchronize.

    Example:
        >>> handle = ampopt.skip_when(optimizer, norm_deviations=6.0, warmup=100)
        >>> ...  # train with optimizer.unscale_and_step(grads_scaled_by=scale), or TrainStep
        >>> handle.remove()

    The norm is that of all unscaled gradients before clipping. The loss is that of ``TrainStep``,
    or of ``unscale_and_step(..., loss=loss)``; a loss of NaN counts as too large. After
    ``accumulate``, the norm is that of the sum, and the loss is the one that the step gets.

    Never skipped: a plain ``step()`` without an ``unscale`` before it, a step with
    ``grads_scaled_by=None``, and a step under a scale with ``drop_overflow_update=False``. After
    ``unscale_`` of ``torch.amp.GradScaler``, the step raises an error: use
    :class:`ampopt.GradScaler`.

    **Many ranks.** The norm is over all ranks of the process group. The loss is the mean over the
    ranks that pass one, computed in the all-reduce that the step makes anyway: NaN on one rank
    skips the step on all, and a rank without a loss, such as a pipeline stage, omits ``loss=``.
    Under ``DistributedDataParallel``, ``loss=`` and ``loss_deviations=`` need ``process_group=``
    and ``replicated=True`` in the param groups; otherwise the step raises a ``RuntimeError``.

    Until the first skip, training gives the same bits as without it. A copy of the optimizer skips
    only overflows.
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
        limits = {
            "norm": norm,
            "norm_deviations": norm_deviations,
            "loss": loss,
            "loss_deviations": loss_deviations,
        }
        warmup = check_count("warmup", warmup, least=2)
        self._begin(optimizer, limits, f"warmup={warmup}", warmup=float(warmup))

    @classmethod
    def like(cls, name: str, optimizer: Optimizer, **overrides: float | None) -> "skip_when":
        """Skip as another system does.

        ``"olmo"``: OLMo-core's ``SkipStepOptimizer``. Skips if norm or loss is more than 6 standard
        deviations above or below the mean of the last 128 steps, from the 64th step on.

        ``"llm.c"``: its outlier detector. Skips if norm or loss is too far above the mean of the
        last 64 steps, including the new one. Pass ``norm_deviations`` or ``loss_deviations``: its
        options ``-sg`` and ``-sl`` have no default.

        As in both systems, the means include skipped steps. In contrast to both, the means leave
        out steps that overflowed, and a loss of NaN. A loss of NaN skips the step, as in OLMo-core;
        in llm.c it does not.

        Args:
            name: ``"olmo"`` or ``"llm.c"``.
            optimizer: the optimizer to skip steps of.
            overrides: ``norm_deviations`` and ``loss_deviations``; ``None`` for no such limit.

        Raises:
            TypeError: see the class; or an override has another name.
            ValueError: ``name`` is unknown; or see the class.
        """
        if name not in _SYSTEMS:
            raise ValueError(f"name must be one of {', '.join(map(repr, _SYSTEMS))}, got {name!r}")
        names = ("norm_deviations", "loss_deviations")
        other_names = overrides.keys() - set(names)
        if other_names:
            raise TypeError(f"overrides are norm_deviations and loss_deviations, got {other_names}")
        system = _SYSTEMS[name]
        condition = cls.__new__(cls)
        condition._begin(
            optimizer,
            {each: overrides.get(each, system.deviations) for each in names},
            f"like {name!r}",
            warmup=system.first - 1.0,
            both_sides=float(system.both_sides),
            window=system.window,
        )
        return condition

    def remove(self) -> None:
        """Stop skipping steps for these causes."""
        observers = self.optimizer._ampopt.observers
        observers.causes = tuple(cause for cause in observers.causes if cause is not self)

    def state_dict(self) -> dict[str, list[float]]:
        """The running statistics, for ``torch.load(weights_only=True)``. Synchronizes."""
        return {what: numbers.tolist() for what, numbers in self._statistics.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load saved running statistics.

        Raises:
            TypeError: ``state_dict`` is not a dict.
            ValueError: ``state_dict`` is of other limits, or has something other than numbers.
                Nothing has changed then.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"state_dict must be a dict, got {type(state_dict).__name__}")
        own = self._statistics
        if set(state_dict) != set(own):
            raise ValueError(
                f"the state of this skip_when has exactly the entries {sorted(own)}, "
                f"got {sorted(map(str, state_dict))}"
            )
        loaded = {what: _numbers(state_dict[what], len(own[what])) for what in own}
        for what, numbers in own.items():
            numbers.copy_(loaded[what])

    # --- what a step reads ------------------------------------------------------------------------

    settings: str
    """All arguments as text. Ranks compare it, to detect that they were passed different ones."""

    @property
    def needs_norm(self) -> bool:
        """Whether a check needs the gradient norm."""
        return "norm" in self._checks

    @property
    def needs_loss(self) -> bool:
        """Whether a check needs the loss."""
        return "loss" in self._checks

    def checks(self, device: torch.device) -> list[Check]:
        """The checks of a step that is decided on ``device``, to which their statistics move."""
        for what, numbers in self._statistics.items():
            if numbers.device != device:
                moved = to_device(numbers, device, widest(device))
                self._checks[what] = self._checks[what]._replace(statistics=moved)
        return list(self._checks.values())

    @property
    def _statistics(self) -> dict[str, Tensor]:
        """The statistics of earlier steps that each check of deviations has."""
        known = ((what, check.statistics) for what, check in self._checks.items())
        return {what: numbers for what, numbers in known if numbers is not None}

    def _begin(
        self,
        optimizer: Optimizer,
        limits: Mapping[str, float | None],
        arguments: str,
        **of_deviations: Any,
    ) -> None:
        """Check the arguments, and make this the check of ``optimizer``.

        Args:
            optimizer: the optimizer to skip steps of.
            limits: the limits by the names of the arguments; ``None`` for no limit.
            arguments: the other arguments as text, for comparison between ranks.
            of_deviations: attributes of each :class:`Check` that tests deviations.
        """
        check_optimizer(optimizer)
        if optimizer._ampopt.needs_closure:
            raise TypeError(
                f"{type(optimizer).__name__} evaluates the loss itself, several times a step, and "
                "cannot skip one of them: use skip_when with another optimizer"
            )
        given = {name: _limit(name, n) for name, n in limits.items() if n is not None}
        if not given:
            raise ValueError(
                "skip_when needs a cause: give norm, norm_deviations, loss or loss_deviations"
            )
        shown = (f"{name}={n!r}" for name, n in given.items())
        self.settings = f"skip_when({', '.join((*shown, arguments))})"
        self._checks: dict[str, Check] = {}
        for what in ("norm", "loss"):
            deviations = given.get(f"{what}_deviations")
            if what not in given and deviations is None:
                continue
            check = Check(number_of_cause(what), float(what == "norm"), given.get(what, -1.0))
            if deviations is not None:
                check = check._replace(deviations=deviations, **of_deviations)
                size = RUNNING if check.window is None else 2 + int(check.window.length)
                # On the CPU until the first step.
                zeros = torch.zeros(size, dtype=torch.float64, device="cpu")
                check = check._replace(statistics=zeros)
            self._checks[what] = check
        self.optimizer = optimizer
        observers = optimizer._ampopt.observers
        observers.causes = (*observers.causes, self)


def _numbers(saved: Any, n: int) -> Tensor:
    """The saved statistics as ``n`` float64 numbers, else a ``ValueError``."""
    try:
        return torch.as_tensor(saved, dtype=torch.float64, device="cpu").view(n)
    except (RuntimeError, TypeError, ValueError):
        raise ValueError(
            f"statistics of earlier steps must have {n} numbers, got {saved!r}"
        ) from None


def _limit(name: str, value: Any) -> float:
    """The limit ``value`` as a float; raises unless it is a positive and finite number."""
    limit = check_number(name, value)
    if not 0 < limit < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {value!r}")
    return limit
