"""Translate a rule to C++ before its first step.

The eager backend runs what Triton and the translation to C++ refuse. This check makes all backends
refuse the same rules.
"""

import torch

from ampopt_kernels import torch_language
from ampopt_kernels.check_rule.advice import advice
from ampopt_kernels.check_rule.codecs import functions_of
from ampopt_kernels.check_rule.source import raised_at
from ampopt_kernels.cpu.cpp import Kind, translate
from ampopt_kernels.cpu.expressions import LANGUAGE, Program
from ampopt_kernels.rule import Rule

__all__ = ["check"]


def check(rule: Rule, flags: tuple[bool, ...], n_hyper: int, owner: str) -> None:
    """Refuse a rule that cannot be translated to C++. Runs no C++ compiler.

    Args:
        rule: the rule.
        flags: values of ``rule.flags``.
        n_hyper: number of hyperparameters, tuples flattened.
        owner: name of the optimizer class, for the message.

    Raises:
        ValueError: a function of the rule cannot be translated. The message has the line, and what
            to write instead.
    """
    dtypes = (torch.float32,) * (2 + len(rule.state_for(flags)))
    kind = Kind(rule, flags, dtypes, (torch.float32,) * len(rule.scalar_state), n_hyper)
    role = "scalars"
    try:
        for role in kind.roles:
            translate(kind, role)
        for name, function, n in functions_of(rule):
            role = name
            block = Program(torch.float32).new(torch.float32, "x", varies=True)
            torch_language.bind(function, LANGUAGE)(*(block,) * n)
    except Exception as error:  # of any type, because the author's functions run here
        where, code = raised_at(error)
        message = str(error).replace("'_Expression'", "'block'")
        parts = [
            f"{role} of {owner}'s rule cannot be compiled for the CPU: {where}{message}",
            advice(message, code),
            "See ampopt_kernels.Rule for all that it may use",
        ]
        raise ValueError(". ".join(filter(None, parts))) from error
