"""Finding memory: made-up machines, NUMA calls on this one, and what they refuse."""

from __future__ import annotations

import errno
import mmap
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.tiers import numa
from kvtier.tiers.addresses import address_of
from kvtier.tiers.cxl.medium import find_place
from kvtier.tiers.devices import cpuless_nodes, dax_devices, memory_nodes, node_of_device
from kvtier.tiers.protocol import TierProbe
from tests.machines import GIB, add_dax, add_node

MIB = 1 << 20
HMAT = (250, 30_000, 300, 20_000)
CURVE = TierProbe(250e-9, 30e9, 300e-9, 20e9)


def test_a_machine_without_such_memory_shows_none(tmp_path: Path) -> None:
    assert memory_nodes(str(tmp_path)) == []
    assert cpuless_nodes(str(tmp_path)) == []
    assert dax_devices(str(tmp_path)) == []
    with pytest.raises(ConfigError, match="shows no unused devdax device and no NUMA node without CPUs"):
        find_place("auto", str(tmp_path))


def test_nodes_without_cpus_are_told_from_others_with_their_sizes_and_hmat(tmp_path: Path) -> None:
    add_node(tmp_path, 0, cpus="0-15")
    add_node(tmp_path, 2, total=8 * GIB, free=7 * GIB, hmat=(400, 10_000, 500, 9_000))
    add_node(tmp_path, 10, hmat=HMAT)
    add_node(tmp_path, 3, total=0, free=0)
    assert [node.node for node in memory_nodes(str(tmp_path))] == [0, 2, 10]
    found = cpuless_nodes(str(tmp_path))
    assert [(node.node, node.total_bytes, node.free_bytes) for node in found] == [
        (10, 4 * GIB, 3 * GIB),
        (2, 8 * GIB, 7 * GIB),
    ]
    assert found[0].hmat == CURVE
    place = find_place("auto", str(tmp_path))
    assert (place.name, place.hmat) == ("node:10", CURVE)
    assert find_place("node:2", str(tmp_path)).size_bytes == 7 * GIB
    with pytest.raises(ConfigError, match="has memory on these nodes only: 0, 2, 10"):
        find_place("node:3", str(tmp_path))


def test_a_device_is_found_with_size_alignment_and_the_figures_of_its_node(tmp_path: Path) -> None:
    add_node(tmp_path, 2, total=0, hmat=HMAT)
    device = add_dax(tmp_path, "dax0.0", 64 * MIB, node=2)
    folder = tmp_path / "sys/bus/dax/devices/dax1.0"  # in use as system RAM: no character device
    folder.mkdir()
    (folder / "size").write_text("4096\n")
    (found,) = dax_devices(str(tmp_path))
    assert (found.path, found.size_bytes, found.align_bytes) == (str(device), 64 * MIB, 2 * MIB)
    assert found.hmat == CURVE
    assert find_place("auto", str(tmp_path)).path == str(device)


def test_a_device_that_holds_somebody_s_data_is_only_taken_by_name(tmp_path: Path) -> None:
    device = add_dax(tmp_path, "dax0.0", 8 * MIB)
    with device.open("r+b") as file:
        file.write(b"a database")
    with pytest.raises(ConfigError, match="no unused devdax"):
        find_place("auto", str(tmp_path))
    assert find_place(str(device), str(tmp_path)).is_device


def test_the_node_next_to_a_device(tmp_path: Path) -> None:
    folder = tmp_path / "sys/bus/pci/devices/0000:3b:00.0"
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text("1\n")
    assert node_of_device("0000:3B:00.0", str(tmp_path)) == 1
    (folder / "numa_node").write_text("-1\n")
    assert node_of_device("0000:3b:00.0", str(tmp_path)) is None
    assert node_of_device("0000:00:00.0", str(tmp_path)) is None


def _mapping() -> tuple[mmap.mmap, int]:
    mapping = mmap.mmap(-1, 1 * MIB)
    return mapping, address_of(memoryview(mapping))


def test_bound_and_preferred_pages_come_from_the_node() -> None:
    mapping, address = _mapping()
    try:
        assert set(numa.nodes_of(address, MIB).tolist()) == {-errno.ENOENT}
        numa.bind(address, MIB, 0)
    except OSError as error:
        pytest.skip(f"this kernel does not let us place memory: {error}")
    numa.prefer(address, MIB, [0])
    with numa.preferred([0]), numa.preferred([]):
        for start in range(0, MIB, 4096):
            mapping[start] = 1
    assert set(numa.nodes_of(address, MIB).tolist()) == {0}


@pytest.mark.parametrize("node", [1000, -1, 5000])
def test_a_node_that_does_not_exist_is_an_error_and_changes_nothing(node: int) -> None:
    mapping, address = _mapping()
    with pytest.raises(OSError):
        numa.bind(address, MIB, node)
    with pytest.raises(OSError):
        numa.prefer(address, MIB, [node])
    with pytest.raises(OSError), numa.preferred([node]):
        pytest.fail("entered")
    mapping[0] = 1
    assert mapping[0] == 1


def test_an_address_nothing_is_mapped_at_is_an_error() -> None:
    with pytest.raises(OSError):
        numa.bind(4096, MIB, 0)
