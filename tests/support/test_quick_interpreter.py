"""The patched interpreter of the tests gives the bits of Triton's."""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import ampopt
from ampopt.testing.bits import bits, everything
from ampopt_kernels.language import HAS_TRITON, INTERPRETED, kernel, tl
from ampopt_kernels.triton.compiler import compiler

pytestmark = pytest.mark.skipif(
    not (HAS_TRITON and INTERPRETED), reason="there is no interpreter here"
)


@contextlib.contextmanager
def plain_interpreter() -> Iterator[None]:
    """Undo the patches, and interpret kernels within the block as Triton does."""
    from triton.runtime import interpreter

    ours: Any = interpreter
    quick = ("_patch_attr", "_patch_lang", "_get_np_dtype")
    with pytest.MonkeyPatch.context() as patch, compiler():
        for name in quick:
            original = inspect.unwrap(getattr(ours, name))
            assert original.__module__ == ours.__name__
            patch.setattr(ours, name, original)
        init = inspect.unwrap(ours.TensorHandle.__init__)
        assert init is not ours.TensorHandle.__init__
        patch.setattr(ours.TensorHandle, "__init__", init)
        patch.setattr(ours.interpreter_builder, "options", ours.InterpreterOptions())
        yield


OPTIMIZERS: dict[str, Any] = {
    "sums, with masters": lambda p: ampopt.LAMB(p, master_weights=True),
    "rows and columns": ampopt.Adafactor,
    "flags, by chance": lambda p: ampopt.AdamW(
        p, amsgrad=True, maximize=True, param_rounding="stochastic"
    ),
}


def trained(make: Any) -> Any:
    """The bits of an optimizer, its scale and its watch after two steps: one skips, one clips."""
    torch.manual_seed(0)
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    params = [torch.nn.Parameter(torch.randn(3, 50).to(dtype)) for dtype in dtypes]
    optimizer = make(params)
    watch = ampopt.Watch(optimizer)
    scale: Any = ampopt.DynamicLossScale(init_scale=2.0**8)
    for step in range(1, 3):
        for p in params:
            p.grad = torch.randn_like(p)
            p.grad[0, 0] = float("inf") if step == 1 else -0.0
        clipped = {"max_norm": 1.0} if step > 1 else {}
        scale = optimizer.unscale_and_step(grads_scaled_by=scale, **clipped).scale
    return bits([everything(optimizer), scale.state_dict(), watch.state_dict()])


@pytest.mark.parametrize("backend", ["triton"], indirect=True)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_take_the_same_steps(backend, name):
    with plain_interpreter():
        expected = trained(OPTIMIZERS[name])
    for _ in range(2):  # the first time, the builder's calls are recorded
        assert trained(OPTIMIZERS[name]) == expected


NUMBERS = (0.0, -0.0, 1, 1.0, True, 1.5, -3, 2**31)
"""Some of them are equal in Python, and not for an operation: 0.0 and -0.0; 1, 1.0 and True."""
OPERATIONS: dict[str, Any] = {
    "multiply": lambda: tl.tensor.__mul__,
    "divide from": lambda: tl.tensor.__rtruediv__,
    "compare": lambda: tl.tensor.__le__,
    "maximum": lambda: tl.maximum,
    "convert": lambda: tl.cast,
    "broadcast two": lambda: tl.broadcast,
}


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_give_the_same(name, dtype):
    """Also for other tensors than those of the call that was recorded."""
    from triton.runtime import interpreter

    from support.remembered_operations import remembering

    ours: Any = interpreter
    constant: Any = tl.constexpr
    operation = OPERATIONS[name]()
    remembered = remembering(operation)

    def tensor(*numbers: int) -> Any:
        kind = getattr(tl, dtype)
        handle = ours.TensorHandle(torch.tensor(numbers).numpy().astype(dtype), kind)
        return tl.tensor(handle, tl.block_type(kind, [len(numbers)]))

    def given(operation: Any, *operands: Any, **named: Any) -> Any:
        try:
            results = operation(*operands, **named)
        except Exception as error:
            return str(error)
        results = results if isinstance(results, tuple) else [results]
        return [(x.type.name, x.dtype, list(x.shape), x.handle.data.tobytes()) for x in results]

    with compiler():
        for n in range(3):
            a, b = tensor(n, 1, 5, 7), tensor(1, n, 1, 9)
            constants = [constant(number) for number in NUMBERS]
            for other in (a, b, tensor(n), *NUMBERS, *constants, tl.float32, tl.int64):
                expected = given(operation, a, other, _semantic=ours.interpreter_semantic)
                assert given(remembered, a, other) == expected
                assert given(remembered, a, other) == expected


@kernel
def _spread(out, numbers):
    column = tl.load(numbers + tl.arange(0, 2))[:, None]
    tl.store(out + 4 * tl.arange(0, 2)[:, None] + tl.arange(0, 4)[None, :], column + column * 1)


def test_a_column_is_broadcast():
    out = torch.zeros(2, 4)
    _spread[(1,)](out, torch.tensor([1.0, 2.0]))
    assert out.tolist() == [[2.0] * 4, [4.0] * 4]


@pytest.mark.parametrize("n", [1, 2])
def test_an_atomic_add_is_done_once_in_each_program(n):
    """Also the first time, when the builder's calls are recorded."""

    @kernel
    def count(out):
        tl.atomic_add(out, 1.0)

    out = torch.zeros(1)
    for _ in range(n):
        count[(2,)](out)
    assert out.item() == 2 * n


def test_the_interpreters_own_replacements_are_put_in_and_taken_out():
    """At the first launch and at later ones; a call within a kernel replaces nothing again."""
    from triton.runtime import interpreter

    ours: Any = interpreter
    function = _spread.fn

    def replaced() -> list[Any]:
        scope = ours._patch_lang(function)
        changes = [(owner, name) for owner, name, _ in scope._changes]
        assert not ours._patch_lang(function)._changes
        scope.restore()
        return changes

    # The first puts back what ``tl.tensor`` had inherited, as an attribute of its own.
    replacements = [replaced()]
    before = dict(vars(tl)), dict(vars(tl.tensor))
    replacements += [replaced(), replaced()]
    with plain_interpreter():
        scope = ours._patch_lang(function)
        expected = [(owner, name) for owner, name, _ in scope._changes]
        scope.restore()
    assert replacements == [expected] * 3
    assert (dict(vars(tl)), dict(vars(tl.tensor))) == before
