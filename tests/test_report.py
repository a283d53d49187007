"""The report: one page from a build's files, the same bytes for the same files."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from itertools import combinations
from math import dist
from pathlib import Path

import pytest

from example_build import DRAFTER, EVIL, HEADER, NAMES, evaluation, write_build, write_evidence
from eyrie.records import RecordError, write_json
from eyrie.report import chart, training_charts
from eyrie.report.inputs import Build, read_build, read_jobs
from eyrie.report.page import TEMPLATES, number, render
from eyrie.report.training_curves import TrainingCurves, read_curves


def write_benchmarks(folder: Path, names: list[str]) -> None:
    head = "s\th:m:s\tmax_rss\tmean_load\n"
    for stage, seconds in (("answer_prompts", 21.5), ("capture_states", 3.2), ("build_prompts", 0.6)):
        (folder / stage).mkdir(parents=True)
        for name in names:
            (folder / stage / f"{name}.tsv").write_text(f"{head}{seconds}\t0:00:21\t612.5\t98\n")
    (folder / "train_drafter.tsv").write_text(f"{head}140.2\t0:02:20\t1480.0\t190\n")
    (folder / "build_vocabulary.tsv").write_text(f"{head}0.2\t0:00:00\t-\t0\n")
    (folder / "build_report.tsv").write_text(f"{head}9.9\t0:00:09\t100\t0\n")


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("build")
    return folder, write_build(folder, NAMES)


def read(folder: Path, *evidence: str, with_benchmarks: bool = False) -> Build:
    work, drafter = folder / "work", folder / DRAFTER
    return read_build(
        work / "config.json",
        sorted([*work.glob("prompts/*/ledger.json"), *work.glob("small/tokenized/*/ledger.json")]),
        work.glob("small/tokenized/*/tokenized_data.jsonl"),
        work.glob("small/hidden_states/*/manifest.json"),
        drafter / "vocabulary.json",
        Path(DRAFTER) / "checkpoint",
        drafter / "training.jsonl",
        drafter / "evaluation.json",
        folder / "benchmarks" if with_benchmarks else None,
        {name: drafter / f"{name}.json" for name in evidence},
    )


@pytest.fixture(autouse=True)
def in_the_build(arguments: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The paths in the records are seen from the build's folder."""
    monkeypatch.chdir(arguments[0])


@pytest.fixture(scope="module")
def page(arguments: tuple[Path, list[str]]) -> str:
    with contextlib.chdir(arguments[0]):
        return render(read(arguments[0]))


@pytest.fixture(scope="module")
def full_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a build that has every kind of evidence."""
    folder = tmp_path_factory.mktemp("full")
    write_build(folder, NAMES)
    write_evidence(folder, NAMES)
    with contextlib.chdir(folder):
        return render(read(folder, "acceptance", "scaling", "serving"))


class Elements(HTMLParser):
    """The page's elements outside of scripts and styles, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._silent = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._silent = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._silent = False

    def handle_data(self, data: str) -> None:
        self.text += "" if self._silent else f"{data} "


def test_the_command_writes_equal_bytes_for_equal_files(arguments: tuple[Path, list[str]]) -> None:
    folder, flags = arguments
    script = Path(__file__).resolve().parent.parent / "scripts" / "build_report.py"
    for name in ("one.html", "two.html"):
        subprocess.run([sys.executable, script, *flags, "--out", name], cwd=folder, check=True)
    one = (folder / "one.html").read_bytes()
    assert one == (folder / "two.html").read_bytes()
    assert one == render(read(folder)).encode()


def test_nothing_is_fetched(page: str) -> None:
    elements = Elements(page).found
    assert not [
        attrs for tag, attrs in elements if "src" in attrs or tag in ("link", "iframe", "img", "object")
    ]
    assert not re.search(r"@import|url\(", page[: page.index("</style>")])
    assert page.count("plotly.js v") == 1, "the library comes once"


def test_text_from_files_is_escaped(page: str) -> None:
    assert EVIL not in page
    elements = Elements(page)
    assert EVIL in elements.text
    assert elements.text.count("alert('x')") == 2 * len(NAMES)


def test_chart_data_cannot_close_its_element() -> None:
    figure = chart.new_figure(100).add_scatter(x=[1], y=[2.0], name="</script><b>")
    made = chart.Chart("loss", "t", "d", figure)
    assert "<" not in made.json
    assert json.loads(made.json)["data"][0]["name"] == "</script><b>"


def test_every_chart_is_drawn_where_it_belongs(page: str) -> None:
    elements = Elements(page).found
    places = [attrs["id"] for tag, attrs in elements if tag == "div" and attrs.get("class") == "plot"]
    figures = [attrs["data-for"] for tag, attrs in elements if attrs.get("class") == "figure"]
    assert places == figures
    assert places == [
        "acceptance-by-dataset",
        "acceptance-by-position",
        "funnels",
        "rows",
        "tokens",
        "prompt-lengths",
        "answer-lengths",
        "length-ranges",
        "loss",
        "right-guesses",
        "validation",
        "validation-positions",
    ]


def test_charts_use_colours_that_the_dark_page_knows(full_page: str) -> None:
    known = {colour for pair in chart.PALETTE for colour in pair}
    for source in re.findall(r'class="figure"[^>]*>(.*?)</script>', full_page, re.S):
        assert set(re.findall(r"#[0-9a-f]{6,8}", source)) <= known


def test_the_figures_are_on_the_page(page: str) -> None:
    text = " ".join(Elements(page).text.split())
    for expected in (
        "Acceptance length 1.90",
        "Speed-up 1.51×",
        "20 of 20",
        "201 raw rows",
        "6,090 to learn from, of 22,500",
        "duplicate_prompt reading 3 empty_prompt reading 2",
        "prompt_too_long answering 1",
        "Apache-2.0",
        "98.7 % of the supervised tokens of the train share",
        "In issues several rows share a group",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "vllm 0.32.0 float32",
        "ef" * 32,
    ):
        assert expected in text


def test_every_raw_row_is_accounted_for(arguments: tuple[Path, list[str]]) -> None:
    for dataset in read(arguments[0]).datasets:
        ends = dataset.samples + dataset.left_out + dataset.unusable + dataset.unanswered
        assert ends == dataset.raw_rows
        counts = [count for _, count in dataset.funnel]
        assert counts == sorted(counts, reverse=True)
        assert (counts[0], counts[-1]) == (dataset.raw_rows, dataset.samples - 10)


def test_a_build_without_times_tells_of_none(arguments: tuple[Path, list[str]], tmp_path: Path) -> None:
    assert write_build(tmp_path, NAMES) == arguments[1]
    untimed = evaluation(NAMES) | {"tokens_per_second": None, "speed_up": None, "costs": None}
    untimed |= {"bfloat16": None, "unseen_families": None, "warnings": ["Not one <b>token</b>."]}
    write_json(tmp_path / DRAFTER / "evaluation.json", HEADER | untimed)
    text = Elements(render(read(tmp_path))).text
    assert "Speed" not in text
    assert "No costs were measured" in text
    assert "tokens/s" not in text
    assert "Not one <b>token</b>." in text
    assert "Where the time went" not in text


def test_a_build_without_validation_rows(tmp_path: Path) -> None:
    write_build(tmp_path, NAMES)
    lines = (tmp_path / DRAFTER / "training.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if '"validation"' not in line]
    (tmp_path / DRAFTER / "training.jsonl").write_text("".join(kept))
    assert 'id="validation' not in render(read(tmp_path))


def test_figures_that_could_not_be_measured_are_dashes(tmp_path: Path) -> None:
    write_build(tmp_path, NAMES)
    unknown = evaluation(NAMES)
    unknown["acceptance_length"] = {"3": {"all": None, **dict.fromkeys(NAMES)}}
    unknown["acceptance_by_position"] = {"3": []}
    write_json(tmp_path / DRAFTER / "evaluation.json", HEADER | unknown)
    assert "Acceptance length – " in Elements(render(read(tmp_path))).text


def test_wall_times_come_from_the_benchmark_files(tmp_path: Path) -> None:
    write_build(tmp_path, NAMES)
    write_benchmarks(tmp_path / "benchmarks", NAMES)
    build = read(tmp_path, with_benchmarks=True)
    assert {job.stage for job in build.jobs} == {
        "answer_prompts",
        "capture_states",
        "build_prompts",
        "train_drafter",
        "build_vocabulary",
    }
    text = " ".join(Elements(render(build)).text.split())
    assert "train_drafter 1 140.20 1,480" in text
    assert "answer_prompts 3 64.50 612" in text
    assert "build_vocabulary 1 0.20 –" in text


def test_a_strange_benchmark_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.tsv").write_text("a\tb\n1\t2\n")
    with pytest.raises(RecordError, match=r"x\.tsv"):
        read_jobs(tmp_path)


def test_a_missing_ledger_is_named(tmp_path: Path) -> None:
    write_build(tmp_path, NAMES)
    shutil.rmtree(tmp_path / "work/small/tokenized/maths")
    with pytest.raises(RecordError, match="lacks the samples of maths"):
        read(tmp_path)


def test_numbers_for_a_reader() -> None:
    assert [number(value) for value in (None, 12345, 1.904)] == ["–", "12,345", "1.90"]


def test_evidence_that_is_not_there_names_its_command(page: str) -> None:
    text = " ".join(Elements(page).text.split())
    for command in (f"{DRAFTER}/acceptance.json", "scaling", "serving", "evaluation"):
        assert (f"snakemake --cores all {command}" in text) == (command != "evaluation")


def test_evidence_is_shown_where_it_is(full_page: str) -> None:
    elements = Elements(full_page)
    text = " ".join(elements.text.split())
    assert "snakemake --cores all" not in text
    places = {attrs["id"] for tag, attrs in elements.found if attrs.get("class") == "plot"}
    assert places >= {
        *("replayed-by-dataset", "replayed-by-place", "replayed-by-position"),
        *("speed-up", "scaling", "served"),
    }
    for expected in (
        "Yes. With costs measured, drafts of 3 make the target 1.38 times as fast",
        "Passed. vLLM 0.32.0",
        "19 of 20 outputs equal",
        "predicted to have 1.93 (1.81 to 2.07); it has 1.90",
        "2.0 31,000 24,000 52,000",
        "would be 2.05 (greedy) and 1.90 (sampled), which overstates",
        "all 1.85 1.75 2.00 400 1.70",
    ):
        assert expected in text


def test_every_name_and_every_link_is_of_one_place(full_page: str) -> None:
    elements = Elements(full_page).found
    names = [attrs["id"] for _, attrs in elements if "id" in attrs]
    assert len(names) == len(set(names))
    links = {str(attrs["href"]).removeprefix("#") for tag, attrs in elements if tag == "a"}
    assert links and links <= set(names)


def test_refused_drafts_stand_struck_through_before_what_overruled_them(full_page: str) -> None:
    assert "<del>the sum of </del>" in full_page
    assert full_page.count("<del>") == 1 + len(NAMES), "the legend, and once in each sample"


def test_evidence_of_another_drafter_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_build(tmp_path, NAMES)
    write_evidence(tmp_path, NAMES)
    monkeypatch.chdir(tmp_path)
    serving = json.loads((tmp_path / DRAFTER / "serving.json").read_text())
    serving["parents"][f"{DRAFTER}/checkpoint/model.safetensors"] = "00" * 32
    write_json(tmp_path / DRAFTER / "serving.json", serving)
    assert read(tmp_path, "acceptance", "serving").evidence.stale == ["serving.json"]
    assert "serving.json tells of another drafter" in render(read(tmp_path, "serving"))


def test_a_long_log_becomes_a_short_curve(tmp_path: Path) -> None:
    with (tmp_path / "training.jsonl").open("w") as file:
        for step in range(1, 2001):
            file.write(json.dumps({"step": step, "loss": float(step), "right_by_step": [0.5, 0.25]}) + "\n")
    curves = read_curves(tmp_path / "training.jsonl")
    assert len(curves.steps) == 250
    assert curves.steps[-1] == 2000
    assert curves.loss[0] == 4.5, "the mean of the first eight"
    assert [set(right) for right in curves.right] == [{0.5}, {0.25}]


def test_a_run_of_no_step_has_an_empty_curve() -> None:
    assert [one.id for one in training_charts.training_charts(TrainingCurves([], [], [], []))] == ["loss"]


def test_every_template_is_an_input_of_the_rule() -> None:
    rule = (Path(__file__).resolve().parent.parent / "rules/report.smk").read_text(encoding="utf-8")
    assert f"scripts/eyrie/report/{TEMPLATES.name}/**/*.*" in rule


# Matrices that show a colour, in linear light, as those who lack a kind of cone see it. Source: Machado,
# Oliveira and Fernandes, "A Physiologically-based Model for Simulation of Color Vision Deficiency", 2009,
# table for severity 1.0.
BLINDNESS = {
    "none": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "deuteranopia": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "tritanopia": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
}


def linear(colour: str) -> list[float]:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def lab(rgb: list[float]) -> list[float]:
    """CIE L*a*b* of linear sRGB, D65."""
    red, green, blue = (min(max(part, 0.0), 1.0) for part in rgb)
    xyz = (
        (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505,
        0.2126 * red + 0.7152 * green + 0.0722 * blue,
        (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089,
    )
    x, y, z = (part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116 for part in xyz)
    return [116 * y - 16, 500 * (x - y), 200 * (y - z)]


@pytest.mark.parametrize("blindness", BLINDNESS)
@pytest.mark.parametrize("scheme", [0, 1])
def test_series_differ_for_the_colour_blind(blindness: str, scheme: int) -> None:
    matrix = BLINDNESS[blindness]
    seen = []
    for pair in (chart.BLUE, chart.ORANGE, chart.SLATE, chart.GREY):
        rgb = linear(pair[scheme])
        seen.append(lab([sum(m * part for m, part in zip(row, rgb, strict=True)) for row in matrix]))
    for one, other in combinations(seen, 2):
        assert dist(one, other) > 18


@pytest.mark.parametrize(("scheme", "card"), [(0, "#ffffff"), (1, "#1c2128")])
def test_series_stand_out_from_the_card(scheme: int, card: str) -> None:
    def light(colour: str) -> float:
        red, green, blue = linear(colour)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    for pair in (chart.BLUE, chart.ORANGE, chart.SLATE):
        high, low = sorted((light(pair[scheme]), light(card)), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 3
