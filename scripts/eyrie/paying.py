"""Whether a drafter pays: the speed-up that its acceptance and the costs of a cycle's steps come to.

A cycle drafts k tokens in k draft steps and verifies them in one pass over k + 1 tokens; it writes as many
tokens as the acceptance length AL(k) says. With c the cost of a draft step and v that of the pass, both in
steps of plain decoding, the speed-up is S(k) = AL(k) / (k c + v) (Leviathan et al. 2023), and the drafter
pays where AL(k) is above k c + v. Longer drafts accept more, AL(k) = 1 + the sum of the rates up to k, and
cost more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eyrie.acceptance import predicted_speed_up
from eyrie.config import CostSettings, StepCosts

if TYPE_CHECKING:
    # It brings torch along, which a person with a few figures need not wait for.
    from eyrie.measuring import Costs

ByLength = Mapping[int, float]


@dataclass(frozen=True)
class CycleCosts:
    """Costs in steps of plain decoding: one number, or numbers by how many tokens are drafted.

    source: measured or given. target_step_ms: milliseconds of a plain step, where known.
    """

    source: str
    target_step_ms: float | None
    draft_step: float | ByLength
    verify_step: float | ByLength

    def of(self, draft_tokens: int) -> tuple[float, float] | None:
        """Costs c and v with drafts of that length; None where they are longer than any known one.

        Between known lengths both are taken to change evenly. Below the shortest c is that of the shortest,
        and v begins at 1: to verify no draft is a plain step.
        """
        draft, verify = self.draft_step, self.verify_step
        if isinstance(draft, Mapping):
            draft = {0: draft[min(draft)], **draft}
        if isinstance(verify, Mapping):
            verify = {0: 1.0, **verify}
        c, v = _at(draft, draft_tokens), _at(verify, draft_tokens)
        return None if c is None or v is None else (c, v)


def _at(known: float | ByLength, length: int) -> float | None:
    """The value at a length, on the line between its known neighbours; None beyond the last."""
    if not isinstance(known, Mapping):
        return known
    above = min((key for key in known if key >= length), default=None)
    if above is None:
        return None
    below = max(key for key in known if key <= length)
    if above == below:
        return known[above]
    return known[below] + (known[above] - known[below]) * (length - below) / (above - below)


def measured_costs(costs: Costs) -> CycleCosts:
    """What was timed, as multiples of the plain step."""
    return CycleCosts(
        "measured",
        costs.plain_step,
        {length: step / costs.plain_step for length, step in costs.draft_step.items()},
        {length: step / costs.plain_step for length, step in costs.verify_step.items()},
    )


def given_costs(settings: StepCosts) -> CycleCosts:
    """The costs of a host that is named in the configuration."""
    return CycleCosts("given", settings.target_step_ms, settings.draft_step, settings.verify_step)


def acceptance_lengths(rates: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """AL(k) for every k that was drafted or is part of what was.

    rates: by length of the drafts, by position the share of cycles that accept that one and all before it.
    Other lengths take the first rates of the next longer drafts, whose cycles begin at other places: close,
    and not the same.
    """
    known = {length: values for length, values in rates.items() if values}
    found = {}
    for length in range(1, max(known, default=0) + 1):
        longer = min(key for key in known if key >= length)
        found[length] = 1 + sum(known[longer][:length])
    return found


def paying(found: ByLength, costs: CycleCosts) -> dict[str, Any] | None:
    """The figures of `pays`: speed-up by length of the drafts, the best one, break-even and today's margin.

    found: the acceptance lengths. None where no length has costs.
    """
    known = {length: both for length in found if (both := costs.of(length)) is not None}
    if not known:
        return None
    speed_up = {length: predicted_speed_up(found[length], length, *both) for length, both in known.items()}
    best = max(speed_up, key=lambda length: (speed_up[length], -length))
    break_even = {length: length * c + v for length, (c, v) in known.items()}
    return {
        "costs": {
            "source": costs.source,
            "target_step_ms": costs.target_step_ms,
            "draft_step": _by_name({length: c for length, (c, _) in known.items()}),
            "verify_step": _by_name({length: v for length, (_, v) in known.items()}),
        },
        "acceptance_length": _by_name({length: found[length] for length in known}),
        "speed_up": _by_name(speed_up),
        "best_draft_tokens": best,
        "break_even": _by_name(break_even),
        "margin": _by_name({length: found[length] - needed for length, needed in break_even.items()}),
        "pays": speed_up[best] > 1.0,
    }


def _by_name(values: ByLength) -> dict[str, float]:
    return {str(length): value for length, value in values.items()}


def pays_figures(
    rates: Mapping[int, Sequence[float]], measured: Costs | None, given: CostSettings | None
) -> dict[str, Any] | None:
    """The figures at the given costs, else at the measured ones; None where there are neither.

    With costs at several batch sizes also those, under `batch_sizes`.
    """
    found = acceptance_lengths(rates)
    if given is None:
        return None if measured is None else paying(found, measured_costs(measured))
    figures = paying(found, given_costs(given))
    if figures is not None and given.batch_sizes:
        figures["batch_sizes"] = {
            str(size): paying(found, given_costs(costs)) for size, costs in sorted(given.batch_sizes.items())
        }
    return figures


def in_words(figures: Mapping[str, Any]) -> list[str]:
    """The figures as lines for a reader."""
    costs = figures["costs"]
    lines = [f"drafted  length  draft c  verify v  break-even  margin  speed-up ({costs['source']} costs)"]
    for length, speed_up in figures["speed_up"].items():
        lines.append(
            f"{length:>7}  {figures['acceptance_length'][length]:6.2f}  {costs['draft_step'][length]:7.3f}"
            f"  {costs['verify_step'][length]:8.2f}  {figures['break_even'][length]:10.2f}"
            f"  {figures['margin'][length]:+6.2f}  {speed_up:8.2f}"
        )
    best = str(figures["best_draft_tokens"])
    lines.append(
        f"it pays: {figures['speed_up'][best]:.2f} times as fast with {best} drafted"
        if figures["pays"]
        else f"it does not pay: at best {figures['speed_up'][best]:.2f} times as fast, with {best} drafted; "
        f"there an acceptance length of {figures['break_even'][best]:.2f} is needed to break even"
    )
    for size, at_size in figures.get("batch_sizes", {}).items():
        lines.append(f"with {size} requests at once:")
        lines += in_words(at_size) if at_size else ["  no costs for these lengths"]
    return lines
