"""Plain tensors: any strides, exact identity of memory, refusals by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from safehold.errors import UnsupportedStateError
from safehold.state import torch_tensors
from safehold.state.torch_tensors import dtype_from_name, dtype_name, tensor_pieces
from safehold.types import UNDECLARED, Rect


def strange() -> dict[str, torch.Tensor]:
    base = torch.arange(24.0).reshape(4, 6)
    return {
        "transposed": base.t(),
        "channels_last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "strided": base[:, ::2],
        "slice": base[1:3],
        "scalar": torch.tensor(3.5),
        "integer": torch.tensor(7),
        "empty": torch.zeros(0),
        "empty rows": torch.zeros(0, 3),
        "empty bf16": torch.zeros(2, 0, dtype=torch.bfloat16),
        "complex": torch.randn(3, dtype=torch.complex64),
        "bool": torch.tensor([True, False]),
        "float8": torch.zeros(4, dtype=torch.float8_e4m3fn),
        "needs grad": torch.ones(2, requires_grad=True),
        "parameter": nn.Parameter(torch.ones(2)),
    }


@pytest.mark.parametrize("kind", strange())
def test_any_dense_tensor_is_one_live_piece(kind: str) -> None:
    tensor = strange()[kind]
    binding = tensor_pieces(tensor, name="x")
    assert binding.shape == tuple(tensor.shape)
    assert dtype_from_name(binding.dtype) is tensor.dtype
    assert binding.holders == UNDECLARED
    ((rect, view),) = binding.pieces
    assert rect == Rect.whole(tuple(tensor.shape))
    assert not view.requires_grad
    assert view.shape == tensor.shape
    assert view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    assert torch.equal(view.to(torch.complex64), tensor.detach().to(torch.complex64))


def test_writing_through_a_view_changes_the_tensor_and_not_the_graph() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    tensor_pieces(parameter, name="x").pieces[0][1].fill_(2.0)
    assert parameter.tolist() == [2.0, 2.0, 2.0]
    assert parameter.grad_fn is None


def test_every_dtype_of_torch_has_a_name_that_leads_back() -> None:
    for value in vars(torch).values():
        if isinstance(value, torch.dtype):
            assert dtype_from_name(dtype_name(value)) is value
    with pytest.raises(ValueError, match="no dtype float7"):
        dtype_from_name("float7")


def test_equal_memory_keys_mean_tied() -> None:
    def key(tensor: torch.Tensor) -> tuple[int, ...]:
        return tensor_pieces(tensor, name="x").memory

    base = torch.zeros(4, 4)
    assert key(base) == key(base.view(4, 4)) == key(nn.Parameter(base))
    assert key(base) != key(base.t())
    assert key(base) != key(base[:2])
    assert key(base[:2]) != key(base[2:])
    assert key(base) != key(base.view(torch.int32))
    assert key(base) != key(base.clone())
    assert key(base[:1]) == key(base[0].unsqueeze(0))
    empty, other = torch.zeros(0, 3), torch.zeros(0, 3)
    assert key(empty) == key(empty)
    assert key(empty) != key(other)


def test_live_shows_a_swapped_data() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    binding = tensor_pieces(parameter, name="x")
    before = binding.live.data_ptr()
    parameter.data = torch.ones(3)
    assert binding.live.data_ptr() != before


class Tagged(torch.Tensor):
    """A subclass that nobody here knows."""


class Packed(nn.Parameter):
    """As libraries for quantised weights have it."""


def refused() -> dict[str, tuple[Any, str]]:
    fake = torch._subclasses.fake_tensor.FakeTensorMode()
    with fake:
        fake_tensor = torch.zeros(3)
    freed = torch.zeros(3)
    freed.untyped_storage().resize_(0)
    return {
        "meta": (torch.zeros(3, device="meta"), "meta device"),
        "fake": (fake_tensor, "fake tensor"),
        "sparse": (torch.eye(3).to_sparse(), "sparse"),
        "subclass": (torch.zeros(3).as_subclass(Tagged), "unknown kind"),
        "parameter subclass": (Packed(torch.zeros(3)), "unknown kind"),
        "lazy": (nn.LazyLinear(3).weight, "lazy"),
        "conjugate": (torch.zeros(3, dtype=torch.complex64).conj(), "conjugated"),
        "freed": (freed, "freed"),
        "no tensor": ([1, 2], "no torch.Tensor"),
    }


@pytest.mark.parametrize("kind", refused())
def test_what_cannot_be_saved_is_refused_by_name(kind: str) -> None:
    tensor, words = refused()[kind]
    with pytest.raises(UnsupportedStateError, match=f"(?s)the.name.*{words}"):
        tensor_pieces(tensor, name="the.name")


@pytest.mark.filterwarnings("ignore")
def test_nested_and_quantized_tensors_are_refused_by_name() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    jagged = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
    quantized = torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8)
    for tensor, words in ((nested, "nested"), (jagged, "nested"), (quantized, "quantized")):
        with pytest.raises(UnsupportedStateError, match=f"w cannot be saved: .*{words}"):
            tensor_pieces(tensor, name="w")


def test_a_collectives_result_is_waited_for_and_bound() -> None:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    inner = torch.arange(3.0)
    binding = tensor_pieces(AsyncCollectiveTensor(inner), name="x")
    assert torch.equal(binding.pieces[0][1], inner)
    assert binding.live.data_ptr() == inner.data_ptr()
    assert binding.guard is not None
    assert binding.guard()


def test_overlaps_itself() -> None:
    assert torch_tensors.overlaps_itself(torch.zeros(2).expand(3, 2))
    assert torch_tensors.overlaps_itself(torch.zeros(10).as_strided((3, 3), (2, 1)))
    for tensor in (torch.zeros(3, 4).t(), torch.zeros(4, 6)[:, ::2], torch.zeros(1, 5).expand(1, 5), torch.zeros(())):
        assert not torch_tensors.overlaps_itself(tensor)
