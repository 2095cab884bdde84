"""``python -m simulated_card``: train on the card and by torch operations, and compare."""

import argparse
import gc
import os
import sys

os.environ["TRITON_INTERPRET"] = "0"

import torch

from simulated_card.driver import install


def main() -> int:
    """Print a line for each case and each fault, and return how many are not as they should be."""
    parser = argparse.ArgumentParser(prog="python -m simulated_card", description=__doc__)
    parser.add_argument("part", nargs="*", help="run the cases whose line has each of these words")
    parser.add_argument("--sm", type=int, default=90, help="80 for sm_80; default: %(default)s")
    parser.add_argument("--every", action="store_true", help="every rule in every storage")
    parser.add_argument("--faults", action="store_true", help="also plant faults, to be found")
    options = parser.parse_args()
    install(options.sm)
    torch.use_deterministic_algorithms(True)  # which fills memory that nobody has written with NaN
    from simulated_card import cases

    gc.collect()
    gc.freeze()
    bad = 0
    counts: dict[str, int] = {}
    chosen = cases.EVERY_CASE if options.every else cases.CASES
    for place, case in enumerate([*chosen, *(cases.FAULTS if options.faults else ())]):
        if not all(part in str(case).split() for part in options.part):
            continue
        if isinstance(case, str):
            result = cases.fault_found(case) or "NOT FOUND"
            kind = "not found" if result == "NOT FOUND" else "found"
        else:
            result = cases.verdict(case, order=place % 4)
            kind = result.partition(":")[0].partition(",")[0].lower()
        counts[kind] = counts.get(kind, 0) + 1
        bad += kind in ("not found", "wrong")
        print(f"{case}: {result}", flush=True)
    print(", ".join(f"{n} {kind}" for kind, n in counts.items()))
    return bad


if __name__ == "__main__":
    failed = main()
    sys.stdout.flush()
    os._exit(min(failed, 1))  # at exit Triton's compiler lists what it leaked
