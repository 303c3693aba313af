"""Questions over retrieved documents: a shared head, popular documents in varying order, tails that never return."""

from __future__ import annotations

from kvtier.model.request import BlockType, InputType, StopReason
from kvtier.sim.traces.records import TraceRequest
from kvtier.sim.workloads.base import Amount, Positive, Workload
from kvtier.sim.workloads.writer import Prompt, Writer, Zipf


class RAGWorkload(Workload, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`queries` single-turn prompts over `hours`: system prompt, `retrieved` of `documents`, one question.

    Documents are reusable only below the same predecessors, so it is the first one or two that are hit.
    """

    kind = "rag"

    queries: Positive = 3000
    hours: Amount = 1.0
    documents: Positive = 400
    retrieved: Positive = 3
    document_blocks: Amount = 6.0
    system_blocks: Positive = 3
    question_blocks: Amount = 1.2
    zipf: Amount = 1.1

    def requests(self, seed: int = 1) -> list[TraceRequest]:
        writer = Writer(seed, self.block_tokens)
        system = writer.fresh(self.system_blocks)
        corpus = [writer.fresh(writer.geometric(self.document_blocks)) for _ in range(self.documents)]
        popularity = Zipf(self.documents, self.zipf)
        for query in range(self.queries):
            prompt = Prompt()
            prompt.add(system, BlockType.SYSTEM_PROMPT)
            for document in self._retrieve(writer, popularity):
                prompt.add(corpus[document], BlockType.USER_CONTEXT)
            prompt.add(writer.fresh(writer.geometric(self.question_blocks)), BlockType.USER_CONTEXT)
            writer.write(
                prompt,
                writer.random.uniform(0.0, self.hours * 3600.0),
                StopReason.END_TURN,
                session=f"query-{query}",
                input_type=InputType.USER_TEXT,
            )
        return writer.finish()

    def _retrieve(self, writer: Writer, popularity: Zipf) -> list[int]:
        """Different documents in order of rank for this query; if popularity is too steep to find enough, fewer."""
        drawn = (popularity.pick(writer.random) for _ in range(20 * self.retrieved))
        return list(dict.fromkeys(drawn))[: self.retrieved]
