"""Files that ship with the package: a trained language model small enough to run on two CPU cores."""

from pathlib import Path

from engine_control.errors import InvalidRequestError


def embedded_model_path() -> Path:
    """Return the folder of the embedded model, in Hugging Face format: the one here that holds a `config.json`.

    Raises:
        InvalidRequestError: this installation has none, or several.
    """
    here = Path(__file__).resolve().parent
    found = sorted(path.parent for path in here.glob("*/config.json"))
    if len(found) != 1:
        raise InvalidRequestError(
            f"{here} holds {len(found)} models, and 'embedded' means the only one",
            code="no_embedded_model",
            field="model_path",
            value="embedded",
            hint="Give a Hugging Face folder or a hub id, or install the package anew.",
        )
    return found[0]
