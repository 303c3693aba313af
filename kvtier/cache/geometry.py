"""What an engine's blocks look like to the cache."""

from __future__ import annotations


class Geometry:
    """What the engine's blocks look like to the cache: tokens a block, groups, and which of them are windows.

    `windows` maps a group to its window in blocks; all other groups need whole prefixes. `dtype` names the elements of
    a row, if it is all of one type ("bfloat16"): canaries compare values rather than bytes then.
    """

    def __init__(
        self, block_tokens: int, groups: int = 1, windows: dict[int, int] | None = None, dtype: str = ""
    ) -> None:
        self.dtype = dtype
        self.block_tokens = block_tokens
        self.groups = groups
        self.window_groups = tuple(sorted((windows or {}).items()))
        self.closed_groups = tuple(group for group in range(groups) if group not in (windows or {}))
