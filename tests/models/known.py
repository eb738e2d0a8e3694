"""The known models as parameters of tests."""

import pytest

from jaxbuf.models.known_models import known_models


def each_known_model():
    """All of them: the first one in every suite, the first of each family in a slow one, the others by hand, for they
    take a second or ten each."""
    seen, found = set(), []
    for name, model in known_models().items():
        marks = pytest.mark.exhaustive if model.config.family in seen else pytest.mark.slow if seen else ()
        seen.add(model.config.family)
        found.append(pytest.param(name, marks=marks))
    return found
