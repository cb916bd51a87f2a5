"""Tests the contents of an installation, and that everything runs from a checkout without one."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import gsa_data
import gsa_kernels
import gsa_train
from gsa_train.config import load_config
from gsa_train.config.load import find_config

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("launch", "launch/slurm", "data", "benchmarks")
    for path in (ROOT / folder).glob("*.py")
    if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
)


def test_every_script_puts_the_checkouts_packages_on_its_path_first() -> None:
    """The path must be set before the first import of these packages."""
    assert len(SCRIPTS) > 20
    first = re.compile(r"^(sys\.path\[:0\] = |import harness$)|^(?:from|import) gsa_", re.MULTILINE)
    found = {script: first.search((ROOT / script).read_text()) for script in SCRIPTS}
    assert [script for script, match in found.items() if match is not None and match[1] is None] == []


def test_every_hint_to_install_names_an_extra_of_the_checkout() -> None:
    """The package is on no registry, so our hints must not install someone else's package of that name."""
    section = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]\n")[1]
    extras = set(re.findall(r"^(\w+) = \[", section.split("\n[")[0], re.MULTILINE))
    assert "hf" in extras
    hinted, wrong = set(), []
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=True)
    names = [name for name in listed.stdout.split() if name.endswith((".py", ".md", ".ipynb", "Dockerfile"))]
    for path in (ROOT / name for name in names):
        for hint in re.findall(r"""pip install (?:-\S+ )*['"]?([\w.-]*(?:\[[\w,-]+\])?)""", path.read_text()):
            project, _, wanted = hint.partition("[")
            named = set(wanted.rstrip("]").split(",")) - {""}
            hinted |= named
            if project.replace("_", "-").startswith("gsa-") or (project == "." and named - extras):
                wrong.append(f"{path}: {hint}")
    assert wrong == []
    assert {"hf", "parquet", "deepspeed"} <= hinted


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Return the files in each distribution's wheel, and its entry points under `SCRIPTS`."""
    pytest.importorskip("setuptools", minversion="77")
    out = tmp_path_factory.mktemp("wheels")
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=False).stdout.split("\n")
    if not any(names):
        pytest.skip("not a git checkout")
    source = out / "source"
    for name in names:  # a copy, because setuptools writes build folders next to its input
        if name.endswith((".py", ".toml", ".yaml", ".typed", ".css", ".js", "README.md", "LICENSE")):
            copy = source / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes((ROOT / name).read_bytes())
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    found = {}
    for name, folder in (("gsa-train", "."), ("gsa-kernels", "kernels"), ("gsa-data", "data")):
        done = subprocess.run(
            [sys.executable, "-c", build, str(out / name)],
            cwd=source / folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        (wheel,) = (out / name).glob("*.whl")
        with zipfile.ZipFile(wheel) as files:
            found[name] = files.namelist()
            points = [each for each in files.namelist() if each.endswith("entry_points.txt")]
            found[f"{name} commands"] = files.read(points[0]).decode().splitlines()[1:] if points else []
    return found


@pytest.mark.slow
def test_the_wheel_holds_what_a_run_needs_and_kernels_and_data_have_their_own(wheels):
    files = wheels["gsa-train"]
    configs = {f"gsa_train/configs/{path.name}" for path in (ROOT / "configs").glob("*.yaml")}
    folders = {"gsa_kernels": "kernels", "gsa_data": "data"}
    packages = {"gsa_train", "gsa_eval", "gsa_study", "gsa_hf", *folders}
    assert set(files) > configs | {f"{name}/py.typed" for name in packages}
    assert {name.partition("/")[0] for name in files if not name.startswith("gsa_train-")} == packages
    assert any(name.endswith("licenses/LICENSE") for name in files)
    roots = {package: ROOT / folders.get(package, ".") for package in packages}
    sources = {
        str(path.relative_to(root)) for name, root in roots.items() for path in (root / name).rglob("*.py")
    }
    assert {name for name in files if name.endswith(".py")} == sources

    assert gsa_train.__version__ == gsa_kernels.__version__ == gsa_data.__version__
    for package in folders:
        inside = {file.partition("/")[0] for file in wheels[package.replace("_", "-")]}
        assert inside == {package, f"{package}-{gsa_train.__version__}.dist-info"}
        assert f"{package}/py.typed" in wheels[package.replace("_", "-")]

    declared = re.findall(r"^gsa-[\w-]+ = ", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    for name, count in (("gsa-train", len(declared)), ("gsa-data", 1)):
        commands = [line for line in wheels[f"{name} commands"] if line]
        assert len(commands) == count
        for line in commands:
            module, _, function = line.partition(" = ")[2].partition(":")
            assert callable(getattr(__import__(module, fromlist=[function]), function))


def test_a_config_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config("demo") == load_config(ROOT / "configs/demo.yaml")
    assert find_config("configs/demo.yaml") == Path("configs/demo.yaml")  # a path stays a path
    Path("demo").write_text("run:\n  name: mine\n")
    assert load_config("demo").run.name == "mine"
    with pytest.raises(
        ValueError, match=r"or a name: convert_135m, demo, demo_moe, demo_sft, gated_only_1\.7b"
    ):
        load_config("dmo")


def test_gsa_data_has_every_name_that_it_lists() -> None:
    assert all(getattr(gsa_data, name).__module__.startswith("gsa_data.") for name in gsa_data.__all__)
    with pytest.raises(AttributeError, match="no attribute 'BlokStream'"):
        gsa_data.BlokStream  # noqa: B018
