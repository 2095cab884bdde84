"""Whether the rest can run: import, compile, and take a step."""

import time

import torch

import ampopt
from evidence.first_hour.record import PartRecord

__all__ = ["run"]


def run(record: PartRecord, device: torch.device) -> None:
    """Take two steps on ``device``, the first of which compiles."""
    ampopt.set_backend("triton")
    params = [torch.nn.Parameter(torch.ones(n, device=device)) for n in (3, 5000)]
    optimizer = ampopt.AdamW(params, lr=0.5)
    for which in ("first", "second"):
        for p in params:
            p.grad = torch.full_like(p, 2.0)
        start = time.perf_counter()
        result = optimizer.unscale_and_step(grads_scaled_by=2.0, max_norm=1.0)
        record.check(f"the {which} step is not skipped", result.found_inf.item() == 0)
        record.figure(f"{which} step", time.perf_counter() - start, "s")
    finite = all(bool(p.isfinite().all()) and bool((p < 1).all()) for p in params)
    record.check("parameters moved", finite)
