"""Who may import whom. The rules keep every room of the house usable, and testable, by itself."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "rl_kernels": ROOT / "kernels" / "rl_kernels",
    "engine_control": ROOT / "engine_control",
    "diffusion_rl": ROOT / "diffusion_rl",
    "llm_runtime": ROOT / "llm_runtime",
}
MAY_IMPORT: dict[str, set[str]] = {
    "rl_kernels": set(),
    "engine_control": set(),
    "diffusion_rl": {"rl_kernels", "engine_control"},
    "llm_runtime": {"rl_kernels", "engine_control"},
}


def files(package: str) -> list[Path]:
    found = sorted(PACKAGES[package].rglob("*.py"))
    assert found
    return found


def imported(path: Path) -> set[str]:
    """Every module that a file names in an import, wherever in the file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def top(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_the_siblings_it_may(package: str) -> None:
    forbidden = set(PACKAGES) - MAY_IMPORT[package] - {package}
    for path in files(package):
        assert not top(imported(path)) & forbidden, path


@pytest.mark.parametrize("package", PACKAGES)
def test_web_frameworks_stay_under_server_and_triton_in_the_kernels(package: str) -> None:
    for path in files(package):
        names = top(imported(path))
        if "server" not in path.parts:
            assert not names & {"fastapi", "starlette", "uvicorn", "pydantic"}, path
        if package != "rl_kernels":
            assert "triton" not in names, path


@pytest.mark.parametrize("package", PACKAGES)
def test_environment_variables_are_read_in_config_alone(package: str) -> None:
    for path in files(package):
        if path.name != "config.py":
            source = path.read_text()
            assert "os.environ" not in source, path
            assert "getenv" not in source, path


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_can_execute_what_it_reads(package: str) -> None:
    for path in files(package):
        assert not top(imported(path)) & {"pickle", "dill", "marshal", "shelve", "cloudpickle"}, path
        calls = {
            n.func.id
            for n in ast.walk(ast.parse(path.read_text()))
            if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
        }
        assert not calls & {"eval", "exec"}, path
        assert "torch.load(" not in path.read_text(), path


def test_the_kernels_folder_is_no_package_because_that_name_belongs_to_another() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("engine_control", {"fastapi", "triton", "diffusers", "torch"}),
        ("diffusion_rl", {"torch", "diffusers", "fastapi"}),
        ("diffusion_rl.params", {"torch", "diffusers", "fastapi"}),
        ("diffusion_rl.client", {"diffusers", "transformers", "fastapi"}),
        ("llm_runtime", {"torch", "diffusers", "transformers", "fastapi"}),
        ("llm_runtime.text", {"torch", "diffusers", "transformers", "tokenizers", "fastapi"}),
        ("llm_runtime.client", {"diffusers", "transformers", "fastapi"}),
        ("rl_kernels", {"diffusers", "fastapi"}),
    ],
)
def test_importing_one_room_does_not_load_the_house(module: str, unwanted: set[str]) -> None:
    code = f"import sys, {module}; print(sorted(set(sys.modules) & {unwanted!r}))"
    out = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
    )
    assert out.stdout.strip() == "[]"
