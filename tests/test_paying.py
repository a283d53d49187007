"""Whether a drafter pays: costs between measured ones, the best length, break-even, and the small command."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

import does_it_pay
from eyrie.config import ConfigError, CostSettings, StepCosts
from eyrie.measuring import Costs
from eyrie.paying import CycleCosts, acceptance_lengths, in_words, paying, pays_figures

RATES = {3: [0.5, 0.25, 0.125], 5: [0.6, 0.3, 0.15, 0.1, 0.05]}


def test_lengths_of_the_chain_that_was_drafted_come_first() -> None:
    found = acceptance_lengths(RATES)
    assert found == pytest.approx({1: 1.5, 2: 1.75, 3: 1.875, 4: 2.15, 5: 2.2})
    assert acceptance_lengths({3: []}) == {}
    assert acceptance_lengths({3: [], 5: RATES[5]})[3] == pytest.approx(2.05)


def test_costs_lie_between_those_that_were_measured() -> None:
    costs = CycleCosts("measured", 10.0, {3: 0.06, 5: 0.05}, {3: 1.3, 5: 1.7})
    assert costs.of(3) == (0.06, 1.3)
    assert costs.of(4) == pytest.approx((0.055, 1.5))
    # No draft at all would be a plain step.
    assert costs.of(1) == pytest.approx((0.06, 1.1))
    assert costs.of(6) is None
    assert CycleCosts("given", None, 0.05, 1.2).of(6) == (0.05, 1.2)
    assert CycleCosts("given", None, 0.05, {3: 1.2}).of(6) is None


def test_measured_costs_tell_what_pays() -> None:
    found = pays_figures(RATES, Costs(10.0, {3: 13.0, 5: 40.0}, {3: 0.5, 5: 0.5}), None)
    assert found is not None
    assert found["costs"]["source"] == "measured" and found["costs"]["target_step_ms"] == 10.0
    assert found["costs"]["draft_step"]["3"] == pytest.approx(0.05)
    assert found["costs"]["verify_step"] == pytest.approx({"1": 1.1, "2": 1.2, "3": 1.3, "4": 2.65, "5": 4.0})
    assert found["break_even"]["3"] == pytest.approx(3 * 0.05 + 1.3)
    assert found["margin"]["3"] == pytest.approx(1.875 - 1.45)
    assert found["speed_up"]["2"] == pytest.approx(1.75 / (2 * 0.05 + 1.2))
    assert (found["best_draft_tokens"], found["pays"]) == (2, True)
    assert "it pays: 1.35 times as fast with 2 drafted" in in_words(found)[-1]


def test_nothing_measured_and_nothing_given_is_nothing() -> None:
    assert pays_figures(RATES, None, None) is None


def test_given_costs_come_before_measured_ones_and_at_batch_sizes() -> None:
    given_ = CostSettings(
        draft_step=0.3,
        verify_step={3: 1.5},
        batch_sizes={
            8: StepCosts(draft_step=0.9, verify_step={3: 2.5}),
            2: StepCosts(draft_step=0.5, verify_step=1.5),
        },
    )
    found = pays_figures(RATES, Costs(10.0, {3: 13.0}, {3: 0.5}), given_)
    assert found is not None
    assert (found["costs"]["source"], found["costs"]["target_step_ms"]) == ("given", None)
    assert found["speed_up"]["3"] == pytest.approx(1.875 / 2.4)
    assert found["best_draft_tokens"] == 1
    at_eight = found["batch_sizes"]["8"]
    assert not at_eight["pays"]
    assert list(found["batch_sizes"]) == ["2", "8"]
    said = in_words(found)
    assert "with 8 requests at once:" in said
    assert said[-1].startswith("it does not pay: at best 0.62 times as fast, with 1 drafted")


@given(
    rates=st.lists(st.floats(0, 1), min_size=1, max_size=6).map(lambda xs: sorted(xs, reverse=True)),
    draft=st.floats(0, 1),
    verify=st.floats(1, 3),
)
def test_it_pays_where_the_margin_is_positive(rates: list[float], draft: float, verify: float) -> None:
    found = paying(acceptance_lengths({len(rates): rates}), CycleCosts("given", None, draft, verify))
    assert found is not None
    for length, speed_up in found["speed_up"].items():
        # Both say the same, but for the last digits.
        assert (speed_up - 1) * found["margin"][length] >= -1e-12
        assert speed_up <= found["speed_up"][str(found["best_draft_tokens"])]


def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str) -> str:
    monkeypatch.setattr(sys, "argv", ["does_it_pay.py", *words.split()])
    does_it_pay.main()
    return capsys.readouterr().out


def test_the_first_attempts_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--length 2.1 --draft-tokens 3 --plain 90 --drafted 82.3 --verify-step 1.15"
    told = said(monkeypatch, capsys, words)
    assert "speed-up 0.91: a cycle of 3 drafted tokens cost 2.30 plain steps" in told
    assert "acceptance length of 2.30, of at most 4" in told
    assert "a draft step cost 0.38 of a plain one" in told
    assert "1.62 times as fast" in told


def test_figures_alone_say_what_pays(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = "--rates 0.6 0.3 0.1 --draft-step 0.1 --verify-step 1.1 1.2 1.3"
    assert "it pays: 1.36 times as fast with 2 drafted" in said(monkeypatch, capsys, rates)
    length = "--length 2.0 --draft-tokens 3 --draft-step 0.4 --verify-step 1.2"
    told = said(monkeypatch, capsys, length)
    assert "it does not pay" in told and "acceptance length of 2.40" in told


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--length 2.1 --rates 0.5", "either"),
        ("--length 2.1", "needs --draft-tokens"),
        ("--length 5 --draft-tokens 3 --plain 1 --drafted 1", "expected 1 to 4"),
        ("--rates 0.3 0.5 --plain 1 --drafted 1", "shares that fall"),
        ("--length 2 --draft-tokens 3 --plain 90", "--plain and --drafted"),
        ("--length 2 --draft-tokens 3 --draft-step 0.1 --verify-step 1 2", "no costs for 3"),
    ],
)
def test_missing_figures_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        said(monkeypatch, capsys, words)
