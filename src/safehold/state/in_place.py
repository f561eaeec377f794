"""Restored values put into what the user already holds.

Invariants: a container or tensor that the template has is filled and stays the same object where its type (and, for
tensors, shape and dtype) is the restored one's, so that every reference the user holds sees the restored value. An
object is filled at most once; met again under another name, the second place gets a new object.
"""

from __future__ import annotations

import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np

_MISSING = object()


class InPlace:
    """Fills template values with restored ones; one instance serves one restore."""

    def __init__(self) -> None:
        self._filled: dict[int, Any] = {}

    def put(self, template: Any, value: Any) -> Any:
        """Return what belongs where `template` was: `template` itself, filled with `value`, or `value`."""
        cls = type(template)
        if cls is not type(value) and not _same_array_kind(template, value):
            return value
        if cls in (dict, OrderedDict, defaultdict, Counter):
            return self._dict(template, value) if self._claim(template) else value
        if cls is list:
            return self._list(template, value) if self._claim(template) else value
        if cls is set or (cls is deque and template.maxlen == value.maxlen):
            if not self._claim(template):
                return value
            template.clear()
            (template.update if cls is set else template.extend)(value)
            return template
        if cls is bytearray and self._claim(template):
            template[:] = value
            return template
        return self._framework(template, value)

    def claim(self, template: Any) -> bool:
        """Return True the first time that `template` is met; it is then the caller who fills it."""
        return self._claim(template)

    def _claim(self, template: Any) -> bool:
        if id(template) in self._filled:
            return False
        self._filled[id(template)] = template
        return True

    def _dict(self, template: Any, value: Any) -> Any:
        merged = {key: self.put(template.get(key, _MISSING), item) for key, item in value.items()}
        template.clear()
        template.update(merged)
        return template

    def _list(self, template: list[Any], value: list[Any]) -> list[Any]:
        paired = len(template)
        template[:] = [self.put(template[index], item) if index < paired else item for index, item in enumerate(value)]
        return template

    def _framework(self, template: Any, value: Any) -> Any:
        if isinstance(template, np.ndarray):
            same = template.shape == value.shape and template.dtype == value.dtype and template.flags.writeable
            if same and self._claim(template):
                template[...] = value
                return template
            return value
        if isinstance(template, np.random.Generator):
            if template.bit_generator.state["bit_generator"] != value.bit_generator.state["bit_generator"]:
                return value
            template.bit_generator.state = value.bit_generator.state
            return template
        if isinstance(template, np.random.RandomState):
            template.set_state(value.get_state(legacy=False))
            return template
        if isinstance(template, random.Random):
            template.setstate(value.getstate())
            return template
        return self._torch(template, value)

    def _torch(self, template: Any, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None:
            return value
        if isinstance(template, torch.Generator):
            if template.device != value.device:
                return value
            template.set_state(value.get_state())
            return template
        if isinstance(template, torch.Tensor):
            same = template.shape == value.shape and template.dtype == value.dtype
            if same and template.is_contiguous() and self._claim(template):
                template.detach().copy_(value)
                return template
            return value
        return value


def _same_array_kind(template: Any, value: Any) -> bool:
    """Return whether both are torch tensors (a parameter is filled from a plain tensor)."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(template, torch.Tensor) and isinstance(value, torch.Tensor)
