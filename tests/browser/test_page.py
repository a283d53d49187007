"""The report in headless Chromium: quiet, alone, whole, and with the numbers of its files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser.chromium import Browser, Page, program, started
from example_build import DRAFTER, NAMES, acceptance, evaluation, paying, scaling, write_build, write_evidence
from workspace import ROOT, Workspace

pytestmark = pytest.mark.browser

PHONE, DESKTOP, SHEET = 390, 1280, 681
# A figure is drawn where it takes room and shows a mark, a bar or a line for its data.
DRAWN = """[...document.querySelectorAll(".plot")].map(place => {
  const svg = place.querySelector("svg.main-svg");
  const box = svg ? svg.getBoundingClientRect() : {width: 0, height: 0};
  const marks = place.querySelectorAll(".point, .js-line, .funnellayer path, .bars path").length;
  return [place.id, box.width > 100 && box.height > 100 && marks > 0];
})"""
SHOWN = "Object.fromEntries([...document.querySelectorAll('.plot')].map(place => [place.id, place.data]))"
# What is drawn, and the page's own colour; axes and words are drawn in these, too.
COLOURS = """[getComputedStyle(document.body).backgroundColor, ...[...document.querySelectorAll(
  ".plot .point path, .plot .js-line, .plot .xtick text")].map(
  one => getComputedStyle(one).fill + getComputedStyle(one).stroke).filter(
  // A pattern has a name of its own each time it is drawn.
  colour => !colour.includes("url"))]"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if program() is None:
        # Where all must be tested a missing browser is a failure.
        (pytest.fail if os.environ.get("CI") else pytest.skip)("no Chromium: `make browser-env` installs it")
    with started(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a made-up build that has every kind of evidence."""
    folder = tmp_path_factory.mktemp("example")
    flags = [*write_build(folder, NAMES), *write_evidence(folder, NAMES), "--out", "report.html"]
    subprocess.run([sys.executable, ROOT / "scripts/build_report.py", *flags], cwd=folder, check=True)
    return folder / "report.html"


@pytest.fixture
def opened(browser: Browser, report: Path) -> Iterator[Page]:
    page = Page(browser, report, DESKTOP, "light")
    yield page
    page.close()


def check(page: Page) -> None:
    """What must be so for every report at every width."""
    assert page.complaints() == []
    assert len(page.requests()) == 1, "the page itself and nothing else"
    drawn = page.evaluate(DRAWN)
    assert len(drawn) >= 10
    assert [name for name, whole in drawn if not whole] == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "no scrolling sideways"


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_the_page_is_quiet_alone_and_whole(browser: Browser, report: Path, width: int) -> None:
    page = Page(browser, report, width, "light")
    check(page)
    assert page.evaluate("innerWidth") == width
    page.close()


def traces(page: Page, chart: str) -> dict[str, dict[str, Any]]:
    return {trace.get("name", ""): trace for trace in page.evaluate(SHOWN)[chart]}


def test_the_figures_show_the_numbers_of_their_files(opened: Page) -> None:
    judged, replayed = evaluation(NAMES), acceptance(NAMES)
    for drafted, values in judged["acceptance_length"].items():
        trace = traces(opened, "acceptance-by-dataset")[f"{drafted} drafted"]
        assert dict(zip(trace["y"], trace["x"], strict=True)) == values
    by_position = traces(opened, "acceptance-by-position")
    for drafted, rates in judged["acceptance_by_position"].items():
        assert by_position[f"{drafted} drafted"]["y"] == rates
    for way in ("greedy", "sampled"):
        figures = replayed["walk"]["3"][way]
        trace = traces(opened, "replayed-by-dataset")[way]
        expected = {"all": figures["all"], **figures["datasets"]}
        for name, value, up, down in zip(
            trace["customdata"],
            trace["x"],
            trace["error_x"]["array"],
            trace["error_x"]["arrayminus"],
            strict=True,
        ):
            one = expected.pop(name)
            assert value == one["acceptance_length"]
            assert (value - down, value + up) == pytest.approx((one["low"], one["high"]))
        assert expected == {}
        along = traces(opened, "replayed-by-place")[way]
        assert along["y"] == [one["acceptance_length"] for one in figures["answer_position"]]
        assert (
            traces(opened, "replayed-by-position")[way]["y"]
            == replayed["walk"]["5"][way]["all"]["by_position"]
        )
    points = traces(opened, "scaling")["trained on a share"]
    assert (points["x"], points["y"]) == (
        [one["tokens"] for one in scaling()["points"]],
        [one["acceptance_length"] for one in scaling()["points"]],
    )
    assert traces(opened, "speed-up")[""]["y"] == list(paying()["speed_up"].values())
    assert traces(opened, "served")["server"]["y"] == [0.55, 0.33, 0.21]


def colours_unlike(page: Page, before: list[str]) -> list[str]:
    """The page's colours once none is as before, or after half a minute: drawing takes its time."""
    for _ in range(100):
        now = page.evaluate(COLOURS)
        if len(now) == len(before) and all(one != other for one, other in zip(now, before, strict=True)):
            break
        time.sleep(0.3)
    return now


def test_the_dark_page_has_other_colours_and_the_light_ones_come_back(opened: Page) -> None:
    light = opened.evaluate(COLOURS)
    opened.prefer("dark")
    dark = colours_unlike(opened, light)
    assert len(light) == len(dark) > 50
    assert [one for one, other in zip(light, dark, strict=True) if one == other] == []
    opened.prefer("light")
    assert colours_unlike(opened, dark) == light


def test_details_open_by_keyboard(opened: Page) -> None:
    opened.evaluate("document.querySelector('figure summary').focus()")
    for kind in ("keyDown", "keyUp"):
        opened.call(
            "Input.dispatchKeyEvent",
            type=kind,
            key="Enter",
            code="Enter",
            text="\r",
            windowsVirtualKeyCode=13,
        )
    assert opened.evaluate("document.querySelector('figure details').open")


def test_charts_have_words_for_those_who_cannot_see_them(opened: Page) -> None:
    labels = opened.evaluate(
        "[...document.querySelectorAll('.plot')].map(place => [place.getAttribute('role'), "
        "place.getAttribute('aria-label')])"
    )
    assert all(role == "img" and len(label) > 40 for role, label in labels)


def test_charts_fit_the_sheet_in_print(opened: Page) -> None:
    opened.prefer("dark", medium="print")
    opened.call(
        "Emulation.setDeviceMetricsOverride", width=SHEET, height=1010, deviceScaleFactor=1, mobile=False
    )
    opened.evaluate("dispatchEvent(new Event('beforeprint'))")
    widths = opened.evaluate(
        "[...document.querySelectorAll('.plot svg')].map(svg => svg.getBoundingClientRect().right)"
    )
    assert max(widths) <= SHEET
    assert opened.evaluate("document.documentElement.scrollWidth") <= SHEET
    printed = opened.pdf()
    assert printed.startswith(b"%PDF-")
    assert printed.count(b"/Type /Page\n") > 3 or printed.count(b"/Type/Page") > 3 or len(printed) > 100_000


@pytest.mark.build
def test_the_report_of_a_real_build(browser: Browser, built: Workspace) -> None:
    page = Page(browser, built.folder / "work/tiny/report.html", PHONE, "dark")
    check(page)
    judged = json.loads(built.read("work/tiny/drafter/evaluation.json"))
    for drafted, values in judged["acceptance_length"].items():
        trace = traces(page, "acceptance-by-dataset")[f"{drafted} drafted"]
        measured = {name: value for name, value in values.items() if value is not None}
        assert dict(zip(trace["y"], trace["x"], strict=True)) == measured
    rows = sum(
        json.loads(built.read(f"work/tiny/tokenized/{name}/ledger.json"))["kept"]
        for name in ("openthoughts", "sharegpt")
    )
    assert sum(traces(page, "answer-lengths")["short"]["customdata"]) == rows
    assert DRAFTER not in page.evaluate("document.body.innerText")
    page.close()
