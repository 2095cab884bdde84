"""What is set around each example."""

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from unittest import mock

import torch

from ampopt._step import small_states
from ampopt.testing.pretended_device import as_on_a_device

__all__ = ["apart", "small_states_of_any_size"]


@contextmanager
def apart(on_device: bool) -> Iterator[None]:
    """Isolate an example: restore random state after it, and let ``torch.empty`` return NaN.

    States of parameters of any size may be small, and with ``on_device`` the optimizer treats CPU
    tensors as it treats an accelerator's.
    """
    python, poisoned = random.getstate(), torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    deterministic = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    # torch creates sparse tensors internally, and warns unless invariant checks are on or off.
    with (
        torch.random.fork_rng(devices=[]),
        torch.sparse.check_sparse_tensor_invariants(),
        small_states_of_any_size(),
        as_on_a_device() if on_device else nullcontext(),
    ):
        torch.use_deterministic_algorithms(True, warn_only=warns)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
        try:
            yield
        finally:
            random.setstate(python)
            torch.utils.deterministic.fill_uninitialized_memory = poisoned  # type: ignore[attr-defined]
            torch.use_deterministic_algorithms(deterministic, warn_only=warns)


def small_states_of_any_size() -> AbstractContextManager[object]:
    """Context manager: states of small parameters are kept in fewer bits, too."""
    return mock.patch.object(small_states, "LEAST", 1)
