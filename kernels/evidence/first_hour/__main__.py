"""``python -m evidence.first_hour DIR``: run all parts, or those that ``--part`` names."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import ampopt
from ampopt.backend import backend_for
from ampopt.bench.report import environment
from evidence.first_hour import hour
from evidence.first_hour.parts import PARTS


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the parts, and exit with status 1 unless all of them passed."""
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(
        prog="python -m evidence.first_hour",
        description="Find out what a new GPU does, in order of what would end it, each part in a "
        "process of its own under a timeout. summary.md in the folder has the results.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder for all results")
    parser.add_argument("--device", default="cuda", help="default: %(default)s")
    parser.add_argument(
        "--part",
        action="append",
        choices=names,
        help=f"repeatable; by default all of {', '.join(names)}",
    )
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    before = ampopt.get_backend()
    try:
        ampopt.set_backend("triton")
        backend_for(device)
    except RuntimeError as error:
        parser.error(str(error))
    finally:
        ampopt.set_backend(before)
    parts = [part for part in PARTS if part.name in (options.part or names)]
    outcomes = hour.run(parts, options.folder, options.device, environment(device))
    print(f"written to {options.folder}; begin with summary.md there")
    if not all(outcome.passed for outcome in outcomes):
        sys.exit(1)


if __name__ == "__main__":
    main()
