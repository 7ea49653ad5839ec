"""Other ways to run a real SGLang: dummy weights, data and pipeline parallel, KV kept, offline, without the flag."""

from __future__ import annotations

import json
import subprocess
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.e2e.conftest import StartTrainer, ask_all_replicas, check_all_new, check_same, write_over_requests
from tests.support.engines.jobs import MetaServerProcess
from tests.support.engines.sglang_jobs import BIN, SglangReference, SglangServer, engine_options, sglang_env
from tests.support.families.tiny_models import make_model
from tests.support.processes.clients import asking
from tests.support.processes.lines import Child, ChildError
from tests.support.processes.warm import run_to_end

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

PROMPT = list(b"Nothing computed from older weights may be read again once new ones are there. " * 5)
FOLLOW_LIMIT_S = 60.0


def test_dummy_weights_are_not_served_and_the_meta_server_may_restart(
    folder: Path, meta: MetaServerProcess, stack: ExitStack, start_trainer: StartTrainer
) -> None:
    model = make_model(folder / "model", "qwen3", dtype="bfloat16", seed=99)
    options = {"load_format": "dummy", "disable_radix_cache": True, "skip_server_warmup": False}
    extra = ["--weight-sync-kv", "keep"]
    reference = stack.enter_context(closing(SglangReference(model, folder / "reference", tp=2)))
    server = stack.enter_context(
        closing(SglangServer(model, meta, folder / "engine", tp=2, options=options, extra=extra, command="serve"))
    )
    refused = server.post_completion(PROMPT)
    assert refused.status_code == 503 and "no trainer has published" in refused.json()["error"]["message"]
    with pytest.raises(ChildError, match="not taken from clients"):
        server.ask_schedulers("awex:0123456789abcdef:release")
    trainer = start_trainer(model, layout="tp=2")
    trainer.publish(1)
    # Noise of the dummy weights must be gone everywhere, in the vocabulary's padding too.
    reference.wait()
    check_same(server.dump, reference, folder, trainer.checkpoint(model, "1"))
    expected = reference.ask("complete", 120, prompt=PROMPT, max_tokens=8)
    assert server.complete(PROMPT)["logprobs"] == expected["logprobs"]
    meta.kill()
    assert server.complete(PROMPT)["logprobs"] == expected["logprobs"]
    meta.start()
    trainer.ranks[0].ask("wait_for_engines", FOLLOW_LIMIT_S, count=1, timeout_s=FOLLOW_LIMIT_S - 5)
    with asking(lambda client: server.complete([client, *PROMPT], 400), 2) as answers:
        newest = trainer.publish(2)["version"]
    assert all(len(answer["logprobs"]) == 400 for answer in answers)
    over = [answer["versions"] for answer in answers if len(answer["versions"]) == 2]
    assert over and all(versions[-1]["version"] == newest for versions in over), "none went on with its KV kept"
    assert server.complete(PROMPT)["logprobs"] != expected["logprobs"]


@pytest.mark.parametrize("shape", [{"dp": 2}, {"pp": 2}], ids=["dp2", "pp2"])
def test_replicas_and_stages_switch_together_and_abort(
    folder: Path, meta: MetaServerProcess, stack: ExitStack, start_trainer: StartTrainer, shape: dict[str, int]
) -> None:
    model = make_model(folder / "model", "qwen3", dtype="bfloat16", seed=99)
    extra = ["--weight-sync-kv", "abort"]
    server = stack.enter_context(closing(SglangServer(model, meta, folder / "engine", extra=extra, **shape)))
    before = server.complete(PROMPT)["logprobs"]
    trainer = start_trainer(model)
    trainer.all("train")
    result, finishes = write_over_requests(server.complete, trainer, PROMPT, 400)
    assert "abort" in finishes
    (figures,) = result["figures"].values()
    held = trainer.ranks[0].ask("memory", 60)["shards"]
    copies = shape.get("dp", 1)
    assert figures["moved_nbytes"] == pytest.approx(copies * held, rel=0.2), "every replica takes the whole model"
    after = ask_all_replicas(server.complete, PROMPT)
    check_all_new(after, before)
    if "pp" in shape:
        reference = stack.enter_context(closing(SglangReference(trainer.checkpoint(model, "1"), folder, pp=2)))
        reference.wait()
        check_same(server.dump, reference, folder)


def test_offline_engine_follows(
    folder: Path, meta: MetaServerProcess, stack: ExitStack, start_trainer: StartTrainer
) -> None:
    model = make_model(folder / "model", "qwen3-tied", dtype="bfloat16", seed=99)
    env = {**sglang_env(1), **meta.env, "AWEX_BACKEND": "awex"}
    args = [str(BIN / "python"), "-m", "tests.support.engines.sglang_offline", json.dumps(engine_options(model))]
    engine = Child(args, folder / "offline.log", env)
    stack.callback(engine.close)
    trainer = start_trainer(model, kind="qwen3-tied")
    engine.receive(300)
    before = engine.ask("complete", 120, prompt=PROMPT, max_tokens=16)
    trainer.all("train")
    for child in trainer.ranks:
        child.send("write", version=3, options={})
    assert engine.ask("wait_for_version", 120, timeout_s=100.0) == "1.3"
    assert trainer.ranks[0].receive(60)["version"] == "1.3"
    after = engine.ask("complete", 120, prompt=PROMPT, max_tokens=16)
    assert after["logprobs"] != before["logprobs"] and after["versions"][0]["version"] == "1.3"
    reference = stack.enter_context(closing(SglangReference(trainer.checkpoint(model, "3"), folder)))
    reference.wait()
    check_same(lambda path: engine.ask("dump", 60, folder=str(path)), reference, folder)
    assert engine.ask("call", 60, method="is_fully_idle") == "1.3", "whatever it does: it has left every byte as it was"
    assert engine.ask("reload", 60, folder=str(model)) == "unknown", "nobody has committed what it holds now"
    for child in trainer.ranks:
        child.send("write", version=4, options={"only": ["model.norm.weight"]})
    assert engine.ask("wait_for_version", 120, timeout_s=100.0) == "1.4"
    assert trainer.ranks[0].receive(60)["committed"]
    check_same(lambda path: engine.ask("dump", 60, folder=str(path)), reference, folder)


WITHOUT_THE_FLAG = """
import os, sys
from sglang.srt.plugins import load_plugins

before = dict(os.environ)
load_plugins()
assert "sglang_awex" in sys.modules, "the plugin was not loaded"
from sglang.srt.server_args import prepare_server_args
from sglang.srt.entrypoints import http_server
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

layers = len(http_server.app.user_middleware)
prepare_server_args(["--model-path", sys.argv[1], "--device", "cpu"])
assert len(http_server.app.user_middleware) == layers
assert not [route.path for route in http_server.app.routes if "awex" in getattr(route, "path", "")]
assert not hasattr(SchedulerWeightUpdaterManager.check_weights, "__wrapped__")
changed = {name for name in os.environ if os.environ[name] != before.get(name)}
assert not [name for name in changed if "AWEX" in name], changed
print("unchanged")
"""

WITH_A_BROKEN_SGLANG = """
import sglang.srt.managers.scheduler_components.weight_updater as module
from sglang.srt.plugins import load_plugins

del module.SchedulerWeightUpdaterManager.check_weights
load_plugins()
print("went on")
"""


def _run(code: str, model: Path, env: dict[str, str], given: str = "") -> subprocess.CompletedProcess[str]:
    args = [BIN / "python", "-c", code, str(model)]
    return run_to_end(args, {**sglang_env(1), "SGLANG_PLUGINS": "awex", **env}, given=given, limit_s=180)


def test_without_the_flag_nothing_changes_and_with_it_a_plugin_that_cannot_work_stops_the_server(folder: Path) -> None:
    model = make_model(folder / "model", "qwen3", dtype="bfloat16", seed=0)
    done = _run(WITHOUT_THE_FLAG, model, {})
    assert done.returncode == 0 and "unchanged" in done.stdout, done.stderr[-3000:]
    done = _run(WITH_A_BROKEN_SGLANG, model, {"AWEX_BACKEND": "awex"})
    assert done.returncode != 0 and "cannot work with this SGLang" in done.stderr, done.stderr[-3000:]
    assert "went on" not in done.stdout


WRONG_FLAGS = """
import json, os, sys
from sglang.srt.plugins import load_plugins

load_plugins()
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.server_args import prepare_server_args

ours = {name: value for name, value in os.environ.items() if name.startswith("AWEX_")}
for flags, env in json.load(sys.stdin):
    for name in [name for name in os.environ if name.startswith("AWEX_")]:
        del os.environ[name]
    os.environ.update(ours | env)
    try:
        server_args = prepare_server_args(["--model-path", sys.argv[1], "--device", "cpu", *flags])
        Engine._launch_subprocesses(server_args=server_args)
    except Exception as error:
        print(json.dumps(f"{type(error).__name__}: {error}"))
"""


def test_wrong_flags_are_refused_before_any_process_is_started(
    folder: Path, meta: MetaServerProcess, wrong_token_file: Path
) -> None:
    model = make_model(folder / "model", "qwen3", dtype="bfloat16", seed=0)
    backend, right = ["--weight-sync-backend=awex"], ["--weight-sync-meta-server", meta.address]
    right = backend + right
    cases: dict[str, tuple[list[str], dict[str, str]]] = {
        "needs --weight-sync-backend=awex": (["--weight-sync-job", "j"], {}),
        "no meta server": (backend, {"AWEX_META_SERVER": ""}),
        "needs --disable-radix-cache": ([*right, "--weight-sync-kv=keep"], {}),
        "needs --weight-sync-kv=abort": ([*right, "--pp-size", "2"], {}),
        "does not go with\n  - --enable-lora: ": ([*right, "--enable-lora", "--lora-paths", "a=/b"], {}),
        "does not go with\n  - --tokenizer-worker-num: ": ([*right, "--tokenizer-worker-num", "2"], {}),
        "does not go with\n  - --speculative-algorithm: ": (
            [*right, "--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", str(model)],
            {},
        ),
        "does not go with\n  - --weight-cache-mode: ": ([*right, "--weight-cache-mode", "client"], {}),
        "needs --weight-sync-engine": ([*right, "--nnodes", "2", "--tp-size", "2", "--dist-init-addr", "h:1"], {}),
        "token": (right, {"AWEX_TOKEN_FILE": str(wrong_token_file)}),
    }
    done = _run(WRONG_FLAGS, model, meta.env, json.dumps(list(cases.values())))
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('"')]
    assert len(answers) == len(cases), done.stderr[-3000:]
    for message, answer in zip(cases, answers, strict=True):
        assert message in answer and "not the token" not in answer


def test_without_a_meta_server_the_server_ends_at_the_limit_and_says_so(folder: Path, meta: MetaServerProcess) -> None:
    model = make_model(folder / "model", "qwen3", dtype="bfloat16", seed=0)
    flags = ["--weight-sync-backend=awex", "--weight-sync-meta-server", "127.0.0.1:1"]
    args = [BIN / "sglang", "serve", "--model-path", str(model), "--device", "cpu", *flags]
    done = run_to_end(args, {**sglang_env(1), **meta.env, "AWEX_CONNECT_TIMEOUT": "3"}, limit_s=240)
    assert done.returncode != 0 and "did not answer within 3 s" in done.stderr, done.stderr[-2000:]
    assert "Load weight begin" not in done.stderr
