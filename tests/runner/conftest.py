"""The runner's tests run with every sampler."""

import pytest

from support_sampling import MakeSampler, sampler_maker, sampler_names


@pytest.fixture(scope="session", params=sampler_names())
def make_sampler(request: pytest.FixtureRequest) -> MakeSampler:
    """Each sampler in turn."""
    return sampler_maker(request.param)
