"""Master weights and optimizer states in the CPU's memory, for a model that fills the GPU.

The GPU has float16 parameters and their gradients. The host has a copy of both, pinned, and the
optimizer's float32 master weights and states. In each step the gradients are downloaded, tested and
used on the host, and the rounded parameters are uploaded, unless the step was skipped. The second
step overflows, to show that. Without a GPU, everything is on the CPU.

    python examples/masters_on_the_host.py
"""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ampopt import AdamW, DynamicLossScale, scale_outputs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def on_host(tensor: Tensor) -> Tensor:
    """A copy of ``tensor`` in the CPU's memory, pinned so that copies to it do not block."""
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=DEVICE.type == "cuda")
    return pinned.copy_(tensor.detach())


def main() -> None:
    """Take three steps, and print how many were uploaded, and the scale."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    model.to(DEVICE, torch.float16)
    params = list(model.parameters())
    host_params = [on_host(p).requires_grad_() for p in params]
    host_grads = [on_host(p) for p in params]
    optimizer = AdamW(host_params, lr=1e-3, master_weights=True)
    scale = DynamicLossScale()
    uploads = 0

    for step in range(3):
        images = torch.randn(32, 64, device=DEVICE, dtype=torch.float16)
        labels = torch.randint(10, (32,), device=DEVICE)
        loss = cross_entropy(model(images).float(), labels)
        scale_outputs(loss, scale).backward()
        if step == 1 and params[0].grad is not None:  # to show a skip: delete these lines
            params[0].grad[0, 0] = float("inf")

        for p, host_param, host_grad in zip(params, host_params, host_grads, strict=True):
            # An expert without tokens has no gradient.
            host_param.grad = None if p.grad is None else host_grad.copy_(p.grad, non_blocking=True)
            p.grad = None
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()  # the one wait of a step: for the gradients

        result = optimizer.unscale_and_step(grads_scaled_by=scale, max_norm=1.0)
        scale = result.scale
        if not result.skipped:
            with torch.no_grad():
                for p, host_param in zip(params, host_params, strict=True):
                    p.copy_(host_param, non_blocking=True)
            uploads += 1

    print(f"{uploads} of 3 steps uploaded, scale {scale.item():g}")


if __name__ == "__main__":
    main()
