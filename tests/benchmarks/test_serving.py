"""The load that servers are measured with is drawn as it says, and each way of answering it works."""

import json
import statistics

import pytest

from ag.errors import UserError
from benchmarks import serving
from tests.support.refused import refuses


def test_requests_are_drawn_with_a_seed():
    config = serving.Config(requests=400, rate=120.0, prompt=[20, 40], answer=[3, 5], system=16)
    found = serving.asks(config, range(500))
    assert found == serving.asks(config, range(500)) != serving.asks(serving.Config(requests=400, seed=1), range(500))
    assert {len(ask.tokens) for ask in found} == set(range(36, 57)) and {ask.answer for ask in found} == {3, 4, 5}
    assert len({tuple(ask.tokens[:16]) for ask in found}) == 1 < len({tuple(ask.tokens[:17]) for ask in found})
    gaps = [later.at - sooner.at for sooner, later in zip(found, found[1:], strict=False)]
    # of 399 exponential gaps the mean is within five of its deviations of half a second
    assert abs(statistics.fmean(gaps) - 0.5) < 5 * 0.5 / 399**0.5 and min(gaps) > 0


def test_policies_of_the_command_line():
    assert serving.parts("full") == ("full", None, "prefill", "float")
    assert serving.parts("h2o 0.25 every") == ("h2o", "0.25", "every", "float")
    assert serving.parts("full null prefill int8") == ("full", None, "prefill", "int8")
    assert serving.called("server", "gates:a/b 0.3 every") == "server, gates 0.3 every"
    with refuses(UserError, "h2o 0.25 every int8 9", "KV_DTYPE"):
        serving.parts("h2o 0.25 every int8 9")


def test_the_table():
    found = serving.Found("one", first=[1.0, 3.0], between=[0.1, 0.2], seconds=30.0, tokens=60, at_once=2, peak=2**30)
    found.take(10.0, [12.0, 12.5])
    assert found.first == [1.0, 3.0, 2.0] and found.between == [0.1, 0.2, 0.5]
    row = serving.table([found]).splitlines()[-1].split("|")[1:-1]
    assert [cell.strip() for cell in row[:3]] == ["one", "6.0", "2.0"]
    assert row[3].strip().startswith("2.0, ") and row[4].strip().startswith("200, ") and row[6].strip() == "1.00"


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("through", serving.BY)
def test_each_way_of_answering(smollm2, tmp_path, through):
    pytest.importorskip("fastapi", reason="needs ag[serve]: bash scripts/test.sh")
    words = [f"model={smollm2}", f"through=[{through}]", "policies=[h2o 0.25 every]", "requests=2", "prompt=[40,50]"]
    words += ["answer=[4,5]", "rate=6000", f"output={tmp_path}", "threads=1"]
    assert serving.main(words) == 0
    (found,) = json.loads((tmp_path / "serving.json").read_text())["found"]
    assert len(found["first"]) == 2 and 8 <= found["tokens"] <= 10
    assert all(x > 0 for x in found["first"] + found["between"]) and found["seconds"] > max(found["first"])
    assert found["peak"] > 2**28
