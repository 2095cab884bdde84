"""The control points for optimizers that someone else wrote: a class, or an instance that is there.

Both are inheritance: a class is made that derives from :class:`ampopt.Optimizer` and from theirs,
in this order, as ampopt's own classes derive from torch's.
"""

import copyreg
import functools
import inspect
from collections import OrderedDict
from typing import Any, cast

import torch
from torch.optim.lr_scheduler import LRScheduler

from ampopt import optim
from ampopt._step.ranks import check_process_group
from ampopt._step.stepping import Stepping
from ampopt._step.torch_private import HOOKS, is_wrapped_by_scheduler, put_step_hooks
from ampopt._step.transaction import SKIP_BY
from ampopt.optimizer import Optimizer

__all__ = ["extend", "patch_optimizer"]

_NAME = "_ampopt"
"""The attribute that an optimizer is to have of us."""

_COOPERATIVE = frozenset({"state_dict", "load_state_dict", "zero_grad"})
"""Methods of ours that call theirs."""

_TORCHS = torch.optim.Optimizer.__mro__
_OURS = {name for name in vars(Optimizer) if not name.startswith("_")} - _COOPERATIVE


def extend(cls: type[torch.optim.Optimizer]) -> Any:
    """The class ``cls`` with the control points of :class:`ampopt.Optimizer`.

    Use it for an optimizer that someone else wrote and that knows nothing of scaling::

        optimizer = ampopt.extend(Prodigy)(model.parameters(), lr=1.0)
        _, found_inf, scale = optimizer.unscale_and_step(grads_scaled_by=scale)

    The result is a subclass of ``ampopt.Optimizer`` and of ``cls`` and has the constructor of
    ``cls``. Its step is theirs, and its state, so that state dicts of either load into the other.
    How a step is skipped is chosen as for every ordinary step: see ``skip_by``. Where ``step``
    takes no closure, a control point evaluates the closure before it steps.

    What their class defines is left as it is, control points included: an author's ``unscale``,
    ``unscale_and_step``, ``step_after_unscale`` or ``grad_norm`` wins over ours, and so does an
    attribute that an instance has under such a name, as ``pending``.

    The constructor also takes ``process_group``, of the ranks that decide together (see
    :class:`ampopt.Optimizer`), unless theirs does: then, and where they have an attribute of this
    name, it is theirs, and ours is for ``ampopt.GradScaler`` and ``ampopt.unscale_and_step``.

    The same class is returned for the same ``cls``; subclass it, rather than writing to it, to set
    ``skip_by``. It can be pickled, and so can its instances, wherever ``cls`` can. For a class of
    torch's own it is ampopt's class of that name; an ampopt class is returned as it is.

    Args:
        cls: a subclass of ``torch.optim.Optimizer``.

    Returns:
        The class.

    Raises:
        TypeError: ``cls`` is something else, or uses the name ``_ampopt``, the one that
            ``ampopt.Optimizer`` has another use for. Where an instance does, its constructor
            raises.
    """
    if isinstance(cls, torch.optim.Optimizer):
        raise TypeError(
            f"extend takes a class, got an instance of {type(cls).__name__}: "
            "use patch_optimizer(optimizer), or extend its class before making it"
        )
    if not isinstance(cls, type) or not issubclass(cls, torch.optim.Optimizer):
        shown = cls.__name__ if isinstance(cls, type) else type(cls).__name__
        raise TypeError(f"extend takes a subclass of torch.optim.Optimizer, got {shown}")
    return cls if issubclass(cls, Optimizer) else _twin(cls) or _extended(cls)


def patch_optimizer(optimizer: torch.optim.Optimizer) -> Optimizer:
    """Give an optimizer that is there already the control points, in place.

    For optimizers that a framework or a factory made. From now on its class is ``extend`` of its
    class; param groups, state, hooks and schedulers stay as they are, and so do methods that
    someone has put on the instance. In the middle of a training is as good as at its start.

    The loss scale is not the optimizer's: begin with one of your choice, such as
    ``DynamicLossScale()``. (PyTorch's draft of such a function, in pull request #26512, returned
    the scale to begin with.)

    Args:
        optimizer: any of torch's, yours or someone's. One of ampopt's is left as it is.

    Returns:
        ``optimizer``, which type checkers know the control points of from now on.

    Raises:
        TypeError: ``optimizer`` is no torch optimizer, or one that cannot be extended; see
            :func:`extend`. Nothing has changed then.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            "patch_optimizer takes an instance of torch.optim.Optimizer, got "
            f"{type(optimizer).__name__}: use extend(cls) for a class, and for a wrapper the "
            "optimizer in it"
        )
    if isinstance(optimizer, Optimizer):
        return optimizer
    was, step = type(optimizer), type(optimizer).step
    cls = extend(was)
    _refuse_private(cls, optimizer)
    optimizer.__class__ = cls
    _complete(optimizer, was)
    given: Any = vars(optimizer).get("step")
    if is_wrapped_by_scheduler(given) and given.__wrapped__ is step:
        del optimizer.step  # a scheduler's wrapper around the step of the class that it was
        _Tracker(optimizer)
    elif given is not None:
        # Somebody's own, which may end in the step of the class that it was: that one heeds neither
        # a scaler nor a control point.
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        optimizer._ampopt = cls._ampopt.of_another_step().new(optimizer)  # type: ignore[attr-defined]
    return cast("Optimizer", optimizer)


class _Tracker(LRScheduler):
    """Puts torch's wrapper around the step of an optimizer again, and schedules nothing."""

    def step(self, epoch: int | None = None) -> None:
        pass


def _twin(cls: type) -> type | None:
    """Ampopt's own class for one of torch's."""
    twin = getattr(optim, cls.__name__, None)
    return twin if isinstance(twin, type) and cls in twin.__bases__ else None


def _extended(cls: type) -> type:
    for known in cls.__subclasses__():
        if vars(known).get("_extends") is cls:
            return known
    theirs = {name for base in cls.__mro__ if base not in _TORCHS for name in vars(base)}
    if _NAME in theirs:
        raise _taken(cls)
    kept = {name: inspect.getattr_static(cls, name) for name in theirs & _OURS}

    takes_group = "process_group" in inspect.signature(cls.__init__).parameters

    @functools.wraps(cls.__init__)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        group = None if takes_group else kwargs.pop("process_group", None)
        check_process_group(group)
        cls.__init__(self, *args, **kwargs)
        _refuse_private(cls, self)
        _complete(self, cls)
        if group is not None:
            self._ampopt.decide_with(group)

    namespace = {
        "__doc__": cls.__doc__,
        "__init__": __init__,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "_extends": cls,
        **kept,
    }
    return _meta(type(cls))(cls.__name__, (cls, Optimizer), namespace)


@functools.cache
def _meta(of_theirs: type) -> type:
    """A metaclass whose classes are pickled by what they extend: no module has their names.

    Their class is the first of the bases, after which Python lays out instances, so that one of
    theirs can become one of ours; our methods still come before theirs.
    """

    def mro(cls: Any) -> list[type]:
        extends = vars(cls).get("_extends")
        return type.mro(cls) if extends is None else [cls, Optimizer, *extends.__mro__]

    meta = type(of_theirs.__name__, (of_theirs,), {"mro": mro})
    copyreg.pickle(meta, _reduced)
    return meta


def _reduced(cls: Any) -> Any:
    # A class derived from an extended one is found by its name, as usual.
    extends = vars(cls).get("_extends")
    return cls.__qualname__ if extends is None else (extend, (extends,))


def _refuse_private(cls: type, optimizer: Any) -> None:
    """Refuse an instance that has the one name which we need."""
    if not isinstance(vars(optimizer).get(_NAME), (Stepping, type(None))):
        raise _taken(cls)


def _taken(cls: type) -> TypeError:
    return TypeError(
        f"{cls.__name__} cannot be extended: it has its own {_NAME}, which "
        "ampopt.Optimizer has another use for; rename it in a subclass, or step this "
        "optimizer with ampopt.GradScaler, which takes any"
    )


def _complete(optimizer: Any, cls: type) -> None:
    """What a wrapper that does not call torch's constructor leaves out."""
    for name in HOOKS:
        vars(optimizer).setdefault(name, OrderedDict())
    theirs = vars(optimizer).get("skip_by", getattr(cls, "skip_by", "auto"))
    if theirs not in SKIP_BY:
        optimizer._ampopt.leave("skip_by")  # they have another use for the name
    extends = getattr(type(optimizer), "_extends", None)
    if extends and any("process_group" in names for names in (vars(optimizer), dir(extends))):
        optimizer._ampopt.leave("process_group")
    put_step_hooks(optimizer)  # around the step of a class that made no instance yet
