"""NUMA: read where the kernel says it, taken as a preference, never needed."""

import os

import pytest

from safehold.host import libc, memfd, numa


@pytest.fixture
def two_sockets(tmp_path):
    for node, cpus in ((0, "0-3,8-11"), (1, "4-7,12-15"), (2, "")):
        path = tmp_path / f"sys/devices/system/node/node{node}"
        path.mkdir(parents=True)
        (path / "cpulist").write_text(cpus + "\n")
    for address, node in (("0000:65:00.0", "1"), ("0000:17:00.0", "-1")):
        path = tmp_path / "sys/bus/pci/devices" / address
        path.mkdir(parents=True)
        (path / "numa_node").write_text(node)
    return tmp_path


def test_nodes(two_sockets):
    found = numa.nodes(two_sockets)
    assert found == {0: {0, 1, 2, 3, 8, 9, 10, 11}, 1: {4, 5, 6, 7, 12, 13, 14, 15}, 2: frozenset()}


def test_which_node_has_the_cpus(two_sockets):
    assert numa.node_of_cpus(frozenset({4, 13}), root=two_sockets) == 1
    assert numa.node_of_cpus(frozenset({0, 4}), root=two_sockets) is None
    assert numa.node_of_cpus(frozenset(), root=two_sockets) is None
    assert numa.node_of_cpus(frozenset({0}), root=two_sockets / "nothing") is None


def test_which_node_has_the_gpu(two_sockets):
    assert numa.node_of_pci("0000:65:00.0", root=two_sockets) == 1
    assert numa.node_of_pci("0000:17:00.0", root=two_sockets) is None
    assert numa.node_of_pci("0000:99:00.0", root=two_sockets) is None


def test_preferring_is_best_effort(monkeypatch):
    fd = memfd.create(1 << 20, "numa")
    with memfd.Mapping(fd) as mapping:
        present = numa.nodes()
        if present:
            node = min(present)
            if numa.prefer(mapping, node):
                memfd.populate(mapping)
                assert numa.node_at(mapping) in (*present, None)
        assert numa.prefer(mapping, 1023) is False
        assert numa.prefer(mapping, -1) is False

        def refuse(*_):
            raise OSError(1, "not permitted")

        monkeypatch.setattr(libc, "syscall", refuse)
        assert numa.prefer(mapping, 0) is False
        assert numa.node_at(mapping) is None
    os.close(fd)
