"""Which marks pytest's command line selects, for code that runs before pytest has parsed it."""

import argparse
import ast
import itertools
import os
import shlex
from collections.abc import Sequence

__all__ = ["command_line", "selects_only"]


def command_line(arguments: Sequence[str]) -> list[str]:
    """``arguments``, after those in PYTEST_ADDOPTS."""
    return [*shlex.split(os.environ.get("PYTEST_ADDOPTS", "")), *arguments]


def selects_only(mark: str, arguments: Sequence[str]) -> bool:
    """Whether every test that ``-m`` can select has ``mark``, whatever other marks it has.

    An invalid expression returns False; pytest rejects it later.
    """
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("-m", default="")
    expression = parser.parse_known_args(arguments)[0].m
    try:
        tree = ast.parse(expression, mode="eval")
    except SyntaxError:
        return False
    names = sorted({node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - {mark})
    code = compile(tree, "-m", "eval")

    def selects(marked: bool) -> bool:
        choices = itertools.product((False, True), repeat=len(names))
        return any(
            eval(code, {mark: marked, **dict(zip(names, have, strict=True))}) for have in choices
        )

    return selects(True) and not selects(False)
