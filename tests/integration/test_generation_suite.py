"""transformers' own generation tests, with an eviction cache where ``generate`` makes a DynamicCache."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

FOLDER = os.environ.get("TRANSFORMERS_TESTS", "")
TYPES = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "olmo2", "granite", "cohere", "smollm3"]
#: What may fail, by a part of a test's name, and why.
MAY_FAIL = {
    "dict_output": "asks for output_attentions, which an eviction cache refuses",
    "compil": "wants a compiled graph of a whole step, which leaves the cache out",
    "static_cache": "looks inside a cache of fixed size",
    "continue_from": "looks at the keys and values inside a cache",
    "past_key_values_format": "looks at the keys and values inside a cache",
    "cache_format": "looks at the keys and values inside a cache",
}
LEAST = 20  # tests of each type, else something else was run


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    not FOLDER,
    reason="needs transformers' tests: bash scripts/transformers_tests.sh newest FOLDER, TRANSFORMERS_TESTS=FOLDER",
)
@pytest.mark.parametrize("name", [*TYPES, "gpt_oss"])
def test_what_generates_with_a_dynamic_cache_does_so_with_an_eviction_cache(name: str) -> None:
    """What fails is in the list of what may, or fails with transformers' own cache too."""
    assert (Path(FOLDER) / "tests" / "generation" / "test_utils.py").is_file(), FOLDER
    failed, passed = outcomes(name, eviction=True)
    failed = {test for test in failed if not any(part in test for part in MAY_FAIL)}
    if failed:
        failed -= outcomes(name, eviction=False)[0]
    assert failed == set()
    assert len(passed) >= LEAST


def outcomes(name: str, eviction: bool) -> tuple[set[str], set[str]]:
    """The tests of a model type that failed, and those that passed."""
    plugin = ["-p", "generation_suite"] if eviction else []
    file = f"tests/models/{name}/test_modeling_{name}.py"
    path = os.pathsep.join([str(ROOT / "tests" / "support"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", *plugin, file],
        cwd=FOLDER,
        env=os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 1), done.stdout[-2000:] + done.stderr[-2000:]
    found = re.findall(r"^(PASSED|FAILED|ERROR) \S+::(\w+)", done.stdout, re.MULTILINE)
    return {test for how, test in found if how != "PASSED"}, {test for how, test in found if how == "PASSED"}
