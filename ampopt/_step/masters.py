"""Master weights of half-precision parameters, and the gradients on them.

A master is a float32 tensor; or an int8 tensor with the low bits of a 24-bit master, whose other
part is the parameter (``ampopt_kernels.low_bits``). To hold unscaled gradients, a 24-bit master
gets a float32 copy, which is kept until the step.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampopt._step import gradients
from ampopt._step.descriptors import RefersToOptimizer
from ampopt._step.gradient_rows import GradientRows
from ampopt._step.overflow import check_and_unscale, make_writable
from ampopt._step.rank_agreement import decision_all_reduce
from ampopt._step.sharding import dtensor
from ampopt._step.small_states import is_large, restore_names
from ampopt._step.state_checks import check_master
from ampopt._step.torch_private import uncompiled, version
from ampopt._warnings import warn_user
from ampopt.options import MASTER_BITS, MASTER_WEIGHTS, needs_master
from ampopt_kernels.devices import refuse_while_captured
from ampopt_kernels.low_bits import LOW_BITS, low_bits_of, master_of, split_master
from ampopt_kernels.rule import MASTER
from ampopt_kernels.step_data import Decision, Request
from ampopt_kernels.uploads import Uploads

__all__ = ["Masters", "full_master", "needs_low_bits"]


class _GradsAtUnscale(NamedTuple):
    """Gradients of parameters, as they were when unscaled copies of them were put on the masters.

    Attributes:
        params: the parameters.
        grads: the gradient of each.
        versions: the version counter of each gradient then, to detect edits; ``None`` if parameter
            and master share the gradient, so that an edit reaches the step.
        copies: the unscaled copy of each; the gradient itself if they share it.
    """

    params: list[Tensor]
    grads: list[Any]
    versions: list[int | None]
    copies: list[Tensor]

    def note_versions(self) -> None:
        """Record the versions that the gradients have now."""
        both = zip(self.grads, self.copies, strict=True)
        self.versions[:] = [None if copy is grad else version(grad) for grad, copy in both]


_NONE = _GradsAtUnscale([], [], [], [])


class _GradAtRead(NamedTuple):
    """The gradient of a parameter, as it was when a user read master weights without gradients.

    Attributes:
        param: the parameter.
        grad: a weak reference to its gradient.
        version: the version counter of the gradient then.
    """

    param: Tensor
    grad: Any
    version: int


class Masters(RefersToOptimizer):
    """The master weights of one optimizer, kept in ``state[p]["master_param"]``.

    See :class:`ampopt.ElementwiseOptimizer` for what users know of them.

    Attributes:
        holders: the tensors that have unscaled gradients now, masters or float32 copies of 24-bit
            masters, by the ``id`` of the parameter; empty between a step and the next unscale.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, makes_masters: bool = True) -> None:
        """Store the optimizer.

        Args:
            optimizer: the optimizer to keep masters for; stored as a weak reference.
            makes_masters: False for an optimizer that has no masters, whatever its param groups
                say.
        """
        super().__init__(optimizer)
        self._makes_masters = makes_masters
        self.holders: dict[int, Tensor] = {}
        self._at_unscale = _NONE
        self._read_early: _GradAtRead | None = None
        self._warned_of_reading = False
        self._rows: dict[bool, GradientRows | None] = {}  # by whether they are unscaled
        self._uploads: dict[torch.device, Uploads] = {}

    # --- which parameter has one ------------------------------------------------------------------

    def needs(self, group: dict[str, Any], param: Tensor) -> bool:
        """Whether ``param`` of ``group`` has a master."""
        return self._makes_masters and needs_master(group, param)

    def of(self, group: dict[str, Any], param: Tensor) -> Tensor | None:
        """The master of ``param``, in as many bits as ``group`` says; ``None`` if it needs none.

        A master that is missing is made, one of another number of bits is converted, and one that
        is left from before ``master_weights`` was turned off is removed: steps do not update it.
        """
        if not self.needs(group, param):
            if self._makes_masters:
                self.optimizer.state.get(param, {}).pop(MASTER, None)
            return None
        state, is_low = self.optimizer.state[param], needs_low_bits(group, param)
        restore_names(state)  # ZeRO loads a state without the optimizer's method
        master = state.get(MASTER)
        if master is None:
            refuse_while_captured(
                param.device, "master weights being made: each replay would make them again"
            )
            state[MASTER] = _new_low_bits(param) if is_low else param.detach().to(torch.float32)
        elif is_low != (master.dtype == LOW_BITS) and master.shape == param.shape:
            state[MASTER] = _low_bits(param, master) if is_low else full_master(param, master)
        return state[MASTER]

    def holder(self, group: int, param: Tensor) -> Tensor:
        """The tensor whose ``grad`` the step reads: the parameter, or after unscale its master.

        Of a 24-bit master, the float32 copy.

        Args:
            group: the index of the param group of ``param``.
            param: the parameter.
        """
        if (holder := self.holders.get(id(param))) is not None:
            return holder
        if not self.holders:
            return param
        master = self.of(self.optimizer.param_groups[group], param)
        return param if master is None else master  # without a gradient, when there was none

    def pairs(self, groups: list[dict[str, Any]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Each parameter with its master; with itself if it has none, or is frozen.

        With a 24-bit master comes a float32 copy. If the caller writes to it, parameter and low
        bits are set to the nearest number when the caller takes the next pair.
        """
        states = self.optimizer.state
        for group in groups:
            for param in group["params"]:
                is_frozen = not param.requires_grad and MASTER not in states.get(param, {})
                master = None if is_frozen else self.of(group, param)
                if master is None or master.dtype != LOW_BITS:
                    yield param, param if master is None else master
                    continue
                holder = self.holders.get(id(param))
                full = full_master(param, master) if holder is None else holder
                version_before = version(full)
                yield param, full
                if version(full) != version_before:
                    _store(param, master, full)

    # --- the gradients that steps read ------------------------------------------------------------

    def copy_gradients(self, with_grads: list[gradients.ParamWithGrad]) -> None:
        """Copy the gradients of parameters that have masters to the masters."""
        self.warn_of_early_reading()
        self._copy(with_grads, self._with_masters_in_place(with_grads))

    def _with_masters_in_place(
        self, with_grads: list[gradients.ParamWithGrad]
    ) -> list[gradients.ParamWithGrad]:
        """``with_grads``, with masters in place of their parameters, or float32 copies of them."""
        masters = []
        for index, param, owner in with_grads:
            master = self.of(self.optimizer.param_groups[index], param)
            if master is not None and master.shape != param.shape:
                check_master(owner.name, param, master)
            masters.append(master)
        if all(master is None for master in masters):
            return with_grads
        holders = with_grads.copy()
        for place, (index, param, owner) in enumerate(with_grads):
            if (master := masters[place]) is not None:
                dtensor.redistribute_gradient(param)
                holder = full_master(param, master)
                holders[place] = gradients.ParamWithGrad(index, holder, owner)
        return holders

    def _copy(
        self,
        with_grads: Sequence[gradients.ParamWithGrad],
        holders: Sequence[gradients.ParamWithGrad],
    ) -> None:
        """Copy the gradients of parameters to ``holders``, where these are other tensors."""
        each = zip(with_grads, holders, strict=True)
        pairs = [(one.tensor, holder.tensor) for one, holder in each if holder is not one]
        params = [param for param, _ in pairs]
        grads: list[Any] = list(map(gradients.grad_of, params))
        copies = [
            grad if grad.dtype == master.dtype else torch.empty_like(grad, dtype=master.dtype)
            for grad, (_, master) in zip(grads, pairs, strict=True)
        ]
        for (_, master), copy in zip(pairs, copies, strict=True):
            master.grad = copy
        self.holders = {id(param): master for param, master in pairs}
        self._at_unscale = _GradsAtUnscale(params, grads, [], copies)
        self._at_unscale.note_versions()
        _copy_each(copies, grads)

    def unscale(self, request: Request, *, write: bool = True) -> Decision | None:
        """Unscale, check and clip the gradients, in place or on the masters; without autograd.

        Args:
            request: the scale and what to measure; no step is run.
            write: whether to unscale; if not, gradients are only checked.

        Returns:
            The decision; ``None`` if there are no gradients.
        """
        optimizer, ours = self.optimizer, self.optimizer._ampopt
        groups, states, agreement = optimizer.param_groups, optimizer.state, ours.agreement()
        write = write and request.scale is not None
        edits = write or request.max_norm is not None
        if write:
            self.warn_of_early_reading()
            if self.holders:  # an earlier evaluation of a closure has unscaled
                self.drop_gradients()
        rows = self._rows.get(write)
        if rows is not None and rows.take_gradients(groups, agreement, states, are_written=edits):
            if rows.holders is not rows.present:
                self._copy(rows.present, rows.holders)
                rows.read_holders()
        else:
            present = holders = gradients.params_with_grads(groups)
            if write:  # before anything changes
                ours.needs_torch()
                self.check_float16(present)
            if edits:
                make_writable(present)
            if write:
                holders = self._with_masters_in_place(present)
            if holders is not present:
                self._copy(present, holders)
            rows = GradientRows.of(present, holders, agreement, self._uploads)
            self._rows = {write: rows.kept(groups, states)}
        all_reduce = decision_all_reduce(agreement, request, bool(rows.present))
        device = gradients.device_of(groups)
        decision = check_and_unscale(rows, request, all_reduce, device, write=write)
        if decision is not None and request.max_norm is not None:
            _clip([gradients.values_of(tensor) for _, tensor, _ in rows.holders], decision.clip)
        return decision

    def drop_rows(self) -> None:
        """Drop the rows that :meth:`unscale` has kept, and with them their parameters."""
        self._rows.clear()

    def show_unscaled(self) -> None:
        """Copy the unscaled gradients to ``p.grad`` too, in its dtype, for code that logs them.

        Steps still read the gradients of the masters, so an edit of ``p.grad`` raises at the step.
        An edit of a ``DTensor`` by torch's foreach operations does not raise: torch advances no
        version counter then.
        """
        _copy_each(self._at_unscale.grads, self._at_unscale.copies)
        self._at_unscale.note_versions()

    def drop_gradients(self) -> None:
        """Remove the gradients that :meth:`copy_gradients` has put on the masters."""
        self._read_early = None
        for holder in self.holders.values():
            holder.grad = None
        self.holders, self._at_unscale = {}, _NONE

    def unscaled_gradients(self) -> tuple[list[Tensor], list[Tensor]]:
        """The gradients of parameters, and the unscaled ones on their masters: local shards."""
        holders = zip(self._at_unscale.grads, self.holders.values(), strict=True)
        both = [(grad, holder.grad) for grad, holder in holders if holder.grad is not None]
        return (
            dtensor.local_of_each([grad for grad, _ in both]),
            dtensor.local_of_each([unscaled_grad for _, unscaled_grad in both]),
        )

    @contextmanager
    def restored_on_failure(self) -> Iterator[None]:
        """Context manager: on an exception, delete the masters that were made within the block.

        A closure that unscales makes masters. In any case, gradients on masters are removed at the
        end.
        """
        params_before = set(self._with_masters())
        try:
            yield
        except BaseException:
            for param in set(self._with_masters()) - params_before:
                master = self.optimizer.state[param].pop(MASTER)
                master.grad = None
                if not self.optimizer.state[param]:
                    del self.optimizer.state[param]
            raise
        finally:
            self.drop_gradients()

    # --- checks and warnings ----------------------------------------------------------------------

    @uncompiled
    def note_reading(self) -> None:
        """A user reads the masters, perhaps to clip: remember whether they lack gradients."""
        if self.holders or self._warned_of_reading:
            return
        for index, param in gradients.present(self.optimizer.param_groups):
            if self.needs(self.optimizer.param_groups[index], param):
                grad: Any = param.grad
                self._read_early = _GradAtRead(param, weakref.ref(grad), version(grad))
                return

    def warn_of_early_reading(self) -> None:
        """Warn once if a user has read the masters when they had no gradients yet.

        No warning if a backward pass has computed other gradients since, as when weights are
        averaged after a step.
        """
        if (early := self._read_early) is None:
            return
        self._read_early, grad = None, early.param.grad
        if grad is None or grad is not early.grad() or version(grad) != early.version:
            return
        self._warned_of_reading = True
        warn_user(
            "optimizer.master_params() was read after backward() and before the gradients were "
            "unscaled: the masters had no gradients yet, so clip_grad_norm_() of them has clipped "
            "nothing. Give max_norm= to unscale_and_step(); or call "
            "optimizer.unscale(grads_scaled_by=scale) before clip_grad_norm_(), and "
            "step_after_unscale() after it. With a scaler, call scaler.unscale_(optimizer) before "
            "clip_grad_norm_()",
        )

    def check_float16(self, with_grads: list[gradients.ParamWithGrad]) -> None:
        """Raise for float16 gradients of parameters that have no master to unscale them in float32.

        Args:
            with_grads: the gradients of parameters.

        Raises:
            RuntimeError: a gradient is float16 or complex32, and its parameter has no master, so
                unscaled values would underflow to zero.
        """
        for index, param, owner in with_grads:
            underflows = param.grad.dtype in gradients.UNDERFLOWING
            if underflows and not self.needs(self.optimizer.param_groups[index], param):
                raise RuntimeError(
                    f"the gradient of {owner.name} is "
                    f"{str(param.grad.dtype).removeprefix('torch.')}, where unscaled values would "
                    "underflow to zero; keep the parameters in float32 and run the model under "
                    "torch.autocast, or use a rule-based optimizer with unscale_and_step(), which "
                    "unscales in float32, or, for float16, with master_weights=True, which keeps "
                    "float32 copies to unscale"
                )

    def check_unedited(self) -> None:
        """Raise if ``p.grad`` was changed after its unscaled copy was put on the master.

        Raises:
            RuntimeError: a parameter has another gradient than ``unscale`` read, or its gradient
                was written to since.
        """
        params, grads, versions, _ = self._at_unscale
        for param, grad, old_version in zip(params, grads, versions, strict=True):
            if param.grad is None:  # the step leaves this parameter unchanged
                continue
            if param.grad is not grad or (old_version is not None and version(grad) != old_version):
                name = gradients.name_of(self.optimizer.param_groups, param)
                raise RuntimeError(
                    f"the gradient of {name} was changed after unscale(), but the step uses the "
                    "unscaled gradients of the float32 masters: clip or edit the gradients of "
                    "optimizer.master_params(), "
                    "as in torch.nn.utils.clip_grad_norm_(optimizer.master_params(), max_norm), or "
                    "let unscale_and_step(max_norm=...) clip. In a Trainer of transformers or trl, "
                    "call ampopt.integrations.transformers.prepare(trainer); with Accelerate, "
                    "ampopt.integrations.accelerate.use_scaler(accelerator); with Lightning, use "
                    "the plugin ampopt.integrations.lightning.MixedPrecision. zero_grad() discards "
                    "the unscale"
                )

    def _with_masters(self) -> Iterator[Tensor]:
        """The parameters that have a master."""
        if self._makes_masters:
            for group in filter(MASTER_WEIGHTS.of, self.optimizer.param_groups):
                yield from (p for p in group["params"] if MASTER in self.optimizer.state.get(p, {}))


def needs_low_bits(group: dict[str, Any], param: Tensor) -> bool:
    """Whether the master of ``param`` has 24 bits, so that low bits are kept in its place.

    Those of parameters that are not :func:`is_large` are float32.
    """
    return MASTER_BITS.of(group) == 24 and needs_master(group, param) and is_large(param)


def full_master(param: Tensor, master: Tensor) -> Tensor:
    """``master``, or a float32 copy of it if it is the low bits of ``param``."""
    if master.dtype != LOW_BITS:
        return master
    own = master_of(dtensor.local(param.detach()), dtensor.local(master))
    return dtensor.from_local_like(own, param)


def _new_low_bits(param: Tensor) -> Tensor:
    """Low bits of zeros, so that the master of ``param`` equals ``param``."""
    own = torch.zeros_like(dtensor.local(param.detach()), dtype=LOW_BITS)
    return dtensor.from_local_like(own, param)


def _low_bits(param: Tensor, master: Tensor) -> Tensor:
    """The low bits for a float32 ``master``; ``param`` is the master, rounded."""
    own = low_bits_of(dtensor.local(param.detach()), dtensor.local(master))
    return dtensor.from_local_like(own, param)


def _copy_each(tensors: list[Any], originals: list[Any]) -> None:
    """Copy the values of ``originals`` to ``tensors``, where these are other tensors."""
    both = [(to, of) for to, of in zip(tensors, originals, strict=True) if to is not of]
    if both:
        torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
            dtensor.local_of_each([to for to, _ in both]),
            dtensor.local_of_each([of for _, of in both]),
        )


@torch.no_grad()
def _store(param: Tensor, low: Tensor, master: Tensor) -> None:
    """Set ``param`` and ``low`` to the numbers nearest to ``master``."""
    own = dtensor.local(param.detach())
    top, steps = split_master(dtensor.local(master), own.dtype, 0.5)
    own.copy_(top)
    dtensor.local(low).copy_(steps)


def _clip(grads: list[Tensor], coefficient: Tensor) -> None:
    """Multiply ``grads`` in place by ``coefficient``; one call per device and dtype.

    The coefficient is rounded to the dtype of a gradient, as ``torch.nn.utils.clip_grad_norm_``
    rounds that of gradients of one dtype.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        alike.setdefault((grad.device, grad.dtype), []).append(grad)
    for kind, same_kind in alike.items():
        factor = coefficient.to(*kind)
        torch._foreach_mul_(same_kind, factor)  # pyright: ignore[reportPrivateImportUsage]
