"""Nothing that is shipped can be made to run code by the bytes it receives."""

from __future__ import annotations

import ast

from tests.rules.tree import imports, modules, packaged_roots

MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "jsonpickle", "marshal", "shelve"}

BUILTINS = {"eval", "exec", "compile", "__import__"}

# Attributes of any module: torch.load and the collectives of torch.distributed that pickle.
CALLS = {
    "torch.load",
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
}


def _unsafe_calls(tree: ast.AST):
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called in BUILTINS or called in CALLS or called.rpartition(".")[2] in CALLS:
            yield node.lineno, called
        for keyword in node.keywords:
            if keyword.arg == "allow_pickle" and ast.unparse(keyword.value) != "False":
                yield node.lineno, f"{called}(allow_pickle=...)"


def test_nothing_unpickles_or_evaluates():
    wrong = []
    for package in packaged_roots():
        for module, path in modules(package).items():
            tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
            wrong += [f"{module}:{line} {what}" for line, what in _unsafe_calls(tree)]
            wrong += [
                f"{module}:{entry.line} imports {entry.name}"
                for entry in imports(module, path)
                if entry.name.split(".")[0] in MODULES
            ]
    assert not wrong, "\n".join(wrong)


def test_the_rule_sees_what_it_should():
    for bad in ("eval(x)", "torch.load(f)", "dist.broadcast_object_list(x)", "np.load(f, allow_pickle=True)"):
        assert list(_unsafe_calls(ast.parse(bad))), bad
    for good in ("model.eval()", "re.compile(x)", "json.load(f)", "np.load(f, allow_pickle=False)"):
        assert not list(_unsafe_calls(ast.parse(good))), good
