"""Random programs: an optimizer with drawn options, and drawn calls and changes between its steps.

A program is a description, which can run many times: on two backends, whose bits are compared, or
under the address sanitizer, as ``.ci/sanitize`` runs it.
"""

import copy
import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch.nn import Parameter

import ampopt
from ampopt.testing.bits import everything
from ampopt.testing.hyperparameters import hyperparameters
from ampopt.testing.isolation import small_states_of_any_size
from ampopt_kernels import Codec, Rule, State, div_rn, jit, sqrt_rn, tl

__all__ = ["Action", "ParamSpec", "Program", "TwoBlocks", "programs"]


@jit
def _encode(x, u):
    return tl.floor(x * 127.0 + u)


@jit
def _decode(code):
    return code * (1 / 127)


@jit
def _update(p, g, state, h, flags):
    mean = state[0] + 0.25 * (g - state[0])
    slow = state[1] + 0.125 * (g - state[1])
    square = state[2] + 0.5 * (g * g - state[2])
    direction = div_rn(mean + slow, sqrt_rn(square) + 2.0**-20)
    return p - h[0] * direction, (mean, slow, square)


class TwoBlocks(ampopt.ElementwiseOptimizer):
    """An optimizer whose states have codecs of the smallest, the largest and the usual block."""

    rule = Rule(
        update=_update,
        hyper=("lr",),
        state=(
            State("mean", codec=Codec(_encode, _decode, torch.int8, block=32)),
            State("slow", codec=Codec(_encode, _decode, torch.int8, block=256)),
            State("square", positive=True),
        ),
    )

    def __init__(self, params: Any, lr: float = 0.125, **options: Any) -> None:
        super().__init__(params, {"lr": lr}, **options)


RULES: dict[str, type[Any]] = {
    cls.__name__: cls
    for cls in (getattr(ampopt, name) for name in ampopt.optim.__all__)
    if issubclass(cls, ampopt.ElementwiseOptimizer) and cls not in (ampopt.Muon, ampopt.SparseAdam)
} | {"TwoBlocks": TwoBlocks}
"""The optimizers of programs, by name: those that step by a rule, whatever the gradients."""

SIZES = (0, 1, 2, 31, 32, 33, 127, 128, 129, 255, 257, 1000, 8191, 8192, 8193, 16385)
"""Numbers of elements: around the sizes of blocks, of small parameters and of bundles."""


@dataclass(frozen=True)
class ParamSpec:
    """A parameter: its shape and its dtype, and that of its gradients."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    grad_dtype: torch.dtype

    def build(self, generator: torch.Generator) -> Parameter:
        """A parameter with values from ``generator``."""
        return Parameter(torch.randn(self.shape, generator=generator).to(self.dtype))


@dataclass(frozen=True)
class Action:
    """What a program does next: ``name``, with numbers that say to which parameters, and how.

    Attributes:
        name: ``"step"``, or a method of the program's runner.
        seed: the seed of gradients and new values.
        absent: the positions of parameters without a gradient.
        overflow: the position of a parameter whose gradient has an infinity; ``None`` for none.
        scale: the loss scale; ``None`` for none.
        max_norm: the norm to clip to; ``None`` for no clipping.
        way: how to step: ``"joined"``, ``"split"``, ``"plain"`` or ``"accumulated"``.
        at: the position of the parameter, or state, that is changed.
    """

    name: str
    seed: int = 0
    absent: frozenset[int] = frozenset()
    overflow: int | None = None
    scale: float | None = None
    max_norm: float | None = None
    way: str = "joined"
    at: int = 0


@dataclass(frozen=True)
class Program:
    """An optimizer and what is done with it.

    Attributes:
        optimizer: a name of :data:`RULES`.
        hyper: its hyperparameters.
        options: its options, such as ``state_bits``.
        params: its parameters.
        second_group: how many of ``params`` are in a second group.
        any_size: whether parameters of any size have small states.
        actions: what is done.
    """

    optimizer: str
    hyper: dict[str, Any]
    options: dict[str, Any]
    params: tuple[ParamSpec, ...]
    second_group: int
    any_size: bool
    actions: tuple[Action, ...]

    @property
    def is_exact(self) -> bool:
        """Whether every backend gives the same bits.

        Not if a step depends on a sum over elements, which has an order, or on a float64 square
        root, which torch does not always round to the nearest; nor if infinite gradients are
        applied, since then NaNs have either sign.
        """
        sums = RULES[self.optimizer].rule.reduces or any(a.max_norm for a in self.actions)
        applied = any(
            a.overflow is not None and (a.scale is None or a.way == "plain") for a in self.actions
        )
        return not (sums or applied) and all(spec.dtype != torch.float64 for spec in self.params)

    def run(self) -> list[Any]:
        """Run the program on the backend that is set: the bits of everything after each action."""
        with small_states_of_any_size() if self.any_size else nullcontext():
            run = _Run(self)
            return [run.after(action) for action in self.actions]


class _Run:
    """One run of a program."""

    def __init__(self, program: Program) -> None:
        """Make the optimizer."""
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(1)
        self.specs = {spec.build(generator): spec for spec in program.params}
        params, cut = list(self.specs), len(self.specs) - program.second_group
        groups = [{"params": part} for part in (params[:cut], params[cut:]) if part]
        options = {**program.hyper, **program.options}
        self.make = functools.partial(RULES[program.optimizer], **options)
        self.optimizer = self.make(groups)

    @property
    def params(self) -> list[Parameter]:
        """The parameters of all groups."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def after(self, action: Action) -> Any:
        """Do ``action``; the bits of everything then."""
        getattr(self, action.name)(action)
        return everything(self.optimizer)

    # --- steps ------------------------------------------------------------------------------------

    def step(self, action: Action) -> None:
        """Take a step, as ``action`` says."""
        optimizer, scale, way = self.optimizer, action.scale, action.way
        if way == "split" and any(spec.grad_dtype == torch.float16 for spec in self.specs.values()):
            way = "joined"  # unscaled float16 gradients would be zero, and are refused
        if way == "accumulated":
            self.give_gradients(action, 2 * action.seed)
            optimizer.accumulate(scale)
        self.give_gradients(action, 2 * action.seed + 1)
        if way == "plain":
            optimizer.step()
        elif way == "split":
            optimizer.unscale(grads_scaled_by=scale)
            optimizer.step_after_unscale()
        else:
            optimizer.unscale_and_step(grads_scaled_by=scale, max_norm=action.max_norm)

    def give_gradients(self, action: Action, seed: int) -> None:
        """Set all gradients, or ``None``."""
        generator = torch.Generator().manual_seed(seed)
        for i, p in enumerate(self.params):
            grad = torch.randn(p.shape, generator=generator) * (action.scale or 1.0) / 16
            if i == action.overflow and grad.numel():
                grad.view(-1)[seed % grad.numel()] = torch.inf
            p.grad = None
            p.grad_dtype = dtype = self.specs[p].grad_dtype
            p.grad = None if i in action.absent else grad.to(dtype)

    # --- what else changes ------------------------------------------------------------------------

    def reload(self, action: Action) -> None:
        """Load the optimizer's own checkpoint."""
        self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))

    def renew(self, action: Action) -> None:
        """Make another optimizer, and load the checkpoint of this one."""
        groups = [{"params": group["params"]} for group in self.optimizer.param_groups]
        saved, self.optimizer = self.optimizer.state_dict(), self.make(groups)
        self.optimizer.load_state_dict(saved)

    def forget(self, action: Action) -> None:
        """Delete the state of a parameter."""
        self.optimizer.state.pop(self._param(action), None)

    def replace_state(self, action: Action) -> None:
        """Replace a state of a parameter by its clone."""
        state = self.optimizer.state.get(self._param(action), {})
        for name in sorted(state)[action.seed % 3 : action.seed % 3 + 1]:
            state[name] = state[name].clone()

    def replace_data(self, action: Action) -> None:
        """Give a parameter other memory."""
        param = self._param(action)
        param.data = param.data.clone()

    def exchange(self, action: Action) -> None:
        """Exchange a parameter for a new one, in its place."""
        self._replace(action, lambda spec: spec)

    def exchange_for_larger(self, action: Action) -> None:
        """Exchange a parameter for a larger one, in its place."""
        self._replace(action, lambda spec: replace(spec, shape=(257, *spec.shape[1:])))

    def _replace(self, action: Action, changed: Callable[[ParamSpec], ParamSpec]) -> None:
        """Exchange a parameter for a new one of the ``changed`` spec."""
        old = self._param(action)
        spec = changed(self.specs.pop(old))
        new = spec.build(torch.Generator().manual_seed(action.seed))
        self.specs[new] = spec
        self.optimizer.state.pop(old, None)
        for group in self.optimizer.param_groups:
            group["params"] = [new if p is old else p for p in group["params"]]

    def add_group(self, action: Action) -> None:
        """Add a group of a parameter like the one at the place of the action."""
        spec = self.specs[self._param(action)]
        new = spec.build(torch.Generator().manual_seed(action.seed))
        self.specs[new] = spec
        self.optimizer.add_param_group({"params": [new]})

    def remove(self, action: Action) -> None:
        """Remove the last parameter, if another is left."""
        if len(self.params) > 1:
            group = self.optimizer.param_groups[-1]
            self.optimizer.state.pop(group["params"].pop(), None)
            if not group["params"]:
                self.optimizer.param_groups.pop()

    def change_gradients(self, action: Action) -> None:
        """Let later gradients of a parameter be of another dtype."""
        param = self._param(action)
        spec = self.specs[param]
        if not spec.dtype == torch.float64:
            wide = spec.grad_dtype == torch.float32
            dtype = torch.bfloat16 if wide else torch.float32
            self.specs[param] = replace(spec, grad_dtype=dtype)

    def change_lr(self, action: Action) -> None:
        """Set another learning rate."""
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] / 2

    def _param(self, action: Action) -> Parameter:
        """The parameter at the place of the action."""
        return self.params[action.at % len(self.params)]


# --- strategies -----------------------------------------------------------------------------------

_CHANGES = (
    *("reload", "renew", "forget", "replace_state", "replace_data", "exchange"),
    *("exchange_for_larger", "add_group", "remove", "change_gradients", "change_lr"),
)


def _actions() -> st.SearchStrategy[Action]:
    """An action: a step three times in four."""
    places = st.integers(0, 5)
    steps = st.builds(
        Action,
        st.just("step"),
        seed=st.integers(0, 1000),
        absent=st.just(frozenset()) | st.frozensets(places, max_size=3),
        overflow=st.none() | places,
        scale=st.none() | st.sampled_from([1.0, 256.0]),
        max_norm=st.sampled_from([None, None, None, 0.5]),
        way=st.sampled_from(["joined", "split", "plain", "accumulated"]),
    )
    changes = st.builds(Action, st.sampled_from(_CHANGES), seed=st.integers(0, 1000), at=places)
    return steps | steps | steps | changes


@st.composite
def _params(draw: st.DrawFn) -> ParamSpec:
    """A parameter."""
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]))
    grad_dtype = dtype
    if dtype != torch.float64 and draw(st.integers(0, 3)) == 0:
        grad_dtype = torch.float32
    n = draw(st.sampled_from(SIZES))
    return ParamSpec(draw(st.sampled_from([(n,), (n, 1), (1, n), (2, n)])), dtype, grad_dtype)


@st.composite
def programs(draw: st.DrawFn, max_actions: int = 8) -> Program:
    """Strategy of programs."""
    name = draw(st.sampled_from(["TwoBlocks", "AdamW"]) | st.sampled_from(sorted(RULES)))
    hyper = {} if RULES[name] is TwoBlocks else draw(hyperparameters(RULES[name]))
    options: dict[str, Any] = {"state_bits": draw(st.sampled_from([8, 16, 32]))}
    if draw(st.booleans()):
        options["master_weights"] = True
        options["master_bits"] = draw(st.sampled_from([24, 32]))
    if draw(st.booleans()):
        options["param_rounding"] = "stochastic"
    params = tuple(draw(st.lists(_params(), min_size=1, max_size=6)))
    return Program(
        name,
        hyper,
        options,
        params,
        draw(st.integers(0, len(params) - 1)),
        draw(st.booleans()),
        tuple(draw(st.lists(_actions(), min_size=2, max_size=max_actions))),
    )
