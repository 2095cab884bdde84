"""Sphinx's settings for the documentation: the guides, and a reference from the docstrings.

The pages lie in ``examples``, so that each reads well on GitHub and in the installed package too.
Built by the documentation command of ``examples/guides/contributing.md``.
"""

import inspect
import re
from pathlib import Path
from typing import Any

import ampopt

ROOT = Path(__file__).parents[2]
REPOSITORY = "https://github.com/ampopt/ampopt"

project = "ampopt"
author = "The ampopt authors"
copyright = author
version = release = ampopt.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
include_patterns = [
    "*.md",
    "guides/**",
    "reference/**",
]

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signatures have them in full; docstrings say what they mean
autodoc_inherit_docstrings = False
autodoc_mock_imports = ["accelerate", "lightning", "transformers"]  # named, not run
napoleon_use_ivar = True
napoleon_use_rtype = False
python_maximum_signature_line_length = 80
toc_object_entries_show_parents = "hide"  # so that names of methods fit beside the page

html_theme = "pydata_sphinx_theme"
html_title = f"ampopt {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_theme_options = {
    "logo": {"text": html_title},
    "icon_links": [{"name": "GitHub", "url": REPOSITORY, "icon": "fa-brands fa-github"}],
    "header_links_before_dropdown": 6,
    "pygments_light_style": "tango",
    "pygments_dark_style": "monokai",
    "navigation_with_keys": False,
}

_FILE = re.compile(rf"{re.escape(REPOSITORY)}/blob/main/([^)#]+)(#[^)]*)?(?=\))")
_PICTURES = "https://raw.githubusercontent.com/ampopt/ampopt/main/examples/"
_PAGES = {"README.md": "index", "CHANGELOG.md": "changelog", "kernels/RESULTS.md": "results"}
"""Files of the repository that are pages of the site."""
_NO_SENTENCE = ("```", "|", "#", "!", "<", "- ", "\n")
"""What blocks, tables, headings, pictures, comments and lists begin with."""


def _keep_the_version(app: Any, docname: str, source: list[str]) -> None:
    """Lead links into the repository to the page of this site, or to the file of this version.

    Pictures are copied to the site.
    """
    up = "../" * docname.count("/")

    def address(link: re.Match[str]) -> str:
        path, anchor = link[1], link[2] or ""
        if path in _PAGES:
            return f"{up}{_PAGES[path]}.md{anchor}"
        if re.fullmatch(r"examples/\w+\.py", path):
            return f"{up}scripts.md#{Path(path).name.replace('.', '')}"
        return f"{REPOSITORY}/blob/v{version}/{path}{anchor}"

    source[0] = _FILE.sub(address, source[0]).replace(_PICTURES, up)


def _keep_the_version_of_an_included_page(
    app: Any, path: Path, docname: str, source: list[str]
) -> None:
    """Write the relative links of a page that lies elsewhere as seen from the site."""
    folder = (app.srcdir / path).resolve().parent.relative_to(ROOT)

    def address(link: re.Match[str]) -> str:
        target = (folder / link[1]).as_posix()
        if target.startswith("examples/guides/"):
            return f"]({target.removeprefix('examples/')})"
        return f"]({REPOSITORY}/blob/main/{target})"

    source[0] = re.sub(r"\]\((?!https?:|#)([^)]+)\)", address, source[0])
    _keep_the_version(app, docname, source)


def _describe_the_constructor(
    app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
    """Add to the docstring of a class the arguments that its ``__init__`` describes."""
    if isinstance(value, type) and "__init__" in vars(value) and "Args:" not in lines:
        said = inspect.getdoc(value.__init__) or ""  # type: ignore[misc]
        _, args, described = said.partition("Args:\n")
        lines += ["", *(args + described).splitlines()]


def _write_llms_txt(app: Any, exception: Exception | None) -> None:
    """List the pages for programs that read: title, address of the Markdown, first sentence."""
    if exception or app.builder.format != "html":
        return
    lines = [f"# ampopt {release}", "", "> PyTorch optimizers with loss scaling built in.", ""]
    for part in app.env.collect_relations():
        text = Path(app.env.doc2path(part)).read_text(encoding="utf-8")
        first = next((p for p in text.split("\n\n")[1:] if not p.startswith(_NO_SENTENCE)), "")
        sentence = " ".join(first.split()).partition(". ")[0].rstrip(".")
        title = app.env.titles[part].astext()
        address = f"{part}.html" if "```{include}" in text[:20] else f"_sources/{part}.md.txt"
        lines.append(f"- [{title}]({address})" + (f": {sentence}" if sentence else ""))
    (Path(app.outdir) / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def setup(app: Any) -> None:
    """Connect what is above."""
    app.connect("source-read", _keep_the_version)
    app.connect("include-read", _keep_the_version_of_an_included_page)
    app.connect("autodoc-process-docstring", _describe_the_constructor, priority=100)
    app.connect("build-finished", _write_llms_txt)
