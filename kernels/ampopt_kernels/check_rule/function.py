"""A function of a rule, called for a check, with the line of the rule in every error."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ampopt_kernels.check_rule.advice import advice, instead_of_write
from ampopt_kernels.check_rule.source import defined_at, raised_at, written_at

__all__ = ["Broken", "Function"]


class Broken(ValueError):
    """An error whose message is complete."""


@dataclass(frozen=True)
class Function:
    """A function of a rule, and what its rule declares of its arguments.

    Attributes:
        name: which function: ``"update"``, ``"scalars"``, ...
        owner: name of the optimizer class.
        definition: the author's Python function.
        declarations: for each argument that is a tuple, its position, length and declaration, such
            as ``(2, 1, "declares 1, state=['momentum'] under flags {}")``.
    """

    name: str
    owner: str
    definition: Any
    declarations: tuple[tuple[int, int, str], ...]

    @property
    def title(self) -> str:
        """Name, owner and place of the function, for messages."""
        return f"{self.name} of {self.owner}'s rule ({defined_at(self.definition)})"

    def __call__(self, unpack: Callable[[Any], Any], function: Any, *arguments: Any) -> Any:
        """Return ``unpack(function(*arguments))``.

        Args:
            unpack: takes apart what the function returns. Raises :class:`Broken` if it cannot.
            function: the function, as it runs on torch tensors.
            arguments: its arguments.

        Raises:
            ValueError: the call fails, or changes an argument.
            AttributeError: the function reads what no backend has.
        """
        flat = (x for a in arguments for x in (a if isinstance(a, tuple) else (a,)))
        tensors = [x for x in flat if isinstance(x, Tensor)]
        before = [x.clone() for x in tensors]
        try:
            result = unpack(function(*arguments))
        except Broken as error:
            raise ValueError(f"{self.title} {error}") from None
        except AttributeError as error:
            message, instead = str(error), advice(str(error), "")
            if instead is not None:  # in place of a list of all functions
                message = f"{message.partition('. ')[0]}. {instead}"
            raise AttributeError(f"{self._place_of(error)}{message}") from error
        except (IndexError, NameError, TypeError, ValueError) as error:
            raise ValueError(f"{self._place_of(error)}{self._explained(error)}") from error
        except RuntimeError as error:
            message = str(error).rstrip(".")
            instead = advice(message, "") or advice("truth value", "")
            raise ValueError(
                f"{self._place_of(error)}the rule is not elementwise: {message}. {instead}"
            ) from error
        if not all(map(torch.equal, tensors, before)):
            for tensor, old in zip(tensors, before, strict=True):
                tensor.copy_(old)
            place, code = written_at(lambda: function(*arguments), tensors)
            raise ValueError(
                f"{self.name} of {self.owner}'s rule: {place}changes in place one of the "
                f"function's arguments, on the CPU. {instead_of_write(code)}"
            )
        return result

    def elementwise(
        self, call: Callable[[Tensor], dict[str, Any]], block: Tensor
    ) -> dict[str, Any]:
        """Return ``call(block)``, blocks by name, if each element depends on its own alone.

        Args:
            call: calls this ``Function`` with a block.
            block: 1-d, of two elements or more.

        Raises:
            ValueError: the call fails, or the function is not elementwise.
        """
        together, apart = call(block), [call(one) for one in block.split(1)]
        for name, value in together.items():
            each = [one[name] for one in apart]
            for result, of in ((value, block), *zip(each, block.split(1), strict=True)):
                if isinstance(result, (int, float)):
                    raise ValueError(
                        f"{self.title} returned the number {result} as {name!r}: a rule is "
                        "elementwise, and returns a block for each. A block that has this number "
                        f"for each element is p * 0 + {result}"
                    )
                if not isinstance(result, Tensor) or result.shape != of.shape:
                    is_tensor = isinstance(result, Tensor)
                    shape = tuple(result.shape) if is_tensor else type(result).__name__
                    raise ValueError(
                        f"{self.title} returned {name!r} of {shape} for blocks of shape "
                        f"{tuple(of.shape)}: a rule is elementwise, and returns a block for each"
                    )
            alone = torch.cat(each).float()
            if not torch.allclose(value.float(), alone, rtol=1e-4, equal_nan=True):
                raise ValueError(
                    f"{self.title} returned another {name!r} for {len(block)} elements than "
                    "for each alone: a rule is elementwise, and no element may depend on others"
                )
        return together

    def _place_of(self, error: Exception) -> str:
        """The function's name, and the line that raised ``error``."""
        return f"{self.name} of {self.owner}'s rule: {raised_at(error)[0]}"

    def _explained(self, error: Exception) -> str:
        """The message of ``error``, with the declaration of the arguments that its line reads."""
        code = raised_at(error)[1]
        names = self.definition.__code__.co_varnames
        arguments = [
            (re.escape(names[i]), n, declaration) for i, n, declaration in self.declarations
        ]
        for name, n, declaration in arguments:
            indices = map(int, re.findall(rf"\b{name}\[(\d+)\]", code))
            beyond = [index for index in indices if index >= n]
            if beyond and isinstance(error, IndexError):
                return f"the rule {declaration}, but reads {name}[{beyond[0]}]"
        message = f"{type(error).__name__}: {error}"
        if not isinstance(error, IndexError) and "unpack" not in message:
            return ". ".join(filter(None, (message, advice(str(error), code))))
        every = [declaration for _, _, declaration in arguments]
        of_line = [
            declaration for name, _, declaration in arguments if re.search(rf"\b{name}\b", code)
        ]
        sentence = f"The rule {'; '.join(of_line or every)}" if every else None
        return ". ".join(filter(None, (message, sentence)))
