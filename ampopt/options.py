"""The options that all optimizers share: their types, defaults and descriptions, in one place.

A constructor takes them as ``**options: Unpack[RuleOptions]``, which type checkers read, and its
docstring has one line for all of them. When the class is made, :func:`show_options` puts each
option into the signature and the docstring, where ``help()`` and ``inspect.signature`` find it.
"""

import functools
import inspect
import textwrap
from collections.abc import Mapping
from typing import Any, TypedDict

import torch

__all__ = [
    "DEFAULTS",
    "GROUP_OPTIONS",
    "MASTER_BITS",
    "PARAM_ROUNDING",
    "STATE_BITS",
    "OptimizerOptions",
    "RuleOptions",
    "check_master_bits",
    "check_rounding",
    "check_state_bits",
    "has_masters",
    "is_stochastic",
    "master_bits",
    "needs_master",
    "rounds_stochastically",
    "show_options",
    "show_torch_signature",
    "state_bits",
]

PARAM_ROUNDING = "param_rounding"
"""The key of this option in a param group."""
STATE_BITS = "state_bits"
"""The key of this option in a param group."""
MASTER_BITS = "master_bits"
"""The key of this option in a param group."""


class OptimizerOptions(TypedDict, total=False):
    """The keyword arguments that every ampopt optimizer takes in addition to its own.

    Args:
        **options: see :class:`ampopt.options.OptimizerOptions`.
    """

    process_group: Any


class RuleOptions(OptimizerOptions, total=False):
    """The keyword arguments that every rule-based optimizer takes in addition to its own.

    Args:
        **options: see :class:`ampopt.options.RuleOptions`.
    """

    master_weights: bool
    param_rounding: str
    state_bits: int
    master_bits: int


DEFAULTS = {
    "master_weights": False,
    "param_rounding": "nearest",
    "state_bits": 32,
    "master_bits": 32,
    "process_group": None,
}
"""The default of each option. Param groups need not have an option of this value."""

_DESCRIPTIONS = {
    "master_weights": """\
        master_weights: keep a float32 copy of each float16 and bfloat16 parameter, and update that
            copy: :doc:`/guides/precision`. Param groups take this option and the next three, too.
""",
    "param_rounding": """\
        param_rounding: ``"nearest"``, or ``"stochastic"`` to round bfloat16 parameters without
            master weights, and their states, up or down at random.
""",
    "state_bits": """\
        state_bits: 32, or 16 or 8 to keep the states of large parameters in fewer bits:
            :doc:`/guides/less_memory`.
""",
    "master_bits": """\
        master_bits: 32, or 24 to store each large master weight as its parameter and 8 bits more,
            in place of a float32 copy.
""",
    "process_group": """\
        process_group: the ranks over which overflow and gradient norm are all-reduced; see
            :class:`ampopt.Optimizer`.
""",
}

_LINES = {
    "        **options: see :class:`ampopt.options.RuleOptions`.\n": RuleOptions,
    "        **options: see :class:`ampopt.options.OptimizerOptions`.\n": OptimizerOptions,
}
"""The line of a docstring that is replaced by the descriptions of these options."""


def show_options(cls: type[Any]) -> None:
    """Put the shared options of ``cls`` into its docstring, and into its constructor's signature.

    The descriptions replace one of :data:`_LINES` in the docstring. A class whose docstring has
    none of these lines, such as one that a user wrote, is not changed.
    """
    for line, options_class in _LINES.items():
        # Python 3.13 cleans docstrings by itself.
        docstring = inspect.cleandoc(cls.__doc__ or "") + "\n"
        line = "    " + line.lstrip()
        if line in docstring:
            # In the order of the table, which is that of the signatures too.
            names = [name for name in DEFAULTS if name in options_class.__annotations__]
            descriptions = "".join(_DESCRIPTIONS[name] for name in names)
            descriptions = textwrap.indent(textwrap.dedent(descriptions), "    ")
            cls.__doc__ = docstring.replace(line, descriptions)
            if "__init__" in vars(cls):
                _show_in_signature(cls.__init__, names)


show_options(OptimizerOptions)
show_options(RuleOptions)


def _show_in_signature(init: Any, names: list[str]) -> None:
    """Put the options ``names`` in the place of ``**options`` in the signature of ``init``."""
    signature = inspect.signature(init)
    *own, last = signature.parameters.values()
    if last.kind is last.VAR_KEYWORD:
        keyword = inspect.Parameter.KEYWORD_ONLY
        options = [inspect.Parameter(name, keyword, default=DEFAULTS[name]) for name in names]
        init.__signature__ = signature.replace(parameters=[*own, *options])


def show_torch_signature(cls: type[Any], root: type[Any]) -> None:
    """Show the arguments of torch's class where a constructor forwards everything to it.

    Args:
        cls: the class to change. Its ``__init__`` is wrapped if it takes ``*args`` and ``**kwargs``
            and a base of ``cls`` is an optimizer of torch.
        root: the base class whose keyword-only arguments, and those of its subclasses, are added.
    """
    theirs = next((base for base in cls.__bases__ if base in vars(torch.optim).values()), None)
    init: Any = cls.__init__
    if theirs is None or inspect.getfullargspec(init)[:3] != _FORWARDS:
        return

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)

    signature = inspect.signature(theirs.__init__)
    ours: list[Any] = [base.__init__ for base in cls.__mro__ if issubclass(base, root)]
    our_parameters = [p for init in ours for p in inspect.signature(init).parameters.values()]
    keywords = {p.name: p for p in our_parameters if p.kind is p.KEYWORD_ONLY}
    parameters = [*signature.parameters.values(), *keywords.values()]
    __init__.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    cls.__init__ = __init__


_FORWARDS = (["self"], "args", "kwargs")
"""The arguments of a constructor that forwards everything."""


def check_rounding(rounding: Any) -> None:
    """Raise unless ``rounding`` is a value of ``param_rounding``.

    Raises:
        ValueError: ``rounding`` is neither ``"nearest"`` nor ``"stochastic"``.
    """
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f"param_rounding must be 'nearest' or 'stochastic', got {rounding!r}")


def check_state_bits(bits: Any) -> None:
    """Raise unless ``bits`` is a value of ``state_bits``.

    Raises:
        ValueError: ``bits`` is not 8, 16 or 32.
    """
    if isinstance(bits, bool) or not isinstance(bits, int) or bits not in (8, 16, 32):
        raise ValueError(f"state_bits must be 8, 16 or 32, got {bits!r}")


def check_master_bits(bits: Any) -> None:
    """Raise unless ``bits`` is a value of ``master_bits``.

    Raises:
        ValueError: ``bits`` is not 24 or 32.
    """
    if isinstance(bits, bool) or not isinstance(bits, int) or bits not in (24, 32):
        raise ValueError(f"master_bits must be 24 or 32, got {bits!r}")


def has_masters(group: Mapping[str, Any]) -> bool:
    """Whether the option ``master_weights`` of ``group`` is set."""
    return group.get("master_weights", False)


def master_bits(group: Mapping[str, Any]) -> int:
    """The option ``master_bits`` of ``group``."""
    return group.get(MASTER_BITS, 32)


def state_bits(group: Mapping[str, Any]) -> int:
    """The option ``state_bits`` of ``group``."""
    return group.get(STATE_BITS, 32)


def is_stochastic(group: Mapping[str, Any]) -> bool:
    """Whether ``group`` rounds bfloat16 parameters without master weights stochastically."""
    return group.get(PARAM_ROUNDING, "nearest") == "stochastic"


def needs_master(group: Mapping[str, Any], param: torch.Tensor) -> bool:
    """Whether ``param`` of ``group`` has a master."""
    return has_masters(group) and param.dtype in (torch.float16, torch.bfloat16)


def rounds_stochastically(group: Mapping[str, Any], param: torch.Tensor) -> bool:
    """Whether ``param`` of ``group``, and its states, are rounded stochastically to bfloat16."""
    return param.dtype == torch.bfloat16 and is_stochastic(group) and not has_masters(group)


GROUP_OPTIONS = {
    "master_weights": ("master_weights=True", has_masters),
    PARAM_ROUNDING: ("param_rounding='stochastic'", is_stochastic),
    STATE_BITS: ("state_bits below 32", lambda group: state_bits(group) != 32),
    MASTER_BITS: ("master_bits=24", lambda group: master_bits(group) != 32),
}
"""Options of param groups that torch lacks: how users set each, and whether a group has it set.

A plan of steps depends on all of them.
"""
