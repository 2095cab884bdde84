"""Invariant: a rule compiles for GPUs that the testing machine does not have."""

import itertools
import unittest
from typing import Any

import torch
from torch.nn import Parameter

import ampopt
from ampopt._step.hyperparameters import kind_of
from ampopt.testing.claims import Claims
from ampopt.testing.making import maker
from ampopt_kernels.check_rule.by_triton import TARGETS, can_compile_for, compile_for

__all__ = ["Compilation"]


class Compilation(Claims):
    """Invariants of update rules."""

    def test_its_rule_compiles_for_gpus(self) -> None:
        """The rule, with the flags that ``make`` sets, compiles for sm_80, sm_90 and gfx942.

        Needs Triton, but no GPU. A rule that only runs on CPUs would fail late, in the first step
        on a cluster.
        """
        params = [Parameter(torch.ones(1, 1)), Parameter(torch.ones(1))]
        optimizer: Any = maker(self, {})(params[:1])  # Muon takes matrices only
        if not isinstance(optimizer, ampopt.ElementwiseOptimizer):
            raise unittest.SkipTest("not a rule")
        rule, (group,) = optimizer.rule, optimizer.param_groups
        if rule.update.fn.__module__.startswith("ampopt_kernels.rules."):
            raise unittest.SkipTest(
                "a rule of ampopt's own, which its tests compile with all flags"
            )
        targets = [target for target in TARGETS if can_compile_for(target)]
        if not targets:
            raise unittest.SkipTest("Triton cannot be imported here, or compiles for none of these")
        every = {rule.flag_values(group, kind_of(group, param)) for param in params}
        n_hyper = len(rule.hyper_values(group))
        for flags, target in itertools.product(every, targets):
            compile_for(target, rule, flags, n_hyper, type(optimizer).__name__)
