"""Hidden states that a server on this host leaves in files, one a request: waited for, checked, taken away.

vLLM (speculation `extract_hidden_states`) names the file in its reply and writes it afterwards, under an
exclusive lock of the file NAME.lock. It is read from the same file system: server and job are on one host.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn import functional

from eyrie.engines.checks import checked_states
from eyrie.engines.replies import Failure
from eyrie.journals import StoreError
from eyrie.store import States

_POLL_SECONDS = 0.01
# The cosine between a token's embedding and what the server calls layer 0: the same numbers, at most rounded
# or scaled.
_SAME = 0.99


@contextmanager
def taken(path: Path, deadline: float) -> Iterator[Path]:
    """A file that a server writes, once it is written; it and its lock are removed after the block.

    deadline: of time.monotonic(). Raises Failure where there is none by then.
    """
    lock = Path(f"{path}.lock")
    try:
        with lock.open("rb") as file:
            while not _is_free(file.fileno()):
                if time.monotonic() > deadline:
                    raise Failure("states_missing", f"{path} is still being written")
                time.sleep(_POLL_SECONDS)
            if not path.exists():
                raise Failure("states_missing", f"{path} was not written; the server's log tells why")
            try:
                yield path
            finally:
                path.unlink(missing_ok=True)
                lock.unlink(missing_ok=True)
    except FileNotFoundError as error:
        raise Failure(
            "states_missing", f"{lock} is not there: the server must write to this host's files"
        ) from error


def _is_free(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@dataclass(frozen=True)
class StateReader:
    """Reads the states of one target from a server's files.

    layer_ids: the wanted layers. served: what the server writes, side by side, in Hugging Face's numbering;
    the wanted ones, 0 (the embedding) and the number of layers, the state before the final norm. The last
    state is that one after the norm, x / rms(x) * norm. embedding: [V, H], norm: [H].
    """

    layer_ids: Sequence[int]
    served: Sequence[int]
    dtype: torch.dtype
    embedding: torch.Tensor
    norm: torch.Tensor
    epsilon: float
    with_answer: bool = False
    """Whether the files hold prompt and answer, without the answer's last token; else the prompt alone."""

    def read(self, path: Path, prompt: Sequence[int], answer: Sequence[int], deadline: float) -> States:
        """The states that a file holds, as they go to the store; the file is gone afterwards.

        The last token of an answer was never run through the target. Its row is all zero: no place of a
        training sample looks at it (the token's own prediction lies beyond the sample).
        Raises Failure where the file is not whole, StoreError where what it holds can't be right.
        """
        ids = [*prompt, *answer[:-1]] if self.with_answer else list(prompt)
        with taken(path, deadline):
            rows = _rows(path, ids)
        if rows.shape[1:] != (len(self.served), len(self.norm)):
            raise StoreError(
                f"a server's hidden states are of shape {list(rows.shape)}\n"
                f"  expected: [{len(ids)} tokens, {len(self.served)} layers {list(self.served)}, "
                f"{len(self.norm)}]\n"
                "  change: eagle_aux_hidden_state_layer_ids in the server's command, to {layer_ids}"
            )
        self._check_embedding(rows, ids)
        last = functional.rms_norm(rows[:, -1].float(), self.norm.shape, self.norm.float(), self.epsilon)
        values = torch.empty(len(ids), len(self.layer_ids) + 1, len(self.norm), dtype=self.dtype)
        for place, layer in enumerate(self.layer_ids):
            values[:, place] = rows[:, self.served.index(layer)]
        values[:, -1] = last
        states = checked_states(ids, values.flatten(1), self.layer_ids, len(self.norm))
        return with_empty_row(states, answer[-1]) if self.with_answer else states

    def _check_embedding(self, rows: torch.Tensor, ids: Sequence[int]) -> None:
        """Layer 0 must be the tokens' embedding: each row then is of its own token. Raises StoreError."""
        if 0 not in self.served:
            return
        expected = functional.embedding(torch.tensor(ids), self.embedding).float()
        seen = rows[:, self.served.index(0)].float()
        alike = functional.cosine_similarity(seen, expected, dim=-1)
        wrong = ((alike < _SAME) & (expected.norm(dim=-1) > 0)).nonzero()[:, 0]
        if len(wrong):
            raise StoreError(
                f"a server's hidden states: the state of layer 0 at token {int(wrong[0])} is not that "
                f"token's embedding, and so at {len(wrong)} of {len(ids)} tokens\n"
                "  expected: row i of the states to be of token i, and the first layer served to be layer 0\n"
                "  change: the server's version, or the layers in its command: rows are rotated against the "
                "tokens, layers are shifted, or it serves another model"
            )


def _rows(path: Path, ids: Sequence[int]) -> torch.Tensor:
    """[tokens, layers, H] of a file that is of these tokens. Raises Failure."""
    try:
        tensors = load_file(path)
        rows, seen = tensors["hidden_states"], tensors["token_ids"]
    except Exception as error:  # safetensors has errors of its own for a torn file
        raise Failure("states_unreadable", f"{path}: {error}") from error
    if seen.tolist() != list(ids):
        raise Failure("states_of_other_tokens", f"{path} holds {len(seen)} tokens, {len(ids)} were asked")
    if rows.shape[0] != len(ids):
        raise Failure(
            "states_short",
            f"{rows.shape[0]} rows of states for {len(ids)} tokens; start the server with "
            "--no-enable-prefix-caching and --no-enable-chunked-prefill",
        )
    return rows


def with_empty_row(states: States, token_id: int) -> States:
    """The states with one more token, of which there are none: a row of zeros."""
    assert states.last is not None
    return States(
        [*states.token_ids, token_id],
        functional.pad(states.aux, (0, 0, 0, 1)),
        functional.pad(states.last, (0, 0, 0, 1)),
    )
