"""Invariants: checkpoints, copies, and the order, grouping and layout of parameters."""

import copy
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

import ampopt
from ampopt.testing.bits import assert_same, bits
from ampopt.testing.blueprints import Blueprint, History, Scale
from ampopt.testing.checkpoints import from_bytes, to_bytes
from ampopt.testing.claims import Claims
from ampopt.testing.invariant import check_claims, invariant
from ampopt.testing.invariants.examples import ending_well
from ampopt.testing.invariants.training import (
    Trained,
    assert_same_training,
    start,
    step_by,
    train,
)

__all__ = ["Storage"]


class Storage(Claims):
    """Checkpoints, copies, groups, order and layout."""

    @invariant(claim="checkpoints", history=ending_well, at=st.integers(0, 4))
    def test_saving_and_loading_at_any_point_changes_nothing(
        self, make: Any, history: History, at: int
    ) -> None:
        """A run that is saved and resumed, optimizer and scale, continues to the same bits.

        State in an attribute, or under a key that is no parameter, is missing in ``state_dict``,
        and state that ``load_state_dict`` casts is changed: the resumed run differs, without an
        error.
        """
        at %= len(history.steps)
        straight, resumed = start(make, history), start(make, history)
        for trained in (straight, resumed):
            scale: Any = ampopt.DynamicLossScale(init_scale=4.0, growth_interval=2)
            for index, step in enumerate(history.steps):
                if trained is resumed and index == at:
                    states = [trained.optimizer.state_dict(), scale.state_dict()]
                    of_optimizer, of_scale = from_bytes(to_bytes(states))
                    trained.optimizer = make(history.grouped(trained.params))
                    trained.optimizer.load_state_dict(of_optimizer)
                    scale = ampopt.DynamicLossScale()
                    scale.load_state_dict(of_scale)
                scale = step_by(trained, step, scale).scale
                trained.scales.append(float(scale))
        assert_same_training(resumed, straight, f"saved and loaded before step {at}")
        assert resumed.scales == straight.scales

    @invariant(
        claim="deepcopies",
        # deepcopy may return a contiguous tensor for a strided one.
        history=lambda cls: ending_well(cls, layouts=cls.any_layout and cls.layout_changes_no_bit),
        at=st.integers(0, 4),
    )
    def test_a_deepcopy_goes_its_own_way(self, make: Any, history: History, at: int) -> None:
        """A deep copy of parameters and optimizer trains like the original, and does not change it.

        Copies are used to look ahead, to average models, or to try a step; with a shared buffer
        each of the two would train on the other's averages.
        """
        at %= len(history.steps)
        original = start(make, history)
        for step in history.steps[:at]:
            step_by(original, step, ampopt.StaticLossScale(2.0))
        params, optimizer = copy.deepcopy((original.params, original.optimizer))
        twin = Trained(params, optimizer, random=original.random)
        before = bits(original.params), [original.state(i) for i in range(len(params))]
        for step in history.steps[at:]:
            step_by(twin, step, ampopt.StaticLossScale(2.0))
        after = bits(original.params), [original.state(i) for i in range(len(params))]
        assert_same(after, before, "training the copy changed the original")
        assert_same_training(twin, train_on(make, history), "the copy trained differently")

    @invariant(
        claim=("independent_parameters", "several_groups"),
        history=lambda cls: ending_well(cls, groups=False),
        order=st.permutations(range(3)),
        cuts=st.sets(st.integers(1, 2)),
    )
    def test_order_and_groups_of_parameters_do_not_matter(
        self, make: Any, history: History, order: list[int], cuts: set[int]
    ) -> None:
        """Parameters train identically in another order, or in other groups with the same options.

        Regrouping for weight decay, or moving a module's definition, must not change a run; nor may
        a step use a temporary of one parameter for the next.
        """
        n = len(history.params)
        order = [i for i in order if i < n]
        regrouped = replace(
            history.of_params(order), groups=tuple(sorted(cut for cut in cuts if cut < n))
        )
        one, other = train_on(make, history), train_on(make, regrouped)
        back = Trained([other.params[order.index(i)] for i in range(n)], other.optimizer)
        assert_same_training(one, back, "in another order or other groups")

    @invariant(
        claim="independent_parameters",
        history=lambda cls: cls.histories(overflows=False),
        which=st.integers(0, 2),
    )
    def test_a_parameter_trains_as_if_alone(self, make: Any, history: History, which: int) -> None:
        """A parameter trains among others, some of them without gradients, as it does alone.

        One step count for all parameters is wrong for those whose gradients come and go, such as
        experts and adapters; momentum applied without a gradient keeps moving them.
        """
        which %= len(history.params)
        alone = replace(history.of_params([which]), groups=())
        together, single = train_on(make, history), train_on(make, alone)
        only = Trained([together.params[which]], together.optimizer)
        assert_same_training(only, single, f"parameter {which} among others")

    @invariant(history=ending_well)
    def test_parameters_without_gradients_stay(self, make: Any, history: History) -> None:
        """A parameter without a gradient is not changed by a step, and neither is its state.

        So frozen layers stay frozen. Decay or momentum that still applied to them would undo
        pretraining.
        """
        trained = start(make, history)
        for step in history.steps:
            before = [(bits(p), trained.state(i)) for i, p in enumerate(trained.params)]
            step_by(trained, step, 2.0)
            for i, grad in enumerate(step):
                if grad is None:
                    after = bits(trained.params[i]), trained.state(i)
                    assert_same(after, before[i], f"parameter {i} changed without a gradient")

    @invariant(
        claim=("any_layout", "layout_changes_no_bit", "dense_gradients"),
        history=lambda cls: ending_well(cls, expanded=True),
    )
    def test_layout_does_not_matter(self, make: Any, history: History) -> None:
        """Transposed, strided, channels-last and expanded tensors train like contiguous ones.

        A step that writes to ``p.reshape(-1)`` writes to a copy if ``p`` is not contiguous, and
        that layer never trains.
        """

        def plain(blueprint: Blueprint) -> Blueprint:
            if blueprint.layout != "expanded" or not blueprint.numel:
                return replace(blueprint, layout="contiguous")
            last = blueprint.shape[-1]
            dense = blueprint.tensor().reshape(-1).tolist()
            assert len(dense) % last == 0
            return replace(blueprint, numbers=tuple(dense), layout="contiguous", spots=())

        one, other = train_on(make, history), train_on(make, history.with_tensors(plain))
        for i, p in enumerate(one.params):
            assert_same(bits(p), bits(other.params[i]), f"parameter {i} in another layout")
            strides = history.params[i].tensor().stride()
            assert p.stride() == strides, f"the layout of parameter {i} has changed"

    @invariant(
        claim="elementwise",
        history=lambda cls: cls.histories(layouts=False),
        shift=st.integers(1, 12),
        mirrors=st.booleans(),
    )
    def test_elements_train_alike(
        self, make: Any, history: History, shift: int, mirrors: bool
    ) -> None:
        """Parameters whose elements are permuted train to the permuted result.

        So elements with equal values and gradients train alike, wherever they are. A loop that ends
        one element too early, or a kernel whose last block is not full, leaves some out: they never
        train, and no comparison with the same code shows it.
        """
        # Without these, a sum, a matrix or noise may make elements depend on their places.
        check_claims(type(self), ("any_layout", "layout_changes_no_bit", "dense_gradients"))

        def places(blueprint: Blueprint) -> list[int]:
            """For each place of the permuted tensor, the place that its element had."""
            n = blueprint.numel
            moved = [(i + shift) % n for i in range(n)]
            return moved[::-1] if mirrors else moved

        def permuted(blueprint: Blueprint) -> Blueprint:
            numbers = blueprint.tensor().reshape(-1).tolist()
            moved = tuple(numbers[i] for i in places(blueprint))
            return replace(blueprint, numbers=moved, spots=())

        one, moved = train_on(make, history), train_on(make, history.with_tensors(permuted))
        for i, blueprint in enumerate(history.params):
            expected = one.params[i].detach().reshape(-1)[places(blueprint)]
            actual = moved.params[i].detach().reshape(-1)
            assert_same(bits(actual), bits(expected), f"parameter {i} with its elements permuted")


def train_on(make: Any, history: History) -> Trained:
    """Train with a static scale of 2."""
    return train(make, history, Scale("static", 2.0))
