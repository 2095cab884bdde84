"""torch's own table of optimizers and options, and trainings to compare with torch."""

import importlib.machinery
import importlib.util
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import hypothesis
import numpy as np
import torch
from torch import Tensor

import ampopt
from support.optimizers import BY_RULE, BY_TORCHS_STEP

__all__ = [
    "ELEMENTWISE",
    "INHERITED",
    "OPTION_SETS",
    "RICH",
    "ULPS",
    "Distance",
    "OptionSet",
    "assert_train_alike",
    "give",
    "gradients",
    "initial",
    "named",
    "params_of",
    "spoiled",
]


def _optim_db() -> list[Any]:
    """Import ``torch.testing._internal.common_optimizers.optim_db`` without side effects."""
    if importlib.util.find_spec("expecttest") is None:
        # torch's test utilities import it for golden files, which the table does not use.
        stub: Any = types.ModuleType("expecttest")
        stub.__spec__ = importlib.machinery.ModuleSpec("expecttest", None)
        stub.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stub
    ours = hypothesis.settings()
    # The table needs DecorateInfo from this module, whose own table of operators takes seconds to
    # import. A stub is enough.
    operators = "torch.testing._internal.common_methods_invocations"
    stands_in = sys.modules.setdefault(operators, types.ModuleType(operators))
    stands_in.__dict__.setdefault("DecorateInfo", lambda *args, **kwargs: None)
    with warnings.catch_warnings():  # where there is a GPU, torch imports numba, which warns
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_optimizers import optim_db

    if not hasattr(stands_in, "op_db"):
        del sys.modules[operators]
    # The import loads a Hypothesis profile, which would change the examples of later files.
    hypothesis.settings.register_profile("ours", ours)
    hypothesis.settings.load_profile("ours")
    # The import makes torch.backends read-only, which only torch's own tests want.
    torch.backends.__dict__["__allow_nonbracketed_mutation_flag"] = True
    return optim_db


@dataclass(frozen=True)
class OptionSet:
    """An optimizer's name, with options.

    Attributes:
        name: name of the class, in ``ampopt`` and ``torch.optim``.
        what: the options as text.
        options: keyword arguments.
        implementations: names of options that choose torch's implementation.
        complex: whether torch takes complex parameters.
    """

    name: str
    what: str
    options: dict[str, Any] = field(default_factory=dict)
    implementations: tuple[str, ...] = ()
    complex: bool = True

    def __str__(self) -> str:
        """The text in a test's id."""
        return f"{self.name} {self.what}"

    def ours(self, params: Any, **changed: Any) -> Any:
        """Make ampopt's optimizer."""
        return getattr(ampopt, self.name)(params, **{**self._options(params), **changed})

    def torchs(self, params: Any, **changed: Any) -> torch.optim.Optimizer:
        """Make torch's for-loop optimizer."""
        for_loop = {k: False for k in ("foreach", "fused") if k in self.implementations}
        options = {**self._options(params), **for_loop, **changed}
        return getattr(torch.optim, self.name)(params, **options)

    def __repr__(self) -> str:
        """The text that Hypothesis prints."""
        return f"<{self}: {self.options}>"

    def _options(self, params: Any) -> dict[str, Any]:
        # Each optimizer gets its own copy of a tensor among the options. It has the parameters'
        # dtype, because torch computes with it in its own dtype.
        first = params[0]["params"][0] if isinstance(params[0], dict) else params[0]
        dtype = first.dtype.to_real() if first.dtype.is_complex else first.dtype
        return {
            k: v.to(dtype, copy=True) if isinstance(v, Tensor) else v
            for k, v in self.options.items()
        }

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of parameters that the optimizer takes."""
        return {"Muon": [(3, 5), (4, 2)], "SparseAdam": [(5, 3), (4,)]}.get(self.name, [(3, 5), ()])


ULPS = 16.0
"""Tolerance of :class:`Distance`. torch's kernels fuse multiply-adds in other places than a rule.

Measured: 9, and 13 where decay cancels a gradient.
"""

_DB = {info.name: info for info in _optim_db()}

# Missing in torch's table: betas below 0.5 (torch.lerp uses another formula there), betas too small
# for RAdam to rectify, ASGD's averaging, and epsilons as large as Adafactor's gradients.
_MORE: list[tuple[str, str, dict[str, Any]]] = [
    ("SGD", "everything", {"momentum": 0.9, "nesterov": True, "maximize": True}),
    ("Adafactor", "large epsilons", {"eps": (0.03, 0.5)}),
    ("Adam", "short averages", {"betas": (0.25, 0.5)}),
    ("Adam", "decoupled_weight_decay", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("AdamW", "everything", {"amsgrad": True, "maximize": True, "lr": 0.1}),
    ("Adamax", "short averages", {"betas": (0.25, 0.5)}),
    ("NAdam", "short averages", {"betas": (0.25, 0.5), "momentum_decay": 0.5, "lr": 0.1}),
    ("RAdam", "short averages", {"betas": (0.25, 0.6), "lr": 0.1}),
    ("RAdam", "rectified early", {"betas": (0.9, 0.9), "lr": 0.1}),
    ("RMSprop", "short averages", {"alpha": 0.25, "centered": True, "momentum": 0.5}),
    ("Rprop", "odd etas", {"etas": (0.3, 1.7), "step_sizes": (1e-3, 0.05)}),
    ("ASGD", "averaging", {"t0": 2, "lambd": 0.1, "alpha": 0.5, "lr": 0.3}),
]


def _option_sets() -> Iterator[OptionSet]:
    for name, info in _DB.items():
        option_sets = [(i.desc, i.kwargs) for i in info.optim_inputs_func(device="cpu")]
        option_sets += [(what, options) for n, what, options in _MORE if n == name]
        for what, options in option_sets:
            yield OptionSet(name, what, options, info.supported_impls, info.supports_complex)


OPTION_SETS: list[OptionSet] = list(_option_sets())

ELEMENTWISE = [cls.__name__ for cls in BY_RULE]
"""Names of the optimizers with an update rule."""

INHERITED = [cls.__name__ for cls in BY_TORCHS_STEP]
"""Names of the optimizers that use torch's step, except for LBFGS."""


def named(name: str, what: str = "default") -> OptionSet:
    """The option set with that name and text."""
    return next(s for s in OPTION_SETS if (s.name, s.what) == (name, what))


def gradients(
    options: OptionSet, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Callable[[], list[Tensor]]:
    """Return a function that draws the gradients of the next step: many magnitudes, some zeros."""
    random = np.random.default_rng(seed)

    def values(shape: tuple[int, ...]) -> Tensor:
        drawn = random.standard_normal((2, *shape)) * 10.0 ** random.integers(-3, 2, shape)
        drawn = drawn * (random.random(shape) > 0.1)
        real, imaginary = torch.tensor(drawn, dtype=torch.float64)
        return (torch.complex(real, imaginary) if dtype.is_complex else real).to(dtype)

    def sparse(shape: tuple[int, ...]) -> Tensor:
        rows = random.integers(0, shape[0], 4)  # duplicate indices, to be summed
        return torch.sparse_coo_tensor(
            torch.tensor(rows)[None], values((4, *shape[1:])), shape, check_invariants=True
        )

    make = sparse if options.name == "SparseAdam" else values
    return lambda: [make(shape) for shape in options.shapes]


RICH = [
    named("Adadelta", "rho"),
    named("Adafactor", "nonzero weight_decay"),
    named("Adagrad", "lr_decay"),
    named("Adam", "amsgrad"),
    named("AdamW", "amsgrad"),
    named("Adamax", "nonzero weight_decay"),
    named("ASGD", "averaging"),
    named("Muon", "non-default momentum"),
    named("NAdam", "weight_decay, momentum_decay"),
    named("RAdam", "rectified early"),
    named("RMSprop", "momentum"),
    named("Rprop", "odd etas"),
    named("SGD", "nesterov"),
    named("SparseAdam", "maximize"),
]
"""One option set of each optimizer, with all the state that it can have."""


def initial(options: OptionSet, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Initial parameters, the same each time."""
    return [g.to_dense() for g in gradients(options, dtype, seed=99)()]


def give(
    optimizer: torch.optim.Optimizer, grads: Sequence[Tensor | None], scale: float = 1.0
) -> None:
    """Set the gradients of the parameters, multiplied by ``scale``."""
    for p, g in zip(params_of(optimizer), grads, strict=True):
        p.grad = None if g is None else g * scale


def spoiled(grads: list[Tensor]) -> list[Tensor]:
    """Copy the gradients, with one infinite element."""
    bad = grads[-1].clone()
    (bad._values() if bad.is_sparse else bad).view(-1)[-1] = float("inf")
    return [*grads[:-1], bad]


class Distance:
    """Measures the distance of results in ulps of the largest magnitude that each element has had.

    The current magnitude may be much smaller, because sums cancel.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Start with the magnitudes of the optimizer's parameters."""
        self._largest: dict[Any, Tensor] = {}
        for index, p in enumerate(params_of(optimizer)):
            self._ulps(("parameter", index), p, p)

    def _ulps(self, key: Any, actual: Tensor, expected: Tensor) -> float:
        """The largest distance of an element; ``key`` identifies the tensor over the steps."""
        assert actual.dtype == expected.dtype, key
        assert actual.shape == expected.shape, key
        eps = torch.finfo(expected.dtype).eps
        actual, expected = (
            (torch.view_as_real(t) if t.is_complex() else t).detach().double()
            for t in (actual, expected)
        )
        assert torch.equal(actual.isnan(), expected.isnan()), key
        actual, expected = actual.nan_to_num(), expected.nan_to_num()
        largest = expected.abs()
        if key in self._largest:
            largest = torch.maximum(largest, self._largest[key])
        self._largest[key] = largest
        distance = (actual - expected).abs() / (largest * eps).clamp_min(1e-300)
        return distance.max().item() if distance.numel() else 0.0

    def of_optimizers(
        self, ours: torch.optim.Optimizer, torchs: torch.optim.Optimizer
    ) -> dict[str, float]:
        """Distances of parameters and states, by name. Fails if ``ours`` lacks a state."""
        worst: dict[str, float] = {}

        def note(name: str, index: int, actual: Tensor, expected: Tensor) -> None:
            distance = self._ulps((name, index), actual, expected)
            worst[name] = max(distance, worst.get(name, 0.0))

        pairs = zip(params_of(ours), params_of(torchs), strict=True)
        for index, (p, q) in enumerate(pairs):
            note("parameter", index, p, q)
            for name, expected in torchs.state.get(q, {}).items():
                actual = ours.state[p][name]
                if expected is None:
                    assert actual is None
                elif isinstance(expected, Tensor):
                    note(name, index, actual, expected)
                else:
                    assert actual == expected, name
        return worst


def assert_train_alike(
    ours: Any,
    torchs: torch.optim.Optimizer,
    source: Any,
    steps: range,
    ulps: float = ULPS,
    apart: Distance | None = None,
) -> None:
    """Take the same steps with both optimizers, and check that they stay within ``ulps``."""
    apart = Distance(torchs) if apart is None else apart
    for step in steps:
        grads = source()
        give(ours, grads)
        give(torchs, grads)
        ours.step()
        torchs.step()
        for name, distance in apart.of_optimizers(ours, torchs).items():
            assert distance <= ulps, f"{name} is {distance:g} ulp from torch's at step {step}"


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters of all groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]
