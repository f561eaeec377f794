"""Values built from a checkpoint where the template has no fixed structure: what `load_state_dict` is given, and what
an empty or plain container of the template takes.

Invariants: nothing of the template is changed here; its tensors serve as destinations where shape and dtype are the
saved ones. The saved structure decides: dicts in the template's key order, then the checkpoint's; lists and tuples by
index.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from safehold.format.names import Component, ListIndex, TupleIndex
from safehold.state.protocols import TensorBinding
from safehold.state.saved_tree import SavedNode
from safehold.state.tensor_likes import bind_tensor, can_be_filled, fresh_tensor
from safehold.state.tree import fqn, is_namedtuple

Finish = Callable[[Callable[[str], Any]], Any]
"""Makes the value once all tensors are filled; its argument gives the restored value of a saved object name."""

_MISSING = object()


class Rebuild:
    """Plans one value.

    Attributes:
        tensors: Destinations: (end, binding).
        objects: Saved names of the objects needed.
        ends: All ends that this uses up.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.tensors: list[tuple[SavedNode, TensorBinding]] = []
        self.objects: list[str] = []
        self.ends: list[SavedNode] = []

    def plan(self, node: SavedNode, template: Any = _MISSING) -> Finish:
        """Return how to make the value of everything saved at and below `node`; `template` is what stands there now."""
        if node.children:
            # If the node is an end too, ranks saved different kinds here; the object is left, to be reported.
            return self._container(node, template)
        self.ends.append(node)
        if node.tensor is not None:
            value, binding = self._tensor(node, template)
            self.tensors.append((node, binding))
            return lambda _: value
        assert node.object is not None
        name = node.object.name
        self.objects.append(name)
        return lambda restored: restored(name)

    def _tensor(self, node: SavedNode, template: Any) -> tuple[Any, TensorBinding]:
        """Return the tensor that will hold the saved values, and its binding."""
        spec = node.tensor
        assert spec is not None
        name = fqn(node.path)
        if is_tensor_like(template):
            binding = bind_tensor(template, name=name, rank=self._rank)
            if binding.shape == spec.shape and binding.dtype == spec.dtype and can_be_filled(template):
                return template, binding
        fresh = fresh_tensor(spec.dtype, spec.shape, spec.kind)
        return fresh, bind_tensor(fresh, name=name, rank=self._rank)

    def _container(self, node: SavedNode, template: Any) -> Finish:
        kinds = {type(component) for component in node.children}
        if kinds == {ListIndex} or kinds == {TupleIndex}:
            return self._sequence(node, template, list if kinds == {ListIndex} else tuple)
        parts = [(key, self.plan(node.children[key], _member(template, key))) for key in _ordered(node, template)]
        if is_namedtuple(template) and set(template._fields) == set(node.children):
            fields = dict(parts)
            return lambda restored: type(template)(**{key: fields[key](restored) for key in template._fields})
        make = OrderedDict if isinstance(template, OrderedDict) else dict
        return lambda restored: make((_plain_key(key), finish(restored)) for key, finish in parts)

    def _sequence(self, node: SavedNode, template: Any, make: Callable[[Any], Any]) -> Finish:
        found = sorted(node.children.items(), key=lambda entry: _plain_key(entry[0]))
        parts = [self.plan(child, _member(template, component)) for component, child in found]
        return lambda restored: make([finish(restored) for finish in parts])


def is_tensor_like(value: Any) -> bool:
    """Return whether a value of the template is a tensor, an array or a `Sharded`."""
    return (hasattr(value, "shape") and not isinstance(value, np.generic)) or hasattr(value, "global_shape")


def _ordered(node: SavedNode, template: Any) -> list[Component]:
    if not isinstance(template, dict):
        return list(node.children)
    first = [key for key in template if type(key) in (str, int) and key in node.children]
    known = set(first)
    return first + [key for key in node.children if key not in known]


def _plain_key(component: Component) -> Any:
    return component if isinstance(component, str | int) else component.index


def _member(template: Any, component: Component) -> Any:
    """Return the template's member at `component`, `_MISSING` if there is none."""
    if isinstance(component, str | int):
        if isinstance(template, dict):
            return template.get(component, _MISSING)
        return getattr(template, str(component), _MISSING) if is_namedtuple(template) else _MISSING
    wanted = list if isinstance(component, ListIndex) else tuple
    if isinstance(template, wanted) and component.index < len(template):
        return template[component.index]
    return _MISSING
