"""Files that ship with the package: a trained text-to-image model small enough to run on two CPU cores."""

from pathlib import Path


def embedded_model_path() -> Path:
    """Return the folder of the embedded model, in diffusers format.

    The folder loads with `diffusers.DiffusionPipeline.from_pretrained` as a `StableDiffusion3Pipeline` that makes
    64 x 64 pixel pictures of the captions in `diffusion_rl.shapes`. `examples/train_embedded_model.py` made it.
    """
    return Path(__file__).resolve().parent / "shapes-64"
