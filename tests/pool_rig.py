"""A Mooncake pool on loopback for tests: a master and owners in processes of their own, on free ports, ended by us."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

MIB = 1 << 20
needs_mooncake = pytest.mark.skipif(
    importlib.util.find_spec("mooncake") is None, reason="Mooncake's client is not installed in this environment"
)


class Pool:
    """The processes of one pool. `address` is what `pool_master` takes."""

    def __init__(self, master_options: tuple[str, ...] = ()) -> None:
        found = importlib.util.find_spec("mooncake")
        assert found is not None
        assert found.submodule_search_locations is not None
        self._binary = Path(next(iter(found.submodule_search_locations))) / "mooncake_master"
        self._options = master_options
        self.port, self._metrics_port = _free_port(), _free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.processes: list[subprocess.Popen[bytes]] = []
        self.master = self.start_master()

    def start_master(self) -> subprocess.Popen[bytes]:
        """A master at this pool's port; after the former one ended, one that remembers nothing."""
        command = [
            str(self._binary),
            "-rpc_address=127.0.0.1",
            f"-rpc_port={self.port}",
            "-metrics_host=127.0.0.1",
            f"-metrics_port={self._metrics_port}",
            "-enable_metric_reporting=false",
            "-client_ttl=5",
            *self._options,
        ]
        self.master = self._start(command)
        _wait_listening(self.port)
        return self.master

    def add_owner(self, segment_bytes: int = 64 * MIB) -> subprocess.Popen[bytes]:
        """One more process that lends memory; returns once it has joined."""
        process = self._start([sys.executable, "-m", "tests.pool_rig", self.address, str(segment_bytes)])
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line == b"joined\n", line
        return process

    def stop(self, process: subprocess.Popen[bytes]) -> None:
        """SIGSTOP, and wait until it has stopped: the signal alone says nothing about when its last thread does."""
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=Path(__file__).resolve().parents[1]
        )
        self.processes.append(process)
        return process


@contextmanager
def running_pool(owners: int = 2, segment_bytes: int = 64 * MIB, *master_options: str) -> Iterator[Pool]:
    """A master and owners, ended at the end."""
    pool = Pool(master_options)
    try:
        for _ in range(owners):
            pool.add_owner(segment_bytes)
        yield pool
    finally:
        pool.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_listening(port: int) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise AssertionError("mooncake_master did not start")


def _own(address: str, segment_bytes: int) -> None:
    """What an owner does: lend memory until its parent is gone."""
    from kvtier.tiers.pool.client import MooncakeClient, PoolOptions

    client = MooncakeClient(PoolOptions(master=address, host="127.0.0.1", segment_bytes=segment_bytes))
    print("joined", flush=True)
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.5)
    client.close()


if __name__ == "__main__":
    _own(sys.argv[1], int(sys.argv[2]))
