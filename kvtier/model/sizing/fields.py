"""Reading a model config field by field: typed, bounded, and remembering what has been read.

Every reader takes its numbers from here, so a wrong value always names its field, and what nobody has read can be
checked afterwards for hints of a structure that was not understood (`vocabulary.unexplained`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvtier.errors import ModelConfigError

# Bounds beyond which a figure is a mistake, not a model: the largest public models stay ten times below each.
MAX_LAYERS = 4096
MAX_HEADS = 1 << 16
MAX_WIDTH = 1 << 22
MAX_TOKENS = 1 << 40


class Fields:
    """A config (or a section of one) with typed access. Not thread-safe; one is made per interpretation."""

    def __init__(self, raw: Mapping[str, object], path: str = "", extra: Mapping[str, object] | None = None) -> None:
        self._raw = raw
        self._path = path
        self._extra = extra or {}
        self._read: set[str] = set()
        self._taken: set[str] = set()
        self._sections: dict[str, Fields] = {}

    def name(self, key: str) -> str:
        """The field's name as an error shows it, with its section."""
        return f"{self._path}{key}"

    def value(self, key: str) -> object:
        """The raw value, from the config or else from the family's convention; None when neither has it."""
        self._read.add(key)
        found = self.peek(key)
        if found is not None and self._raw.get(key) is None:
            self._taken.add(key)
        return found

    def peek(self, key: str) -> object:
        """As `value`, but looking is not reading: it explains nothing."""
        found = self._raw.get(key)
        return self._extra.get(key) if found is None else found

    def active(self, *keys: str) -> bool:
        """Whether any of the fields is there and says something. Looking is not reading here either."""
        return any(says_something(self.peek(key)) for key in keys)

    def count(self, *keys: str, at_most: int = MAX_WIDTH, at_least: int = 1) -> int:
        """The integer under the first of `keys` (spellings of one field) that is there; else an error names it."""
        found = self.maybe_count(*keys, at_most=at_most, at_least=at_least)
        if found is None:
            raise ModelConfigError(f"{self.name(keys[0])} is missing")
        return found

    def maybe_count(self, *keys: str, at_most: int = MAX_WIDTH, at_least: int = 1) -> int | None:
        """As `count`, but None when the field is absent or null. The other spellings count as read."""
        self._read.update(keys)
        for key in keys:
            found = self.value(key)
            if found is not None:
                return checked_count(found, self.name(key), at_most=at_most, at_least=at_least)
        return None

    def flag(self, key: str, default: bool = False) -> bool:
        found = self.value(key)
        if found is None:
            return default
        if not isinstance(found, bool):
            raise ModelConfigError(f"{self.name(key)} must be true or false, not {shown(found)}")
        return found

    def text(self, key: str) -> str | None:
        found = self.value(key)
        if found is None:
            return None
        if not isinstance(found, str):
            raise ModelConfigError(f"{self.name(key)} must be text, not {shown(found)}")
        return found

    def items(self, key: str) -> list[object] | None:
        """A list, or None when the field is absent or null."""
        found = self.value(key)
        if found is None:
            return None
        if not isinstance(found, (list, tuple)):
            raise ModelConfigError(f"{self.name(key)} must be a list, not {shown(found)}")
        return list(found)

    def indices(self, key: str, below: int, first: int = 0) -> set[int]:
        """A list of layer numbers starting at `first`, as a set of numbers starting at 0."""
        return {
            checked_count(item, self.name(key), at_least=first, at_most=below - 1 + first) - first
            for item in self.items(key) or []
        }

    def section(self, key: str) -> Fields:
        """A nested object as fields of its own; empty when absent or null."""
        if key not in self._sections:
            found = self.value(key)
            if found is not None and not isinstance(found, Mapping):
                raise ModelConfigError(f"{self.name(key)} must be an object, not {shown(found)}")
            self._sections[key] = Fields(found or {}, f"{self._path}{key}.")
        return self._sections[key]

    def raw_items(self) -> list[tuple[str, object]]:
        """Every key and value of a section whose keys are not field names; all of it counts as read."""
        self._read.update(self._raw)
        return [(str(key), found) for key, found in self._raw.items()]

    def overlaid(self, overrides: Mapping[str, object]) -> Fields:
        """The same fields with some values replaced (one layer of a heterogeneous model). Reads count here as well."""
        view = Fields({**self._raw, **overrides}, self._path, self._extra)
        view._read, view._taken = self._read, self._taken
        view._sections = {key: held for key, held in self._sections.items() if key not in overrides}
        return view

    def excuse(self, keys: Iterable[str]) -> None:
        """Declare fields explained by others: they carry dimensions that no layer of this model uses."""
        self._read.update(keys)

    def taken(self) -> list[str]:
        """Names of the fields whose value did not come from the config itself."""
        return sorted(self._taken)

    def unread(self) -> Iterator[tuple[str, object]]:
        """Every field nobody asked for, with its full name, sections that were opened included."""
        for key, found in self._raw.items():
            if key not in self._read:
                yield self.name(str(key)), found
        for child in self._sections.values():
            yield from child.unread()


def checked_count(found: object, name: str, *, at_most: int = MAX_WIDTH, at_least: int = 1) -> int:
    """`found` as an integer between the bounds, or an error with the field's name."""
    if isinstance(found, bool) or not isinstance(found, int):
        raise ModelConfigError(f"{name} must be a whole number, not {shown(found)}")
    if not at_least <= found <= at_most:
        raise ModelConfigError(f"{name} must be between {at_least} and {at_most}, not {shown(found)}")
    return found


def checked_length(items: Sequence[object], name: str, layers: int) -> None:
    """Raise unless a per-layer list has one item for each layer."""
    if len(items) != layers:
        raise ModelConfigError(f"{name} has {len(items)} entries for {layers} layers")


def says_something(found: object) -> bool:
    """False for the values that switch a feature off: null, false, 0, -1, "", "none" and empty collections."""
    if isinstance(found, (dict, list, tuple)):
        return len(found) > 0
    return found is not None and found not in (False, 0, -1, "", "none")


def shown(found: object) -> str:
    """A value short enough for a one-line error."""
    text = repr(found).replace("\n", " ")
    return text if len(text) <= 60 else text[:57] + "..."
