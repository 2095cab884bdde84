"""Averages of a model's parameters, for which skipped steps do not count."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from ampopt._step import dtensor
from ampopt.optimizer import Optimizer
from ampopt_kernels.tensors import arithmetic, real, widest
from ampopt_kernels.transfers import carried

__all__ = ["SkipAwareAverage", "averaged"]


def averaged(
    model: torch.nn.Module,
    optimizer: Optimizer | Iterable[Optimizer],
    decay: float | None = None,
) -> "SkipAwareAverage":
    """Average a model's parameters over the steps that happened.

    The result is a ``torch.optim.swa_utils.AveragedModel``: a copy of the model to evaluate, to
    save, and to give to ``update_bn``. Only that ``update_parameters(model)`` does nothing if the
    last step of the optimizer was skipped, since the parameters are what was counted before::

        average = ampopt.averaged(model, optimizer, decay=0.999)
        for batch in batches:
            optimizer.zero_grad()
            scale_outputs(loss_of(batch), scale).backward()
            _, _, scale = optimizer.unscale_and_step(grads_scaled_by=scale)
            average.update_parameters(model)

    Nothing means nothing, bit for bit: averages, buffers, and ``n_averaged``. Over the steps that
    were taken it is torch's: bitwise with a decay, within rounding without, where torch computes
    otherwise on the CPU than elsewhere. Whoever takes the step, be it a control point,
    ``TrainStep``, a GradScaler or a plain ``step()``, which is never skipped.

    The question is about the last step alone. Two calls after a step that was taken count it twice,
    as torch's do, and two calls after a skipped one do nothing twice. Called every so many steps,
    it does nothing if the last of them was skipped, and counts the model at the next call. Before
    any step it counts. A copy, by ``copy.deepcopy``, follows the same optimizer. State dicts are
    torch's, and load either way.

    Does not synchronize, as long as model and average are on one device; torch's does, twice.

    Args:
        model: to be copied and averaged.
        optimizer: of its parameters; or several, when nothing is done if the last steps of all that
            have stepped were skipped.
        decay: of an exponential moving average, from 0 to 1; ``None`` for the plain mean of the
            parameters after each step, as stochastic weight averaging takes it.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: ``decay`` is out of range, or there is no optimizer.
    """
    return SkipAwareAverage(model, optimizer, decay)


class SkipAwareAverage(AveragedModel):
    """What :func:`averaged` returns.

    Attributes:
        module: the copy of the model that holds the averages.
        n_averaged: how many steps were counted: int64, 0-d, on the device of the parameters.
        decay: as it was given.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer | Iterable[Optimizer],
        decay: float | None = None,
    ) -> None:
        """Copy the model; see :func:`averaged`."""
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        optimizers = _checked_optimizers(optimizer)
        _check_decay(decay)
        super().__init__(model)
        self.decay = decay
        first = next(self.module.parameters(), self.n_averaged)
        self.n_averaged = self.n_averaged.to(first.device)
        self._last_steps = _LastSteps(optimizers)

    @torch.no_grad()
    def update_parameters(self, model: torch.nn.Module) -> None:
        """Count the parameters of ``model``, unless the last step was skipped.

        Does not synchronize, as long as ``model`` and the average are on one device.
        """
        count = self.n_averaged
        taken = ~self._last_steps.were_skipped(count.device)
        is_first = count == 0
        wide = widest(count.device)  # torch rounds this to float32, even for float64 parameters
        weight = 1 / (count + 1).to(wide) if self.decay is None else 1 - self.decay
        pairs = zip(self.module.parameters(), model.parameters(), strict=True)
        for average, value in map(_alike, pairs):
            new = torch.where(_on(average, is_first), value, _lerp(average, value, weight))
            average.copy_(torch.where(_on(average, taken), new, average))
        pairs = zip(self.module.buffers(), model.buffers(), strict=True)
        for copy, value in map(_alike, pairs):
            copy.copy_(torch.where(_on(copy, taken), value, copy))
        count += taken


class _LastSteps:
    """The flags of the last steps of some optimizers, as step hooks see them."""

    def __init__(self, optimizers: list[Optimizer]) -> None:
        self._flags: dict[int, Tensor | None] = {}
        for optimizer in optimizers:
            optimizer.register_step_post_hook(self._note)

    def _note(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._flags[id(optimizer)] = optimizer.found_inf

    def were_skipped(self, device: torch.device) -> Tensor:
        """Whether all of them were: bool, 0-d, on ``device``."""
        flags = [flag for flag in self._flags.values() if flag is not None]
        if not flags or len(flags) < len(self._flags):  # one was certainly not
            return torch.zeros((), dtype=torch.bool, device=device)
        return torch.stack([carried(f.reshape(()), device) > 0 for f in flags]).all()

    def __deepcopy__(self, memo: Any) -> "_LastSteps":
        """A copy of the average follows the same optimizers."""
        return self

    def __reduce__(self) -> Any:
        """An optimizer that is pickled has no hooks any more."""
        raise TypeError(
            "an average that follows an optimizer cannot be pickled: save average.state_dict(), "
            "make the average anew with ampopt.averaged(model, optimizer, decay), and load that"
        )


def _checked_optimizers(given: Any) -> list[Optimizer]:
    given = [given] if isinstance(given, torch.optim.Optimizer) else given
    optimizers = list(given) if isinstance(given, Iterable) else [given]
    if not optimizers:
        raise ValueError("optimizer must be an optimizer or several, got none")
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"optimizer must be an ampopt.Optimizer, got {type(optimizer).__module__}."
                f"{type(optimizer).__name__}, which does not tell of steps that a scaler skips: "
                "import it from ampopt, or call ampopt.patch_optimizer(optimizer)"
            )
    return optimizers


def _check_decay(decay: Any) -> None:
    if decay is None:
        return
    if isinstance(decay, bool) or not isinstance(decay, (int, float)):
        raise TypeError(f"decay must be a number or None, got {type(decay).__name__}")
    if not 0 <= decay <= 1:
        raise ValueError(
            f"decay must be from 0 to 1, or None for the plain mean, got {decay!r}; 0.999 is usual"
        )


def _alike(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """What memory holds here of an average and of what it is of, real and on one device."""
    average, value = (real(dtensor.local(t.detach())) for t in pair)
    return average, carried(value, average.device, average.dtype)


def _on(tensor: Tensor, flag: Tensor) -> Tensor:
    return carried(flag, tensor.device)


def _lerp(average: Tensor, value: Tensor, weight: Any) -> Tensor:
    """As torch's, which interpolates numbers of half precision in float32."""
    dtype = arithmetic(average.dtype)
    if isinstance(weight, Tensor):
        weight = carried(weight, average.device, dtype)
    return torch.lerp(average.to(dtype), value.to(dtype), weight).to(average.dtype)
