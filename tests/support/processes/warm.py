"""Engine processes whose imports are done: forked from a process that has imported an engine and run nothing of it.

    python -m tests.support.processes.warm SOCKET MODULE...    serves until its standard input ends

An engine spends most of its start on importing the same modules in each of its
processes, on a core each. Tests that start many engines fork them instead:
``start_process`` does so where ``FORKS`` names a folder with a socket for the
environment of the program, and the program's own multiprocessing forks likewise
where it would spawn. Program, arguments, environment and files are what they would be.
Imports no awex code: reference engines are started this way too.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

_ROOT = Path(__file__).resolve().parents[3]

FORKS = "AWEX_TEST_FORKS"
"""Variable with the folder that holds a socket for each environment: ``.venv``, ``.venv-sglang``."""

_START_LIMIT_S = 120.0
_LENGTH = 8


class WarmProcess:
    """What ``subprocess.Popen`` is, as far as tests use it; the process is the fork server's child."""

    def __init__(self, connection: socket.socket, pid: int, stdin: IO[bytes] | None, stdout: IO[bytes] | None) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self.returncode: int | None = None
        self._connection = connection

    def poll(self) -> int | None:
        """Its exit status, once it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended; raises ``subprocess.TimeoutExpired`` if it does not in time."""
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"pid {self.pid}", timeout or 0)
            status = self._connection.recv(64)
            self._connection.close()
            self.returncode = int(status) if status else -signal.SIGKILL
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


Process = subprocess.Popen[bytes] | WarmProcess


def start_process(
    args: Sequence[str | Path], env: Mapping[str, str], log: IO[bytes], *, piped: bool = False, cold: bool = False
) -> Process:
    """Start a program in a session of its own: forked if its environment has a fork server, unless ``cold``.

    What it prints goes to ``log``, or, on standard output, to ``stdout`` if ``piped``, which opens ``stdin`` too.
    """
    program = [str(arg) for arg in args]
    address = Path(os.environ.get(FORKS, "-")) / _environment_of(program[0])
    if cold or not address.is_socket():
        streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE} if piped else {"stdout": log}
        return subprocess.Popen(program, cwd=_ROOT, env=dict(env), stderr=log, start_new_session=True, **streams)
    stderr = log.fileno()
    if not piped:
        with open(os.devnull, "rb") as nothing:
            return _fork(address, program, env, (nothing.fileno(), stderr, stderr), None, None)
    child_in, to_child = os.pipe()
    from_child, child_out = os.pipe()
    try:
        return _fork(
            address, program, env, (child_in, child_out, stderr), open(to_child, "wb", 0), open(from_child, "rb", 0)
        )
    finally:
        os.close(child_in)
        os.close(child_out)


def run_to_end(
    args: Sequence[str | Path], env: Mapping[str, str], *, given: str = "", limit_s: float
) -> subprocess.CompletedProcess[str]:
    """What ``subprocess.run`` gives, of a program that ``start_process`` starts and that is ``given`` this to read.

    Raises:
        subprocess.TimeoutExpired: it ran for longer than ``limit_s``, and was ended.
    """
    with tempfile.TemporaryFile() as log, ThreadPoolExecutor(1) as pool:
        process = start_process(args, env, log, piped=True)
        assert process.stdin is not None and process.stdout is not None
        said = pool.submit(process.stdout.read)
        with process.stdin:
            process.stdin.write(given.encode())
        try:
            status = process.wait(limit_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        stdout = said.result()
        process.stdout.close()
        log.seek(0)
        stderr = log.read().decode(errors="replace")
        return subprocess.CompletedProcess(list(args), status, stdout.decode(errors="replace"), stderr)


def _environment_of(program: str) -> str:
    """The folder name of the virtual environment that a program lies in."""
    return Path(program).parent.parent.name


def _fork(
    address: Path,
    program: Sequence[str],
    env: Mapping[str, str],
    streams: tuple[int, int, int],
    stdin: IO[bytes] | None,
    stdout: IO[bytes] | None,
) -> WarmProcess:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_START_LIMIT_S)
    connection.connect(str(address))
    body = json.dumps({"args": program, "env": dict(env)}).encode()
    socket.send_fds(connection, [len(body).to_bytes(_LENGTH, "big")], streams)
    connection.sendall(body)
    pid = int.from_bytes(_receive(connection, _LENGTH), "big")
    connection.settimeout(None)
    return WarmProcess(connection, pid, stdin, stdout)


def _receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise ConnectionError("the fork server went away")
        data += piece
    return data


class ForkServer:
    """The process with an engine's imports; ends with this object, or with the test run."""

    def __init__(self, python: Path, modules: Sequence[str], env: Mapping[str, str], folder: Path) -> None:
        name = python.parent.parent.name
        self.address, self.log = folder / name, folder / f"{name}.log"
        with self.log.open("wb") as sink:
            self.process = subprocess.Popen(
                [python, "-m", "tests.support.processes.warm", self.address, *modules],
                cwd=_ROOT,
                env=dict(env),
                stdin=subprocess.PIPE,
                stdout=sink,
                stderr=sink,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Wait until it takes requests; raises ``RuntimeError`` with the end of its log if it does not."""
        end = time.monotonic() + _START_LIMIT_S
        while not self.address.exists():
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"no fork server: {self.log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.05)

    def close(self) -> None:
        """End it; the processes that it started are their starters' to end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(10)
        finally:
            self.process.kill()


# --- the fork server -------------------------------------------------------------------------------


def main() -> None:
    """Import, then fork a process for each connection, and tell it when that has ended."""
    address, modules = Path(sys.argv[1]), sys.argv[2:]
    for module in modules:
        importlib.import_module(module)
    ours = [name for name in sys.modules if name.startswith(("awex_core", "vllm_awex", "sglang_awex"))]
    if ours:
        raise RuntimeError(f"engines would start with {ours} imported")
    import gc

    gc.freeze()  # so that collecting in a child does not copy what all share
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{address}.new")
    listener.listen()
    os.rename(f"{address}.new", address)
    ended, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    os.set_blocking(ended, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakeup)
    children: dict[int, socket.socket] = {}
    while True:
        ready = select.select([listener, ended, 0], [], [])[0]
        if 0 in ready:
            return
        if ended in ready:
            os.read(ended, 4096)
            _report_ended(children)
        if listener in ready:
            connection = listener.accept()[0]
            fds = [listener.fileno(), ended, wakeup, *(other.fileno() for other in children.values())]
            children[_serve(connection, fds)] = connection


def _report_ended(children: dict[int, socket.socket]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        connection = children.pop(pid, None)
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
            connection.close()


def _serve(connection: socket.socket, unused: Sequence[int]) -> int:
    """Fork what a connection asks for; returns the pid."""
    length, fds, _, _ = socket.recv_fds(connection, _LENGTH, 3)
    request = json.loads(_receive(connection, int.from_bytes(length, "big")))
    pid = os.fork()
    if pid:
        for fd in fds:
            os.close(fd)
        connection.sendall(pid.to_bytes(_LENGTH, "big"))
        return pid
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for place, fd in enumerate(fds):
            os.dup2(fd, place)
        for fd in [*fds, *unused, connection.fileno()]:
            os.close(fd)
        os.setsid()
        status = _become(request["args"], request["env"])
    finally:
        os._exit(status)


def _become(args: list[str], env: dict[str, str]) -> int:
    """Be the program, to its end; returns its exit status."""
    import atexit
    import threading
    import traceback

    os.environ.clear()
    os.environ.update(env)
    _draw_anew()
    _keep_imports_frozen()
    _look_less_often()
    _fork_where_it_spawns()
    status = 0
    try:
        _run_program(args)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def _run_program(args: list[str]) -> None:
    import runpy

    if args[1] == "-m":
        sys.argv = args[2:]
        runpy.run_module(args[2], run_name="__main__", alter_sys=True)
    elif args[1] == "-c":
        sys.argv = args[1:2] + args[3:]
        exec(args[2], {"__name__": "__main__"})
    else:
        sys.argv = args
        runpy.run_path(args[0], run_name="__main__")


def _draw_anew() -> None:
    """Forked processes would all draw the same random numbers, and ports by them."""
    import random

    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _keep_imports_frozen() -> None:
    """vLLM freezes what there is when it is up, and thaws all when it ends; to collect imports takes seconds."""
    import gc

    gc.freeze = gc.unfreeze = lambda: None


def _look_less_often() -> None:
    """For a second after each message vLLM's workers look for the next one without a pause, on a core each."""
    module: Any = sys.modules.get("vllm.distributed.device_communicators.shm_broadcast")
    if module is not None:
        assert callable(module.sched_yield)
        module.sched_yield = lambda: time.sleep(0.001)


def _fork_where_it_spawns() -> None:
    """Have multiprocessing fork from a process made now, before this one has threads, where it would spawn.

    Children get the environment that their parent has when it starts them, as spawned ones do.
    """
    import multiprocessing.connection
    import multiprocessing.context
    import multiprocessing.forkserver
    import multiprocessing.resource_tracker
    import multiprocessing.spawn

    spawn: Any = multiprocessing.spawn
    get_data, prepare = spawn.get_preparation_data, spawn.prepare

    def get_data_with_environment(name: str) -> dict[str, Any]:
        return {**get_data(name), "environment": dict(os.environ)}

    def prepare_with_environment(data: dict[str, Any]) -> None:
        os.environ.clear()
        os.environ.update(data.pop("environment"))
        _draw_anew()
        prepare(data)

    spawn.get_preparation_data, spawn.prepare = get_data_with_environment, prepare_with_environment
    contexts: Any = multiprocessing.context
    contexts._concrete_contexts["spawn"] = contexts._concrete_contexts["forkserver"]

    server: Any = multiprocessing.forkserver._forkserver  # type: ignore[attr-defined]
    address = multiprocessing.connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    server._forkserver_address = address
    server.ensure_running = multiprocessing.resource_tracker.ensure_running
    alive, server._forkserver_alive_fd = os.pipe()
    starter = os.getpid()
    if os.fork():
        os.close(alive)
        listener.close()
        return
    # SGLang's processes tell their parent of a failure by this signal; it is meant for the one that started them.
    signal.signal(signal.SIGQUIT, lambda *_: os.kill(starter, signal.SIGQUIT))
    os.close(server._forkserver_alive_fd)
    os.dup2(2, 1)  # a program's answers on standard output are its own process's
    try:
        multiprocessing.forkserver.main(listener.detach(), alive, [])
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
