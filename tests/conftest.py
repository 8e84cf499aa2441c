"""Fixtures that every test may use."""

from __future__ import annotations

import pytest

from tests.support import nvml_double


@pytest.fixture(scope="session")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> nvml_double.Double:
    """The compiled NVML double; ``nvml.environ("h100x8")`` is a child's environment with it."""
    reason = nvml_double.why_unavailable()
    if reason is not None:
        pytest.skip(reason)
    return nvml_double.build(tmp_path_factory.mktemp("nvml_double"))
