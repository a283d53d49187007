"""A base, a docker of the tests' own, the image, and a native build to compare with."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from container import reduced
from container.docker import BASE, CLIENT, ENVIRONMENT, IMAGE, NAME, REVISION, Image, dockerd, quietly
from workspace import ROOT, Workspace

TARGET = Path("models/smollm2-135m-instruct")
# Debian's own, which is the base's: a manifest records the interpreter's version.
SYSTEM_PYTHON = Path("/usr/bin/python3")


def missing() -> str:
    """Why no image can be built here; empty where one can."""
    if os.geteuid() != 0:
        return "a docker of the tests' own takes root"
    tools = [name for name in ("dockerd", "mmdebstrap", "make") if shutil.which(name) is None]
    tools += [path for path in (CLIENT, str(SYSTEM_PYTHON)) if not Path(path).exists()]
    if tools:
        return f"absent: {', '.join(tools)} (apt-get install docker.io mmdebstrap python3)"
    if system_python_version()[:2] != platform.python_version_tuple()[:2]:
        return f"{SYSTEM_PYTHON} is of another version than {sys.executable}, whose packages it would use"
    return ""


def system_python_version() -> tuple[str, ...]:
    """The version of Debian's Python."""
    command = [str(SYSTEM_PYTHON), "-c", "import platform; print(platform.python_version())"]
    return tuple(
        subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip().split(".")
    )


@pytest.fixture(scope="session")
def folder() -> Iterator[Path]:
    """A folder that others than root may enter, which pytest's own is not."""
    if reason := missing():
        pytest.skip(reason)
    path = Path(tempfile.mkdtemp(prefix="eyrie-container-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="session")
def socket(folder: Path) -> Iterator[str]:
    """A docker of the tests' own."""
    with dockerd(folder / "docker") as path:
        yield path


@pytest.fixture(scope="session")
def image(folder: Path, socket: str) -> Image:
    """The image, built on a base made here, from wheels and without a network."""
    context = Workspace.clone(folder / "context").folder
    python = ".".join(system_python_version()[:2])
    wheels = [f"--out={context / 'wheels'}", f"--python={python}", "--device=cpu"]
    quietly(sys.executable, "scripts/fetch_wheels.py", *wheels)
    base = make_base(folder)
    quietly(CLIENT, "--host", socket, "import", str(base), BASE)
    base.unlink()
    described = [f"IMAGE={IMAGE}", f"REVISION={REVISION}"]
    quietly(
        *("make", "image", f"DOCKER={CLIENT}", f"BASE_IMAGE={BASE}", *described),
        "BUILD_ARGS=--network none --build-arg PACKAGES=python3 --progress plain",
        cwd=context,
        environment={"DOCKER_HOST": socket},
    )
    shutil.rmtree(context)
    inspect = [CLIENT, "--host", socket, "image", "inspect", "--format={{.Id}}", IMAGE]
    return Image(socket, quietly(*inspect).strip())


def make_base(folder: Path) -> Path:
    """A root file system of this machine's own release, from this machine's own sources."""
    base = folder / "base.tar"
    settings = ['--aptopt=Acquire::Languages "none"', '--aptopt=Acquire::Check-Valid-Until "false"']
    settings += ["--dpkgopt=force-unsafe-io"]
    hook = "--customize-hook=copy-in /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs"
    release = platform.freedesktop_os_release()["VERSION_CODENAME"]
    sources = "/etc/apt/sources.list.d/debian.sources"
    quietly(
        *("mmdebstrap", "--quiet", "--variant=minbase", "--include=ca-certificates,python3", *settings, hook),
        *(release, str(base), sources),
        environment={"TMPDIR": "/dev/shm"},
    )
    return base


@pytest.fixture(scope="session")
def native(folder: Path, image: Image) -> Workspace:
    """The reduced build without a container, by Debian's interpreter and this environment's packages."""
    workspace = reduced_workspace(folder / "native")
    shutil.copytree(ROOT / TARGET, workspace.folder / TARGET)
    interpreter = system_interpreter(folder / "python")
    # The image's digest is all that a manifest says of a container; with it the bytes must be equal.
    environment = {**ENVIRONMENT, "EYRIE_IMAGE": image.digest}
    command = ["-m", "snakemake", "--cores", "2", "--configfile", reduced.NAME]
    quietly(str(interpreter), *command, cwd=workspace.folder, environment=environment)
    return workspace


def system_interpreter(folder: Path) -> Path:
    """Debian's Python with the packages of the environment that runs the tests."""
    quietly(str(SYSTEM_PYTHON), "-m", "venv", "--without-pip", str(folder))
    version = f"python{'.'.join(system_python_version()[:2])}"
    packages = Path(sys.prefix) / "lib" / version / "site-packages"
    (folder / "lib" / version / "site-packages" / "eyrie.pth").write_text(f"{packages}\n")
    return folder / "bin/python"


def reduced_workspace(folder: Path) -> Workspace:
    """A copy of the repository with the reduced configuration."""
    folder.mkdir()
    workspace = Workspace.clone(folder)
    reduced.write(folder)
    return workspace


@pytest.fixture(autouse=True)
def _no_container_stays(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "image" in request.fixturenames:
        request.getfixturevalue("image").docker("rm", "--force", NAME, check=False)
