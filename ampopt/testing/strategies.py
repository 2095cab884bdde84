"""Hypothesis strategies for what optimizers are given: parameters, gradients, scales, histories.

They draw *blueprints* (:mod:`ampopt.testing.blueprints`), which build fresh tensors as often as an
example needs them. Everything comes from Hypothesis, so that failures shrink, to few elements of
few parameters in few steps, and replay.

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
Kind = Literal["ordinary", "edge"]
_FEW = 12
"""Elements up to which each is drawn by itself; more of them repeat a pattern."""

# A strategy is looked through by Hypothesis when it is first drawn from. If each draw made its own,
# that would take more than half of the time.
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
    """Shapes: 0-d, empty, odd, and with dimensions of one element.

    Args:
        max_elements: for shapes that are not about a boundary.
        min_dims: number of dimensions at least.
        max_dims: number of dimensions at most.
        min_side: 1 for no empty shapes.
        boundaries: also flat shapes of so many elements, one less and one more, for optimizers that
            work in chunks.
    """
    sides = st.lists(st.integers(min_side, 7), min_size=min_dims, max_size=min(max_dims, 3))
    found = sides.map(tuple).filter(lambda shape: math.prod(shape) <= max_elements)
    if max_dims >= 4 and max_elements >= 8:
        found |= st.just((1, 2, 2, 2))
    near = [n + d for n in boundaries for d in (0, -1, 1) if n + d > 0]
    if near and min_dims <= 1 <= max_dims:
        rarely = st.integers(0, 9)  # such tensors take their time
        return rarely.flatmap(
            lambda n: st.sampled_from(near).map(lambda size: (size,)) if n == 9 else found
        )
    return found


def values(dtype: torch.dtype, kind: Kind = "ordinary") -> st.SearchStrategy[Any]:
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


def _layouts(
    shape: tuple[int, ...], layouts: bool, expanded: bool, sparse: bool
) -> st.SearchStrategy[Layout]:
    fitting: list[Layout] = ["contiguous"]
    if not layouts:
        return _sampled_from(("sparse", "duplicated") if sparse and shape else tuple(fitting))
    if len(shape) >= 1:
        fitting.append("strided")
    if len(shape) >= 2:
        fitting.append("transposed")
    if len(shape) == 4:
        fitting.append("channels_last")
    if expanded and len(shape) >= 1 and shape[-1] >= 2:
        fitting.append("expanded")
    if sparse and len(shape) >= 1:
        return _sampled_from(("sparse", "duplicated"))
    return _sampled_from(tuple(fitting))


@functools.cache
def _numbers(n: int, dtype: torch.dtype, kind: Kind) -> st.SearchStrategy[list[Any]]:
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
    """One to ``max_size`` parameters, each of any of ``dtypes``, in a layout of its own.

    Args:
        draw: given by Hypothesis.
        dtypes: see above.
        max_size: see above.
        max_elements: of a parameter.
        of_shapes: a strategy of shapes, in place of :func:`shapes` up to ``max_elements``.
        layouts: whether they may be other than contiguous.
    """
    count = draw(_integers(1, max_size))
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
    """A finite gradient for each parameter, in a layout of its own, or none for some of them.

    Args:
        draw: of Hypothesis.
        params: what the gradients are of.
        kind: see :func:`values`.
        absent: some parameters may have none.
        layouts: gradients may be strided, transposed or channels-last.
        expanded: some may be one element expanded, as the gradient of a sum is.
        sparse: those of one dimension or more are sparse COO tensors.
    """
    return tuple(
        None
        if absent and draw(_integers(0, 4)) == 4
        else draw(_tensors(p.shape, p.dtype, kind, layouts, expanded, sparse))
        for p in params
    )


def spoilable(step: Sequence[Blueprint | None]) -> bool:
    """Whether one of the gradients has an element of its own to be spoiled."""
    return any(grad and grad.numel and grad.layout != "expanded" for grad in step)


@st.composite
def spoiled(draw: st.DrawFn, step: Sequence[Blueprint | None]) -> tuple[Blueprint | None, ...]:
    """The same gradients with an infinity or NaN at one place of one of them.

    The gradients, ``step``, must have an element.
    """
    holders = tuple(i for i, grad in enumerate(step) if spoilable([grad]))
    i = draw(_sampled_from(holders))
    grad = step[i]
    assert grad is not None
    n = grad.numel
    j = draw(_integers(0, n - 1))
    bad: float | complex = draw(_sampled_from(NON_FINITE))
    if grad.dtype.is_complex:
        bad = complex(0.5, bad) if draw(st.booleans()) else complex(bad, 0.5)
    if n > _FEW:
        grad = replace(grad, spots=((j, bad),))
    else:
        numbers = [grad.numbers[k % len(grad.numbers)] for k in range(n)]
        grad = replace(grad, numbers=(*numbers[:j], bad, *numbers[j + 1 :]))
    return (*step[:i], grad, *step[i + 1 :])


# --- loss scales and histories --------------------------------------------------------------------


def powers_of_two(least: int = -24, most: int = 24) -> st.SearchStrategy[float]:
    """Scales by which multiplication is exact, from ``2**least`` to ``2**most``."""
    return st.integers(least, most).map(lambda n: 2.0**n)


def any_scales() -> st.SearchStrategy[float]:
    """Any float32 number that a loss scale can be, the extremes and 1.0 often."""
    extremes = st.sampled_from([1.0, 2.0**-126, 2.0**127, 65536.0, 3.0])
    return extremes | st.floats(2.0**-126, 2.0**127, width=32)


@st.composite
def loss_scales(draw: st.DrawFn, *, off: bool = True, least: int = -24, most: int = 24) -> Scale:
    """A scale of every kind, and with ``off`` none at all, from ``2**least`` to ``2**most``."""
    kinds = ("none",) * off + ("number", "tensor", "vector", "static", "dynamic")
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
    """One to ``max_steps`` steps, any of which may overflow if ``overflows``.

    Args:
        draw: of Hypothesis.
        dtypes: of the parameters.
        of_shapes: of the parameters.
        max_params: how many there may be.
        max_steps: likewise.
        overflows: some gradients may have an infinity or NaN.
        groups: parameters may be in several groups.
        layouts: parameters and gradients may be strided, transposed or channels-last.
        of_gradients: arguments of :func:`gradients`.
    """
    params = draw(
        parameters(dtypes=dtypes, of_shapes=of_shapes, max_size=max_params, layouts=layouts)
    )
    steps, bad = [], []
    for _ in range(draw(_integers(1, max_steps))):
        step = draw(gradients(params, layouts=layouts, **of_gradients))
        bad.append(overflows and spoilable(step) and draw(st.booleans()))
        steps.append(draw(spoiled(step)) if bad[-1] else step)
    cuts = ()
    if groups and len(params) > 1:
        cuts = tuple(sorted(draw(st.sets(st.integers(1, len(params) - 1)))))
    return History(tuple(params), tuple(steps), tuple(bad), cuts)


@st.composite
def non_finite_steps(
    draw: st.DrawFn,
    *,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    of_shapes: st.SearchStrategy[tuple[int, ...]] | None = None,
    **of_gradients: Any,
) -> tuple[list[Blueprint], tuple[Blueprint | None, ...]]:
    """Parameters and gradients with edge values, one of which is spoiled.

    Args:
        draw: given by Hypothesis.
        dtypes: that parameters may have.
        of_shapes: a strategy of shapes that they may have; ``None`` for :func:`shapes`.
        of_gradients: as for :func:`gradients`.
    """
    params = draw(
        parameters(dtypes=dtypes, of_shapes=of_shapes).filter(lambda ps: any(p.numel for p in ps))
    )
    step = draw(gradients(params, kind="edge", **of_gradients).filter(spoilable))
    return params, draw(spoiled(step))
