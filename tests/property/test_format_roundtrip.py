"""Round trips of the format: whatever is written comes back, and whatever else is read is refused by an error that has a name."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from safehold.errors import IntegrityError
from safehold.format import columns, document, dtypes, names, objects, pack, paths, plan
from safehold.format.names import ListIndex, TupleIndex
from safehold.types import CommitId, ObjectSpec, Rect, TensorSpec

ANY_TEXT = st.text(st.characters(codec=None), max_size=20)
TRICKY_TEXT = st.text(st.sampled_from(".\\@#[]()0159-eu_\n\ud800é"), max_size=8)
COMPONENTS = st.one_of(
    ANY_TEXT,
    TRICKY_TEXT,
    st.integers(),
    st.integers(0, 10**6).map(ListIndex),
    st.integers(0, 10**6).map(TupleIndex),
)
PATHS = st.lists(COMPONENTS, min_size=1, max_size=6).map(tuple)
NAMES = PATHS.map(names.join)


@given(PATHS)
def test_names_come_back(components: tuple[names.Component, ...]) -> None:
    name = names.join(components)
    assert names.split(name) == components
    assert names.check_name(name) == name
    assert "\n" not in name and name.encode()


@given(PATHS, PATHS)
def test_names_are_equal_only_if_paths_are(a: tuple[names.Component, ...], b: tuple[names.Component, ...]) -> None:
    same = a == b and [type(x) for x in a] == [type(x) for x in b]
    assert (names.join(a) == names.join(b)) == same


@given(st.one_of(TRICKY_TEXT, ANY_TEXT))
def test_only_names_are_split(text: str) -> None:
    try:
        components = names.split(text)
    except ValueError:
        return
    assert names.join(components) == text


@given(NAMES, st.lists(st.tuples(st.integers(0, 2**40), st.integers(1, 2**20)), max_size=4), st.booleans())
def test_piece_keys_come_back(name: str, dims: list[tuple[int, int]], whole: bool) -> None:
    offsets, sizes = tuple(o for o, _ in dims), tuple(s for _, s in dims)
    shape = sizes if whole else tuple(o + s + 1 for o, s in dims)
    rect = Rect.whole(shape) if whole else Rect(offsets, sizes)
    expected = None if whole or not dims else offsets
    assert names.parse_piece_key(names.piece_key(name, rect, shape)) == (name, expected)


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1))
def test_paths_come_back(a: int, b: int, c: int) -> None:
    commit = CommitId(a, b, c)
    _, step, attempt = paths.checkpoint_dir(commit).split("/")
    assert paths.parse_step_dir(step) == a and paths.parse_attempt_dir(attempt) == (b, c)
    assert paths.parse_quarantine(paths.quarantine(commit).split("/")[1]) == commit


@given(st.text("0123456789-.ajnpos", max_size=24))
def test_only_paths_are_parsed(text: str) -> None:
    if (step := paths.parse_step_dir(text)) is not None:
        assert paths.step_dir(step).endswith("/" + text)
    if (attempt := paths.parse_attempt_dir(text)) is not None:
        assert paths.attempt_dir(*attempt) == text
    if (number := paths.parse_incarnation(text)) is not None:
        assert paths.incarnation(number).endswith("/" + text)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_documents_come_back(body: dict[str, Any]) -> None:
    assert document.unseal("pin", document.seal("pin", body), path="p") == body


@given(st.binary(max_size=400), st.sampled_from(["pin", "part", "plan", "objects"]))
def test_arbitrary_bytes_are_refused_by_name(data: bytes, kind: str) -> None:
    sealed = document.seal(kind, {}) + data
    for read in (
        lambda raw: document.unseal("pin", raw, path="p"),
        lambda raw: plan.decode_part(raw, path="p"),
        lambda raw: plan.decode_plan(raw, "p"),
        lambda raw: objects.parse(raw, "p"),
        lambda raw: pack.parse_header(raw, len(raw), path="p"),
    ):
        for raw in (data, sealed):
            try:
                read(raw)
            except IntegrityError as exc:
                assert exc.path == "p"


HASHABLE: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | ANY_TEXT
    | st.binary(max_size=8)
    | st.dates()
    | st.uuids(),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=6,
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    HASHABLE
    | st.datetimes()
    | st.timedeltas()
    | st.decimals(allow_nan=False)
    | st.fractions()
    | st.complex_numbers(allow_nan=False)
    | st.slices(10)
    | st.binary(max_size=8).map(bytearray),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(HASHABLE, inner, max_size=4) | st.sets(HASHABLE, max_size=4)
    ),
    max_leaves=15,
)


def shape_of(value: Any) -> Any:
    """What `==` does not see: types, and the order of dicts."""
    if isinstance(value, dict):
        return [dict, *((shape_of(key), shape_of(item)) for key, item in value.items())]
    if isinstance(value, list | tuple):
        return [type(value), *map(shape_of, value)]
    if isinstance(value, set | frozenset):
        return [type(value), sorted(str(shape_of(item)) for item in value)]
    return [type(value), math.copysign(1, value) if isinstance(value, float) else None]


@given(VALUES)
def test_objects_come_back(value: Any) -> None:
    data = objects.encode(value, name="o")
    found = objects.decode(data)
    assert found == value and shape_of(found) == shape_of(value)
    assert objects.encode(found, name="o") == data


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_objects_or_refused(data: bytes) -> None:
    try:
        value = objects.decode(data, path="p")
    except IntegrityError as exc:
        assert exc.path == "p"
        return
    assert objects.decode(objects.encode(value, name="o")) == value or value != value or "nan" in repr(value)


@given(VALUES, st.integers(0, 10**6), st.integers(0, 255))
def test_damaged_objects_raise_nothing_else(value: Any, at: int, byte: int) -> None:
    data = bytearray(objects.encode(value, name="o"))
    data[at % len(data)] = byte
    try:
        objects.decode(bytes(data), path="p")
    except IntegrityError as exc:
        assert exc.path == "p"


@given(st.dictionaries(st.integers(0, 1000), st.dictionaries(NAMES, st.binary(max_size=20), max_size=4), max_size=4))
def test_object_files_come_back(ranks: dict[int, dict[str, bytes]]) -> None:
    stored = objects.parse(objects.encode_objects(ranks), "p")
    assert {rank: {name: stored.get(rank, name) for name in stored.names(rank)} for rank in stored.ranks()} == ranks


DTYPES = st.sampled_from(["float32", "bfloat16", "int8", "complex128", "numpy:|S5", "numpy:<U3", "bool", "float64"])
SPECS = st.builds(
    lambda name, dtype, shape: TensorSpec(name=name, dtype=dtype, shape=tuple(shape)),
    NAMES,
    DTYPES,
    st.lists(st.integers(0, 6), max_size=3),
)


@st.composite
def splits(draw: st.DrawFn, leaf: TensorSpec, ranks: int) -> list[tuple[int, Rect]]:
    """Cut a leaf along its first dim and give each piece to a rank."""
    if not leaf.shape or 0 in leaf.shape:
        return [(draw(st.integers(0, ranks - 1)), Rect.whole(leaf.shape))]
    cuts = sorted({0, leaf.shape[0], *draw(st.lists(st.integers(0, leaf.shape[0]), max_size=3))})
    rest = leaf.shape[1:]
    return [
        (draw(st.integers(0, ranks - 1)), Rect((lo, *(0 for _ in rest)), (hi - lo, *rest)))
        for lo, hi in itertools.pairwise(cuts)
    ]


@st.composite
def parts(draw: st.DrawFn) -> list[plan.Part]:
    world_size = draw(st.integers(1, 4))
    leaves = sorted(draw(st.lists(SPECS, max_size=5, unique_by=lambda leaf: leaf.name)), key=lambda leaf: leaf.name)
    rows: list[list[tuple[int, Rect]]] = [[] for _ in range(world_size)]
    for index, leaf in enumerate(leaves):
        for rank, rect in draw(splits(leaf, world_size)):
            rows[rank].append((index, rect))
    limit = draw(st.sampled_from([64, 1000, 1 << 30]))
    specs = tuple(ObjectSpec(name=name) for name in sorted(draw(st.sets(NAMES, max_size=2))))
    return [build_part(rank, world_size, leaves, rows[rank], limit, specs) for rank in range(world_size)]


def build_part(
    rank: int,
    world_size: int,
    leaves: list[TensorSpec],
    rows: list[tuple[int, Rect]],
    limit: int,
    specs: tuple[ObjectSpec, ...],
) -> plan.Part:
    pieces = [pack.PieceIn(leaves[leaf].name, leaves[leaf].dtype, leaves[leaf].shape, rect) for leaf, rect in rows]
    layouts = pack.layout(pieces, pack_size_bytes=limit)
    check_layout(pieces, layouts)
    dims = max((len(leaf.shape) for leaf in leaves), default=0)
    n = len(rows)
    offsets, sizes = np.zeros((n, dims), np.int64), np.ones((n, dims), np.int64)
    which, offset = np.zeros(n, np.int32), np.zeros(n, np.int64)
    for row, (_, rect) in enumerate(rows):
        offsets[row, : len(rect.offsets)], sizes[row, : len(rect.sizes)] = rect.offsets, rect.sizes
    for placed in layouts.pieces:
        which[placed.index], offset[placed.index] = placed.pack, placed.offset
    return plan.Part(
        rank=rank,
        world_size=world_size,
        leaves=tuple(leaves),
        leaf=np.array([leaf for leaf, _ in rows], np.int32),
        offsets=offsets,
        sizes=sizes,
        pack=which,
        offset=offset,
        pack_sizes=tuple(entry.size_bytes for entry in layouts.packs),
        objects=specs,
    )


def check_layout(pieces: list[pack.PieceIn], layouts: pack.PackLayouts) -> None:
    """Every piece is where the strict reader of headers says, aligned, once."""
    headers = [pack.parse_header(entry.header, entry.size_bytes, path="p") for entry in layouts.packs]
    assert sorted(placed.index for placed in layouts.pieces) == list(range(len(pieces)))
    for placed in layouts.pieces:
        piece = pieces[placed.index]
        tensor = headers[placed.pack].tensors[names.piece_key(piece.name, piece.rect, piece.shape)]
        assert (tensor.start, tensor.end - tensor.start) == (placed.offset, placed.nbytes)
        assert placed.nbytes == piece.rect.numel * dtypes.itemsize(piece.dtype)
        assert not placed.nbytes or placed.offset % dtypes.alignment(piece.dtype) == 0


def same(a: Any, b: Any) -> bool:
    for field in dataclasses.fields(a):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if not (np.array_equal(x, y) and x.dtype == y.dtype if isinstance(x, np.ndarray) else x == y):
            return False
    return True


def rows_of(table: plan.Part | plan.Plan, ranks: Iterable[int]) -> list[tuple[Any, ...]]:
    numbers = np.column_stack([table.offsets, table.sizes, table.pack, table.offset]).tolist()
    named = [table.leaves[leaf].name for leaf in table.leaf]
    return [(name, rank, *row) for name, rank, row in zip(named, ranks, numbers, strict=False)]


@settings(deadline=None)
@given(parts(), st.randoms(use_true_random=False))
def test_parts_and_plans_come_back(given_parts: list[plan.Part], random: Any) -> None:
    encoded = [plan.encode_part(part) for part in given_parts]
    assert all(same(plan.decode_part(data), part) for data, part in zip(encoded, given_parts, strict=True))
    nodes = tuple(range(len(encoded)))
    merged = plan.merge_parts(encoded, nodes)
    random.shuffle(encoded)
    data = plan.encode_plan(merged)
    assert same(plan.decode_plan(data), merged)
    assert plan.encode_plan(plan.merge_parts(encoded, nodes)) == data
    rows = {row for part in given_parts for row in rows_of(part, itertools.repeat(part.rank))}
    assert set(rows_of(merged, merged.rank.tolist())) == rows
    columns_of_key = (merged.leaf.tolist(), merged.offsets.tolist(), merged.rank.tolist())
    keys = [(leaf, *offsets, rank) for leaf, offsets, rank in zip(*columns_of_key, strict=True)]
    assert keys == sorted(keys)


INTS = st.one_of(
    st.lists(st.integers(0, 2**60 - 1), max_size=30),
    st.lists(st.sampled_from([0, 1, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**60 - 1]), max_size=30),
    st.tuples(st.integers(0, 2**40), st.integers(0, 2**30), st.integers(0, 50)).map(
        lambda t: [t[0] + t[1] * i for i in range(t[2])]
    ),
)


@given(INTS, st.binary(max_size=50))
def test_columns_come_back(values: list[int], blob: bytes) -> None:
    wide = np.array(values, np.int64)
    narrow = (wide % 2**31).astype(np.int32)
    packed = columns.unpack("part", columns.pack("part", {"x": 1}, {"a": wide, "b": narrow}, {"c": blob}), path="p")
    assert packed.facts == {"x": 1} and packed.blob("c") == blob
    for name, expected in (("a", wide), ("b", narrow)):
        found = packed.column(name)
        assert found.dtype == expected.dtype and np.array_equal(found, expected)
