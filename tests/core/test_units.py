import pytest

from hires.core import units


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (44 << 20, "44.0 MiB"), (3 << 50, "3.0 PiB")],
)
def test_size_takes_the_unit_that_suits(num_bytes, text):
    assert units.size(num_bytes) == text


def test_gib_keeps_three_digits():
    assert units.gib(5 << 28) == "1.25 GiB"
    assert units.gib(1 << 38) == "256 GiB"


@pytest.mark.parametrize(
    ("value_s", "text"),
    [
        (310e-6, "310 us"),
        (0.0415, "41.5 ms"),
        (3.214, "3.21 s"),
        (250, "4 min 10 s"),
        (7500, "2 h 5 min"),
        (-0.5, "-500.0 ms"),
    ],
)
def test_seconds(value_s, text):
    assert units.seconds(value_s) == text


@pytest.mark.parametrize(("value", "text"), [(832, "832"), (25.6e6, "25.6 M"), (4.1e9, "4.1 G")])
def test_count(value, text):
    assert units.count(value) == text


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("4GiB", 4 << 30),
        ("800MB", 800 * 10**6),
        ("1.5 KiB", 1536),
        (4096, 4096),
        ("4096", 4096),
        ("2g", 2 * 10**9),
        ("7 B", 7),
    ],
)
def test_size_is_read(text, num_bytes):
    assert units.parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-3", "0", 0, "4 GiBs", "1e9", None, True, [1]])
def test_what_is_no_size_is_none(text):
    assert units.parse_size(text) is None
