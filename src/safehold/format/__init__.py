"""Bytes of packs, manifests, plans, records and objects, and the paths inside a run directory.

Invariants: pure; bytes in, bytes out. Every size, count and name that comes from bytes is checked before it is used,
and refused with an `IntegrityError` that names the file. No I/O, no decisions, no frameworks. `docs/format.md`
specifies what is written here.
"""

from typing import Final

FORMAT_VERSION: Final = 1
"""The version of everything on storage; a reader refuses newer ones by name."""
