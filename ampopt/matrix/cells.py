"""The columns of the matrix: what each does with an optimizer, and what has to come of it.

A cell returns if the optimizer does it, and lets through what it refuses with. That it does
something else than it should is an ``AssertionError``.
"""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ampopt import backend
from ampopt._synchronization import watching
from ampopt.loss_scale.outputs import scale_outputs
from ampopt.matrix.spread import ddp, fsdp2, tensor_parallel
from ampopt.matrix.subject import Subject
from ampopt.train_step import TrainStep

__all__ = ["CELLS", "NotRunHere"]


class NotRunHere(Exception):
    """The cell has no meaning, or what it needs is not here; the message says which."""


def float16(cls: type[Any]) -> None:
    """Parameters in float16, and state as the optimizer has it without masters."""
    _trains(Subject(cls, dtype=torch.float16))


def bfloat16(cls: type[Any]) -> None:
    """Parameters in bfloat16."""
    _trains(Subject(cls, dtype=torch.bfloat16))


def masters(cls: type[Any]) -> None:
    """Parameters in float16, stepped by float32 masters."""
    subject = Subject(cls, dtype=torch.float16, master_weights=True)
    _trains(subject)
    (master,) = subject.optimizer.master_params()
    assert master.dtype == torch.float32
    _same(master.half(), subject.weight())
    assert not torch.equal(master, subject.weight().float())


def clipping(cls: type[Any]) -> None:
    """``max_norm`` is ``clip_grad_norm_``."""
    # Of LBFGS one evaluation: of the difference of two, clipping leaves rounding errors alone.
    once: dict[str, Any] = {"max_iter": 1} if Subject(cls).needs_closure else {}
    subject, reference = Subject(cls, **once), Subject(cls, **once)
    norms: list[Tensor] = []

    def clip() -> None:
        gradients = reference.gradients()
        norms.append(torch.nn.utils.get_total_norm(gradients))
        torch._foreach_mul_(gradients, (1 / (norms[-1] + 1e-6)).clamp(max=1))  # pyright: ignore

    for _ in range(1 if once else 2):
        subject.step(max_norm=1.0)
        reference.plain_step(clip)
        assert norms[-1] > 1
        _close(subject.optimizer.grad_norm, norms[-1])
    _close(subject.weight(), reference.weight())


def closure(cls: type[Any]) -> None:
    """A closure is run again until its gradients are finite, and no step is lost."""
    subject, reference = Subject(cls), Subject(cls)
    result = subject.overflow(closure=True)
    assert not result.skipped and result.scale.item() < 2.0**127
    reference.step(closure=True)
    _close(subject.weight(), reference.weight())


def accumulate(cls: type[Any]) -> None:
    """Two parts of a batch, each under a scale of its own, are one batch."""
    subject, reference = Subject(cls), Subject(cls)
    if not hasattr(subject.optimizer, "accumulate"):
        raise NotRunHere("there is no accumulate")
    for _ in range(2):
        subject.evaluate(8.0)
        subject.optimizer.accumulate(grads_scaled_by=8.0)
        scale_outputs(subject.loss(), 2.0).backward()
        subject.optimizer.unscale_and_step(grads_scaled_by=2.0)

        def double() -> None:
            torch._foreach_mul_(reference.gradients(), 2.0)  # pyright: ignore

        reference.plain_step(double)
    _close(subject.weight(), reference.weight())


def graph(cls: type[Any]) -> None:
    """``TrainStep(cuda_graph=True)``, and what capturing asks: the host looks at nothing."""
    with backend.host_looking_away():
        subject = Subject(cls)
        step = TrainStep(
            lambda _: subject.loss(),
            lambda loss: loss,
            subject.optimizer,
            8.0,
            autocast=None,
            cuda_graph=True,
        )
        batch = torch.zeros(())
        step(batch)  # which makes the state
        with watching(_refuse_to_look):
            step(batch)
    reference = Subject(cls)
    for _ in range(2):
        reference.plain_step()
    _close(subject.weight(), reference.weight())


def compiled(cls: type[Any]) -> None:
    """The training step as a function under ``torch.compile``."""
    subject, reference = Subject(cls), Subject(cls)
    step = torch.compile(subject.step, backend="eager")  # graphs are found, and run as they are
    try:
        for _ in range(2):
            step()
            reference.step()
    finally:
        torch.compiler.reset()
    _same(subject.weight(), reference.weight())


def from_torch(cls: type[Any]) -> None:
    """A checkpoint of torch's optimizer, in the middle of its training, is gone on from."""
    _handed_on(_torchs(cls), cls)


def to_torch(cls: type[Any]) -> None:
    """And the other way round."""
    _handed_on(cls, _torchs(cls))


def _on_ranks(spread: Callable[..., Any]) -> Callable[[type[Any]], None]:
    """The cell of one way to many ranks, which gives what a model by itself gives."""

    def cell(cls: type[Any]) -> None:
        if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
            raise NotRunHere("this build of torch has no gloo")
        with spread() as on_ranks:
            subject, reference = Subject(cls, spread=on_ranks), Subject(cls)
            _trains(subject)
            _trains(reference)
            _close(subject.weight(), reference.weight())

    return cell


CELLS: dict[str, Callable[[type[Any]], None]] = {
    "float16 parameters": float16,
    "bfloat16 parameters": bfloat16,
    "master weights": masters,
    "clipping": clipping,
    "closure": closure,
    "accumulate": accumulate,
    "graph": graph,
    "compile": compiled,
    "DDP": _on_ranks(ddp),
    "FSDP2": _on_ranks(fsdp2),
    "TP": _on_ranks(tensor_parallel),
    "from torch": from_torch,
    "to torch": to_torch,
}
"""By the name of the column, in the order of the table."""


def _trains(subject: Subject) -> None:
    """It steps; an overflow is skipped, bit for bit, or replayed with a closure; it steps on."""
    _steps(subject)
    before = subject.everything()
    assert subject.overflow().skipped is not subject.needs_closure
    if not subject.needs_closure:
        for old, new in zip(before, subject.everything(), strict=True):
            _same(old, new)
    _steps(subject)


def _steps(subject: Subject) -> None:
    """Something has changed: in half precision perhaps not the weight, which small steps leave."""
    before = subject.everything()
    assert not subject.step().skipped
    now = subject.everything()
    assert len(now) > len(before) or not all(map(torch.equal, now, before))
    assert subject.weight().isfinite().all()


def _handed_on(first: type[Any], second: type[Any]) -> None:
    """Training begun by an optimizer of one class, saved, and gone on with by both."""
    subject, heir = Subject(first), Subject(second)
    for _ in range(2):
        subject.plain_step()
    heir.set_weight(subject.weight())
    # A copy, as a file is: torch's optimizers go on with the very tensors that they are given.
    heir.optimizer.load_state_dict(copy.deepcopy(subject.optimizer.state_dict()))
    for _ in range(2):
        subject.plain_step()
        heir.plain_step()
    _close(subject.weight(), heir.weight())


def _torchs(cls: type[Any]) -> type[Any]:
    found = getattr(torch.optim, cls.__name__, None)
    if found is None:
        raise NotRunHere("torch has none of that name")
    return found


def _refuse_to_look(look: str) -> None:
    raise RuntimeError("the host looks at a tensor")


def _same(actual: Tensor, expected: Tensor) -> None:
    assert torch.equal(actual, expected), (actual, expected)


def _close(actual: Tensor, expected: Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
