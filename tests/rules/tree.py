"""What the rules look at: the files of this repository and what its modules import."""

from __future__ import annotations

import ast
import configparser
import functools
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Where to look when the tree is not a git checkout.
NOT_OURS = {".git", ".venv", ".venv-sglang", ".cache", "build", "dist", "__pycache__"}


@functools.cache
def project_files() -> list[Path]:
    """Every file that is committed or could be: tracked, or untracked and not ignored."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listing.returncode == 0:
        paths = {ROOT / name for name in listing.stdout.split("\0") if name}
    else:
        paths = {path for path in ROOT.rglob("*") if not NOT_OURS & set(path.relative_to(ROOT).parts)}
    return sorted(path for path in paths if path.is_file())


@functools.cache
def setup_cfg() -> configparser.ConfigParser:
    """``setup.cfg``, parsed."""
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def packaged_roots() -> dict[str, Path]:
    """Top-level packages that are shipped, and their folders."""
    lines = setup_cfg()["options"]["package_dir"].split("\n")
    pairs = (line.split("=") for line in lines if line.strip())
    return {name.strip(): ROOT / folder.strip() for name, folder in pairs}


def modules(package: str) -> dict[str, Path]:
    """Dotted name and file of every module of a shipped top-level package."""
    root = packaged_roots()[package]
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = [package, *path.relative_to(root).with_suffix("").parts]
        if parts[-1] == "__init__":
            parts.pop()
        found[".".join(parts)] = path
    return found


@dataclass(frozen=True)
class Import:
    """One imported name, absolute, and whether only the type checker sees the import."""

    name: str
    line: int
    for_types_only: bool


def imports(module: str, path: Path) -> Iterator[Import]:
    """Every import of a module, at any depth; ``from a import b`` gives ``a.b``."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    types_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                anchor = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*anchor, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            yield Import(name, node.lineno, id(node) in types_only)
