"""The pages that users read, and their Python blocks, to be run unchanged."""

import re
import runpy
from pathlib import Path
from typing import Any

__all__ = ["GUIDES", "INDEX", "PAGES", "README", "ROOT", "blocks", "changed", "headings", "run"]

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
INDEX = ROOT / "examples" / "guides" / "README.md"
GUIDES = sorted(path for path in INDEX.parent.glob("*.md") if path != INDEX)
PAGES = [*ROOT.glob("*.md")] + [
    page for folder in ("ampopt", "kernels", "examples") for page in (ROOT / folder).rglob("*.md")
]
"""All Markdown pages, including those whose blocks cannot run here."""

_HEADING_OR_BLOCK = re.compile(
    r"^#+ (?P<heading>[^\n]+)$|^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE
)


def headings(page: Path) -> list[str]:
    """The headings of ``page`` in order; comments in code blocks do not count."""
    return [part["heading"] for part in _parts(page) if part["heading"]]


def blocks() -> dict[str, str]:
    """The Python blocks of README.md and the guides, by the heading above each.

    The blocks of the tutorial are one script, under its title. A difference is applied to the first
    block of its page, if that comes before it.
    """
    codes: dict[str, str] = {}
    for page in (README, *GUIDES):
        heading, first = "", ""
        for part in _parts(page):
            heading = part["heading"] or heading
            code = part["code"]
            if part["language"] == "diff" and first:
                code = changed(first, code)
            elif part["language"] != "python":
                continue
            if page.stem == "tutorial":
                heading = headings(page)[0]
                code = codes.pop(heading, "") + code
            assert heading not in codes, f"two blocks, and only one name for them: {heading}"
            codes[heading] = code
            first = first or code
    return codes


def changed(script: str, difference: str) -> str:
    """``script`` with a ``difference`` applied, whose parts are separated by lines of " ..."."""
    for part in difference.split("\n ...\n"):
        lines = part.strip("\n").splitlines()
        old = "".join(f"{line[1:]}\n" for line in lines if line[0] in " -")
        new = "".join(f"{line[1:]}\n" for line in lines if line[0] in " +")
        assert f"\n{script}".count(f"\n{old}") == 1, f"the script must have this once:\n{old}"
        script = f"\n{script}".replace(f"\n{old}", f"\n{new}")[1:]
    return script


def run(heading: str, folder: Path) -> dict[str, Any]:
    """Run the block under ``heading`` in ``folder``, and return the names that it defines.

    It is run from a file, because Triton reads the source of a rule.
    """
    script = folder / "block.py"
    script.write_text(blocks()[heading], encoding="utf-8")
    return runpy.run_path(str(script), run_name="__main__")


def _parts(page: Path) -> list[re.Match[str]]:
    return list(_HEADING_OR_BLOCK.finditer(page.read_text(encoding="utf-8")))
