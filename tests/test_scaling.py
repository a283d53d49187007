"""The fit of acceptance against training tokens on curves that are known, and the shares of groups."""

from __future__ import annotations

import json
import sys
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fit_scaling
from eyrie.config import ConfigError, ScalingSettings, parse_settings
from eyrie.eagle3.group_share import rows_of_share
from eyrie.eagle3.samples import Row
from eyrie.gates import GateError
from eyrie.records import read_json, write_json
from eyrie.scaling import Point, fit, scaling_figures

TOKENS = [8_000, 16_000, 32_000, 64_000]


def curve(kind: str, tokens: Any) -> Any:
    x = np.asarray(tokens, dtype=np.float64)
    return 2.4 - 40 * x**-0.4 if kind == "bent" else 0.2 + 0.14 * np.log(x)


@pytest.mark.parametrize("kind", ["bent", "straight"])
def test_a_known_curve_is_found_again(kind: str) -> None:
    found = fit(TOKENS, curve(kind, TOKENS)[None], 4.0)
    ahead = np.array([1e5, 5e5, 2e6])
    assert found.at(ahead)[0] == pytest.approx(np.minimum(curve(kind, ahead), 4.0), abs=2e-3)
    assert found.power[0] == pytest.approx(0.4 if kind == "bent" else 0.0)
    assert found.needed(2.0)[0] == pytest.approx((100 ** (1 / 0.4)) if kind == "bent" else np.exp(1.8 / 0.14))
    # Beyond what the bent one nears, and beyond what three drafts allow.
    assert found.needed(2.5)[0] == np.inf or kind == "straight"
    assert found.needed(4.5)[0] == np.inf


@given(
    values=st.lists(st.floats(1, 4), min_size=4, max_size=4),
    wanted=st.floats(1, 4),
)
def test_any_points_give_a_rising_curve_within_bounds(values: list[float], wanted: float) -> None:
    found = fit(TOKENS, np.array([values]), 4.0)
    drawn = found.at(np.geomspace(1000, 1e9, 40))[0]
    assert (np.diff(drawn) >= -1e-9).all()
    assert (drawn >= 1).all() and (drawn <= 4).all()
    needed = found.needed(wanted)[0]
    if np.isfinite(needed) and needed > 1e-9 and 1 < wanted < 4:
        assert found.at(np.array([needed]))[0, 0] == pytest.approx(wanted, abs=1e-6)


def test_a_shorter_answer_to_more_data_needs_no_end_of_tokens() -> None:
    found = fit(TOKENS, np.array([[1.8, 1.7, 1.6, 1.5]]), 4.0)
    assert found.slope[0] == 0 and found.needed(2.0)[0] == np.inf


def points(kind: str, noise: float) -> list[Point]:
    """Drafters judged on 60 groups, each harder or easier for all of them alike."""
    generator = np.random.default_rng(0)
    hardness = generator.normal(0, 0.2, 60)
    made = []
    for tokens in TOKENS:
        accepted = 20 * (curve(kind, tokens) - 1 + hardness + generator.normal(0, noise, 60))
        share = str(Fraction(tokens, TOKENS[-1]))
        made.append(Point(share, tokens // 80, tokens, np.stack([np.full(60, 20.0), accepted], axis=1)))
    return made


def test_figures_tell_points_curve_need_and_prediction() -> None:
    found = scaling_figures(points("straight", 0.05), 3, [1.7, 2.0, 3.9], 1.9)
    assert [point["share"] for point in found["points"]] == ["1/8", "1/4", "1/2", "1"]
    for point in found["points"]:
        assert point["low"] < point["acceptance_length"] < point["high"]
    drawn = found["fit"]["curve"]
    assert drawn[0]["tokens"] == TOKENS[0] and drawn[-1]["tokens"] == 16 * TOKENS[-1]
    for place in drawn:
        assert place["low"] <= place["acceptance_length"] <= place["high"]
    # The points say less the farther they are away.
    assert drawn[-1]["high"] - drawn[-1]["low"] > drawn[0]["high"] - drawn[0]["low"]
    needed = found["needed"]["acceptance_length"]
    truth = np.exp(1.8 / 0.14)
    assert needed["2.0"]["low"] <= truth <= (needed["2.0"]["high"] or np.inf)
    assert needed["1.7"]["tokens"] < needed["2.0"]["tokens"]
    assert needed["3.9"]["tokens"] is None, "a thousand times the data is no prediction"
    assert found["needed"]["break_even"]["acceptance_length"] == 1.9
    last = found["prediction_of_last"]
    assert last["low"] <= last["truth"] <= last["high"]
    assert last["predicted"] == pytest.approx(last["truth"], abs=0.05)
    again = scaling_figures(points("straight", 0.05), 3, [1.7, 2.0, 3.9], 1.9)
    assert json.dumps(found) == json.dumps(again)


def test_the_form_is_told_in_tokens() -> None:
    for kind in ("bent", "straight"):
        fitted = scaling_figures(points(kind, 0.0), 3, [], None)["fit"]
        a, b = fitted["parameters"]["a"], fitted["parameters"]["b"]
        place = fitted["curve"][5]
        if fitted["form"] == "a - b * tokens ** -c":
            expected = a - b * place["tokens"] ** -fitted["parameters"]["c"]
        else:
            assert fitted["form"] == "a + b * log(tokens)"
            expected = a + b * np.log(place["tokens"])
        assert place["acceptance_length"] == pytest.approx(expected)


def row(group: str, split: str = "train") -> Row:
    nothing = torch.zeros(2)
    return Row(f"{group}-key", group, "chat", group, split, nothing.int(), nothing.bool(), True, "")


def test_shares_are_nested_and_whole_groups_go() -> None:
    rows = [row(f"group-{n // 3}") for n in range(1200)] + [row("other", "validation")]
    shares = [rows_of_share(rows, Fraction(1, n)) for n in (8, 4, 2, 1)]
    for small, large in pairwise(shares):
        assert {one.group for one in small} < {one.group for one in large}
    for share, kept in zip((1 / 8, 1 / 4, 1 / 2), shares, strict=False):
        counts = [sum(one.group == name for one in kept) for name in {one.group for one in kept}]
        assert set(counts) == {3, 1}, "rows of a group stay together, and validation rows stay"
        assert len(kept) == pytest.approx(1200 * share, rel=0.35)
    assert shares[-1] == rows
    with pytest.raises(GateError, match=r"a share of 1/1000000 .*groups"):
        rows_of_share(rows, Fraction(1, 1_000_000))


def test_shares_are_checked() -> None:
    for shares in (["1/2", "1/4"], ["1/2", "2/2"], ["1/2"], ["half", "1/2"]):
        with pytest.raises(ConfigError, match="shares"):
            parse_settings(ScalingSettings, json.dumps({"shares": shares}))


def test_points_that_can_not_be_compared_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(name: str, tokens: int, groups: list[str]) -> None:
        recipe = {} if name == "1" else {"group_share": "1/2"}
        training = {"recipe": recipe, "train_groups": tokens, "counts": {"train_candidates": tokens}}
        write_json(tmp_path / f"{name}-training.json", training)
        rows = [["chat", group, 10.0, 5.0 + len(group)] for group in groups]
        write_json(tmp_path / f"{name}-acceptance.json", {"by_group": {"3": rows}})

    def run() -> dict[str, Any]:
        command = ["fit_scaling.py", "--recipe", '{"draft_tokens": 3, "acceptance_lengths": [2.0]}']
        for kind in ("training", "acceptance"):
            command += [f"--{kind}s", *(str(tmp_path / f"{name}-{kind}.json") for name in ("1", "2", "3"))]
        command += ["--evaluation", str(tmp_path / "e.json"), "--out", str(tmp_path / "s.json")]
        monkeypatch.setattr(sys, "argv", command)
        fit_scaling.main()
        return read_json(tmp_path / "s.json")

    write_json(tmp_path / "e.json", {"pays": {"break_even": {"3": 1.6}}})
    for name, tokens in (("1", 100), ("2", 50), ("3", 25)):
        write(name, tokens, ["a", "bb", "ccc"])
    found = run()
    assert [point["tokens"] for point in found["points"]] == [25, 50, 100]
    assert found["needed"]["break_even"]["acceptance_length"] == 1.6
    write("3", 50, ["a", "bb", "ccc"])
    with pytest.raises(GateError, match="as many tokens as the next larger"):
        run()
    write("3", 25, ["a", "bb"])
    with pytest.raises(GateError, match="different held-out groups"):
        run()
