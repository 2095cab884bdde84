"""torchtitan's optimizers, schedules and clipping on two ranks, as in its ``train_step``."""

# The extra may not be installed.
# pyright: reportMissingImports=false

from typing import Any

import pytest
import torch
from support.requirements import needs

import ampopt

needs("torchtitan")


def trained(keeps_clipping: bool) -> Any:
    """Three steps of two micro-batches, the second of which overflows on rank 1."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer
    from torchtitan.components.optimizer.optimizer import OptimizersContainer, ParamGroupConfig
    from torchtitan.distributed import utils as dist_utils

    class ScaledOptimizers(OptimizersContainer):
        @staticmethod
        def _resolve_optimizer_factory(name: str) -> Any:
            return getattr(ampopt, name)

    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Embedding(32, 16), torch.nn.Linear(16, 32))
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.float16, torch.float32))
    group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2})
    optimizers = ScaledOptimizers(
        OptimizersContainer.Config(param_groups=[group], implementation="for-loop"),
        model_parts=[model],
    )
    schedules = LRSchedulersContainer(optimizers, lambda step: 0.5**step)
    schedules.schedulers = [ampopt.lr_scheduler_gate(s) for s in schedules.schedulers]
    (optimizer,) = optimizers
    scale: Any = ampopt.DynamicLossScale()
    norms = []
    for step in range(3):
        optimizers.zero_grad()
        for _ in range(2):
            logits = model(torch.arange(32)[None]).float()
            loss = torch.nn.functional.cross_entropy(logits[0], torch.arange(32).flip(0))
            ampopt.scale_outputs(loss / 2, scale).backward()
        if step == mesh.get_rank() == 1:
            model[1].bias.grad.to_local()[0] = float("inf")
        if keeps_clipping:
            optimizer.unscale(scale)
            norm = dist_utils.clip_grad_norm_(list(model.parameters()), 0.5, foreach=True)
            _, _, scale = optimizer.step_after_unscale()
        else:
            each = list(optimizers)
            _, _, scale = ampopt.unscale_and_step(each, grads_scaled_by=scale, max_norm=0.5)
            norm = optimizer.grad_norm
        schedules.step()
        norms.append(float(norm))
    saved = schedules.state_dict()
    schedules.load_state_dict(saved)
    rate, names = optimizer.param_groups[0]["lr"], list(optimizers.state_dict())
    return scale.item(), norms, saved, rate, names


@pytest.mark.filterwarnings("ignore")
def test_its_optimizers_step_or_skip_together(two_ranks):
    norms = []
    for keeps_clipping in (False, True):
        for scale, of_rank, saved, rate, names in two_ranks.run(trained, keeps_clipping):
            assert scale == 2.0**15
            assert saved == {"last_epoch": 2} and rate == 1e-2 * 0.25
            assert any("exp_avg" in name for name in names)
            norms.append([of_rank[0], of_rank[2]])
    assert all(of_rank == pytest.approx(norms[0], rel=1e-3) for of_rank in norms)
    assert min(norms[0]) > 0.0
