"""Hypothesis strategies for what optimizers are given: parameters, gradients, scales, histories.

Strategies draw *blueprints*, small immutable descriptions that build a fresh tensor, optimizer or
scale each time they are asked, so that one example can run the same training twice and compare.
Everything comes from Hypothesis, so that failures shrink and replay.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from optimizers import RULE_BASED, torch_twin
from torch import Tensor
from torch.nn import Parameter

import ampopt

__all__ = [
    "Blueprint",
    "Case",
    "History",
    "Scale",
    "cases",
    "fewer",
    "gradients",
    "histories",
    "loss_scales",
    "non_finite_steps",
    "parameters",
    "powers_of_two",
    "set_gradients",
    "shapes",
    "spoiled",
    "values",
]

Layout = Literal["contiguous", "transposed", "strided", "channels_last", "expanded"]

NON_FINITE = (math.inf, -math.inf, math.nan)


def fewer(factor: float) -> settings:
    """The caller's profile with ``factor`` times its examples; Triton's interpreter is slow."""
    profile = settings()
    return settings(
        max_examples=max(1, round(profile.max_examples * factor)),
        # To explain a failure, every line of torch that is run would be traced, for minutes.
        phases=[phase for phase in profile.phases if phase is not Phase.explain],
    )


# --- tensors -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Blueprint:
    """A tensor to build: as often as wanted, the same bits in the same layout each time."""

    shape: tuple[int, ...]
    numbers: tuple[float | complex, ...]
    dtype: torch.dtype = torch.float32
    layout: Layout = "contiguous"

    def tensor(self, scale: float = 1.0) -> Tensor:
        """A fresh tensor, times ``scale`` in its own dtype."""
        wide = torch.complex128 if self.dtype.is_complex else torch.float64
        plain = torch.tensor(self.numbers, dtype=wide).to(self.dtype).reshape(self.shape)
        # Part by part, as the product of a complex number and a real one loses signs of zeros.
        (torch.view_as_real(plain) if self.dtype.is_complex else plain).mul_(scale)
        return _laid_out(plain, self.layout)

    def parameter(self) -> Parameter:
        """A fresh parameter."""
        return Parameter(self.tensor())


def _laid_out(plain: Tensor, layout: Layout) -> Tensor:
    """The values of ``plain``, in memory as ``layout`` says."""
    if layout == "transposed":
        return plain.mT.contiguous().mT
    if layout == "strided":
        wide = plain.new_full((*plain.shape[:-1], 2 * plain.shape[-1]), 7.0)
        wide[..., ::2] = plain
        return wide[..., ::2]
    if layout == "channels_last":
        return plain.contiguous(memory_format=torch.channels_last)
    if layout == "expanded":
        return plain[..., :1].expand(plain.shape)
    return plain


def _layouts(shape: tuple[int, ...], *, expanded: bool = False) -> st.SearchStrategy[Layout]:
    fitting: list[Layout] = ["contiguous"]
    if len(shape) >= 1:
        fitting.append("strided")
    if len(shape) >= 2:
        fitting.append("transposed")
    if len(shape) == 4:
        fitting.append("channels_last")
    if expanded and len(shape) >= 1 and shape[-1] >= 2:
        fitting.append("expanded")
    return st.sampled_from(fitting)


def shapes(max_elements: int = 12) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of up to four dimensions: 0-d, empty, odd, and with dimensions of one element."""
    sizes = st.one_of(st.lists(st.integers(0, 7), max_size=3), st.just([1, 2, 2, 2]))
    return sizes.map(tuple).filter(lambda shape: math.prod(shape) <= max_elements)


def values(dtype: torch.dtype, kind: Literal["ordinary", "edge"]) -> st.SearchStrategy[Any]:
    """Numbers that ``dtype`` can hold.

    Args:
        dtype: real or complex.
        kind: ``"ordinary"``: from -4 to 4, zeros of both signs among them, and never so small that
            arithmetic on them leaves the normal range. ``"edge"``: any finite number; zeros of both
            signs, subnormals and numbers next to overflow often.
    """
    if dtype.is_complex:
        part = values(dtype.to_real(), kind)
        return st.builds(complex, part, part)
    ordinary = st.integers(-1024, 1024).map(lambda n: n / 256) | st.just(-0.0)
    if kind == "ordinary":
        return ordinary
    info = torch.finfo(dtype)
    edges = (info.max, info.tiny, info.smallest_normal * info.eps, info.max / 2, info.eps, 0.0)
    signed = st.sampled_from([sign * edge for edge in edges for sign in (1.0, -1.0)])
    anything = st.floats(-float(info.max), float(info.max))
    return st.one_of(ordinary, signed, anything)


@st.composite
def _tensors(
    draw: st.DrawFn,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    kind: Literal["ordinary", "edge"] = "ordinary",
    expanded: bool = False,
) -> Blueprint:
    n = math.prod(shape)
    numbers = draw(st.lists(values(dtype, kind), min_size=n, max_size=n))
    return Blueprint(shape, tuple(numbers), dtype, draw(_layouts(shape, expanded=expanded)))


@st.composite
def parameters(
    draw: st.DrawFn,
    *,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    max_size: int = 3,
    max_elements: int = 12,
) -> list[Blueprint]:
    """One to ``max_size`` parameters, each of any of ``dtypes``."""
    count = draw(st.integers(1, max_size))
    return [
        draw(_tensors(draw(shapes(max_elements)), draw(st.sampled_from(tuple(dtypes)))))
        for _ in range(count)
    ]


@st.composite
def gradients(
    draw: st.DrawFn,
    params: Sequence[Blueprint],
    *,
    kind: Literal["ordinary", "edge"] = "ordinary",
    absent: bool = True,
    expanded: bool = False,
) -> tuple[Blueprint | None, ...]:
    """A finite gradient for each parameter, in a layout of its own, or none for some of them."""
    return tuple(
        None
        if absent and draw(st.integers(0, 4)) == 4
        else draw(_tensors(p.shape, p.dtype, kind, expanded))
        for p in params
    )


def set_gradients(
    params: Iterable[Parameter], step: Iterable[Blueprint | None], scale: float = 1.0
) -> None:
    """Give each parameter its gradient times ``scale``, fresh, in the gradient's own layout."""
    for p, grad in zip(params, step, strict=True):
        p.grad = None if grad is None else grad.tensor(scale)


@st.composite
def spoiled(draw: st.DrawFn, step: Sequence[Blueprint | None]) -> tuple[Blueprint | None, ...]:
    """The same gradients with an infinity or NaN at one place of one of them.

    The gradients must have an element.
    """
    places = [
        (i, j)
        for i, grad in enumerate(step)
        if grad is not None and grad.layout != "expanded"
        for j in range(len(grad.numbers))
    ]
    i, j = draw(st.sampled_from(places))
    grad = step[i]
    assert grad is not None
    bad: float | complex = draw(st.sampled_from(NON_FINITE))
    if grad.dtype.is_complex:
        bad = complex(0.5, bad) if draw(st.booleans()) else complex(bad, 0.5)
    numbers = (*grad.numbers[:j], bad, *grad.numbers[j + 1 :])
    return (*step[:i], replace(grad, numbers=numbers), *step[i + 1 :])


# --- optimizers ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """An optimizer with its options."""

    cls: type[ampopt.Optimizer]
    options: dict[str, Any] = field(default_factory=dict)

    def make(self, params: Iterable[Any], **changed: Any) -> Any:
        """The optimizer of ``params``, tensors or groups."""
        return self.cls(params, **self._options(), **changed)

    def torch(self, params: Iterable[Any], **changed: Any) -> torch.optim.Optimizer:
        """The for-loop optimizer of torch's that it is a drop-in for."""
        options = {**self._options(), "foreach": False, "fused": False, **changed}
        return torch_twin(self.cls)(params, **options)

    def _options(self) -> dict[str, Any]:
        # A tensor among the options is the optimizer's own.
        return {k: v.clone() if isinstance(v, Tensor) else v for k, v in self.options.items()}


@st.composite
def cases(
    draw: st.DrawFn, classes: Sequence[type[ampopt.Optimizer]] = RULE_BASED, stateful: bool = False
) -> Case:
    """A rule-based optimizer with any of its options.

    Args:
        draw: of Hypothesis.
        classes: to choose from.
        stateful: only with options under which it keeps state.
    """
    cls = draw(st.sampled_from(tuple(classes)))
    lr = draw(st.sampled_from([0.5, 0.1, 2.0**-7]))
    options: dict[str, Any] = {"lr": lr}
    if not issubclass(cls, (ampopt.SGD, ampopt.Adam, ampopt.AdamW)):
        return Case(cls, options)
    options["maximize"] = draw(st.booleans())
    options["weight_decay"] = draw(st.sampled_from([0.0, 0.25]))
    if issubclass(cls, ampopt.SGD):
        momentum = draw(st.sampled_from([0.9, 0.5] if stateful else [0.0, 0.9, 0.5]))
        nesterov = bool(momentum) and draw(st.booleans())
        dampening = 0.0 if nesterov else draw(st.sampled_from([0.0, 0.5]))
        options.update(momentum=momentum, nesterov=nesterov, dampening=dampening)
    else:
        options["amsgrad"] = draw(st.booleans())
        options["betas"] = draw(st.sampled_from([(0.9, 0.999), (0.5, 0.75)]))
        # Where decay is added to gradients that it cancels, a small eps makes noise of rounding.
        options["eps"] = 0.125 if options["weight_decay"] else draw(st.sampled_from([1e-8, 0.125]))
        if draw(st.booleans()):
            options["lr"] = torch.tensor(lr, dtype=torch.float64)
    return Case(cls, options)


# --- loss scales and histories --------------------------------------------------------------------


def powers_of_two(least: int = -24, most: int = 24) -> st.SearchStrategy[float]:
    """Scales by which multiplication is exact."""
    return st.integers(least, most).map(lambda n: 2.0**n)


@dataclass(frozen=True)
class Scale:
    """A loss scale of some kind to build, and the number it stands for."""

    kind: Literal["none", "number", "tensor", "vector", "static", "dynamic"]
    number: float

    def make(self) -> Any:
        """What to pass as ``grads_scaled_by``."""
        made: dict[str, Any] = {
            "none": lambda: None,
            "number": lambda: self.number,
            "tensor": lambda: torch.tensor(self.number),
            "vector": lambda: torch.tensor([self.number]),
            "static": lambda: ampopt.StaticLossScale(self.number),
            "dynamic": lambda: ampopt.DynamicLossScale(init_scale=self.number, growth_interval=2),
        }
        return made[self.kind]()


@st.composite
def loss_scales(draw: st.DrawFn, *, off: bool = True) -> Scale:
    """A scale of every kind, and with ``off`` none at all, by a power of two."""
    kinds = ("none",) * off + ("number", "tensor", "vector", "static", "dynamic")
    kind = draw(st.sampled_from(kinds))
    return Scale(kind, 1.0 if kind == "none" else draw(powers_of_two()))


@dataclass(frozen=True)
class History:
    """Parameters and the gradients of several steps, some of them spoiled.

    Attributes:
        params: blueprints.
        steps: for each step, a gradient or ``None`` for each parameter.
        overflows: for each step, whether it has a non-finite gradient.
    """

    params: tuple[Blueprint, ...]
    steps: tuple[tuple[Blueprint | None, ...], ...]
    overflows: tuple[bool, ...]

    def build(self) -> list[Parameter]:
        """Fresh parameters."""
        return [p.parameter() for p in self.params]


@st.composite
def histories(
    draw: st.DrawFn,
    *,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    max_steps: int = 4,
    overflows: bool = True,
    **of_gradients: Any,
) -> History:
    """One to ``max_steps`` steps, any of which may overflow if ``overflows``."""
    params = draw(parameters(dtypes=dtypes))
    steps, bad = [], []
    for _ in range(draw(st.integers(1, max_steps))):
        step = draw(gradients(params, **of_gradients))
        spoilable = any(g and g.numbers and g.layout != "expanded" for g in step)
        bad.append(overflows and spoilable and draw(st.booleans()))
        steps.append(draw(spoiled(step)) if bad[-1] else step)
    return History(tuple(params), tuple(steps), tuple(bad))


@st.composite
def non_finite_steps(
    draw: st.DrawFn, *, dtypes: Sequence[torch.dtype] = (torch.float32,)
) -> tuple[list[Blueprint], tuple[Blueprint | None, ...]]:
    """Parameters and gradients with edge values, one of which is spoiled."""
    params = draw(parameters(dtypes=dtypes).filter(lambda ps: any(p.numbers for p in ps)))
    step = draw(
        gradients(params, kind="edge", absent=True).filter(
            lambda step: any(g is not None and g.numbers for g in step)
        )
    )
    return params, draw(spoiled(step))
