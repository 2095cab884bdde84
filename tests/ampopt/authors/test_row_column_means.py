"""Rules that average over rows and columns: their means, states, steps, skips and errors."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.averaging_rules import Centered, Damped
from support.scripted_steps import assert_a_skip_changes_no_bit, gradient, params_of, step
from torch.nn import Parameter

import ampopt
from ampopt_kernels import Rule, State, jit, tl
from ampopt_kernels.language import HAS_TRITON
from ampopt_kernels.native.build import cpp_compiler

BACKENDS = ["eager", *["compiled"] * bool(cpp_compiler()), *["triton"] * HAS_TRITON]
SHAPES = [(3, 4), (5,), (2, 3, 2), (70, 61), (0, 3), (4, 1), (1, 7), ()]
STEPS = 3
BF16 = torch.bfloat16


@jit
def _averages(p, g, state, h, flags):
    MIXED: tl.constexpr = flags[1]
    if MIXED:
        return g * state[0], tl.abs(p)
    else:
        return g * g, tl.abs(p)


def _factors(means: Any, state: Any, h: Any, flags: Any) -> Any:
    by_row, by_column = map(torch.lerp, state, means, [h[1]] * 2)
    return (by_row, by_column), (by_row / (1 + by_row.abs().mean(-2, keepdim=True)), by_column)


@jit
def _direction(g, state, h, flags):
    VECTOR: tl.constexpr = flags[0]
    average = state[0] + 0.5 * (g - state[0])
    if VECTOR:
        return average, average
    else:
        return average, average * (1 + state[1]) + state[2]


@jit
def _reduce(p, g, state, h, flags):
    _, direction = _direction(g, state, h, flags)
    return (direction * direction,)


@jit
def _scalars(s, h, flags, sums):
    return s, (h[0] / (1 + tl.sqrt(sums[0])), h[1])


@jit
def _update(p, g, state, h, flags):
    average, direction = _direction(g, state, h, flags)
    return p - h[0] * direction, (average,)


RULE = Rule(
    update=_update,
    reduce=_reduce,
    scalars=_scalars,
    averages=_averages,
    factors=_factors,
    entries=lambda group, ndim, dtype: {"vector": ndim < 2},
    hyper=("lr", "weight"),
    flags=("vector", "mixed"),
    state=(
        State("by_row", shape="rows", when="not vector", init=0.5),
        State("average"),
        State("by_column", shape="columns", when="not vector", dtype=torch.float64),
    ),
)


class OfLines(ampopt.ElementwiseOptimizer):
    """An optimizer for tests: its steps differ from row to row and from column to column."""

    rule = RULE

    def __init__(self, params: Any, mixed: bool = False, **options: Any) -> None:
        super().__init__(params, {"lr": 0.25, "weight": 0.75, "mixed": mixed}, **options)


def groups_of(params: list[Any]) -> list[dict[str, Any]]:
    return [{"params": params[:3], "mixed": True}, {"params": params[3:]}]


def reference(dtype: torch.dtype, max_norm: float | None) -> list[dict[str, Any]]:
    """The same steps in float64, one parameter after another."""
    result = []
    starts = [p.detach().double() for p in params_of(SHAPES, dtype)]
    given = [[gradient(p, i).to(dtype).flatten().double() for p in starts] for i in range(STEPS)]
    norms = [torch.cat(grads).norm() for grads in given]
    for k, p in enumerate(starts):
        average, by_row, by_column = torch.zeros_like(p), 0.5, 0.0
        for i in range(STEPS):
            g = gradient(p, i).to(dtype).double()
            if max_norm is not None:
                g = g * min(1.0, max_norm / (norms[i].item() + 1e-6))
            first = g * (average if k < 3 else g)
            average = average + 0.5 * (g - average)
            direction = average
            if p.ndim > 1 and p.numel():
                by_row = 0.25 * by_row + 0.75 * first.mean(-1, keepdim=True)
                by_column = 0.25 * by_column + 0.75 * p.abs().mean(-2, keepdim=True)
                factor = by_row / (1 + by_row.abs().mean(-2, keepdim=True))
                direction = average * (1 + factor) + by_column
            p = p - 0.25 / (1 + direction.norm()) * direction
        state = {"average": average}
        if p.ndim > 1 and p.numel():
            state |= {"by_row": by_row, "by_column": by_column}
        result.append({"p": p, **state})
    return result


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("dtype", "options", "max_norm"),
    [
        (torch.float32, {}, None),
        (torch.float64, {}, 2.0),
        (torch.bfloat16, {"master_weights": True}, 2.0),
    ],
    ids=str,
)
def test_means_are_those_of_unscaled_and_clipped_gradients(backend, max_norm, dtype, options):
    ampopt.set_backend(backend)
    params = params_of(SHAPES, dtype)
    optimizer = OfLines(groups_of(params), **options)
    for i in range(STEPS):
        step(optimizer, params, i, max_norm=max_norm)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for p, expected in zip(params, reference(dtype, max_norm), strict=True):
        state = optimizer.state[p]
        exact = {"p": state.get("master_param", p.detach()), **state}
        for name, value in expected.items():
            torch.testing.assert_close(
                exact[name].double(), value, rtol=tolerance, atol=tolerance, msg=name
            )
        if p.ndim > 1:
            assert state["by_row"].shape == (*p.shape[:-1], 1)
            assert state["by_column"].shape == (*p.shape[:-2], 1, p.shape[-1])
            assert state["by_column"].dtype == torch.float64
            assert p.numel() or not state["by_column"].any()
        else:
            assert state.keys() - {"master_param"} == {"average"}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_skip_changes_no_bit_and_a_run_repeats_itself(backend):
    ampopt.set_backend(backend)
    assert_a_skip_changes_no_bit(lambda params: OfLines(groups_of(params)), SHAPES)


def test_on_a_device_a_skip_is_selected():
    from ampopt_kernels.eager import Eager
    from ampopt_kernels.row_column_means import RowColumnMeans
    from ampopt_kernels.step import run
    from ampopt_kernels.step_data import Request
    from ampopt_kernels.step_tensors import ParamRow, Work

    p, average = torch.ones(2, 3), torch.zeros(2, 3)
    states = [torch.full((2, 1), 0.5), torch.zeros(1, 3)]
    means = RowColumnMeans(RULE.averages_for((False, False)), states, (2, 3))
    row = ParamRow(p.dtype, p, (average,), flags=(False, False), row_column_means=means)
    for bad, kept in ((float("inf"), True), (0.0, False)):
        before = [t.clone() for t in (p, average, *states)]
        work = Work(p.device, [row], [torch.full((2, 3), 1.0 + bad)], RULE, [[0.25, 0.75]])
        run(lambda _: Eager(), [work], Request())
        same = [torch.equal(a, b) for a, b in zip(before, (p, average, *states), strict=True)]
        assert same == [kept] * 4


@pytest.mark.skipif("compiled" not in BACKENDS, reason="there is no C++ compiler here")
@pytest.mark.parametrize("shape", [(3, 5000), (5000, 3), (700, 5, 3), (1, 1), (2, 65_600)])
def test_compiled_steps_are_eager_steps_within_rounding(shape):
    """With rows that are longer, and shorter, than the pieces that the loops work on."""
    ends = []
    for backend in ("eager", "compiled"):
        ampopt.set_backend(backend)
        p = Parameter(torch.linspace(-3, 1, torch.Size(shape).numel()).reshape(shape))
        optimizer = OfLines([p])
        for i in range(2):
            step(optimizer, [p], i)
        ends.append([p.detach(), *optimizer.state[p].values()])
    torch.testing.assert_close(*ends, rtol=1e-6, atol=1e-6)


@jit
def _without_sums(s, h, flags, sums):
    return s, h


class Alike(OfLines):
    """A rule whose ``update`` gets the same hyperparameters for all rows."""

    rule = replace(RULE, scalars=_without_sums)


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "triton"])
@pytest.mark.parametrize(
    ("cls", "dtype", "options"),
    [
        (OfLines, torch.float32, {}),
        (Alike, torch.float32, {}),
        (OfLines, torch.float64, {}),
        (OfLines, torch.bfloat16, {"master_weights": True}),
        (ampopt.Adafactor, torch.float32, {}),
        (ampopt.Adafactor, torch.bfloat16, {"param_rounding": "stochastic"}),
    ],
    ids=str,
)
def test_no_bit_depends_on_what_a_matrix_is_bundled_with(backend, cls, dtype, options):
    """Small matrices of one shape are stacked if they have gradients in the same step."""
    ampopt.set_backend(backend)
    shapes = [*[(33, 30)] * 5, (30, 33), *[(2, 3, 9)] * 4, (33, 30), (33,), (3, 2, 9)]
    lacking = {1: {2}, 2: {0, 6}}
    ends = []
    for together in (True, False):
        params = params_of(shapes, dtype)
        for i, p in enumerate(params):
            p.data.mul_(1 + i / 7)
        groups = [{"params": params[:3], "lr": 0.3}, {"params": params[3:]}]
        optimizer = cls(groups, **options)
        for i in range(4):
            present = [p for k, p in enumerate(params) if k not in lacking.get(i, ())]
            for some in [present] if together else [[p] for p in present]:
                optimizer.zero_grad()
                step(optimizer, some, i)
        ends.append([t for p in params for t in (p.detach(), *optimizer.state[p].values())])
    assert all(map(torch.equal, *ends))


def test_no_bit_of_long_matrices_depends_on_how_many_there_are():
    """Torch divides one long mean among threads, but not those of several."""
    ampopt.set_backend("eager")
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        # With this seed, the two means differ by enough to be seen in the parameters.
        values = torch.randn(40000, 1, generator=torch.Generator().manual_seed(9))
        params = [Parameter(values.clone()) for _ in range(6)]
        for some in (params[:1], params[1:]):
            for p in some:
                p.grad = values.roll(1)
            ampopt.Adafactor(some, lr=1.0).unscale_and_step(grads_scaled_by=1.0)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(p, params[0]) for p in params)


@pytest.mark.parametrize("backend", BACKENDS)
def test_layouts_change_no_bit(backend):
    ampopt.set_backend(backend)
    values = torch.linspace(-1, 2, 35).reshape(7, 5)
    params = [Parameter(values.clone()), Parameter(values.mT.contiguous().mT)]
    for p in params:
        optimizer = OfLines([p])
        for i in range(2):
            step(optimizer, [p], i)
    assert params[1].stride() == (1, 7)
    assert torch.equal(*params)


def test_vectors_and_complex_matrices_are_refused():
    class Careless(OfLines):
        rule = replace(RULE, entries=lambda group, ndim, dtype: {"vector": False})

    p = Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    message = r"averages over rows and columns, .* has shape \(3,\)"
    with pytest.raises(RuntimeError, match=message):
        Careless([p]).step()
    p = Parameter(torch.ones(2, 3, dtype=torch.complex64))
    p.grad = torch.ones_like(p)
    optimizer = OfLines([p])
    with pytest.raises(RuntimeError, match="does not support complex parameters"):
        optimizer.step()
    assert not optimizer.state and p.eq(1).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_averages_need_no_state_and_no_reduce(backend):
    ampopt.set_backend(backend)
    shapes = [(3, 4), (4,), (2, 3, 4), (0, 4), (3, 4)]
    params = params_of(shapes, torch.float32)
    expected, optimizer = [p.detach().double() for p in params], Centered(params)
    for i, bad in enumerate((0.0, float("inf"), 0.0)):
        step(optimizer, params, i, bad=bad)
        for k, p in enumerate(expected if not bad else ()):
            g = gradient(p, i).float().double()
            g = g - g.mean(-1, keepdim=True) if g.ndim > 1 else g
            expected[k] = p - 0.5 / (1 if i == 0 else 2) * g
    for p, values in zip(params, expected, strict=True):
        torch.testing.assert_close(p.detach().double(), values, rtol=1e-6, atol=1e-6)
        assert optimizer.state[p].keys() == {"step"} and optimizer.state[p]["step"] == 2


def whole_gradient(p: torch.Tensor, i: int) -> torch.Tensor:
    """Whole numbers, so that sums, in whatever order, are exact; larger in some places."""
    places = torch.arange(p.numel())
    return ((places * (7 + i) % 11 - 5) * 2 ** (places // 60 % 7)).to(p.dtype).view(p.shape)


@jit
def _gradient(p, g, state, h, flags):
    return (g,)


@jit
def _shrunk(p, g, state, h, flags):
    return p - 0.5 * (g - state[0]), ()


class Fixed(ampopt.ElementwiseOptimizer):
    """:class:`Centered` with a learning rate that is a number of the rule."""

    rule = Rule(update=_shrunk, averages=_gradient, averages_over=("rows",), hyper=())

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rule_that_averages_may_have_no_numbers(backend):
    ampopt.set_backend(backend)
    p = Parameter(torch.zeros(1, 2))
    p.grad = torch.tensor([[1.0, 3.0]])
    Fixed([p]).unscale_and_step(grads_scaled_by=1.0)
    assert p.tolist() == [[0.5, -0.5]]


@pytest.mark.parametrize("bits, masters", [(32, True), (16, False), (8, True), (8, False)])
def test_states_beside_means_are_kept_in_few_bits_alike_on_every_backend(bits, masters):
    """Also where a row, or a thread's part of the rows, begins within a block of codes."""
    dtype: torch.dtype = torch.bfloat16 if masters else torch.float32
    options: dict[str, Any] = {"master_weights": True, "master_bits": 24} if masters else {}
    ends = []
    for backend in BACKENDS:
        ampopt.set_backend(backend)
        params = params_of([(70, 130), (3, 50, 63), (8192,), (5, 7)], dtype)
        optimizer = Damped(params, state_bits=bits, **options)
        for i, bad in enumerate((0.0, float("nan"), 0.0)):
            before = copy.deepcopy(optimizer.state_dict()["state"])
            for p in params:
                p.grad = whole_gradient(p, i) + bad
            optimizer.unscale_and_step(grads_scaled_by=1.0)
            after = optimizer.state_dict()["state"]
            same = [torch.equal(x, after[k][n]) for k in before for n, x in before[k].items()]
            assert all(same) == (bad != 0.0 or i == 0)
        ends.append([t for p in params for t in (p.detach(), *optimizer.state[p].values())])
        for p, state in ((p, optimizer.state[p]) for p in params[:2]):
            full = torch.float32 if options else dtype
            # Beside exact means, a signed state keeps the digits of bfloat16.
            few = {32: (full, full), 16: (BF16, BF16), 8: (BF16, torch.uint8)}[bits]
            assert (state["momentum"].dtype, state["square"].dtype) == few
            assert state["row_mean"].dtype == full and state["row_mean"].shape == (*p.shape[:-1], 1)
    for end in ends[1:]:
        assert all(map(torch.equal, ends[0], end))


@pytest.mark.parametrize("bits", [16, 8])
def test_few_bits_train_as_32_do(bits):
    ends = []
    for own in (32, bits):
        (p,) = params_of([(96, 96)], torch.float32)
        optimizer = Damped([p], lr=0.125, state_bits=own)
        for i in range(50):
            p.grad = p.detach() + whole_gradient(p, i) / 64
            optimizer.unscale_and_step(grads_scaled_by=1.0)
        ends.append(p.detach())
    assert (ends[1] - ends[0]).norm() < 0.05 * ends[0].norm()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"averages": None}, "lacks averages"),
        ({"factors": None}, "lacks factors"),
        ({"state": (State("average"),)}, r"averages_over must be a tuple .*got \(\)"),
        (
            {"averages": None, "state": (), "factors": None, "averages_when": "mixed"},
            "lacks averages",
        ),
        ({"averages_over": "rows"}, "such as .*, got 'rows'"),
        ({"averages_over": ("row",)}, r"'rows' or 'columns', .*got \('row',\)"),
        ({"averages_when": "not vector"}, "averages_over must be a tuple"),
        ({"averages": lambda p, g, state, h, flags: (g,)}, "averages must be a function marked"),
    ],
)
def test_declarations_that_lack_a_part_are_refused(changes, message):
    with pytest.raises(TypeError, match=message):
        replace(RULE, **changes)


@pytest.mark.parametrize(
    ("given", "message"),
    [({"shape": "diagonal"}, "choose 'rows' or 'columns'"), ({"init": "param"}, "init='param'")],
)
def test_states_that_cannot_be_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        State("s", **{"shape": "rows", **given})
    with pytest.raises(ValueError, match="is a scalar"):
        replace(RULE, scalar_state=(State("s", shape="rows"),))


@jit
def _one_term(p, g, state, h, flags):
    return (g * g,)


@jit
def _summed(p, g, state, h, flags):
    return (g.sum(), g)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"averages": _one_term}, r"returned 1 terms, .* averaged over \('rows', 'columns'\)"),
        ({"averages": _summed}, r"g.sum\(\).*A rule is elementwise"),
        ({"factors": lambda means, state, h, flags: (means, means[:1])}, r"factors .*\(2, 1\)\]"),
        ({"factors": lambda means, state, h, flags: (means, (1.0, 1.0))}, r"\['float', 'float'\]"),
        (
            {"factors": lambda means, state, h, flags: (means, h[9])},
            r"test_row_column_means.py:\d+.*h\[9\]",
        ),
        ({"factors": lambda means, state, h, flags: means[::-1]}, r"returned states of the shapes"),
        ({"factors": lambda m, state, h, flags: (m, (m[0] / m[0].mean(), m[1]))}, "in a stack"),
        ({"factors": lambda m, state, h, flags: (m, (torch.ones(2, 1), m[1]))}, "in a stack"),
        ({"factors": lambda m, state, h, flags: (m, (m[0].add_(1.0), m[1]))}, "in place"),
        ({"factors": lambda m, s, h, flags: ((s[0].lerp_(m[0], 0.5), s[1]), m)}, "in place"),
    ],
)
def test_functions_that_give_something_else_are_refused_before_the_first_step(changes, message):
    class Wrong(OfLines):
        rule = replace(RULE, **changes)

    p = Parameter(torch.ones(2, 3))
    p.grad = torch.ones(2, 3)
    optimizer = Wrong([p])
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert not optimizer.state and p.eq(1).all()
