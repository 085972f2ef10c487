"""The warm Python against the real one: what commands print, how they end, and that nothing of them stays."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.support.warm import started

pytestmark = pytest.mark.slow


@pytest.fixture
def python():
    return started()


def run(python, *words, **options):
    done = subprocess.run([python, *words], capture_output=True, text=True, timeout=60, **options)
    return done.returncode, done.stdout, done.stderr.strip().rpartition("\n")[2]


@pytest.mark.parametrize(
    "words",
    [
        ("-u", "-c", "import os, sys; print(sys.argv, os.getcwd(), os.environ['MARK'], sys.stdin.read())", "a"),
        ("-m", "here", "a"),
        ("here.py", "a"),
        ("-c", "import atexit; atexit.register(print, 'last'); raise SystemExit('said')"),
        ("-c", "1 / 0"),
        ("-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"),
        ("-c", "import sys; print(any(name.startswith('ag.') for name in sys.modules))"),
    ],
    ids=str,
)  # fmt: skip
def test_it_does_what_python_does(python, words, tmp_path):
    (tmp_path / "here.py").write_text("import sys; print(sys.argv[1:], sys.path[0], __name__)")
    options = {"cwd": tmp_path, "env": os.environ | {"MARK": "7"}, "input": "typed"}
    assert run(python, *words, **options) == run(sys.executable, *words, **options)


def test_what_it_spawns_is_warm_too(python, tmp_path, request):
    """Through multiprocessing, with the pipes of a pool; torch is there before anything imports it."""
    if request.config.pluginmanager.hasplugin("_cov"):
        pytest.skip("coverage ends twice in a spawned fork, and says so: run it without --cov")
    (tmp_path / "here.py").write_text("import sys\n\n\ndef work(x):\n    return x + 1, 'torch' in sys.modules\n")
    code = "from concurrent.futures import ProcessPoolExecutor as Pool; from multiprocessing import get_context\n"
    code += "from here import work; print(*Pool(2, get_context('spawn')).map(work, range(3)))"
    options = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(tmp_path)}}
    assert run(python, "-c", code, **options) == (0, "(1, True) (2, True) (3, True)\n", "")


def test_signals_reach_the_command_and_a_killed_client_takes_it_along(python):
    code = "import os, signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
    code += "print(os.getpid(), flush=True); signal.pause()"
    for signum, ends in ((signal.SIGTERM, 7), (signal.SIGKILL, -signal.SIGKILL)):
        with subprocess.Popen([python, "-c", code], stdout=subprocess.PIPE, text=True) as client:
            worker = int(client.stdout.readline())
            client.send_signal(signum)
            assert client.wait(timeout=20) == ends
        deadline = time.monotonic() + 20
        while os.path.exists(f"/proc/{worker}"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
