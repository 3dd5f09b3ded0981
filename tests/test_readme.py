"""The README's examples run as they stand, and what it points to exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from diffusion_rl.models import families
from diffusion_rl.schedulers import step_kinds

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def example(name: str) -> str:
    found = re.search(rf"<!-- example: {name} -->\n```python\n(.*?)```", README, re.DOTALL)
    assert found, name
    return found.group(1)


def test_the_python_example_runs() -> None:
    exec(compile(example("python"), "README.md", "exec"), {})


def test_the_http_example_runs(embedded_service: str, capsys: pytest.CaptureFixture[str]) -> None:
    source = example("http").replace("http://127.0.0.1:30000", embedded_service)
    exec(compile(source, "README.md", "exec"), {})
    assert "torch.Size([11, 4, 16, 16])" in capsys.readouterr().out


@pytest.mark.parametrize("document", ["README.md", "AGENTS.md"])
def test_every_link_and_picture_exists(document: str) -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)\)", (ROOT / document).read_text())
    for link in links:
        assert (ROOT / link).exists(), link


def test_all_step_kinds_and_families_are_listed() -> None:
    for name in [*step_kinds.names(), *families.names()]:
        assert f"`{name}`" in README


def test_agents_stays_short() -> None:
    assert len((ROOT / "AGENTS.md").read_text().splitlines()) < 60
