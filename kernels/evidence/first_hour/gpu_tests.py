"""The tests marked ``gpu``; skipped outside a checkout, since the wheel has no tests."""

import subprocess
import sys
from pathlib import Path

import torch

from evidence.first_hour.record import PartRecord

__all__ = ["run"]


def run(record: PartRecord, device: torch.device) -> None:
    """Run pytest in the working directory, and report each test that fails."""
    if not Path("tests/conftest.py").exists():
        record.skip("pytest -m gpu", f"there are no tests in {Path.cwd()}: run it in a checkout")
        return
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-rfEs", "--tb=short"]
    pipe, last = subprocess.PIPE, ""
    with subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True) as tests:
        assert tests.stdout is not None
        for line in tests.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
            if line.startswith(("FAILED ", "ERROR ")):
                record.check(line.split()[1], False, line.strip())
    record.check("pytest -m gpu", tests.returncode == 0, last)
