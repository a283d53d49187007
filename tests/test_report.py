"""The report: one page from a build's files, the same bytes for the same files."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from eyrie.records import RecordError, write_json
from eyrie.report import charts
from eyrie.report.inputs import Build, read_build, read_jobs
from eyrie.report.page import number, render

NAMES = ["chat", "issues", "maths"]
EVIL = "<script>alert('x')</script>"
HEADER = {
    "schema_version": 1,
    "recipe": {"threads": 2},
    "parents": {"target.json": "ab" * 32},
    "versions": {"eyrie": "0.1.0"},
}


def write_build(folder: Path, names: list[str]) -> list[str]:
    """The files of a build of these datasets, and the report's arguments for them."""
    write_json(folder / "config.json", config(names))
    for rank, name in enumerate(names):
        raw = 60 + 7 * rank
        skipped = {"duplicate_prompt": 3 + rank, "empty_prompt": 2} if rank != 1 else {}
        kept = raw - sum(skipped.values())
        write_json(
            folder / f"prompts_{name}.json",
            {"dataset": name, "stage": "prompts", "in": raw, "kept": kept, "skipped": skipped},
        )
        # A reason may stop rows of both stages.
        lost = {"too_long": rank, "empty_prompt": 0} if rank else {}
        samples = {
            "dataset": name,
            "stage": "answer_prompts",
            "in": kept,
            "kept": kept - rank,
            "skipped": lost,
            "supervised_tokens": {"train": 1900 + 130 * rank, "validation": 120, "held_out": 240},
        }
        write_json(folder / f"samples_{name}.json", samples)
        states = {"dataset": name, "layer_ids": [2, 15, 27], "dtype": "bfloat16"}
        states["counts"] = {"samples": kept - rank, "tokens": 7000 + 500 * rank}
        write_json(folder / f"states_{name}.json", HEADER | states)
    coverage = {"train": 0.9871, "validation": 0.9583}
    write_json(
        folder / "vocabulary.json",
        {"draft_vocab_size": 4096, "vocab_size": 49152, "coverage": coverage, "supervised_tokens": 20000},
    )
    write_json(folder / "training.json", HEADER | training())
    write_json(folder / "evaluation.json", HEADER | evaluation(names))
    arguments = ["--config", "config.json", "--vocabulary", "vocabulary.json", "--training", "training.json"]
    arguments += ["--evaluation", "evaluation.json", "--ledgers"]
    arguments += [f"{kind}_{name}.json" for kind in ("prompts", "samples") for name in names]
    return [*arguments, "--manifests", *(f"states_{name}.json" for name in names)]


def config(names: list[str]) -> dict[str, Any]:
    dataset = {
        "source": {"files": ["rows.jsonl"], "format": "jsonl"},
        "licence": "Apache-2.0",
        "layout": "messages",
        "kind": "prompts",
    }
    return {
        "target": {
            "name": "smollm2-135m",
            "path": "models/x",
            "hub_id": "HuggingFaceTB/SmolLM2-135M-Instruct",
        },
        "partitions": {"short": {"max_new_tokens": 64}},
        "datasets": dict.fromkeys(names, dataset),
    }


def training() -> dict[str, Any]:
    loss = [{"step": 7 * i, "loss": 4.0 / (1 + i / 9) + 2.1 + (i % 5) / 20} for i in range(1, 70)]
    validation = [
        {"step": 49 * i, "epoch": i, "acceptance_length": 2.0 - 1 / (1 + i), "rows": 20} for i in range(1, 11)
    ]
    counts = {"train_rows": 640, "train_places": 20000, "epochs": 10, "steps": 490, "validation_rows": 20}
    return {"loss": loss, "validation": validation, "counts": counts}


def evaluation(names: list[str]) -> dict[str, Any]:
    lengths = {
        key: {"all": 1.9 + offset, **{name: 1.6 + offset + 0.08 * i for i, name in enumerate(names)}}
        for key, offset in (("3", 0.0), ("5", 0.07))
    }
    text = "Here is a function that adds two numbers :\n\ndef add ( a , b ) :\n return a + b\n"
    words = re.findall(r"\S+\s*", text)
    tokens = [[word, "accepted" if i % 5 in (1, 2) else "target"] for i, word in enumerate(words)]
    return {
        "acceptance_length": lengths,
        "acceptance_by_position": {"3": [0.54, 0.31, 0.17], "5": [0.53, 0.3, 0.17, 0.09, 0.04]},
        "prompts": {"3": dict.fromkeys(names, 4), "5": dict.fromkeys(names, 2)},
        "cycles": {"3": 700, "5": 300},
        "unseen_families": {"datasets": names[1:2], "acceptance_length": {"3": 1.7, "5": 1.8}},
        "identical_outputs": {"dtype": "float32", "equal": 20, "total": 20, "differences": []},
        "stored_answers_equal": {"equal": 12, "total": 20},
        "tokens_per_second": {
            "plain": 25.1,
            "drafted": {"3": 37.9, "5": 36.0},
            "prompts": {"3": 20, "5": 10},
        },
        "speed_up": {"3": 1.51, "5": 1.43},
        "costs": {
            "plain_step_ms": 39.8,
            "verify_step_ms": {"3": 48.1, "5": 52.0},
            "draft_step_ms": {"3": 2.2, "5": 2.1},
            "predicted_speed_up": {"3": 1.55, "5": 1.46},
        },
        "bfloat16": {
            "equal": 3,
            "total": 4,
            "differences": [
                {"id": "ab12", "dataset": names[0], "draft_tokens": 3, "position": 17, "margin": 0.125}
            ],
        },
        "without_prompt": {},
        "distinct_bigrams": 0.8,
        "samples": [
            {
                "id": name,
                "dataset": name,
                "draft_tokens": 3,
                "prompt": f"<user>{EVIL}",
                "tokens": [*tokens, [EVIL, "accepted"]],
            }
            for name in names
        ],
        "warnings": [],
    }


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


def read(folder: Path, with_benchmarks: bool = False) -> Build:
    return read_build(
        folder / "config.json",
        sorted([*folder.glob("prompts_*.json"), *folder.glob("samples_*.json")]),
        sorted(folder.glob("states_*.json")),
        folder / "vocabulary.json",
        folder / "training.json",
        folder / "evaluation.json",
        folder / "benchmarks" if with_benchmarks else None,
    )


@pytest.fixture(scope="module")
def page(arguments: tuple[Path, list[str]]) -> str:
    return render(read(arguments[0]))


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
    chart = charts.curves("loss", "t", "d", "loss", {"</script><b>": ([1], [2.0])})
    assert "<" not in chart.json
    assert json.loads(chart.json)["data"][0]["name"] == "</script><b>"


def test_every_chart_is_drawn_where_it_belongs(page: str) -> None:
    elements = Elements(page).found
    places = [attrs["id"] for tag, attrs in elements if tag == "div" and attrs.get("class") == "plot"]
    figures = [attrs["data-for"] for tag, attrs in elements if attrs.get("class") == "figure"]
    assert places == figures
    assert places == [
        "acceptance-by-dataset",
        "acceptance-by-position",
        "loss",
        "validation",
        "rows",
        "tokens",
    ]


def test_charts_use_colours_that_the_dark_page_knows(page: str) -> None:
    known = {colour for pair in charts.PALETTE for colour in pair}
    for source in re.findall(r'class="figure"[^>]*>(.*?)</script>', page, re.S):
        assert set(re.findall(r"#[0-9a-f]{6}", source)) <= known


def test_the_figures_are_on_the_page(page: str) -> None:
    text = " ".join(Elements(page).text.split())
    for expected in (
        "Acceptance length 1.90",
        "Speed-up 1.51×",
        "20 of 20",
        "201 raw rows",
        "6,090 to learn from, of 22,500",
        "3 duplicate_prompt, 2 empty_prompt",
        "1 too_long",
        "Apache-2.0",
        "98.7 % of the supervised tokens of the train share",
        "In issues several rows share a group",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "ab" * 32,
    ):
        assert expected in text


def test_every_raw_row_is_accounted_for(arguments: tuple[Path, list[str]]) -> None:
    for dataset in read(arguments[0]).datasets:
        ends = dataset.samples + dataset.left_out + dataset.unusable + dataset.unanswered
        assert ends == dataset.raw_rows


def test_a_build_without_times_tells_of_none(arguments: tuple[Path, list[str]], tmp_path: Path) -> None:
    flags = write_build(tmp_path, NAMES)
    assert flags == arguments[1]
    untimed = evaluation(NAMES) | {"tokens_per_second": None, "speed_up": None, "costs": None}
    untimed |= {"bfloat16": None, "unseen_families": None, "warnings": ["Not one <b>token</b>."]}
    write_json(tmp_path / "evaluation.json", HEADER | untimed)
    text = Elements(render(read(tmp_path))).text
    assert "Speed" not in text
    assert "tokens/s" not in text
    assert "Not one <b>token</b>." in text
    assert "Where the time went" not in text


def test_a_build_without_validation_rows(tmp_path: Path) -> None:
    write_build(tmp_path, NAMES)
    write_json(tmp_path / "training.json", HEADER | training() | {"validation": []})
    assert 'id="validation"' not in render(read(tmp_path))


def test_figures_that_could_not_be_measured_are_dashes(tmp_path: Path) -> None:
    write_build(tmp_path, NAMES)
    unknown = evaluation(NAMES)
    unknown["acceptance_length"] = {"3": {"all": None, **dict.fromkeys(NAMES)}}
    unknown["acceptance_by_position"] = {"3": []}
    write_json(tmp_path / "evaluation.json", HEADER | unknown)
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
    assert "train_drafter 1 140.2 1480" in text
    assert "answer_prompts 3 64.5 612" in text
    assert "build_vocabulary 1 0.2 –" in text


def test_a_strange_benchmark_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.tsv").write_text("a\tb\n1\t2\n")
    with pytest.raises(RecordError, match=r"x\.tsv"):
        read_jobs(tmp_path)


def test_a_missing_ledger_is_named(tmp_path: Path) -> None:
    write_build(tmp_path, NAMES)
    (tmp_path / "samples_maths.json").unlink()
    with pytest.raises(RecordError, match="lacks the samples of maths"):
        read(tmp_path)


def test_numbers_for_a_reader() -> None:
    assert [number(value) for value in (None, 12345, 1.904)] == ["–", "12,345", "1.90"]
