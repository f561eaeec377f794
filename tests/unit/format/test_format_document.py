"""Envelopes: exactly what was sealed, or an error that names the file."""

from __future__ import annotations

import msgspec
import pytest

from safehold.errors import FormatVersionError, IntegrityError, ManifestError
from safehold.format import document


class Body(msgspec.Struct):
    a: int


def forge(kind: str, body: bytes, *, version: int = 1, length: int | None = None) -> bytes:
    """Seal bytes that `seal` would not have written."""
    size = len(body) if length is None else length
    header = f'{{"safehold":"{kind}","format":{version},"bytes":{size},"blake3":"{document.digest(body)}"}}\n'
    return header.encode() + body + b"\n"


def test_comes_back() -> None:
    data = document.seal("pin", {"a": 1, "b": ["é", None, 1.5, True]})
    assert document.unseal("pin", data, path="p") == {"a": 1, "b": ["é", None, 1.5, True]}
    assert document.unseal("pin", memoryview(data), path="p", type=None)["a"] == 1
    assert document.unseal("pin", document.seal("pin", Body(3)), path="p", type=Body) == Body(3)
    assert data == forge("pin", data.split(b"\n")[1])
    assert data.count(b"\n") == 2 and data.endswith(b"\n")


def test_every_flipped_bit_and_every_cut_is_refused() -> None:
    data = document.seal("pin", {"a": 1, "text": "hello"})
    for at in range(len(data)):
        with pytest.raises(ManifestError, match="p/x"):
            document.unseal("pin", data[:at], path="p/x")
        for bit in range(8):
            bad = bytearray(data)
            bad[at] ^= 1 << bit
            with pytest.raises(IntegrityError, match="p/x"):
                document.unseal("pin", bytes(bad), path="p/x")


@pytest.mark.parametrize("tail", [b"\n", b"\0", b"{}", b" "])
def test_anything_behind_the_end_is_refused(tail: bytes) -> None:
    data = document.seal("pin", {"a": 1})
    with pytest.raises(ManifestError, match="too many"):
        document.unseal("pin", data + tail, path="p")
    assert document.unseal_head("pin", data + tail, path="p") == ({"a": 1}, len(data))


def test_another_kind_is_refused() -> None:
    with pytest.raises(ManifestError, match="kind manifest was expected, this one is of kind pin"):
        document.unseal("manifest", document.seal("pin", {}), path="p")


def test_a_newer_version_is_refused_as_such_whatever_else_it_changed() -> None:
    for data in (forge("pin", b"{}", version=2), b'{"safehold":"pin","format":7,"sha3":[1,2]}\n...'):
        with pytest.raises(FormatVersionError, match="up to 1"):
            document.unseal("pin", data, path="p")
    for version in (0, -1):
        with pytest.raises(ManifestError):
            document.unseal("pin", forge("pin", b"{}", version=version), path="p")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n",
        b"{}\n{}\n",
        b"\x80\x05K\x01.",
        b"x" * 1000,
        b"[" * 100_000,
        b'{"safehold":"pin","format":"1"}\n',
        forge("pin", b"{}", length=-1),
        forge("pin", b"{}", length=2**70),
        forge("pin", b"{}", length=10**6),
        forge("pin", b"[1]"),
        forge("pin", b"{"),
        forge("pin", b'{"a":' + b"[" * 40 + b"]" * 40 + b"}"),
        forge("pin", b'{"a":' + b"[" * 30_000 + b"]" * 30_000 + b"}"),
        forge("pin", b'{"a":"\xff"}'),
        forge("pin", b'{"a":NaN}'),
        forge("pin", b'{"a":1e999}'),
    ],
)
def test_hostile_documents_are_refused(data: bytes) -> None:
    with pytest.raises(ManifestError) as caught:
        document.unseal("pin", data, path="p")
    assert caught.value.path == "p" and len(str(caught.value)) < 600


def test_sizes_are_bounded_both_ways() -> None:
    with pytest.raises(ValueError, match="at most"):
        document.seal("pin", {"a": "x" * (64 << 10)})
    body = b'{"a":"' + b"x" * (64 << 10) + b'"}'
    with pytest.raises(ManifestError, match="at most"):
        document.unseal("pin", forge("pin", body), path="p")
    assert document.max_file_bytes("pin") < 80 << 10


def test_errors_show_no_control_characters() -> None:
    with pytest.raises(ManifestError) as caught:
        document.unseal("pin", forge("\\u001b[31m", b"{}"), path="p")
    assert "\x1b" not in str(caught.value)


def test_one_flipped_bit_never_passes_for_a_newer_format() -> None:
    data = document.seal("pin", {"a": 1})
    for place in range(len(data)):
        for bit in range(8):
            hurt = bytearray(data)
            hurt[place] ^= 1 << bit
            with pytest.raises(ManifestError):
                document.unseal("pin", bytes(hurt), path="p")
