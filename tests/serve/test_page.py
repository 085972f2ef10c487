"""The live page, in headless Chromium."""

import base64
import hashlib

import pytest

pytest.importorskip("openai", reason="needs the server's libraries: pip install 'ag[serve]'")
pytest.importorskip("selenium.webdriver", reason="needs selenium: pip install -e '.[dev]'")
import httpx  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

from ag.serve.app import page  # noqa: E402
from tests.support.browser import browser  # noqa: E402
from tests.support.http_server import VOCABULARY, saved, server  # noqa: E402


def test_nothing_comes_from_elsewhere_and_only_its_own_script_runs():
    text, rules = page()
    assert "://" not in text.replace("http://www.w3.org/2000/svg", "")
    script = text.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in rules and "default-src 'none'" in rules


@pytest.mark.slow
@pytest.mark.nightly
def test_it_shows_what_is_answered(tiny_llama, tmp_path):
    folder = saved(tiny_llama(vocab_size=VOCABULARY, max_position_embeddings=8192), tmp_path)
    keys = ("policy=h2o", "budget=0.25", "memory=64MiB", "answer_tokens=8000", "served_name=<b>tiny</b>")
    with browser() as chromium, server(folder, *keys, AG_API_KEY="key") as (address, _):
        wait = WebDriverWait(chromium, 60)
        text = lambda name: chromium.find_element(By.ID, name).text  # noqa: E731
        chromium.get(address)
        wait.until(lambda _: text("state") == "needs its key")
        field = chromium.find_element(By.ID, "key")
        field.send_keys("key\n")
        wait.until(lambda _: text("state") == "ok")
        assert (text("model"), text("policy"), text("running")) == ("<b>tiny</b>", "policy h2o 0.25", "0")
        assert text("none") == "None."

        body = {"model": "<b>tiny</b>", "prompt": "x" * 400, "max_tokens": 7000, "logit_bias": {"2": -100}, "n": 3}
        asking = {"json": body | {"stream": True}, "headers": {"Authorization": "Bearer key"}, "timeout": 60}
        with httpx.stream("POST", f"{address}/v1/completions", **asking):  # the scheduler waits for no reader
            wait.until(lambda _: text("running") == "3" and float(text("speed")) > 0)
            rows = chromium.find_elements(By.CSS_SELECTOR, "#rows tr")
            assert [row.find_elements(By.TAG_NAME, "td")[1].text for row in rows] == ["400"] * 3
            assert 0 < int(text("kept").removesuffix(" %")) < 100 and text("saved") != "0 bytes"
            bars = rows[0].find_elements(By.CSS_SELECTOR, "rect")
            assert len(bars) == 3 and all(0 < float(bar.get_attribute("height")) < 100 for bar in bars)
        wait.until(
            lambda _: text("running") == "0" and text("taken") == text("saved") == "0 bytes" and text("ended") == "3"
        )
        log = [line for line in chromium.get_log("browser") if "401" not in line["message"]]
        assert log == []
