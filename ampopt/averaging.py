"""Averages of a model's parameters over the steps that were not skipped."""

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from ampopt._argument_checks import check_bool, check_number
from ampopt._step.sharding import dtensor
from ampopt.backend import backend_for
from ampopt.optimizer import Optimizer, check_optimizer
from ampopt_kernels.devices import to_device
from ampopt_kernels.tensors import arithmetic, dense_like, flat, is_dense, real, widest

__all__ = ["SkipAwareAverage", "averaged"]


def averaged(
    model: torch.nn.Module,
    optimizer: Optimizer | Iterable[Optimizer],
    decay: float | None = None,
    *,
    device: int | str | torch.device | None = None,
    avg_fn: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
    multi_avg_fn: Callable[[list[Tensor], list[Tensor], Tensor], None] | None = None,
    use_buffers: bool = False,
) -> "SkipAwareAverage":
    """Average a model's parameters over the steps that were not skipped.

    Returns a ``torch.optim.swa_utils.AveragedModel``, with torch's results and state dicts, except
    that ``update_parameters(model)`` does nothing if the last step was skipped::

        average = ampopt.averaged(model, optimizer, decay=0.999)
        ...  # in each step, after the optimizer's:
        average.update_parameters(model)

    Does not synchronize if model and average are on one device. A copy of the average follows the
    same optimizers; to copy these too, put them first, as in ``copy.deepcopy((model, optimizer,
    average))``. See also :doc:`/guides/whole_loop`, :doc:`/guides/many_ranks`.

    Traps: two calls after one step count the parameters twice. The average has the dtypes of the
    model, and in half precision loses small changes: call ``average.float()`` once, first.

    Args:
        model: the model to copy and to average.
        optimizer: the optimizer of the parameters, or several: a step counts unless all skip it.
        decay: the decay of an exponential moving average, from 0 to 1; ``None`` for the plain mean.
        device: the device of the average; ``None`` for that of the model.
        avg_fn: in place of ``decay``, ``avg_fn(averaged, value, n_averaged)`` returns the new
            average of a parameter or its local shard. Skipped steps discard its result.
        multi_avg_fn: ``multi_avg_fn(averaged, values, n_averaged)`` writes into lists of tensors.
        use_buffers: whether to average the buffers too; otherwise they are copied.

    Raises:
        RuntimeError: ``fully_shard`` has changed the model.
        TypeError, ValueError: an argument, or the combination of arguments, is not allowed.
    """
    return SkipAwareAverage(
        model,
        optimizer,
        decay,
        device=device,
        avg_fn=avg_fn,
        multi_avg_fn=multi_avg_fn,
        use_buffers=use_buffers,
    )


class SkipAwareAverage(AveragedModel):
    """An ``AveragedModel`` that ignores skipped steps; :func:`averaged` makes it.

    Attributes:
        module: the copy of the model that holds the averages.
        n_averaged: the number of steps in the average: int64, 0-d, on the device of the parameters.
        decay: the decay of the moving average; ``None`` for the plain mean.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer | Iterable[Optimizer],
        decay: float | None = None,
        *,
        device: Any = None,
        avg_fn: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
        multi_avg_fn: Callable[[list[Tensor], list[Tensor], Tensor], None] | None = None,
        use_buffers: bool = False,
    ) -> None:
        """Copy the model; see :func:`averaged`."""
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        optimizers = _checked_optimizers(optimizer)
        decay = _check_decay(decay)
        _check_functions(decay, avg_fn, multi_avg_fn)
        check_bool("use_buffers", use_buffers)
        if any(_fully_sharded(model)):
            raise RuntimeError(
                "a model that fully_shard has changed cannot be copied: call whole = copy.deepcopy("
                "model) before fully_shard(model), then average = ampopt.averaged(whole, optimizer)"
                ", and shard average.module as the model, with fully_shard(average.module)"
            )
        average_of: Any = avg_fn  # torch declares wider arguments than it passes
        averages_of: Any = multi_avg_fn
        super().__init__(model, device, average_of, averages_of, use_buffers)
        self.decay = decay
        first = next(self.module.parameters(), self.n_averaged)
        self.n_averaged = torch.zeros_like(self.n_averaged, device=first.device)
        self._last_steps = _LastSteps(optimizers)

    @torch.no_grad()
    def update_parameters(self, model: torch.nn.Module) -> None:
        """Update the averages with the parameters of ``model``, unless the last step was skipped.

        Does not synchronize if ``model`` and the average are on one device.

        Raises:
            RuntimeError: the average is sharded differently from ``model``. Nothing has changed
                then.
        """
        for module in (*_fully_sharded(self.module), *_fully_sharded(model)):
            module.reshard()  # after a forward pass, parameters may still be all-gathered
        tensors = [list(_averaged_in(m, self.use_buffers)) for m in (self.module, model)]
        pairs = list(zip(*tensors, strict=True))
        for pair in pairs:
            _check_placed_alike(*pair)
        alike, count = map(_alike, pairs), self.n_averaged
        buffers = zip(self.module.buffers(), model.buffers(), strict=True)
        copied = () if self.use_buffers else map(_alike, buffers)
        skipped = self._last_steps.were_skipped(count.device)
        if not backend_for(count.device).host_sees:
            self._average_unless(skipped, alike)
            for batch in _batches(copied):
                batch.store(torch.where(_on(batch.average, skipped), batch.average, batch.value))
        elif not skipped:
            self._average_in_place(alike)
            for averages, values in _by_kind(copied):
                _foreach_copy(averages, values)
        count += ~skipped

    def _average_in_place(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Write the new averages as torch does, where the host may read their number.

        Args:
            pairs: each average and its value.
        """
        count = int(self.n_averaged)
        weight = 1 / (count + 1) if self.decay is None else 1 - self.decay
        for averages, values in _by_kind(pairs):
            if count == 0:
                _foreach_copy(averages, values)
            elif self._has_own_function:
                self._call_own_function(averages, values)
            elif averages[0].is_floating_point() and averages[0].itemsize > 1:
                torch._foreach_lerp_(averages, values, weight)  # pyright: ignore[reportPrivateImportUsage]
            else:  # integers and float8, between which torch does not interpolate
                for average, value in zip(averages, values, strict=True):
                    average.copy_(self._new_average(average, value, weight, count))

    def _average_unless(self, skipped: Tensor, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Write the new averages on a device, unless ``skipped``, without synchronizing.

        Averages are written only with ``torch.where``: an interpolation of weight 0 would change
        -0.0, and would turn averages that are not finite into NaN.

        Args:
            skipped: whether the last step was skipped: bool, 0-d.
            pairs: each average and its value.
        """
        count = self.n_averaged
        is_first = count == 0
        if self._has_own_function:
            for averages, values in _by_kind(pairs):
                new_averages = [average.clone() for average in averages]
                self._call_own_function(new_averages, values)
                for average, value, new in zip(averages, values, new_averages, strict=True):
                    new = torch.where(_on(average, is_first), value, new)
                    average.copy_(torch.where(_on(average, skipped), average, new))
            return
        wide = widest(count.device)  # torch rounds this to float32, even for float64 parameters
        weight = 1 / (count + 1).to(wide) if self.decay is None else 1 - self.decay
        for batch in _batches(pairs):
            average, value = batch.average, batch.value
            new = self._new_average(average, value, weight, _on(average, count))
            new = torch.where(_on(average, is_first), value, new)
            batch.store(torch.where(_on(average, skipped), average, new))

    def _new_average(self, average: Tensor, value: Tensor, weight: Any, count: Any) -> Tensor:
        """The new average of ``average`` and ``value``, which are of one device and dtype.

        Args:
            average: the average.
            value: its value.
            weight: the weight of the value: a number, or 0-d on any device.
            count: the number of values in the average: a number, or 0-d on their device.
        """
        if average.is_floating_point():
            return _lerp(average, value, weight)
        return _of_whole_numbers(average, value, count, self.decay)

    @property
    def _has_own_function(self) -> bool:
        """Whether the caller has given a function that averages."""
        return self.avg_fn is not None or self.multi_avg_fn is not None

    def _call_own_function(self, averages: list[Tensor], values: list[Tensor]) -> None:
        """Write the results of the caller's function into ``averages``.

        Args:
            averages: the averages of one device and dtype.
            values: their values.
        """
        # torch does not average, and so pass 0, at first.
        count = _on(averages[0], self.n_averaged.clamp(min=1))
        if self.avg_fn is None:
            multi_avg_fn: Any = self.multi_avg_fn
            multi_avg_fn(averages, values, count)
            return
        for average, value in zip(averages, values, strict=True):
            average.copy_(self.avg_fn(average, value, count))


_foreach_copy: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]


def _by_kind(
    pairs: Iterable[tuple[Tensor, Tensor]],
) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """The averages and the values in ``pairs``, those of one device and dtype together."""
    kinds: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for average, value in pairs:
        averages, values = kinds.setdefault((average.device, average.dtype), ([], []))
        averages.append(average)
        values.append(value)
    yield from kinds.values()


class _Batch:
    """Averages of one device and dtype, concatenated, so that few operations update them all.

    Attributes:
        average: the elements of all averages, 1-d.
        value: the elements of the averaged tensors, in the same order.
    """

    def __init__(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Concatenate ``pairs``, each an average and a value."""
        self._averages = [flat(a) if is_dense(a) else a for a, _ in pairs]
        values = [flat(dense_like(v, a)) if is_dense(a) else v for a, v in pairs]
        self.average, self.value = _joined_elements(self._averages), _joined_elements(values)

    def store(self, elements: Tensor) -> None:
        """Write ``elements``, in the order of :attr:`average`, into the averages."""
        parts = elements.split([average.numel() for average in self._averages])
        views = [part.view(a.shape) for part, a in zip(parts, self._averages, strict=True)]
        _foreach_copy(self._averages, views)


def _joined_elements(tensors: list[Tensor]) -> Tensor:
    """The elements of ``tensors`` as one 1-d tensor; a view if there is only one."""
    elements = [tensor.reshape(-1) for tensor in tensors]
    return elements[0] if len(elements) == 1 else torch.cat(elements)


_BATCH_BYTES = 1 << 26
"""Bytes of averages in one :class:`_Batch`, unless one average alone has more: a step needs memory
for a few batches, and not for a few models."""


def _batches(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[_Batch]:
    """Batches of ``pairs``, each an average and a value."""
    waiting: dict[Any, list[tuple[Tensor, Tensor]]] = {}
    sizes: Counter[Any] = Counter()
    for average, value in pairs:
        kind, size = (average.device, average.dtype), average.numel() * average.element_size()
        if sizes[kind] and sizes[kind] + size > _BATCH_BYTES:
            yield _Batch(waiting.pop(kind))
            sizes[kind] = 0
        waiting.setdefault(kind, []).append((average, value))
        sizes[kind] += size
    yield from map(_Batch, waiting.values())


class _LastSteps:
    """The overflow flags of the steps since the last update, recorded by step post-hooks.

    Of each optimizer, the last step; an optimizer that has not stepped since has no flag.
    """

    def __init__(self, optimizers: list[Optimizer]) -> None:
        """Register a post-hook on each optimizer."""
        self._flags: dict[int, Tensor | None] = {}
        self._were_read = False
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        for optimizer in optimizers:
            optimizer.register_step_post_hook(self._note)

    def _note(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """A step hook: keep the overflow flag of the step that ``optimizer`` has just attempted."""
        if self._were_read:
            self._flags, self._were_read = {}, False
        self._flags[id(optimizer)] = optimizer.found_inf

    def were_skipped(self, device: torch.device) -> Tensor:
        """Whether all of these steps were skipped: bool, 0-d, on ``device``."""
        self._were_read = True
        flags = [flag for flag in self._flags.values() if flag is not None]
        if not flags or len(flags) < len(self._flags):  # at least one surely was not
            return torch.zeros((), dtype=torch.bool, device=device)
        skips = [to_device(flag.reshape(()), device) > 0 for flag in flags]
        return skips[0] if len(skips) == 1 else torch.stack(skips).all()

    def __deepcopy__(self, memo: Any) -> "_LastSteps":
        """Record the flags of the copies of the optimizers, if these have been copied before.

        Else return ``self``: a copy of the average alone uses the flags of the same optimizers.
        """
        originals = [optimizer() for optimizer in self._optimizers]
        copies = {id(optimizer): memo.get(id(optimizer)) for optimizer in originals}
        if None in copies.values():
            return self
        copied = _LastSteps(list(copies.values()))
        copied._flags = {id(copies[key]): flag for key, flag in self._flags.items()}
        copied._were_read = self._were_read
        return copied

    def __reduce__(self) -> Any:
        """Raise: a pickled optimizer would have lost the hooks that record its flags."""
        raise TypeError(
            "the result of ampopt.averaged cannot be pickled: save average.state_dict(), and load "
            "it into a new ampopt.averaged(model, optimizer, decay)"
        )


def _checked_optimizers(argument: Any) -> list[Optimizer]:
    """``argument`` as a list of one or more ampopt optimizers, else an error."""
    optimizers = list(argument) if isinstance(argument, Iterable) else [argument]
    if not optimizers:
        raise ValueError("optimizer must be an optimizer or several, got none")
    for optimizer in optimizers:
        check_optimizer(optimizer)
    return optimizers


def _check_decay(decay: Any) -> float | None:
    """``decay`` as a float from 0 to 1, or ``None``."""
    if decay is None:
        return None
    number = check_number("decay", decay)
    if not 0 <= number <= 1:
        raise ValueError(
            f"decay must be from 0 to 1, or None for the plain mean, got {decay!r}; 0.999 is usual"
        )
    return number


def _check_functions(decay: Any, avg_fn: Any, multi_avg_fn: Any) -> None:
    """Raise if more than one of the three is not ``None``, or a function cannot be called."""
    arguments = {"decay": decay, "avg_fn": avg_fn, "multi_avg_fn": multi_avg_fn}
    arguments = {name: value for name, value in arguments.items() if value is not None}
    if len(arguments) > 1:
        raise ValueError(
            f"give one of decay, avg_fn and multi_avg_fn, got {' and '.join(arguments)}"
        )
    for name, value in arguments.items():
        if name != "decay" and not callable(value):
            raise TypeError(f"{name} must be callable or None, got {type(value).__name__}")


def _fully_sharded(model: torch.nn.Module) -> Iterator[Any]:
    """The modules of ``model`` that ``fully_shard`` has changed."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # imported if fully_shard was called
    kind = getattr(fsdp, "FSDPModule", ())
    return (module for module in model.modules() if isinstance(module, kind))


def _averaged_in(model: torch.nn.Module, use_buffers: bool) -> Iterator[Tensor]:
    """The parameters of ``model``, and its buffers if these are averaged too."""
    return chain(model.parameters(), model.buffers() if use_buffers else ())


def _check_placed_alike(average: Any, value: Any) -> None:
    """Raise unless ``average`` is sharded like ``value``, or neither is a ``DTensor``."""
    distributed = dtensor.is_dtensor(average), dtensor.is_dtensor(value)
    if distributed == (True, True):
        alike = (average.device_mesh, average.placements) == (value.device_mesh, value.placements)
    else:
        alike = not any(distributed)
    if not alike:
        raise RuntimeError(
            "update_parameters: the average is sharded differently from the model: shard "
            "average.module as the model, with the same fully_shard or parallelize_module, "
            "before the first update_parameters"
        )


def _alike(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The local shards of an average and its value, as real tensors on the average's device."""
    average, value = (real(dtensor.local(t.detach())) for t in pair)
    return average, to_device(value, average.device, average.dtype)


def _on(tensor: Tensor, flag: Tensor) -> Tensor:
    """``flag`` on the device of ``tensor``, without synchronizing."""
    return to_device(flag, tensor.device)


def _lerp(average: Tensor, value: Tensor, weight: Any) -> Tensor:
    """The linear interpolation of torch's ``AveragedModel``, in float32 for half precision."""
    dtype = arithmetic(average.dtype)
    if isinstance(weight, Tensor):
        weight = to_device(weight, average.device, dtype)
    return torch.lerp(average.to(dtype), value.to(dtype), weight).to(average.dtype)


def _of_whole_numbers(average: Tensor, value: Tensor, count: Any, decay: float | None) -> Tensor:
    """The average of integers as torch computes it; bools, which torch refuses, are copied."""
    if average.dtype == torch.bool:
        return value
    if decay is None:
        new = average + (value - average) / (count + 1)
    else:
        new = average * decay + value * (1 - decay)
    return new.to(average.dtype)
