"""Parameters on two GPUs, and states on the CPU for parameters on a GPU."""

import torch

import ampopt
from evidence.first_hour.record import PartRecord

__all__ = ["run"]


def run(record: PartRecord, device: torch.device) -> None:
    """Run both checks, as far as there are devices."""
    if device.type != "cuda":
        record.skip("devices", f"{device} is not a CUDA device")
        return
    with record.trying("two devices"):
        _two(record)
    with record.trying("states on the host"):
        _states_on_the_host(record, device)


def _two(record: PartRecord) -> None:
    """Check that one optimizer steps parameters on two devices alike."""
    if torch.cuda.device_count() < 2:
        record.skip("two devices", "there is only one CUDA device")
        return
    for max_norm in (None, 1.0):
        params = [torch.nn.Parameter(torch.ones(5000, device=f"cuda:{i}")) for i in (0, 1)]
        optimizer = ampopt.AdamW(params)
        for _ in range(2):
            for p in params:
                p.grad = torch.ones_like(p)
            if max_norm is None:
                optimizer.step()
            else:
                optimizer.unscale_and_step(grads_scaled_by=2.0, max_norm=max_norm)
        same = torch.equal(params[0].cpu(), params[1].cpu())
        record.check(f"two devices, max_norm={max_norm}", same)


def _states_on_the_host(record: PartRecord, device: torch.device) -> None:
    """Step on the CPU, then move the parameter: the states must follow, or the error names them."""
    param = torch.nn.Parameter(torch.ones(5000))
    optimizer = ampopt.AdamW([param])
    param.grad = torch.ones_like(param)
    optimizer.step()
    param.grad = None
    param.data = param.data.to(device)
    param.grad = torch.ones_like(param)
    message = "states followed"
    try:
        optimizer.step()
    except (RuntimeError, ValueError) as error:
        message = str(error)
    torch.cuda.synchronize(device)
    right = "is on cpu, the parameter on" in message or message == "states followed"
    record.check("states on the host", right and bool(param.isfinite().all()), message)
