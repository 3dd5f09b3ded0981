"""Pictures of a training run of the embedded model: the contact sheet and the curves."""

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from diffusion_rl.shapes import check, held_out_captions


def draw_contact_sheet(pictures: np.ndarray, path: Path, columns: int = 6, rows: int = 4) -> None:
    """Save the first held-out captions' pictures, twice enlarged, each with its caption and its checker's score."""
    side, gap, text_height = 128, 12, 44
    sheet = Image.new("RGB", (columns * (side + gap) + gap, rows * (side + gap + text_height) + gap), "white")
    pen = ImageDraw.Draw(sheet)
    for number, (picture, text) in enumerate(zip(pictures[: columns * rows], held_out_captions(), strict=False)):
        x, y = gap + number % columns * (side + gap), gap + number // columns * (side + gap + text_height)
        pixels = (picture.transpose(1, 2, 0) * 255.0).round().astype(np.uint8)
        sheet.paste(Image.fromarray(pixels).resize((side, side), Image.Resampling.NEAREST), (x, y))
        words = text.split(" ")
        lines = [" ".join(words[:4]), " ".join(words[4:7]), " ".join(words[7:])]
        lines[-1] += f": {round(6 * check(picture, text).score)}/6"
        pen.multiline_text((x, y + side + 2), "\n".join(lines), fill="black", font_size=10, spacing=2)
    sheet.save(path)


def draw_curves(results: dict, path: Path) -> None:
    """Save the VAE's loss, the flow-matching loss and the held-out accuracy over training as one picture."""
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(13, 3.6))
    left.plot([row["step"] for row in results["vae_curve"]], [row["l1"] for row in results["vae_curve"]])
    left.set(title="VAE", xlabel="step", ylabel="mean absolute error", yscale="log")
    middle.plot([row["step"] for row in results["curve"]], [row["loss"] for row in results["curve"]])
    middle.set(title="flow matching", xlabel="step", ylabel="mean squared error")
    steps = [row["step"] for row in results["checks"]]
    for name in ("correct", "score", "shape", "count"):
        right.plot(steps, [row[name] for row in results["checks"]], label=name)
    right.set(title="held-out captions", xlabel="step", ylabel="share", ylim=(0, 1))
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
