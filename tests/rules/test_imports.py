"""The arrows drawn in ``awex_core/__init__.py`` hold: data flows one way, and imports follow it."""

from __future__ import annotations

import graphlib
import subprocess
import sys

import pytest

import awex_core
from tests.rules.tree import ROOT, imports, modules, packaged_roots

ENGINES = {"vllm", "sglang", "megatron"}
PLUGINS = {"vllm_awex", "sglang_awex", "megatron_awex"}

LEAVES = {"errors", "modes", "numerics", "version"}
"""What any room may use, and what knows no room."""

ARROWS = {
    "layout": set(),
    "trace": {"layout"},
    "plan": {"layout"},
    "kernels": {"layout", "plan"},
    "transfer": {"layout", "plan", "kernels"},
    "verify": {"layout", "plan", "kernels", "transfer"},
    "checkpoint": {"layout", "plan", "kernels", "transfer", "verify"},
    "meta": {"layout"},
    "protocol": {"layout", "meta"},
    "settings": {"checkpoint", "layout", "meta", "trace", "transfer"},
    "sync": {
        "checkpoint",
        "kernels",
        "layout",
        "meta",
        "plan",
        "protocol",
        "settings",
        "stacks",
        "trace",
        "transfer",
        "verify",
    },
    "relay": {"checkpoint", "layout", "settings", "sync"},
    "engines": {"layout", "sync", "trace"},
    "trainers": {"checkpoint", "layout", "plan", "settings", "sync"},
    "stacks": set(),
    "cli": {"checkpoint", "layout", "meta", "relay", "settings", "stacks", "sync", "trainers"},
    "testing": {
        "checkpoint",
        "layout",
        "meta",
        "plan",
        "protocol",
        "settings",
        "sync",
        "trace",
        "transfer",
    },
}
"""What each room may import beside the leaves. The facade hands on ``attach`` and is imported by none."""

PURE = ("layout", "plan")

MAY_IMPORT_TORCH = {"awex_core.layout.live"}
"""The modules of the pure rooms that meet live tensors; their packages import them on first use only."""


def _part(module: str) -> str:
    """The room or module directly below awex_core."""
    return module.split(".")[1] if "." in module else ""


def _core_parts_imported(module: str, path) -> dict[str, int]:
    known = modules("awex_core")
    found = {}
    for entry in imports(module, path):
        if entry.name.split(".")[0] != "awex_core" or entry.for_types_only:
            continue
        part = _part(entry.name)
        # "from awex_core import Thing" reaches for the facade, which stands above everything.
        found[part if f"awex_core.{part}" in known else ""] = entry.line
    return found


def test_imports_follow_the_arrows():
    wrong = []
    for module, path in modules("awex_core").items():
        part = _part(module)
        if not part:
            continue
        allowed = ({*LEAVES, part} | ARROWS[part]) if part not in LEAVES else LEAVES
        for target, line in _core_parts_imported(module, path).items():
            if target not in allowed:
                wrong.append(f"{module}:{line} imports {target or 'the awex_core facade'}")
    assert not wrong, "imports against the arrows:\n" + "\n".join(wrong)


def test_every_room_has_its_arrows_and_they_make_no_circle():
    rooms = {_part(module) for module in modules("awex_core")} - {""} - LEAVES
    assert set(ARROWS) == rooms
    graphlib.TopologicalSorter(ARROWS).prepare()


@pytest.mark.parametrize("package", sorted(packaged_roots()))
def test_no_modules_import_each_other_in_a_circle(package):
    """Nor through a function's body: whoever changes one of the modules would have to know all of them."""
    known = modules(package)
    graph = {
        module: {
            entry.name
            for entry in imports(module, path)
            if entry.name in known and entry.name != module and not entry.for_types_only
        }
        for module, path in known.items()
        if path.name != "__init__.py"
    }
    graphlib.TopologicalSorter(graph).prepare()


def test_nothing_but_tests_imports_awex_core_testing():
    wrong = [
        f"{module}:{line}"
        for module, path in modules("awex_core").items()
        for target, line in _core_parts_imported(module, path).items()
        if target == "testing" and _part(module) != "testing"
    ]
    assert not wrong, f"awex_core.testing is for tests: {wrong}"


def test_the_drawing_names_every_room():
    missing = [room for room in ARROWS if f"    {room} " not in (awex_core.__doc__ or "")]
    assert not missing, f"awex_core/__init__.py draws the rooms but not {missing}"


def test_pure_rooms_do_not_name_torch():
    wrong = [
        f"{module}:{entry.line}"
        for module, path in modules("awex_core").items()
        if _part(module) in PURE and module not in MAY_IMPORT_TORCH
        for entry in imports(module, path)
        if entry.name.split(".")[0] == "torch" and not entry.for_types_only
    ]
    assert not wrong, f"layout and plan need no torch: {wrong}"


@pytest.mark.parametrize("module", ["awex_core", "awex_core.layout", "awex_core.plan"])
def test_pure_rooms_do_not_load_torch(module):
    unwanted = ["torch", *sorted(ENGINES)]
    code = f"import sys, {module}; sys.exit([name for name in {unwanted} if name in sys.modules] or None)"
    child = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert child.returncode == 0, f"import {module} loads: {child.stderr}"


def test_core_imports_no_engine_and_no_plugin():
    wrong = [
        f"{module}:{entry.line} imports {entry.name}"
        for module, path in modules("awex_core").items()
        for entry in imports(module, path)
        if entry.name.split(".")[0] in ENGINES | PLUGINS
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("plugin", sorted(set(packaged_roots()) - {"awex_core"}))
def test_plugins_never_import_each_other(plugin):
    engine = plugin.removesuffix("_awex")
    others = (PLUGINS | ENGINES) - {plugin, engine}
    wrong = [
        f"{module}:{entry.line} imports {entry.name}"
        for module, path in modules(plugin).items()
        for entry in imports(module, path)
        if entry.name.split(".")[0] in others
    ]
    assert not wrong, "\n".join(wrong)


def test_what_tests_share_stands_in_rooms():
    """CONTRIBUTING.md says which."""
    support = ROOT / "tests" / "support"
    rooms = {path.name for path in support.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    described = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert not list(support.glob("*.py"))
    assert not [room for room in rooms - {"sglang_cpu"} if f"`{room}/`" not in described]
