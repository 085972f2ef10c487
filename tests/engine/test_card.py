"""All tensors of an operation are on one device, also where that is not the CPU."""

import subprocess

import pytest

from tests.support.warm import started


@pytest.mark.slow
def test_a_device_of_its_own_gives_what_the_cpu_gives():
    done = subprocess.run([started(), "-m", "tests.engine.on_card"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr
