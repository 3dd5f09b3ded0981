"""Which tokens the next step computes: one of every sequence that decodes, and as much of prompts as fits beside.

A prompt that is longer is computed in chunks; prefill, a chunk and decoding are the same to it: tokens from
`sequence.computed` on. Pages are taken as they are needed. When there are none left, the sequence that came last goes
back into the queue (it keeps its tokens, and their keys and values are computed again later): requests ask for far more
tokens than most of them need, so that reserving for the worst case would leave most of the memory idle.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass
from itertools import chain

from llm_runtime.engine.kv_cache import PagePool, no_pages
from llm_runtime.engine.radix_cache import RadixCache
from llm_runtime.engine.sequence import Sequence


@dataclass(frozen=True)
class Chunk:
    """Tokens [start, end) of a sequence, to be computed in the next step; the last ones may be guesses, which it hasn't
    got yet."""

    sequence: Sequence
    start: int
    end: int
    guesses: tuple[int, ...] = ()

    @property
    def tokens(self) -> list[int]:
        return [*self.sequence.tokens[self.start : self.end - len(self.guesses)], *self.guesses]

    @property
    def draws(self) -> int:
        """After how many of its last tokens a next one is drawn: the sequence's last one, and each guess."""
        whole = self.end - len(self.guesses) == len(self.sequence.tokens)
        return 1 + len(self.guesses) if whole else 0


class Scheduler:
    """Owns the queue, the sequences in flight and their pages."""

    def __init__(
        self,
        pool: PagePool,
        cache: RadixCache,
        *,
        page_size: int,
        max_running: int,
        max_prefill_tokens: int,
        drafted: bool = False,
    ) -> None:
        """drafted: a draft model's keys and values lie in the pages too; what it hasn't computed is not shared."""
        self._pool = pool
        self.cache = cache
        self._page_size = page_size
        self._max_running = max_running
        self._max_prefill_tokens = max_prefill_tokens
        self._drafted = drafted
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in the order of their arrival
        self.retracted = 0
        self._no_room = -1  # for the first that waits, by the pool's count

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def find(self, request_id: str) -> Sequence | None:
        return next((s for s in chain(self.running, self.waiting) if s.request_id == request_id), None)

    def may_admit(self) -> bool:
        """Whether `schedule` might begin a waiting sequence now."""
        return bool(self.waiting) and len(self.running) < self._max_running and self._no_room != self._pool.let_gos

    def schedule(self, *, admit: bool) -> list[Chunk]:
        """The next step's chunks, decoding ones first; every page that they write to is held. With `admit`, waiting
        sequences may begin. Nothing, if nothing can be computed."""
        chunks = self._next_chunks(admit)
        while not chunks and len(self.running) > 1:  # prompts that are half computed, and no page for any of them
            self.retract(self.running[-1])
            chunks = self._next_chunks(admit=False)
        return chunks

    def _next_chunks(self, admit: bool) -> list[Chunk]:
        chunks = self._decoding()
        budget = self._max_prefill_tokens
        prefixes: set[tuple[int, ...]] = set()  # what is being computed in this step, and would be found by the next
        for sequence in list(self.running):
            if sequence.remaining > 1 and budget > 0:
                chunk = self._chunk(sequence, budget)
                if chunk is None:
                    admit = False  # whoever began earlier gets the next page
                    continue
                budget -= chunk.end - chunk.start
                chunks.append(chunk)
                prefixes.add(self._next_prefix(sequence))
        if admit:
            self._admit(chunks, budget, prefixes)
        return chunks

    def computed(self, chunk: Chunk, *, share: bool = True) -> None:
        """The chunk's keys and values are in their pages. With `share`, whole pages of them can serve others, and a
        page that is in the cache already takes the place of the sequence's own; else, when it leaves."""
        sequence = chunk.sequence
        sequence.computed = chunk.end
        if share and (chunk.end - chunk.start > 1 or chunk.end % self._page_size == 0):
            self._share(sequence)

    def room_ahead(self, chunk: Chunk, wanted: int) -> int:
        """For how many tokens behind a chunk that decodes the sequence holds pages now: up to `wanted`, without
        pushing another one out, and not beyond the last token that it may have."""
        sequence = chunk.sequence
        if chunk.draws != 1 or sequence.remaining != 1:
            return 0
        wanted = min(wanted, sequence.max_new_tokens - sequence.num_output - 1)
        while wanted > 0 and not self.provide(sequence, chunk.end + wanted):
            wanted -= 1
        return max(wanted, 0)

    def retract(self, sequence: Sequence) -> None:
        """Puts a sequence in flight back at its place in the queue, with its tokens."""
        self._leave(sequence)
        sequence.num_retractions += 1
        self.retracted += 1
        later = next((i for i, other in enumerate(self.waiting) if other.arrival > sequence.arrival), len(self.waiting))
        self.waiting.insert(later, sequence)

    def remove(self, sequence: Sequence) -> None:
        """Afterwards it is gone, and holds nothing."""
        if sequence.running:
            self._leave(sequence)
        else:
            self.waiting.remove(sequence)
            self._no_room = -1

    def check(self) -> None:
        """Raises `AssertionError` unless every page is held exactly by those that are known to hold it."""
        held = [0] * self._pool.num_pages
        for page in self.cache.pages():
            held[page] += 1
        for sequence in self.running:
            assert len(sequence.pages) * self._page_size >= sequence.computed, sequence.request_id
            for page in sequence.pages:
                held[page] += 1
        assert all(not sequence.pages for sequence in self.waiting)
        assert held == self._pool.references
        assert self._pool.free == sum(count == 0 for count in held[1:])

    def _decoding(self) -> list[Chunk]:
        """One token of each sequence that decodes, the oldest first. The youngest give way if there is no page."""
        chunks: list[Chunk] = []
        for sequence in list(self.running):
            if sequence.remaining != 1 or not sequence.running:
                continue
            while sequence.running and not self.provide(sequence, len(sequence.tokens)):
                self.retract(self.running[-1])
            if sequence.running:
                chunks.append(Chunk(sequence, sequence.computed, len(sequence.tokens)))
        return [chunk for chunk in chunks if chunk.sequence.running]

    def _admit(self, chunks: list[Chunk], budget: int, prefixes: set[tuple[int, ...]]) -> None:
        """Begins waiting sequences, the first first. One whose beginning is just being computed waits a step for it."""
        postponed: list[Sequence] = []
        while self.waiting and budget > 0 and len(self.running) < self._max_running:
            sequence = self.waiting.popleft()
            sequence.pages, sequence.shared = self.cache.match(sequence.tokens, sequence.reusable)
            sequence.computed = sequence.drafted = len(sequence.pages) * self._page_size
            sequence.epoch = self.cache.epoch
            prefix = self._next_prefix(sequence)
            known = prefix in prefixes
            chunk = None if known or not self._fits(sequence) else self._chunk(sequence, budget)
            if chunk is None:
                self._drop_pages(sequence)
                postponed.append(sequence)
                if known:
                    continue
                self._no_room = self._pool.let_gos
                break
            if sequence.cached_tokens is None:
                sequence.cached_tokens = min(sequence.computed, sequence.num_prompt)
            budget -= chunk.end - chunk.start
            prefixes.add(prefix)
            chunks.append(chunk)
            self._enter(sequence)
        self.waiting.extendleft(reversed(postponed))

    def _enter(self, sequence: Sequence) -> None:
        insort(self.running, sequence, key=_arrival)
        sequence.running = True

    def _leave(self, sequence: Sequence) -> None:
        self._share(sequence)
        del self.running[bisect_left(self.running, sequence.arrival, key=_arrival)]
        sequence.running = False
        self._drop_pages(sequence)

    def _drop_pages(self, sequence: Sequence) -> None:
        self._pool.let_go(sequence.pages)
        sequence.pages = no_pages()
        sequence.shared = None
        sequence.computed = sequence.drafted = 0

    def _share(self, sequence: Sequence) -> None:
        known = min(sequence.computed, sequence.drafted) if self._drafted else sequence.computed
        whole = known // self._page_size
        sequence.shared = self.cache.insert(sequence.tokens, sequence.pages, whole, sequence.epoch, sequence.shared)

    def _chunk(self, sequence: Sequence, budget: int) -> Chunk | None:
        """As many of its tokens as the budget and the pages allow; None if that is none."""
        end = min(sequence.computed + budget, len(sequence.tokens))
        return Chunk(sequence, sequence.computed, end) if self.provide(sequence, end) else None

    def _fits(self, sequence: Sequence) -> bool:
        """Whether there is room for all its tokens, and one more page for each sequence that decodes: a sequence that
        would at once push another one out, or itself, had better wait."""
        needed = self._pages_for(len(sequence.tokens)) - len(sequence.pages) + len(self.running)
        return self._free_up(needed)

    def provide(self, sequence: Sequence, tokens: int) -> bool:
        """Has the sequence hold pages for so many tokens, if there are any."""
        missing = self._pages_for(tokens) - len(sequence.pages)
        if missing > 0:
            if not self._free_up(missing):
                return False
            sequence.pages.extend(self._pool.allocate(missing))
        return True

    def _free_up(self, pages: int) -> bool:
        if self._pool.free < pages:
            self.cache.evict(pages - self._pool.free)
        return self._pool.free >= pages

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self._page_size)

    def _next_prefix(self, sequence: Sequence) -> tuple[int, ...]:
        """The tokens up to the end of the first page that is still to be computed; if that page isn't whole, or is not
        to be shared, something that no other sequence has."""
        end = (sequence.computed // self._page_size + 1) * self._page_size
        if end > sequence.reusable or not self.cache.enabled:
            return (-1, id(sequence))
        return tuple(sequence.tokens[:end])


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival
