"""What Triton's interpreter needs to run with the NumPy that is installed."""

__all__ = ["mend"]


def mend() -> None:
    """Let loops end at a number that a kernel was given.

    Triton 3.6 makes that an array of one element and leaves it to NumPy to take it for an integer,
    which NumPy 2.4 refuses. Triton 3.9 does as this does.
    """
    import triton
    from triton.runtime import interpreter

    if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9):
        return
    patch = interpreter._patch_lang_tensor

    def mended(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = mended
