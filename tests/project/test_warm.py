"""The warm Python against the real one: what commands print, how they end, and that nothing of them stays."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.support import ROOT
from tests.support.warm import warm_python

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    with warm_python(tmp_path_factory.mktemp("warm")) as made:
        yield made


def run(python, *words, **options):
    done = subprocess.run([python, *words], capture_output=True, text=True, timeout=60, **options)
    return done.returncode, done.stdout, done.stderr.strip().rpartition("\n")[2]


@pytest.mark.parametrize(
    "words",
    [
        ("-c", "import os, sys; print(sys.argv, os.getcwd(), os.environ['MARK'], __name__)", "a", "b c"),
        ("-m", "here", "a"),
        ("here.py", "a"),
        ("-u", "-c", "import sys; print(sys.argv)", "a"),
        ("-c", "raise SystemExit(3)"),
        ("-c", "raise SystemExit('said')"),
        ("-c", "1 / 0"),
        ("-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"),
        ("-c", "import atexit; atexit.register(print, 'last')"),
        ("-c", "import sys; print(sys.stdin.read())"),
        ("-c", "import sys; print(any(name.startswith('ag.') for name in sys.modules))"),
    ],
    ids=str,
)
def test_it_does_what_python_does(python, words, tmp_path):
    (tmp_path / "here.py").write_text("import sys; print(sys.argv[1:], sys.path[0], __name__)")
    options = {"cwd": tmp_path, "env": os.environ | {"MARK": "7"}, "input": "typed"}
    assert run(python, *words, **options) == run(sys.executable, *words, **options)


def test_the_libraries_are_there_and_a_child_is_warm_too(python):
    code = "import subprocess, sys; assert 'lightning.pytorch' in sys.modules; print(sys.argv[1:])\n"
    code += "if len(sys.argv) == 1: print(subprocess.check_output([sys.executable, '-c', CODE, 'x'], text=True))"
    code = f"CODE = {code!r}\n" + code
    assert run(python, "-c", code)[:2] == (0, "[]\n['x']\n\n")


def test_a_client_that_is_killed_takes_its_command_with_it(python):
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    with subprocess.Popen([python, "-c", code], stdout=subprocess.PIPE, text=True) as client:
        worker = int(client.stdout.readline())
        client.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while os.path.exists(f"/proc/{worker}"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert client.returncode == -signal.SIGKILL


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1], ids=lambda signum: signum.name)
def test_signals_reach_the_command(python, signum):
    code = "import signal, sys\n"
    code += f"signal.signal({int(signum)}, lambda *_: sys.exit(7)); print('ready', flush=True); signal.pause()"
    with subprocess.Popen([python, "-c", code], stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout.readline() == "ready\n"
        client.send_signal(signum)
        assert client.wait(timeout=20) == 7


def test_the_server_ends_with_the_process_that_started_it(tmp_path):
    code = f"from tests.support import warm; warm.LIBRARIES = (); warm.serve({str(tmp_path / 'socket')!r}, 'python')"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, **pipes) as server:
        assert server.stdout.readline() == "ready\n"
        server.stdin.close()  # as the end of that process closes it
        assert server.wait(timeout=20) == 0
