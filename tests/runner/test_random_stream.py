"""The random stream: pure in (seed, draw), uniform, and pinned."""

from octavo.kernels.sampling.random_stream import uniform


def test_is_pinned() -> None:
    """Turns red when the generator changes, which would change the text of every seeded request."""
    assert [uniform(0, 0), uniform(42, 0), uniform(42, 7)] == [
        0.8833108082136426,
        0.5961188718302076,
        0.15289334222649975,
    ]


def test_fills_the_unit_interval_evenly() -> None:
    """Turns red when bits are dropped: 20,000 draws fall into 20 bins about equally often."""
    bins = [0] * 20
    for draw in range(20_000):
        value = uniform(1234, draw)
        assert 0.0 <= value < 1.0
        bins[int(20 * value)] += 1
    chi_square = sum((count - 1000) ** 2 / 1000 for count in bins)
    assert chi_square < 43.8  # 0.1 % of uniform streams exceed it at 19 degrees of freedom


def test_neighbouring_seeds_do_not_share_draws() -> None:
    """Turns red when a seed only shifts the stream: then seed s + 1 repeats seed s one later."""
    streams = [[uniform(seed, draw) for draw in range(50)] for seed in range(50)]
    assert len({value for stream in streams for value in stream}) == 2500


def test_takes_every_seed_that_is_accepted() -> None:
    """Turns red when the ends of the range of seeds overflow: -2^63 to 2^64 - 1."""
    values = {uniform(seed, 0) for seed in (-(2**63), -1, 0, 2**63 - 1, 2**64 - 2)}
    assert len(values) == 5
    assert uniform(-1, 3) == uniform(2**64 - 1, 3)
