"""Slices of the fault campaign, one of each engine: what `make campaign` does by the thousand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import refit_campaign
from diffusion_rl.assets import embedded_model_path

SLICE = ["--versions", "3", "--refits", "25", "--foreign", "4", "--cycles", "12", "--seed", "3"]


@pytest.mark.skipif(not embedded_model_path().is_dir(), reason="the embedded model is not here")
def test_no_faulty_refit_of_the_diffusion_engine_goes_unnoticed(tmp_path: Path) -> None:
    _campaign(tmp_path, "--engine", "diffusion", "--kill-every", "0")


def test_no_faulty_refit_of_the_language_model_engine_goes_unnoticed(tmp_path: Path) -> None:
    faults = _campaign(tmp_path, "--engine", "llm", "--kill-every", "20")
    assert faults["kill the engine"] == 1


def _campaign(folder: Path, *options: str) -> dict[str, int]:
    """Runs a slice, of which nothing may be wrong. Returns how often it sent each fault."""
    out = folder / "campaign.json"
    assert refit_campaign.main([*SLICE, *options, "--out", str(out)]) == 0
    ours, foreign, slept = json.loads(out.read_text())["results"]
    assert ours["undetected"] == []
    faults: dict[str, Any] = ours["faults"]
    assert sum(faults.values()) == 25
    assert len(faults) > 10
    # Without a manifest some faults can't be seen. If none went unnoticed, the campaign would not look closely enough.
    assert foreign["undetected"]
    assert slept["wrong"] == []
    assert slept["cycles"] == 12
    return faults
