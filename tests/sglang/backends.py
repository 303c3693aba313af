"""Storage levels attached to a running server through its admin endpoint: SGLang's own "file" backend, and kvtier."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.nvme_damage import flip_a_bit, flip_bit_at
from tests.sglang.conftest import kvtier_storage
from tests.sglang.server import SGLangServer

BACKENDS = ("file", "kvtier")


@contextmanager
def attached(server: SGLangServer, storage: Mapping[str, Any], backend: str = "dynamic") -> Iterator[None]:
    """A storage level with this extra configuration, as long as the `with` lasts."""
    body = {
        "hicache_storage_backend": backend,
        "hicache_storage_backend_extra_config_json": json.dumps({"prefetch_threshold": 16, **storage}),
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_write_policy": "write_through",
    }
    server.when_idle(lambda: server.request("PUT", "/hicache/storage-backend", body))
    try:
        yield
    finally:
        server.when_idle(lambda: server.request("DELETE", "/hicache/storage-backend"))


class Backend:
    """A storage level in a folder of its own: attached within a `with`, detached after it."""

    def __init__(self, server: SGLangServer, name: str, folder: Path) -> None:
        self.server, self.name, self.folder = server, name, folder
        folder.mkdir(exist_ok=True)

    def __enter__(self) -> Backend:
        if self.name == "file":
            self._attached = attached(self.server, {"file_storage_path": str(self.folder)}, "file")
        else:
            self._attached = attached(self.server, kvtier_storage(self.folder))
        self._attached.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._attached.__exit__(*error)

    def wait_written(self, pages: int) -> int:
        """Bytes of pages written, once at least so many pages are there."""
        if self.name == "file":
            return self.server.wait_for(
                lambda: sum(path.stat().st_size for path in self.folder.glob("*.bin")),
                lambda _: len(list(self.folder.glob("*.bin"))) >= pages,
            )
        self.server.wait_stored(2 * pages)
        metrics = self.server.metrics()
        return int(sum(v for k, v in metrics.items() if k.startswith("kvtier_bytes_total{direction=write")))

    def flip_a_bit(self, page: int) -> None:
        """Damage the `page`-th page that was written."""
        if self.name == "file":
            path = sorted(self.folder.glob("*.bin"), key=lambda found: found.stat().st_mtime_ns)[page]
            flip_bit_at(path, path.stat().st_size // 2 + 3)
        else:
            flip_a_bit(self.folder, 2 * page)
