"""torchtitan's optimizers, schedules and clipping on two ranks, as in its ``train_step``."""

# The extra may not be installed.
# pyright: reportMissingImports=false

import copy
from typing import Any

import pytest
import torch
from support.requirements import needs

import ampopt

needs("torchtitan")


def containers(**options: Any) -> tuple[Any, Any, Any]:
    """A sharded model, the container of its AdamW, and that of a schedule that halves the rate."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer
    from torchtitan.components.optimizer.optimizer import OptimizersContainer, ParamGroupConfig

    class ScaledOptimizers(OptimizersContainer):
        @staticmethod
        def _resolve_optimizer_factory(name: str) -> Any:
            return getattr(ampopt, name)

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict({k.removesuffix("_codes"): v for k, v in state_dict.items()})

    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Embedding(32, 256), torch.nn.Linear(256, 32))
    if options.get("master_weights"):
        model.half()
    policy = MixedPrecisionPolicy(torch.float16, torch.float32)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
    group = ParamGroupConfig(
        pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2, **options}
    )
    optimizers = ScaledOptimizers(
        OptimizersContainer.Config(param_groups=[group], implementation="for-loop"),
        model_parts=[model],
    )
    schedules = LRSchedulersContainer(optimizers, lambda step: 0.5**step)
    schedules.schedulers = [ampopt.lr_scheduler_gate(s) for s in schedules.schedulers]
    return model, optimizers, schedules


def train_step(
    model: Any, optimizers: Any, schedules: Any, scale: Any, step: int, keeps_clipping: bool = False
) -> tuple[Any, float]:
    """Take a step of two micro-batches, and return the scale and the norm."""
    from torchtitan.distributed import utils as dist_utils

    optimizers.zero_grad()
    for _ in range(2):
        logits = model(torch.arange(32)[None]).float()
        loss = torch.nn.functional.cross_entropy(logits[0], torch.arange(32).flip(0))
        ampopt.scale_outputs(loss / 2, scale).backward()
    if step == torch.distributed.get_rank() == 1:
        model[1].bias.grad.to_local()[0] = float("inf")
    (optimizer,) = optimizers
    if keeps_clipping:
        optimizer.unscale(scale)
        norm = dist_utils.clip_grad_norm_(list(model.parameters()), 0.5, foreach=True)
        _, _, scale = optimizer.step_after_unscale()
    else:
        each = list(optimizers)
        _, _, scale = ampopt.unscale_and_step(each, grads_scaled_by=scale, max_norm=0.5)
        norm = optimizer.grad_norm
    schedules.step()
    return scale, float(norm)


def trained(keeps_clipping: bool) -> Any:
    """The state after three steps, the second of which overflows on rank 1."""
    model, optimizers, schedules = containers()
    scale, norms = ampopt.DynamicLossScale(), []
    for step in range(3):
        scale, norm = train_step(model, optimizers, schedules, scale, step, keeps_clipping)
        norms.append(norm)
    rate = next(iter(optimizers)).param_groups[0]["lr"]
    return scale.item(), norms, schedules.state_dict(), rate, list(optimizers.state_dict())


def resumed(options: dict[str, Any]) -> tuple[bool, float]:
    """Whether two steps after loading are those of the run that was saved; the rate after them."""
    first, scale = containers(**options), ampopt.DynamicLossScale()
    for step in range(3):
        scale, _ = train_step(*first, scale, step)
    saved = copy.deepcopy([part.state_dict() for part in first])
    runs = [first, containers(**options)]
    for part, state in zip(runs[1], saved, strict=True):
        part.load_state_dict(state)
    for run in runs:
        of_run = scale
        for step in range(3, 5):
            of_run, _ = train_step(*run, of_run, step)
    pairs = zip(*(run[0].parameters() for run in runs), strict=True)
    equal = all(torch.equal(one.to_local(), other.to_local()) for one, other in pairs)
    return equal, next(iter(runs[1][1])).param_groups[0]["lr"]


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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "options", [{}, {"state_bits": 8, "master_weights": True, "master_bits": 24}]
)
def test_a_resumed_run_is_the_same_run(options, two_ranks):
    """The rate is restored, too: torchtitan saves and loads only ``last_epoch`` of a schedule."""
    assert two_ranks.run(resumed, options) == [(True, 1e-2 * 0.5**4)] * 2
