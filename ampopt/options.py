"""The options that all optimizers share: names, defaults, allowed values and descriptions.

A constructor takes them as ``**options: Unpack[RuleOptions]``, which type checkers read, and its
docstring has one line for all of them. When the class is made, :func:`show_options` puts each
option into the signature and the docstring, where ``help()`` and ``inspect.signature`` find it.

A further option of param groups is an entry of :data:`GROUP_OPTIONS` and a line of
:class:`RuleOptions`.
"""

import functools
import inspect
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypedDict

import torch

__all__ = [
    "DEFAULTS",
    "GROUP_OPTIONS",
    "MASTER_BITS",
    "MASTER_WEIGHTS",
    "PARAM_ROUNDING",
    "STATE_BITS",
    "Option",
    "OptimizerOptions",
    "RuleOptions",
    "check_options",
    "needs_master",
    "rounds_stochastically",
    "show_in_signature",
    "show_options",
    "show_torch_signature",
]


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


class Option(NamedTuple):
    """An option that torch's optimizers lack.

    Attributes:
        name: the keyword argument of the constructor, and the key in a param group.
        default: the default. A param group need not have an option of this value.
        description: the lines of docstrings that describe it.
        allowed: the allowed values.
        usage: how users set another value than the default, for messages.
    """

    name: str
    default: Any
    description: str
    allowed: tuple[Any, ...] = ()
    usage: str = ""

    def of(self, group: Mapping[str, Any]) -> Any:
        """The value in a param group."""
        return group.get(self.name, self.default)

    def is_set(self, group: Mapping[str, Any]) -> bool:
        """Whether a param group has another value than the default."""
        return self.of(group) != self.default

    def check(self, value: Any) -> None:
        """Raise unless ``value`` is one of :attr:`allowed`.

        Raises:
            TypeError: ``value`` is not a bool, for an option that is.
            ValueError: ``value`` is not allowed, for any other option.
        """
        if not isinstance(value, type(self.default)) or value not in self.allowed:
            *others, last = map(repr, self.allowed)
            error = TypeError if isinstance(self.default, bool) else ValueError
            raise error(f"{self.name} must be {', '.join(others)} or {last}, got {value!r}")


MASTER_WEIGHTS = Option(
    "master_weights",
    False,
    """\
        master_weights: keep a float32 copy of each float16 and bfloat16 parameter, and update that
            copy: :doc:`/guides/precision`. Param groups take this option and the next three, too.
""",
    allowed=(True, False),
    usage="master_weights=True",
)
PARAM_ROUNDING = Option(
    "param_rounding",
    "nearest",
    """\
        param_rounding: ``"nearest"``, or ``"stochastic"`` to round bfloat16 parameters without
            master weights, and their states, up or down at random.
""",
    allowed=("nearest", "stochastic"),
    usage="param_rounding='stochastic'",
)
STATE_BITS = Option(
    "state_bits",
    32,
    """\
        state_bits: 32, or 16 or 8 to keep the states of large parameters in fewer bits:
            :doc:`/guides/less_memory`.
""",
    allowed=(8, 16, 32),
    usage="state_bits below 32",
)
MASTER_BITS = Option(
    "master_bits",
    32,
    """\
        master_bits: 32, or 24 to store each large master weight as its parameter and 8 bits more,
            in place of a float32 copy.
""",
    allowed=(24, 32),
    usage="master_bits=24",
)
_PROCESS_GROUP = Option(
    "process_group",
    None,
    """\
        process_group: the ranks over which overflow and gradient norm are all-reduced; see
            :class:`ampopt.Optimizer`.
""",
)

GROUP_OPTIONS = {o.name: o for o in (MASTER_WEIGHTS, PARAM_ROUNDING, STATE_BITS, MASTER_BITS)}
"""The options that a param group may have. A plan of steps depends on all of them."""

_OPTIONS = {**GROUP_OPTIONS, _PROCESS_GROUP.name: _PROCESS_GROUP}
"""All options, in the order of signatures and docstrings."""

DEFAULTS = {name: option.default for name, option in _OPTIONS.items()}
"""The default of each option."""

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
            names = [name for name in _OPTIONS if name in options_class.__annotations__]
            descriptions = "".join(_OPTIONS[name].description for name in names)
            descriptions = textwrap.indent(textwrap.dedent(descriptions), "    ")
            cls.__doc__ = docstring.replace(line, descriptions)
            if "__init__" in vars(cls):
                show_in_signature(cls.__init__, names)


show_options(OptimizerOptions)
show_options(RuleOptions)


def show_in_signature(init: Any, names: Iterable[str]) -> None:
    """Put the options ``names`` in the place of ``**options`` in the signature of ``init``.

    ``**kwargs``, by which ``init`` takes other arguments too, follows them.
    """
    signature = inspect.signature(init)
    *own, last = signature.parameters.values()
    if last.kind is last.VAR_KEYWORD:
        shown = functools.partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
        types = RuleOptions.__annotations__
        options = [shown(n, default=DEFAULTS[n], annotation=types[n]) for n in names]
        others = [last] if last.name == "kwargs" else []
        init.__signature__ = signature.replace(parameters=[*own, *options, *others])


def show_torch_signature(cls: type[Any], root: type[Any]) -> None:
    """Show the arguments of torch's class where a constructor forwards everything to it.

    Args:
        cls: the class to change. Its ``__init__`` is wrapped if it takes ``*args`` and ``**kwargs``
            and a base of ``cls`` is an optimizer of torch.
        root: the base class whose keyword-only arguments, and those of its subclasses, are added.
    """
    # Someone may have put a class of ours, whose signature says all, in the place of torch's.
    bases = [base for base in cls.__bases__ if not issubclass(base, root)]
    theirs = next((base for base in bases if base in vars(torch.optim).values()), None)
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


def check_options(group: Mapping[str, Any]) -> None:
    """Raise for invalid options of a param group.

    Raises:
        TypeError: ``master_weights`` is not a bool.
        ValueError: another option has a value that is not allowed.
    """
    for option in GROUP_OPTIONS.values():
        option.check(option.of(group))


def needs_master(group: Mapping[str, Any], param: torch.Tensor) -> bool:
    """Whether ``param`` of ``group`` has a master."""
    return param.dtype in (torch.float16, torch.bfloat16) and MASTER_WEIGHTS.of(group)


def rounds_stochastically(group: Mapping[str, Any], param: torch.Tensor) -> bool:
    """Whether ``param`` of ``group``, and its states, are rounded stochastically to bfloat16."""
    return (
        param.dtype == torch.bfloat16
        and PARAM_ROUNDING.is_set(group)
        and not MASTER_WEIGHTS.of(group)
    )
