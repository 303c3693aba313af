"""Prompts made on the spot from a seed: documents with questions, agent sessions, prompts that never repeat."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

Tokens = list[int]

_PLACES = ("Aldbrough", "Brixworth", "Cromer", "Dunster", "Ely", "Fowey", "Glossop", "Hythe", "Ilkley", "Jarrow")
_GOODS = ("crates of lemons", "coils of copper wire", "bales of wool", "barrels of lamp oil", "sacks of barley")
_OFFICES = ("harbour office", "railway depot", "customs house", "grain exchange", "post room", "night warehouse")
_PEOPLE = ("Mr Ansell", "Mrs Birch", "Captain Doyle", "Miss Eaves", "Dr Farrow", "Sergeant Gill", "Mr Hollis")
_QUESTIONS = (
    "Which place is named first in the ledger?",
    "Who signed the most entries, and for which office?",
    "How many crates of lemons were recorded in all?",
    "Summarise the last five entries in one sentence.",
    "Which office received barrels of lamp oil?",
)
_TOOLS = ("search_ledger", "read_entry", "sum_column", "list_offices", "check_signature", "open_archive")


@dataclass(frozen=True)
class Tokenizer:
    """The model's own tokenizer, without the rest of transformers."""

    encode: Callable[[str], Tokens]

    @classmethod
    def of(cls, model: Path) -> Tokenizer:
        import tokenizers

        core = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
        return cls(lambda text: list(core.encode(text, add_special_tokens=False).ids))


@dataclass(frozen=True)
class Document:
    """A shared prefix of `len(body)` tokens and the questions that follow it."""

    body: Tokens
    questions: list[Tokens]

    def prompt(self, question: int) -> Tokens:
        return self.body + self.questions[question]


def document(tokenizer: Tokenizer, seed: int, length: int) -> Document:
    """An English ledger of exactly `length` tokens, its five questions in the model's chat form."""
    body: Tokens = tokenizer.encode(f"<|im_start|>user\nLedger number {seed}.\n")
    entries = _entries(random.Random(f"document {seed}"))
    while len(body) < length:
        body += tokenizer.encode(next(entries))
    asked = [tokenizer.encode(f"\n\n{question}<|im_end|>\n<|im_start|>assistant\n") for question in _QUESTIONS]
    return Document(body[:length], asked)


def agent_sessions(
    tokenizer: Tokenizer, seed: int, count: int, turns: int, first_tokens: int, turn_tokens: int
) -> list[list[Tokens]]:
    """Sessions whose first turn has about `first_tokens` tokens; each later one adds a tool's result of `turn_tokens`.

    Lengths vary by a quarter either way, so that sessions do not move in step.
    """
    sessions = []
    for number in range(count):
        draw = random.Random(f"agent {seed} {number}")
        entries = _entries(draw)
        session = []
        for turn in range(turns):
            head = f"<|im_start|>user\nTask {seed}.{number}: audit the ledger.\n" if turn == 0 else ""
            head += f"<|im_end|>\n<|im_start|>tool\n{draw.choice(_TOOLS)} -> " if turn else ""
            mean = turn_tokens if turn else first_tokens
            tokens, length = tokenizer.encode(head), draw.randint(mean * 3 // 4, mean * 5 // 4)
            while len(tokens) < length:
                tokens += tokenizer.encode(next(entries))
            session.append(tokens[:length])
        sessions.append(session)
    return sessions


def unique_prompts(seed: str, count: int, length: int, vocabulary: Sequence[int] | range) -> list[Tokens]:
    """Prompts of random tokens: no two share a first block, in this call or in one with another seed."""
    prompts = []
    for number in range(count):
        stream = hashlib.shake_128(f"{seed} {number}".encode()).digest(2 * length)
        draws = (int.from_bytes(stream[at : at + 2], "little") for at in range(0, 2 * length, 2))
        prompts.append([vocabulary[draw % len(vocabulary)] for draw in draws])
    return prompts


def _entries(draw: random.Random) -> Iterator[str]:
    number = 0
    while True:
        number += 1
        yield (
            f"Entry {number}: on day {draw.randint(1, 365)} the {draw.choice(_OFFICES)} at {draw.choice(_PLACES)} "
            f"recorded {draw.randint(11, 999)} {draw.choice(_GOODS)}, signed by {draw.choice(_PEOPLE)}. "
        )
