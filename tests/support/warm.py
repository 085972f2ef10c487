"""A Python that starts at once: a fork of a server process that has already imported the libraries.

The server imports other projects' libraries only, none of this one's. What a command changes ends with its process, and
processes that it spawns through multiprocessing start as quickly. The libraries see the server's environment while they
are imported; with ``TRITON_INTERPRET=1`` Triton's interpreter is made quick.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import gc
import hashlib
import json
import multiprocessing.spawn
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from filelock import FileLock

from tests.support import ROOT
from tests.support.interpreter import make_quick

LIBRARIES = ("torch", "transformers", "lightning.pytorch", "peft", "datasets", "torchmetrics", "omegaconf")
MOST_FILES = 253  # of a message, Linux
CLIENT = """\
#!{python} -ISs
import json, os, signal, socket, sys

opened = "/proc/self/fd/"
files = [int(name) for name in os.listdir(opened) if os.path.exists(opened + name)]  # not that of the listing itself
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
told = {{"words": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd(), "files": files}}
told = json.dumps(told).encode()
socket.send_fds(server, [len(told).to_bytes(8, "big")], files)
server.sendall(told)
worker = int.from_bytes(server.recv(4), "big")
for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(signum, lambda signum, _: os.kill(worker, signum))
server.sendall(b"1")
code = int.from_bytes(server.recv(4), "big", signed=True)
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@functools.cache
def started(**environment: str) -> str:
    """Return the path of a program that stands for Python: ``-u`` or not, ``-m MODULE``, ``-c CODE`` or a script.

    Its server ends with this process, or with the process that hands tests to several, which share one server for each
    environment.
    """
    shared = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    watched = os.getppid() if shared else os.getpid()
    if shared:
        name = hashlib.sha256(repr((shared, sorted(environment.items()))).encode()).hexdigest()[:16]
        folder = Path(tempfile.gettempdir()) / f"warm-python-{name}"
        folder.mkdir(exist_ok=True)
    else:
        folder = Path(tempfile.mkdtemp(prefix="warm-python-"))
    address, python = folder / "socket", folder / "python"
    with FileLock(folder / "lock"):
        if not python.exists():
            command = [sys.executable, "-m", "tests.support.warm", str(address), str(python), str(watched)]
            server = subprocess.Popen(
                command, text=True, cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE
            )
            assert server.stdout is not None and server.stdout.readline() == "ready\n"
            python.write_text(CLIENT.format(python=sys.executable, address=str(address)))
            python.chmod(0o755)
    return str(python)


def serve(address: str, python: str, watched: str) -> NoReturn:
    """Import the libraries, and answer each client with a new process, until the watched process ends."""
    end = os.pidfd_open(int(watched))
    for name in LIBRARIES:
        import_module(name)
    if os.environ.get("TRITON_INTERPRET") == "1":
        make_quick()
    gc.collect()
    gc.freeze()  # commands look at their own objects alone, and leave those of the libraries where they are shared
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    print("ready", flush=True)
    while end not in select.select([listener.fileno(), end], [], [])[0]:
        client, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            attend(client, python)
        client.close()
        while os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG):
            pass
    shutil.rmtree(Path(address).parent, ignore_errors=True)
    os._exit(0)


def attend(client: socket.socket, python: str) -> NoReturn:
    """Run a client's command, send its exit code (negative: a signal); a client that ends takes the command with it."""
    size, descriptors, _, _ = socket.recv_fds(client, 8, MOST_FILES)
    with client.makefile("rb") as file:
        told = json.loads(file.read(int.from_bytes(size, "big")))
    waiting, starting = os.pipe()  # the command starts when its client passes signals on
    worker = os.fork()
    if worker == 0:
        client.close()
        os.close(starting)
        os.read(waiting, 1)
        os.close(waiting)
        place(dict(zip(told["files"], descriptors, strict=True)))
        os._exit(work(told["words"], told["environment"], told["folder"], python))
    for descriptor in descriptors:
        os.close(descriptor)
    with suppress(OSError):  # a client that is gone
        client.sendall(worker.to_bytes(4, "big"))
        client.recv(1)
    os.close(starting)
    ended = os.pidfd_open(worker)
    if ended not in select.select([client.fileno(), ended], [], [])[0]:
        os.kill(worker, signal.SIGKILL)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    client.sendall(code.to_bytes(4, "big", signed=True))
    os._exit(0)


def place(files: dict[int, int]) -> None:
    """Give open files the numbers that the client had them under."""
    beyond = max(*files, *files.values()) + 1
    moved = {number: fcntl.fcntl(file, fcntl.F_DUPFD, beyond) for number, file in files.items()}
    for file in files.values():
        os.close(file)
    for number, file in moved.items():
        os.dup2(file, number)
        os.close(file)


def work(words: list[str], environment: dict[str, str], folder: str, python: str) -> int:
    """Do what Python does with these words; returns the exit code."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.executable = python
    multiprocessing.spawn.set_executable(python)
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]  # another checkout has its own
    code: object = 0
    try:
        _run(words)
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if not stream.closed:  # multiprocessing's tracker closes its own
            stream.flush()
    return code or 0


def _run(words: list[str]) -> None:
    while words[0].startswith("-") and words[0] not in ("-m", "-c"):  # torchrun's -u; multiprocessing's are in force
        if words[0] == "-u":
            sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
        words = words[1:]
    first, *rest = words
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    place = str(Path(first).resolve().parent) if first not in ("-m", "-c") else os.getcwd() if first == "-m" else ""
    sys.path[:] = [place, *filter(None, given), *sys.path[1:]]
    if first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = words
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    serve(*sys.argv[1:])
