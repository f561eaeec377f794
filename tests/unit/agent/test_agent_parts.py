"""Parts that the lead asks other nodes for."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from safehold.agent import words as w
from safehold.agent.parts import AllParts, PartStore
from safehold.format.plan import digest

PART = b"0123456789"
DIGEST = digest(PART)


class Lead:
    """What it asks for and what it gets."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, str]] = []
        self.found: list[Any] = []
        self.parts = AllParts(PartStore(), ask=lambda rank, digest: self.asked.append((rank, digest)))

    def collect(self, step: int) -> None:
        self.parts.collect(step, 0, [DIGEST], lambda parts, error: self.found.append(parts or error))

    def told(self, offset: int, data: bytes, total: int = len(PART)) -> None:
        self.parts.told(w.PartTold(0, DIGEST, offset, total, data))


@pytest.fixture
def lead() -> Lead:
    return Lead()


def test_a_part_comes_in_pieces_and_is_asked_for_once(lead: Lead) -> None:
    lead.collect(1)
    lead.collect(2)
    lead.told(0, PART[:4])
    lead.told(4, PART[4:])
    assert lead.found == [[PART], [PART]] and lead.asked == [(0, DIGEST)]


def test_a_part_whose_answer_was_lost_is_asked_for_again_by_the_next_save(lead: Lead) -> None:
    lead.collect(1)
    lead.parts.over(1, 0)
    lead.collect(2)
    assert lead.asked == [(0, DIGEST)] * 2
    lead.told(0, PART)
    assert lead.found == [[PART]]


def test_an_answer_that_was_cut_off_does_not_spoil_the_next_one(lead: Lead) -> None:
    lead.collect(1)
    lead.told(0, PART[:4])
    lead.collect(2)
    lead.parts.over(1, 0)
    lead.told(0, PART[:6])
    lead.told(6, PART[6:])
    assert lead.found == [[PART]]


def test_the_rest_of_an_answer_to_a_save_that_is_over_is_nothing(lead: Lead) -> None:
    lead.collect(1)
    lead.told(0, PART[:4])
    lead.parts.over(1, 0)
    lead.collect(2)
    lead.told(4, PART[4:])
    assert not lead.found
    lead.told(0, PART)
    assert lead.found == [[PART]]


@pytest.mark.parametrize("offset, data, total", [(-1, b"x", 10), (0, b"", 10), (8, b"xyz", 10), (0, b"x", 1 << 40)])
def test_what_can_be_no_piece_is_refused(lead: Lead, offset: int, data: bytes, total: int) -> None:
    lead.collect(1)
    with pytest.raises(msgspec.ValidationError):
        lead.told(offset, data, total)
