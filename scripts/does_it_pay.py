"""Say whether a drafter pays, from figures alone.

    does_it_pay.py --rates 0.55 0.30 0.16 --draft-step 0.05 --verify-step 1.15
    does_it_pay.py --length 2.1 --draft-tokens 3 --draft-step 0.05 --verify-step 1.15
    does_it_pay.py --length 2.1 --draft-tokens 3 --plain 90 --drafted 82.3 [--verify-step 1.15]

Costs are in steps of plain decoding: --draft-step of drafting one token, --verify-step of the target's pass
over the drafted tokens and one more. One number holds for all lengths of drafts; of several the first is for
one drafted token. With tokens per second in their place it says what a cycle cost, and what would have had to
be different.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from eyrie.config import ConfigError
from eyrie.console import run_command
from eyrie.paying import ByLength, CycleCosts, acceptance_lengths, in_words, paying

# What a one-layer drafter of a large target costs, in target steps, where nothing is in its way.
_CHEAP = 0.05


def main() -> None:
    """Run the command."""
    arguments = _arguments()
    rates, length = arguments.rates, arguments.length
    if (rates is None) == (length is None):
        raise ConfigError("give --rates or --length: either the acceptance by position or the mean length")
    if rates is not None:
        _check_rates(rates)
    drafts = len(rates) if rates is not None else arguments.draft_tokens
    mean = 1 + sum(rates) if rates is not None else length
    if drafts is None:
        raise ConfigError("--length needs --draft-tokens, the number of tokens drafted in each cycle")
    if not 1 <= mean <= drafts + 1:
        raise ConfigError(
            f"saw an acceptance length of {mean}; expected 1 to {drafts + 1}: the target's own token counts "
            f"as one, and {drafts} drafted ones at most"
        )
    if arguments.plain is not None and arguments.drafted is not None:
        verify = None if arguments.verify_step is None else arguments.verify_step[0]
        lines = from_tokens_per_second(mean, drafts, arguments.plain, arguments.drafted, verify)
    elif arguments.draft_step is not None and arguments.verify_step is not None:
        costs = CycleCosts("given", None, _by_length(arguments.draft_step), _by_length(arguments.verify_step))
        # Of a mean length alone nothing is known of shorter drafts.
        figures = paying({drafts: mean} if rates is None else acceptance_lengths({drafts: rates}), costs)
        if figures is None:
            raise ConfigError(f"no costs for {drafts} drafted tokens: give one number, or {drafts} of them")
        lines = in_words(figures)
    else:
        raise ConfigError("give --draft-step and --verify-step, or --plain and --drafted (tokens per second)")
    print("\n".join(lines))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", type=float, nargs="+", help="acceptance by position, of it and all before")
    parser.add_argument("--length", type=float, help="acceptance length, the target's own token included")
    parser.add_argument("--draft-tokens", type=int, help="tokens drafted in a cycle")
    parser.add_argument("--draft-step", type=float, nargs="+", help="cost of drafting one token")
    parser.add_argument("--verify-step", type=float, nargs="+", help="cost of verifying a draft")
    parser.add_argument("--plain", type=float, help="tokens per second without the drafter")
    parser.add_argument("--drafted", type=float, help="tokens per second with it")
    return parser.parse_args()


def _check_rates(rates: Sequence[float]) -> None:
    if not all(1 >= one >= other >= 0 for one, other in zip([1.0, *rates], rates, strict=False)):
        raise ConfigError(
            f"--rates: saw {rates}; expected shares that fall: each of the cycles that accept that token "
            "and all before it"
        )


def _by_length(values: Sequence[float]) -> float | ByLength:
    return values[0] if len(values) == 1 else dict(enumerate(values, start=1))


def from_tokens_per_second(
    length: float, draft_tokens: int, plain: float, drafted: float, verify: float | None
) -> list[str]:
    """What tokens per second with and without a drafter tell of a cycle's cost, as lines for a reader."""
    speed_up = drafted / plain
    cost = length / speed_up
    lines = [
        f"speed-up {speed_up:.2f}: a cycle of {draft_tokens} drafted tokens cost {cost:.2f} plain steps and "
        f"wrote {length:.2f} tokens",
        f"to break even at that cost: an acceptance length of {cost:.2f}, of at most {draft_tokens + 1}",
    ]
    if verify is not None:
        draft = (cost - verify) / draft_tokens
        cheap = length / (draft_tokens * _CHEAP + verify)
        lines += [
            f"with a verify step of {verify:.2f} a draft step cost {draft:.2f} of a plain one",
            f"at this length it pays below {(length - verify) / draft_tokens:.2f}; a draft step of {_CHEAP} "
            f"would make it {cheap:.2f} times as fast",
        ]
    return lines


if __name__ == "__main__":
    run_command(main)
