"""The README's examples run as they stand, and what it points to exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from diffusion_rl.models import families
from diffusion_rl.schedulers import step_kinds

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").glob("*.md"))]


def example(name: str) -> str:
    found = re.search(rf"<!-- example: {name} -->\n```python\n(.*?)```", README, re.DOTALL)
    assert found, name
    return found.group(1)


def headings(document: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    found = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in found}


def test_the_python_example_runs() -> None:
    exec(compile(example("python"), "README.md", "exec"), {})


def test_the_language_models_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(example("llm"), "README.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_the_http_example_runs(embedded_service: str, capsys: pytest.CaptureFixture[str]) -> None:
    source = example("http").replace("http://127.0.0.1:30000", embedded_service)
    exec(compile(source, "README.md", "exec"), {})
    assert "torch.Size([11, 4, 16, 16])" in capsys.readouterr().out


def test_the_example_of_ranks_runs_and_shows_what_each_has_done(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(example("ranks"), "README.md", "exec"), {})
    assert capsys.readouterr().out.count("bytes_sent") == 2


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_and_picture_exists(document: Path) -> None:
    links = re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]*))?\)", document.read_text())
    for link, heading in links:
        target = document.parent / link if link else document
        assert target.exists(), link
        assert not heading or heading in headings(target), f"{link}#{heading}"


def test_every_room_that_the_readme_shows_exists() -> None:
    """Names of files in the drawings of "How it is built"."""
    chapter = README.split("## How it is built")[1].split("\n## ")[0]
    drawn = set(re.findall(r"[\w/]+\.py", chapter))
    assert len(drawn) > 20
    packages = ("diffusion_rl", "engine_control", "llm_runtime")
    files = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    for name in drawn:
        assert any(str(path).endswith(f"/{name}") for path in files), name


def test_all_step_kinds_and_families_are_listed() -> None:
    for name in [*step_kinds.names(), *families.names()]:
        assert f"`{name}`" in README


def test_agents_stays_short() -> None:
    assert len((ROOT / "AGENTS.md").read_text().splitlines()) < 60
