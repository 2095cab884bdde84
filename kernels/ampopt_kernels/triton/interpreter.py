"""A patch of Triton's interpreter, which Triton 3.6 needs with NumPy 2.4."""

__all__ = ["patch"]


def patch() -> None:
    """Let ``range`` in a kernel end at an argument of the kernel.

    Triton 3.6 passes such an argument as an array of one element, and leaves it to NumPy to convert
    the array to an integer, which NumPy 2.4 refuses. Triton 3.9 has the same fix.
    """
    import triton
    from triton.runtime import interpreter

    if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9):
        return
    original = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched
