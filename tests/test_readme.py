"""The Python of README.md runs as it stands, each block by itself, and prints what it says."""

import re

import pytest
from support.readme import README, ROOT, blocks, run

PRINTED = {
    "The swap": "",
    "Between unscaling and the step": "",
    "Gradient accumulation": "",
    "A step as one call": "SGD: 1 step. In the last one:",
    "For those who keep a scaler": "False True",
    "Closures and replay": "loss ['weight', 'bias']",
    "Loss scales": "262144.0",
    "An optimizer of your own": "[0.9999, 1.0001, 1.0000]",
    "An optimizer of somebody else's": "True",
    "Testing your optimizer": "True",
}

IN_FRAMEWORKS = {"With Lightning", "With Accelerate and transformers"}
"""Those that tests/frameworks runs, where the frameworks are installed."""


@pytest.mark.parametrize("heading", PRINTED)
def test_block(heading, tmp_path, capsys):
    run(heading, tmp_path)
    assert PRINTED[heading] in capsys.readouterr().out
    assert PRINTED[heading] in blocks()[heading]


def test_every_block_is_found():
    assert set(blocks()) == PRINTED.keys() | IN_FRAMEWORKS
    assert README.count("```python") == len(PRINTED) + len(IN_FRAMEWORKS)


@pytest.mark.parametrize("link", re.findall(r"\]\((?!https?:)([^)]+)\)", README))
def test_link_to_a_file(link):
    assert (ROOT / link).is_file()
