"""The work every contender is given, and what is kept of it. One function per row of the comparison.

A contender runs in three processes on one store: the first does all the work, the second starts on what the first left
behind, the third does so after a bit of every stored block was flipped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.rig.engine import Answer
from benchmarks.rig.process import EngineProcess, Run
from benchmarks.rig.prompts import Document, Tokenizer, Tokens, agent_sessions, document, unique_prompts

COLD, DEVICE_1, DEVICE_2, RESET, FRESH = range(5)
"""The question asked of each document in each state: always another one, so that only the document is shared."""
POISONED = (COLD, DEVICE_1)
"""The two questions asked again of each document after the flips; what they should answer is known by then."""
_EXPONENT_BYTE, _EXPONENT_BIT = 3, 0x40
"""The flipped bit: the highest of the exponent of a little-endian float32, which turns a value into a huge one."""


@dataclass(frozen=True)
class Work:
    """Sizes of everything; the defaults are the full comparison, made for SmolLM2-135M in float32 and blocks of 32."""

    documents: int = 3
    document_tokens: int = 1_500
    sessions: int = 12
    turns: int = 6
    first_turn_tokens: int = 112
    turn_tokens: int = 64
    in_flight: int = 4
    unique: int = 40
    unique_tokens: int = 64
    unique_batches: int = 3
    answer_tokens: int = 8
    session_answer_tokens: int = 16
    device_blocks: int = 96


@dataclass(frozen=True)
class Prompts:
    """The work as token prompts: made once, the same for every contender."""

    warm_up: Document
    documents: list[Document]
    sessions: list[list[Tokens]]
    work: Work

    @classmethod
    def of(cls, model: Path, work: Work, round_number: int) -> Prompts:
        """Make them for one round; other rounds get other text."""
        tokenizer, seed = Tokenizer.of(model), 100 * round_number
        documents = [document(tokenizer, seed + 1 + number, work.document_tokens) for number in range(work.documents)]
        sessions = agent_sessions(tokenizer, seed, work.sessions, work.turns, work.first_turn_tokens, work.turn_tokens)
        return cls(document(tokenizer, seed, 320), documents, sessions, work)

    def unique_batch(self, batch: str) -> list[list[Tokens]]:
        """A batch of one-turn sessions that share nothing with each other or with another batch."""
        return [
            [prompt]
            for prompt in unique_prompts(batch, self.work.unique, self.work.unique_tokens, range(1_000, 40_000))
        ]


def warm_up(engine: EngineProcess, prompts: Prompts) -> None:
    """Take every path once (compute, store, load) with a prompt that does not come again."""
    for question in (0, 0, 1):
        engine.ask(prompts.warm_up.prompt(question), max_tokens=prompts.work.answer_tokens)
        engine.reset()


def ask_document(engine: EngineProcess, prompts: Prompts, doc: Document) -> tuple[Answer, list[Answer], Answer]:
    """A document computed, found on the device twice, and asked about after the device cache was emptied."""
    cold = ask_one(engine, prompts, doc, COLD)
    device = [ask_one(engine, prompts, doc, question) for question in (DEVICE_1, DEVICE_2)]
    engine.reset()
    reset = ask_one(engine, prompts, doc, RESET)
    engine.reset()
    return cold, device, reset


def ask_one(engine: EngineProcess, prompts: Prompts, doc: Document, question: int) -> Answer:
    """One question about a document."""
    return engine.ask(doc.prompt(question), max_tokens=prompts.work.answer_tokens)


def replay_agents(engine: EngineProcess, prompts: Prompts, profile: str = "") -> Run:
    """Agent sessions whose context grows by their own answers and by tools' results."""
    engine.reset()
    work = prompts.work
    return engine.run(
        prompts.sessions, max_tokens=work.session_answer_tokens, in_flight=work.in_flight, profile=profile
    )


@dataclass(frozen=True)
class PairedRuns:
    """Runs of two engines on the same unique prompts, alternating and in changing order."""

    baseline: list[Run]
    contender: list[Run]

    @property
    def wall_ratios(self) -> list[float]:
        """Throughput of the contender over the baseline's, pair by pair."""
        return [b.wall_s / c.wall_s for b, c in zip(self.baseline, self.contender, strict=True)]

    @property
    def cpu_ratios(self) -> list[float]:
        """The same in answers per CPU second of the process, all threads and all trailing writes included."""
        return [b.cpu_s / c.cpu_s for b, c in zip(self.baseline, self.contender, strict=True)]


def run_pairs(
    baseline: EngineProcess,
    contender: EngineProcess,
    batches: Sequence[list[list[Tokens]]],
    max_tokens: int,
    after_each: Callable[[], None] = lambda: None,
) -> PairedRuns:
    """Give both engines every batch, one engine at a time; which goes first alternates (A B, B A, A B, …)."""
    pairs = PairedRuns([], [])
    for number, batch in enumerate(batches):
        order = [(baseline, pairs.baseline), (contender, pairs.contender)]
        for engine, runs in order if number % 2 == 0 else reversed(order):
            runs.append(engine.run(batch, max_tokens=max_tokens, in_flight=len(batch)))
            after_each()
    return pairs


def flip_bits(store: Path, block_bytes: int) -> int:
    """Flip one bit in every block's worth of bytes of every file; return how many.

    A file that holds one block gets one flip in its middle. In a file of many blocks a stored block is never shorter
    than the distance of two flips, so each is hit. Shorter files (journals, configuration) are left alone.
    """
    flipped = 0
    for path in sorted(path for path in store.rglob("*") if path.is_file()):
        with path.open("r+b") as stream:
            size = path.stat().st_size
            for start in range(block_bytes // 2 // 4 * 4, size - _EXPONENT_BYTE, block_bytes):
                stream.seek(start + _EXPONENT_BYTE)
                byte = stream.read(1)[0]
                stream.seek(start + _EXPONENT_BYTE)
                stream.write(bytes([byte ^ _EXPONENT_BIT]))
                flipped += 1
    return flipped


def count_different(answers: Sequence[Answer], reference: Sequence[Answer]) -> int:
    """How many answers differ from the reference in any token."""
    return sum(mine.tokens != theirs.tokens for mine, theirs in zip(answers, reference, strict=True))
