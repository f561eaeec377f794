"""Dtypes: torch's and NumPy's own sizes agree with the table; what holds references is never known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from safehold.format import dtypes

TORCH = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


@pytest.mark.parametrize("name", sorted(TORCH))
def test_every_dtype_of_torch_is_known_with_its_size(name: str) -> None:
    assert dtypes.itemsize(name) == TORCH[name].itemsize
    assert dtypes.is_known(name)


@pytest.mark.parametrize(
    "given",
    [
        "<M8[ns]", "<M8[25s]", "<m8", "<m8[D]", "S5", "S0", "<U3", ">U2", ">f4", ">i8", "V8", "V",
        np.longdouble, np.clongdouble,
        [("a", "i4"), ("b", "f8", (2,))], np.dtype([("a", "i1"), ("b", "f8")], align=True), [("x", [("y", "i2")])],
        [(("title", "name"), "i4")], [("é\n", "?")], [("a", "S3"), ("b", "M8[us]")],
    ],
)  # fmt: skip
def test_numpy_dtypes_come_back(given: Any) -> None:
    dtype = np.dtype(given)
    name = dtypes.from_numpy(dtype)
    assert name.startswith("numpy:")
    assert dtypes.numpy_dtype(name) == dtype
    assert dtypes.itemsize(name) == dtype.itemsize


@pytest.mark.parametrize(
    "name", ["bool", "uint8", "int64", "uint16", "float16", "float32", "float64", "complex64", "complex128"]
)
def test_what_torch_has_too_has_torchs_name(name: str) -> None:
    assert dtypes.from_numpy(np.dtype(name)) == name
    assert dtypes.numpy_dtype(name) == np.dtype(name)


def test_bytes_only() -> None:
    for name in ("bfloat16", "float8_e4m3fn", "uint4", "complex32", "quint4x2"):
        assert dtypes.numpy_dtype(name) is None


@pytest.mark.parametrize(
    "given", ["O", [("a", "O")], [("a", "i4"), ("b", [("c", "O")])], np.dtypes.StringDType(), ("i4", (2,))]
)
def test_what_has_no_fixed_size_or_references_is_refused(given: Any) -> None:
    with pytest.raises(ValueError):
        dtypes.from_numpy(np.dtype(given))


def test_records_that_overlap_are_refused() -> None:
    union = np.dtype({"names": ["a", "b"], "formats": ["<i4", "<i2"], "offsets": [0, 0]})
    with pytest.raises(ValueError):
        dtypes.from_numpy(union)


@pytest.mark.parametrize(
    "text",
    [
        "", "float33", "torch.float32", "numpy:", "numpy:O", "numpy:|O8", "numpy:<i4", "numpy:|b1", "numpy:i4,i4",
        "numpy:<f3",
        "numpy:<M8[parsec]", "numpy:|S9999999999", "numpy:|S999999999999", 'numpy:[["a","|O8"]]',
        'numpy:[["a","<i4"],["a","<i4"]]',
        'numpy:[["a", "<i4"]]', "numpy:[]", "numpy:" + "[" * 4000, 'numpy:[["a","|V1000000000",[1000000000]]]',
        "numpy:1", "numpy:{}",
        'numpy:[["a","<i4",[-1]]]', 'numpy:[["a",7]]', "numpy:" + "x" * 5000, "numpy:<M8[0s]", "numpy:<M8[s/0]",
    ],
)  # fmt: skip
def test_hostile_dtypes_are_unknown(text: str) -> None:
    assert not dtypes.is_known(text)
    with pytest.raises(ValueError):
        dtypes.numpy_dtype(text)


def test_what_safetensors_lacks_is_stored_as_bytes() -> None:
    assert dtypes.safetensors_name("bfloat16") == "BF16"
    assert dtypes.safetensors_shape("bfloat16", (2, 3)) == (2, 3)
    assert dtypes.safetensors_name("complex64") == "U8"
    assert dtypes.safetensors_shape("complex64", (2, 3)) == (2, 24)
    assert dtypes.safetensors_shape("complex64", ()) == (8,)
    assert dtypes.safetensors_shape("float4_e2m1fn_x2", (2, 3)) == (2, 3)
    with pytest.raises(ValueError):
        dtypes.safetensors_name("float33")


def test_alignment_is_a_power_of_two_that_divides() -> None:
    expected = {"int8": 1, "float32": 4, "complex128": 16, "numpy:|S5": 1, "numpy:<U3": 4, "numpy:|S0": 64}
    assert {name: dtypes.alignment(name) for name in expected} == expected
