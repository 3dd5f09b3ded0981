"""A slice of the fault campaign: what `make campaign` does by the thousand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import refit_campaign
from diffusion_rl.assets import embedded_model_path


@pytest.mark.skipif(not embedded_model_path().is_dir(), reason="the embedded model is not here")
def test_no_faulty_refit_goes_unnoticed(tmp_path: Path) -> None:
    out = tmp_path / "campaign.json"
    options = ["--refits", "50", "--foreign", "10", "--cycles", "30", "--kill-every", "40", "--seed", "3"]
    assert refit_campaign.main([*options, "--out", str(out)]) == 0
    ours, foreign, slept = json.loads(out.read_text())["results"]
    assert ours["undetected"] == []
    assert sum(ours["faults"].values()) == 50
    assert len(ours["faults"]) > 10
    assert ours["faults"]["kill the engine"] == 1
    # Without a manifest some faults can't be seen. If none went unnoticed, the campaign would not look closely enough.
    assert foreign["undetected"]
    assert slept["wrong"] == []
    assert slept["cycles"] == 30
