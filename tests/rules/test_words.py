"""One word per idea: the glossary has them all, and what it says is not used does not come back."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.rules.tree import ROOT, modules, packaged_roots

GLOSSARY = ROOT / "docs/glossary.md"


def _rows(heading: str = "") -> Iterator[list[str]]:
    """The cells of the glossary's tables, of those below a heading if one is given."""
    text = GLOSSARY.read_text(encoding="utf-8")
    for line in text[text.index(heading) :].splitlines():
        if line.startswith("| ") and not line.startswith("|---"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def _words(cell: str) -> set[str]:
    return {word.strip() for word in re.sub(r"\(.*?\)", "", cell).split(",")}


def _names(tree: ast.AST) -> Iterator[str]:
    """Every name in a module: of what it defines, takes, reads and imports."""
    for node in ast.walk(tree):
        for field in ("id", "attr", "name", "arg", "asname"):
            if isinstance(name := getattr(node, field, None), str):
                yield name


def _parts(name: str) -> set[str]:
    return {part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def test_the_words_of_contributing_are_in_the_glossary() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    listed = re.search(r"One word per idea, in code and in text: (.*?)\.", text, re.DOTALL)
    assert listed, "CONTRIBUTING.md lists the words after 'One word per idea, in code and in text: '"
    words = {word.strip() for word in listed[1].replace("\n", " ").split(",")}
    explained = {word for row in _rows() for word in _words(row[0])}
    assert words <= explained, f"the glossary does not explain {sorted(words - explained)}"


def test_each_word_is_explained_once() -> None:
    words = [word for row in _rows() if row[0] != "word" for word in _words(row[0])]
    assert sorted(words) == sorted(set(words))


def test_words_that_are_not_used_do_not_come_back() -> None:
    banned = {word for row in _rows("## Words that are not used") if row[0] != "not" for word in _words(row[0])}
    assert len(banned) > 5
    banned |= {f"{word}s" for word in banned} | {f"{word}d" for word in banned if word.endswith("e")}
    wrong = []
    for package in packaged_roots():
        for module, path in modules(package).items():
            names = {*_names(ast.parse(path.read_text(encoding="utf-8"))), *module.split(".")}
            wrong += [f"{module}: {name}" for name in sorted(names) if _parts(name) & banned]
    assert not wrong, "the glossary has other words for these:\n" + "\n".join(wrong)
