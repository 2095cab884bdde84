"""Small states beside float32 ones: what the table says of each way to keep them."""

import pytest

from evidence import fidelity
from evidence.peers_in_8_bits import peers


def test_fidelity_has_a_row_for_each_way_to_keep_states_and_kind_of_gradients(capsys):
    fidelity.main(["2", "--optimizer", "AdamW", "--optimizer", "Sophia"])
    lines = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if "|" in line]
    rows = [[cell.strip() for cell in line] for line in lines[2:]]
    ways = {"AdamW": ["16 bits", "8 bits", *peers(fidelity.LR)], "Sophia": ["16 bits", "8 bits"]}
    expected = [[name, way, kind] for name in ways for way in ways[name] for kind in fidelity.KINDS]
    assert [row[:3] for row in rows] == expected
    assert all(float(cell) >= 0 for row in rows for cell in row[3:])


def test_the_states_of_flashoptim_mislead_the_steps_of_small_gradients():
    """The error is as large as with FlashOptim's own kernels in Triton's interpreter."""
    exact, others = fidelity.maker("AdamW", 32), [*peers(fidelity.LR).values()][:1]
    (fine,) = fidelity.compare(exact, others, "noise", 1e-2, steps=40)
    assert fine.length == pytest.approx(1, abs=0.05)
    (misled,) = fidelity.compare(exact, others, "noise", 1e-6, steps=40)
    assert misled.length > 1.5
