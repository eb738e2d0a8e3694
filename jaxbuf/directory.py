"""Directories that a user names to write to."""

import os
from pathlib import Path


def make_directory(directory: str | os.PathLike[str], argument: str) -> Path:
    """Makes a directory, if it is not there.

    Args:
      directory: Its parents are made too.
      argument: What an error calls it.

    Raises:
      ValueError: It cannot be made or written to.
    """
    path = Path(directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{argument} must be a directory to write to, got {str(path)!r}: {error.strerror}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise ValueError(f"{argument} must be a directory to write to, got {str(path)!r}: Permission denied")
    return path
