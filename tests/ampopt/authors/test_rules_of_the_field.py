"""Of the fifteen most used optimizers that torch lacks, all but one are a rule of 40 lines."""

import ast
import inspect
import re
from typing import Any

import numpy as np
import pytest
import pytorch_optimizer
import torch
from support.short_rules import SHORT
from torch.nn import Parameter

import ampopt

FIFTEEN = [
    *("Lion", "Adan", "Sophia", "ScheduleFreeAdamW", "LAMB", "LARS", "NovoGrad", "AdaBelief"),
    *("Tiger", "SignSGD", "AdEMAMix", "QHAdam", "Yogi", "AdaMod", "Prodigy"),
]
OPTIMIZERS: dict[str, Any] = {name: SHORT.get(name) or getattr(ampopt, name) for name in FIFTEEN}


def lines_of(rule: Any) -> int:
    """The number of lines of a rule and of the functions of its file that it calls.

    Docstrings do not count.
    """
    functions = {rule.update.fn, rule.scalars.fn, rule.before_reduce.fn}
    functions |= {rule.reduce.fn} if rule.reduces else set()
    module = inspect.getmodule(rule.update.fn)
    assert module is not None
    names = {name for fn in functions for name in fn.__code__.co_names}
    globals_: dict[str, Any] = vars(module)
    functions |= {globals_[name].fn for name in names if hasattr(globals_.get(name), "fn")}
    own = [fn for fn in functions if fn.__module__ == module.__name__]
    declared = [
        node
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Assign)
        and re.search(rf"\bupdate={rule.update.fn.__name__}\b", ast.unparse(node))
    ]
    (declaration,) = declared
    assert declaration.end_lineno is not None
    counted = [
        len(inspect.getsource(fn).splitlines()) - len((fn.__doc__ or "").splitlines()) for fn in own
    ]
    return sum(counted) + declaration.end_lineno - declaration.lineno + 1


def test_all_but_one_are_a_rule_of_forty_lines():
    lines = {name: lines_of(cls.rule) for name, cls in OPTIMIZERS.items()}
    assert list(lines) == FIFTEEN
    assert [name for name, n in lines.items() if n > 40] == ["LAMB"], lines
    assert lines["LAMB"] <= 50  # with options that the guide's leaves out


def train(optimizer: Any, params: list[Parameter], steps: int, scale: float) -> None:
    random = np.random.default_rng(0)
    for _ in range(steps):
        for p in params:
            grad = p.detach().double() + torch.tensor(random.standard_normal(tuple(p.shape)))
            p.grad = (grad * scale).to(p.dtype)
        if scale == 1.0:
            optimizer.step()
        else:
            optimizer.unscale_and_step(grads_scaled_by=scale)


def initial(dtype: torch.dtype) -> list[Parameter]:
    values = torch.linspace(-2.0, 2.0, 7, dtype=dtype)
    return [Parameter(values[:6].reshape(2, 3).clone()), Parameter(values[6:].clone())]


@pytest.mark.parametrize("backend", ["eager", "triton", "compiled"], indirect=True)
@pytest.mark.parametrize("name", SHORT)
def test_a_short_rule_steps_as_another_implementation(name, backend):
    steps, dtype = (100, torch.float64) if backend == "eager" else (5, torch.float32)
    ours, theirs = initial(dtype), initial(torch.float64)
    optimizer = SHORT[name](ours)
    options = dict(optimizer.defaults)
    extra = {"weight_decouple": True} if "weight_decay" in options else {}
    if name == "Prodigy":
        *options["betas"], options["beta3"] = options["betas"]
    other = getattr(pytorch_optimizer, name)(theirs, **options, **extra, foreach=False)
    train(optimizer, ours, steps, 4.0)
    train(other, theirs, steps, 1.0)
    # There, sums and weights of these are float32.
    rtol = 1e-4 if name in ("Prodigy", "QHAdam") or dtype == torch.float32 else 1e-9
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.double(), q.double(), rtol=rtol, atol=rtol)


def test_a_short_rule_is_skipped_whole():
    param = Parameter(torch.ones(3))
    optimizer = SHORT["Prodigy"]([param])
    for number in (float("inf"), 1.0, float("nan")):
        param.grad = torch.full((3,), number)
        before = param.detach().clone()
        assert optimizer.unscale_and_step(grads_scaled_by=2.0).skipped == (number != 1.0)
        assert torch.equal(param, before) == (number != 1.0)
    assert float(optimizer.state[param]["d_numerator"]) == 0.0  # from where it began
