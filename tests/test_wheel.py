"""The built wheel has both packages, and works without the checkout."""

import email
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(
    not (ROOT / "ampopt").is_dir(), reason="the packages are installed, with no source to build"
)

USE = """
import ampopt, ampopt_kernels, importlib.metadata, pathlib, sys, torch

target = pathlib.Path(sys.argv[1])
for package in (ampopt, ampopt_kernels):
    assert pathlib.Path(package.__file__).is_relative_to(target), package.__file__
    assert pathlib.Path(package.__file__).with_name("py.typed").exists()
assert importlib.metadata.version("ampopt") == ampopt.__version__

weights = torch.nn.Parameter(torch.ones(3))
optimizer = ampopt.AdamW([weights], lr=0.1)
scale = ampopt.DynamicLossScale()
for expected_skip in (True, False):
    optimizer.zero_grad()
    factor = float("inf") if expected_skip else 1.0
    ampopt.scale_outputs((weights * factor).sum(), scale).backward()
    result = optimizer.unscale_and_step(grads_scaled_by=scale)
    assert result.skipped is expected_skip
    scale = result.scale
assert (weights < 1).all()

from ampopt.environment import report

assert f"guides: {target / 'ampopt' / 'guides'};" in report()
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ROOT)
    (path,) = folder.glob("*.whl")
    return path


def pip(*arguments):
    # No index: the build backend is among the test requirements, and nothing else is needed.
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    done = subprocess.run([*command, "--no-index"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_holds_what_the_checkout_holds(wheel):
    def modules(folder, source_root):
        return {
            str(path.relative_to(source_root).as_posix())
            for path in folder.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }

    packages = modules(ROOT / "ampopt", ROOT)
    packages |= modules(ROOT / "kernels" / "ampopt_kernels", ROOT / "kernels")
    guides = modules(ROOT / "examples" / "guides", ROOT / "examples")
    packages |= {f"ampopt/{guide}" for guide in guides}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    metadata = {name for name in names if ".dist-info/" in name}
    assert names - metadata == packages
    assert not any("evidence" in name for name in names)  # what only authors run
    assert {name.rpartition("/")[2] for name in metadata} >= {"METADATA", "LICENSE"}


def test_is_what_the_source_distribution_builds(wheel, tmp_path):
    code = f"import hatchling.build; hatchling.build.build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=300)
    (source,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert inside >= {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "PKG-INFO"}
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, source)
    (built,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(built) as ours, zipfile.ZipFile(wheel) as theirs:
        assert ours.namelist() == theirs.namelist()
        assert all(ours.read(name) == theirs.read(name) for name in ours.namelist())


def test_metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith("/METADATA")]
        fields = email.message_from_bytes(archive.read(name))
    assert (fields["Name"], fields["License-Expression"]) == ("ampopt", "MIT")
    assert fields["Requires-Python"] == ">=3.10"
    versions = re.findall(r"Python :: 3\.(\d+)$", "\n".join(fields.get_all("Classifier", [])), re.M)
    assert versions[0] == "10" and "Typing :: Typed" in fields.get_all("Classifier", [])
    urls = dict(url.split(", ") for url in fields.get_all("Project-URL", []))
    assert set(urls) == {"Repository", "Documentation", "Changelog", "Issues"}
    # From a package page, where relative links lead nowhere, README's lead into the repository.
    readme = str(fields.get_payload())
    assert readme.startswith("# ampopt\n")
    links = re.findall(r"\]\(([^)#]+)", readme)
    assert links and all(link.startswith("https://") for link in links)
    files = urls["Repository"] + "/blob/main/"
    inside = [link.removeprefix(files) for link in links if link.startswith(files)]
    assert inside and all((ROOT / path).exists() for path in inside)
    needed = [r for r in fields.get_all("Requires-Dist", []) if "extra ==" not in r]
    assert [re.split("[>; ]", r)[0] for r in needed] == ["torch", "triton"]


def test_works_from_an_empty_folder(with_torch, wheel, tmp_path):
    target, empty = tmp_path / "target", tmp_path / "empty"
    empty.mkdir()
    pip("install", "--no-deps", "--target", target, wheel)
    # The target comes first, before an ampopt that may be installed where the tests run.
    code = f"import sys; sys.path.insert(0, sys.argv[1])\n{USE}"
    elsewhere = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = with_torch.run("-c", code, target, cwd=empty, environment=elsewhere)
    assert done.returncode == 0, done.stderr
