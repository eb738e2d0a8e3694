"""Serve linear-attention and hybrid language models from JAX by moving fewer bytes."""

from jaxbuf.version import __version__

__all__ = ["__version__"]
