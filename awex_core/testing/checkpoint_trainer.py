"""A trainer that does not train: it holds even slices of a checkpoint's tensors, and publishes them.

    python -m awex_core.testing.checkpoint_trainer CHECKPOINT --rank 0 --world 2 --run NAME

One process a rank; the settings come from the environment, see ``SyncConfig.from_env``. A line of standard
input is a command, a line of standard output its answer, both JSON::

    {"do": "load", "checkpoint": "FOLDER"}                   other weights, into the same memory
    {"do": "wait_for_engines", "count": 1, "timeout_s": 60}
    {"do": "write", "version": 1, "options": {}}             options of ``WeightWriter.write_weights``
    {"do": "join", "run": "OTHER", "omit": ["NAME"]}         leave, and join as a run that lacks some tensors
    {"do": "leave"}

    {"ok": ...} or {"error": "SyncFailed: ..."}

The first answer, to no command, says that all ranks have joined. A rank leaves and ends when its input does.
``CheckpointTrainer`` starts such ranks and speaks to them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import IO, Any

import torch

from awex_core.checkpoint.description import read_headers
from awex_core.checkpoint.from_disk import read_checkpoint
from awex_core.errors import LayoutError
from awex_core.layout import CanonicalTensor, Layout
from awex_core.layout.live import Memory, ShardCollector
from awex_core.settings.config import SyncConfig
from awex_core.sync.writer import WeightWriter

PATIENCE_S = 120.0
"""Longest time a rank may take to start, or to answer."""


# --- one rank ---------------------------------------------------------------------------------------


class CheckpointSlice:
    """One rank's rows of every tensor of a checkpoint, in memory that stays. Rank 0 holds what is too short to cut."""

    def __init__(self, checkpoint: Path, rank: int, world: int, device: str = "cpu") -> None:
        self.rank, self.world = rank, world
        self.manifest = read_headers(checkpoint)
        self._parts: dict[str, tuple[int, torch.Tensor]] = {}
        for name, tensor in read_checkpoint(checkpoint):
            begin, rows = self._rows(tensor)
            if rows.numel():
                self._parts[name] = begin, rows.to(device, copy=True)

    def _rows(self, tensor: torch.Tensor) -> tuple[int, torch.Tensor]:
        if not tensor.dim() or len(tensor) < self.world:
            return 0, tensor if self.rank == 0 else tensor.new_empty(0)
        begin, end = (len(tensor) * rank // self.world for rank in (self.rank, self.rank + 1))
        return begin, tensor[begin:end]

    def load(self, checkpoint: Path) -> None:
        """Another checkpoint of the same model, into the same memory.

        Raises:
            LayoutError: it is another model's.
        """
        found = read_headers(checkpoint)
        if found != self.manifest:
            raise LayoutError(f"{checkpoint} has other tensors: {sorted({*found} ^ {*self.manifest})[:10]}")
        for name, tensor in read_checkpoint(checkpoint):
            if name in self._parts:
                self._parts[name][1].copy_(self._rows(tensor)[1])

    def describe(self, manifest: Collection[CanonicalTensor]) -> tuple[Layout, Memory]:
        """Layout and memory of this rank's share of some of the tensors."""
        collector = ShardCollector()
        for tensor in manifest:
            if tensor.name in self._parts:
                begin, rows = self._parts[tensor.name]
                start = (begin, *[0] * (rows.dim() - 1)) if rows.dim() else ()
                collector.add(tensor.name, tensor.shape, start, rows)
        return collector.build()


class _Rank:
    """What one rank does when told; a method is a command."""

    def __init__(self, checkpoint: Path, rank: int, world: int, device: str) -> None:
        self._config = SyncConfig.from_env()
        self._slice = CheckpointSlice(checkpoint, rank, world, device)
        self._writer: WeightWriter | None = None

    @property
    def writer(self) -> WeightWriter:
        if self._writer is None:
            raise LayoutError("this rank has left the job; let it join first")
        return self._writer

    def join(self, run: str, omit: Collection[str] = ()) -> str:
        self.leave()
        unknown = {*omit} - {tensor.name for tensor in self._slice.manifest}
        if unknown:
            raise LayoutError(f"there is no {', '.join(sorted(unknown))} to omit")
        manifest = [tensor for tensor in self._slice.manifest if tensor.name not in omit]
        layout, memory = self._slice.describe(manifest)
        rank, world = self._slice.rank, self._slice.world
        self._writer = WeightWriter.join(
            layout, memory, rank=rank, world=world, run=run, manifest=manifest, config=self._config
        )
        return run

    def load(self, checkpoint: str) -> str:
        self._slice.load(Path(checkpoint))
        return checkpoint

    def wait_for_engines(self, count: int, timeout_s: float) -> list[str]:
        return self.writer.wait_for_engines(count, timeout_s=timeout_s)

    def write(self, version: int, options: dict[str, Any]) -> dict[str, Any]:
        result = self.writer.write_weights(version, **options)
        return dataclasses.asdict(result) | {"version": str(result.version)}

    def leave(self) -> str:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        return "left"


def main() -> None:
    """Join, then answer commands until standard input ends. An error is an answer, not the end."""
    args = _arguments()
    rank = _Rank(args.checkpoint, args.rank, args.world, args.device)
    try:
        _answer({"ok": rank.join(args.run, args.omit)})
        for line in sys.stdin:
            command = json.loads(line)
            try:
                answer = {"ok": getattr(rank, command.pop("do"))(**command)}
            except Exception as error:  # noqa: BLE001 - whoever gave the command is told
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            _answer(answer)
    finally:
        rank.leave()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="folder with safetensors files")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="where the weights lie: cpu, cuda, cuda:1 ...")
    parser.add_argument("--run", default="", help="a name for this run, new each time and the same for all its ranks")
    parser.add_argument("--omit", action="append", default=[], metavar="NAME", help="a tensor to leave out")
    args = parser.parse_args()
    if args.world > 1 and not args.run:
        parser.error("several ranks need --run NAME")
    args.run = args.run or uuid.uuid4().hex
    return args


def _answer(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


# --- all ranks, from outside ------------------------------------------------------------------------


class TrainerError(RuntimeError):
    """A rank answered with an error; or it died or was too slow, then with the end of its log."""


def start_rank(args: list[str], env: Mapping[str, str], log: IO[bytes]) -> subprocess.Popen[str]:
    """Start a rank's process, in a session of its own; standard input and output are pipes of text."""
    return subprocess.Popen(
        [sys.executable, "-m", __spec__.name, *args],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        start_new_session=True,
    )


class TrainerRank:
    """One rank as a process."""

    def __init__(self, args: list[str], log: Path, env: Mapping[str, str]) -> None:
        self.log = log
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        with log.open("ab") as sink:
            self.process = start_rank(args, {**os.environ, "OMP_NUM_THREADS": "1", **env}, sink)
        self._reader = threading.Thread(target=self._collect, daemon=True)
        self._reader.start()

    def _collect(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._answers.put(line)
        self._answers.put("")

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def send(self, do: str, **arguments: Any) -> None:
        """Give a command without waiting; that the process has ended is for ``receive`` to say."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # a broken pipe, or one that ``kill`` has closed
            self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self.process.stdin.flush()

    def receive(self, limit_s: float = PATIENCE_S) -> Any:
        """The next answer; raises ``TrainerError`` if it is an error, or does not come."""
        try:
            line = self._answers.get(timeout=limit_s)
        except queue.Empty:
            raise TrainerError(f"no answer within {limit_s:g} s\n{self._tail()}") from None
        if not line:
            self._answers.put("")  # nothing will come any more, however often it is asked
            raise TrainerError(f"the process ended with {self.process.wait()}\n{self._tail()}")
        answer = json.loads(line)
        if "error" in answer:
            raise TrainerError(answer["error"])
        return answer["ok"]

    def _tail(self, count: int = 2000) -> str:
        return f"--- {self.log.name}\n" + self.log.read_text(errors="replace")[-count:]

    def kill(self) -> None:
        """End it at once (SIGKILL)."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):  # what it did not read is lost
                    stream.close()

    def close(self, grace_s: float = 20.0) -> None:
        """Close its input, so that it leaves and ends; kill it after ``grace_s``."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(grace_s)
        self.kill()


class CheckpointTrainer:
    """All ranks of such a trainer, as processes. They have joined once it is made."""

    def __init__(
        self,
        checkpoint: Path,
        folder: Path,
        env: Mapping[str, str],
        *,
        world: int = 1,
        omit: Collection[str] = (),
        device: str = "cpu",
    ) -> None:
        """Start them.

        Args:
            checkpoint: the first weights.
            folder: for the ranks' logs; made if missing.
            env: what the ranks need to find the meta server, besides this process's own environment.
            world: how many ranks.
            omit: tensors to leave out.
            device: where the ranks keep their weights.

        Raises:
            TrainerError: some rank did not start or could not join.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.run = uuid.uuid4().hex
        shared = ["--world", str(world), "--run", self.run, "--device", device, *(f"--omit={name}" for name in omit)]
        self.ranks: list[TrainerRank] = []
        try:
            for rank in range(world):
                args = [str(checkpoint), "--rank", str(rank), *shared]
                self.ranks.append(TrainerRank(args, folder / f"rank{rank}.log", env))
            self.receive()
        except BaseException:
            self.kill()
            raise

    def send(self, do: str, **arguments: Any) -> None:
        """Give all ranks a command without waiting."""
        for rank in self.ranks:
            rank.send(do, **arguments)

    def receive(self, limit_s: float = PATIENCE_S) -> list[Any]:
        """Every rank's next answer; raises ``TrainerError``, once all have answered, with every error among them."""
        end = time.monotonic() + limit_s
        answers, faults = [], []
        for rank in self.ranks:
            try:
                answers.append(rank.receive(max(end - time.monotonic(), 0)))
            except TrainerError as error:
                faults.append(str(error))
        if faults:
            raise TrainerError("\n".join(faults))
        return answers

    def all(self, do: str, limit_s: float = PATIENCE_S, **arguments: Any) -> list[Any]:
        """Give all ranks a command; returns their answers."""
        self.send(do, **arguments)
        return self.receive(limit_s)

    def load(self, checkpoint: Path) -> None:
        """Other weights, into the same memory."""
        self.all("load", checkpoint=str(checkpoint))

    def join(self, omit: Collection[str] = ()) -> None:
        """Leave, and join again as another run."""
        self.run = uuid.uuid4().hex
        self.all("join", run=self.run, omit=list(omit))

    def publish(self, version: int, **options: Any) -> dict[str, Any]:
        """Write the weights as they are; returns rank 0's result."""
        return dict(self.all("write", version=version, options=options)[0])

    def kill(self) -> None:
        """End every rank at once."""
        for rank in self.ranks:
            rank.kill()

    def close(self) -> None:
        """Leave the job and end."""
        for rank in self.ranks:
            rank.close()


if __name__ == "__main__":
    main()
