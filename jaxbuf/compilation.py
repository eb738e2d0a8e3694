"""Compiled programs that outlive the process."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from jaxbuf.directory import make_directory


def cache_compilations(directory: str | os.PathLike[str] | None = None) -> Path:
    """Keeps every program that is compiled from here on in a directory, and takes from it what is there.

    A program is found again if it, the versions of JAX and XLA, the device and the compiler's flags are the same. This
    is JAX's own persistent cache, with its thresholds lowered so that small programs are kept as well. For GPUs,
    `generate` keeps its programs there as they were lowered, too, so that the next process need not trace them. Nothing
    is ever deleted from it; the directory may be removed at any time.

    Args:
      directory: Is made if it is not there; None: jaxbuf in XDG_CACHE_HOME, which is ~/.cache unless it is set.

    Returns:
      The directory.

    Raises:
      ValueError: The directory cannot be made or written to.
    """
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxbuf"
    path = make_directory(home if directory is None else Path(directory).absolute(), "directory")
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compilation_cache.reset_cache()  # what compiled before this call has settled that there is none
    return path


@contextlib.contextmanager
def without_cache() -> Iterator[None]:
    """Compiles everything anew inside it, and takes nothing from a directory.

    What comes out of one has lost the names of its operations, by which a profile is read.
    """
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    if not (jax.config.jax_compilation_cache_dir and jax.config.jax_enable_compilation_cache):
        yield
        return
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    jax.clear_caches()  # programs of this process that came out of the directory
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()
