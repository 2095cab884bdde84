"""``Watch``: which gradients overflowed in an optimizer's steps, when, and which nearly did."""

import functools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from ampopt._argument_checks import check_count
from ampopt._step import gradients
from ampopt._step.ranks import has_others
from ampopt._step.sharding.dtensor import local
from ampopt.backend import backend_for
from ampopt.optimizer import Optimizer, check_optimizer
from ampopt.watching import report
from ampopt.watching.alarm import Condition
from ampopt.watching.background_copy import BackgroundCopy
from ampopt.watching.reading import RankStatistics, Reading, as_dict, merge
from ampopt_kernels import devices
from ampopt_kernels.devices import to_device
from ampopt_kernels.gradient_reports import GradientReport, RankFlags
from ampopt_kernels.step_data import Decision
from ampopt_kernels.tensors import real, widest
from ampopt_kernels.watch_statistics import (
    CAUSES,
    COLUMNS,
    NOT_GIVEN,
    RING,
    Findings,
    RecordedStep,
    Statistics,
    number_of_cause,
)

__all__ = ["Watch"]

_EVERY = 8
"""On an accelerator, alarms are checked every so many steps, as a check copies from the device."""


class Watch:
    """Records what each step finds in the gradients, without synchronizing.

    ::

        optimizer = ampopt.AdamW(model.named_parameters())
        watch = ampopt.Watch(optimizer)
        ...  # train as before
        print(watch.report())

    For each parameter: how often its gradient overflowed and when last, its largest finite unscaled
    gradient, and ``underflow``, the fraction of its nonzero unscaled gradients that float16 would
    round to 0 without a loss scale (magnitudes of at most 2**-25). For the optimizer: skipped steps
    by cause, and scale, norm and loss of the last steps. The loss is that of a closure, of
    ``TrainStep``, or of ``unscale_and_step(..., loss=loss)``.

    Parameters and states stay bitwise the same as without a watch. A watch costs some work
    where gradients are read; on an accelerator also at most eight small copies to the host a step,
    and one for each ``accumulate``, in the background. Printing and :meth:`read` synchronize;
    :meth:`read_later` does not.

    Traps: a plain call of a hand-written ``step()`` is counted, but its gradients are not recorded.
    The optimizer's state dict and copies do not contain the watch: save its own state dict. With
    several ranks, use :meth:`gather`. See also :doc:`/guides/watching`.

    Attributes:
        optimizer: the optimizer that is watched.
    """

    def __init__(self, optimizer: Optimizer, last: int = 1000) -> None:
        """Record steps from now on.

        Args:
            optimizer: any :class:`ampopt.Optimizer`. Make it from ``model.named_parameters()``, so
                that parameters have names.
            last: the number of last steps whose scale, norm and loss are kept.

        Raises:
            RuntimeError: ``optimizer`` has a watch already.
            TypeError: ``optimizer`` is not an :class:`ampopt.Optimizer`, or ``last`` is not an
                ``int``.
            ValueError: ``last`` is less than 1.
        """
        check_optimizer(optimizer)
        check_count("last", last)
        observers = optimizer._ampopt.observers
        if observers.watch is not None:
            raise RuntimeError(
                f"this {type(optimizer).__name__} is watched already: use its watch, or close() "
                "that watch first"
            )
        self.optimizer = optimizer
        self._last, self._steps = last, 0
        on_host = self._device.type in devices.ACCELERATORS
        memory = torch.device("cpu") if on_host else self._device
        self._statistics = Statistics.empty(last, memory)
        self._copies: deque[BackgroundCopy] = deque()  # what is not in the statistics yet
        self._places: dict[str, int] = {}  # of each name, in the statistics
        # Each parameter by id: itself, so that no other gets its id, and its name.
        self._known: dict[int, tuple[Any, str]] = {}
        # For the reports of the last step, their rows and owners, and what `_chunks_of` returned.
        self._chunks: dict[int, tuple[Any, Any, tuple[Tensor, Tensor]]] = {}
        self._alarms: list[Condition] = []
        self._logs: OrderedDict[int, tuple[int, Callable[[Reading], Any]]] = OrderedDict()
        # Readings that may still be on their way, and the logs and alarms that wait for them.
        self._waiting: deque[tuple[list[Callable[[Reading], Any]], Reading]] = deque()
        self._grow()
        self._hook: Any = optimizer.register_step_post_hook(self._note)
        observers.watch = self

    def close(self) -> None:
        """Stop recording. The watch can still be read; waits until pending logs are written."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = self.optimizer._ampopt.observers.watch = None
            self._alarms = []
            self._tell_arrived(wait=True)

    # --- reading ----------------------------------------------------------------------------------

    def read(self) -> dict[str, Any]:
        """The statistics of all steps so far. Synchronizes.

        Not a collective: no other rank has to call it (see :meth:`gather`).

        Returns:
            A dict such as::

                {
                    "steps": 120,  # attempted
                    "skips": 3,
                    "skips_in_a_row": 0,  # up to the last step
                    "skipped_by": {"overflow": 2, "norm": 1, "loss": 0},
                    "parameters": {
                        "0.weight": {
                            "overflows": 2,
                            "last_overflow": 88,  # the step, from 1; None if there was none
                            "largest": 4.5,  # finite unscaled magnitude
                            "underflow": 0.01,  # fraction, over the steps that were not skipped
                            "only_zeros": False,  # whether all its gradients were 0 so far
                        },
                    },
                    "recent": [  # the last steps, oldest first
                        {
                            "step": 120,
                            "skipped": False,
                            "scale": 32768.0,
                            "norm": 0.8,
                            "loss": 2.5,
                        },
                    ],
                    "overflows_by_rank": {},
                }

            ``scale`` is ``None`` without a scale. ``norm`` is that of the unscaled gradients before
            clipping; ``None`` if it was not computed. ``loss`` is ``None`` if the optimizer does
            not know it.

            With many ranks, ``parameters`` has the statistics of this rank's shards. ``norm`` is
            over all ranks; it is ``None`` in a plain ``step()``, and where other ranks have no
            watch and do not clip. ``loss`` is this rank's. ``overflows_by_rank`` has, for each rank
            that found any, the number of steps in which it did, since this watch was made.
        """
        return self.read_later().result()

    def read_later(self) -> Reading:
        """Copy the statistics in the background, without synchronizing.

        Returns:
            An object with ``done()``, which does not synchronize, and ``result()``: what
            :meth:`read` would have returned at the time of this call.
        """
        self._grow()
        self._add_arrived()
        statistics = self._statistics.mapped(torch.clone)  # which later steps do not change
        alone = self._decides_alone()
        return Reading(list(self._places), statistics, list(self._copies), alone=alone)

    def gather(self) -> dict[str, Any]:
        """Like :meth:`read`, with the parameters of all ranks. A collective; synchronizes.

        Every rank of the process group has to call it after the same step. Without other ranks it
        is :meth:`read`. A step in which several shards of one parameter overflowed is counted once.
        These counts are exact while each shard has overflowed at most 16 times, and lower bounds
        after that.
        """
        agreement = self.optimizer._ampopt.agreement()
        if agreement is None:
            return self.read()
        return as_dict(merge(agreement.gather_objects(self._snapshot())), alone=True)

    def report(self) -> str:
        """A report in sentences: what happened, and what to do about it. Synchronizes."""
        snapshot, groups = self._snapshot(), self.optimizer.param_groups
        norms = {
            name: (snapshot.parameters[name][4], norm)
            for names, norms in _norms(self._known.values())
            for name, norm in zip(names, norms.tolist(), strict=True)
        }
        numbers = as_dict(snapshot, alone=self._decides_alone())
        for entry, (cause, *_) in zip(numbers["recent"], snapshot.recent, strict=True):
            entry["overflowed"] = cause == number_of_cause("overflow")
        return report.in_words(
            numbers,
            float16=any(p.dtype == torch.float16 for p in gradients.params_of(groups)),
            norms=norms,
            learning_rates=[float(lr) for lr in (g.get("lr") for g in groups) if lr is not None],
        )

    def __str__(self) -> str:
        """A table of the parameters that overflowed most. Synchronizes."""
        return report.summary(self.read())

    def __repr__(self) -> str:
        """The class of the optimizer, and the number of steps. Does not synchronize."""
        return f"Watch({type(self.optimizer).__name__}, steps={self._steps}, last={self._last})"

    def plot(self, path: Any) -> None:
        """Draw scale, norm, loss and skips of the last steps, and the parameters. Synchronizes.

        Args:
            path: the file to write; its suffix is the format, such as ``".png"``.

        Raises:
            ImportError: matplotlib cannot be imported.
        """
        from ampopt.watching.plot import draw

        draw(self.read(), path)

    # --- from step to step ------------------------------------------------------------------------

    def log_to(self, writer: Any, every: int = 1) -> RemovableHandle:
        """Log each step from now on, when its numbers have reached the CPU. Does not synchronize.

        Args:
            writer: a ``SummaryWriter`` of TensorBoard, or any function that takes a dict of numbers
                (``wandb.log``, ``print``): ``step``, ``skipped``, ``skips``, ``skips_in_a_row``,
                and ``scale``, ``norm`` and ``loss`` if they are known.
            every: log every so many steps.

        Returns:
            A handle, whose ``remove()`` ends the logging.

        Raises:
            RuntimeError: the watch is closed.
            TypeError: ``writer`` has no ``add_scalar`` and is not callable.
            ValueError: ``every`` is less than 1.
        """
        self._refuse_closed("log_to")
        check_count("every", every)
        write, handle = _written_by(writer), RemovableHandle(self._logs)
        self._logs[handle.id] = every, write
        return handle

    def alarm(
        self,
        skips_in_a_row: int | None = None,
        scale_below: float | None = None,
        zero_share_above: float | None = None,
        *,
        raises: bool = False,
    ) -> None:
        """Warn, without synchronizing, when a run no longer trains.

        On a CPU each step is checked; on an accelerator, every 8th, and the warning comes when the
        copy has arrived. A condition warns once, and again only after it has cleared.

        Args:
            skips_in_a_row: warn if this many steps in a row, or more, were skipped.
            scale_below: warn if the loss scale is less than this.
            zero_share_above: warn if the ``underflow`` of a parameter is more than this, from 0 to
                1; see :meth:`read`. With several ranks it is that of this rank's shards.
            raises: raise :class:`ampopt.watching.Alarm`, from the step that checks, in place of a
                warning. The step is complete by then, but returns no next scale: if you train on,
                use the same scale once more.

        Raises:
            RuntimeError: the watch is closed; or ``zero_share_above`` comes with ``raises=True``
                for an optimizer that makes all-reduces: one rank alone would raise, and the others
                would wait for it.
            TypeError: an argument is of the wrong type.
            ValueError: an argument is out of range, or no condition was passed.
        """
        self._refuse_closed("alarm")
        condition = Condition(skips_in_a_row, scale_below, zero_share_above, raises)
        if raises and zero_share_above is not None and not self._decides_alone():
            raise RuntimeError(
                "alarm: zero_share_above is tested on this rank's shards, so one rank alone would "
                "raise, and the others would wait for it. Leave out raises=True, or pass "
                "zero_share_above in a call of its own"
            )
        self._alarms.append(condition)

    # --- saving -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The statistics of this rank, for ``torch.load(weights_only=True)``. Synchronizes."""
        state_dict = asdict(self._snapshot())
        del state_dict["by_rank"]  # those ranks may be others in the run that loads it
        return state_dict

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace the statistics by saved ones.

        Raises:
            TypeError: ``state_dict`` is not a dict, or its ``steps`` not an ``int``.
            ValueError: ``state_dict`` is not of a watch, or of a watch over other parameters.
                Nothing has changed then.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"state_dict must be a dict, got {type(state_dict).__name__}")
        entries = {"steps", "parameters", "totals", "recent"}
        if set(state_dict) != entries:
            raise ValueError(
                f"the state of a Watch has exactly the entries {sorted(entries)}, got "
                f"{sorted(map(str, state_dict))}"
            )
        self._grow()
        rows = state_dict["parameters"]
        saved_names = set(rows) if isinstance(rows, Mapping) else set()
        if saved_names != set(self._places):
            raise ValueError(
                "the saved watch was over other parameters: "
                f"{sorted(saved_names ^ set(self._places))} are in only one of the two"
            )
        steps = check_count("steps", state_dict["steps"], least=0)
        table = [rows[name] for name in self._places]
        table = _numbers("parameters", table, len(table), COLUMNS)
        totals = _numbers("totals", state_dict["totals"], 1 + len(CAUSES))
        recent = _numbers("recent", state_dict["recent"], -1, RING)[-self._last :]
        self._add_arrived(wait=True)
        statistics, self._steps = self._statistics, steps
        statistics.steps = steps
        statistics.parameters.copy_(table)
        statistics.totals.copy_(totals)
        statistics.ring.fill_(NOT_GIVEN)
        for number, entry in enumerate(recent, start=steps - len(recent)):
            statistics.ring[number % self._last] = entry

    # --- recording --------------------------------------------------------------------------------

    def _note(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Add the last step to the statistics: a step post-hook."""
        if optimizer._ampopt.is_stepping:
            return
        if devices.captures(self._device):
            raise RuntimeError(
                "a CUDA graph cannot capture the recording of a Watch: each replay would record "
                "the same step again. Close the watch before the capture, or let "
                "TrainStep(cuda_graph=True) capture the step"
            )
        self._steps += 1
        self._add(optimizer._ampopt.decision_of_step, self._steps)
        self._tell()

    def _note_discarded(self, decision: Decision | None) -> None:
        """Count the overflows of an evaluation that is retried; the step is counted later."""
        self._add(decision, self._steps + 1, is_over=False)

    @torch.no_grad()
    def _add(self, decision: Decision | None, number: int, *, is_over: bool = True) -> None:
        """Add a decision to the statistics.

        Args:
            decision: the decision of a control point; ``None`` for a step without a check.
            number: the number of the step, from 1.
            is_over: whether to count the step, and not only what was found in its gradients.
        """
        step, reports, of_ranks = RecordedStep(number), (), []
        if decision is not None:
            check = decision.earlier_decision or decision
            norm = decision.norm if check.norm is None else check.norm
            loss = self.optimizer._ampopt.observers.loss
            step = RecordedStep(number, decision.skip, check.cause, check.scaled_by, norm, loss)
            reports = check.reports
            if check is not decision:  # which measured if `check` has not
                reports = (*reports, *decision.reports)
            of_ranks = [part for part in check.reports if isinstance(part, RankFlags)]
        tensors, chunks = list(step[1:]), []
        for i, part in enumerate(reports):
            if isinstance(part, GradientReport) and len((of_part := self._chunks_of(i, part))[0]):
                tensors += part.flag_tensor, part.measures
                chunks.append(of_part)

        def record(statistics: Statistics, copies: list[Any]) -> None:
            """Record the step, once ``tensors`` have arrived."""
            left = iter(copies)
            arrived = RecordedStep(number, *islice(left, len(step) - 1))
            findings = [Findings(next(left), next(left), *of_part) for of_part in chunks]
            statistics.add(arrived, findings, is_over=is_over)
            for part, flags in zip(of_ranks, left, strict=True):
                statistics.add_ranks(tuple(part.ranks), flags)

        self._copies.append(BackgroundCopy([*tensors, *(part.flags for part in of_ranks)], record))
        self._add_arrived()

    @property
    def _device(self) -> torch.device:
        """The device of the first parameter; the CPU without parameters."""
        first = next(gradients.params_of(self.optimizer.param_groups), None)
        return torch.device("cpu") if first is None else first.device

    def _add_arrived(self, *, wait: bool = False) -> None:
        """Record the steps that have arrived; with ``wait``, wait for all of them."""
        while self._copies and (wait or self._copies[0].done()):
            self._copies.popleft().add_to(self._statistics)

    def _decides_alone(self) -> bool:
        """Whether the optimizer makes no all-reduces. Creates no process group to find out."""
        ours = self.optimizer._ampopt
        return not has_others(self.optimizer.param_groups, ours.process_group)

    def _chunks_of(self, index: int, report: GradientReport) -> tuple[Tensor, Tensor]:
        """Chunks of ``report``, and the places of their parameters in the statistics.

        A parameter of another optimizer in ``ampopt.unscale_and_step`` has no place.

        Args:
            index: the index of the report in its step; what the step before had there is cached.
            report: the report.
        """
        rows, owners, made = self._chunks.get(index, (None, None, None))
        if made is not None and rows == report.rows and owners == report.owners:
            return made
        self._grow()
        named = [(i, self._known.get(report.owners[row].key)) for i, row in enumerate(report.rows)]
        pairs = [(i, self._places[entry[1]]) for i, entry in named if entry is not None]
        numbers = torch.tensor(pairs, dtype=torch.int64, device="cpu").view(-1, 2).T
        chunks, places = to_device(numbers, self._statistics.ring.device)
        self._chunks[index] = report.rows, report.owners, (chunks, places)
        return chunks, places

    def _grow(self) -> None:
        """Extend the statistics by parameters that were added to the optimizer.

        A parameter that replaces another one there has its name, and so continues its statistics.
        """
        groups = self.optimizer.param_groups
        keys = list(map(id, gradients.params_of(groups)))
        if keys == list(self._known):
            return
        staying = {key: self._known[key] for key in keys if key in self._known}
        self._known = {}
        for _, param, name in gradients.named_params(groups):
            self._known[id(param)] = staying.setdefault(id(param), (param, name))
        new = [entry for entry in self._known.values() if entry[1] not in self._places]
        for _, name in new:
            self._places.setdefault(name, len(self._places))
        self._statistics.grow(len(self._places))
        for names, norms in _norms(new):
            places = [self._places[name] for name in names]
            self._copies.append(BackgroundCopy([norms], functools.partial(_record_norms, places)))

    def _tell(self) -> None:
        """Write the logs that have arrived, and check the alarms."""
        waiting = [write for every, write in self._logs.values() if self._steps % every == 0]
        if self._alarms and (backend_for(self._device).host_sees or self._steps % _EVERY == 0):
            waiting.append(self._check_alarms)
        if waiting:
            self._waiting.append((waiting, self.read_later()))
        self._tell_arrived()

    def _tell_arrived(self, *, wait: bool = False) -> None:
        """Pass on the readings that have arrived; with ``wait``, wait for all of them."""
        while self._waiting and (wait or self._waiting[0][1].done()):
            waiting, reading = self._waiting.popleft()
            for tell in waiting:
                tell(reading)

    def _check_alarms(self, reading: Reading) -> None:
        """Check all alarms."""
        for condition in self._alarms:
            condition.check(reading)

    def _snapshot(self) -> RankStatistics:
        """The statistics of this rank. Synchronizes."""
        return self.read_later().snapshot()

    def _refuse_closed(self, call: str) -> None:
        """Raise if the watch is closed; ``call`` is the method that was called."""
        if self._hook is None:
            raise RuntimeError(
                f"{call}: this watch is closed; make another, ampopt.Watch(optimizer)"
            )


@torch.no_grad()
def _norms(named: Iterable[tuple[Tensor, str]]) -> list[tuple[list[str], Tensor]]:
    """By device, names of parameters, and the norms of these or of their shards here: 1-d.

    Without those that have no norm yet (of lazy modules), or that no step changes (int8).
    """
    by_device: dict[torch.device, tuple[list[str], list[Tensor]]] = {}
    for param, name in named:
        if param.dtype in gradients.DTYPES and not is_lazy(param):
            names, norms = by_device.setdefault(param.device, ([], []))
            wide = widest(param.device)
            names.append(name)
            norms.append(torch.linalg.vector_norm(real(local(param)), dtype=wide))
    return [(names, torch.stack(norms)) for names, norms in by_device.values()]


def _record_norms(places: list[int], statistics: Statistics, copies: list[Tensor]) -> None:
    """Record the norms with which parameters began to be watched."""
    table = statistics.parameters
    rows = to_device(torch.tensor(places, device="cpu"), table.device)
    table[:, 4].index_copy_(0, rows, copies[0].to(table))


def _numbers(name: str, entry: Any, *shape: int) -> Tensor:
    """``entry``, the entry ``name`` of a state dict, as a float64 tensor of ``shape``."""
    try:
        return torch.tensor(entry, dtype=torch.float64, device="cpu").view(shape)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"the entry {name} of the saved watch is invalid: {error}") from None


def _written_by(writer: Any) -> Callable[[Reading], Any]:
    """A function that logs the last step of a reading to ``writer``; see :meth:`Watch.log_to`."""
    add_scalar = getattr(writer, "add_scalar", None)
    if add_scalar is None and not callable(writer):
        raise TypeError(
            "writer must be a SummaryWriter of TensorBoard or a function that takes a dict, got "
            f"{type(writer).__name__}"
        )

    def write(reading: Reading) -> Any:
        numbers = {name: value for name, value in reading.latest().items() if value is not None}
        if add_scalar is None:
            return writer(numbers)
        step = numbers.pop("step")
        for name, value in numbers.items():
            add_scalar(f"ampopt/{name}", float(value), step)

    return write
