"""The host's time of a step of the Triton backend is taken without launches."""

import re

import pytest
import torch

import ampopt
from ampopt.bench import contenders
from ampopt_kernels.language import HAS_TRITON
from evidence import host


@pytest.fixture(autouse=True)
def eager():
    ampopt.set_backend("eager")


@pytest.mark.skipif(not HAS_TRITON, reason="Triton cannot be imported here")
def test_the_hosts_time_is_taken_without_launches(monkeypatch, capsys):
    """The steps run, and change nothing but what torch and ampopt change without kernels."""
    entered = []
    enter = contenders.enter

    def watched(name, optimizer, params):
        entered.append((name, params, [p.detach().clone() for p in params]))
        return enter(name, optimizer, params)

    monkeypatch.setattr(contenders, "enter", watched)
    monkeypatch.setattr(host, "_have_object_loops", lambda: None)
    monkeypatch.setattr(host, "_STEPS", 2)
    monkeypatch.setattr(host, "_TENSORS", (2, 3))
    host.main()
    lines = capsys.readouterr().out.splitlines()
    who = ["torch fused, GradScaler", "ampopt, asked in Python", "ampopt, asked in C++"]
    assert [line.split(":")[0] for line in lines] == [
        f"{name}, {tensors} tensors" for name in who for tensors in (2, 3)
    ]
    shown = r": \d+ us a step, \d+ with clipping; \d+ and \d+ with gradients at new addresses$"
    assert all(re.search(shown, line) for line in lines)
    assert [name for name, _, _ in entered] == ["fused"] * 4 + ["ampopt"] * 8
    for _, params, before in entered:
        assert all(map(torch.equal, params, before))
    assert ampopt.get_backend() == "eager"
