"""Marks follow their rows through every change of the tree: against a dictionary of keys."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvtier.index.marks import Marks
from kvtier.index.tree import PrefixTree

GROUPS = 2
some_rows = st.sets(st.tuples(st.integers(0, 9), st.integers(0, 1)))
chains = st.binary(max_size=8).map(lambda drawn: bytes(byte % 3 for byte in drawn))


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("insert"), chains),
            st.tuples(st.just("set"), chains, st.integers(1, 3), some_rows),
            st.tuples(st.just("clear"), chains, st.integers(1, 3), some_rows),
            st.tuples(st.just("cut"), chains, st.integers(0, 3)),
            st.tuples(st.just("reset")),
        ),
        max_size=30,
    )
)
def test_a_mark_is_where_its_row_is(steps: list[tuple]) -> None:  # type: ignore[type-arg]
    tree = PrefixTree(key_bytes=1)
    marks = Marks(tree, GROUPS)
    expected: dict[tuple[bytes, int], int] = {}  # (keys up to and with the block, group)
    seen = {b""}
    for kind, *arguments in steps:
        if kind == "insert":
            tree.insert(arguments[0])
            seen.add(arguments[0])
        elif kind in ("set", "clear"):
            chain, number, rows = arguments
            seen.add(chain)
            match = tree.walk(chain)
            ordered = sorted(rows)
            blocks = np.array([block for block, _ in ordered], np.intp)
            groups = np.array([group for _, group in ordered], np.intp)
            (marks.set if kind == "set" else marks.clear)(match, blocks, groups, number)
            for block, group in ordered:
                row = chain[: block + 1], group
                if block >= match.blocks:
                    continue
                if kind == "set":
                    expected[row] = number
                elif expected.get(row) == number:
                    del expected[row]
        elif kind == "cut":
            path = tree.walk(arguments[0]).path
            if path and not path[-1].children:
                whole, segment = tree.chain_of(path[-1]), path[-1]
                keep = min(arguments[1], segment.length)
                gone = {whole[: segment.depth + i + 1] for i in range(keep, segment.length)}
                tree.truncate(segment, keep)
                expected = {row: number for row, number in expected.items() if row[0] not in gone}
        else:
            marks.reset()
            expected.clear()
        assert marks.rows == len(expected)
        assert bool(marks) == bool(expected)
        for chain in seen:
            match = tree.walk(chain)
            found = marks.of(match)
            for block in range(match.blocks):
                for group in range(GROUPS):
                    assert found[block, group] == expected.get((chain[: block + 1], group), 0)


@given(chains, st.lists(st.integers(1, 9), min_size=8, max_size=8))
def test_every_row_may_have_its_own_number(chain: bytes, numbers: list[int]) -> None:
    tree = PrefixTree(key_bytes=1)
    marks = Marks(tree, 1)
    tree.insert(chain)
    tree.insert(chain[:3] + b"\x07")  # cuts it
    match = tree.walk(chain)
    blocks = np.arange(len(chain))
    marks.set(match, blocks, np.zeros(len(chain), np.intp), np.array(numbers[: len(chain)], np.int32))
    assert marks.of(match)[:, 0].tolist() == numbers[: len(chain)]
