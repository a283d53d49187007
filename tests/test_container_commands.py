"""The commands around the image: what docker is told, which wheels are wanted, what a manifest says of it."""

from __future__ import annotations

import shlex
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fetch_wheels
import run_container
from eyrie import provenance
from eyrie.config import ConfigError, EngineSettings, HiddenStatesSettings
from eyrie.engines import starting

DIGEST = "sha256:0123"
SECRETS = st.text(st.characters(categories=["L", "N"]), min_size=12)


def words(*arguments: str, environment: dict[str, str] | None = None) -> list[str]:
    return run_container.command(run_container.parse(arguments), environment or {}, DIGEST)


@given(SECRETS)
def test_secrets_are_named_and_never_spelled_out(secret: str) -> None:
    told = words("--", "all", environment={"HF_TOKEN": secret, "HTTPS_PROXY": secret, "UNRELATED": secret})
    assert not [word for word in told if secret in word]
    assert ("--env", "HF_TOKEN") in pairwise(told)
    assert "UNRELATED" not in told


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))))
def test_snakemakes_arguments_arrive_as_they_are(arguments: list[str]) -> None:
    told = words("--", *arguments)
    assert told[told.index("eyrie", told.index("--user")) + 1 :] == arguments
    # What is printed can be typed.
    assert shlex.split(shlex.join(told)) == told


def test_all_gpus_unless_told_otherwise() -> None:
    assert words()[words().index("--gpus") + 1] == "all"
    told = words("--gpus", "device=0,1")
    assert told[told.index("--gpus") + 1] == "device=0,1"
    assert "--gpus" not in words("--gpus", "none")


def test_what_is_read_is_not_written() -> None:
    told = words("--mount", "/data")
    assert [word for word in told if word.endswith(":ro")] == [
        f"{(Path.cwd() / name).resolve()}:/eyrie/{name}:ro" for name in ("samples", "configs", "config.yaml")
    ]
    assert "/data:/data" in told


def test_the_engines_interpreter_is_not_the_builds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(starting, "Server", lambda command, url, **rest: nullcontext(started.append(command)))
    command = "{python} -m engine --port {port}"
    for python in ("python", "/usr/bin/python3"):
        settings = EngineSettings(kind="vllm", command=command, python=python)
        states = HiddenStatesSettings()
        with starting.started(settings, command, tmp_path, states, tmp_path, tmp_path / "log", False):
            assert started[-1][:3] == [python, "-m", "engine"]


def test_torch_of_the_wanted_device_and_no_other(tmp_path: Path) -> None:
    text = "# a comment\ntorch==2.13.0\n\nnumpy==2.4.6\n"
    assert fetch_wheels.requirements(text, "cpu") == ["torch==2.13.0", "numpy==2.4.6"]
    # pip takes 2.13.0+cpu, too, for `==`.
    assert fetch_wheels.requirements(text, "cuda") == ["torch===2.13.0", "numpy==2.4.6"]
    (tmp_path / "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl").touch()
    fetch_wheels.refuse_other_device(tmp_path, "cpu")
    with pytest.raises(ConfigError, match=r"expected torch for cuda"):
        fetch_wheels.refuse_other_device(tmp_path, "cuda")
    (tmp_path / "torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl").touch()
    with pytest.raises(ConfigError, match=r"saw torch-2\.13\.0\+cpu.*, torch-2\.13\.0-cp311"):
        fetch_wheels.refuse_other_device(tmp_path, "cpu")


def test_a_manifest_names_the_image_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(provenance.IMAGE_VARIABLE, raising=False)
    plain = provenance.manifest_header("stage", {}, [])
    monkeypatch.setenv(run_container.IMAGE_VARIABLE, DIGEST)
    assert provenance.manifest_header("stage", {}, []) == plain | {"image": DIGEST}
    assert f"{run_container.IMAGE_VARIABLE}={DIGEST}" in words()
