"""How an ordinary ``step()``, which knows nothing of scaling, is taken or skipped."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampopt._step import gradients
from ampopt._step.overflow import agreement_on, decided_elsewhere, judge_held, works_of
from ampopt._step.pending import Bookkeeping
from ampopt._step.snapshot import Snapshot
from ampopt._step.step_hooks import beneath_hooks, hooked, is_replaced
from ampopt._step.transaction import Skipper
from ampopt._step.uncompiled import uncompiled
from ampopt.backend import backend_for
from ampopt_kernels.step import Decision, Request, Row, Work

__all__ = ["Attempt", "OrdinarySteps"]


class Attempt(NamedTuple):
    """A step that was taken or skipped.

    Attributes:
        decision: ``None`` if there were no gradients.
        returned: by the step; ``None`` if it was not called.
        called: whether it was.
    """

    decision: Decision | None
    returned: Any = None
    called: bool = True


class OrdinarySteps(Bookkeeping):
    """Unscales in one pass, and then steps or skips; what rule-based optimizers do in one."""

    grad_norm: Tensor | None = None
    skip_by: str = "auto"
    _judged: Decision | None = None
    """The decision that an ordinary step is under, while it and its hooks run."""
    _is_over = False
    """Whether that step is over, and its post-hooks run."""
    _transacts = False
    """Whether ``step`` is known to allow transactions once :meth:`_make_state` was called."""
    _shared_state: frozenset[str] = frozenset()
    """Keys of the state whose tensors ``step`` replaces and never writes (see ``Snapshot``)."""

    # --- a step, or none --------------------------------------------------------------------

    def _judge(self, request: Request) -> Decision | None:
        """Judge what a closure left in the gradients, and make them ready for ``step()``."""
        gradients.check(self.param_groups)
        return self._unscale_in_place(request)

    def _attempt(self, request: Request) -> Attempt:
        """Step as ``request`` says, or skip. Step hooks run in any case, after unscaling.

        What they do is not part of the step, so it is neither undone nor a reason to look.
        """
        return self._while_judged(request, self._attempt_as)

    def _attempt_as(self, decision: Decision | None) -> Attempt:
        step = _beneath_hooks(self)
        if step is None:
            attempt = self._decided(self.step, decision)
            if not attempt.called:
                self._run_step_hooks()
            return attempt
        attempts: list[Attempt] = []

        def within_hooks(self: OrdinarySteps, *args: Any, **kwargs: Any) -> Any:
            attempts.append(self._decided(functools.partial(step, self, *args, **kwargs), decision))
            return attempts[-1].returned

        hooked(within_hooks)(self)
        self._opt_called = True  # where torch's schedulers look for a step before theirs
        return attempts[-1]

    @uncompiled
    def _skip_or(self, step: Callable[[], Any], request: Request) -> Attempt:
        """Unscale and call ``step`` as ``request`` says, or skip it."""
        return self._while_judged(request, lambda decision: self._decided(step, decision))

    def _while_judged(
        self, request: Request, attempt: Callable[[Decision | None], Attempt]
    ) -> Attempt:
        """Unscale as ``request`` says, and have the decision known while ``attempt`` runs."""
        gradients.check(self.param_groups)
        self._judged, self._is_over = self._unscale_in_place(request), False
        try:
            return attempt(self._judged)
        finally:
            self._judged = None

    def _decided(self, step: Callable[[], Any], decision: Decision | None) -> Attempt:
        """Call ``step`` or skip it.

        An ordinary step cannot be told of a flag on the device: the host looks, or the step is a
        transaction (see :attr:`skip_by`).
        """
        if decision is None:
            return Attempt(None, called=False)
        skip = decision.skip
        if self.skip_by == "step":
            return Attempt(decision, self._told(step, skip))
        self._make_state()
        returned: list[Any] = []
        called = self._skipper.step(self, lambda: returned.append(step()), skip)
        return Attempt(decision, returned[0] if returned else None, called)

    def _told(self, step: Callable[[], Any], skip: Tensor) -> Any:
        """Call a ``step`` that skips by itself where ``found_inf`` says so."""
        self.found_inf = skip.to(torch.float32)
        try:
            return step()
        finally:
            vars(self).pop("found_inf", None)

    @property
    def _skip_flag(self) -> Tensor | None:
        """In a step post-hook: more than 0 if its step was skipped; ``None`` if certainly not.

        Not while the step runs: those of torch's, which skip where they see one, may see none.
        """
        return self._judged.skip if self._judged is not None and self._is_over else None

    def _optimizer_step_code(self) -> None:
        super()._optimizer_step_code()
        self._is_over = self._judged is not None

    def _make_state(self) -> None:
        """Make the state that a first step would, as it would be before: see ``_transacts``."""

    @functools.cached_property
    def _skipper(self) -> Skipper:
        """How this optimizer's ordinary step is skipped; see :attr:`skip_by`."""
        if self.skip_by in ("host", "transaction"):
            return Skipper(self.skip_by, settled=True)  # type: ignore[arg-type]
        if self.skip_by not in ("auto", "step"):
            raise ValueError(
                f"skip_by must be 'auto', 'host', 'transaction' or 'step', got {self.skip_by!r}"
            )
        if backend_for(self._home).host_sees:
            return Skipper("host", settled=True)
        known = next((cls for cls in type(self).__mro__ if "_transacts" in vars(cls)), type(self))
        if self._transacts and beneath_hooks(known.step) is beneath_hooks(type(self).step):
            return Skipper("transaction")
        return Skipper("probation")

    def _left_scaled_by(self) -> Tensor | None:
        """The scale that gradients still carry after :meth:`_judge`; ``None`` if it unscaled."""
        return None

    def _unchanged_until_done(self) -> Snapshot | None:
        """What to restore if ``step(closure)`` fails half way; ``None`` if it cannot."""
        return Snapshot(self, shared=self._shared_state)

    def _run_step_hooks(self) -> None:
        """What an attempt that does not step still does: hooks run, and schedulers see a step."""
        _no_step(self)
        self._opt_called = True  # where torch's schedulers look for a step before theirs

    # --- gradients --------------------------------------------------------------------------

    @torch.no_grad()
    def _unscale_in_place(self, request: Request) -> Decision | None:
        """Unscale, judge and clip the gradients. ``None`` if there are none."""
        write = request.scale is not None
        if write:
            self._refuse_float16()  # before masters are made
        holders = self._holders(written=write)
        agreement = agreement_on(request, self.param_groups, self.process_group)
        if not holders:
            decision = decided_elsewhere(request, agreement, self._home)
            self._note_norm(request, decision)
            return decision
        held = self._held_by_devices
        decision = judge_held(holders, request, agreement, write=write, uploads=held)
        self._note_norm(request, decision)
        if request.max_norm is not None:
            _multiply([gradients.values_of(h) for _, h in holders], decision.clip)
        return decision

    def _holder(self, group: dict[str, Any], param: Tensor) -> Tensor:
        """Whose ``grad`` to step with."""
        return param

    def _keeps_master(self, group: dict[str, Any], param: Tensor) -> bool:
        """Whether the gradient of ``param`` is unscaled on a float32 master, not in place."""
        return False

    def _note_norm(self, request: Request, decision: Decision | None) -> None:
        """Set :attr:`grad_norm` if ``request`` asks for it; without gradients it is 0."""
        if request.max_norm is not None:
            self.grad_norm = self._no_overflow() if decision is None else decision.norm

    def _holders(self, *, written: bool) -> list[tuple[int, Tensor]]:
        """``(group, tensor)`` for each tensor whose ``grad`` is read, or unscaled in place."""
        return gradients.present(self.param_groups)

    def _works(self, rows: Sequence[Row], **fields: Any) -> list[Work]:
        return works_of(rows, self._held_by_devices, **fields)

    def _refuse_gradients(self) -> None:
        """Refuse gradients that cannot be unscaled and stepped with, before anything changes."""
        gradients.check(self.param_groups)
        self._refuse_float16()

    def _refuse_float16(self) -> None:
        for index, param in gradients.present(self.param_groups):
            assert param.grad is not None
            in_place = not self._keeps_master(self.param_groups[index], param)
            if in_place and param.grad.dtype in gradients.UNDERFLOWING:
                raise RuntimeError(
                    f"the gradient of {gradients.name_of(self.param_groups, param)} is "
                    f"{str(param.grad.dtype).removeprefix('torch.')}, where unscaled values would "
                    "underflow to zero; keep the parameters in float32 and run the model under "
                    "torch.autocast, or use a rule-based optimizer with unscale_and_step(), which "
                    "unscales in float32, or with master_weights=True, which keeps float32 copies "
                    "to unscale"
                )


def _multiply(tensors: list[Tensor], factor: Tensor) -> None:
    """Each in place, in its own dtype; all of one device and dtype in one call."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for kind, those in alike.items():
        torch._foreach_mul_(those, factor.to(*kind))  # pyright: ignore[reportPrivateImportUsage]


def _beneath_hooks(optimizer: torch.optim.Optimizer) -> Callable[..., Any] | None:
    """The function of ``optimizer.step`` without the hooks that torch puts around it.

    ``None`` if somebody has put another step on the instance, whose hooks cannot be told apart.
    """
    if is_replaced(optimizer):
        return None
    return beneath_hooks(type(optimizer).step)


# A step hook may hand the step other arguments.
_no_step = hooked(lambda self, *args, **kwargs: None)
