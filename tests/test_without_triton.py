"""What is promised where Triton cannot be imported: everything, more slowly."""

import os
import subprocess
import sys

import pytest

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


def run(code, **environment):
    settings = {
        name: value
        for name, value in os.environ.items()
        if name not in ("TRITON_INTERPRET", "AMPOPT_BACKEND")
    }
    settings["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=settings | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize("triton", [MISSING, BROKEN], ids=["missing", "broken"])
def test_trains_and_says_what_is_missing(triton):
    done = run(triton + TRAINING)
    assert done.returncode == 0, done.stderr
    assert "needs Triton, which cannot be imported here; install the triton package" in done.stdout


def test_asked_for_in_the_environment_it_is_an_error_at_the_first_step():
    code = MISSING + "import ampopt\nampopt.get_backend()\n"
    done = run(code, AMPOPT_BACKEND="triton")
    assert done.returncode == 1
    assert "RuntimeError: AMPOPT_BACKEND: the triton backend needs Triton" in done.stderr
