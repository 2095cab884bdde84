"""Strategies of the hyperparameters of every built-in optimizer, within their legal ranges."""

from typing import Any

from hypothesis import strategies as st

import ampopt

__all__ = ["hyperparameters"]

_LR = st.sampled_from([0.5, 0.125, 0.01]) | st.floats(1e-6, 1.0)
_BELOW_ONE = st.sampled_from([0.0, 0.5, 0.9, 0.999]) | st.floats(0.0, 0.999)
_BETAS = st.tuples(_BELOW_ONE, _BELOW_ONE)
_EPS = st.sampled_from([1e-8, 0.125]) | st.floats(1e-10, 1.0)
_DECAY = st.sampled_from([0.0, 0.25]) | st.floats(0.0, 1.0)
_FLAG = st.booleans()
_COMMON = {"lr": _LR, "weight_decay": _DECAY, "maximize": _FLAG}
_ADAM = {**_COMMON, "betas": _BETAS, "eps": _EPS}

_OPTIONS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "ASGD": {
        **_COMMON,
        "lambd": st.floats(0.0, 0.25),
        "alpha": st.floats(0.25, 1.0),
        "t0": st.sampled_from([0.0, 2.0, 1e6]),
    },
    "Adadelta": {**_COMMON, "rho": _BELOW_ONE, "eps": _EPS},
    "Adafactor": {
        **_COMMON,
        "beta2_decay": st.floats(-1.0, -0.1),
        "eps": st.tuples(st.none() | _EPS, st.floats(1e-4, 1.0)),
        "d": st.floats(1.0, 4.0),
    },
    "Adagrad": {
        **_COMMON,
        "lr_decay": st.floats(0.0, 1.0),
        "initial_accumulator_value": st.sampled_from([0.0, 0.5]),
        "eps": _EPS,
    },
    "Adam": {**_ADAM, "amsgrad": _FLAG},
    "AdamW": {**_ADAM, "amsgrad": _FLAG},
    "Adamax": _ADAM,
    "Adan": {**_ADAM, "betas": st.tuples(*[_BELOW_ONE] * 3), "no_prox": _FLAG},
    "LAMB": {**_ADAM, "bias_correction": _FLAG},
    "LARS": {
        **_COMMON,
        "momentum": _BELOW_ONE,
        "dampening": st.sampled_from([0.0, 0.5]),
        "trust_coefficient": st.floats(0.01, 1.0),
        "nesterov": _FLAG,
        "adapt": _FLAG,
    },
    "LBFGS": {
        "lr": _LR,
        "max_iter": st.integers(1, 5),
        "history_size": st.integers(1, 4),
        "line_search_fn": st.sampled_from([None, "strong_wolfe"]),
    },
    "Lion": {**_COMMON, "betas": _BETAS},
    "Muon": {
        "lr": _LR,
        "weight_decay": _DECAY,
        "momentum": _BELOW_ONE,
        "nesterov": _FLAG,
        "ns_steps": st.integers(1, 3),
    },
    "NAdam": {
        **_ADAM,
        "momentum_decay": st.floats(0.0, 0.5),
        "decoupled_weight_decay": _FLAG,
    },
    "NovoGrad": {**_ADAM, "grad_averaging": _FLAG},
    "RAdam": {**_ADAM, "decoupled_weight_decay": _FLAG},
    "RMSprop": {
        **_COMMON,
        "alpha": _BELOW_ONE,
        "eps": _EPS,
        "momentum": _BELOW_ONE,
        "centered": _FLAG,
    },
    "Rprop": {
        "lr": _LR,
        "etas": st.tuples(st.floats(0.125, 0.875), st.floats(1.125, 2.0)),
        "step_sizes": st.just((1e-6, 50.0)),
        "maximize": _FLAG,
    },
    "ScheduleFreeAdamW": {
        **_ADAM,
        "betas": st.tuples(st.sampled_from([0.5, 0.9]) | st.floats(0.1, 0.999), _BELOW_ONE),
        "warmup_steps": st.integers(0, 3),
        "r": st.sampled_from([0.0, 1.0]),
        "weight_lr_power": st.sampled_from([2.0, 0.0]),
    },
    "Sophia": {
        **_COMMON,
        "betas": _BETAS,
        "rho": st.floats(0.01, 1.0),
        "bs": st.integers(1, 64),
    },
    "SparseAdam": {"lr": _LR, "betas": _BETAS, "eps": _EPS, "maximize": _FLAG},
}


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
    if name == "SGD":
        return _sgd()
    if name not in _OPTIONS:
        known = ", ".join(sorted({"SGD", *_OPTIONS} & set(ampopt.__all__)))
        raise ValueError(f"optimizer must be one of {known}, got {name!r}")
    return st.fixed_dictionaries(_OPTIONS[name])


@st.composite
def _sgd(draw: st.DrawFn) -> dict[str, Any]:
    """Strategy of the arguments of SGD, which refuses dampening with ``nesterov``."""
    options = draw(st.fixed_dictionaries({**_COMMON, "momentum": _BELOW_ONE}))
    nesterov = options["momentum"] > 0 and draw(_FLAG)
    dampening = 0.0 if nesterov else draw(st.sampled_from([0.0, 0.5]))
    return {**options, "nesterov": nesterov, "dampening": dampening}
