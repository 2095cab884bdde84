"""Float32 master weights of half-precision parameters, and the gradients on them."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ampopt._step import gradients
from ampopt._step.ranks import settle
from ampopt._step.uncompiled import uncompiled
from ampopt.optimizer import Optimizer
from ampopt_kernels.rule import MASTER, Rule

__all__ = ["MasterWeights", "has_masters", "needs_master"]


class _Unscaled(NamedTuple):
    """The gradient of a parameter, as it was when its master got it unscaled."""

    param: Tensor
    grad: Tensor
    version: int | None  # None where it is the master's too, so that edits reach that


class MasterWeights(Optimizer):
    """Keeps masters in the state; see :class:`ampopt.ElementwiseOptimizer`, which steps them."""

    rule: ClassVar[Rule]
    _master_weights = False
    _on_masters: tuple[_Unscaled, ...] = ()
    """Where the gradients come from that masters have now."""
    _warned_of_float16 = False

    def __init__(self, *args: Any, master_weights: bool = False, **kwargs: Any) -> None:
        """Make the optimizer.

        Args:
            *args: what the base classes take: ``params`` and ``defaults``, or as torch's optimizer.
            master_weights: keep a float32 master of each float16 and bfloat16 parameter; see the
                class. Also an option of a param group.
            **kwargs: what the base classes take.
        """
        self._master_weights = master_weights
        super().__init__(*args, **kwargs)
        if self.defaults.get("differentiable") and any(map(has_masters, self.param_groups)):
            raise ValueError(
                "master_weights=True does not go with differentiable=True, which takes torch's own "
                "step: leave one of them out"
            )

    @uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as torch does, and forget a pending unscale."""
        super().zero_grad(set_to_none)
        self._drop_master_gradients()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, as torch does; ``master_weights`` may be one of its options."""
        if self._master_weights:
            param_group.setdefault("master_weights", True)
        super().add_param_group(param_group)
        self._remember_dtypes()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, as torch does, of this or torch's optimizer. Nothing is cast.

        Whether there are master weights is decided here, not by the checkpoint.
        """
        kept = [has_masters(group) for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, masters in zip(self.param_groups, kept, strict=True):
            group.pop("master_weights", None)
            if masters:
                group["master_weights"] = True
            for param in group["params"]:
                if param in self.state and not needs_master(group, param):
                    self.state[param].pop(MASTER, None)

    def state_dict(self) -> dict[str, Any]:
        """The state, as torch's. A parameter that never had a gradient has none."""
        state_dict = super().state_dict()
        states = state_dict["state"]
        for group in state_dict["param_groups"]:
            if not self.rule.has_state(self.rule.flag_values(group)):
                continue
            for key in group["params"]:
                # A master alone is the parameter, and torch would take it for a state that is all
                # there.
                if states.get(key, {}).keys() == {MASTER}:
                    del states[key]
        return state_dict

    def __getstate__(self) -> dict[str, Any]:
        """The state to copy or pickle. A pending unscale is a ``RuntimeError``."""
        return {**super().__getstate__(), "_master_weights": self._master_weights}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Support loading, copying and pickling."""
        states = state["state"]
        # A master alone torch would take for a state that is all there.
        alone = {p: s for p, s in states.items() if isinstance(s, dict) and s.keys() == {MASTER}}
        for param in alone:
            del states[param]
        super().__setstate__(state)
        self.state.update(alone)

    def master_params(self) -> Iterator[Tensor]:
        """See :meth:`Optimizer.master_params`. A frozen parameter stands for itself."""
        for group in self.param_groups:
            for param in group["params"]:
                frozen = not param.requires_grad and MASTER not in self.state.get(param, {})
                master = None if frozen else self._master_of(group, param)
                yield param if master is None else master

    # --- what steps and control points ask --------------------------------------------------------

    @contextmanager
    def _restored_on_failure(self, replay: Any) -> Iterator[None]:
        known = set(self._with_masters())
        try:
            with super()._restored_on_failure(replay):
                yield
        except BaseException:
            for param in set(self._with_masters()) - known:  # a closure that unscales makes them
                master = self.state[param].pop(MASTER)
                master.grad = None
                if not self.state[param]:
                    del self.state[param]
            raise
        finally:  # unscaled ones that no step took
            self._drop_master_gradients()

    def _keeps_master(self, group: dict[str, Any], param: Tensor) -> bool:
        return needs_master(group, param)

    def _holders(self, *, written: bool) -> list[tuple[int, Tensor]]:
        holders = super()._holders(written=written)
        if not written:
            return holders
        result, unscaled = [], []
        for index, param in holders:
            master = self._master_of(self.param_groups[index], param)
            if master is not None:
                settle(param)
                grad = param.grad
                assert grad is not None
                master.grad = grad.to(master.dtype)
                shared = master.grad is grad
                unscaled.append(_Unscaled(param, grad, None if shared else grad._version))
            result.append((index, param if master is None else master))
        self._on_masters = tuple(unscaled)
        return result

    def _holder(self, group: dict[str, Any], param: Tensor) -> Tensor:
        # After ``unscale`` the master's, if there is one.
        if not self._on_masters:
            return param
        return param if (master := self._master_of(group, param)) is None else master

    def _master_of(self, group: dict[str, Any], param: Tensor) -> Tensor | None:
        """The float32 master of ``param``, made where it is missing; ``None`` if it needs none."""
        if not needs_master(group, param):
            return None
        state = self.state[param]
        if state.get(MASTER) is None:
            state[MASTER] = param.detach().to(torch.float32)
        return state[MASTER]

    def _refuse_edited(self) -> None:
        """Refuse gradients that were changed where no step looks, once they are on the masters.

        Raises:
            RuntimeError: a parameter has another gradient than ``unscale`` read, or one that was
                written to since.
        """
        for param, grad, version in self._on_masters:
            if param.grad is None:  # it is left out
                continue
            if param.grad is not grad or (version is not None and grad._version != version):
                raise RuntimeError(
                    f"the gradient of {gradients.name_of(self.param_groups, param)} was changed "
                    "after unscale(), which put the unscaled gradients on the float32 masters, "
                    "where the step finds them: clip or edit those of optimizer.master_params(), "
                    "as in torch.nn.utils.clip_grad_norm_(optimizer.master_params(), max_norm), or "
                    "let unscale_and_step(max_norm=...) clip. zero_grad() discards the unscale"
                )

    def _warn_of_float16(self) -> None:
        """Warn once of a state that is to be kept in float16."""
        if self._warned_of_float16:
            return
        for index, param in gradients.present(self.param_groups):
            group = self.param_groups[index]
            if param.dtype != torch.float16 or needs_master(group, param):
                continue
            if states := self.rule.state_for(self.rule.flag_values(group)):
                self._warned_of_float16 = True
                warnings.warn(
                    f"{type(self).__name__} keeps {', '.join(part.name for part in states)} of "
                    f"{gradients.name_of(self.param_groups, param)} in float16, as torch's "
                    "optimizers do: small values become zero there, such as squares of gradients "
                    "below 2**-12, and steps then are much too long. Pass master_weights=True, or "
                    "keep the parameters in float32 and run the model under torch.autocast",
                    UserWarning,
                    stacklevel=2,
                )
                return

    def _unscaled_on_masters(self) -> tuple[list[Tensor], list[Tensor]]:
        """Gradients of parameters, and those that ``unscale`` left on their masters."""
        masters = [(grad, self.state[p][MASTER].grad) for p, grad, _ in self._on_masters]
        both = [(grad, unscaled) for grad, unscaled in masters if unscaled is not None]
        return [grad for grad, _ in both], [unscaled for _, unscaled in both]

    def _with_masters(self) -> Iterator[Tensor]:
        for group in filter(has_masters, self.param_groups):
            yield from (p for p in group["params"] if MASTER in self.state.get(p, {}))

    def _drop_master_gradients(self) -> None:
        if self._on_masters:
            self._on_masters = ()
            for param in self._with_masters():
                self.state[param][MASTER].grad = None

    def _remember_dtypes(self) -> None:
        """Remember the dtype of each parameter, to notice a model that is cast later."""
        # Weak, for an identity is used again when a parameter is gone.
        known = self._dtypes = self.__dict__.get("_dtypes", WeakIdKeyDictionary())
        for group in self.param_groups:
            for param in group["params"]:
                known.setdefault(param, param.dtype)

    def _check_dtypes(self) -> None:
        self._remember_dtypes()
        for group in self.param_groups:
            for param in group["params"]:
                made_with = self._dtypes[param]
                if param.dtype != made_with:
                    raise RuntimeError(
                        f"{gradients.name_of(self.param_groups, param)} was {made_with} when the "
                        f"optimizer was made and is {param.dtype} now: cast the model first and "
                        "make the optimizer then (with master_weights=True it keeps float32 "
                        "masters of half-precision parameters)"
                    )


def has_masters(group: dict[str, Any]) -> bool:
    """Whether parameters of ``group`` have masters, if they are of a dtype that needs them."""
    return group.get("master_weights", False)


def needs_master(group: dict[str, Any], param: Tensor) -> bool:
    """Whether ``param`` of ``group`` has a float32 master."""
    return has_masters(group) and param.dtype in (torch.float16, torch.bfloat16)
