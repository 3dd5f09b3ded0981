"""The table of a comparison: one row a step that differs, steps that are equal in one row together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich import box
from rich.table import Table
from rich.text import Text

from diffusion_rl.verify import Comparison, Difference, RequestComparison
from diffusion_rl.verify.fingerprint import Place
from diffusion_rl.verify.requests import describe

EQUAL, ABSENT = "equal", "-"
STEP_COLUMNS = ("state", "model_output", "mean", "log_prob")
COLUMNS = (*STEP_COLUMNS, "other")
OUTPUTS = ("final_latents", "picture")
START, END = "start", "end"
WIDTHS = {"other": 13}  # characters; others hold a number such as 1.2e-07


@dataclass
class Row:
    """One row: the step (or `start`, or `end`), what it was, and for each column what differs in it."""

    label: str
    kind: str
    cells: dict[str, list[Difference]] = field(default_factory=dict)

    def texts(self) -> list[str]:
        return [_cell(self.cells.get(column), named=column == "other") for column in COLUMNS]

    @property
    def equal(self) -> bool:
        return not any(self.cells.values())


def comparison_table(found: Comparison) -> Table:
    """Requests top down, each from its inputs (`start`) over its steps to its outputs (`end`).

    A cell holds the largest absolute difference over the request's samples, or `differs` where the record has digests
    alone. In `other` stand conditioning, schedule, noise, final latents and pictures, by name if they differ. Fits into
    80 columns.
    """
    table = Table(
        title="Bits beside the record's",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column("request")
    for heading in ("step", "kind"):
        table.add_column(heading, no_wrap=True)
    for heading in COLUMNS:
        table.add_column(heading.replace("_", "\n"), min_width=WIDTHS.get(heading, 7))
    for index, request in enumerate(found.requests):
        heading = f"{index}: {describe(request.params)}"
        for row in _condensed(_rows(request), equal=request.equal):
            cells = [Text(text, _style(text)) for text in row.texts()]
            table.add_row(Text(heading), row.label, row.kind, *cells)
            heading = ""
        table.add_section()
    return table


def _rows(request: RequestComparison) -> list[Row]:
    kinds = request.step_kinds
    rows = {START: Row(START, ""), **{str(i): Row(str(i), kind) for i, kind in enumerate(kinds)}, END: Row(END, "")}
    for place in request.places:
        label, column = _where(place, len(kinds))
        rows[label].cells.setdefault(column, [])
    for difference in request.differences:
        label, column = _where(difference.place, len(kinds))
        rows[label].cells.setdefault(column, []).append(difference)
    return list(rows.values())


def _where(place: Place, steps: int) -> tuple[str, str]:
    """The row and the column of a place; the final state stands in the last row."""
    if place.step is not None:
        column = place.tensor if place.tensor in STEP_COLUMNS else "other"
        return (str(place.step) if place.step < steps else END), column
    return (END if place.tensor in OUTPUTS else START), "other"


def _condensed(rows: Sequence[Row], *, equal: bool) -> list[Row]:
    """Neighbouring equal steps of one kind as one row; an equal request as one row altogether."""
    if equal:
        whole = Row(f"all {len(rows) - 2}", " ".join(dict.fromkeys(row.kind for row in rows[1:-1])))
        for row in rows:
            whole.cells.update(row.cells)
        return [whole]
    condensed: list[Row] = []
    for row in rows:
        last = condensed[-1] if condensed else None
        mergeable = last is not None and row.equal and last.equal and row.kind == last.kind != ""
        if last is not None and mergeable and row.texts() == last.texts():
            last.label = f"{last.label.split('-')[0]}-{row.label}"
        else:
            condensed.append(row)
    return condensed


def _cell(differences: list[Difference] | None, *, named: bool) -> str:
    if differences is None:
        return ABSENT
    if not differences:
        return EQUAL
    if not named:
        return _largest(differences)
    by_name: dict[str, list[Difference]] = {}
    for difference in differences:
        by_name.setdefault(difference.place.tensor, []).append(difference)
    return ", ".join(f"{name} {_largest(found)}" for name, found in by_name.items())


def _largest(differences: list[Difference]) -> str:
    sizes = [d.max_abs_diff for d in differences if d.max_abs_diff is not None]
    return f"{max(sizes):.2g}" if len(sizes) == len(differences) else "differs"


def _style(text: str) -> str:
    return {EQUAL: "green", ABSENT: "dim"}.get(text, "bold red")
