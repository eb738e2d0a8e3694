"""Keeps programs beside JAX's compilation cache as they are lowered, so that a new process need not trace them again.

JAX finds a compiled program by its lowered form. Tracing and lowering a step with our kernels takes Python seconds, in
every process. So `keep` stores the lowered form as well, found by all that it follows from: the sources of jaxbuf, the
versions of what it is lowered by, the devices, JAX's settings, and the shapes and static parts of the arguments.
"""

import contextlib
import dataclasses
import enum
import functools
import hashlib
import importlib.metadata
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np
from jax.extend.backend import get_backend

from jaxbuf.exported import KERNEL_CALLS, PLATFORMS, read_program
from jaxbuf.imported import BEGAN
from jaxbuf.pallas.ptxas import ptxas_version
from jaxbuf.target import Target

FOLDER = "jaxbuf-lowered"  # in the compilation cache's
KEPT_FOR = frozenset({"gpu"})  # where lowering takes long, for kernels of ours
# Types and functions of these packages are known by their names and the package's version; of jaxbuf by its sources.
PACKAGES = "jaxbuf", "jax", "jaxlib", "flax", "numpy", "ml_dtypes"
PLUGINS = "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"
SOURCES = Path(__file__).parent.parent
MODULES_LOADED = BEGAN - 1  # A file system's clock may be a little behind.

log = logging.getLogger("jaxbuf")


class UnknownPart(Exception):
    """Something of a program can't be told by a name that other processes have for it, too."""


@dataclasses.dataclass
class Keeping:
    """Where programs are kept.

    Attributes:
      directory: Of their files.
      platform: What they are lowered for, as JAX names it.
      found: Whether the last program that `keep` was asked for was there. If not, XLA's compilation of it is hardly,
        either. None: it was not asked, as whoever set this to None wants to know.
    """

    directory: Path
    platform: str
    found: bool | None = False


_keeping: ContextVar[Keeping | None] = ContextVar("keeping", default=None)


@contextlib.contextmanager
def keeping_programs(target: Target) -> Iterator[Keeping | None]:
    """Within it, what `keep` decorates is taken from the compilation cache's directory, or written there, when jit
    traces it.

    It changes nothing where JAX has no such directory, or one with a limit of its size, which would not count these
    files; nor where it is not a local one; nor for targets other than GPUs; nor under a mesh: then it yields None.
    """
    config: Any = jax.config
    directory = config.jax_compilation_cache_dir
    used = directory and config.jax_enable_compilation_cache and config.jax_compilation_cache_max_size == -1
    usual = target.platform in KEPT_FOR and jax.sharding.get_abstract_mesh().empty
    if not (used and usual) or "://" in str(directory):
        yield None
        return
    keeping = Keeping(Path(directory) / FOLDER, PLATFORMS[target.platform])
    token = _keeping.set(keeping)
    try:
        yield keeping
    finally:
        _keeping.reset(token)


def keep[R](like: Callable[..., R]) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """A decorator for a function that jit traces: see `keeping_programs`, outside which the function is as it was.

    Args:
      like: Takes the same arguments and returns a pytree with the structure of the result. It is not compiled.
    """

    def decorate(function: Callable[..., R]) -> Callable[..., R]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> R:
            keeping = _keeping.get()
            if keeping is None:
                return function(*args, **kwargs)
            keeping.found = False
            leaves, tree = jax.tree.flatten((args, kwargs))
            places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
            arrays = [leaves.pop(i) for i in reversed(places)][::-1]
            kept = jax.tree.structure(jax.eval_shape(lambda: like(*args, **kwargs)))

            def flat(*arrays: Any) -> list[Any]:
                whole = list(leaves)
                for i, array in zip(places, arrays, strict=True):
                    whole.insert(i, array)
                args, kwargs = jax.tree.unflatten(tree, whole)
                found, structure = jax.tree.flatten(function(*args, **kwargs))
                if structure != kept:
                    raise UnknownPart(f"the structure of what {function.__qualname__} returns")
                return found

            try:
                key = _key(keeping.platform, function, (leaves, places, tree, [_shape(x) for x in arrays]))
                exported = _find(flat, arrays, f"{function.__name__}-{key}", keeping)
            except UnknownPart as error:
                log.debug("%s is not kept: %s", function.__qualname__, error)
                return function(*args, **kwargs)
            return jax.tree.unflatten(kept, exported.call(*arrays))

        return run

    return decorate


def _find(flat: Callable[..., list[Any]], arrays: list[Any], name: str, keeping: Keeping) -> jax.export.Exported:
    """The program of that name from the directory; else `flat`, lowered now and written there.

    Raises:
      UnknownPart: It can't be written.
    """
    directory = keeping.directory
    path = directory / name
    try:
        stored = path.read_bytes()
        digest, program = stored[:32], stored[32:]
        if hashlib.sha256(program).digest() == digest:
            keeping.found = True
            return read_program(program)
        log.warning("%s is damaged, and is written again", path)
    except OSError:
        pass
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in map(jax.typeof, arrays)]
    checks = [jax.export.DisabledSafetyCheck.custom_call(call) for call in KERNEL_CALLS]
    try:
        exported = jax.export.export(jax.jit(flat), platforms=(keeping.platform,), disabled_checks=checks)(*shapes)
        program = bytes(exported.serialize())
    except (ValueError, NotImplementedError) as error:
        raise UnknownPart(str(error)) from error
    _check_sources()  # again: modules may have been imported since the key was made
    try:
        directory.mkdir(parents=True, exist_ok=True)
        new = directory / f".{name}-{os.getpid()}-{threading.get_ident()}"
        new.write_bytes(hashlib.sha256(program).digest() + program)
        new.replace(path)  # other processes see all of it or nothing
    except OSError as error:
        log.warning("%s can not be written: %s", path, error)
    return exported


def _shape(x: Any) -> tuple[Any, ...]:
    kind = jax.typeof(x)
    return kind.shape, kind.dtype, kind.weak_type


def _key(platform: str, function: Callable[..., Any], arguments: Any) -> str:
    # An attribute is what holds in this thread, under JAX's context managers; a few settings have none.
    config = {name: getattr(jax.config, name, value) for name, value in jax.config.values.items()}
    del config["jax_compilation_cache_dir"]
    parts = _environment(platform), _name(function), describe(config), describe(arguments)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _check_sources() -> None:
    """Checks that what this process imported of jaxbuf, or will import, is what its files hold.

    Raises:
      UnknownPart: Some are newer than the process, which may run what was there before.
    """
    # The time of the last change of the inode, which no tool sets back.
    times = {file.stat().st_ctime: file for file in SOURCES.rglob("*.py")}
    newest = max(times, default=np.inf)
    if newest >= MODULES_LOADED:
        raise UnknownPart(f"{times.get(newest, SOURCES)} changed since this process began")


@functools.cache
def _environment(platform: str) -> str:
    """What programs follow from besides their arguments and JAX's settings: it stays the same in a process.

    Raises:
      UnknownPart: As in `_check_sources`.
    """
    sources = hashlib.sha256()
    for file in sorted(SOURCES.rglob("*.py")):
        text = file.read_bytes()
        sources.update(f"{file.relative_to(SOURCES)} {len(text)}\n".encode() + text)
    _check_sources()
    versions = {}
    for package in (*PACKAGES[1:], *PLUGINS):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    devices = [(device.platform, device.device_kind) for device in jax.local_devices(backend=platform)]
    backend = get_backend(platform).platform_version
    return describe((sources.hexdigest(), versions, devices, backend, ptxas_version()))


def describe(x: Any) -> str:
    """A text that is the same in every process for the same value of a static argument, and differs for others.

    Raises:
      UnknownPart: There is none, as for functions and types that are not of `PACKAGES`.
    """
    if type(x) in (type(None), bool, int, float, str, bytes):
        return repr(x)
    if isinstance(x, jax.tree_util.PyTreeDef):
        return f"tree({describe(x.node_data())}, {describe(x.children())})"
    if hasattr(x, "__qualname__"):
        name = _name(x)
        # The name of a bound method, or of a function in a wrapper, is not all of it.
        if not isinstance(x, type) and x is not _find_name(x.__module__, x.__qualname__):
            raise UnknownPart(name)
        return name
    kind = _name(type(x))
    if isinstance(x, np.dtype):
        return f"{kind}({x.str}, {x.name})"
    if isinstance(x, enum.Enum):
        return f"{kind}.{x.name}"
    if isinstance(x, Mapping):
        return f"{kind}({{{', '.join(f'{describe(key)}: {describe(value)}' for key, value in x.items())}}})"
    if isinstance(x, tuple | list):
        return f"{kind}({', '.join(map(describe, x))})"
    if isinstance(x, set | frozenset):
        return f"{kind}({', '.join(sorted(map(describe, x)))})"
    if isinstance(x, np.generic | np.ndarray) and not x.dtype.hasobject:
        return f"{kind}({x.dtype.str}, {x.shape}, {hashlib.sha256(np.ascontiguousarray(x)).hexdigest()})"
    if dataclasses.is_dataclass(x):
        return f"{kind}({describe({field.name: getattr(x, field.name) for field in dataclasses.fields(x)})})"
    raise UnknownPart(f"a {kind}")


def _find_name(module: str, name: str) -> Any:
    try:
        return functools.reduce(getattr, name.split("."), sys.modules[module])
    except (KeyError, AttributeError):
        return None


def _name(x: Any) -> str:
    """Of a type or function that an import of its module makes anew.

    Raises:
      UnknownPart: It is of another package, or is made by a call.
    """
    module, name = str(getattr(x, "__module__", None)), x.__qualname__
    if module.split(".")[0] not in (*PACKAGES, "builtins", "collections", "types") or "<" in name:
        raise UnknownPart(f"{module}.{name}")
    return f"{module}.{name}"
