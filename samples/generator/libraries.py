"""Invented code libraries that the issues of the two agent datasets are about."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Library:
    """One repository: its owner and name, a module, a class and a function of it, and an option."""

    owner: str
    repo: str
    module: str
    cls: str
    func: str
    option: str

    def slots(self) -> dict[str, str]:
        """Return the slots that a phrase about this library may use."""
        return {
            "repo": self.repo,
            "module": f"{self.repo}/{self.module}.py",
            "dotted": f"{self.repo}.{self.module}",
            "cls": self.cls,
            "func": self.func,
            "option": self.option,
        }


LIBRARIES = tuple(
    Library(*line.split())
    for line in """
brackwater tidelog reader LogReader read_lines encoding
northpier ferrytable schedule Timetable next_departure timezone
oakbench planewright geometry Board cut_length tolerance
saltmarsh heronry census BirdCount merge_counts strict
kilnworks glazebook mixing Recipe scale_recipe precision
millrace turbine simulate Wheel run_steps max_steps
lanternfish deepsonar signal Echo filter_noise window
quarryman stonecut layout Slab arrange_slabs padding
paperboat origamo folding Crease fold_path angle
hillfort cairnmap tiles TileSet load_tile cache_size
breadboard ovenctl control Oven set_target timeout
inkwell letterpress typeset Galley break_lines hyphenate
windrose sailplan routing Route shortest_route avoid
beeyard hivemind sensors HiveScale read_weight retries
cobblestone citywalk export Walk to_json indent
marblerun trackkit physics Marble collide damping
tinwhistle tunebook notation Tune transpose_tune key
gristmill grainstore ledger Store add_delivery currency
fogbank beaconry network Beacon ping_all interval
rootcellar larder pantry Shelf expire_items today
slipway hullform mesh Hull refine_mesh depth
nightjar starfind catalog Catalog lookup_star magnitude
loomhouse weavet pattern Weave repeat_pattern mirror
copperpot stockcube units Quantity parse_amount locale
""".strip().splitlines()
)


def assign(phrases: Sequence[str]) -> list[tuple[str, Library]]:
    """Give each phrase a library, another one each time that the phrase comes again."""
    first = {phrase: 5 * number for number, phrase in enumerate(sorted(set(phrases)))}
    uses: Counter[str] = Counter()
    pairs = []
    for phrase in phrases:
        pairs.append((phrase, LIBRARIES[(first[phrase] + 7 * uses[phrase]) % len(LIBRARIES)]))
        uses[phrase] += 1
    return pairs
