"""Every way for Python to look at the values of a tensor, made an error."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["ReadBack", "no_read_back"]


class ReadBack(AssertionError):
    """The host looked at the values of a tensor."""


class _Refusing(TorchDispatchMode):
    """Refuses the operations whose result depends on values, in Python or in its shape."""

    REFUSED = (
        "_local_scalar_dense",
        "item",
        "is_nonzero",
        "equal",
        "allclose",
        "nonzero",
        "masked_select",
        "_unique2",
        "unique_dim",
    )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in self.REFUSED:
            raise ReadBack(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def no_read_back() -> Iterator[None]:
    """Raise :class:`ReadBack` where Python looks at the values of a tensor."""

    def refusing(name: str) -> Callable[..., Any]:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise ReadBack(f"Tensor.{name}")

        return refuse

    with pytest.MonkeyPatch.context() as patch:
        for name in ("item", "tolist", "numpy", "cpu", "__array__"):
            patch.setattr(Tensor, name, refusing(name))
        with _Refusing():
            yield
