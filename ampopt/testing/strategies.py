"""Hypothesis strategies of an optimizer's inputs: parameters, gradients, scales, trainings.

They draw *blueprints* (:mod:`ampopt.testing.blueprints`), which build fresh tensors as often as an
example needs them. Everything random comes from Hypothesis, so failures replay, and shrink to few
elements, parameters and steps.

Example:
    >>> from hypothesis import given
    >>> from ampopt.testing import set_gradients, strategies
    >>> @given(strategies.histories(max_steps=3), strategies.loss_scales())
    ... def test_my_training_loop(history, scale):
    ...     params = history.build()
    ...     for step in history.steps:
    ...         set_gradients(params, step, scale.number)
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from hypothesis import strategies as st

from ampopt.testing.blueprints import Blueprint, History, Layout, Scale
from ampopt.testing.hyperparameters import hyperparameters

__all__ = [
    "any_scales",
    "gradients",
    "histories",
    "hyperparameters",
    "loss_scales",
    "non_finite_steps",
    "parameters",
    "powers_of_two",
    "shapes",
    "spoiled",
    "values",
]

NON_FINITE = (math.inf, -math.inf, math.nan)
Kind = Literal["ordinary", "uneven", "edge"]
_FEW = 12
"""Up to this size, each element of a tensor is drawn; larger tensors repeat as many."""

# Hypothesis analyses a strategy when it first draws from it. Cached strategies save more than half
# of the time.
_integers: Callable[[int, int], st.SearchStrategy[int]] = functools.cache(st.integers)
_sampled_from: Callable[[tuple[Any, ...]], st.SearchStrategy[Any]] = functools.cache(
    st.sampled_from
)


# --- tensors -------------------------------------------------------------------------------------


def shapes(
    max_elements: int = _FEW,
    *,
    min_dims: int = 0,
    max_dims: int = 4,
    min_side: int = 0,
    boundaries: Sequence[int] = (),
) -> st.SearchStrategy[tuple[int, ...]]:
    """Strategy of shapes: 0-d, empty, odd sizes, and dimensions of size 1.

    Args:
        max_elements: maximum number of elements, except for shapes from ``boundaries``.
        min_dims: minimum number of dimensions.
        max_dims: maximum number of dimensions.
        min_side: minimum size of a dimension; 1 excludes empty tensors.
        boundaries: sizes at which an optimizer's code changes, such as chunk sizes. Some 1-d shapes
            have such a size, one less, or one more.
    """
    sides = st.lists(st.integers(min_side, 7), min_size=min_dims, max_size=min(max_dims, 3))
    strategy = sides.map(tuple).filter(lambda shape: math.prod(shape) <= max_elements)
    if max_dims >= 4 and max_elements >= 8:
        strategy |= st.just((1, 2, 2, 2))
    near = [n + d for n in boundaries for d in (0, -1, 1) if n + d > 0]
    if near and min_dims <= 1 <= max_dims:
        rarely = st.integers(0, 9)  # large tensors are slow
        return rarely.flatmap(
            lambda n: st.sampled_from(near).map(lambda size: (size,)) if n == 9 else strategy
        )
    return strategy


def values(dtype: torch.dtype, kind: Kind = "ordinary") -> st.SearchStrategy[Any]:
    """Strategy of finite numbers that ``dtype`` can represent.

    Args:
        dtype: a real or complex floating-point dtype.
        kind: ``"ordinary"`` draws multiples of 1/256 from -4 to 4 and -0.0, on which arithmetic
            stays in the normal range. ``"uneven"`` draws powers of two from 2^-12 to 4, of both
            signs. ``"edge"`` draws any finite number, and often zeros of both signs, subnormals and
            numbers near overflow. Examples shrink to 1, as a failure on zeros alone may show
            nothing but a -0.0 in place of a 0.0.
    """
    if dtype.is_complex:
        part = values(dtype.to_real(), kind)
        return st.builds(complex, part, part)
    if kind == "uneven":
        signs = st.sampled_from((1.0, -1.0))
        return st.builds(math.ldexp, signs, st.integers(-12, 2))
    ordinary = st.integers(-1280, 768).map(lambda n: 1 + n / 256) | st.sampled_from((0.0, -0.0))
    if kind == "ordinary":
        return ordinary
    info = torch.finfo(dtype)
    edges = (info.max, info.tiny, info.smallest_normal * info.eps, info.max / 2, info.eps, 0.0)
    signed_edges = st.sampled_from([sign * edge for edge in edges for sign in (1.0, -1.0)])
    anything = st.floats(-float(info.max), float(info.max))
    return st.one_of(ordinary, signed_edges, anything)


def _layouts(
    shape: tuple[int, ...], layouts: bool, expanded: bool, sparse: bool
) -> st.SearchStrategy[Layout]:
    """Strategy of the layouts that fit ``shape``; sparse ones alone if ``sparse``."""
    if sparse and shape:
        return _sampled_from(("sparse", "duplicated"))
    fitting: dict[Layout, bool] = {
        "contiguous": True,
        "strided": layouts and len(shape) >= 1,
        "transposed": layouts and len(shape) >= 2,
        "channels_last": layouts and len(shape) == 4,
        "expanded": layouts and expanded and len(shape) >= 1 and shape[-1] >= 2,
    }
    return _sampled_from(tuple(layout for layout, fits in fitting.items() if fits))


@functools.cache
def _numbers(n: int, dtype: torch.dtype, kind: Kind) -> st.SearchStrategy[list[Any]]:
    """Strategy of the elements of a tensor of ``n``, at most :data:`_FEW` of them."""
    return st.lists(values(dtype, kind), min_size=min(n, 1), max_size=min(n, _FEW))


@functools.cache
@st.composite
def _tensors(
    draw: st.DrawFn,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    kind: Kind = "ordinary",
    layouts: bool = True,
    expanded: bool = False,
    sparse: bool = False,
) -> Blueprint:
    """Strategy of tensors of ``shape``."""
    numbers = draw(_numbers(math.prod(shape), dtype, kind))
    return Blueprint(shape, tuple(numbers), dtype, draw(_layouts(shape, layouts, expanded, sparse)))


@st.composite
def parameters(
    draw: st.DrawFn,
    *,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    max_size: int = 3,
    max_elements: int = _FEW,
    of_shapes: st.SearchStrategy[tuple[int, ...]] | None = None,
    layouts: bool = True,
) -> list[Blueprint]:
    """Strategy of lists of one to ``max_size`` parameters.

    Args:
        draw: passed by Hypothesis.
        dtypes: the dtypes to choose from, for each parameter.
        max_size: maximum number of parameters.
        max_elements: maximum number of elements of a parameter; ignored with ``of_shapes``.
        of_shapes: strategy of shapes; ``None`` for :func:`shapes` up to ``max_elements``.
        layouts: whether parameters may be strided, transposed or channels-last.
    """
    count = draw(_sampled_from((1, *range(2, max_size + 1), *range(2, max_size + 1))))
    if of_shapes is None:
        of_shapes = shapes(max_elements)
    return [
        draw(_tensors(draw(of_shapes), draw(_sampled_from(tuple(dtypes))), layouts=layouts))
        for _ in range(count)
    ]


@st.composite
def gradients(
    draw: st.DrawFn,
    params: Sequence[Blueprint],
    *,
    kind: Kind = "ordinary",
    absent: bool = True,
    layouts: bool = True,
    expanded: bool = False,
    sparse: bool = False,
) -> tuple[Blueprint | None, ...]:
    """Strategy of one finite gradient, or ``None``, for each parameter.

    Args:
        draw: passed by Hypothesis.
        params: blueprints of the parameters.
        kind: kind of numbers; see :func:`values`.
        absent: whether parameters may have no gradient.
        layouts: whether gradients may be strided, transposed or channels-last.
        expanded: whether gradients may be one element expanded, as the gradient of a sum is.
        sparse: whether gradients of parameters with at least one dimension are sparse COO tensors.
    """
    return tuple(
        None
        if absent and draw(_integers(0, 4)) == 4
        else draw(_tensors(p.shape, p.dtype, kind, layouts, expanded, sparse))
        for p in params
    )


def spoilable(step: Sequence[Blueprint | None]) -> bool:
    """Whether one of the gradients has an element that can be overwritten alone."""
    return any(grad and grad.numel and grad.layout != "expanded" for grad in step)


@st.composite
def spoiled(draw: st.DrawFn, step: Sequence[Blueprint | None]) -> tuple[Blueprint | None, ...]:
    """Strategy of the gradients ``step`` with an infinity or NaN in one or more of them.

    Each of these has one such element.

    Args:
        draw: passed by Hypothesis.
        step: a gradient or ``None`` for each parameter; at least one has elements.
    """
    holders = tuple(i for i, grad in enumerate(step) if spoilable([grad]))
    spoiled_step = list(step)
    for i in draw(_sampled_from(_subsets(holders, least=1))):
        spoiled_step[i] = draw(_spoiled(step[i]))
    return tuple(spoiled_step)


def _subsets(items: tuple[int, ...], *, least: int) -> tuple[tuple[int, ...], ...]:
    """The subsets of ``items`` with at least ``least`` of them, to be sampled from.

    Larger subsets occur twice, since Hypothesis draws the beginning of a list more often. Of more
    than four items, only the smallest subsets and the whole are in the list.
    """
    sizes = range(least + 1, len(items) + 1) if len(items) <= 4 else (len(items),)
    smallest = tuple(itertools.combinations(items, least))
    larger = tuple(s for size in sizes for s in itertools.combinations(items, size))
    return smallest + larger + larger


@st.composite
def _spoiled(draw: st.DrawFn, grad: Blueprint) -> Blueprint:
    """Strategy of ``grad`` with one element that is inf or NaN."""
    place = draw(_integers(0, grad.numel - 1))
    bad: float | complex = draw(_sampled_from(NON_FINITE))
    if grad.dtype.is_complex:
        bad = complex(0.5, bad) if draw(st.booleans()) else complex(bad, 0.5)
    return replace(grad, spots=((place, bad),))


# --- loss scales and histories --------------------------------------------------------------------


def powers_of_two(least: int = -24, most: int = 24) -> st.SearchStrategy[float]:
    """Strategy of scales that multiply exactly, from ``2**least`` to ``2**most``."""
    return st.integers(least, most).map(lambda n: 2.0**n)


def any_scales() -> st.SearchStrategy[float]:
    """Strategy of all float32 numbers that a loss scale can be; often the extremes and 1.0."""
    extremes = st.sampled_from([1.0, 2.0**-126, 2.0**127, 65536.0, 3.0])
    return extremes | st.floats(2.0**-126, 2.0**127, width=32)


@st.composite
def loss_scales(draw: st.DrawFn, *, off: bool = True, least: int = -24, most: int = 24) -> Scale:
    """Strategy of loss scales of every kind, from ``2**least`` to ``2**most``.

    Args:
        draw: passed by Hypothesis.
        off: whether the scale may be ``None``.
        least: exponent of the smallest scale.
        most: exponent of the largest scale.
    """
    # Hypothesis draws the first of a list more often, and training loops have dynamic ones.
    kinds = ("none",) * off + ("number", "dynamic", "tensor", "static", "vector", "dynamic")
    kind = draw(st.sampled_from(kinds))
    return Scale(kind, 1.0 if kind == "none" else draw(powers_of_two(least, most)))


@st.composite
def histories(
    draw: st.DrawFn,
    *,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    of_shapes: st.SearchStrategy[tuple[int, ...]] | None = None,
    max_params: int = 3,
    max_steps: int = 4,
    overflows: bool = True,
    groups: bool = False,
    layouts: bool = True,
    **of_gradients: Any,
) -> History:
    """Strategy of trainings of one to ``max_steps`` steps.

    Args:
        draw: passed by Hypothesis.
        dtypes: dtypes of the parameters.
        of_shapes: strategy of the parameters' shapes; ``None`` for :func:`shapes`.
        max_params: maximum number of parameters.
        max_steps: maximum number of steps.
        overflows: whether any step may have an infinity or NaN in a gradient.
        groups: whether parameters may be in several param groups.
        layouts: whether parameters and gradients may be strided, transposed or channels-last.
        of_gradients: further arguments of :func:`gradients`.
    """
    params = draw(
        parameters(dtypes=dtypes, of_shapes=of_shapes, max_size=max_params, layouts=layouts)
    )
    steps = []
    for _ in range(draw(_integers(1, max_steps))):
        step = draw(gradients(params, layouts=layouts, **of_gradients))
        spoils = overflows and spoilable(step) and draw(st.booleans())
        steps.append(draw(spoiled(step)) if spoils else step)
    cuts = ()
    if groups and len(params) > 1:
        cuts = draw(_sampled_from(_subsets(tuple(range(1, len(params))), least=0)))
    return History(tuple(params), tuple(steps), cuts)


@st.composite
def non_finite_steps(
    draw: st.DrawFn,
    *,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    of_shapes: st.SearchStrategy[tuple[int, ...]] | None = None,
    **of_gradients: Any,
) -> tuple[list[Blueprint], tuple[Blueprint | None, ...]]:
    """Strategy of parameters, and of gradients with edge values, some of them non-finite.

    Args:
        draw: passed by Hypothesis.
        dtypes: dtypes of the parameters.
        of_shapes: strategy of the parameters' shapes; ``None`` for :func:`shapes`.
        of_gradients: further arguments of :func:`gradients`.
    """
    params = draw(
        parameters(dtypes=dtypes, of_shapes=of_shapes).filter(lambda ps: any(p.numel for p in ps))
    )
    step = draw(gradients(params, kind="edge", **of_gradients).filter(spoilable))
    return params, draw(spoiled(step))
