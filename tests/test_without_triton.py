"""ampopt without Triton, and without a C++ compiler."""

import os

import pytest
from support.preloaded import python_path

MISSING = """
import importlib.abc, sys

class Without(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Without())
"""

BROKEN = """
import importlib.abc, importlib.util, sys

class Broken(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            return importlib.util.spec_from_loader(name, self)

    def exec_module(self, module):
        raise ImportError("libtriton.so: cannot open shared object file")

sys.meta_path.insert(0, Broken())
"""

TRAINING = """
import torch

import ampopt

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = ampopt.AdamW(model.parameters(), lr=0.1)
scale = ampopt.DynamicLossScale(init_scale=2.0**126, growth_interval=10)
x = torch.randn(64, 4)
y = x.sum(dim=1, keepdim=True) * 100
losses, skips = [], 0
for _ in range(50):
    loss = torch.nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    ampopt.scale_outputs(loss, scale).backward()
    result = optimizer.unscale_and_step(grads_scaled_by=scale)
    losses.append(loss.item())
    skips += result.skipped
    scale = result.scale
assert 0 < skips < 40, skips
assert losses[-1] < losses[0], losses
assert ampopt.get_backend() == "auto"

try:
    ampopt.set_backend("triton")
except RuntimeError as error:
    print(error)
else:
    raise SystemExit("set_backend('triton') should have failed")
assert ampopt.get_backend() == "auto"

ampopt.set_backend("eager")
optimizer.zero_grad()
torch.nn.functional.mse_loss(model(x), y).backward()
assert not optimizer.unscale_and_step(grads_scaled_by=1.0).skipped
"""


RULES = """
import inspect

import torch

import ampopt
from ampopt_kernels import Rule, State, jit, tl

@jit
def update(p, g, state, h, flags):
    (lr,) = h
    mean = state[0] + 0.5 * (g - state[0])
    return p - lr * tl.where(mean > 0, 1.0, -1.0) * tl.sqrt(tl.abs(mean)), (mean,)

class Own(ampopt.ElementwiseOptimizer):
    rule = Rule(update=update, hyper=("lr",), state=(State("mean"),))

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

def is_rule(cls):
    return inspect.isclass(cls) and issubclass(cls, ampopt.ElementwiseOptimizer)

rules = [cls for cls in vars(ampopt).values() if is_rule(cls) and hasattr(cls, "rule")]
assert len(rules) >= 14
for cls in (*rules, Own):
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = cls([param], lr=0.1)
    for number in (float("inf"), 2.0, 4.0):
        before = param.detach().clone()
        param.grad = torch.full((3,), number)
        assert optimizer.unscale_and_step(grads_scaled_by=2.0).skipped == (number == float("inf"))
        assert torch.equal(param, before) == (number == float("inf")), cls
    twin = getattr(torch.optim, cls.__name__, None)
    if twin is not None:
        theirs = torch.nn.Parameter(torch.ones(3))
        reference = twin([theirs], lr=0.1)
        for number in (1.0, 2.0):
            theirs.grad = torch.full((3,), number)
            reference.step()
        assert torch.allclose(param, theirs, rtol=1e-6), cls
"""

WITHOUT_COMPILER = """
try:
    ampopt.set_backend("compiled")
except RuntimeError as error:
    print(error)
else:
    raise SystemExit("set_backend('compiled') should have failed")
"""


def settings():
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("TRITON_INTERPRET", "AMPOPT_BACKEND")
    }
    return {**kept, "PYTHONPATH": python_path()}


@pytest.fixture
def run(with_torch, tmp_path):
    """Runs code."""

    def run(code, **environment):
        return with_torch.run("-c", code, cwd=tmp_path, environment=settings() | environment)

    return run


@pytest.mark.parametrize("triton", [MISSING, BROKEN], ids=["missing", "broken"])
def test_trains_and_says_what_is_missing(run, triton):
    done = run(triton + TRAINING)
    assert done.returncode == 0, done.stderr
    assert "needs Triton, which cannot be imported here; install the triton package" in done.stdout


def test_every_rule_runs_without_triton_and_without_a_compiler(run, tmp_path):
    done = run(MISSING + RULES + WITHOUT_COMPILER, PATH=str(tmp_path), CXX="")
    assert done.returncode == 0, done.stderr
    assert "needs a C++ compiler, and neither CXX nor g++ nor clang++ names one" in done.stdout


def test_a_compiler_that_does_not_work_is_an_error_under_compiled(run, tmp_path):
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\necho cannot compile >&2\nexit 1\n")
    broken.chmod(0o755)
    code = "\n".join(
        [
            "import ampopt, torch",
            "param = torch.nn.Parameter(torch.ones(3))",
            "param.grad = torch.ones(3)",
            "optimizer = ampopt.SGD([param], lr=0.5)",
            "try:",
            "    optimizer.step()",
            "except RuntimeError as error:",
            "    print(error)",
            "assert param.tolist() == [1.0] * 3",
            "ampopt.set_backend('eager')",
            "optimizer.step()",
            "assert param.tolist() == [0.5] * 3",
        ]
    )
    folder = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    done = run(MISSING + code, AMPOPT_BACKEND="compiled", CXX=str(broken), **folder)
    assert done.returncode == 0, done.stderr
    assert "the compiled backend needs a working C++ compiler" in done.stdout


def test_a_backend_that_cannot_run_named_in_the_environment_fails_at_the_first_step(run):
    code = MISSING + "import ampopt\nampopt.get_backend()\n"
    done = run(code, AMPOPT_BACKEND="triton")
    assert done.returncode == 1
    assert "RuntimeError: AMPOPT_BACKEND: the triton backend needs Triton" in done.stderr
