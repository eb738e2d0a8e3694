"""The checker that `tests/conftest.py` installs: what functions of jaxbuf get and return is what they say.

It looks at annotations of arrays alone (`Float32[Array, "batch time"]`), and after a function has returned: a wrong
argument that the library itself refuses gives the library's own error, as it does outside of tests. A numpy array is as
good as one of JAX.

Fields of dataclasses are not checked where one is made: JAX makes them anew with other leaves (placeholders, shardings,
arrays with one more axis). `wrong_fields` checks those of objects that a test has.
"""

import dataclasses
import functools
import inspect
import operator
import types
from collections.abc import Iterator
from typing import Any, Union, get_args, get_origin, get_type_hints

import beartype
import beartype.door
import jax
import jaxtyping
import numpy as np


def check(function):
    """The type checker for `jaxtyping.install_import_hook`, which gives it two stand-ins of each function: one that is
    called before it, and whose result is Any, and one that is called after it."""
    if function.__annotations__.get("return", Any) is Any or function.__name__ == "__init__":
        return function
    function.__annotations__ = {name: arrays_of(hint) for name, hint in function.__annotations__.items()}
    if all(hint is Any for hint in function.__annotations__.values()):
        return function
    return beartype.beartype(function)


def arrays_of(hint: Any, kinds: Any = jax.Array | np.ndarray) -> Any:
    """The annotation with these kinds of arrays; Any where it says nothing of arrays."""
    if inspect.isclass(hint) and issubclass(hint, jaxtyping.AbstractArray):
        return hint.dtype[kinds, hint.dim_str]
    parts = get_args(hint)
    found = tuple(part if part is ... else arrays_of(part, kinds) for part in parts)
    if all(part is Any or part is ... for part in found):
        return Any
    if get_origin(hint) in (types.UnionType, Union):
        # What a union says beside its arrays stands: None, a number.
        return functools.reduce(operator.or_, [o if n is Any else n for n, o in zip(found, parts, strict=True)])
    if get_origin(hint) is tuple:
        return tuple[found]
    return Any


def wrong_fields(value: Any, name: str = "") -> Iterator[str]:
    """The fields of a dataclass, and of those in it, that are not what they say; abstract arrays will do."""
    if isinstance(value, dict | list | tuple):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from wrong_fields(part, f"{name}[{key}]")
    if not dataclasses.is_dataclass(value):
        return
    hints = get_type_hints(type(value))
    with jaxtyping.jaxtyped("context"):
        for field in dataclasses.fields(value):
            part = getattr(value, field.name)
            if not beartype.door.is_bearable(part, arrays_of(hints[field.name], Any)):
                yield f"{name}.{field.name} of {type(value).__name__} is {getattr(part, 'dtype', '')} {np.shape(part)}"
    for field in dataclasses.fields(value):
        yield from wrong_fields(getattr(value, field.name), f"{name}.{field.name}")
