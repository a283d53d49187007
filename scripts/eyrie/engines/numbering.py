"""The proof of which layer is which, made once for each engine, version and target, and kept in the store.

`store/numbering/KEY.json` says what was proved and how; beside the states lies, for each dataset, which of
these proofs its states rest on. A manifest names them.

reference: a sample's states were compared with every hidden state that the model puts out for its tokens, and
each was nearest to the one it is called. anchors: the target is too large to be run here; layer 0 is the
tokens' embedding, and the last state gives the server's own next token, which leaves the order of the layers
between them to the server's word.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eyrie.records import content_key, read_json, write_json
from eyrie.store import StateStore

_TOLD = ("engine", "version", "proof")


def proved(states: StateStore, facts: Mapping[str, Any], prove: Callable[[], Mapping[str, Any]]) -> str:
    """The key of the proof under these facts, made now if the store has none.

    facts: engine, version, numbers, target, layers. prove: makes the proof; returns its kind as `proof`, and
    what else is worth keeping.
    """
    key = content_key("numbering", facts)
    path = _folder(states) / f"{key}.json"
    if not path.exists():
        write_json(path, {**facts, **prove()})
    return key


def note_proof(states: StateStore, dataset: str, key: str) -> None:
    """Keep beside the states that a dataset's rest on this proof; to be called before they are stored."""
    path = states.folder / "proofs" / f"{dataset}-{key}.json"
    if not path.exists():
        record = read_json(_folder(states) / f"{key}.json")
        write_json(path, {"key": key, **{name: record[name] for name in _TOLD}})


def proofs_of(stores: Sequence[StateStore], dataset: str) -> list[dict[str, Any]]:
    """The proofs of a dataset's states in these stores; where none are its own, all that lie beside them."""
    own = _records(stores, f"{dataset}-{'[0-9a-f]' * 32}.json")
    found = own or _records(stores, "*.json")
    return sorted({one["key"]: one for one in found}.values(), key=lambda one: str(one["key"]))


def _records(stores: Sequence[StateStore], pattern: str) -> list[dict[str, Any]]:
    return [read_json(path) for states in stores for path in states.folder.glob(f"proofs/{pattern}")]


def _folder(states: StateStore) -> Path:
    # states.folder is STORE/hidden_states/RECIPE.
    return states.folder.parent.parent / "numbering"
