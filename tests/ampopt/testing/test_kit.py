"""The testing kit as users run it, and its helpers."""

import math
import os
import re
import unittest
import warnings
from collections import deque
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis.strategies import just
from support import torch_options
from support.authored_optimizers import Selecting
from support.optimizers import Plain
from support.planted_bugs import PositiveMean
from torch.nn import Parameter

import ampopt
from ampopt.testing import (
    Blueprint,
    History,
    OptimizerContract,
    assert_bitwise_unchanged,
    assert_same,
    bits,
    inject_overflow,
    strategies,
)
from ampopt.testing.checkpoints import from_bytes, to_bytes
from ampopt.testing.failures import Failure, Summary, of_example
from ampopt.testing.state_machine.machine import Call
from ampopt.testing.state_machine.sequence import CallSequence

ROOT = Path(__file__).parents[3]
THEIRS = """
import hypothesis, torch, ampopt
from ampopt.testing import OptimizerContract

hypothesis.settings.register_profile("theirs", max_examples=2, database=None)
hypothesis.settings.load_profile("theirs")

class Stays(ampopt.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    def step(self, closure=None):
        return None if closure is None else closure()

class TestStays(OptimizerContract):
    closures = False

    def make(self, params):
        return Stays(params)

class TestNotOurs(OptimizerContract):
    def make(self, params):
        return torch.optim.SGD(params)

class Flat(ampopt.Optimizer):
    def __init__(self, params, lr=0.5):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.add_(p)
                    p.reshape(-1).sub_(group["lr"] * p.grad.reshape(-1))

class TestFlat(OptimizerContract):
    closures = False
    settings = hypothesis.settings(max_examples=15, derandomize=True, database=None)

    def make(self, params):
        return Flat(params)
"""
SELECTED = """
    TestStays and (closure or complex_parameters or skipped or saving or sequence)
    or TestNotOurs and no_scale_is_step
    or TestFlat and (leaves_gradients_alone or layout_does_not_matter)
"""


def outside(with_torch, folder, *arguments):
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    return with_torch.run(*arguments, cwd=folder, environment=environment)


@pytest.fixture(scope="module")
def report(with_torch, tmp_path_factory):
    """The output of pytest for a test file as users write it."""
    folder = tmp_path_factory.mktemp("theirs")
    (folder / "test_theirs.py").write_text(THEIRS, encoding="utf-8")
    options = ["-q", "-rs", "-p", "no:cacheprovider", "-k", " ".join(SELECTED.split())]
    return outside(with_torch, folder, "-m", "pytest", *options).stdout


def test_a_users_test_file_is_run_and_reported(report):
    assert "not claimed: closures" in report
    assert "not claimed: complex_parameters" in report
    assert "make must return an ampopt.Optimizer, got SGD" in report
    assert "TestNotOurs().replay(" in report
    assert "3 failed" in report, report


def test_failures_are_summed_up_the_smallest_first_with_the_claim_that_explains_each(report):
    _, summary = re.split(r"=+ ampopt\.testing =+\n", report)
    lines = summary[summary.index("TestFlat") :].splitlines()
    assert lines[0] == "TestFlat: 2 invariants not kept; the smallest example first"
    assert lines[1].startswith("test_a_step_leaves_gradients_alone (1 parameter, 1 element, ")
    assert lines[2].startswith("    the step wrote to p.grad: [0]")
    assert lines[3] == "    if it is not meant to: leaves_gradients = False"
    assert lines[4].startswith("test_layout_does_not_matter (1 parameter, ")
    assert "any_layout = False" in lines[6]


def test_a_summary_is_no_more_than_a_screen_and_tells_what_explains_a_failure():
    summary = Summary()
    history = History((Blueprint((2, 2), (1.0,)),), ((None,),))
    error = AssertionError("off" * 100)
    for _ in range(20):
        claims, drawn = ("plain_steps", "checkpoints"), {"history": history}
        summary.note("TestMine", of_example("test_it", error, drawn, claims, lambda drawn: False))
    summary.note(
        "TestMine", Failure("test_that", "2 calls", (2,), str(error), ("checkpoints = False",))
    )
    lines = list(summary.lines())
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 110
    assert lines[1] == "test_that (2 calls)"
    assert lines[3] == "    if it is not meant to: checkpoints = False"


def test_a_summary_leaves_out_the_values_that_pytest_shows_of_an_assertion():
    messages = (
        "1 of 2 moved\nassert not 1\n +  where 1 = f()",
        "assert 1 == 2",
        "it differs:\n  [0] is 1\n  [1] is 2",
    )
    failures = [Failure("test_it", "2 calls", (2,), message) for message in messages]
    told = [list(failure.lines)[1].strip() for failure in failures]
    assert told == ["1 of 2 moved", "assert 1 == 2", "it differs: [0] is 1"]


def test_a_step_that_calls_that_of_its_base_may_run_the_hooks_around_both():
    """As torch's optimizers do, once the base class has been used itself."""

    class Derived(Plain):
        def step(self, closure=None):
            return super().step(closure)

    class TestDerived(OptimizerContract):
        settings = hypothesis.settings(max_examples=5, derandomize=True, database=None)

        def make(self, params):
            return Derived(params)

    Plain([Parameter(torch.ones(2))])
    contract: Any = TestDerived()
    contract.test_step_hooks_run_on_every_attempt()


def test_a_parameter_that_moves_at_a_learning_rate_of_zero_is_shown():
    class DividesByLr(ampopt.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.5})

        @torch.no_grad()
        def step(self, closure=None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(torch.tensor(group["lr"]) / group["lr"] if p.grad is not None else 0)

    class TestDividesByLr(OptimizerContract):
        def make(self, params):
            return DividesByLr(params)

    history = History((Blueprint((1,), (2.0,)),), ((Blueprint((1,), (1.0,)),),))
    example: Any = {"history": history, "way": "unscale_and_step"}
    with pytest.raises(AssertionError, match="1 elements of parameter 0 .* from 2.0 to nan"):
        TestDividesByLr().replay("test_a_learning_rate_of_zero_moves_nothing", **example)


WHOLE = History(
    (
        Blueprint((2, 0), (), torch.float64),
        Blueprint((2, 2), (1.0,), layout="transposed"),
        Blueprint((1,), (1.0,)),
    ),
    ((None, None, Blueprint((1,), (1e30,))),),
    (1,),
)
CAUSES = {
    "shapes = strategies.shapes(min_side=1)": lambda h: any(not p.numel for p in h.params),
    "dtypes = (torch.float32,)": lambda h: any(p.dtype == torch.float64 for p in h.params),
    "huge_gradients = False": lambda h: any(g and g.numbers == (1e30,) for g in h.steps[0]),
    "any_layout = False": lambda h: any(p.layout != "contiguous" for p in h.params),
    "several_groups = False": lambda h: bool(h.groups),
}
"""For each limit of the examples, a failure that the limit is meant to avoid."""


@pytest.mark.parametrize("limit", CAUSES)
def test_a_limit_is_suggested_only_if_the_example_passes_within_it(limit):
    def explained_by(passes):
        drawn, claims = {"history": WHOLE}, ("plain_steps", "checkpoints", "any_layout")
        return of_example("test_it", AssertionError(), drawn, claims, passes).explanations

    found = explained_by(lambda drawn: not CAUSES[limit](drawn["history"]))
    last = ("checkpoints = False", "any_layout = False")
    assert found == tuple(dict.fromkeys((limit, *last)))
    assert explained_by(lambda drawn: False) == last


@pytest.mark.parametrize("name", ["state_bits", "bits"])
def test_full_precision_is_suggested_only_if_the_example_passes_in_it(name):
    def explained_by(passes):
        drawn = {"history": WHOLE, name: 8}
        return of_example("test_it", AssertionError(), drawn, (), passes).explanations

    assert explained_by(lambda drawn: drawn[name] == 32) == ("state_bits = (32,)",)
    assert explained_by(lambda drawn: False) == ()


def test_a_negative_state_that_is_declared_positive_is_named_with_the_fix():
    class TestSigns(OptimizerContract):
        def make(self, params):
            return PositiveMean(params)

    grads = [Blueprint((2,), (number,)) for number in (1.0, -1.0)]
    history = History((Blueprint((2,), (1.0,)),), tuple((grad,) for grad in grads))
    contract, test = TestSigns(), "test_small_states_are_near_full_ones"
    contract.replay(test, history=replace(history, steps=history.steps[:1]), bits=8)
    contract.replay(test, history=history, bits=32)
    fix = r"'mean' of parameter 0 becomes negative, -0\..* remove positive=True from State\('mean'"
    with pytest.raises(AssertionError, match=fix):
        contract.replay(test, history=history, bits=8)


@pytest.mark.parametrize("claim", ["elementwise", "any_layout", "layout_changes_no_bit"])
def test_elements_are_permuted_only_where_that_changes_nothing(claim):
    class Contract(OptimizerContract):
        settings = hypothesis.settings(max_examples=2, database=None)

        def make(self, params):
            return ampopt.SGD(params, lr=0.5)

    contract: Any = type("Contract", (Contract,), {claim: False})
    with pytest.raises(unittest.SkipTest, match=f"not claimed: {claim}"):
        contract().test_elements_train_alike()


@pytest.mark.parametrize("test", ["any_sequence_of_calls", "any_sequence_of_calls_is_near_float64"])
def test_sequences_are_of_parameters_of_the_claimed_shapes_whatever_their_size(test):
    seen = set()

    class Contract(OptimizerContract):
        shapes = just((4, 8))
        settings = hypothesis.settings(max_examples=2, stateful_step_count=4, database=None)

        def make(self, params):
            seen.update(tuple(p.shape) for p in params)
            return ampopt.SGD(params, lr=0.5)

    getattr(Contract(), f"test_{test}")()
    assert seen == {(4, 8)}


@pytest.mark.parametrize(("place", "is_compared"), [(3, True), (20, False)])
def test_of_large_parameters_the_first_elements_are_compared_with_float64(place, is_compared):
    """The more elements, the likelier one of them is off by more than the copies of its own."""

    class Off(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    p.view(-1)[place] += 1.0

    class Contract(OptimizerContract):
        def make(self, params):
            return ampopt.SGD(params, lr=0.0)

        def reference(self, params, **options):
            return Off(params)

    state = Contract.float64_machine()
    try:
        begin: Any = {"dtype": torch.float32, "options": {}, "on_device": False, "kind": "number"}
        state.begin(shapes=[(4, 8)], **begin)
        with pytest.raises(AssertionError, match="off by 1,") if is_compared else nullcontext():
            state.advance()
    finally:
        state.teardown()


def test_what_is_not_claimed_is_a_skip_under_unittest_too():
    class Contract(OptimizerContract, unittest.TestCase):
        closures = elementwise = any_layout = plain_steps = False

        def make(self, params):
            return ampopt.SGD(params, lr=0.5)

    names = [name for name in dir(Contract) if name.startswith("test_")]
    suite = unittest.TestSuite(map(Contract, names))
    result = suite.run(unittest.TestResult())
    assert not result.failures and not result.errors
    reasons = [reason for _, reason in result.skipped]
    assert {"not claimed: plain_steps", "not claimed: closures"} <= set(reasons)


def test_numbers_shrink_to_one_and_not_to_zeros():
    for kind in ("ordinary", "edge"):
        drawn = strategies.values(torch.float32, kind)
        settings = hypothesis.settings(max_examples=2000, database=None, derandomize=True)
        assert hypothesis.find(drawn, lambda x: True, settings=settings) == 1.0
        zero = hypothesis.find(drawn, lambda x: x == 0, settings=settings)
        assert math.copysign(1.0, zero) == 1.0
        hypothesis.find(drawn, lambda x: math.copysign(1.0, x) < 0 == x, settings=settings)


def test_uneven_numbers_are_powers_of_two_far_apart():
    drawn = strategies.values(torch.float32, "uneven")
    settings = hypothesis.settings(max_examples=2000, database=None, derandomize=True)
    assert hypothesis.find(drawn, lambda x: True, settings=settings) == 1.0
    for number in (2.0**-12, -(2.0**-12), 4.0, -4.0):
        hypothesis.find(drawn, lambda x, number=number: x == number, settings=settings)


class Drifts(ampopt.SGD):
    """SGD whose parameters change in the calls that one claim is about, and in no others."""

    drifts_by = ""

    def drift(self, claim):
        if claim == self.drifts_by:
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.add_(1.0)

    def unscale_and_step(self, *args, **options):
        dtype = self.param_groups[0]["params"][0].dtype
        self.drift({torch.float64: "dtypes", torch.bfloat16: "half_precision"}.get(dtype))
        if "state_bits" in self.param_groups[0]:
            self.drift("state_bits")
        if isinstance(self.param_groups[0]["lr"], torch.Tensor):
            self.drift("tensor_learning_rates")
        if len(self.param_groups) > 1:
            self.drift("several_groups")
        return super().unscale_and_step(*args, **options)

    def __setstate__(self, state):
        super().__setstate__(state)
        self.drift("deepcopies" if "defaults" in state else "checkpoints")

    def accumulate(self, *args, **options):
        self.drift("accumulates")
        return super().accumulate(*args, **options)


@pytest.mark.parametrize(
    ("claim", "dtype", "hint"),
    [
        ("half_precision", torch.bfloat16, "half_precision = ()"),
        ("dtypes", torch.float64, "dtypes = (torch.float32,)"),
        ("state_bits", torch.float32, "state_bits = (32,)"),
        ("deepcopies", torch.float32, "deepcopies = False"),
        ("checkpoints", torch.float32, "checkpoints = False"),
        ("accumulates", torch.float32, "accumulates = False"),
        ("several_groups", torch.float32, "several_groups = False"),
        ("tensor_learning_rates", torch.float32, "tensor_learning_rates = False"),
        ("", torch.float32, None),
    ],
)
def test_of_a_sequence_only_claims_are_suggested_without_whose_calls_it_passes(claim, dtype, hint):
    class Tested(Drifts):
        drifts_by = claim

    class Contract(OptimizerContract):
        half_precision = (torch.bfloat16,)

        def make(self, params):
            return Tested(params, lr=0.5)

    scalar = {"shapes": [()], "dtype": dtype, "options": {}, "on_device": False, "kind": "number"}
    scalar["state_bits"] = 8 if claim == "state_bits" else 32
    calls = [
        Call("begin", scalar),
        Call("set_learning_rate_tensor", {"lr": 0.5}),
        Call("advance", {}),
        Call("accumulate", {"numbers": ((1.0,),) * 4, "bad": None}),
        Call("unscale_and_step", {"max_norm": None}),
        Call("deepcopy", {}),
        Call("save", {"go_on_with_it": True}),
        Call("add_group", {"shape": (), "lr": 0.5}),
        Call("advance", {}),
    ]
    sequence = CallSequence(Contract, False, calls)
    assert sequence.passes() is (hint is None)
    if hint is not None:
        failure = sequence.failure("test_it", AssertionError(), ("plain_steps", "continuous"))
        assert failure.explanations == (hint, "continuous = False")


def test_gradients_are_edited_where_unscale_has_put_them():
    class WithMasters(OptimizerContract):
        half_precision = (torch.bfloat16,)

        def make(self, params):
            return ampopt.SGD(params, lr=0.5, master_weights=True)

    begin = {"shapes": [(2,)], "dtype": torch.bfloat16, "options": {}, "on_device": False}
    calls = [
        Call("begin", {**begin, "kind": "static", "state_bits": 32}),
        Call("advance_edited", {}),
        Call("backward", {"numbers": ((2.0,),) * 4, "bad": None}),
        Call("unscale", {}),
        Call("edit_gradients", {"factor": 0.5}),
        Call("step_after_unscale", {}),
    ]
    assert CallSequence(WithMasters, False, calls).passes()


def test_of_a_tensor_the_first_element_that_differs_is_named():
    one, other = torch.arange(600.0).reshape(20, 30), torch.arange(600.0).reshape(20, 30)
    other[3, 5:] = -1.0
    with pytest.raises(AssertionError) as found:
        assert_same(bits({"a": [one]}), bits({"a": [other]}), "two results")
    message = "two results:\n  ['a'][0][3, 5] is 95.0, not -1.0 (25 of 600 elements differ)"
    assert str(found.value) == message
    with pytest.raises(AssertionError, match="it is -0.0, not 0.0$"):
        assert_same(bits(torch.tensor(-0.0)), bits(torch.tensor(0.0)), "zeros")
    with pytest.raises(AssertionError, match=r"and in 15 more places$"):
        assert_same(bits(list(one)), bits(list(one + 1)), "many")


@pytest.mark.parametrize(
    ("actual", "expected", "told"),
    [
        ({"a": None}, {"a": {"b": 1}}, "['a'] is None, not {'b': 1}"),
        ({"a": {"b": 1}}, {"a": None}, "['a'] is {'b': 1}, not None"),
        ([[1]], [None], "[0] is [1], not None"),
        ([None], [[1]], "[0] is None, not [1]"),
        ([1, 2], [1], "it is [1, 2], not [1]"),
        (torch.ones(1), 1.0, "it is <float32 [1]: [1.0]>, not '1.0'"),
        (torch.ones(1), torch.ones(1).int(), "it is <float32 [1]: [1.0]>, not <int32 [1]: [1]>"),
        (torch.ones(1), torch.ones(()), "it is <float32 [1]: [1.0]>, not <float32 []: 1.0>"),
        ("a" * 2000, "b", "it is other bits, not what was expected"),
    ],
)
def test_results_of_other_kinds_dtypes_or_shapes_are_shown_whole(actual, expected, told):
    with pytest.raises(AssertionError) as found:
        assert_same(bits(actual), bits(expected), "two results")
    assert str(found.value) == f"two results:\n  {told}"


def test_bits_show_values():
    shown = {
        "<bfloat16 [2, 1]: [[1.0], [-0.0]]>": torch.tensor([[1.0], [-0.0]], dtype=torch.bfloat16),
        "<complex64 []: 1j>": torch.tensor(1j),
        "<float32 [0, 3]: []>": torch.ones(0, 3),
        f"<int64 [18]: {list(range(16))} and 2 more>": torch.arange(18),
        "<float32 [2]: [1.0, 3.0]>": torch.tensor([[1.0, 2.0], [3.0, 4.0]])[:, 0],
    }
    assert [repr(bits(tensor)) for tensor in shown.values()] == list(shown)


@pytest.mark.usefixtures("process_group")
def test_bits_of_a_tensor_that_is_spread_over_ranks_are_refused():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    with pytest.raises(RuntimeError, match="DTensor"):
        bits(distribute_tensor(torch.ones(2), mesh))


def test_only_the_kit_needs_hypothesis_and_its_absence_is_named(with_torch, tmp_path):
    code = "import sys; sys.modules['hypothesis'] = None; import ampopt; import ampopt.testing"
    done = outside(with_torch, tmp_path, "-c", code)
    assert "ImportError: ampopt.testing needs hypothesis and pytest" in done.stderr
    assert "ampopt[testing]" in done.stderr


@pytest.mark.parametrize("where", [1, (1, 2), (-1, -1)])
def test_overflows_come_where_and_when_they_are_asked_for(where):
    params = [Parameter(torch.ones(2)), Parameter(torch.ones(1, 3))]
    bad = []
    with inject_overflow(params, where, at=[1]):
        for _ in range(3):
            for p in params:
                p.grad = None
            torch.cat([p.reshape(-1) for p in params]).sum().backward()
            bad.append([p.grad is not None and p.grad.isinf().sum().item() for p in params])
    assert bad == [[0, 0], [0, 1], [0, 0]]


@pytest.mark.parametrize(("where", "value"), [(2, float("inf")), ((0, 2), float("nan")), (0, 1.0)])
def test_an_overflow_that_cannot_be_is_refused(where, value):
    with pytest.raises(ValueError), inject_overflow([Parameter(torch.ones(2))], where, value=value):
        pass


def test_a_change_is_named():
    param = Parameter(torch.ones(2))
    optimizer = ampopt.SGD([param], lr=0.5)
    param.grad = torch.ones(2)
    with pytest.raises(AssertionError, match=r"\['parameters'\]\[0\]"):
        with assert_bitwise_unchanged(optimizer):
            optimizer.step()


def test_a_deque_that_grows_in_a_state_is_a_change():
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = ampopt.SGD([param], lr=0.5)
    optimizer.state[param]["last"] = deque([torch.ones(2)])
    with pytest.raises(AssertionError, match="last"):
        with assert_bitwise_unchanged(optimizer):
            optimizer.state[param]["last"].append(torch.ones(2))


def test_as_many_examples_are_drawn_as_the_profile_says():
    """Also if ``torch_options`` was imported, which makes torch load a profile of its own."""
    assert torch_options.OPTION_SETS
    asked = hypothesis.settings.get_profile(os.environ.get("AMPOPT_HYPOTHESIS_PROFILE", "default"))
    assert hypothesis.settings().max_examples == asked.max_examples
    assert hypothesis.settings().deadline == asked.deadline


def test_warnings_of_torch_about_checkpoints_are_no_failure(monkeypatch):
    """A warning as torch 2.15 gives for sparse tensors, even if warnings are errors."""
    load = torch.load

    def warning(*args, **kwargs):
        warnings.warn("Validating sparse tensor invariants because weights_only=True", stacklevel=2)
        return load(*args, **kwargs)

    monkeypatch.setattr(torch, "load", warning)
    sparse = torch.eye(2).to_sparse()
    assert from_bytes(to_bytes([sparse]))[0].to_dense().equal(torch.eye(2))


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (ampopt.AdamW, {}),
        (ampopt.AdamW, {"state_bits": 8}),
        (ampopt.SGD, {"momentum": 0.9}),
        (ampopt.Rprop, {}),
        (ampopt.ScheduleFreeAdamW, {}),
        (ampopt.AdamW, {"master_weights": True, "master_bits": 24}),
    ],
)
def test_a_skipped_first_step_may_make_states_at_their_initial_values(cls, options):
    dtype = torch.bfloat16 if "master_weights" in options else torch.float32
    params = [torch.nn.Parameter(torch.ones(n, dtype=dtype)) for n in (5, 8192)]
    optimizer = cls(params, **options)
    for p in params:
        p.grad = torch.full_like(p, torch.inf)
    with assert_bitwise_unchanged(optimizer):
        optimizer.unscale_and_step(grads_scaled_by=1.0)
    assert all(map(optimizer.state.get, params))
    with assert_bitwise_unchanged(optimizer):
        optimizer.unscale_and_step(grads_scaled_by=1.0)


def test_a_skipped_first_step_may_make_masters_alone():
    class WithAStepOfItsOwn(ampopt.AdamW):
        def step(self, closure=None):
            return super().step(closure)

    p = torch.nn.Parameter(torch.ones(5, dtype=torch.float16))
    optimizer = WithAStepOfItsOwn([p], master_weights=True)
    p.grad = torch.full_like(p, torch.inf)
    with assert_bitwise_unchanged(optimizer):
        optimizer.unscale_and_step(grads_scaled_by=1.0)
    assert list(optimizer.state[p]) == ["master_param"]


@pytest.mark.parametrize(
    ("cls", "options"), [(Selecting, {}), (ampopt.SGD, {"momentum": 0.9, "dampening": 0.5})]
)
def test_a_skipped_first_step_may_make_states_that_only_a_step_can_make(cls, options):
    p = torch.nn.Parameter(torch.ones(5))
    optimizer = cls([p], **options)
    with pytest.raises(NotImplementedError):
        optimizer.initialize_states()
    p.grad = torch.full_like(p, torch.inf)
    with assert_bitwise_unchanged(optimizer):
        optimizer.unscale_and_step(grads_scaled_by=1.0)
    assert optimizer.state[p]
    p.grad = torch.ones_like(p)
    with (
        pytest.raises(AssertionError, match=r"a step:\n  \['parameters'.* is .*, not 1.0"),
        assert_bitwise_unchanged(optimizer, "a step"),
    ):
        optimizer.unscale_and_step(grads_scaled_by=1.0)


def test_a_new_state_that_is_not_at_its_initial_values_is_a_change():
    p = torch.nn.Parameter(torch.ones(5))
    optimizer = ampopt.AdamW([p], lr=0.0)  # the parameter stays as it is
    p.grad = torch.ones(5)
    with (
        pytest.raises(AssertionError, match="changed what it must leave"),
        assert_bitwise_unchanged(optimizer),
    ):
        optimizer.step()
