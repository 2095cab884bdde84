"""What differs from torch's scaler, by the table in its guide: both columns of each row."""

import inspect

import pytest
import torch

import ampopt


def parameter(grad=None, dtype=torch.float32):
    p = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    p.grad = None if grad is None else torch.full_like(p, grad)
    return p


def scaler_at(scale, optimizer):
    """A scaler that has scaled a loss, without which its ``step`` raises."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    p = optimizer.param_groups[0]["params"][0]
    scaler.scale(torch.zeros((), device=p.device))
    return scaler


def test_the_skip_is_decided_on_the_device_not_on_the_host():
    of_torch = {
        name: optimizer
        for name, optimizer in vars(torch.optim).items()
        if inspect.isclass(optimizer) and optimizer is not torch.optim.Optimizer
    }
    assert len(of_torch) == 15
    fused = {
        name for name, optimizer in of_torch.items()
        if "fused" in inspect.signature(optimizer).parameters
    }  # fmt: skip
    assert fused == {"Adagrad", "Adam", "AdamW", "SGD"}
    assert not getattr(torch.optim.AdamW([parameter()]), "_step_supports_amp_scaling", False)

    ours = {name: getattr(ampopt, name) for name in of_torch}
    assert all(issubclass(ours[name], of_torch[name]) for name in of_torch)
    rules = {name for name in ours if issubclass(ours[name], ampopt.ElementwiseOptimizer)}
    assert set(ours) - rules == {"Muon", "SparseAdam", "LBFGS"}


def test_the_result_says_whether_the_step_was_skipped():
    theirs = torch.optim.SGD([parameter(float("inf"))])
    assert scaler_at(2.0, theirs).step(theirs) is None
    result = ampopt.SGD([parameter(float("inf"))]).unscale_and_step(grads_scaled_by=2.0)
    assert result.found_inf > 0
    assert result.skipped is True


def test_the_result_names_the_parameter_that_overflowed():
    assert not [name for name in dir(torch.amp.GradScaler) if "overflow" in name]
    params = {"good": parameter(1.0), "bad": parameter(float("inf"))}
    ours = ampopt.SGD(params.items())
    watch = ampopt.Watch(ours)
    assert ours.unscale_and_step(grads_scaled_by=2.0).overflowed == ["bad"]
    counts = {name: noted["overflows"] for name, noted in watch.read()["parameters"].items()}
    assert counts == {"good": 0, "bad": 1}


def test_a_gradient_overflows_by_unscaling():
    theirs = torch.optim.SGD([parameter(1e37)], lr=0.1)
    scaler_at(2.0**-10, theirs).step(theirs)
    assert theirs.param_groups[0]["params"][0].isinf().all()
    ours = ampopt.SGD([parameter(1e37)], lr=0.1)
    assert ours.unscale_and_step(grads_scaled_by=2.0**-10).skipped
    assert (ours.param_groups[0]["params"][0] == 1).all()


def test_endless_overflows_end_at_a_floor_with_a_warning():
    theirs = torch.optim.SGD([parameter(float("inf"))])
    scaler = scaler_at(2.0**16, theirs)
    ours, scale = ampopt.SGD([parameter(float("inf"))]), ampopt.DynamicLossScale()
    for _ in range(200):
        scaler.step(theirs)
        scaler.update()
        scale = ours.unscale_and_step(grads_scaled_by=scale).scale
    assert scaler.get_scale() == 0
    assert scale.item() == 2.0**-126


def test_a_closure():
    theirs = torch.optim.SGD([parameter(1.0)])
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        scaler_at(2.0, theirs).step(theirs, closure=lambda: torch.zeros(()))

    p = parameter()
    ours = ampopt.SGD([p], lr=0.25)
    tried = []

    def closure(scale):
        tried.append(float(scale))
        ours.zero_grad()
        loss = (p.half() * 8).sum().float()
        ampopt.scale_outputs(loss, scale).backward()
        return loss

    result = ours.unscale_and_step(closure, grads_scaled_by=2.0**15)
    # float16 ends at 65504, less than 8 * 2**13.
    assert tried == [2.0**15, 2.0**14, 2.0**13, 2.0**12]
    assert not result.skipped
    assert (p == 1 - 0.25 * 8).all()


def test_float16_parameters():
    theirs = torch.optim.SGD([parameter(1.0, torch.float16)])
    with pytest.raises(ValueError, match="unscale FP16 gradients"):
        scaler_at(2.0, theirs).step(theirs)
    for masters in (False, True):
        p = parameter(1.0, torch.float16)
        ours = ampopt.SGD([p], lr=0.5, master_weights=masters)
        assert not ours.unscale_and_step(grads_scaled_by=2.0).skipped
        assert (p == 0.75).all()


def test_a_float16_loss_of_one_element():
    loss = torch.full((1,), 1.5, dtype=torch.float16)
    assert torch.amp.GradScaler("cpu", init_scale=2.0**16).scale(loss).isinf()
    assert ampopt.scale_outputs(loss, 2.0**16) == 1.5 * 2**16


def test_no_gradients():
    theirs = torch.optim.SGD([parameter()])
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler_at(2.0, theirs).step(theirs)
    scale = ampopt.DynamicLossScale(growth_interval=1)
    result = ampopt.SGD([parameter()]).unscale_and_step(grads_scaled_by=scale)
    assert not result.skipped
    assert result.scale.item() == scale.item()


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_the_scaler_does_what_it_does_with_torchs(name):
    runs = []
    for module in (torch.optim, ampopt):
        p = parameter()
        optimizer = getattr(module, name)([p], lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2)
        seen = []
        for factor in (1.0, float("inf"), 2.0, -3.0, float("nan"), 1.0):
            optimizer.zero_grad()
            scaler.scale((p * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            seen.append((p.tolist(), scaler.get_scale()))
        runs.append(seen)
    for (p_theirs, scale_theirs), (p_ours, scale_ours) in zip(*runs, strict=True):
        assert p_ours == pytest.approx(p_theirs, rel=1e-6)
        assert scale_ours == scale_theirs
