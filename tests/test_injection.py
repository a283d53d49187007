"""No value of the configuration reaches a shell as more than a word, or leads out of the work folder."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from eyrie.config import ConfigError, parse_config

ROOT = Path(__file__).resolve().parent.parent
TINY = yaml.safe_load((ROOT / "configs/tiny.yaml").read_text())
NASTY = [
    "; touch PWNED",
    "$(touch PWNED)",
    "`touch PWNED`",
    "'",
    '"',
    "\\",
    "&& touch PWNED",
    "| sh",
    "> PWNED",
]
NASTY += [
    "../../etc",
    "/etc/passwd",
    "..",
    "-rf",
    "--help",
    "{input}",
    "{x}",
    "{wildcards.dataset}",
    "*",
    "~",
    "$HOME",
]
NASTY += ["\n", "\r", "\0", "\x1b[31m", "\x07", "\ud800", "\u2028", "!", "#", " ", "é"]
nasty = st.lists(st.sampled_from(NASTY) | st.text(max_size=3), min_size=1, max_size=4).map("".join)
# Printable, as the check lets pass: what remains for the shell's quoting to withstand.
printable = nasty.map(lambda text: "".join(sign for sign in text if sign.isprintable()) or "x")
folders = st.text("ab z()+,@#%^=~:._-é\u2028", min_size=1, max_size=8).map(
    lambda text: f"w/{text.strip() or 'x'}w"
)


def tiny(**changes: Any) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(json.dumps(TINY))
    for path, value in changes.items():
        place = data
        *above, last = path.split("__")
        for key in above:
            place = place[key]
        place[last] = value
    return data


@given(nasty)
@example("../outside")
@example("a/../../b")
def test_a_datasets_name_is_a_plain_word_or_refused(name: str) -> None:
    data = tiny()
    data["datasets"][name] = data["datasets"].pop("sharegpt")
    try:
        config = parse_config(data)
    except ConfigError:
        return
    assert all(key.isidentifier() and key.isascii() for key in config.datasets)


@given(nasty)
def test_a_targets_name_stays_in_the_work_folder_or_is_refused(name: str) -> None:
    try:
        config = parse_config(tiny(target__name=name))
    except ConfigError:
        return
    work = Path("/somewhere/work")
    assert (work / config.target.name).resolve().parent == work


@given(nasty)
def test_a_folder_can_stand_in_a_command_or_is_refused(text: str) -> None:
    for key in ("work", "target__path"):
        try:
            config = parse_config(tiny(**{key: text}))
        except ConfigError:
            continue
        path = str(config.work if key == "work" else config.target.path)
        assert path.isprintable() or "\u2028" in path or any(not sign.isascii() for sign in path)
        assert not set(path) & set("{}*?[]\"'`\\$;&|<>!\n\r\0\x1b") and not path.startswith(("-", "~"))


@given(nasty)
def test_no_value_holds_a_control_character(text: str) -> None:
    data = tiny(target__hub_id=text, engine__served_model=text)
    data["datasets"]["sharegpt"]["fields"] = {text: text}
    try:
        config = parse_config(data)
    except ConfigError:
        return
    seen = f"{config.target.hub_id}{config.engine.served_model}{config.datasets['sharegpt'].fields}"
    assert not set(seen) & set("\r\0\x1b\x07\ud800")


@pytest.mark.build
@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(work=folders, path=folders, text=printable, other=printable)
@example(
    work="w/a b", path="w/(c)", text="'; touch PWNED; $(touch PWNED) `touch PWNED` {input}", other="{x} '\""
)
def test_no_value_is_read_by_the_shell(
    tmp_path_factory: pytest.TempPathFactory, work: str, path: str, text: str, other: str
) -> None:
    """A dry run's commands are run by bash with a `python` that only notes its words."""
    folder = tmp_path_factory.mktemp("inject")
    for name in ("Snakefile", "rules", "profiles", "scripts", "samples", "configs"):
        (folder / name).symlink_to(ROOT / name)
    data = tiny(work=work, target__path=path, target__hub_id=other, engine__served_model=text)
    data["engine"] |= {"kind": "vllm", "command": shlex.join(["serve", text, "{port}"])}
    data["training"] |= {"warm_start": path}
    sharegpt = data["datasets"]["sharegpt"]
    sharegpt |= {
        "licence": text,
        "fields": {other: text},
        "source": {"files": [text, other], "format": "json"},
    }
    (folder / path).mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (folder / path / name).touch()
    (folder / "c.yaml").write_text(yaml.safe_dump(data))
    said = _snakemake(folder)
    # Rules that only collect have none.
    shown = [line for line in said.split("\n") if line.startswith("Shell command: ") and line[15:] != "None"]
    commands = [line.removeprefix("Shell command: ") for line in shown]
    assert len(commands) > 10, said
    outputs = [line.split(":", 1)[1] for line in said.split("\n") if line.startswith("    output:")]
    assert all(f" {work}/" in line for line in outputs)
    before = sorted(os.listdir(folder))
    for command in commands:
        assert _words_by_bash(folder, command) == shlex.split(command)[1:]
    assert sorted(os.listdir(folder)) == before


def _snakemake(folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "snakemake", "-n", "-p", "--cores", "2", "--configfile", "c.yaml"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def _words_by_bash(folder: Path, command: str) -> list[str]:
    """The words that a program of the command's first word gets from bash."""
    tools = folder / "w-tools"
    tools.mkdir(exist_ok=True)
    for name in ("python", "torchrun"):
        (tools / name).write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\n")
        (tools / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    for file in tools.iterdir():
        file.unlink()
    tools.rmdir()
    return done.stdout.decode().split("\0")[:-1]
