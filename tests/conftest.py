"""Fixtures and skips that every test can use."""

import importlib.util
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from support import SHARED, default_model

settings.register_profile(
    "patient",
    settings(),
    deadline=None,  # a busy machine is no fault of an example's
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("patient")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with a reason, what this machine lacks the means for."""
    missing = {}
    if not SHARED.is_dir():
        missing["shared"] = "needs ../shared (the project's cases, goldens and traces)"
    if default_model() is None:
        missing["model"] = "needs the default model: run `octavo pull`"
    if not all(importlib.util.find_spec(name) for name in ("torch", "transformers")):
        missing["reference"] = "needs torch and transformers: install octavo[reference]"
    for item in items:
        for mark, reason in missing.items():
            if item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def shared() -> Path:
    """The project's shared folder; use with ``@pytest.mark.shared``."""
    return SHARED


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The default model's file; use with ``@pytest.mark.model``."""
    path = default_model()
    assert path is not None
    return path
