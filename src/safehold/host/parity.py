"""The algebra of parity: XOR, and Reed-Solomon over GF(2^8), on blocks of memory.

Coefficients. The field is GF(2^8) with the polynomial x^8 + x^4 + x^3 + x^2 + 1 (0x11d). Parity row p of k data symbols is the sum
over c of a(p, c) times symbol c, with a(p, c) = 1 for XOR and for copies, and 1 / ((k + p) xor c) for Reed-Solomon: the Cauchy matrix
that ISA-L's `gf_gen_cauchy1_matrix` makes, of which every square part can be inverted. Both are part of the format.

Invariants: libisal, where it is there, and NumPy's tables give the same bits; sums release the interpreter lock and need no memory
beyond small blocks. Must not live here: which symbol lies where (`policy.placement`), files.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Sequence
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

POLYNOMIAL: Final = 0x11D
MAX_SYMBOLS: Final = 255

LIBRARY: Final = "libisal.so.2"
"""Debian's name of ISA-L 2.x."""

_BLOCK_BYTES: Final = 128 << 10
"""So much of each source is summed at a time: it stays in the cache of a core."""


def _make_tables() -> tuple[list[int], list[int]]:
    powers, logarithms, value = [0] * 510, [0] * 256, 1
    for exponent in range(255):
        powers[exponent] = powers[exponent + 255] = value
        logarithms[value] = exponent
        value <<= 1
        if value & 0x100:
            value ^= POLYNOMIAL
    return powers, logarithms


_POWERS, _LOGARITHMS = _make_tables()


def multiply(a: int, b: int) -> int:
    """Return the product of two elements of the field."""
    return _POWERS[_LOGARITHMS[a] + _LOGARITHMS[b]] if a and b else 0


def inverse(a: int) -> int:
    """Return 1 / a.

    Raises:
        ZeroDivisionError: a is 0.
    """
    if not a:
        raise ZeroDivisionError("0 has no inverse")
    return _POWERS[255 - _LOGARITHMS[a]]


@functools.cache
def coefficients(num_data: int, num_parity: int, *, ones: bool) -> tuple[tuple[int, ...], ...]:
    """Return the coefficients of each parity row.

    Args:
        num_data: Data symbols.
        num_parity: Parity rows.
        ones: All coefficients are 1: XOR, copies.

    Raises:
        ValueError: There are too many symbols, or with `ones` more than one row of more than one symbol.
    """
    if num_data < 1 or num_parity < 1 or num_data + num_parity > MAX_SYMBOLS:
        raise ValueError(f"{num_data} + {num_parity} symbols cannot be: each at least 1, {MAX_SYMBOLS} in all at most")
    if ones:
        if num_data > 1 and num_parity > 1:
            raise ValueError("rows of ones protect against one loss only")
        return ((1,) * num_data,) * num_parity
    rows = range(num_data, num_data + num_parity)
    return tuple(tuple(inverse(row ^ symbol) for symbol in range(num_data)) for row in rows)


@functools.lru_cache(4096)
def solve(rows: tuple[tuple[int, ...], ...], known: tuple[int, ...], wanted: int) -> tuple[int, ...]:
    """Return the factors by which known symbols are summed to give a data symbol.

    Args:
        rows: Coefficients of the parity rows.
        known: As many symbols as there are data symbols: 0 to k - 1 are data, k + p is parity row p.
        wanted: A data symbol.

    Raises:
        ValueError: They do not determine it.
    """
    size = len(rows[0])
    if len(known) != size:
        raise ValueError(f"{size} symbols are needed, not {len(known)}")
    # Solve x M = e(wanted), where row j of M says how known symbol j is made of the data: Gauss-Jordan on M transposed.
    made = [[int(symbol == c) for c in range(size)] if symbol < size else list(rows[symbol - size]) for symbol in known]
    matrix = [[made[j][c] for j in range(size)] + [int(c == wanted)] for c in range(size)]
    for column in range(size):
        pivot = next((row for row in range(column, size) if matrix[row][column]), None)
        if pivot is None:
            raise ValueError(f"symbols {known} do not determine symbol {wanted}")
        matrix[column], matrix[pivot] = matrix[pivot], matrix[column]
        scale = inverse(matrix[column][column])
        matrix[column] = [multiply(scale, value) for value in matrix[column]]
        for row in range(size):
            factor = matrix[row][column]
            if row != column and factor:
                matrix[row] = [a ^ multiply(factor, b) for a, b in zip(matrix[row], matrix[column], strict=True)]
    return tuple(matrix[c][size] for c in range(size))


class Field(Protocol):
    """What sums multiples of blocks."""

    name: str

    def sum_into(self, factors: Sequence[int], sources: Sequence[memoryview], target: memoryview) -> None:
        """Set `target` to the sum of `factors[i]` times `sources[i]`; all have the same length, and do not overlap."""
        ...


def sum_into(
    factors: Sequence[int], sources: Sequence[memoryview], target: memoryview, *, field: Field | None = None
) -> None:
    """Set `target` to the sum of `factors[i]` times `sources[i]`.

    Args:
        factors: Elements of the field; sources with factor 0 are not looked at.
        sources: Contiguous, of the length of `target`, not overlapping it.
        target: Overwritten.
        field: What multiplies; None: libisal if it is there, else NumPy. Sums without a factor but 1 are XORs of NumPy.

    Raises:
        ValueError: The lengths differ.
    """
    if len(factors) != len(sources) or any(source.nbytes != target.nbytes for source in sources):
        raise ValueError("each factor has a source, and each source the length of the target")
    pairs = [(factor, source) for factor, source in zip(factors, sources, strict=True) if factor]
    if not target.nbytes:
        return
    if all(factor == 1 for factor, _ in pairs):
        _xor([_array(source) for _, source in pairs], _array(target))
        return
    chosen = field if field is not None else default_field()
    chosen.sum_into([factor for factor, _ in pairs], [source for _, source in pairs], target)


def _array(view: memoryview) -> npt.NDArray[np.uint8]:
    return np.frombuffer(view, dtype=np.uint8)


def _xor(sources: Sequence[npt.NDArray[np.uint8]], target: npt.NDArray[np.uint8]) -> None:
    if len(sources) < 2:
        np.copyto(target, sources[0] if sources else 0)
        return
    whole = target.size // 8 * 8
    wide = [array[:whole].view(np.uint64) for array in (*sources, target)]
    step = _BLOCK_BYTES // 8
    for start in range(0, whole // 8, step):
        part = slice(start, start + step)
        np.bitwise_xor(wide[0][part], wide[1][part], out=wide[-1][part])
        for more in wide[2:-1]:
            np.bitwise_xor(wide[-1][part], more[part], out=wide[-1][part])
    if whole < target.size:
        target[whole:] = functools.reduce(np.bitwise_xor, (source[whole:] for source in sources))


class NumpyField:
    """Tables of NumPy: needs nothing else, and is some five times slower than libisal."""

    name = "numpy"

    def sum_into(self, factors: Sequence[int], sources: Sequence[memoryview], target: memoryview) -> None:
        """See `Field`."""
        out = _array(target)
        product = np.empty(_BLOCK_BYTES, dtype=np.uint8)
        for start in range(0, out.size, _BLOCK_BYTES):
            part = out[start : start + _BLOCK_BYTES]
            part[:] = 0
            for factor, source in zip(factors, sources, strict=True):
                self._multiply(factor, _array(source)[start : start + part.size], product[: part.size])
                np.bitwise_xor(part, product[: part.size], out=part)

    def _multiply(self, factor: int, source: npt.NDArray[np.uint8], product: npt.NDArray[np.uint8]) -> None:
        """Multiply two bytes at a time, by one look into a table of 65,536 entries."""
        whole = source.size // 2 * 2
        np.take(_pairs(factor), source[:whole].view(np.uint16), out=product[:whole].view(np.uint16), mode="clip")
        if whole < source.size:
            product[whole:] = multiply(factor, int(source[whole]))


@functools.lru_cache(32)
def _pairs(factor: int) -> npt.NDArray[np.uint16]:
    single = np.array([multiply(factor, value) for value in range(256)], dtype=np.uint8)
    every = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)
    return single[every].view(np.uint16)


class IsalField:
    """ISA-L's `ec_encode_data`: as fast as memory."""

    name = "isal"

    def __init__(self, path: str = LIBRARY) -> None:
        """Load the library.

        Raises:
            OSError: It is not there, lacks a function, or computes something else than the tables here.
        """
        library = ctypes.CDLL(path)
        try:
            self._init, self._encode = library.ec_init_tables, library.ec_encode_data
        except AttributeError as exc:
            raise OSError(None, f"no ISA-L: {exc}", path) from None
        # Pointers go as c_void_p: by default ctypes would cut them to 32 bits.
        self._init.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
        self._encode.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int, *[ctypes.c_void_p] * 3]
        self._init.restype = self._encode.restype = None
        self.library = library
        self._tables = functools.lru_cache(256)(self._make_tables)
        self._check(path)

    def _make_tables(self, factors: bytes) -> Any:
        tables = ctypes.create_string_buffer(32 * len(factors))
        self._init(len(factors), 1, factors, tables)
        return tables

    def sum_into(self, factors: Sequence[int], sources: Sequence[memoryview], target: memoryview) -> None:
        """See `Field`."""
        arrays = [_array(source) for source in sources]
        addresses = (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))
        out = _array(target)
        if not out.flags.writeable:
            raise ValueError("the target is read-only")
        outs = (ctypes.c_void_p * 1)(out.ctypes.data)
        self._encode(out.size, len(arrays), 1, self._tables(bytes(factors)), addresses, outs)

    def _check(self, path: str) -> None:
        """Sum a little by both; a library that disagrees would write parity that nobody can read."""
        sources = [memoryview(bytes((index * factor + factor) % 256 for index in range(331))) for factor in (1, 7, 91)]
        ours, theirs = bytearray(331), bytearray(331)
        for factors in itertools.product((1, 2, 142, 255), repeat=3):
            NumpyField().sum_into(factors, sources, memoryview(ours))
            self.sum_into(factors, sources, memoryview(theirs))
            if ours != theirs:
                raise OSError(None, "this library multiplies in another field", path)


@functools.cache
def default_field() -> Field:
    """Return libisal if it is there and right, else NumPy."""
    try:
        return IsalField()
    except OSError:
        return NumpyField()
