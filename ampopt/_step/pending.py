"""What an optimizer remembers between calls: a pending unscale, and the scales it stepped with."""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ampopt._step.overflow import device_of
from ampopt._step.ranks import REPLICATED, Carried
from ampopt._step.snapshot import loaded_uncast
from ampopt._step.uncompiled import uncompiled
from ampopt.loss_scale.given import as_loss_scale
from ampopt.results import Unscaled
from ampopt_kernels.triton.uploads import Uploads

__all__ = ["Bookkeeping", "Pending"]


@dataclass(frozen=True)
class Pending:
    """An unscale that no step has followed yet."""

    found_inf: Tensor
    scale: Any  # the given one
    successor: Any


class Bookkeeping(torch.optim.Optimizer):
    """Which calls may follow, and torch's own methods, which end what is pending or refuse it."""

    process_group: Any = None
    _pending: Pending | None = None

    @property
    def pending(self) -> Unscaled | None:
        """What the last :meth:`unscale` returned, if no step has followed it yet."""
        pending = self._pending
        return None if pending is None else Unscaled(pending.found_inf, pending.successor)

    # They take what the class of an author takes, whose defaults may be others.

    @uncompiled
    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Reset the gradients, as torch does, and forget a pending unscale."""
        self._pending = None
        super().zero_grad(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The state, as torch's. A pending unscale is a ``RuntimeError``: it cannot be saved."""
        self._refuse_pending("state_dict")
        state_dict = super().state_dict(*args, **kwargs)
        if REPLICATED not in self.defaults:
            for group in state_dict.get("param_groups", ()):  # a wrapper may have others
                group.pop(REPLICATED, None)  # which those who load it know
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Load a state, as torch does, but bitwise. A pending unscale is a ``RuntimeError``.

        Differs from torch: a state tensor keeps the dtype it was saved with, where torch casts it
        to that of its parameter, so that saving and loading changes no later step.
        """
        self._refuse_pending("load_state_dict")
        known = [group.get(REPLICATED) for group in self.param_groups]
        with loaded_uncast(self):
            super().load_state_dict(state_dict, *args, **kwargs)
        for group, replicated in zip(self.param_groups, known, strict=True):
            if replicated is not None:
                group.setdefault(REPLICATED, replicated)

    def __getstate__(self) -> dict[str, Any]:
        """The state to copy or pickle. A pending unscale is a ``RuntimeError``."""
        self._refuse_pending("copying or pickling")
        copied = super().__getstate__()
        if vars(self).get("process_group") is not None:
            copied["process_group"] = Carried(self.process_group)
        return copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Support loading, copying and pickling."""
        carried = state.get("process_group")
        if isinstance(carried, Carried):
            state = {**state, "process_group": carried.process_group}
        super().__setstate__(state)

    def _optimizer_step_code(self) -> None:
        # torch calls this after every step(), whichever class defines it.
        super()._optimizer_step_code()
        self._end_pending()

    # --- what control points ask ------------------------------------------------------------

    @property
    def _home(self) -> torch.device:
        """Where decisions are made."""
        return device_of(self.param_groups) or torch.device("cpu")

    def _no_overflow(self) -> Tensor:
        return torch.zeros((), dtype=torch.float32, device=self._home)

    @property
    def _held_by_devices(self) -> dict[torch.device, Uploads]:
        """What devices hold of earlier calls."""
        return self.__dict__.setdefault("_uploads", {})

    def _as_scale(self, given: Any) -> Any:
        scale = as_loss_scale(given, self._home, self._held_by_devices)
        self._refuse_stepped(given)
        return scale

    def _refuse_stepped(self, given: Any) -> None:
        stepped = self.__dict__.get("_stepped_with", ())
        if not getattr(given, "_reusable", True) and given._generation in stepped:
            raise RuntimeError(
                f"this {type(given).__name__} was stepped with already: every control point "
                "returns the scale to use next, so rebind it, as in `_, _, scale = "
                "optimizer.unscale_and_step(grads_scaled_by=scale)`"
            )

    def _mark_stepped(self, given: Any, successor: Any) -> None:
        generation = getattr(given, "_generation", None)
        if generation is not None and successor is not given:  # as it is without gradients
            if "_stepped_with" not in self.__dict__:
                self._stepped_with = weakref.WeakSet()
            self._stepped_with.add(generation)

    def _end_pending(self) -> None:
        if self._pending is not None:
            self._mark_stepped(self._pending.scale, self._pending.successor)
            self._pending = None

    def _refuse_pending(self, call: str) -> None:
        if self._pending is not None:
            raise RuntimeError(
                f"{call}: an unscale is pending. Call step_after_unscale() first (if a scaler has "
                "unscaled, scaler.step(optimizer)), or zero_grad() to discard it"
            )
