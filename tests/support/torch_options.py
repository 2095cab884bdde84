"""torch's own table of optimizers and the options it tests them with, and trainings to compare."""

import importlib.util
import sys
import types
import unittest
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
    "Apart",
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
    """``torch.testing._internal.common_optimizers.optim_db``."""
    if importlib.util.find_spec("expecttest") is None:
        # torch's test utilities want it for golden files, of which the table has none.
        stub: Any = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stub
    ours = hypothesis.settings()
    # The table says by it which of torch's tests to skip, and it comes with a table of operators
    # that takes seconds to import: longer than all that is tested with.
    operators = "torch.testing._internal.common_methods_invocations"
    stands_in = sys.modules.setdefault(operators, types.ModuleType(operators))
    stands_in.__dict__.setdefault("DecorateInfo", lambda *args, **kwargs: None)
    from torch.testing._internal.common_optimizers import optim_db

    if not hasattr(stands_in, "op_db"):
        del sys.modules[operators]
    # Importing that loaded a Hypothesis profile, with other examples, for all files after this one.
    hypothesis.settings.register_profile("ours", ours)
    hypothesis.settings.load_profile("ours")
    # Importing that made torch.backends refuse to be set, which is for torch's own tests.
    torch.backends.__dict__["__allow_nonbracketed_mutation_flag"] = True
    return optim_db


@dataclass(frozen=True)
class OptionSet:
    """An optimizer by name, with options.

    Attributes:
        name: of the class, in ``ampopt`` and ``torch.optim``.
        what: the options in words.
        options: keyword arguments.
        implementations: names of options that choose how torch steps.
        complex: torch takes complex parameters.
    """

    name: str
    what: str
    options: dict[str, Any] = field(default_factory=dict)
    implementations: tuple[str, ...] = ()
    complex: bool = True

    def __str__(self) -> str:
        """The name of a test with it."""
        return f"{self.name} {self.what}"

    def ours(self, params: Any, **changed: Any) -> Any:
        """The optimizer under test."""
        return getattr(ampopt, self.name)(params, **{**self._options(params), **changed})

    def torchs(self, params: Any, **changed: Any) -> torch.optim.Optimizer:
        """torch's, stepping one tensor after another."""
        for_loop = {k: False for k in ("foreach", "fused") if k in self.implementations}
        options = {**self._options(params), **for_loop, **changed}
        return getattr(torch.optim, self.name)(params, **options)

    def __repr__(self) -> str:
        """What Hypothesis shows."""
        return f"<{self}: {self.options}>"

    def _options(self, params: Any) -> dict[str, Any]:
        # A tensor among the options is the optimizer's own. torch rounds with it at every step,
        # so it is given the parameters' dtype.
        first = params[0]["params"][0] if isinstance(params[0], dict) else params[0]
        dtype = first.dtype.to_real() if first.dtype.is_complex else first.dtype
        return {
            k: v.to(dtype, copy=True) if isinstance(v, Tensor) else v
            for k, v in self.options.items()
        }

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Of parameters that the optimizer takes."""
        return {"Muon": [(3, 5), (4, 2)], "SparseAdam": [(5, 3), (4,)]}.get(self.name, [(3, 5), ()])


ULPS = 16.0
"""Of :class:`Apart`, allowed: a rule rounds where torch's kernels fuse, and the other way round.

Measured, 9. Where decay cancels a gradient, 13.
"""

_DB = {info.name: info for info in _optim_db()}

# What torch's table leaves out: averages that forget fast (torch.lerp computes them from the
# other end), averages too short for RAdam to rectify, ASGD's averaging itself, and epsilons that
# Adafactor's small gradients meet.
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
        given = [(i.desc, i.kwargs) for i in info.optim_inputs_func(device="cpu")]
        given += [(what, options) for n, what, options in _MORE if n == name]
        for what, options in given:
            yield OptionSet(name, what, options, info.supported_impls, info.supports_complex)


OPTION_SETS: list[OptionSet] = list(_option_sets())

ELEMENTWISE = [cls.__name__ for cls in BY_RULE]
"""The names of the optimizers that are a rule."""

INHERITED = [cls.__name__ for cls in BY_TORCHS_STEP]
"""Those by inheritance, but for the one that needs closures."""


def named(name: str, what: str = "default") -> OptionSet:
    """The option set of that name."""
    return next(s for s in OPTION_SETS if (s.name, s.what) == (name, what))


def gradients(
    options: OptionSet, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Callable[[], list[Tensor]]:
    """A source of gradients for one step after the other, of many magnitudes, some of them 0."""
    random = np.random.default_rng(seed)

    def values(shape: tuple[int, ...]) -> Tensor:
        drawn = random.standard_normal((2, *shape)) * 10.0 ** random.integers(-3, 2, shape)
        drawn = drawn * (random.random(shape) > 0.1)
        real, imaginary = torch.tensor(drawn, dtype=torch.float64)
        return (torch.complex(real, imaginary) if dtype.is_complex else real).to(dtype)

    def sparse(shape: tuple[int, ...]) -> Tensor:
        rows = random.integers(0, shape[0], 4)  # some twice, to be added up
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
"""One option set of each optimizer, with all the state it can have."""


def initial(options: OptionSet, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Parameters: the same ones each time."""
    return [g.to_dense() for g in gradients(options, dtype, seed=99)()]


def give(
    optimizer: torch.optim.Optimizer, grads: Sequence[Tensor | None], scale: float = 1.0
) -> None:
    """Give the parameters these gradients times ``scale``."""
    for p, g in zip(params_of(optimizer), grads, strict=True):
        p.grad = None if g is None else g * scale


def spoiled(grads: list[Tensor]) -> list[Tensor]:
    """The same gradients, but for one infinite element."""
    bad = grads[-1].clone()
    (bad._values() if bad.is_sparse else bad).view(-1)[-1] = float("inf")
    return [*grads[:-1], bad]


class Apart:
    """How far results are apart, in units in the last place of what went into an element.

    Sums cancel, so the unit is that of the largest magnitude that the element has had.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Begin the history of the parameters and states of ``optimizer``."""
        self._largest: dict[Any, Tensor] = {}
        for index, p in enumerate(params_of(optimizer)):
            self._ulps(("parameter", index), p, p)

    def _ulps(self, key: Any, actual: Tensor, expected: Tensor) -> float:
        """The distance of the worst element of ``actual``; ``key`` says whose history it is."""
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
        """The distance of parameters and of each state; torch's states must all be there."""
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
    apart: Apart | None = None,
) -> None:
    """Both take the same steps, with gradients from ``source``, and stay within ``ulps``."""
    apart = Apart(torchs) if apart is None else apart
    for step in steps:
        grads = source()
        give(ours, grads)
        give(torchs, grads)
        ours.step()
        torchs.step()
        for name, distance in apart.of_optimizers(ours, torchs).items():
            assert distance <= ulps, f"{name} is {distance:g} ulp from torch's at step {step}"


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Of all groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]
