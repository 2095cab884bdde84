"""The Python of README.md runs as it stands, each block by itself, and prints what it says."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")

PRINTED = {
    "The swap": "",
    "Between unscaling and the step": "",
    "Closures and replay": "loss ['weight', 'bias']",
    "Loss scales": "262144.0",
    "An optimizer of your own": "[0.9999, 1.0001, 1.0000]",
    "An optimizer of somebody else's": "True",
}


def blocks():
    """``(heading, block)`` for each Python block and the heading it stands under."""
    return [
        (section.partition("\n")[0], block)
        for section in re.split(r"^## ", README, flags=re.MULTILINE)
        for block in re.findall(r"^```python\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    ]


@pytest.mark.parametrize(("heading", "block"), blocks(), ids=[heading for heading, _ in blocks()])
def test_block(heading, block, tmp_path, capsys):
    # A file, as a reader would make one: Triton has to find the source of a rule.
    script = tmp_path / "block.py"
    script.write_text(block, encoding="utf-8")
    runpy.run_path(str(script), run_name="__main__")
    assert PRINTED[heading] in capsys.readouterr().out
    assert PRINTED[heading] in block


def test_every_block_is_found():
    assert [heading for heading, _ in blocks()] == list(PRINTED)
    assert README.count("```python") == len(PRINTED)


@pytest.mark.parametrize("link", re.findall(r"\]\((?!https?:)([^)]+)\)", README))
def test_link_to_a_file(link):
    assert (ROOT / link).is_file()
