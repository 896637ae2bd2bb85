"""Values of flags: sizes with units, lists of CPUs."""

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from octavo.cli.options import parse_cpus, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1048576", 2**20),
        ("512M", 512 * 2**20),
        ("512MiB", 512 * 2**20),
        ("512MB", 512 * 10**6),
        ("512m", 512 * 10**6),
        ("2G", 2 * 2**30),
        ("4GiB", 4 * 2**30),
        ("4 GiB", 4 * 2**30),
        ("1.5G", 3 * 2**29),
        ("25.6k", 25_600),
        ("3kB", 3000),
        ("1T", 2**40),
        ("7B", 7),
    ],
)
def test_sizes(text: str, size: int) -> None:
    """Turns red if binary and decimal units are mixed up."""
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "G", "-1", "-1G", "1 2", "2 cups", "1e9", "nan", "0x10", "²G"]
)
def test_no_size(text: str) -> None:
    """Turns red if a mistyped size is read as some number."""
    with pytest.raises(typer.BadParameter):
        parse_size(text)


@given(st.integers(min_value=0, max_value=2**62))
def test_plain_bytes_are_exact(size: int) -> None:
    """Turns red if large numbers of bytes are rounded through a float."""
    assert parse_size(str(size)) == size


@pytest.mark.parametrize(
    ("text", "cpus"), [("0", (0,)), ("0,2-3", (0, 2, 3)), ("5, 1-1", (5, 1)), ("3,0", (3, 0))]
)
def test_cpus(text: str, cpus: tuple[int, ...]) -> None:
    """The order stays: the first CPU is the engine thread's."""
    assert parse_cpus(text) == cpus


@pytest.mark.parametrize("text", ["", ",", "1,", "a", "3-1", "-1", "1-", "1.5"])
def test_no_cpus(text: str) -> None:
    """Turns red if a mistyped list is read as some other one."""
    with pytest.raises(typer.BadParameter):
        parse_cpus(text)
