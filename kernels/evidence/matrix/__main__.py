"""``python -m evidence.matrix [FILE]``: run every optimizer in every setting, write the table."""

import argparse
from pathlib import Path

from evidence.matrix.page import optimizers, page

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m evidence.matrix",
        description="Run every optimizer in every setting on a small model, and write a table.",
    )
    parser.add_argument("file", nargs="?", type=Path, help="write it there instead of printing it")
    options = parser.parse_args()
    text = page(optimizers())
    if options.file is None:
        print(text, end="")
    else:
        options.file.write_text(text, encoding="utf-8")
