"""Finds out, on the actual device, whether a product by all experts keeps its promise, and is that product.

The probe sends random rows to random experts and computes them together. Then it wants the same bits from rows alone,
from slices, from rows in another order, and beside rows that all go to the same experts; and it compares the whole with
the twin. Few experts stand for all: their number only decides where a tile begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from rl_kernels import reference
from rl_kernels.grouped_linear import (
    FP8,
    TILES,
    ExpertMatrices,
    gated_grouped_linear,
    grouped_linear,
    runs_grouped,
)
from rl_kernels.routing import Places
from rl_kernels.settings import exact_library_settings
from rl_kernels.verdict_cache import Question, Verdict, VerdictCache, find_verdict

EXPERTS = 16  # at most, of the probe
TILES_OF_ONE = 2  # that one expert has, and a little more, where all rows go to it
STOCK = "torch"  # two products an expert
# Rounded four times from nearly the same numbers, and once more added up in between.
TOLERANCE = {torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 1e-5}


@dataclass(frozen=True)
class ExpertShape:
    """Experts of an MLP, as a rank has them: how many, how many of them a row goes to, the width of a row, the inner
    width; the dtype that is computed in, and whether matrices are in one byte a number."""

    experts: int
    each: int
    hidden: int
    inner: int
    dtype: torch.dtype
    quantised: bool = False

    def runs_on(self, device: torch.device) -> bool:
        """Whether there is a kernel for both products."""
        return all(runs_grouped(device, k, quantised=self.quantised) for k in (self.hidden, self.inner))

    def __str__(self) -> str:
        stored = " in bytes" if self.quantised else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"experts {self.hidden}x{self.inner}, {self.each} of {self.experts}, {dtype}{stored}"


def certify_grouped(shape: ExpertShape, device: torch.device, *, cache: VerdictCache | None = None) -> Verdict:
    """Whether a row's bits depend on its own numbers and experts alone. implementation: `triton`; `torch` where that
    failed, with the reason in `failed_at`: then experts are to be multiplied by one after the other."""
    candidates = ("triton", STOCK)

    def probe() -> Verdict:
        wrong = _first_failure(_Rows.random(shape, device))
        return Verdict(str(shape), STOCK if wrong else "triton", candidates, f"triton: {wrong}" if wrong else None)

    with torch.no_grad(), exact_library_settings():
        return find_verdict(Question(str(shape), candidates), device, probe, cache=cache)


@dataclass(frozen=True)
class _Rows:
    """x `[rows, hidden]`, the experts of each row `[rows, each]` in ascending order, and all experts' matrices."""

    x: torch.Tensor
    experts: torch.Tensor
    gate_up: ExpertMatrices
    down: ExpertMatrices

    @classmethod
    def random(cls, shape: ExpertShape, device: torch.device) -> _Rows:
        """Normal numbers, from a generator of its own: nobody else's random state is touched."""
        generator = torch.Generator(device).manual_seed(0)
        count, rows = min(shape.experts, EXPERTS), TILES_OF_ONE * TILES[shape.dtype].rows + 9
        each = min(shape.each, count)

        def random(*size: int) -> torch.Tensor:
            return torch.randn(size, device=device, generator=generator)

        def matrices(n: int, k: int) -> ExpertMatrices:
            weight = random(count, n, k) * k**-0.5
            if not shape.quantised:
                return ExpertMatrices(weight.to(shape.dtype))
            scales = torch.exp2(torch.arange(count * n, device=device) % 3 - 9.0).view(count, n)
            return ExpertMatrices((weight / scales.unsqueeze(-1)).clamp(-448, 448).to(FP8), scales)

        experts = random(rows, count).argsort(dim=-1)[:, :each].sort(dim=-1).values.to(torch.int32)
        x, gate_up = random(rows, shape.hidden).to(shape.dtype), matrices(2 * shape.inner, shape.hidden)
        return cls(x, experts, gate_up, matrices(shape.hidden, shape.inner))

    def at(self, rows: torch.Tensor | slice) -> _Rows:
        """Those rows, as they were."""
        return replace(self, x=self.x[rows].contiguous(), experts=self.experts[rows].contiguous())

    def computed(self) -> torch.Tensor:
        """`[rows, each, hidden]`."""
        places = Places.of(self.experts, len(self.gate_up.weight))
        activated = gated_grouped_linear(self.x, self.gate_up, places)
        return grouped_linear(activated, self.down, places).view(*self.experts.shape, -1)

    def defined(self) -> torch.Tensor:
        places = Places.of(self.experts, len(self.gate_up.weight))
        activated = reference.gated_grouped_linear(self.x, self.gate_up, places)
        return reference.grouped_linear(activated, self.down, places).view(*self.experts.shape, -1)


def _first_failure(rows: _Rows) -> str | None:
    """None if the promise holds, else what was computed differently."""
    whole, tolerance = rows.computed(), TOLERANCE[rows.x.dtype]
    if not torch.allclose(whole.float(), rows.defined().float(), atol=tolerance, rtol=tolerance):
        return "it is not the product by each expert"
    for what, part in _slices(len(rows.x)):
        if not torch.equal(rows.at(part).computed(), whole[part]):
            return what
    shuffled = torch.randperm(len(rows.x), generator=torch.Generator().manual_seed(0)).to(rows.x.device)
    if not torch.equal(rows.at(shuffled).computed(), whole[shuffled]):
        return "rows in another order"
    others = rows.experts.clone()
    kept = slice(0, None, len(rows.x) // 5)
    others[:] = rows.experts[-1]
    others[kept] = rows.experts[kept]
    if not torch.equal(replace(rows, experts=others).computed()[kept], whole[kept]):
        return "rows beside such that go to the same experts"
    return None


def _slices(count: int) -> Iterator[tuple[str, slice]]:
    """Rows alone, and some rows, in words too."""
    for row in (0, count // 2, count - 1):
        yield f"row {row} alone", slice(row, row + 1)
    for first, end in ((1, 3), (3, 20), (5, count // 2), (7, count)):
        yield f"rows {first} to {end - 1}", slice(first, end)
