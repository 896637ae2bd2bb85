"""The runner's tests run with every sampler."""

import pytest

from support_sampling import MakeSampler, samplers


@pytest.fixture(scope="session", params=samplers().values(), ids=samplers().keys())
def make_sampler(request: pytest.FixtureRequest) -> MakeSampler:
    """Each sampler in turn."""
    return request.param  # type: ignore[no-any-return]
