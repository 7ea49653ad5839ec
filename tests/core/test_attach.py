"""Ranks that attach together: real processes of one process group."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

import awex_core
from awex_core.errors import ConfigError
from awex_core.meta.server import MetaServer
from awex_core.settings.config import SyncConfig
from tests.rules.tree import ROOT

TOKEN = "test-token"
LIMIT_S = 20

ATTACH_RANK = "tests.support.trainers.attach_rank"


def run_ranks(folder: Path, *what: str) -> list[list[str]]:
    """What each rank says, a line for each call of attach."""
    with MetaServer(TOKEN) as server:
        env = {
            "AWEX_META_SERVER": server.address,
            "AWEX_TOKEN": TOKEN,
            "AWEX_VERIFY": "full",
            "AWEX_SYNC_TIMEOUT": str(LIMIT_S),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'plugins'}",
        }
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", ATTACH_RANK, folder / "store", str(rank), str(len(what)), each],
                cwd=ROOT,
                env=os.environ | env,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, each in enumerate(what)
        ]
        try:
            outputs = [rank.communicate(timeout=100) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), [err[-2000:] for _, err in outputs]
    return [out.splitlines() for out, _ in outputs]


@pytest.mark.parametrize("forgetful", [0, 2])
def test_a_rank_that_forgets_attach_is_named_within_the_limit(tmp_path: Path, forgetful: int) -> None:
    ranks = run_ranks(tmp_path, *("forget" if rank == forgetful else "attach" for rank in range(3)))
    for rank, said in enumerate(ranks):
        if rank != forgetful:
            seconds, _, error = said[0].partition(" ")
            assert error.startswith(
                "SyncTimeout: not all 3 ranks of the trainer's process group met in attach() within 20"
            )
            assert f"; not called by rank(s) {forgetful}" in error and f"given up by rank(s) {rank}" not in error
            assert LIMIT_S - 1 < float(seconds) < LIMIT_S + 30
        assert said[-1].endswith(" attached"), "the group is of use, and ranks that come later meet"


def test_a_rank_with_a_bad_setting_tells_the_others(tmp_path: Path) -> None:
    first, second = run_ranks(tmp_path, "attach", "fail")
    assert "ConfigError: AWEX_VERIFY must be one of off, sampled, full; got 'Full'" in second[0]
    assert "LayoutError: 1 of 2 trainer ranks cannot attach" in first[0]
    assert float(first[0].split()[0]) < LIMIT_S, "it waited for the limit"
    assert first[-1].endswith(" attached") and second[-1].endswith(" attached")


def test_several_processes_without_a_process_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchrun starts them: each would be a trainer of its own, and fence the others."""
    with MetaServer(TOKEN) as server:
        config = SyncConfig(server.address, TOKEN)
        monkeypatch.setenv("WORLD_SIZE", "4")
        with pytest.raises(ConfigError, match=r"one of 4 processes .*init_process_group\(\) before attach\(\)"):
            awex_core.attach(nn.Linear(2, 2), config)
        monkeypatch.setenv("WORLD_SIZE", "1")
        awex_core.attach(nn.Linear(2, 2), config).close()
