"""Classes and functions stay small: what has grown is cut, or says why it is large."""

from __future__ import annotations

import ast
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rules.tree import ROOT, modules, packaged_roots

MAX_CLASS_LINES = 300
MAX_PUBLIC_METHODS = 12
REASON = "Large because "
"""How the sentence in a class's docstring begins that says why it is larger than that."""

MAX_POSITIONAL = 9
"""Parameters that may be given by place, and arguments that are; nobody can read ten."""

MEDIAN_LINES, LONG_LINES, SHARE_NOT_LONG = 6, 18, 0.9
"""Of functions, from ``def`` to the last line, docstring included: most say more in it than in their code."""

NETWORK_MODULES = {"dist", "httpx", "socket", "urllib3"}
CONNECTS_TO_NOTHING = {
    "httpx.AsyncClient",
    "httpx.Client",
    "httpx.Limits",
    "httpx.Timeout",
    "urllib3.connection_from_url",
}
CLIENTS = {"client", "_client", "http", "_http"}
"""What those are called that have the meta server answer."""

NETWORK_CALLS = {"host_store", "join", "local_address", "this_process", "wait_for"}
"""Our own that ask the network, whatever they are methods of."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def trees() -> Iterator[tuple[Path, ast.Module]]:
    """Every shipped module, parsed."""
    for package in packaged_roots():
        for path in modules(package).values():
            yield path, ast.parse(path.read_text(encoding="utf-8"), str(path))


def every(*kinds: type[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    """Every node of these kinds, and where it is."""
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, kinds):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node  # type: ignore[attr-defined]


def lines_of(node: ast.AST) -> int:
    return node.end_lineno - node.lineno + 1  # type: ignore[attr-defined,no-any-return]


def methods(node: ast.ClassDef) -> dict[str, Function]:
    """By name, so that overloads are one."""
    return {each.name: each for each in node.body if isinstance(each, Function)}


def why_large(node: ast.ClassDef) -> str:
    """What of a class is more than it may be without a reason; empty if nothing is."""
    public = [name for name in methods(node) if not name.startswith("_")]
    large = lines_of(node) > MAX_CLASS_LINES or len(public) > MAX_PUBLIC_METHODS
    return f"{node.name} has {lines_of(node)} lines and {len(public)} public methods" if large else ""


def positional(node: Function) -> int:
    given = [*node.args.posonlyargs, *node.args.args]
    return len(given) - (bool(given) and given[0].arg in ("self", "cls"))


def is_kernel(node: Function) -> bool:
    """Whether Triton compiles it: parameters of such a function are pointers and constants, and cannot be grouped."""
    return any(ast.unparse(decorator).startswith("triton.jit") for decorator in node.decorator_list)


def reaches_network(node: ast.Call) -> bool:
    callee = ast.unparse(node.func)
    owner, _, name = callee.rpartition(".")
    if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Constant):
        return False  # "".join
    if callee in CONNECTS_TO_NOTHING:
        return False
    asks = owner.rpartition(".")[2] in CLIENTS or name in NETWORK_CALLS
    return asks or owner.partition(".")[0] in NETWORK_MODULES or owner.startswith("torch.distributed")


def network_calls(node: ast.ClassDef, method: str, seen: set[str]) -> Iterator[str]:
    """Calls by which a method, or one of the same class that it calls, reaches the network."""
    found = methods(node).get(method)
    if found is None or method in seen:
        return
    seen.add(method)
    for call in (each for each in ast.walk(found) if isinstance(each, ast.Call)):
        if reaches_network(call):
            yield ast.unparse(call.func)
        if isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "self":
            yield from network_calls(node, call.func.attr, seen)


def test_a_large_class_says_why() -> None:
    large = {
        where: why_large(node)
        for where, node in every(ast.ClassDef)
        if isinstance(node, ast.ClassDef) and REASON not in (ast.get_docstring(node) or "") and why_large(node)
    }
    assert not large, f"cut these, or say in the docstring why not, with a sentence that begins {REASON!r}: {large}"


def test_no_function_has_ten_positional_parameters() -> None:
    crowded = [
        f"{where} {node.name} has {positional(node)}"
        for where, node in every(ast.FunctionDef, ast.AsyncFunctionDef)
        if isinstance(node, Function) and positional(node) > MAX_POSITIONAL and not is_kernel(node)
    ]
    assert not crowded, f"group what belongs together in a dataclass: {crowded}"


def test_no_call_gives_ten_arguments_by_place() -> None:
    """Also those of dataclasses and messages, whose parameters are their fields."""
    crowded = [
        where for where, node in every(ast.Call) if isinstance(node, ast.Call) and len(node.args) > MAX_POSITIONAL
    ]
    assert not crowded, f"name the arguments: {crowded}"


def test_functions_are_short() -> None:
    found = sorted((lines_of(node), where) for where, node in every(ast.FunctionDef, ast.AsyncFunctionDef))
    lengths = [length for length, _ in found]
    short = sum(length <= LONG_LINES for length in lengths) / len(lengths)
    longest = ", ".join(f"{where} ({length})" for length, where in found[-5:])
    assert statistics.median(lengths) <= MEDIAN_LINES, f"the median of functions is longer; the longest: {longest}"
    assert short >= SHARE_NOT_LONG, f"{100 * short:.1f} % have at most {LONG_LINES} lines; the longest: {longest}"


def test_no_constructor_waits_for_the_network() -> None:
    """Of what has peers: it is made by a named constructor (``join``, ``open``), or begins with ``start``."""
    rooms = {ROOT / "awex_core" / room for room in ("meta", "sync", "transfer")}
    waiting = {
        f"{path.relative_to(ROOT)} {node.name}": calls
        for path, tree in trees()
        if path.parent in rooms
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        if (calls := list(network_calls(node, "__init__", set())))
    }
    assert not waiting, f"a constructor assigns; reach the network in a named constructor or in start(): {waiting}"


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("self.x = 1", False),
        ("self.text = ', '.join('ab')", False),
        ("self._client = MetaClient.of(config)", False),
        ("self._client.put('a', b'')", True),
        ("self._http = httpx.Client()", False),
        ("self.answer = httpx.get(url)", True),
        ("self.me = this_process(config)", True),
        ("self._join()", True),
        ("self.store = dist.TCPStore(host, 0)", True),
    ],
)
def test_what_a_constructor_calls_is_seen(body: str, found: bool) -> None:
    """Also in a method of the class that it calls."""
    source = f"class A:\n    def __init__(self):\n        {body}\n    def _join(self):\n        self.member.join()\n"
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.ClassDef)
    assert bool(list(network_calls(node, "__init__", set()))) is found
