"""Files of objects: equal bytes once, verified as a whole before anything of it is used."""

from __future__ import annotations

from typing import Any

import pytest

from safehold.errors import (
    ChecksumError,
    FormatVersionError,
    IntegrityError,
    ManifestError,
    StateMismatchError,
    TornFileError,
)
from safehold.format import crc, document, objects

RANKS = {0: {"a": b"same" * 100, "b": b"zero"}, 1: {"a": b"same" * 100, "b": b"one"}, 5: {"other": b""}, 9: {}}


def test_comes_back() -> None:
    data = objects.encode_objects(RANKS)
    stored = objects.parse(data, "p")
    assert stored.ranks() == (0, 1, 5, 9)
    for rank, named in RANKS.items():
        assert stored.names(rank) == tuple(named)
        for name, blob in named.items():
            assert stored.get(rank, name) == blob
            assert stored.digest(rank, name) == document.digest(blob)
    assert stored.names(7) == ()
    for rank, name in ((0, "c"), (7, "a")):
        with pytest.raises(StateMismatchError, match=f"no object {name} of rank {rank}"):
            stored.get(rank, name)


def test_equal_bytes_are_stored_once_and_order_does_not_matter() -> None:
    data = objects.encode_objects(RANKS)
    assert data.count(b"same" * 100) == 1
    assert objects.encode_objects(dict(reversed(RANKS.items()))) == data
    assert objects.parse(objects.encode_objects({}), "p").ranks() == ()


def test_bad_names_are_refused() -> None:
    with pytest.raises(ValueError):
        objects.encode_objects({0: {"a..b": b""}})


def test_every_flipped_bit_and_cut_is_refused() -> None:
    data = objects.encode_objects({0: {"a": b"xyz", "b": b"0123"}, 1: {"a": b"xyz"}})
    for at in range(len(data)):
        for bit in (0, 3, 7):
            bad = bytearray(data)
            bad[at] ^= 1 << bit
            with pytest.raises(IntegrityError, match="p/x"):
                objects.parse(bytes(bad), "p/x")
        with pytest.raises((ManifestError, TornFileError)):
            objects.parse(data[:at], "p")
    with pytest.raises(TornFileError):
        objects.parse(data + b"\0", "p")
    with pytest.raises(ChecksumError, match="object b of rank 0"):
        objects.parse(data[:-1] + b"4", "p")
    with pytest.raises(FormatVersionError):
        objects.parse(data.replace(b'"format":1', b'"format":2', 1), "p")


BLOB = [4, crc.crc(b"blob"), document.digest(b"blob")]


@pytest.mark.parametrize(
    "head",
    [
        {"names": [["a"]], "objects": [BLOB], "ranks": [{"rank": 0, "names": 1, "objects": [0]}]},
        {"names": [["a"]], "objects": [BLOB], "ranks": [{"rank": 0, "names": 0, "objects": [1]}]},
        {"names": [["a"]], "objects": [BLOB], "ranks": [{"rank": 0, "names": 0, "objects": []}]},
        {"names": [["a"]], "objects": [BLOB], "ranks": [{"rank": -1, "names": 0, "objects": [0]}]},
        {"names": [["a"]], "objects": [BLOB], "ranks": [{"rank": 0, "names": 0, "objects": [0]}] * 2},
        {"names": [["a", "a"]], "objects": [BLOB], "ranks": []},
        {"names": [["a@"]], "objects": [BLOB], "ranks": []},
        {"names": [], "objects": [[-4, 0, "0" * 64], BLOB], "ranks": []},
        {"names": [], "objects": [[2**62, 0, "0" * 64]], "ranks": []},
        {"names": [], "objects": [[4, 0, "x"]], "ranks": []},
        {"names": [], "objects": [BLOB]},
        {"names": 1, "objects": [BLOB], "ranks": []},
    ],
)
def test_heads_that_contradict_themselves_are_refused(head: dict[str, Any]) -> None:
    with pytest.raises(ManifestError) as caught:
        objects.parse(document.seal("objects", head) + b"blob", "p")
    assert caught.value.path == "p"
