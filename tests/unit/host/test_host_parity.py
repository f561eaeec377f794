"""The algebra of parity: the same bits by libisal and by NumPy, and any loss within the bounds is made good."""

from __future__ import annotations

import ctypes
import itertools
import random

import pytest

from safehold.host import parity
from safehold.host.parity import Field, IsalField, NumpyField, coefficients, inverse, multiply, solve, sum_into


def isal() -> IsalField:
    try:
        return IsalField()
    except OSError as exc:
        pytest.skip(f"no libisal here: {exc}")


@pytest.fixture(params=["numpy", "isal"])
def field(request: pytest.FixtureRequest) -> Field:
    return NumpyField() if request.param == "numpy" else isal()


def slow_multiply(a: int, b: int) -> int:
    """Shift and add."""
    product = 0
    while b:
        product ^= a if b & 1 else 0
        a, b = (a << 1) ^ (parity.POLYNOMIAL if a & 0x80 else 0), b >> 1
    return product


def test_the_field() -> None:
    for a, b in itertools.product(range(256), (0, 1, 2, 3, 29, 142, 255)):
        assert multiply(a, b) == multiply(b, a) == slow_multiply(a, b)
    assert all(multiply(a, inverse(a)) == 1 for a in range(1, 256))
    with pytest.raises(ZeroDivisionError):
        inverse(0)


def test_coefficients_are_part_of_the_format() -> None:
    assert coefficients(4, 2, ones=False) == ((71, 167, 122, 186), (167, 71, 186, 122))
    assert coefficients(3, 1, ones=True) == ((1, 1, 1),)
    assert coefficients(1, 3, ones=True) == ((1,), (1,), (1,))
    for num_data, num_parity, ones in ((0, 1, False), (1, 0, False), (255, 1, False), (2, 2, True)):
        with pytest.raises(ValueError):
            coefficients(num_data, num_parity, ones=ones)


@pytest.mark.parametrize(("num_data", "num_parity"), [(1, 1), (4, 2), (8, 3), (60, 4), (200, 55)])
def test_matrices_are_those_of_isal(num_data: int, num_parity: int) -> None:
    library, size = isal().library, num_data + num_parity
    made = ctypes.create_string_buffer(size * num_data)
    library.gf_gen_cauchy1_matrix(made, size, num_data)
    rows = coefficients(num_data, num_parity, ones=False)
    assert bytes(made)[num_data * num_data :] == bytes(itertools.chain.from_iterable(rows))
    known = sorted(random.Random(num_data).sample(range(size), num_data))
    taken = b"".join(bytes(made)[symbol * num_data : (symbol + 1) * num_data] for symbol in known)
    inverted = ctypes.create_string_buffer(num_data * num_data)
    assert library.gf_invert_matrix(ctypes.create_string_buffer(taken, len(taken)), inverted, num_data) == 0
    for wanted in range(min(num_data, 8)):
        row = bytes(inverted)[wanted * num_data : (wanted + 1) * num_data]
        assert bytes(solve(rows, tuple(known), wanted)) == row


@pytest.mark.parametrize("size", [0, 1, 2, 31, 32, 63, 4096, (128 << 10) - 1, (128 << 10) + 3, 300_001])
def test_both_give_the_same_bits(size: int) -> None:
    other, rng = isal(), random.Random(size)
    for number in (1, 2, 5):
        factors = [rng.randrange(2, 256) for _ in range(number)]
        sources = [memoryview(rng.randbytes(size)) for _ in range(number)]
        ours, theirs = bytearray(b"x" * size), bytearray(b"y" * size)
        sum_into(factors, sources, memoryview(ours), field=NumpyField())
        sum_into(factors, sources, memoryview(theirs), field=other)
        assert ours == theirs
        for place in rng.sample(range(size), min(size, 5)):
            wanted = 0
            for factor, source in zip(factors, sources, strict=True):
                wanted ^= slow_multiply(factor, source[place])
            assert ours[place] == wanted


@pytest.mark.parametrize("size", [0, 1, 7, 8, 4099, 131_072, 262_149])
def test_sums_of_ones(size: int) -> None:
    rng = random.Random(size)
    for number in (0, 1, 2, 3, 6):
        sources = [rng.randbytes(size) for _ in range(number)]
        target = bytearray(b"x" * size)
        sum_into([1] * number, [memoryview(source) for source in sources], memoryview(target))
        wanted = 0
        for source in sources:
            wanted ^= int.from_bytes(source, "little")
        assert target == wanted.to_bytes(size, "little")


def test_sources_with_factor_zero_are_not_looked_at(field: Field) -> None:
    target = bytearray(64)
    sources = [memoryview(bytes([value]) * 64) for value in (1, 2, 3)]
    sum_into([0, 2, 0], sources, memoryview(target), field=field)
    assert target == bytes([4]) * 64
    sum_into([0, 0, 0], sources, memoryview(target), field=field)
    assert target == bytes(64)


def test_unaligned_memory(field: Field) -> None:
    rng = random.Random(3)
    data = memoryview(rng.randbytes(3 * 5000 + 8))
    for shift in (1, 3, 7):
        sources = [data[shift + n * 4001 : shift + n * 4001 + 4001] for n in range(3)]
        target, wanted = bytearray(4010), bytearray(4001)
        sum_into([3, 1, 9], sources, memoryview(target)[shift : shift + 4001], field=field)
        sum_into([3, 1, 9], [memoryview(bytes(source)) for source in sources], memoryview(wanted), field=field)
        assert target[shift : shift + 4001] == wanted and not any(target[:shift])


def test_lengths_and_targets_that_do_not_fit() -> None:
    with pytest.raises(ValueError):
        sum_into([1], [memoryview(b"12")], memoryview(bytearray(3)))
    with pytest.raises(ValueError):
        sum_into([1, 2], [memoryview(b"12")], memoryview(bytearray(2)))
    with pytest.raises(ValueError):
        sum_into([2], [memoryview(b"12")], memoryview(b"34"), field=isal())


@pytest.mark.parametrize(("num_data", "num_parity"), [(1, 3), (2, 2), (3, 1), (4, 2), (8, 3)])
def test_any_loss_within_the_bounds_is_made_good(field: Field, num_data: int, num_parity: int) -> None:
    rng, size = random.Random(num_data), 257
    ones = num_parity == 1 or num_data == 1
    rows = coefficients(num_data, num_parity, ones=ones)
    symbols = [rng.randbytes(size) for _ in range(num_data)]
    for row in rows:
        made = bytearray(size)
        sum_into(row, [memoryview(symbol) for symbol in symbols[:num_data]], memoryview(made), field=field)
        symbols.append(bytes(made))
    ways = list(itertools.combinations(range(num_data + num_parity), num_data))
    for known in rng.sample(ways, min(40, len(ways))):
        for wanted in set(range(num_data)) - set(known):
            back = bytearray(size)
            factors = solve(rows, known, wanted)
            sum_into(factors, [memoryview(symbols[symbol]) for symbol in known], memoryview(back), field=field)
            assert back == symbols[wanted], (known, wanted)


def test_too_few_symbols() -> None:
    rows = coefficients(4, 2, ones=False)
    with pytest.raises(ValueError, match="are needed"):
        solve(rows, (0, 1, 2), 3)
    with pytest.raises(ValueError, match="do not determine"):
        solve(rows, (0, 1, 2, 2), 3)


def test_a_library_that_is_none() -> None:
    with pytest.raises(OSError):
        IsalField("libnothing-of-that-name.so.9")
    with pytest.raises(OSError, match="no ISA-L"):
        IsalField("libc.so.6")


def test_a_library_of_another_field_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    isal()
    powers, logarithms = parity._POWERS.copy(), parity._LOGARITHMS.copy()
    monkeypatch.setattr(parity, "POLYNOMIAL", 0x14D)
    monkeypatch.setattr(parity, "_POWERS", parity._make_tables()[0])
    monkeypatch.setattr(parity, "_LOGARITHMS", parity._make_tables()[1])
    parity._pairs.cache_clear()
    assert (powers, logarithms) != (parity._POWERS, parity._LOGARITHMS)
    with pytest.raises(OSError, match="another field"):
        IsalField()
    parity._pairs.cache_clear()


def test_there_is_always_a_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "IsalField", lambda: (_ for _ in ()).throw(OSError()))
    parity.default_field.cache_clear()
    assert parity.default_field().name == "numpy"
    parity.default_field.cache_clear()
