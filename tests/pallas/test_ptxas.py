"""Mosaic GPU starts ptxas at most once a process, whichever of JAX's packages has it."""

import sys
import types

import pytest

from jaxbuf.pallas import ptxas
from jaxbuf.pallas.dispatch import ask


@pytest.fixture(params=ptxas.PARENTS)
def starts(request, monkeypatch):
    """How often ptxas was started, with Mosaic GPU's C++ part in one of the packages that may have it."""
    count = []

    def start():
        count.append(1)
        return 90

    extension = types.SimpleNamespace(**{ptxas.VERSION: start})
    for parent in ptxas.PARENTS:
        found = extension if parent == request.param else None  # None in sys.modules is an ImportError
        monkeypatch.setitem(sys.modules, f"{parent}._mosaic_gpu_ext", found)
        if parent == request.param:
            monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    ptxas.remember_ptxas_version.cache_clear()
    yield count, extension
    ptxas.remember_ptxas_version.cache_clear()


def test_a_kernel_that_was_asked_for_starts_ptxas_once(starts):
    count, extension = starts
    assert ask("project", "auto", "H100") is not None and not count
    assert [getattr(extension, ptxas.VERSION)() for _ in range(3)] == [90] * 3 and len(count) == 1
    assert ptxas.ptxas_version() == 90 and len(count) == 1


def test_a_program_without_kernels_of_ours_leaves_mosaic_alone(starts):
    count, extension = starts
    assert ask("project", "xla", "H100") is None and ask("project", "auto", "A100") is None
    assert [getattr(extension, ptxas.VERSION)() for _ in range(3)] == [90] * 3 and len(count) == 3


def test_there_is_no_version_without_ptxas(monkeypatch):
    for parent in ptxas.PARENTS:
        monkeypatch.setitem(sys.modules, f"{parent}._mosaic_gpu_ext", None)
    ptxas.remember_ptxas_version.cache_clear()
    assert ptxas.ptxas_version() is None
    ptxas.remember_ptxas_version.cache_clear()
