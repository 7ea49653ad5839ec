"""Other ways to run a real vLLM: dummy weights, data parallel, KV kept or dropped, offline, without the flag."""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import StartTrainer, ask_all_replicas, check_all_new, check_same, write_over_requests
from tests.support.engines.jobs import MetaServerProcess, Reference, VllmServer, engine_env
from tests.support.families.tiny_models import make_model
from tests.support.processes.clients import asking
from tests.support.processes.lines import ROOT, Child, end_session
from tests.support.processes.warm import run_to_end, start_process

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

PROMPT = list(b"Nothing computed from older weights may be read again once new ones are there. " * 5)


def test_dummy_weights_are_not_served_and_kept_kv_goes_on(
    folder: Path, meta: MetaServerProcess, stack: ExitStack, start_trainer: StartTrainer
) -> None:
    model = make_model(folder / "model", "qwen3", dtype="bfloat16", seed=99)
    extra = ["--load-format", "dummy", "--weight-sync-kv", "keep", "--no-enable-prefix-caching"]
    reference = stack.enter_context(closing(Reference(model, folder / "reference", tp=2, dtype="bfloat16")))
    server = stack.enter_context(closing(VllmServer(model, meta, folder / "engine", tp=2, extra=extra)))
    refused = server.post_completion(PROMPT)
    assert refused.status_code == 503 and "no trainer has published" in refused.json()["error"]["message"]
    assert "no trainer has published" in server.status()["closed"]
    trainer = start_trainer(model, layout="tp=2")
    trainer.publish(1)
    # Noise of the dummy weights must be gone everywhere, in the vocabulary's padding too.
    reference.wait()
    check_same(server.dump, reference, folder, trainer.checkpoint(model, "1"))
    expected = reference.ask("complete", 120, prompt=PROMPT, max_tokens=8)
    assert server.complete(PROMPT)["logprobs"] == expected["logprobs"]
    with asking(lambda client: server.complete([client, *PROMPT], 600), 2) as answers:
        trainer.publish(2)
    assert all(len(answer["logprobs"]) == 600 for answer in answers)
    assert server.complete(PROMPT)["logprobs"] != expected["logprobs"]


def test_two_data_parallel_servers_switch_together_and_abort(
    folder: Path, meta: MetaServerProcess, stack: ExitStack, start_trainer: StartTrainer
) -> None:
    model = make_model(folder / "model", "qwen3", dtype="bfloat16", seed=99)
    extra = ["--data-parallel-size", "2", "--weight-sync-kv", "abort"]
    env = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    server = stack.enter_context(closing(VllmServer(model, meta, folder / "engine", tp=1, extra=extra, env=env)))
    before = server.complete(PROMPT)["logprobs"]
    trainer = start_trainer(model)
    trainer.all("train")
    result, finishes = write_over_requests(server.complete, trainer, PROMPT, 500)
    assert "abort" in finishes
    (figures,) = result["figures"].values()
    held = trainer.ranks[0].ask("memory", 60)["shards"]
    assert figures["moved_nbytes"] == pytest.approx(2 * held, rel=0.2), "both replicas take the whole model"
    after = ask_all_replicas(server.complete, PROMPT)
    check_all_new(after, before)
    statuses = [httpx.get(f"{server.url}/awex/status", trust_env=False).json() for _ in range(30)]
    assert {status["elected"] for status in statuses} == {True, False}, "two API servers, one of them elected"
    deadline = time.monotonic() + 20
    while any(_version(server) != {"epoch": 1, "number": 1} for _ in range(10)):
        assert time.monotonic() < deadline, "the API server that is not elected does not show the new version"


def _version(server: VllmServer) -> dict[str, int]:
    status = httpx.get(f"{server.url}/awex/status", trust_env=False).json()
    version: dict[str, int] = status["version"]
    return version


def test_offline_llm_follows_through_vllms_own_calls(
    folder: Path, meta: MetaServerProcess, stack: ExitStack, start_trainer: StartTrainer
) -> None:
    model = make_model(folder / "model", "qwen3-tied", dtype="bfloat16", seed=99)
    env = {**engine_env(1), **meta.env, "PYTHONPATH": str(ROOT)}
    args = [sys.executable, "-m", "tests.support.engines.offline_engine", str(model)]
    engine = Child(args, folder / "offline.log", env)
    stack.callback(engine.close)
    trainer = start_trainer(model, kind="qwen3-tied")
    engine.receive(300)
    before = engine.ask("complete", 120, prompt=PROMPT, max_tokens=16)
    engine.ask("init", 60)
    trainer.all("train")
    for child in trainer.ranks:
        child.send("write", version=3, options={})
    assert engine.ask("update", 120, version="three") == "three"
    assert trainer.ranks[0].receive(60)["version"] == "1.3"
    assert engine.ask("complete", 120, prompt=PROMPT, max_tokens=16) != before
    checkpoint = trainer.checkpoint(model, "3")
    reference = stack.enter_context(closing(Reference(checkpoint, folder / "reference", tp=1, dtype="bfloat16")))
    reference.wait()
    check_same(lambda path: engine.ask("dump", 60, folder=str(path)), reference, folder)
    assert engine.ask("reload", 60, folder=str(model)) == "unknown", "nobody has committed what it holds now"
    for child in trainer.ranks:
        child.send("write", version=4, options={"only": ["model.norm.weight"]})
    engine.ask("update", 120, version="four")
    assert trainer.ranks[0].receive(60)["committed"]
    check_same(lambda path: engine.ask("dump", 60, folder=str(path)), reference, folder)


NO_FLAG = """
import os, sys
import vllm.entrypoints.launchers.api_server.entry as entry
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

before = dict(os.environ)
parser = make_arg_parser(FlexibleArgumentParser())
assert "vllm_awex" in sys.modules, "the plugin was not loaded"
args = parser.parse_args(["--model", sys.argv[1]])
engine_args = AsyncEngineArgs.from_cli_args(args)
assert engine_args.weight_transfer_config is None
app = entry.build_app(args, ("generate",))
assert not [route.path for route in app.routes if "awex" in getattr(route, "path", "")]
assert not args.middleware
changed = {name for name in os.environ if os.environ[name] != before.get(name)}
assert not [name for name in changed if "AWEX" in name], changed
print("unchanged")
"""


def test_without_the_flag_nothing_changes(folder: Path) -> None:
    model = make_model(folder / "model", "qwen3", dtype="bfloat16", seed=0)
    done = run_to_end([sys.executable, "-c", NO_FLAG, str(model)], engine_env(1), limit_s=180)
    assert done.returncode == 0 and "unchanged" in done.stdout, done.stderr[-3000:]


def test_wrong_flags_end_the_server_before_it_loads_a_model(
    folder: Path, meta: MetaServerProcess, stack: ExitStack, wrong_token_file: Path
) -> None:
    model = make_model(folder / "model", "qwen3", dtype="bfloat16", seed=0)
    cases = {
        "needs --weight-sync-backend=awex": (["--weight-sync-meta-server", meta.address], {}),
        "no meta server": (["--weight-sync-backend=awex"], {"AWEX_META_SERVER": ""}),
        "needs --no-enable-prefix-caching": (
            ["--weight-sync-backend=awex", "--weight-sync-meta-server", meta.address, "--weight-sync-kv=keep"],
            {},
        ),
        "token": (
            ["--weight-sync-backend=awex", "--weight-sync-meta-server", meta.address],
            {"AWEX_TOKEN_FILE": str(wrong_token_file)},
        ),
    }
    started = {}
    for number, (message, (flags, env)) in enumerate(cases.items()):
        log = folder / f"{number}.log"
        args = [Path(sys.executable).parent / "vllm", "serve", str(model), *flags]
        with log.open("wb") as sink:
            process = start_process(args, {**engine_env(1), **meta.env, **env}, sink)
        stack.callback(end_session, process, grace_s=0)
        started[message] = log, process
    for message, (log, process) in started.items():
        status = process.wait(240)
        output = log.read_text(errors="replace")
        assert status != 0 and message in output, output[-2000:]
        assert "Loading weights" not in output and "not the token" not in output


REFUSALS = """
import json, os, sys
import vllm.entrypoints.launchers.api_server.entry
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm_awex.options import check_settings

parser = make_arg_parser(FlexibleArgumentParser())
for given, fields in json.load(sys.stdin):
    os.environ.pop("AWEX_BACKEND", None)
    try:
        if isinstance(given, dict):
            config = EngineArgs(sys.argv[1], weight_transfer_config={"backend": "awex"}, **given).create_engine_config()
        else:
            args = parser.parse_args(["--model", sys.argv[1], *given])
            config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
        for name, value in fields.items():  # what vLLM resolves so on GPUs only
            setattr(config.parallel_config, name, value)
        check_settings(config)
        print(json.dumps("accepted"))
    except Exception as error:
        print(json.dumps(f"{type(error).__name__}: {error}"))
"""


def test_what_does_not_go_with_following_is_refused_however_it_is_said(folder: Path, meta: MetaServerProcess) -> None:
    model = make_model(folder / "model", "qwen3", dtype="bfloat16", seed=0)
    draft = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 2}
    ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    flag, vllms_own = ["--weight-sync-backend=awex"], ["--weight-transfer-config", '{"backend": "awex"}']
    by_parts = ["--spec-method", "draft_model", "--spec-model", str(model), "--spec-tokens", "2"]
    kv_of_others = {"kv_connector": "ExampleConnector", "kv_role": "kv_consumer"}
    cases: list[tuple[str, list[str] | dict[str, object], dict[str, bool]]] = [
        ("--speculative-config with a draft model: ", [*flag, *by_parts], {}),
        ("--speculative-config with a draft model: ", [*vllms_own, *by_parts], {}),
        ("--speculative-config with a draft model: ", [*flag, "--speculative-config", json.dumps(draft)], {}),
        ("--speculative-config with a draft model: ", {"speculative_config": draft}, {}),
        ("accepted", [*flag, "--speculative-config", json.dumps(ngram)], {}),
        ("accepted", {"speculative_config": ngram}, {}),
        ("--enable-lora: ", {"enable_lora": True}, {}),
        ("--enable-eplb: ", {}, {"enable_eplb": True}),
        ("--load-format ipc_cache: ", [*flag, "--load-format", "ipc_cache"], {}),
        ("--cpu-offload-gb and its kin: ", [*flag, "--cpu-offload-gb", "1"], {}),
        (
            "--kv-transfer-config with a producer or a consumer: ",
            [*flag, "--kv-transfer-config", json.dumps(kv_of_others)],
            {},
        ),
        ("accepted", [*vllms_own], {}),
    ]
    env = {**engine_env(1), **meta.env, "AWEX_META_SERVER": meta.address}
    given = json.dumps([case[1:] for case in cases])
    done = run_to_end([sys.executable, "-c", REFUSALS, str(model)], env, given=given, limit_s=180)
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('"')]
    assert len(answers) == len(cases), done.stderr[-3000:]
    for (expected, *case), answer in zip(cases, answers, strict=True):
        begins = "ConfigError: --weight-sync-backend=awex does not go with\n  - " if expected != "accepted" else ""
        assert answer.startswith(begins + expected), (case, answer)
