r"""The one line by which trainers and agents of different versions know each other, whatever else has changed between them.

    safehold/<protocol> <version> <word>\n

Invariants: this line never changes, nor the frame around it (`safehold.host.sockets`). What opens a connection (`Hello`, `StatusAsk`)
begins with it; its word says which of them it is. An agent that cannot read on answers with a line of its own, whose word says what it
does about it: `leaves` (try again in a moment), `busy` (a job of its version still runs), or `is here` (to who only asked).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

HELLO, STATUS = "hello", "status"
LEAVES, BUSY, IS_HERE = "leaves", "busy", "is here"
MAX_BYTES = 200

_LINE = re.compile(rb"safehold/(\d{1,9}) ([!-~]{1,64}) ([ -~]{1,64})\n")


@dataclass(frozen=True, slots=True)
class Greeting:
    """What a line says: the protocol, the version of safehold, and a word; see the module."""

    protocol: int
    version: str
    word: str

    def __str__(self) -> str:
        return f"safehold {self.version} (protocol {self.protocol})"

    def line(self) -> bytes:
        """Return the line."""
        return f"safehold/{self.protocol} {self.version} {self.word}\n".encode("ascii", "replace")


class OtherVersionError(Exception):
    """What came cannot be read, and is of another version; `greeting` says of which."""

    def __init__(self, greeting: Greeting) -> None:
        super().__init__(f"the other side runs {greeting}")
        self.greeting = greeting


def split(data: bytes) -> tuple[Greeting | None, bytes]:
    """Return the line, if `data` begins with one, and what follows."""
    found = _LINE.match(data[:MAX_BYTES])
    if found is None:
        return None, data
    greeting = Greeting(int(found[1]), found[2].decode("ascii"), found[3].decode("ascii"))
    return greeting, data[found.end() :]
