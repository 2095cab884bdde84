"""The Python blocks of README.md, to be run as they stand."""

import re
import runpy
from pathlib import Path
from typing import Any

__all__ = ["README", "ROOT", "blocks", "run"]

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks() -> dict[str, str]:
    """The Python block under each heading that has one."""
    found: dict[str, str] = {}
    for section in re.split(r"^## ", README, flags=re.MULTILINE):
        heading = section.partition("\n")[0]
        of_section = re.findall(r"^```python\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
        if of_section:
            (found[heading],) = of_section
    return found


def run(heading: str, folder: Path) -> dict[str, Any]:
    """Run the block under ``heading`` from a file in ``folder``; the names that it defines.

    A file, as a reader would make one: Triton has to find the source of a rule.
    """
    script = folder / "block.py"
    script.write_text(blocks()[heading], encoding="utf-8")
    return runpy.run_path(str(script), run_name="__main__")
