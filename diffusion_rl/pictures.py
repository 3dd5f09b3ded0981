"""Drawing only: pictures, sheets of pictures, log-prob plots, and previews made of characters.

A picture is a tensor `[C, H, W]`, a video `[C, F, H, W]`, uint8 or floating point in [0, 1]. Where a picture is drawn,
a video's middle frame stands for it. Nothing here knows a model or a service.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from rich.color import Color
from rich.style import Style
from rich.text import Text

PAPER = (255, 255, 255)
INK = (40, 40, 40)
FAINT = (120, 120, 120)
GOOD = (34, 139, 58)
BAD = (200, 60, 40)

MARGIN = 8
LINE = 14  # pixels of one line of text, in Pillow's built-in font
FRAME = 3


@dataclass(frozen=True)
class Tile:
    """One picture of a sheet. `note` stands below it; `good` frames it green (True), red (False) or not at all."""

    picture: torch.Tensor
    note: str = ""
    good: bool | None = None


@dataclass(frozen=True)
class SheetRow:
    """Tiles side by side, with a heading above them."""

    heading: str
    tiles: tuple[Tile, ...]


def still(picture: torch.Tensor) -> torch.Tensor:
    """A picture as it is; of a video (or its latent) `[C, F, H, W]` the middle frame."""
    return picture[:, picture.shape[1] // 2] if picture.dim() == 4 else picture


def to_image(picture: torch.Tensor) -> Image.Image:
    """The picture as an 8-bit RGB image of the same size; one channel becomes gray."""
    pixels = still(picture).detach().cpu()
    if pixels.dtype != torch.uint8:
        pixels = (pixels.float().nan_to_num().clamp(0, 1) * 255).round().to(torch.uint8)
    if len(pixels) == 1:
        pixels = pixels.expand(3, -1, -1)
    return Image.fromarray(pixels[:3].permute(1, 2, 0).contiguous().numpy(), mode="RGB")


def save_png(picture: torch.Tensor, path: Path) -> Path:
    """Writes the picture as a PNG, pixel for pixel, and returns the path; missing folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    to_image(picture).save(path)
    return path


def save_video(video: torch.Tensor, path: Path, *, fps: float) -> Path:
    """Writes the video `[C, F, H, W]` as an animated WebP, pixel for pixel, and returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    first, *others = (to_image(frame) for frame in video.unbind(1))
    first.save(path, save_all=True, append_images=others, duration=round(1000 / fps), loop=0, lossless=True)
    return path


def frames_row(video: torch.Tensor, heading: str, *, most: int = 8) -> SheetRow:
    """Frames of a video `[C, F, H, W]` side by side: all of them, or `most` that are evenly spaced."""
    count = video.shape[1]
    shown = min(count, most)
    chosen = [round(i * (count - 1) / max(shown - 1, 1)) for i in range(shown)]
    return SheetRow(heading, tuple(Tile(video[:, frame], f"frame {frame}") for frame in chosen))


def false_colour(latent: torch.Tensor, *, aspect: float = 1.0) -> torch.Tensor:
    """A latent as a picture: its first three channels as red, green and blue, each stretched to [0, 1].

    `latent` is `[C, h, w]`, a video's `[C, F, h, w]`, or packed `[tokens, C]`; `aspect` (height / width) says how
    packed tokens lie.
    """
    values = still(latent).detach().float().cpu()
    if values.dim() == 2:
        rows = max(round((len(values) * aspect) ** 0.5), 1)
        while len(values) % rows:
            rows -= 1
        values = values.T.reshape(values.shape[1], rows, -1)
    values = values[:3] if len(values) >= 3 else values[:1].expand(3, -1, -1)
    low, high = values.amin(dim=(1, 2), keepdim=True), values.amax(dim=(1, 2), keepdim=True)
    return (values - low) / (high - low).clamp_min(1e-6)


def draw_sheet(rows: Sequence[SheetRow], path: Path, *, title: str = "", side: int = 128) -> Path:
    """Writes rows of pictures as one PNG and returns the path. Small pictures are enlarged without smoothing.

    Each tile's longer side has `side` pixels. Text that is too long for the sheet ends with an ellipsis.
    """
    has_notes = any(tile.note for row in rows for tile in row.tiles)
    cell = side + 2 * FRAME + MARGIN
    row_height = LINE + 4 + side + 2 * FRAME + (LINE if has_notes else 0) + MARGIN
    width = MARGIN + cell * max((len(row.tiles) for row in rows), default=1)
    top = MARGIN + (LINE + MARGIN if title else 0)
    sheet = Image.new("RGB", (width, top + row_height * len(rows)), PAPER)
    pen = ImageDraw.Draw(sheet)
    if title:
        pen.text((MARGIN, MARGIN), _fitted(pen, title, width - 2 * MARGIN), fill=INK)
    for index, row in enumerate(rows):
        y = top + index * row_height
        pen.text((MARGIN, y), _fitted(pen, row.heading, width - 2 * MARGIN), fill=INK)
        for column, tile in enumerate(row.tiles):
            _draw_tile(sheet, tile, (MARGIN + column * cell, y + LINE + 4), side)
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)
    return path


def plot_log_probs(
    log_probs: Mapping[str, Sequence[float]], kinds: Sequence[str], path: Path, *, title: str = ""
) -> Path | None:
    """Plots each sample's log-prob per step as a PNG, and what sets the samples apart; `ode` steps leave a gap.

    `log_probs` maps a sample's label to its T values. Returns None, and writes nothing, without matplotlib, and where
    there are no log-probs, as for evaluation samples.
    """
    if not log_probs or not all(len(values) == len(kinds) for values in log_probs.values()):
        return None
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(7, 5 if len(log_probs) > 1 else 3.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    shown = torch.tensor(list(log_probs.values()), dtype=torch.float64)
    shown[:, [kind == "ode" for kind in kinds]] = float("nan")
    panels = {"log-prob per element": shown}
    if len(shown) > 1:  # all samples look alike beside the fall of sigma
        panels["difference from the group's mean"] = shown - shown.mean(0)
    for axes, (label, lines) in zip(
        figure.subplots(len(panels), sharex=True, squeeze=False).flat, panels.items(), strict=True
    ):
        for name, values in zip(log_probs, lines.tolist(), strict=True):
            axes.plot(range(len(kinds)), values, marker="o", markersize=3, linewidth=1, label=name)
        axes.set_ylabel(label, fontsize=8)
        axes.set_xticks(range(0, len(kinds), max(len(kinds) // 10, 1)))
        axes.grid(alpha=0.25)
    figure.axes[0].set_title(_printable(title), fontsize=9, parse_math=False)
    figure.axes[0].legend(fontsize=7)
    figure.axes[-1].set_xlabel("denoising step")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _printable(text: str) -> str:
    """The text without what a font renderer refuses: control characters and halves of surrogate pairs."""
    return "".join(c if c.isprintable() else " " for c in text)


def half_blocks(pictures: Sequence[torch.Tensor], *, width: int) -> Text:
    """The pictures side by side as text of at most `width` columns; each character is two pixels in 24-bit colour."""
    if not pictures:
        return Text()
    columns = max(min((width - len(pictures) + 1) // len(pictures), 32), 2)
    images = [to_image(p) for p in pictures]
    height = max(round(columns * images[0].height / images[0].width / 2) * 2, 2)
    small = [image.resize((columns, height), Image.Resampling.BOX) for image in images]
    lines = []
    for y in range(0, height, 2):
        line = Text()
        for index, image in enumerate(small):
            line.append(" " if index else "")
            for x in range(columns):
                line.append("▀", Style(color=_colour(image, x, y), bgcolor=_colour(image, x, y + 1)))
        lines.append(line)
    return Text("\n").join(lines)


def _colour(image: Image.Image, x: int, y: int) -> Color:
    pixel = image.getpixel((x, y))
    assert isinstance(pixel, tuple)
    return Color.from_rgb(*pixel[:3])


def _draw_tile(sheet: Image.Image, tile: Tile, corner: tuple[int, int], side: int) -> None:
    image = to_image(tile.picture)
    scale = side / max(image.size)
    smooth = Image.Resampling.LANCZOS if scale < 1 else Image.Resampling.NEAREST
    image = image.resize((max(round(image.width * scale), 1), max(round(image.height * scale), 1)), smooth)
    x, y = corner
    pen = ImageDraw.Draw(sheet)
    if tile.good is not None:
        outer = (x, y, x + image.width + 2 * FRAME - 1, y + image.height + 2 * FRAME - 1)
        pen.rectangle(outer, outline=GOOD if tile.good else BAD, width=FRAME - 1)
    sheet.paste(image, (x + FRAME, y + FRAME))
    if tile.note:
        colour = FAINT if tile.good is None else GOOD if tile.good else BAD
        pen.text((x + FRAME, y + side + 2 * FRAME), _fitted(pen, tile.note, side), fill=colour)


def _fitted(pen: ImageDraw.ImageDraw, text: str, width: int) -> str:
    """The text on one line, cut so that it is at most `width` pixels wide."""
    line, font = " ".join(text.split()), ImageFont.load_default()
    if pen.textlength(line, font=font) <= width:
        return line
    while line and pen.textlength(line + "...", font=font) > width:
        line = line[:-1]
    return line + "..."
