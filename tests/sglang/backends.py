"""Storage levels attached to a running server through its admin endpoint: SGLang's own "file" backend, and kvtier."""

from __future__ import annotations

import json
from pathlib import Path

from tests.nvme_damage import flip_a_bit, flip_bit_at
from tests.sglang.conftest import kvtier_storage
from tests.sglang.server import SGLangServer

BACKENDS = ("file", "kvtier")


class Backend:
    """A storage level in a folder of its own: attached within a `with`, detached after it."""

    def __init__(self, server: SGLangServer, name: str, folder: Path) -> None:
        self.server, self.name, self.folder = server, name, folder
        folder.mkdir(exist_ok=True)

    def __enter__(self) -> Backend:
        config = {"file_storage_path": str(self.folder)} if self.name == "file" else kvtier_storage(self.folder)
        body = {
            "hicache_storage_backend": "file" if self.name == "file" else "dynamic",
            "hicache_storage_backend_extra_config_json": json.dumps({**config, "prefetch_threshold": 16}),
            "hicache_storage_prefetch_policy": "wait_complete",
            "hicache_write_policy": "write_through",
        }
        self.server.when_idle(lambda: self.server.request("PUT", "/hicache/storage-backend", body))
        return self

    def __exit__(self, *_: object) -> None:
        self.server.when_idle(lambda: self.server.request("DELETE", "/hicache/storage-backend"))

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
