"""A directory that is replaced as a whole: whoever looks under its name finds the old one, the new one or none."""

import ctypes
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path

SUFFIX = ".saving"
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of linux/fcntl.h and linux/fs.h


@contextmanager
def replacing(directory: Path, *, dropped: Sequence[str] = ()) -> Iterator[Path]:
    """Yields an empty directory beside `directory`, which takes its place when the block ends without an error.

    What is written is on the disk before the name changes hands. Where the system can exchange two names at once
    (Linux), one that replaces another is never absent; elsewhere there is an instant without either, and the old one
    is put back by the next call if the process dies in it. Leftovers of processes that died are removed by the next
    call for the same name; those of living ones are told by their lock and stay.

    Args:
      directory: The name. Its parents are made; a symbolic link is followed.
      dropped: File name patterns. What `directory` holds and the block did not write is kept, unless one matches.

    Raises:
      NotADirectoryError: The name is taken by something else.
    """
    directory = directory.resolve()
    if directory.exists() and not directory.is_dir():
        raise NotADirectoryError(f"{directory} must be a directory or not exist")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        with _locked(directory.parent):  # between making and locking, no other process may take ours for a leftover
            _remove_leftovers(directory)
            scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", suffix=SUFFIX, dir=directory.parent))
            stack.enter_context(_locked(scratch))
            stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        new = scratch / "new"
        new.mkdir()
        if directory.exists():
            shutil.copymode(directory, new)
        yield new
        if directory.exists():
            _keep_the_rest(directory, new, dropped)
        _sync(new)
        with _locked(directory.parent):
            _swap(new, directory, scratch / "old")
        _sync_one(directory.parent)


def _swap(new: Path, directory: Path, old: Path) -> None:
    if not directory.exists():
        new.rename(directory)
    elif not _exchange(new, directory):
        directory.rename(old)
        try:
            new.rename(directory)
        except BaseException:
            old.rename(directory)
            raise


def _exchange(one: Path, other: Path) -> bool:
    """Swaps two names in one step; False if the system or the file system can't."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    return rename(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0


def _remove_leftovers(directory: Path) -> None:
    name = re.compile(re.escape(f".{directory.name}.") + r"\w{8}" + re.escape(SUFFIX))
    for leftover in [entry for entry in directory.parent.iterdir() if name.fullmatch(entry.name)]:
        with _locked(leftover, wait=False) as locked:
            if not locked:
                continue
            if not directory.exists() and (leftover / "old").exists() and (leftover / "new").exists():
                (leftover / "old").rename(directory)  # it died between the two names
            shutil.rmtree(leftover, ignore_errors=True)


def _keep_the_rest(directory: Path, new: Path, dropped: Sequence[str]) -> None:
    for entry in directory.iterdir():
        kept = new / entry.name
        if kept.exists() or any(fnmatch(entry.name, pattern) for pattern in dropped):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.copytree(entry, kept, symlinks=True, copy_function=_link)
        else:
            _link(entry, kept)


def _link(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target, follow_symlinks=False)


def _sync(directory: Path) -> None:
    for path in [*directory.rglob("*"), directory]:
        if not path.is_symlink():
            _sync_one(path)


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(directory: Path, *, wait: bool = True) -> Iterator[bool]:
    """Locks a directory until the block or the process ends; yields whether it could."""
    with ExitStack() as stack:
        locked = False
        with suppress(OSError):  # also a file system without locks: nothing is taken for a leftover there
            descriptor = os.open(directory, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            locked = True
        yield locked
