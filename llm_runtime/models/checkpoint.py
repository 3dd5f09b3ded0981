"""The tensors of a Hugging Face folder: one safetensors file, or several with an index."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from engine_control.errors import InvalidRequestError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def checkpoint_files(folder: Path) -> list[Path]:
    """The files that the weights lie in, each once.

    Raises:
        InvalidRequestError: there are none, or the index names one that is absent.
    """
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    index = folder / INDEX_FILE
    if not index.is_file():
        raise _bad_checkpoint(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}", str(folder))
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise _bad_checkpoint(f"{index} is no index of weights", str(index)) from error
    files = [folder / str(name) for name in names]
    for path in files:
        if not path.is_file():
            raise _bad_checkpoint(f"{INDEX_FILE} names {path.name}, which is absent from {folder}", path.name)
    return files


def checkpoint_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor by its name, on the CPU, one at a time.

    Raises:
        InvalidRequestError: a file is absent, or is no safetensors file.
    """
    for path in checkpoint_files(folder):
        try:
            with safe_open(path, framework="pt", device="cpu") as opened:
                for name in opened.keys():  # noqa: SIM118  it is no mapping
                    yield name, opened.get_tensor(name)
        except SafetensorError as error:
            raise _bad_checkpoint(f"{path} can't be read: {error}", path.name) from error


def _bad_checkpoint(what: str, value: str) -> InvalidRequestError:
    return InvalidRequestError(what, code="bad_checkpoint", field="model_path", value=value)
