"""Strategies of the hyperparameters of every built-in optimizer, within their legal ranges.

A flag is drawn, and so is a number whose name tells its range, such as ``lr``.
"""

import inspect
from typing import Any

from hypothesis import strategies as st

import ampopt
from ampopt.options import DEFAULTS

__all__ = ["hyperparameters"]

_BELOW_ONE = st.sampled_from([0.0, 0.5, 0.9, 0.999]) | st.floats(0.0, 0.999)
_EPS = st.sampled_from([1e-8, 0.125]) | st.floats(1e-10, 1.0)

_BY_NAME: dict[str, st.SearchStrategy[Any]] = {
    "alpha": _BELOW_ONE,
    "dampening": st.sampled_from([0.0, 0.5]),
    "eps": _EPS,
    "lr": st.sampled_from([0.5, 0.125, 0.01]) | st.floats(1e-6, 1.0),
    "momentum": _BELOW_ONE,
    "rho": _BELOW_ONE,
    "weight_decay": st.sampled_from([0.0, 0.25]) | st.floats(0.0, 1.0),
}
"""The range of each hyperparameter, unless :data:`_OF_EACH` has another for an optimizer."""

_HOW_STEPS_RUN = {*DEFAULTS, "capturable", "differentiable", "foreach", "fused"}
"""Options that are no hyperparameters: they keep their defaults."""

_OF_EACH: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "ASGD": {
        "lambd": st.floats(0.0, 0.25),
        "alpha": st.floats(0.25, 1.0),
        "t0": st.sampled_from([0.0, 2.0, 1e6]),
    },
    "Adafactor": {
        "beta2_decay": st.floats(-1.0, -0.1),
        "eps": st.tuples(st.none() | _EPS, st.floats(1e-4, 1.0)),
        "d": st.floats(1.0, 4.0),
    },
    "Adagrad": {
        "lr_decay": st.floats(0.0, 1.0),
        "initial_accumulator_value": st.sampled_from([0.0, 0.5]),
    },
    "LARS": {"trust_coefficient": st.floats(0.01, 1.0)},
    "LBFGS": {
        "max_iter": st.integers(1, 5),
        "history_size": st.integers(1, 4),
        "line_search_fn": st.sampled_from([None, "strong_wolfe"]),
    },
    "Muon": {"eps": st.just(1e-7), "ns_steps": st.integers(1, 3)},
    "NAdam": {"momentum_decay": st.floats(0.0, 0.5)},
    "Rprop": {
        "etas": st.tuples(st.floats(0.125, 0.875), st.floats(1.125, 2.0)),
        "step_sizes": st.just((1e-6, 50.0)),
    },
    "ScheduleFreeAdamW": {
        "betas": st.tuples(st.sampled_from([0.5, 0.9]) | st.floats(0.1, 0.999), _BELOW_ONE),
        "warmup_steps": st.integers(0, 3),
        "r": st.sampled_from([0.0, 1.0]),
        "weight_lr_power": st.sampled_from([2.0, 0.0]),
    },
    "Sophia": {"rho": st.floats(0.01, 1.0), "bs": st.integers(1, 64)},
}
"""For each optimizer, ranges of hyperparameters that :data:`_BY_NAME` lacks or has otherwise."""


def hyperparameters(optimizer: str | type[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Strategy of keyword arguments of one of ampopt's optimizers, or of torch's of that name.

    Example:
        >>> hyperparameters("AdamW").example()  # doctest: +SKIP
        {'lr': 0.125, 'weight_decay': 0.0, 'maximize': False, 'betas': (0.9, 0.0), ...}

    Args:
        optimizer: the optimizer class, or its name.

    Raises:
        ValueError: ``optimizer`` is not the name of one of ampopt's optimizers.
    """
    name = optimizer if isinstance(optimizer, str) else optimizer.__name__
    if name not in ampopt.optim.__all__:
        names = ", ".join(sorted(ampopt.optim.__all__))
        raise ValueError(f"optimizer must be one of {names}, got {name!r}")
    parameters = inspect.signature(getattr(ampopt, name)).parameters.values()
    by_name = {p.name: _range_of(p) for p in parameters if p.name not in _HOW_STEPS_RUN}
    ranges = {key: values for key, values in by_name.items() if values is not None}
    strategy = st.fixed_dictionaries({**ranges, **_OF_EACH.get(name, {})})
    return strategy.map(_allowed_in_sgd) if name == "SGD" else strategy


def _range_of(parameter: inspect.Parameter) -> st.SearchStrategy[Any] | None:
    """The range of a hyperparameter by its name and default; ``None`` if these do not tell it."""
    if isinstance(parameter.default, bool):
        return st.booleans()
    if parameter.name == "betas":
        return st.tuples(*[_BELOW_ONE] * len(parameter.default))
    return _BY_NAME.get(parameter.name)


def _allowed_in_sgd(options: dict[str, Any]) -> dict[str, Any]:
    """``options``, without what SGD refuses: ``nesterov`` needs momentum and no dampening."""
    nesterov = options["nesterov"] and options["momentum"] > 0
    return {
        **options,
        "nesterov": nesterov,
        "dampening": 0.0 if nesterov else options["dampening"],
    }
