"""The columns of the matrix: each runs an optimizer in one setting, and checks the result.

A cell function returns if the optimizer works. It lets the optimizer's exception through if the
optimizer refuses, and raises ``AssertionError`` if the result is wrong.
"""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ampopt._synchronization import watching
from ampopt.loss_scale.outputs import scale_outputs
from ampopt.testing import as_on_a_device
from ampopt.train_step import TrainStep
from evidence.matrix.spread import ddp, fsdp2, tensor_parallel
from evidence.matrix.subject import Subject

__all__ = ["CELLS", "NotRunHere"]

LARGE = 96
"""Rows and columns of a weight whose states may be kept in few bits."""


class NotRunHere(Exception):
    """The cell makes no sense or needs something that is missing; the message says which."""


def float16(cls: type[Any]) -> None:
    """Parameters in float16, and state in the optimizer's default dtype, without master weights."""
    _trains(Subject(cls, dtype=torch.float16))


def bfloat16(cls: type[Any]) -> None:
    """Parameters in bfloat16."""
    _trains(Subject(cls, dtype=torch.bfloat16))


def masters(cls: type[Any]) -> None:
    """Parameters in float16 with float32 master weights."""
    subject = Subject(cls, dtype=torch.float16, master_weights=True)
    _trains(subject)
    (master,) = subject.optimizer.master_params()
    assert master.dtype == torch.float32
    _same(master.half(), subject.weight())
    assert not torch.equal(master, subject.weight().float())


def states_in_8_bits(cls: type[Any]) -> None:
    """A weight that is large enough for states in 8 bits."""
    subject = Subject(cls, side=LARGE, state_bits=8)
    _trains(subject)
    reference = Subject(cls, side=LARGE)
    _trains(reference)
    assert _bytes_of(subject) <= _bytes_of(reference)


def masters_in_24_bits(cls: type[Any]) -> None:
    """A weight in bfloat16 that is large enough for a master weight in 24 bits, and such states."""
    subject = Subject(
        cls, dtype=torch.bfloat16, side=LARGE, master_weights=True, master_bits=24, state_bits=8
    )
    _trains(subject)
    ((weight, master),) = subject.optimizer.params_and_masters()
    assert subject.optimizer.state[weight]["master_param"].dtype == torch.int8
    apart = (master - subject.weight().float()).abs()
    assert apart.any() and (apart <= 2.0**-8 * master.abs()).all()


def clipping(cls: type[Any]) -> None:
    """``max_norm`` equals ``clip_grad_norm_``."""
    # One evaluation for LBFGS: clipped gradients of two evaluations differ by rounding errors only.
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
    """A closure is run again until its gradients are finite, so no step is skipped."""
    subject, reference = Subject(cls), Subject(cls)
    result = subject.overflow(closure=True)
    assert not result.skipped and result.scale.item() < 2.0**127
    reference.step(closure=True)
    _close(subject.weight(), reference.weight())


def accumulate(cls: type[Any]) -> None:
    """Two halves of a batch, each under its own scale, equal one batch."""
    subject, reference = Subject(cls), Subject(cls)
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
    """``TrainStep(cuda_graph=True)``, with a step that reads no tensor, as capture requires."""
    with as_on_a_device():
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
        step(batch)  # creates the state
        with watching(_refuse_to_look):
            step(batch)
    reference = Subject(cls)
    for _ in range(2):
        reference.plain_step()
    _close(subject.weight(), reference.weight())


def compiled(cls: type[Any]) -> None:
    """The training step as a function under ``torch.compile``."""
    subject, reference = Subject(cls), Subject(cls)
    step = torch.compile(subject.step, backend="eager")  # traces graphs, and does not compile them
    try:
        for _ in range(2):
            step()
            reference.step()
    finally:
        torch.compiler.reset()
    _same(subject.weight(), reference.weight())


def from_torch(cls: type[Any]) -> None:
    """A checkpoint of torch's optimizer, taken mid-training, loads into ampopt's and continues."""
    _handed_on(_torchs(cls), cls)


def to_torch(cls: type[Any]) -> None:
    """A checkpoint of ampopt's optimizer, taken mid-training, loads into torch's and continues."""
    _handed_on(cls, _torchs(cls))


def _on_ranks(spread: Callable[..., Any]) -> Callable[[type[Any]], None]:
    """Return the cell of one kind of parallelism; the result must equal that of a plain model."""

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
    "8-bit states": states_in_8_bits,
    "24-bit masters": masters_in_24_bits,
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
"""The cell functions by column name, in the order of the table."""


def _trains(subject: Subject) -> None:
    """Check a step, an overflow (skipped, or replayed with a closure), and a further step."""
    _steps(subject)
    before = subject.everything()
    assert subject.overflow().skipped is not subject.needs_closure
    if not subject.needs_closure:
        for old, new in zip(before, subject.everything(), strict=True):
            _same(old, new)
    _steps(subject)


def _steps(subject: Subject) -> None:
    """Check that a step changes something: in half precision perhaps only the state."""
    before = subject.everything()
    assert not subject.step().skipped
    now = subject.everything()
    assert len(now) > len(before) or not all(map(torch.equal, now, before))
    assert subject.weight().isfinite().all()


def _bytes_of(subject: Subject) -> int:
    """The bytes of the optimizer's state."""
    states = [x for state in subject.optimizer.state.values() for x in state.values()]
    return sum(x.nbytes for x in states if isinstance(x, Tensor))


def _handed_on(first: type[Any], second: type[Any]) -> None:
    """Train with the class ``first``, save, load into ``second``, continue both, and compare."""
    subject, heir = Subject(first), Subject(second)
    for _ in range(2):
        subject.plain_step()
    heir.set_weight(subject.weight())
    # deepcopy, because torch's load_state_dict keeps the tensors it gets instead of copying them.
    heir.optimizer.load_state_dict(copy.deepcopy(subject.optimizer.state_dict()))
    for _ in range(2):
        subject.plain_step()
        heir.plain_step()
    _close(subject.weight(), heir.weight())


def _torchs(cls: type[Any]) -> type[Any]:
    """The class of torch with the name of ``cls``.

    Raises:
        NotRunHere: torch has no such optimizer.
    """
    torch_class = getattr(torch.optim, cls.__name__, None)
    if torch_class is None:
        raise NotRunHere("torch has no optimizer of that name")
    return torch_class


def _refuse_to_look(look: str) -> None:
    """Raise, in place of a read of a tensor, which a CUDA graph cannot capture."""
    raise RuntimeError("the host reads a tensor")


def _same(actual: Tensor, expected: Tensor) -> None:
    """Check that two tensors are bitwise equal."""
    assert torch.equal(actual, expected), (actual, expected)


def _close(actual: Tensor, expected: Tensor) -> None:
    """Check that two tensors are equal within rounding."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
