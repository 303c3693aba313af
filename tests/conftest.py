"""What every test gets: no lease may outlive it, engines run last, hypothesis profiles, ../shared where present."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from kvtier.testing.leases import no_lease_left_behind

REPOSITORY = Path(__file__).resolve().parents[1]

# Deadlines are off: machines may be shared, and timing is not what properties are about. CI repeats the same examples,
# so that a change is judged by what it does; elsewhere, and in `make soak`, each run draws new ones.
settings.register_profile("default", deadline=None, print_blob=True, derandomize="CI" in os.environ)
settings.load_profile("default")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "keeps_leases: leaves leases outstanding on purpose, so they are not checked")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests that start engines last: what is cheap to find is found first."""
    starts_engines = {"e2e", "sglang", "engine"}
    items.sort(key=lambda item: not starts_engines.isdisjoint(item.path.relative_to(REPOSITORY).parts))


@pytest.fixture(autouse=True)
def _no_lease_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test after which a lease is still outstanding; set up first, so it looks after all other fixtures."""
    if request.node.get_closest_marker("keeps_leases") is not None:
        yield
        return
    with no_lease_left_behind():
        yield


@pytest.fixture(scope="session")
def shared_folder() -> Path:
    """The folder of reference traces and model configurations beside the checkout; skips where there is none."""
    folder = Path(os.environ.get("KVTIER_SHARED") or REPOSITORY.parent / "shared")
    if not folder.is_dir():
        pytest.skip(f"the shared reference data is not there: {folder} (set KVTIER_SHARED)")
    return folder
