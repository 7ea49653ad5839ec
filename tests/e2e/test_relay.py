"""A relay between a trainer and servers, over nixl: one that starts when the trainer is stopped takes its version."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file

from awex_core import cli
from awex_core.testing.checkpoint_trainer import CheckpointTrainer
from awex_core.testing.engine import eventually
from tests.e2e.conftest import check_same
from tests.support.engines.jobs import BIN, MetaServerProcess, Reference, VllmServer
from tests.support.families.tiny_models import make_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

NIXL = {"AWEX_TRANSPORT": "nixl", "AWEX_ALLOW_SLOW_TRANSPORT": "1", "UCX_TLS": "tcp"}


@contextmanager
def relay(manifest: Path, meta: MetaServerProcess, folder: Path) -> Iterator[None]:
    command = [BIN / "awex", "serve", "--manifest", manifest, "--listen", "nixl://127.0.0.1", "--name", "relay"]
    with (folder / "relay.log").open("wb") as sink:
        process = subprocess.Popen(command, env=os.environ | meta.env | NIXL, stdout=sink, stderr=sink)
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, (folder / "relay.log").read_text()


def test_a_server_takes_what_a_relay_holds(folder: Path, meta: MetaServerProcess, stack: ExitStack) -> None:
    own, published = [make_model(folder / f"seed-{seed}", "qwen3", dtype="bfloat16", seed=seed) for seed in range(2)]
    reference = stack.enter_context(closing(Reference(published, folder / "reference", tp=1, dtype="bfloat16")))
    manifest = folder / "manifest.json"
    assert cli.main(["export", "--model", str(published), "--output", str(manifest)]) == 0
    stack.enter_context(relay(manifest, meta, folder))
    with closing(CheckpointTrainer(published, folder / "trainer", meta.env | NIXL, world=2)) as trainer:
        trainer.all("wait_for_engines", count=1, timeout_s=60)
        assert trainer.publish(1)["committed"] == ["relay"]
    server = stack.enter_context(closing(VllmServer(own, meta, folder / "late", env=NIXL)))
    eventually(lambda: server.status()["version"] == {"epoch": 1, "number": 1}, "taking the version")
    reference.wait()
    check_same(server.dump, reference, folder)
    taken = folder / "taken"
    command = [BIN / "awex", "receive", "--output", taken, "--manifest", manifest, "--timeout", "60"]
    subprocess.run(command, env=os.environ | meta.env | NIXL, check=True, timeout=120)
    (file,) = taken.glob("*.safetensors")
    expected = {name: tensor for path in published.glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert {name: tensor.tolist() for name, tensor in load_file(file).items()} == {
        name: tensor.tolist() for name, tensor in expected.items()
    }
