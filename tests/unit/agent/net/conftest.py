from __future__ import annotations

from collections.abc import Iterator

import pytest
from net_raw import Target


@pytest.fixture
def target() -> Iterator[Target]:
    target = Target()
    yield target
    target.close()
