"""How close the tiers come to what the machine can do: `kvtier bench tiers --json`, for `make bench`."""

from __future__ import annotations

import sys

from kvtier.cli.main import app

if __name__ == "__main__":
    app(["bench", "tiers", "--json", *sys.argv[1:]])
