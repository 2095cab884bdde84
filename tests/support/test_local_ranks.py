"""The pool of ranks: results, failures and hangs."""

import time

import pytest
import torch

from support import local_ranks
from support.local_ranks import Ranks


def summed(number: float) -> float:
    total = torch.tensor(number + torch.distributed.get_rank())
    torch.distributed.all_reduce(total)
    return total.item()


def failing_on(failing: int) -> float:
    if torch.distributed.get_rank() == failing:
        raise ValueError("this rank raises")
    return summed(0.0)


def hanging() -> float:
    if torch.distributed.get_rank() == 1:
        return 0.0
    return summed(0.0)


def test_every_rank_runs_it_and_meets_the_others(two_ranks, four_ranks):
    assert two_ranks.run(summed, 1.0) == [3.0, 3.0]
    assert four_ranks.run(summed, 0.0) == [6.0] * 4


def test_what_hangs_is_named_and_the_pool_made_again(monkeypatch, with_what_ranks_import):
    monkeypatch.setattr(local_ranks, "_GRACE", 0.5)
    ranks = Ranks(2, with_what_ranks_import)
    try:
        begun = time.monotonic()
        with pytest.raises(AssertionError, match=r"ranks \[0\] hang in hanging(.|\n)*all_reduce"):
            ranks.run(hanging, timeout=2)
        assert time.monotonic() - begun < 15
        with pytest.raises(AssertionError, match=r"rank 1:(.|\n)*this rank raises"):
            ranks.run(failing_on, 1)
        assert ranks.run(summed, 1.0) == [3.0, 3.0]
    finally:
        ranks.close()
