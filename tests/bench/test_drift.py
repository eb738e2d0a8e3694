"""`jaxbuf bench drift --implementation`: the kernel's drift is judged beside XLA's; the figures need a GPU."""

import pytest

from jaxbuf.bench import drift


def rows(kernel: float, entries: str = "bfloat16") -> list[dict]:
    named = {"entries": entries, "checkpoint": "float32"}
    return [
        named | {"implementation": "xla", "first": 2e-3, "last": 2e-3},
        named | {"implementation": "gpu", "first": 2e-3, "last": 2e-3 * kernel},
    ]


@pytest.mark.parametrize(("kernel", "held"), [(0.5, True), (1.09, True), (1.11, False)])
def test_the_kernels_error_may_be_a_tenth_more_than_xlas(kernel, held):
    exact = rows(30.0, "float32")  # rounding of another order: not judged
    ((name, found),) = drift.compare([*rows(1.0), *rows(kernel), *exact]).items()
    assert found is held and f"at most {max(kernel, 1.0):.3f}" in name


@pytest.mark.parametrize("implementation", ["gpu", "both"])
def test_the_kernel_needs_a_gpu_and_says_so(implementation, capsys):
    with pytest.raises(SystemExit):
        drift.main(["--implementation", implementation, "--steps", "8"])
    assert "needs a GPU, this is a cpu" in capsys.readouterr().err
