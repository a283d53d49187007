"""Single tensors of a target folder, read by name: the model as a whole is never loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from eyrie.config import ConfigError
from eyrie.records import sha256_file

# How families of models call the parts around their layers; what precedes a name differs, too, since a model
# that also takes images nests its language model: `language_model.model.embed_tokens.weight`.
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
_HEADS = ("lm_head.weight", "embed_out.weight", "output.weight")
_NORMS = ("norm.weight", "final_layernorm.weight", "ln_f.weight", "final_norm.weight")
# Parts of one layer, as the extra layers that predict several tokens have, are not the model's own.
_IN_A_LAYER = (".layers.", ".h.", ".mtp.", "vision", "visual", "audio")


class TargetWeights:
    """The tensors of a target's language model.

    digests: sha256 of the folder's files by name; a file is checked when it is first read, with None
    none is. Raises ConfigError for a folder that is not the target it is said to be.
    """

    def __init__(self, path: Path, digests: Mapping[str, str] | None) -> None:
        self.path = path
        self._digests = digests
        self._checked: set[Path] = set()
        self._files: dict[str, Path] = {}
        for file in sorted(path.glob("*.safetensors")):
            with safe_open(file, framework="pt") as handle:
                self._files.update(dict.fromkeys(handle.keys(), file))
        name = self._one_of(_EMBEDDINGS)
        if name is None:
            raise self._not_one("embed_tokens.weight", _EMBEDDINGS)
        self._embedding = name
        self._prefix = name[: -len(next(end for end in _EMBEDDINGS if name.endswith(end)))]

    def get(self, name: str) -> torch.Tensor | None:
        """A tensor of the decoder (`layers.3.mlp.up_proj.weight`), in its stored dtype, or None."""
        return self._read(self._prefix + name)

    def embedding(self) -> torch.Tensor:
        """The input embedding [V, H]."""
        weight = self._read(self._embedding)
        assert weight is not None
        return weight

    def head(self, tied: bool | None = None) -> torch.Tensor:
        """The output head [V, H]; the embedding where they are tied, by default where there is no head."""
        name = self._one_of(_HEADS)
        if tied or (tied is None and name is None):
            return self.embedding()
        weight = None if name is None else self._read(name)
        if weight is None:
            raise self._not_one("lm_head.weight", _HEADS)
        return weight

    def final_norm(self) -> torch.Tensor:
        """The weight [H] of the norm between the last layer and the head."""
        found = [weight for name in _NORMS if (weight := self.get(name)) is not None]
        if len(found) != 1:
            raise self._not_one("norm.weight", _NORMS)
        return found[0]

    def _one_of(self, ends: Sequence[str]) -> str | None:
        """The one tensor with one of these names; None where there are none or several."""
        names = [
            name
            for name in self._files
            if any(name == end or name.endswith(f".{end}") for end in ends)
            and not any(part in name for part in _IN_A_LAYER)
        ]
        return names[0] if len(names) == 1 else None

    def _not_one(self, wanted: str, ends: Sequence[str]) -> ConfigError:
        names = [name for name in self._files if name.endswith(tuple(ends))]
        return ConfigError(
            f"{self.path}: expected safetensors files with one {wanted}, saw "
            f"{', '.join(names[:5]) or 'none'}. Change target.path to the folder of the target's weights."
        )

    def _read(self, name: str) -> torch.Tensor | None:
        file = self._files.get(name)
        if file is None:
            return None
        if self._digests is not None and file not in self._checked:
            if sha256_file(file) != self._digests.get(file.name):
                raise ConfigError(
                    f"{file} is not the file that target.json describes: expected sha256 "
                    f"{self._digests.get(file.name)}. Identify the target again, or mend target.path."
                )
            self._checked.add(file)
        with safe_open(file, framework="pt") as handle:
            return handle.get_tensor(name)
