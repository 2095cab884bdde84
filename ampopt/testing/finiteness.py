"""Invariant: what is finite stays finite."""

from typing import Any

from ampopt.testing.blueprints import History, Scale
from ampopt.testing.claims import Claims, invariant
from ampopt.testing.skipping import ways
from ampopt.testing.training import Trained, train

__all__ = ["Finiteness"]


class Finiteness(Claims):
    """What a step makes of ordinary numbers, zeros among them."""

    @invariant(
        claim=("plain_steps", "finite_steps"),
        history=lambda cls: cls.histories(overflows=False),
        way=ways,
    )
    def test_finite_gradients_leave_finite_parameters(
        self, make: Any, history: History, way: str
    ) -> None:
        """Steps with finite gradients leave every parameter finite.

        A step that divides by what may be zero, as the norm of a parameter that is, or the square
        of a gradient that is, makes NaN of it. The next loss is NaN then, every step after it is
        skipped for its gradients, and the scale is blamed.
        """

        def after(index: int, trained: Trained) -> None:
            for i, p in enumerate(trained.params):
                bad = (~p.detach().isfinite()).nonzero()
                if len(bad):
                    at = tuple(bad[0].tolist())
                    element = f"[{', '.join(map(str, at))}]" if at else ""
                    raise AssertionError(
                        f"parameter {i}{element} is {p[at].item()} after step {index}, "
                        "whose gradients were finite"
                    )

        train(make, history, Scale("static", 2.0), way, after=after)
