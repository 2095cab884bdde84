"""The speeds that ampopt aims at, and whether a row reaches them."""

from dataclasses import dataclass

from ampopt.bench import contenders
from ampopt.bench.rows import BenchRow

__all__ = ["Verdict", "verdicts_on"]


@dataclass(frozen=True)
class Verdict:
    """One target, and the measured value.

    Attributes:
        target: the target, as text.
        value: the measured value, as text.
        met: whether the target was reached.
    """

    target: str
    value: str
    met: bool

    def __str__(self) -> str:
        """The text in the table."""
        return f"target {self.target}: {self.value} {'met' if self.met else 'MISSED'}"


def verdicts_on(row: BenchRow) -> list[Verdict]:
    """Compare ``row`` with its targets; empty if there are none, or if its times are in doubt.

    On the CPU the targets are ratios to torch's best implementation. At most 1.05 if torch has a
    fused one. If it has none: at large tensors 0.5, or else 1.3 times the memory floor. At small
    tensors always 0.5. Sharded over ranks: 1.0 at large tensors and 0.6 at small ones. For
    optimizers that are measured only if named: 0.6 at large tensors, if there is a foreach
    implementation.

    On a GPU: at large tensors 0.9 of a copy's bandwidth, and AdamW 1.2 times as fast as torch's
    fused one, or 1.4 times with clipping; no synchronization; at small tensors no more host time
    than torch's fused step.
    """
    if row.ampopt is None or row.doubt is not None:
        return []
    return _on_cpu(row) if row.device == "cpu" else _on_gpu(row)


def _on_cpu(row: BenchRow) -> list[Verdict]:
    """The verdicts on a row measured on the CPU; see :func:`verdicts_on`."""
    ratio = row.ratio
    if ratio is None:
        return []
    if row.optimizer in contenders.others():
        if row.workload != "large" or "foreach" not in row.times:
            return []
        return [Verdict("<= 0.60", f"{ratio:.2f}", ratio <= 0.6)]
    least = {"small": 0.5, "50 x 64^2": 0.6, "50 x 512^2": 1.0}.get(row.workload)
    if least is not None:
        return [Verdict(f"<= {least:.2f}", f"{ratio:.2f}", ratio <= least)]
    if "fused" in row.times:
        return [Verdict("<= 1.05", f"{ratio:.2f}", ratio <= 1.05)]
    if row.workload != "large" or row.to_floor is None:
        return []
    value = f"{ratio:.2f}, {row.to_floor:.2f} x floor"
    met = ratio <= 0.5 or row.to_floor <= 1.3
    return [Verdict("<= 0.50 or <= 1.30 x floor", value, met)]


def _on_gpu(row: BenchRow) -> list[Verdict]:
    """The verdicts on a row measured on a GPU; see :func:`verdicts_on`."""
    verdicts = []
    if row.workload == "large" and row.to_floor is not None:
        fraction = 1 / row.to_floor
        verdicts.append(Verdict(">= 0.90 of copy", f"{fraction:.2f}", fraction >= 0.9))
        ratio = row.ratio_to("fused")
        if row.optimizer == "AdamW" and ratio is not None:
            least = 1.4 if row.clip else 1.2
            value = f"{1 / ratio:.2f}x"
            verdicts.append(Verdict(f">= {least:.1f}x fused", value, 1 / ratio >= least))
    if row.workload == "small" and row.ampopt is not None and "fused" in row.times:
        host, fused = row.ampopt.host, row.times["fused"].host
        value = f"{host * 1e6:.0f} us"
        verdicts.append(Verdict(f"host <= fused {fused * 1e6:.0f} us", value, host <= fused))
    cost = row.costs.get("ampopt")
    if cost is not None:
        waits = cost.synchronizations
        verdicts.append(Verdict("no synchronization", str(waits), waits == 0))
    return verdicts
