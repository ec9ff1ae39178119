"""The report as people use it: in a real browser, on a wide screen and on a phone, by light and by dark."""

from __future__ import annotations

import csv
import re
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from helpers.browser import browser, needs_browser, requests, set_scheme

pytest.importorskip("matplotlib")
pytest.importorskip("plotly")

from made_up_runs import HOSTILE, diverged, run

from ngplus.lab import collection
from ngplus.lab.report.curves import groups
from ngplus.lab.report.page import render
from ngplus.lab.runs import Run

pytestmark = needs_browser

PHONE, SCREEN = 390, 1280
BOXES = """return [...document.querySelectorAll(arguments[0])].map((one) => {
    const box = one.getBoundingClientRect();
    return [box.left, box.right, box.width, box.height];
});"""
TABLE = """return [...document.querySelectorAll("table.numbers tbody tr")].map((row) =>
    [...row.cells].map((cell) => cell.textContent));"""


def made() -> list[Run]:
    runs = [run("ngadam", s, 0.2) for s in range(2)] + [run(name) for name in (HOSTILE, "=1+1")]
    return [*runs, run("sgd", 0, 0.02), diverged("sgd", 1), diverged("adam")]


class Page:
    """The page in a browser."""

    def __init__(self, driver: Any, folder: Path) -> None:
        self.driver, self.folder = driver, folder
        path = folder / "report.html"
        path.write_text(render(groups(made()), "The title", date(2026, 1, 31)))
        driver.get(path.as_uri())

    def js(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def click(self, selector: str, number: int = 0) -> None:
        element = self.driver.find_elements("css selector", selector)[number]
        self.js("arguments[0].scrollIntoView({block: 'center'})", element)
        element.click()

    def draw_all(self) -> None:
        """Charts are drawn when they come near the screen."""
        self.js("for (const one of document.querySelectorAll('.chart')) one.scrollIntoView()")
        self.js("window.dispatchEvent(new Event('beforeprint'))")
        until(lambda: self.js("return document.querySelectorAll('.chart .main-svg').length") >= 6)

    def lines(self) -> int:
        """In the first chart."""
        return int(self.js("return document.querySelector('.chart').querySelectorAll('.js-line').length"))

    def layout(self, path: str) -> Any:
        """Of the first chart."""
        return self.js(f"return document.querySelector('.chart').layout.{path}")

    def shades(self) -> list[int]:
        """The brightness of the ground of the page, and of the first chart."""
        found = self.js(
            "return ['body', '.chart .main-svg'].map((one) => getComputedStyle(document.querySelector(one))"
            ".backgroundColor)"
        )
        return [sum(int(number) for number in re.findall(r"\d+", text)[:3]) for text in found]


def until(done: Callable[[], bool]) -> None:
    for _ in range(100):
        if done():
            return
        time.sleep(0.1)
    assert done()


@pytest.fixture(scope="module")
def screen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    folder = tmp_path_factory.mktemp("screen")
    with browser(folder, SCREEN) as driver:
        yield Page(driver, folder)


def assert_fits(page: Page, width: int, columns: int) -> None:
    page.draw_all()
    assert page.js("return document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
    figures, charts = (page.js(BOXES, selector) for selector in ("figure", ".chart .main-svg"))
    assert len(figures) == 6
    assert len({round(left) for left, *_ in figures}) == columns
    assert all(wide > 300 and 0 <= left < right <= width for left, right, wide, _ in figures)
    assert all(right <= width and high > 200 for _, right, _, high in charts if high > 0)


def assert_quiet(page: Page, opened: bool = True) -> None:
    """Nothing fetched but the page itself, no error, and nothing that the policy has refused."""
    fetched = {url for url in requests(page.driver) if not url.startswith(("blob:", "data:"))}
    assert fetched == ({page.driver.current_url} if opened else set())
    assert page.driver.get_log("browser") == []


def test_on_a_phone(tmp_path: Path) -> None:
    with browser(tmp_path, PHONE, phone=True) as driver:
        set_scheme(driver, "dark")
        page = Page(driver, tmp_path)
        assert_fits(page, PHONE, 1)
        assert max(page.shades()) < 200
        assert page.layout("dragmode") is False  # a finger scrolls the page
        assert_quiet(page)


def test_on_a_screen(screen: Page) -> None:
    assert_fits(screen, SCREEN, 2)
    assert screen.driver.title == "The title: digits, 2026-01-31, ngplus of an unknown version"  # no name changed it
    assert_quiet(screen)


def test_the_charts_follow_the_system_from_light_to_dark(screen: Page) -> None:
    screen.draw_all()
    set_scheme(screen.driver, "light")
    until(lambda: min(screen.shades()) > 600)
    set_scheme(screen.driver, "dark")
    until(lambda: max(screen.shades()) < 200)
    set_scheme(screen.driver, "light")


def test_values_under_the_pointer(screen: Page) -> None:
    from selenium.webdriver import ActionChains

    screen.draw_all()
    screen.js("scrollTo(0, 0)")
    plot = screen.driver.find_element("css selector", ".chart .nsewdrag")
    screen.js("arguments[0].scrollIntoView({block: 'center'})", plot)
    wide = plot.size["width"]
    shown = ""
    for part in (0.1, 0.2):  # step 35 of 50 is at 0.7 of the width, 0.2 to the right of the middle
        ActionChains(screen.driver).move_to_element_with_offset(plot, int(part * wide), 0).perform()
    until(lambda: bool(screen.js("return document.querySelector('.hoverlayer .legend') !== null")))
    shown = screen.js("return document.querySelector('.hoverlayer').textContent")
    assert "ngadam : 0.9941" in shown  # 1 - exp(-0.2 * 35), and 0.01 less with seed 1
    assert "sgd : 0.5034" in shown
    assert HOSTILE[:20] in shown


def test_each_seed_and_each_optimizer_on_demand(screen: Page) -> None:
    screen.draw_all()
    before = screen.lines()
    screen.click(".legend input[name=seeds]")
    until(lambda: screen.lines() == before + 5)  # those of diverged runs are there from the beginning
    screen.click(".legend input")
    until(lambda: screen.lines() == before + 5 - 5)  # NGAdam's: the mean, two edges of the band, two seeds
    screen.click(".legend input")
    screen.click(".legend input[name=seeds]")
    until(lambda: screen.lines() == before)


def test_a_run_that_diverged_ends_in_a_cross(screen: Page) -> None:
    screen.draw_all()
    crosses = screen.js(
        "return [...document.querySelectorAll('.chart')].map((one) => one.querySelectorAll('.point').length)"
    )
    assert crosses[2:] == [2, 2, 2, 2]  # in the charts of both losses
    tops = screen.js(
        "return [...document.querySelectorAll('.chart')].slice(2).map((one) => 10 ** one.layout.yaxis.range[1])"
    )
    assert max(tops) < 3  # the loss of these runs goes to 1e17


def test_axes_turn_logarithmic(screen: Page) -> None:
    screen.draw_all()
    assert [screen.layout(f"{axis}axis.type") for axis in "xy"] == ["linear", "linear"]
    screen.click(".axes input")
    screen.click(".axes input", 1)
    assert [screen.layout(f"{axis}axis.type") for axis in "xy"] == ["log", "log"]
    low, high = screen.layout("yaxis.range")
    assert -3 < low < high < 1
    screen.click(".axes input")
    screen.click(".axes input", 1)


def test_the_buttons_of_a_chart_send_nothing(screen: Page) -> None:
    screen.draw_all()
    named = screen.js("return [...document.querySelectorAll('.modebar-btn')].map((one) => one.dataset.title)")
    assert sorted(set(named)) == ["Download plot as a PNG", "Pan", "Reset axes", "Zoom", "Zoom in", "Zoom out"]


def test_the_table_sorts(screen: Page) -> None:
    headings = "table.numbers th button"
    assert screen.js(TABLE)[0][0] == "ngadam"
    screen.click(headings, 1)
    assert [row[1] for row in screen.js(TABLE)] == ["15", "25", "25", "not reached", "not reached"]
    screen.click(headings, 1)
    assert [row[1] for row in screen.js(TABLE)] == ["25", "25", "15", "not reached", "not reached"]
    screen.click(headings, 0)
    names = [row[0] for row in screen.js(TABLE)]
    assert names == sorted(names)
    told = screen.js("return [...document.querySelectorAll('table.numbers th')].map((one) => one.ariaSort)")
    assert told[:2] == ["ascending", "none"]


def test_the_runs_can_be_downloaded(screen: Page) -> None:
    for button, name in (("#json", "runs.json"), ("#csv", "runs.csv")):
        screen.click(button)
        until(lambda name=name: (screen.folder / name).exists())  # type: ignore[misc]
    found = collection.find([screen.folder / "runs.json"])
    assert [one.metrics for one in found] == [one.metrics for one in made()]
    with (screen.folder / "runs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == sum(len(one.metrics) for one in found)
    assert {row["optimizer"] for row in rows} == {"ngadam", HOSTILE, "'=1+1", "sgd", "adam"}  # no formula
    assert float(rows[1]["train_loss"]) == made()[0].metrics[1]["train_loss"]
    screen.draw_all()
    screen.click(".modebar-btn[data-title*=PNG]")
    until(lambda: bool(list(screen.folder.glob("The title*Validation accuracy.png"))))
    assert_quiet(screen, opened=False)
