"""The tokens of one forward, as plain data that every rank is told."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

import msgspec


class ForwardBatch(msgspec.Struct, tag="forward", frozen=True):
    """The tokens of a step, side by side, as plain data that every rank is told.

    input_ids, positions, slots: `[N]`; a token's keys and values go to its slot. page_tables, query_lengths,
    context_lengths: of each sequence: its pages, its tokens here, and all up to the last of these. draw_rows: the rows
    after which a token is drawn; score_rows: those whose logits tell the log-prob of a prompt's token.
    """

    input_ids: list[int]
    positions: list[int]
    slots: list[int]
    page_tables: list[Any]
    query_lengths: list[int]
    context_lengths: list[int]
    draw_rows: list[int]
    score_rows: list[int]

    def plain(self) -> ForwardBatch:
        """The same with page tables as lists, which a message can carry."""
        return msgspec.structs.replace(self, page_tables=[list(table) for table in self.page_tables])


@dataclass(frozen=True)
class Span:
    """Tokens of one sequence, side by side, from position `start` on; its pages; after how many of the last ones a
    token is drawn."""

    tokens: list[int]
    start: int
    pages: Items[int]
    draws: int = 0


def batch_of(spans: Items[Span], *, page_size: int, scored: Items[int] = ()) -> ForwardBatch:
    """The spans side by side; `scored` are rows of them all whose logits tell a prompt's log-probs."""
    input_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    tables: list[Items[int]] = []
    draw_rows: list[int] = []
    for span in spans:
        pages, end = span.pages, span.start + len(span.tokens)
        if span.draws:
            last = len(input_ids) + len(span.tokens)
            draw_rows += range(last - span.draws, last)
        input_ids += span.tokens
        positions += range(span.start, end)
        slots += [pages[p // page_size] * page_size + p % page_size for p in range(span.start, end)]
        tables.append(pages[: -(-end // page_size)])
    lengths = [len(span.tokens) for span in spans]
    contexts = [span.start + len(span.tokens) for span in spans]
    return ForwardBatch(input_ids, positions, slots, tables, lengths, contexts, draw_rows, list(scored))


def joined(parts: Items[ForwardBatch]) -> ForwardBatch:
    """Batches side by side as one, after each of whose rows a token is drawn."""
    rows = sum(len(part.input_ids) for part in parts)
    return ForwardBatch(
        [t for part in parts for t in part.input_ids],
        [p for part in parts for p in part.positions],
        [s for part in parts for s in part.slots],
        [table for part in parts for table in part.page_tables],
        [n for part in parts for n in part.query_lengths],
        [n for part in parts for n in part.context_lengths],
        list(range(rows)),
        [],
    )
