"""A value as an error says that it came, however long or deep it is."""

import reprlib

SHOWN = reprlib.Repr(maxlevel=3, maxstring=80, maxlong=40, maxother=80, maxdict=4, maxlist=6, maxtuple=6)


def shown(value: object) -> str:
    """The beginning of what `repr` writes; an array is told by its dtype and shape."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"an array {value.dtype} {value.shape}"  # pyright: ignore[reportAttributeAccessIssue]
    try:
        return SHOWN.repr(value)
    except ValueError:  # Python refuses to write out thousands of digits
        return f"a {type(value).__name__} of more than 4,000 digits"
