"""An optimizer as backends know it: a :class:`Rule`, formulas and the names of their inputs."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampopt_kernels import torch_language
from ampopt_kernels.codecs import BFLOAT16, SIGNED, Codec
from ampopt_kernels.language import INTERPRETED, jit, tl
from ampopt_kernels.state import MASTER, PARAM, State, codes_key, conditions_of, scale_key

__all__ = ["MASTER", "PARAM", "ParamKind", "Rule", "State"]

ParamKind = tuple[int, torch.dtype]
"""Number of dimensions of a parameter, and its dtype, or that of its master weight."""


_ARGUMENTS = {
    "update": ("p, g, state, h, flags, at", 5),
    "reduce": ("p, g, state, h, flags", 5),
    "averages": ("p, g, state, h, flags", 5),
    "before_reduce": ("s, h, flags", 3),
    "factors": ("means, state, h, flags", 4),
}
"""The arguments of each function of a rule but ``scalars``, and how many of them it must take."""


@jit
def keep(s, h):
    """The ``scalars`` of a rule that has none: hyperparameters reach ``update`` as they are."""
    return s, h


@jit
def keep_all(s, h, flags):
    """The ``before_reduce`` of a rule that has none: hyperparameters reach ``reduce``."""
    return s, h


_cached = functools.lru_cache(maxsize=1024)
"""Remembers what methods of rules return. A rule is its own key: no two are equal."""


@dataclass(frozen=True, eq=False)
class Rule:
    """The update of an optimizer, written once as functions that every backend runs.

    SGD with momentum, complete::

        from ampopt_kernels import Rule, State, jit

        @jit
        def update(p, g, state, h, flags):
            (lr, momentum), (buf,) = h, state
            buf = momentum * buf + g
            return p - lr * buf, (buf,)

        rule = Rule(update=update, hyper=("lr", "momentum"), state=(State("momentum_buffer"),))

    The functions are written with ``ampopt_kernels.tl`` and marked ``ampopt_kernels.jit``. They are
    pure: they compute results from their arguments, while the backend loads, stores, unscales,
    clips and skips. :doc:`/guides/rule_language` lists the operators and functions that they may
    use. The first step refuses other Python before it changes anything, with the line and a
    replacement: ``torch.sign(g)``, ``g.abs()``, ``g ** 2``, ``assert``; and, wherever Triton can be
    imported, code that Triton cannot compile, such as a use of a module-level constant (a global
    variable of the Python file).

    Most rules need ``update``, ``hyper`` and ``state``. ``scalars`` is for step counts, ``reduce``
    for norms of whole parameters (as in LAMB), and ``averages`` for means over rows and columns (as
    in Adafactor, see ``ampopt_kernels/rules/adafactor.py``). In the signatures below, ``p`` and
    ``g`` are the parameter and its gradient, ``s`` and ``h`` tuples of scalars, ``state`` a tuple
    of blocks or tensors, and ``flags`` a tuple of compile-time booleans. The number of scalars or
    terms that a function returns must not depend on ``flags``.

    Attributes:
        update: ``update(p, g, state, h, flags) -> (p, state)``, elementwise, on blocks of float32
            (float64 for float64 parameters). ``g`` is unscaled and clipped. Returns the new ``p``,
            and a tuple of the new states, one for each state that exists under the flags. May take
            a sixth argument ``at``, an opaque index of each element, to pass to ``rand`` and
            ``randn``.
        hyper: names of param-group entries, each a number or one-element tensor, in the order of
            ``h``. A tuple entry, such as ``betas``, is flattened.
        state: the tensors kept for each parameter. A function of the rule gets those that exist
            under the flags and have one value for each element, in their order; for ``reduce`` and
            ``update``, the means of ``averages``, or what ``factors`` made of them, follow.
        flags: names of entries of the param group, or of ``entries``. A flag is true if its entry
            is truthy. Code under a false flag is not compiled, so a ``weight_decay`` of 0 can cost
            nothing. A tensor counts as true; a string is an error.
        scalars: ``scalars(s, h) -> (s, h)`` or ``scalars(s, h, flags) -> (s, h)``, optional: runs
            once per parameter and step, in float64, on the device. ``s`` are the scalar states
            (step counts and the like), ``h`` the hyperparameters. The returned ``h`` is what
            ``update`` gets. A skipped step does not change ``s``.
        reduce: ``reduce(p, g, state, h, flags) -> terms``, optional: a tuple of blocks. Each is
            summed over the whole parameter, in float64, also if the parameter is sharded over
            ranks. ``scalars`` then takes these sums: ``scalars(s, h, flags, sums)``; or also the
            sums over all parameters that have gradients: ``scalars(s, h, flags, sums, totals)``.
            Costs one more read of the tensors that the terms are computed from.
        before_reduce: ``before_reduce(s, h, flags) -> (s, h)``, optional: computes scalars that
            ``reduce`` needs, such as bias corrections. ``scalars`` gets the returned ``s`` and
            ``h``, and ``reduce`` the returned ``h``.
        averages: ``averages(p, g, state, h, flags) -> terms``, optional: a tuple of blocks, one for
            each entry of ``averages_over``. The mean of each, over each row or each column, reaches
            ``reduce`` and ``update`` at the end of ``state``, broadcast over the parameter.
            ``state`` has the states with one value for each element, and ``h`` is that of
            ``reduce``, or of ``update`` in a rule without ``reduce``. Costs one more read of the
            tensors for each term.
        averages_over: what each term of ``averages`` is averaged over: ``"rows"`` or ``"columns"``.
            If omitted, there is a term for each state that has a ``shape``.
        averages_when: the flags under which means are computed, in the form of ``State.when``.
            Exclude parameters of fewer than two dimensions, which have no rows. Without
            ``averages_over``, a mean exists if the state that it is for exists.
        factors: ``factors(means, state, h, flags) -> (state, factors)``, written with torch and not
            marked ``jit``; required if a state has a ``shape``. Gets the means and the states that
            have a ``shape``, and returns the new values of these states, and for each mean a tensor
            of its shape, which takes its place. Matrices of equal shape may come stacked, so count
            dimensions from the last: ``row_var.mean(-2, keepdim=True)`` is the mean of each matrix.
            The numbers in ``h`` are tensors that broadcast to the stack. A skipped step stores
            nothing.
        entries: ``entries(group, ndim, dtype) -> dict``, optional: values that replace entries of
            the param group, for parameters of ``ndim`` dimensions whose dtype, or that of the
            master, is ``dtype``. For example a flag for parameters that have no rows.
        scalar_state: the 0-d tensors kept for each parameter, in the order of ``s``. One whose flag
            is off reads as 0 and is not stored.
        scalars64: the function used instead of ``scalars`` if scalar states are float64; ``None``
            to use ``scalars`` there, too. Only for rules that round scalars as torch does.
    """

    update: Any
    hyper: tuple[str, ...]
    state: tuple[State, ...] = ()
    flags: tuple[str, ...] = ()
    scalars: Any = field(default=keep)
    scalar_state: tuple[State, ...] = ()
    scalars64: Any = None
    reduce: Any = None
    before_reduce: Any = field(default=keep_all)
    averages: Any = None
    averages_over: tuple[str, ...] = ()
    averages_when: str | tuple[str, ...] | None = None
    factors: Any = None
    entries: Any = None

    def __post_init__(self) -> None:
        """Check the declaration, so that the error is raised where the rule is written."""
        optional = ["reduce"] * self.reduces + ["averages"] * (self.averages is not None)
        for role in ("update", "scalars", "before_reduce", *optional):
            if not hasattr(getattr(self, role), "fn"):
                raise TypeError(
                    f"Rule {role} must be a function marked with @ampopt_kernels.jit, "
                    f"got {getattr(self, role)!r}"
                )
            if INTERPRETED:
                # Triton's interpreter has to find its language among the globals of a function,
                # which arithmetic alone does not need there.
                getattr(self, role).fn.__globals__.setdefault("__triton_language__", tl)
        for role in ("hyper", "flags"):
            _check_tuple(role, getattr(self, role), str, '("lr",)')
        for role in ("state", "scalar_state"):
            _check_tuple(role, getattr(self, role), State, '(State("exp_avg"),)')
        self._check_arguments()
        if self.before_reduce is not keep_all and not self.reduces:
            raise TypeError(
                "Rule before_reduce is for reduce, and the rule has no reduce: add reduce, or move "
                "the code of before_reduce to scalars"
            )
        for part in self.scalar_state:
            narrow = part.dtype in (torch.float16, torch.bfloat16)
            if part.init == PARAM or part.shape is not None or narrow:
                raise ValueError(
                    f"State {part.name!r} is a scalar state: its dtype must be torch.float32, "
                    "torch.float64 or None, its shape None, and its init a number or the name of a "
                    "param-group entry. Change that, or declare the state in state="
                )
        self._check_averages()
        names = [part.name for part in (*self.state, *self.scalar_state)]
        kept = {MASTER: "masters"}
        for part in self.state:
            kept[codes_key(part.name)] = "8-bit codes"
            kept[scale_key(part.name)] = "scales of 8-bit codes"
        for name in names:
            if name in kept or names.count(name) > 1:
                why = f"is where {kept[name]} are kept" if name in kept else "is declared twice"
                raise ValueError(f"State {name!r} {why}: give each state a name of its own")
        for part in self.state:
            if isinstance(part.full, str) and part.full not in self.flags:
                raise ValueError(
                    f"State {part.name!r} is kept in full precision under {part.full!r}, which is "
                    f"not among the rule's flags {self.flags}: add it to flags"
                )
        whens = {f"State {x.name!r} exists": x.when for x in (*self.state, *self.scalar_state)}
        for what, when in {**whens, "Rule averages exist": self.averages_when}.items():
            if not {name for name, _ in conditions_of(when)} <= set(self.flags):
                raise ValueError(
                    f"{what} when {when!r}, which is not among the rule's flags {self.flags}: add "
                    "it to flags"
                )

    def _check_arguments(self) -> None:
        """Raise ``TypeError`` for a function of the rule that takes other arguments."""
        if self.reduces and self.scalars is keep:
            raise TypeError(
                "Rule reduce needs scalars, a function that gets the sums: scalars(s, h, flags, "
                "sums) or scalars(s, h, flags, sums, totals)"
            )
        of_scalars = ("s, h, flags, sums, totals", 4) if self.reduces else ("s, h, flags", 2)
        for role, (arguments, least) in {**_ARGUMENTS, "scalars": of_scalars}.items():
            if (function := getattr(self, role)) is None:
                continue
            names, most = _arguments(function), arguments.split(", ")
            allowed = [most[:n] for n in range(least, len(most) + 1)]
            takes = f"Rule {role} must take " + " or ".join(f"({', '.join(x)})" for x in allowed)
            if role == "scalars":
                takes += ", as the rule has "
                takes += "reduce" if self.reduces else "no reduce to sum anything up"
            if names[:1] == ["self"]:
                raise TypeError(f"Rule {role} must be a function, not a method: leave out self")
            if len(names) not in map(len, allowed):
                raise TypeError(f"{takes}, but it takes {len(names)} arguments")
            if names not in allowed and sorted(names) in map(sorted, allowed):
                raise TypeError(f"{takes}, in this order, not {tuple(names)}")

    def _check_averages(self) -> None:
        """Raise if the fields about averages, and the states of rows and columns, do not fit."""
        shaped, over = [part.name for part in self.state if part.shape], self.averages_over
        needed = shaped or over or self.averages_when or self.factors
        needs = {"averages": needed, "factors": shaped}
        missing = [role for role, why in needs.items() if why and not getattr(self, role)]
        if missing:
            raise TypeError(
                f"Rule lacks {', '.join(missing)}: states of rows and columns, here {shaped}, need "
                "averages (the terms to average over rows and columns) and factors (which computes "
                "the new states from the means); averages_over and factors need averages. See the "
                "Adafactor rule in ampopt_kernels/rules/adafactor.py"
            )
        wrong = not isinstance(over, tuple) or not {*over} <= {"rows", "columns"}
        if wrong or (self.averages and not over and (not shaped or self.averages_when)):
            raise TypeError(
                f"Rule averages_over must be a tuple that says what each term of averages is "
                f"averaged over, 'rows' or 'columns', such as ('rows',), got {over!r}. It may be "
                "omitted, together with averages_when, if each term is for a state that has a shape"
            )

    @functools.cached_property
    def reduces(self) -> bool:
        """Whether the rule has a ``reduce`` function."""
        return self.reduce is not None

    @functools.cached_property
    def sums_up(self) -> bool:
        """Whether a step sums over parameters, or their rows or columns, of all ranks."""
        return self.reduces or self.averages is not None

    @functools.cached_property
    def draws(self) -> bool:
        """Whether ``update`` takes a sixth argument ``at``, for ``rand`` and ``randn``."""
        return len(_arguments(self.update)) > 5

    @functools.cached_property
    def scalars_arguments(self) -> int:
        """Number of arguments of ``scalars``, a prefix of ``(s, h, flags, sums, totals)``."""
        return len(_arguments(self.scalars))

    @functools.cached_property
    def with_float64_scalars(self) -> "Rule":
        """The rule to use if scalar states are float64: with ``scalars64`` as ``scalars``."""
        if self.scalars64 is None:
            return self
        return replace(self, scalars=self.scalars64, scalars64=None)

    def flag_values(
        self, group: Mapping[str, Any], kind: ParamKind | None = None
    ) -> tuple[bool, ...]:
        """The value of each flag for the parameters of one ``kind`` in a param group.

        Reads no device tensor.

        Args:
            group: the param group.
            kind: passed to :attr:`entries`; ``None`` to read ``group`` alone.

        Raises:
            TypeError: a flag is a string.
        """
        entries = group if kind is None else self.entries_for(group, kind)
        flags: list[bool] = []
        try:
            for name in self.flags:
                value = entries[name]
                if isinstance(value, str):  # "no" is true in Python
                    raise TypeError(
                        f"flag {name!r} must be True or False, got the string {value!r}"
                    )
                flags.append(isinstance(value, Tensor) or bool(value))
        except KeyError as error:
            raise _lacking(group, error) from None
        return tuple(flags)

    def hyper_values(
        self, group: Mapping[str, Any], kind: ParamKind | None = None
    ) -> list[float | Tensor]:
        """The hyperparameters of a param group, in the order of ``h``, tuples flattened.

        Args:
            group: the param group.
            kind: passed to :attr:`entries`; ``None`` to read ``group`` alone.
        """
        entries = group if kind is None else self.entries_for(group, kind)
        flat: list[float | Tensor] = []
        try:
            for value in map(entries.__getitem__, self.hyper):
                flat.extend(value if isinstance(value, (tuple, list)) else (value,))
        except KeyError as error:
            raise _lacking(group, error) from None
        return flat

    def state_for(self, flags: tuple[bool, ...]) -> tuple[State, ...]:
        """The elementwise states that exist under ``flags``."""
        return self._existing(flags).elementwise

    @_cached  # called for each parameter
    def _existing(self, flags: tuple[bool, ...]) -> "_Existing":
        """The states that exist under ``flags``."""

        def hold(when: str | tuple[str, ...] | None) -> bool:
            return all(
                flags[self.flags.index(name)] == truth for name, truth in conditions_of(when)
            )

        state, scalars = (
            tuple(part for part in some if hold(part.when))
            for some in (self.state, self.scalar_state)
        )
        elementwise = tuple(part for part in state if part.shape is None)
        row_column_states = tuple(part for part in state if part.shape is not None)
        averages = tuple(part.shape for part in row_column_states if part.shape is not None)
        if self.averages_over:
            averages = self.averages_over * hold(self.averages_when)
        return _Existing(elementwise, row_column_states, scalars, (*state, *scalars), averages)

    @functools.cached_property
    def all_averages(self) -> tuple[str, ...]:
        """What each mean is over, under the flags that have most of them."""
        return self.averages_over or tuple(str(part.shape) for part in self.state if part.shape)

    def averages_for(self, flags: tuple[bool, ...]) -> tuple[str, ...]:
        """What each mean under ``flags`` is over, ``"rows"`` or ``"columns"``; empty for none."""
        return self._existing(flags).averages

    def inputs_for(self, flags: tuple[bool, ...]) -> tuple[str, ...]:
        """What ``state`` is in ``reduce`` and ``update`` under ``flags``: names or means."""
        means = (f"mean over {lines}" for lines in self.averages_for(flags))
        return (*(part.name for part in self.state_for(flags)), *means)

    def row_column_states_for(self, flags: tuple[bool, ...]) -> tuple[State, ...]:
        """The states of rows and columns that exist under ``flags``."""
        return self._existing(flags).row_column_states

    def scalar_state_for(self, flags: tuple[bool, ...]) -> tuple[State, ...]:
        """The scalar states that exist under ``flags``."""
        return self._existing(flags).scalars

    def all_state_for(self, flags: tuple[bool, ...]) -> tuple[State, ...]:
        """All states that exist under ``flags``."""
        return self._existing(flags).all

    @_cached
    def codecs_for(self, flags: tuple[bool, ...], bits: int) -> tuple[Codec | None, ...]:
        """The codec of each elementwise state under ``flags``, kept in ``bits`` bits.

        ``None`` for a state in full precision.
        """
        states, flag_values = self.state_for(flags), dict(zip(self.flags, flags, strict=True))
        codecs = [part.codec_in(bits, flag_values) for part in states]
        # Where a step divides by an exact state, or mean, that is small, it needs the digits of a
        # small signed state, which has few of them beside larger ones of its block.
        pairs = zip(states, codecs, strict=True)
        exact = any(codec is None and part.init != PARAM for part, codec in pairs)
        if exact or self.averages_for(flags):
            codecs = [BFLOAT16 if codec is SIGNED else codec for codec in codecs]
        return tuple(codecs)

    def entries_for(self, group: Mapping[str, Any], kind: ParamKind) -> Mapping[str, Any]:
        """The entries of ``group`` for its parameters of one ``kind``; see :attr:`entries`."""
        if self.entries is None:
            return group
        return {**group, **self.entries(group, *kind)}

    def bound(self, role: str, language: Any = None) -> Callable[..., Any]:
        """A function of the rule in another language; see :func:`torch_language.bind`.

        It may be called with more arguments than it takes, of which it ignores the last.

        Args:
            role: the name of the function, such as ``"update"``.
            language: as for ``bind``.
        """
        function = getattr(self, role)
        n, bound = len(_arguments(function)), torch_language.bind(function, language)
        return lambda *arguments: bound(*arguments[:n])

    @_cached
    def on_tensors(self, role: str, dtype: torch.dtype) -> Callable[..., Any]:
        """A function of the rule on torch tensors or numbers; see :meth:`bound`.

        Args:
            role: the name of the function.
            dtype: that of the blocks, float32 or float64; float64 for functions of scalars.
        """
        language = torch_language.in_widest if dtype == torch.float64 else None
        return torch_language.dividing(self.bound(role, language))

    @functools.cached_property
    def torch_before_sums(self) -> Any:
        """What computes the ``h`` of ``reduce`` and ``averages``, on torch tensors or numbers.

        ``before_reduce``, or ``scalars`` in a rule without ``reduce``.
        """
        return self.on_tensors("before_reduce" if self.reduces else "scalars", torch.float64)

    @_cached
    def widths(self, n_hyper: int) -> "Widths":
        """Lengths of the tuples of the rule, found by running its functions.

        Args:
            n_hyper: the number of hyperparameters, tuples flattened.
        """
        flags = (False,) * len(self.flags)
        one = torch.ones((), dtype=torch.float64, device="cpu")
        s, h = (one,) * len(self.scalar_state), (one * 0.5,) * n_hyper
        s, before = self.torch_before_sums(s, h, flags)
        if not self.reduces:
            return Widths(len(before), 0, len(before))
        states = (one,) * len(self.inputs_for(flags))
        terms = self.on_tensors("reduce", torch.float64)(one, one, states, before, flags)
        sums = (one,) * len(terms)
        _, h = self.on_tensors("scalars", torch.float64)(s, before, flags, sums, sums)
        return Widths(len(before), len(terms), len(h))


class Widths(NamedTuple):
    """Lengths of tuples that functions of a rule take and return.

    Attributes:
        reduce: length of the ``h`` of ``reduce`` and ``averages``.
        terms: number of terms that ``reduce`` returns.
        update: length of the ``h`` of ``update``.
    """

    reduce: int
    terms: int
    update: int


class _Existing(NamedTuple):
    """The states that exist under some flags: elementwise, of rows and columns, scalar, and all.

    And what the terms of ``averages`` are averaged over.
    """

    elementwise: tuple[State, ...]
    row_column_states: tuple[State, ...]
    scalars: tuple[State, ...]
    all: tuple[State, ...]
    averages: tuple[str, ...]


def _arguments(function: Any) -> list[str]:
    """The names of the arguments of a function of a rule, marked with ``jit`` or not."""
    return list(inspect.signature(getattr(function, "fn", function)).parameters)


def _lacking(group: Mapping[str, Any], error: KeyError) -> KeyError:
    """The error for an entry that a rule reads and ``group`` does not have."""
    return KeyError(
        f"the rule reads {error.args[0]!r} from each param group, but the group has only "
        f"{sorted(k for k in group if k != 'params')}: add it to the optimizer's defaults"
    )


def _check_tuple(role: str, value: Any, of: type, example: str) -> None:
    """Raise unless ``value``, the field ``role`` of a rule, is a tuple of ``of``."""
    # ("lr") is a string: a sequence of strings, one for each letter.
    if not isinstance(value, tuple) or not all(isinstance(part, of) for part in value):
        raise TypeError(
            f"Rule {role} must be a tuple of {of.__name__}, such as {example}, got {value!r}. A "
            "tuple of one needs the comma"
        )
