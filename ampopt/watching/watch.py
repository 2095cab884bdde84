"""A watch over an optimizer: what overflowed, when, and how near the others are."""

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ampopt._step import gradients
from ampopt._step.ranks import has_others
from ampopt.backend import backend_for, host_may_look
from ampopt.loss_scale.arguments import check_count
from ampopt.optimizer import Optimizer
from ampopt.watching import report
from ampopt.watching.alarm import Condition
from ampopt.watching.reading import Reading, Taken, described, merged, take
from ampopt_kernels.decision import Decision
from ampopt_kernels.devices import copied_to_host, to_device
from ampopt_kernels.found import Found, FoundByRanks
from ampopt_kernels.ledger import CAUSES, COLUMNS, RING, ChunkRange, Ledger, RecordedStep, zeros
from ampopt_kernels.uploads import Uploads

__all__ = ["Watch"]

_EVERY = 8
"""Attempts from one look of an alarm to the next, where the host does not see the device."""


class Watch:
    """Notes, on the device and without waiting, what each step finds in the gradients.

    For each parameter: how often it overflowed and when last, the largest finite unscaled gradient,
    and which share of its unscaled gradients float16 would flush to zero without a scale. For the
    optimizer: skips by cause, and scale and norm of the last steps. Whoever takes the step, be it a
    control point, a scaler, ``TrainStep``, its graph, or a plain ``step()``::

        optimizer = ampopt.AdamW(model.named_parameters())
        watch = ampopt.Watch(optimizer)
        ...  # train as ever
        print(watch.report())

    Training is bitwise what it is without. On an accelerator it costs one launch a step, and what
    detect counts besides as it reads the gradients; on the CPU, counting as they are read. A plain
    ``step()`` of a rule has its gradients read for it; one of an ordinary optimizer is counted, and
    nothing more is known of it, nor of a step after ``unscale_`` of torch's scaler. Of a closure
    that is run again, each evaluation that overflowed counts for its parameters, though the attempt
    is one, and the last is noted.

    Where ranks decide together, make a watch on each of them. Reading it, by ``print`` or any other
    way, says what is known on this rank, and asks no other: skips, scales, the norm of all
    gradients, how many overflows each rank has found, and the parameters as far as this rank has
    them. :meth:`gather` brings the parameters of all ranks together. Under DDP each rank has all.

    The watch is not in the optimizer's state dict; it has its own. A copy of the optimizer has no
    watch. Parameters that are added later are watched, too. A micro-batch that ``accumulate`` has
    left out is counted for no parameter: ``.overflowed`` of the step names them. A plain ``step()``
    whose class calls ``super().step()`` counts as often as torch runs hooks for it, which may be
    twice.

    Attributes:
        optimizer: that is watched.
    """

    def __init__(self, optimizer: Optimizer, last: int = 1000) -> None:
        """Begin to watch.

        Args:
            optimizer: of which kind so ever; made from ``model.named_parameters()``, so that
                parameters have names.
            last: of how many attempts to keep scale and norm.

        Raises:
            RuntimeError: it is watched already.
            TypeError: it is no :class:`ampopt.Optimizer`, or ``last`` is no number.
            ValueError: ``last`` is less than 1.
        """
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"optimizer must be an ampopt.Optimizer, got {type(optimizer).__module__}."
                f"{type(optimizer).__name__}: import it from ampopt, or call "
                "ampopt.patch_optimizer(optimizer)"
            )
        check_count("last", last)
        ours = optimizer._ampopt
        if ours.watch is not None:
            raise RuntimeError(
                f"this {type(optimizer).__name__} is watched already: use the watch that it has, "
                "or close() that first"
            )
        self.optimizer = optimizer
        self._last, self._steps = last, 0
        self._forgotten = 0  # steps of which a saved watch did not say more
        first = next((p for group in optimizer.param_groups for p in group["params"]), None)
        self._home = torch.device("cpu") if first is None else first.device
        self._ledgers: dict[torch.device, Ledger] = {self._home: zeros(0, last, self._home)}
        self._names: dict[torch.device, list[str]] = {self._home: []}
        self._places: dict[int, tuple[torch.device, int]] = {}
        self._uploads: dict[torch.device, Uploads] = {}
        self._parts: dict[torch.device, tuple[Found, list[ChunkRange]]] = {}
        # How many overflows each of some ranks has found: float32, shape (ranks,).
        self._by_rank: dict[tuple[int, ...], Tensor] = {}
        self._alarms: list[Condition] = []
        self._looks: deque[Reading] = deque(maxlen=1)
        self._logs: OrderedDict[int, tuple[int, Callable[[dict[str, Any]], Any]]] = OrderedDict()
        self._to_log: deque[tuple[Callable[[dict[str, Any]], Any], Reading]] = deque()
        self._grow()
        self._hook: Any = optimizer.register_step_post_hook(self._note)
        ours.watch = self
        ours.invalidate_plan()

    def close(self) -> None:
        """Watch no longer. What was noted can still be read; logs are written to the end."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = self.optimizer._ampopt.watch = None
            self.optimizer._ampopt.invalidate_plan()
            self._write_logs(wait=True)

    # --- reading ----------------------------------------------------------------------------------

    def read(self) -> dict[str, Any]:
        """What was noted so far, as numbers. Synchronizes: the host waits for the device.

        Returns:
            ``steps``, the attempts; ``skips``; ``skips_in_a_row``, up to now; ``skipped_by``:
            ``"overflow"``, ``"norm"`` and ``"loss"``, how many; ``parameters``: of each name
            ``overflows``, ``last_overflow`` (the attempt, from 1, or ``None``), ``largest`` (finite
            unscaled magnitude) and ``underflow`` (of the nonzero unscaled gradients of steps that
            were taken, the share of 2**-25 or less); and ``recent``, of the last attempts ``step``,
            ``skipped``, ``scale`` (``None`` without) and ``norm`` (of the unscaled gradients before
            clipping; ``None`` if nobody has looked), oldest first.

            Where ranks decide together, ``parameters`` are the parts that this rank has; norms are
            those of all ranks, and ``None`` in a plain ``step()``, and where other ranks have no
            watch and do not clip; and ``overflows_by_rank`` has for each rank that found any how
            many attempts it was, since the watch was made here. It is empty otherwise. No other
            rank need read: see :meth:`gather`.
        """
        return self.read_later().result()

    def read_later(self) -> Reading:
        """What :meth:`read` gives now, copied while the host goes on. Never waits.

        Returns:
            An object with ``done()``, which never waits, and ``result()``.
        """
        self._grow()
        decision_device, *others = dict.fromkeys((self._home, *self._ledgers))
        copies, events = [], []
        for device in (decision_device, *others):
            ledger, event = take(self._ledgers[device])
            copies.append((list(self._names[device]), ledger))
            events += [] if event is None else [event]
        by_rank = {ranks: copied_to_host(counts) for ranks, counts in self._by_rank.items()}
        return Reading(
            self._steps, self._forgotten, copies, by_rank, events, alone=self._decides_alone()
        )

    def gather(self) -> dict[str, Any]:
        """What :meth:`read` gives, of the parameters of all ranks. A collective, which waits.

        Every rank that decides with this one has to call it after the same step, or those that do
        wait for it. A step in which several shards of a parameter overflowed counts once; where a
        shard has done so more than 16 times, at least as often as the one that did most. Without
        other ranks it is :meth:`read`.
        """
        agreement = self.optimizer._ampopt.agreement()
        if agreement is None:
            return self.read()
        return described(merged(agreement.gather_objects(self._taken())), alone=True)

    def report(self) -> str:
        """What happened, and what to do about it, in words. Synchronizes as :meth:`read`."""
        return report.in_words(self.read())

    def __str__(self) -> str:
        """A table of the worst parameters. Synchronizes as :meth:`read`."""
        return report.table(self.read())

    def __repr__(self) -> str:
        """Which optimizer, and how many attempts. Does not synchronize."""
        return f"Watch({type(self.optimizer).__name__}, steps={self._steps}, last={self._last})"

    def plot(self, path: Any) -> None:
        """Draw scale, norm and skips of the last steps, and the parameters, to a file.

        Synchronizes as :meth:`read`.

        Args:
            path: of the picture; its ending says of which kind.

        Raises:
            ImportError: there is no matplotlib.
        """
        from ampopt.watching.plot import draw

        draw(self.read(), path)

    # --- from step to step ------------------------------------------------------------------------

    def log_to(self, writer: Any, every: int = 1) -> RemovableHandle:
        """Write the numbers of steps from now on, each as soon as it is here. Waits for nothing.

        Args:
            writer: a ``SummaryWriter`` of TensorBoard, or any function that takes a dict of numbers
                (``wandb.log``, ``print``): ``step``, ``skipped``, ``skips``, ``skips_in_a_row``,
                and, where there are such, ``scale`` and ``norm``.
            every: so many attempts one is written.

        Returns:
            A handle; after its ``remove()`` no later step is written.

        Raises:
            RuntimeError: the watch is closed.
            TypeError: ``writer`` is neither.
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
        """Warn when a run trains no longer: some steps later, and without waiting.

        Once each time that it comes about. On the CPU that is at the step itself.

        Args:
            skips_in_a_row: so many skipped steps one after another, or more.
            scale_below: a loss scale less than this.
            zero_share_above: a parameter of whose nonzero unscaled gradients a larger share, from 0
                to 1, is of 2**-25 or less.
            raises: raise it, an :class:`ampopt.watching.Alarm`, from the step that finds out.

        Raises:
            RuntimeError: the watch is closed.
            TypeError: an argument is of the wrong type.
            ValueError: it is out of range, or there is none.
        """
        self._refuse_closed("alarm")
        self._alarms.append(Condition(skips_in_a_row, scale_below, zero_share_above, raises))

    # --- saving -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that was noted on this rank, for ``torch.load(weights_only=True)``. Synchronizes."""
        taken = self._taken()
        return {
            "steps": taken.steps,
            "parameters": {name: list(row) for name, row in taken.parameters.items()},
            "totals": list(taken.totals),
            "recent": [list(entry) for entry in taken.recent],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what was saved, in place of what was noted.

        Raises:
            TypeError: ``state_dict`` is no dict, or ``steps`` in it no number.
            ValueError: it is not of a watch, or of one over other parameters. Nothing has changed.
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
        known = {name for names in self._names.values() for name in names}
        saved = set(rows) if isinstance(rows, Mapping) else set()
        if saved != known:
            raise ValueError(
                "the saved watch was over other parameters: "
                f"{sorted(saved ^ known)} are in one of the two only"
            )
        steps = check_count("steps", state_dict["steps"], least=0)
        table = {name: _numbers(name, row, COLUMNS) for name, row in rows.items()}
        totals = _numbers("totals", state_dict["totals"], 1 + len(CAUSES))
        recent = _numbers("recent", state_dict["recent"], -1, RING)[-self._last :]
        self._steps, self._forgotten = steps, max(steps - len(recent), 0)
        for device, names in self._names.items():
            ledger = zeros(len(names), self._last, torch.device("cpu"))
            for place, name in enumerate(names):
                ledger.parameters[place] = table[name]
            if device == self._home:
                ledger.totals.copy_(totals)
                for number, entry in enumerate(recent, start=self._forgotten):
                    ledger.ring[number % self._last] = entry
            self._ledgers[device].numbers.copy_(ledger.numbers)

    # --- the parts --------------------------------------------------------------------------------

    def _note(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """The step post-hook: add the step to the ledgers."""
        if optimizer._ampopt.is_stepping:
            return
        self._steps += 1
        self._add(optimizer._ampopt.decided, self._steps)
        self._tell()

    def _note_discarded(self, decision: Decision | None) -> None:
        """Add what was found in gradients that overflowed in an attempt which goes on without."""
        self._add(decision, self._steps + 1, notes_step=False)

    @torch.no_grad()
    def _add(self, decision: Decision | None, number: int, *, notes_step: bool = True) -> None:
        attempt, found = RecordedStep(number), {}
        if decision is not None:
            judged = decision.earlier_decision or decision
            norm = decision.norm if judged.norm is None else judged.norm
            told = (decision.skip, judged.cause, judged.scaled_by, norm)
            here = (x if x is None else to_device(x, self._home) for x in told)
            attempt = RecordedStep(number, *here)
            measured = judged if judged.measured else decision
            found = {f.measures.device: f for f in measured.found if f.measures is not None}
            for one in judged.found:
                if isinstance(one, FoundByRanks):
                    self._count_ranks(one)
        for device in dict.fromkeys((self._home, *found)):
            its_own = attempt
            if device != self._home:
                skip = attempt.skip
                its_own = RecordedStep(number, None if skip is None else to_device(skip, device))
            parts = self._parts_of(device, found[device]) if device in found else []
            uploads = self._uploads.setdefault(device, Uploads())
            backend_for(device).note(
                self._ledgers[device],
                its_own,
                found.get(device),
                parts,
                uploads,
                notes_step=notes_step and device == self._home,
            )
            uploads.keep_while_captured(device)

    def _count_ranks(self, found: FoundByRanks) -> None:
        ranks, flags = tuple(found.ranks), to_device(found.flags, self._home) > 0
        counts = self._by_rank.get(ranks)
        if counts is None:
            self._by_rank[ranks] = flags.to(torch.float32)
        else:
            counts.add_(flags)

    def _decides_alone(self) -> bool:
        """Whether no other rank has a say in the steps. Makes no process group to find out."""
        ours = self.optimizer._ampopt
        return not has_others(self.optimizer.param_groups, ours.process_group)

    def _parts_of(self, device: torch.device, found: Found) -> list[ChunkRange]:
        """Where parameters of this optimizer are in ``found``, as in the last step if alike."""
        known = self._parts.get(device)
        if known is not None and known[0].rows == found.rows and known[0].owners == found.owners:
            return known[1]
        keys = {found.owners[row].key for row in found.rows}
        if not keys <= self._places.keys():
            self._grow()
        parts, first = [], 0
        for row, run in groupby(found.rows):
            count = len(list(run))
            place = self._places.get(found.owners[row].key)
            if place is not None:  # else it is of another optimizer, of one decision with this
                parts.append(ChunkRange(first, count, place[1]))
            first += count
        self._parts[device] = replace(found, flags=[], measures=None), parts
        return parts

    def _grow(self) -> None:
        """Make room for parameters that are new to the optimizer."""
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                if id(param) not in self._places:
                    names = self._names.setdefault(param.device, [])
                    self._places[id(param)] = (param.device, len(names))
                    names.append(gradients.name_of(self.optimizer.param_groups, param))
        for device, names in self._names.items():
            old = self._ledgers.get(device)
            if old is None or old.places < len(names):
                new = self._ledgers[device] = zeros(len(names), self._last, device)
                if old is not None:
                    new.parameters[: old.places] = old.parameters
                    new.totals.copy_(old.totals)
                    new.ring.copy_(old.ring)

    def _tell(self) -> None:
        """Write what is due and here, and be alarmed by it."""
        for every, write in self._logs.values():
            if self._steps % every == 0:
                self._to_log.append((write, self.read_later()))
        self._write_logs(wait=False)
        if self._alarms:
            if not self._looks and (host_may_look(self._home) or self._steps % _EVERY == 0):
                self._looks.append(self.read_later())
            if self._looks and self._looks[0].done():
                reading = self._looks.popleft()
                for condition in self._alarms:
                    condition.judge(reading)

    def _write_logs(self, wait: bool) -> None:
        while self._to_log and (wait or self._to_log[0][1].done()):
            write, reading = self._to_log.popleft()
            write({k: v for k, v in reading.latest().items() if v is not None})

    def _taken(self) -> Taken:
        return self.read_later().taken()

    def _refuse_closed(self, call: str) -> None:
        if self._hook is None:
            raise RuntimeError(
                f"{call}: this watch is closed; make another, ampopt.Watch(optimizer)"
            )


def _numbers(name: str, saved: Any, *shape: int) -> Tensor:
    """What was saved under ``name``, as a tensor of ``shape``."""
    try:
        return torch.tensor(saved, dtype=torch.float64).view(shape)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{name} of the saved watch is not of a watch: {error}") from None


def _written_by(writer: Any) -> Callable[[dict[str, Any]], Any]:
    if hasattr(writer, "add_scalar"):

        def write(numbers: dict[str, Any]) -> None:
            step = numbers.pop("step")
            for name, value in numbers.items():
                writer.add_scalar(f"ampopt/{name}", float(value), step)

        return write
    if not callable(writer):
        raise TypeError(
            "writer must be a SummaryWriter of TensorBoard or a function that takes a dict, got "
            f"{type(writer).__name__}"
        )
    return writer
