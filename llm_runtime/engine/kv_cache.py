"""Keys and values of earlier tokens, in pages, and who holds which page."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import torch


class KVCache:
    """The memory: `[2, layers, pages * page_size, kv_heads, D]`. A token's slot is page * page_size + its offset."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        shape = (2, layers, num_pages * page_size, kv_heads, head_dim)
        # Attention gives tokens that aren't there the weight 0, and 0 times what lies there must be 0.
        self.storage = torch.zeros(shape, dtype=dtype, device=device)
        self._undefined = False

    def layers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(keys, values) of each layer, `[slots, kv_heads, D]`: views for one forward."""
        keys, values = self.storage
        return list(zip(keys.unbind(0), values.unbind(0), strict=True))

    def forget(self) -> None:
        """The memory is about to be given back, or was: what is in it then is arbitrary."""
        self._undefined = True

    def define(self) -> None:
        """Makes the memory fit for use again, if it was forgotten."""
        if self._undefined:
            self.storage.zero_()
            self._undefined = False


def no_pages() -> array[int]:
    """Room for the page numbers of one sequence, as C integers: page tables are made of them at every step."""
    return array("i")


class PagePool:
    """Which pages are free, and how many hold each of the others: sequences, and the prefix cache.

    Page 0 is nobody's: page tables are padded with it.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.references = [0] * num_pages
        self._free = list(range(num_pages - 1, 0, -1))
        self.let_gos = 0  # how often somebody let go of something: what couldn't be evicted before can't be until then

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def usable(self) -> int:
        """How many pages there are to hold."""
        return self.num_pages - 1

    def allocate(self, count: int) -> list[int]:
        """Pages that were free, held once each. The caller has seen that there are so many."""
        assert count <= len(self._free)
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self.references[page] = 1
        return pages

    def hold(self, pages: Iterable[int]) -> None:
        for page in pages:
            self.references[page] += 1

    def let_go(self, pages: Iterable[int]) -> None:
        """A page that nobody holds any more is free."""
        self.let_gos += 1
        for page in pages:
            self.references[page] -= 1
            if self.references[page] == 0:
                self._free.append(page)
            assert self.references[page] >= 0
