"""Property-test an optimizer: a wrong one, the example that shows it, and the right one.

Both are momentum as one would write it for a kernel of one's own. The step gets the overflow flag
and skips by itself, without the host looking. The wrong one makes its buffer from the first
gradient that it sees, as is usual, and a first step may overflow: the loss scale begins far too
high. What it leaves behind is infinite, and so is every parameter after the next step.

With the extra ``testing`` installed:

    python examples/property_test_your_optimizer.py
"""

import contextlib
import io
import re
import sys

import hypothesis
import pytest
import torch
from torch import Tensor

import ampopt
from ampopt.testing import OptimizerContract


class Wrong(ampopt.Optimizer):
    """Momentum that skips by itself, but for what it does first."""

    skip_by = "step"  # the step is handed the flag, as self.found_inf

    def __init__(self, params, lr=0.1, momentum=0.5):
        """As torch's optimizers."""
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        """Step, or skip where ``found_inf`` is more than 0."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        skip = False if self.found_inf is None else self.found_inf > 0
        skip = torch.as_tensor(skip)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, skip, group)
        return loss

    def update(self, p: Tensor, g: Tensor, skip: Tensor, group: dict):
        """One parameter's part of the step."""
        state = self.state[p]
        if not state:
            state["buffer"] = g.clone()
            new = state["buffer"]
        else:
            new = group["momentum"] * state["buffer"] + g
        state["buffer"].copy_(torch.where(skip, state["buffer"], new))
        p.copy_(torch.where(skip, p, p - group["lr"] * new))


class Right(Wrong):
    """The same, beginning from zeros, which a step that is skipped leaves as they are."""

    def update(self, p: Tensor, g: Tensor, skip: Tensor, group: dict):
        """One parameter's part of the step."""
        state = self.state[p]
        if not state:
            state["buffer"] = torch.zeros_like(p)
        new = group["momentum"] * state["buffer"] + g
        state["buffer"].copy_(torch.where(skip, state["buffer"], new))
        p.copy_(torch.where(skip, p, p - group["lr"] * new))


class TestWrong(OptimizerContract):
    """This is all that a test file needs: pytest collects the class."""

    settings = hypothesis.settings(max_examples=10)  # few, so that this page is quick

    def make(self, params):
        """The optimizer of these parameters, or groups."""
        return Wrong(params)


class TestRight(OptimizerContract):
    """What it claims beyond the ordinary is tested as well."""

    sync_free = True
    settings = hypothesis.settings(max_examples=5)

    def make(self, params):
        """The optimizer of these parameters, or groups."""
        return Right(params)


def report_of_pytest() -> str:
    """What pytest says of this file."""
    options = ["-q", "-rpf", "--tb=short", "-p", "no:cacheprovider", "--assert=plain"]
    # Sequences of calls find what is wrong, too, but to make a sequence small takes a minute.
    selected = ["--hypothesis-seed=0", "-k", "TestRight or not any_sequence", __file__]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        pytest.main([*options, *selected])
    return said.getvalue()


def main() -> None:
    """Test both, and show what there is to see."""
    report = report_of_pytest()

    def invariants(outcome: str, name: str) -> list[str]:
        return sorted(re.findall(rf"^{outcome} \S+::{name}::(\w+)", report, re.MULTILINE))

    failed = invariants("FAILED", "TestWrong")
    print(f"Wrong fails {len(failed)} invariants:")
    for name in failed:
        print(f"  {name}")
    name = "test_training_goes_on_as_if_skipped_steps_had_never_been"
    section = report[report.index(f" TestWrong.{name} ") :]
    found = re.search(rf"def {name}_again\(\):\n(?:.*\n)*?.*    \)\n", section)
    print("\nThe smallest example of one of them, as code to paste beside the class:\n")
    print(re.sub(r"^E {0,3}", "", found[0] if found else section, flags=re.MULTILINE))
    passed, missed = invariants("PASSED", "TestRight"), invariants("FAILED", "TestRight")
    print(f"Right passes {len(passed)} invariants, and fails {len(missed)}")
    if not failed or missed or not passed:
        sys.exit("Wrong was to fail, and Right to pass")


if __name__ == "__main__":
    main()
