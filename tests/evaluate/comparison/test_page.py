"""The page in headless Chromium."""

import re

import pytest

from ag.evaluate.comparison import figures
from ag.evaluate.comparison.page import render
from ag.evaluate.comparison.rows import Comparison
from tests.support import made_up
from tests.support.browser import browser

pytest.importorskip("selenium.webdriver", reason="needs selenium: pip install -e '.[dev]'")
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import Select  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.nightly]  # a browser


@pytest.fixture(scope="module")
def chromium():
    """A browser without network, which logs its console."""
    with browser() as chromium:
        chromium.execute_cdp_cmd("Network.setBlockedURLs", {"urls": ["http*://*"]})
        yield chromium


@pytest.fixture
def page(chromium, compared):
    """`page(width, dark)`: the report, loaded without a word on the console."""

    def load(width=1200, dark=False, folder=compared.folder):
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        chromium.get((folder / "report.html").as_uri())
        return chromium

    yield load
    assert chromium.get_log("browser") == []


@pytest.fixture(scope="module")
def led(tmp_path_factory):
    """A page with a verdict, two curves and rows that it does not show."""
    folder = tmp_path_factory.mktemp("led")
    comparison = Comparison(list(made_up.comparison(folder).cells.values()), folder, hidden=["ppl: cake 0.5"])
    (folder / "report.html").write_text(render(comparison, figures.all_charts(comparison)))
    return folder


def column(table, number):
    """The numbers of a column; None where there is none."""
    rows = table.find_elements(By.CSS_SELECTOR, "tbody tr")
    texts = [row.find_elements(By.CSS_SELECTOR, "td")[number].get_attribute("textContent") for row in rows]
    return [float(re.match(r"[-+.0-9]+", text)[0]) if text else None for text in texts]


def by_number(values, down=False):
    return sorted((v for v in values if v is not None), reverse=down) + [v for v in values if v is None]


def test_sorting_by_click_and_by_keyboard(page):
    table = page().find_elements(By.CSS_SELECTOR, "table.sortable")[1]
    heads = table.find_elements(By.CSS_SELECTOR, "thead th")
    assert heads[3].text.startswith("nats per token")
    before = column(table, 3)
    assert before != by_number(before)
    heads[3].find_element(By.TAG_NAME, "button").click()
    assert heads[3].get_attribute("aria-sort") == "ascending" and column(table, 3) == by_number(before)
    heads[3].find_element(By.TAG_NAME, "button").send_keys(Keys.ENTER)
    assert heads[3].get_attribute("aria-sort") == "descending" and column(table, 3) == by_number(before, down=True)
    differences = column(table, 4)
    heads[4].find_element(By.TAG_NAME, "button").send_keys(Keys.SPACE)
    assert heads[3].get_attribute("aria-sort") is None
    assert column(table, 4) == by_number(differences) and column(table, 4)[-1] is None  # the baseline has no difference


def test_the_viewer_shows_what_was_kept(page, compared):
    browser = page()
    views = {row.name: compared.cells[row.key].views for row in compared.of_task("ppl")}
    selects = {name: Select(browser.find_element(By.ID, name)) for name in ("prompt", "policy", "layer", "head")}
    assert [option.text for option in selects["policy"].options] == [*views]
    assert [option.text for option in selects["layer"].options] == ["all layers", "0", "1", "2"]
    selects["prompt"].select_by_index(1)
    text = browser.find_element(By.ID, "text")
    assert text.get_attribute("textContent") == "</script><script>alert(1)</script> <img "
    assert browser.execute_script("return [document.scripts.length, document.images.length]") == [2, 0]
    for name in ("full", "h2o 0.25", "snapkv@pyramid 0.5"):
        selects["policy"].select_by_visible_text(name)
        for layer, head in ((0, 0), (2, 1)):
            selects["layer"].select_by_visible_text(str(layer))
            selects["head"].select_by_visible_text(str(head))
            kept = views[name][1].kept[layer, head]
            tokens = browser.find_elements(By.CSS_SELECTOR, "#text > *")
            assert [token.tag_name == "span" for token in tokens] == kept.tolist()
            assert f"{kept.sum()} of {len(kept)} tokens kept" in browser.find_element(By.ID, "summary").text
    selects["head"].select_by_visible_text("all heads")
    kept = views["snapkv@pyramid 0.5"][1].kept[2]
    token = browser.find_elements(By.CSS_SELECTOR, "#text > *")[3]
    assert token.get_attribute("title") == f"token 3: kept by {kept[:, 3].sum()} of 2"
    selects["prompt"].select_by_index(2)  # the other choices stay
    assert selects["policy"].first_selected_option.text == "snapkv@pyramid 0.5"


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_the_first_sections_fit(page, led, width, dark):
    """The verdict and two curves; a narrow screen shows them below each other."""
    browser = page(width, dark, led)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    wide = """return [...document.querySelectorAll("body *")].filter(e => !e.closest(".scroll *, svg *") &&
        e.getBoundingClientRect().right > innerWidth + 1).map(e => e.tagName + e.id)"""
    assert browser.execute_script(wide) == []
    titles = [title.text for title in browser.find_elements(By.TAG_NAME, "h2")]
    assert titles[:3] == ["Verdict", "Quality against memory", "Leaderboard"]
    verdicts = [one.text.partition(", 0.")[0] for one in browser.find_elements(By.CSS_SELECTOR, "#first > ul li")]
    assert verdicts == [f"At 50 % of the memory (budget 0.5), {task}: mine" for task in made_up.TASKS]
    one, two = (chart.rect for chart in browser.find_elements(By.CSS_SELECTOR, ".two .chart"))
    beside = one["y"] == two["y"] and two["x"] >= one["x"] + one["width"]
    assert beside if width > 1000 else two["y"] > one["y"] + one["height"] - 1
    boxes, hints = (browser.find_elements(By.CSS_SELECTOR, name) for name in (".scroll", ".hint"))
    more = [browser.execute_script("return arguments[0].scrollWidth > arguments[0].clientWidth", box) for box in boxes]
    assert [hint.is_displayed() for hint in hints] == more and more[0] == (width == 390)
