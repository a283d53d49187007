"""Run a build in a container of the image, or a shell; print the docker command that does it.

    python scripts/run_container.py -- --cores all --configfile configs/kimi-k2.5.yaml
    python scripts/run_container.py --shell

Results, models, samples, configurations and Snakemake's notes are this folder's own, so that a build can
be gone on with in the container, beside it, or in another one. Files belong to who runs this. Variables
with secrets are named and never spelled out: docker takes their values from its own environment. It needs
no more than Python and docker; the variable DOCKER names another client.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

INSIDE = Path("/eyrie")
WRITTEN = ("work", "models", ".snakemake")
READ = ("samples", "configs", "config.yaml")
# Handed on where they are set: secrets, proxies, and what changes how the build computes or where it looks.
VARIABLES = (
    "HF_TOKEN",
    "HF_ENDPOINT",
    "HF_HUB_OFFLINE",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "OPENBLAS_CORETYPE",
)
IMAGE_VARIABLE = "EYRIE_IMAGE"
# Longer than stop_build.py waits, so that docker does not kill what is about to end.
STOP_SECONDS = 200


def command(arguments: argparse.Namespace, environment: Mapping[str, str], digest: str) -> list[str]:
    """The words of the docker command."""
    here = Path.cwd()
    words = [environment.get("DOCKER", "docker"), "run", "--rm", "--init", "--name", arguments.name]
    words += ["--stop-timeout", str(STOP_SECONDS), "--shm-size", arguments.shm_size]
    words += ["--user", f"{os.getuid()}:{os.getgid()}"]
    if arguments.gpus != "none":
        words += ["--gpus", arguments.gpus]
    for name in WRITTEN:
        words += ["--volume", f"{(here / name).resolve()}:{INSIDE / name}"]
    for name in READ:
        words += ["--volume", f"{(here / name).resolve()}:{INSIDE / name}:ro"]
    for path in arguments.mount:
        words += ["--volume", f"{path.resolve()}:{path.absolute()}"]
    for name in VARIABLES:
        if name in environment:
            words += ["--env", name]
    words += ["--env", f"{IMAGE_VARIABLE}={digest}"] if digest else []
    words += shlex.split(arguments.docker_args)
    if sys.stdin.isatty():
        words += ["--interactive", "--tty"]
    if arguments.shell:
        return [*words, "--entrypoint", "/bin/bash", arguments.image]
    return [*words, arguments.image, *arguments.arguments]


def image_digest(image: str, docker: str) -> str:
    """What names the image for good: the digest under which a registry has it, else its own."""
    form = "{{if .RepoDigests}}{{index .RepoDigests 0}}{{else}}{{.Id}}{{end}}"
    inspect = [docker, "image", "inspect", "--format", form, image]
    result = subprocess.run(inspect, capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"docker knows no image {image}:\n{result.stderr.strip()}\nmake image builds it.")
    return result.stdout.strip()


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--image", default="eyrie", help="the image")
    parser.add_argument("--name", default="eyrie", help="the container's name")
    parser.add_argument("--gpus", default="all", help="docker's --gpus: all, device=0,1, ...; none: no GPU")
    parser.add_argument(
        "--shm-size", default="16g", help="shared memory, which an engine's workers talk over"
    )
    parser.add_argument(
        "--mount",
        type=Path,
        action="append",
        default=[],
        help="a folder to have in there under the same path",
    )
    parser.add_argument("--docker-args", default="", help="more for docker run, as one line")
    parser.add_argument("--shell", action="store_true", help="a shell in place of the build")
    parser.add_argument("arguments", nargs="*", help="after --: Snakemake's arguments, or `demo`")
    return parser.parse_args(words)


def main() -> None:
    """The command."""
    arguments = parse()
    # Docker would make a folder that is not there for root.
    for name in WRITTEN:
        Path(name).mkdir(exist_ok=True)
    words = command(arguments, os.environ, image_digest(arguments.image, os.environ.get("DOCKER", "docker")))
    print(shlex.join(words), flush=True)
    os.execvp(words[0], words)


if __name__ == "__main__":
    main()
