"""What a sender says that it will have sent: every tensor's shape, dtype and digest. A commit is checked against it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import torch

from engine_control.checksum import device_digests
from engine_control.errors import RefitRefusedError


class ManifestEntry(msgspec.Struct, frozen=True):
    """One tensor; `dtype` is torch's name without the `torch.`, `digest` that of `checksum.device_digests`."""

    dtype: str
    shape: list[int]
    digest: str


Manifest = Mapping[str, Mapping[str, ManifestEntry]]
"""By module, by name."""


def manifest_of(items: Iterable[tuple[str, str, torch.Tensor]]) -> dict[str, dict[str, dict[str, Any]]]:
    """The manifest of `(module, name, tensor)`, as plain data that JSON can carry."""
    kept = list(items)
    digests = device_digests((f"{module}\0{name}", tensor) for module, name, tensor in kept)
    manifest: dict[str, dict[str, dict[str, Any]]] = {}
    for module, name, tensor in kept:
        manifest.setdefault(module, {})[name] = {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "digest": digests[f"{module}\0{name}"],
        }
    return manifest


def read_manifest(plain: object) -> Manifest | None:
    """The manifest that a request holds.

    Raises:
        RefitRefusedError: it is none.
    """
    if plain is None:
        return None
    try:
        return msgspec.convert(plain, dict[str, dict[str, ManifestEntry]])
    except msgspec.ValidationError as error:
        raise RefitRefusedError(
            f"this is no manifest: {error}",
            field="manifest",
            hint="Make it with engine_control.refit.manifest.manifest_of, or leave it out.",
        ) from error


def check_against(manifest: Manifest, modules: Iterable[str], sent: Mapping[tuple[str, str], str]) -> None:
    """Refuses unless exactly the manifest's tensors of these modules were sent, with its digests."""
    wanted = {(m, name): entry.digest for m, names in manifest.items() for name, entry in names.items()}
    missing = sorted(wanted.keys() - sent.keys())
    extra = sorted(sent.keys() - wanted.keys())
    differing = sorted(key for key in wanted.keys() & sent.keys() if wanted[key] != sent[key])
    for keys, what in ((missing, "never came"), (extra, "is not in the manifest"), (differing, "has other bytes")):
        if keys:
            module, name = keys[0]
            raise RefitRefusedError(
                f"against the manifest, tensor {name!r} of {module!r} {what}; {len(keys)} in all",
                code="manifest_mismatch",
                field=f"{module}.{name}",
                hint="Send the weights again.",
            )
