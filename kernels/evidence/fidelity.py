"""``python -m evidence.fidelity STEPS``: how far steps with small states are from float32's."""

import argparse
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import ampopt
from ampopt.bench.report import environment
from evidence.peers_in_8_bits import peers

__all__ = ["KINDS", "Fidelity", "compare", "gradients", "main", "maker", "optimizers", "table"]

ELEMENTS = 8192
LR = 1e-3

Make = Callable[[list[Tensor]], Any]
"""Makes an optimizer of parameters, with learning rate :data:`LR` and no weight decay."""

KINDS = {
    "noise 1e-2": ("noise", 1e-2),
    "noise 1e-5": ("noise", 1e-5),
    "noise 1e-6": ("noise", 1e-6),
    "noise 1e-7": ("noise", 1e-7),
    "mean 1e-3": ("mean", 1e-3),
    "uneven 1e-3": ("uneven", 1e-3),
}
"""Kinds of gradients and their sizes; see :func:`gradients`."""


@dataclass(frozen=True)
class Fidelity:
    """Steps of one optimizer compared with those of another on the same gradients.

    Attributes:
        length: the length of the last step, in units of the other's.
        error: the norm of the difference of the sums of all updates, in units of the other's sum.
        largest: the largest update of an element, in units of the learning rate.
        largest_exact: that of the other optimizer.
    """

    length: float
    error: float
    largest: float
    largest_exact: float


def gradients(kind: str, size: float, steps: int, n: int = ELEMENTS) -> Iterator[Tensor]:
    """Gradients of ``n`` elements, the same in each call.

    Args:
        kind: ``"noise"``, normal numbers; ``"mean"``, a mean of 1 with noise of 0.3; ``"uneven"``,
            normal numbers whose sizes spread log-normally (sigma 1.5) over the elements.
        size: a factor.
        steps: how many gradients.
        n: the number of elements.
    """
    generator = torch.Generator().manual_seed(0)
    noise = (torch.randn(n, generator=generator) for _ in range(steps + 1))
    spread = torch.exp(1.5 * next(noise)) if kind == "uneven" else torch.ones(n)
    for x in noise:
        yield size * spread * (1 + 0.3 * x if kind == "mean" else x)


def compare(
    exact: Make, others: Sequence[Make], kind: str, size: float, steps: int
) -> list[Fidelity]:
    """Run optimizers on the same gradients, with parameters that are 0 before each step.

    With such parameters the trust ratio of LAMB and LARS is 1, and Adafactor's updates are the
    shortest it makes. Sophia's estimate of the Hessian is updated in every tenth step.

    Args:
        exact: makes the optimizer with float32 states.
        others: make those that are compared with it.
        kind: of gradients, and their ``size``; see :func:`gradients`.
        size: see :func:`gradients`.
        steps: the number of steps.

    Returns:
        One for each of ``others``.
    """
    wanted, wanted_length, largest_exact = _updates(exact, gradients(kind, size, steps))
    results = []
    for make in others:
        total, length, largest = _updates(make, gradients(kind, size, steps))
        error = ((total - wanted).norm() / wanted.norm()).item()
        results.append(Fidelity(length / wanted_length, error, largest, largest_exact))
    return results


def _updates(make: Make, grads: Iterable[Tensor]) -> tuple[Tensor, float, float]:
    """The sum of all updates, the length of the last, and the largest of an element."""
    param = torch.nn.Parameter(torch.zeros(ELEMENTS))
    optimizer = make([param])
    total = update = torch.zeros(ELEMENTS, dtype=torch.float64)
    largest = 0.0
    for step, param.grad in enumerate(grads):
        if step % 10 == 0 and hasattr(optimizer, "update_hessian"):
            optimizer.update_hessian()
        optimizer.step()
        with torch.no_grad():
            update = param.double() / -LR
            param.zero_()
        total = total + update
        largest = max(largest, update.abs().max().item())
    return total, update.norm().item(), largest


def optimizers() -> list[str]:
    """Names of the optimizers of ``ampopt`` that are made from a rule."""
    return [name for name in ampopt.__all__ if hasattr(getattr(ampopt, name), "rule")]


def table(names: Sequence[str], steps: int) -> Iterator[str]:
    """Lines of a Markdown table: a row for each optimizer, way to keep states and gradients.

    AdamW of other packages is compared with the same float32 states; see :func:`peers`.

    Args:
        names: names of optimizers of ``ampopt``.
        steps: the number of steps.
    """
    yield f"| {steps} steps | states | gradients | length | error | largest | float32's |"
    yield "|---|---|---|---|---|---|---|"
    for name in names:
        ways = {"16 bits": maker(name, 16), "8 bits": maker(name, 8)}
        ways |= peers(LR) if name == "AdamW" else {}
        results = {
            label: compare(maker(name, 32), list(ways.values()), *kind, steps)
            for label, kind in KINDS.items()
        }
        for (i, way), label in itertools.product(enumerate(ways), KINDS):
            of = results[label][i]
            yield (
                f"| {name} | {way} | {label} | {of.length:.3f} | {of.error:.3f} | "
                f"{of.largest:.3g} | {of.largest_exact:.3g} |"
            )


def maker(name: str, state_bits: int) -> Make:
    """A function that makes the optimizer ``name`` of ``ampopt``, without weight decay.

    With a momentum, which is a state, if it takes one.
    """
    cls = getattr(ampopt, name)
    takes = inspect.signature(cls).parameters
    options = {"weight_decay": 0.0, "momentum": 0.9}
    options = {key: value for key, value in options.items() if key in takes}
    return lambda params: cls(params, lr=LR, state_bits=state_bits, **options)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, for all optimizers that are made from a rule or those named."""
    parser = argparse.ArgumentParser(prog="python -m evidence.fidelity", description=__doc__)
    parser.add_argument("steps", type=int, help="1500, as in kernels/RESULTS.md")
    parser.add_argument("--optimizer", action="append", choices=optimizers(), metavar="NAME")
    parser.add_argument("--threads", type=int, help="number of torch's CPU threads")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    conditions = environment(torch.device("cpu"))
    print(", ".join(f"{key} {value}" for key, value in conditions.items()))
    print("\nlength: of the last step, in units of that with float32 states;")
    print("error: of the sum of all updates, relative;")
    print("largest: update of an element, in units of the learning rate\n")
    for line in table(options.optimizer or optimizers(), options.steps):
        print(line, flush=True)


if __name__ == "__main__":
    main()
