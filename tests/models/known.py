"""The known models as parameters of tests."""

import pytest

from jaxbuf.models.known_models import known_models


def each_known_model():
    """All of them: the first of each family in every suite, the others by hand, for they take a second or ten each."""
    seen, found = set(), []
    for name, model in known_models().items():
        marks = pytest.mark.exhaustive if model.config.family in seen else ()
        seen.add(model.config.family)
        found.append(pytest.param(name, marks=marks))
    return found
