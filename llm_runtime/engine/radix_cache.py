"""The prefix cache: keys and values that were computed for one sequence serve every later one that begins alike.

A tree whose edges are pages of tokens: a node is one page, and the way from the root to it is all that its keys and
values depend on, besides the weights. So a root stands for one state of the weights (an epoch): a commit of new weights
begins a new one, and nothing outlives it.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llm_runtime.engine.kv_cache import PagePool, no_pages

Key = tuple[int, ...]


class _Node:
    __slots__ = ("children", "key", "page", "parent", "used")

    def __init__(self, parent: _Node | None, key: Key, page: int) -> None:
        self.parent = parent
        self.key = key
        self.page = page
        self.children: dict[Key, _Node] = {}
        self.used = 0


@dataclass(frozen=True)
class Place:
    """Where a sequence's pages in the cache end. It stays valid as long as the sequence holds them, in that epoch."""

    node: _Node
    pages: int
    epoch: int


class RadixCache:
    """Holds each of its pages once in the pool. A page that nobody else holds may be evicted, leaves first, the one
    that was used longest ago before others. Whole pages only."""

    def __init__(self, pool: PagePool, page_size: int, *, enabled: bool = True) -> None:
        self._pool = pool
        self._page_size = page_size
        self.enabled = enabled
        self._clock = 0
        self._root = _Node(None, (), 0)
        self._exhausted = -1  # when nothing could be evicted, by the pool's count
        self.epoch = 0
        self.size = 0

    def match(self, tokens: Sequence[int], limit: int) -> tuple[array[int], Place]:
        """The pages of the longest known beginning of `tokens`, of at most `limit` tokens, and where it ends. They are
        held once more, by the caller."""
        pages = no_pages()
        node, self._clock = self._root, self._clock + 1
        for index in range(min(limit, len(tokens)) // self._page_size if self.enabled else 0):
            child = node.children.get(self._key(tokens, index))
            if child is None:
                break
            child.used = self._clock
            pages.append(child.page)
            node = child
        self._pool.hold(pages)
        return pages, Place(node, len(pages), self.epoch)

    def insert(
        self, tokens: Sequence[int], pages: array[int], count: int, epoch: int | None, known: Place | None
    ) -> Place | None:
        """Takes the first `count` pages of a sequence, which are whole and computed in that epoch; those of another are
        nobody else's business. Returns where they end, which is `known` the next time.

        Where a page of the same beginning is here already, the sequence's own is exchanged for it, in `pages`: they
        hold the same bits.
        """
        if not self.enabled or epoch != self.epoch:
            return None
        if known is None or known.epoch != self.epoch:
            known = Place(self._root, 0, self.epoch)
        node, self._clock = known.node, self._clock + 1
        for index in range(known.pages, count):
            key = self._key(tokens, index)
            child = node.children.get(key)
            if child is None:
                child = _Node(node, key, pages[index])
                node.children[key] = child
                self._pool.hold([child.page])
                self.size += 1
            elif child.page != pages[index]:
                self._pool.hold([child.page])
                self._pool.let_go([pages[index]])
                pages[index] = child.page
            child.used = self._clock
            node = child
        return Place(node, max(count, known.pages), self.epoch)

    def evict(self, count: int) -> int:
        """Frees so many pages, or more, so that it needn't look for them at every step; or all that can be. Says how
        many."""
        if self._exhausted == self._pool.let_gos:
            return 0
        count = max(count, self.size // 16)
        leaves = [(node.used, id(node), node) for node in self._nodes() if self._evictable(node)]
        heapq.heapify(leaves)
        freed = 0
        while leaves and freed < count:
            _, _, node = heapq.heappop(leaves)
            assert node.parent is not None
            del node.parent.children[node.key]
            self._pool.let_go([node.page])
            self.size -= 1
            freed += 1
            parent = node.parent
            if parent is not self._root and self._evictable(parent):
                heapq.heappush(leaves, (parent.used, id(parent), parent))
        if freed < count:
            self._exhausted = self._pool.let_gos
        return freed

    def reset(self) -> None:
        """Forgets everything and begins a new epoch. Pages that sequences hold stay theirs."""
        self._pool.let_go([node.page for node in self._nodes()])
        self._root = _Node(None, (), 0)
        self.size = 0
        self.epoch += 1

    def pages(self) -> list[int]:
        """All that it holds."""
        return [node.page for node in self._nodes()]

    def _key(self, tokens: Sequence[int], index: int) -> Key:
        return tuple(tokens[index * self._page_size : (index + 1) * self._page_size])

    def _nodes(self) -> Iterator[_Node]:
        waiting = list(self._root.children.values())
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())

    def _evictable(self, node: _Node) -> bool:
        return not node.children and self._pool.references[node.page] == 1
