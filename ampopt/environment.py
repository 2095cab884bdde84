"""The report of ``python -m ampopt``: versions, backends, compiler and caches of this machine."""

import importlib
import os
import platform
import shlex
import subprocess
import sys
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import ampopt
from ampopt import backend as backends
from ampopt_kernels.devices import ACCELERATORS
from ampopt_kernels.language import HAS_TRITON, INTERPRETED
from ampopt_kernels.native.build import Library, cpp_command
from ampopt_kernels.native.cache import CacheError, place

__all__ = ["cpu_model", "report", "triton_version", "version_of"]


def report() -> str:
    """Versions, the backend of each device and why, the C++ compiler, caches, and guides.

    Changes nothing, except that it compiles a function of one line, to test the compiler. Errors,
    such as a value of ``AMPOPT_BACKEND`` that is not a backend, become part of the text.
    """
    return "\n".join(
        [
            f"ampopt {ampopt.__version__} in {Path(ampopt.__file__).parent}",
            f"python {platform.python_version()} on {platform.system()} {platform.machine()}",
            f"torch {torch.__version__}",
            f"triton {_triton()}",
            "",
            f"backend: {_backend()}",
            *(f"  {device}: {_of_device(device)}" for device in _devices()),
            *(
                f"  {name} can run here" if lacks is None else f"  {name} cannot run here: {lacks}"
                for name, lacks in ((n, backends.lacking(n)) for n in backends.NAMES if n != "auto")
            ),
            "",
            f"C++ compiler: {_compiler()}",
            f"cache of C++: {_cache()}",
            *([f"cache of Triton: {_triton_cache()}"] if HAS_TRITON else ()),
            "",
            f"guides: {_guides()}",
        ]
    )


def _guides() -> str:
    """The folder of the guides: in an installed package, or in the checkout."""
    package = Path(ampopt.__file__).parent
    for folder in (package / "guides", package.parent / "examples" / "guides"):
        if (folder / "README.md").exists():
            return f"{folder}; begin with README.md"
    return "not installed"


def version_of(package: str) -> str | None:
    """The version of an installed package; ``None`` if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def triton_version() -> str | None:
    """The version of Triton, whose package is called otherwise for some GPUs, if it is imported."""
    return importlib.import_module("triton").__version__ if HAS_TRITON else None


def cpu_model() -> str:
    """The model name of the processor."""
    if sys.platform == "linux":
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _triton() -> str:
    """The version of Triton, and whether it can be imported or is interpreted."""
    if (imported := triton_version()) is not None:
        return f"{imported}, interpreted (TRITON_INTERPRET=1)" if INTERPRETED else imported
    installed = version_of("triton")
    return "not installed" if installed is None else f"{installed}, which cannot be imported"


def _backend() -> str:
    """The chosen backend, and what has chosen it; or the error of the choice."""
    try:
        name = backends.get_backend()
    except (ValueError, RuntimeError) as error:
        return f"none, since {error}"
    if (by := backends.chosen_by()) is not None:
        return f"{name}, by {by}"
    return f"{name}, as neither {backends.ENVIRONMENT} nor ampopt.set_backend chooses another"


def _devices() -> list[torch.device]:
    """The CPU, and every accelerator that torch finds."""
    devices = [torch.device("cpu")]
    for kind in ACCELERATORS:
        module = getattr(torch, kind)
        if module.is_available():
            devices += [torch.device(kind, index) for index in range(module.device_count())]
    other = torch.accelerator.current_accelerator(check_available=True)
    if other is not None and other.type not in ACCELERATORS:
        devices.append(other)
    return devices


def _of_device(device: torch.device) -> str:
    """The backend that runs tensors on ``device``, why, and what the device is."""
    try:
        with warnings.catch_warnings():  # the report itself says what cannot be compiled
            warnings.simplefilter("ignore")
            name = backends.backend_for(device).name
        why = _why(name, device) if backends.get_backend() == "auto" else "as chosen"
    except (ValueError, RuntimeError) as error:
        name, why = "none", str(error)
    return f"{name}, {why} ({_description(device)})"


def _why(name: str, device: torch.device) -> str:
    """Why ``"auto"`` chooses backend ``name`` for ``device``."""
    if name == "compiled":
        return "as there is a C++ compiler"
    if name == "triton":
        return "as Triton compiles for it"
    if device.type == "cpu":
        return "as no C++ can be compiled here: see below"
    if device.type in ACCELERATORS:
        return "as Triton cannot be imported"
    return "as Triton compiles for " + " and ".join(ACCELERATORS) + " alone"


def _description(device: torch.device) -> str:
    """The name of a device, with its cores and threads or its memory."""
    if device.type == "cpu":
        return f"{cpu_model()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads of torch"
    if device.type not in ACCELERATORS:
        return device.type
    properties = torch.get_device_module(device).get_device_properties(device)
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"


def _compiler() -> str:
    """The C++ compiler, and whether it compiles and loads a function here."""
    try:
        command = cpp_command()
    except ValueError as error:
        return f"none, since {error}"
    if command is None:
        return "none, as neither CXX nor g++ nor clang++ names one"
    command_line = shlex.join(command)
    try:
        process = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, timeout=30
        )
        # Test what rules need: libraries, headers, and the instructions of this processor.
        Library('extern "C" int answer() { return 42; }').load()
    except CacheError:
        return f"{command_line}, not tested, as there is no folder for its output"
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return f"{command_line}, which does not work: {error}"
    return f"{command_line}, which works: {process.stdout.partition(chr(10))[0]}"


def _cache() -> str:
    """The folder of compiled C++ and its size, and why it is not the usual folder."""
    try:
        folder, instead, _ = place()
    except CacheError as error:
        return f"none: {error}"
    return _contents(folder) + (f", as {instead}" if instead else "")


def _triton_cache() -> str:
    """The folder of Triton's compiled kernels, and its size."""
    from triton import knobs

    return _contents(Path(knobs.cache.dir))


def _contents(folder: Path) -> str:
    """The path of ``folder``, with the number and size of the files in it."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files) / 1e6
    return f"{folder}, {len(files)} files, {size:.1f} MB"
