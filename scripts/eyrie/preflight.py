"""What a build needs of its machine, asked before the first day is spent: each fault comes with its mend."""

from __future__ import annotations

import glob
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from eyrie.budget import nearest_there, size_of
from eyrie.config import Config
from eyrie.machine import Machine
from eyrie.planning import BuildPlan
from eyrie.remote_code import named_code
from eyrie.safe_values import secrets_in, words_of

State = Literal["ok", "warning", "fault"]
_GIB = 1 << 30
_LFS = b"version https://git-lfs"
# Long before any file of the build, and far behind any clock that is merely wrong.
_YEAR_2025 = 1_735_689_600
# What eight workers with pinned memory and a few hundred connections want.
_NOFILE, _MAPS, _PIDS = 65_536, 262_144, 16_384
# Each worker of a server exchanges tensors with the others through it.
_SHM_FOR_EACH_GPU = 2 * _GIB
_BUSY_MIB = 1_024


@dataclass(frozen=True)
class Finding:
    """What one check saw."""

    name: str
    state: State
    seen: str
    mend: str = ""


@dataclass(frozen=True)
class Asked:
    """What a check looks at."""

    config: Config
    plan: BuildPlan
    machine: Machine


Check = Callable[[Asked], Iterator[Finding]]


def check_gpus(asked: Asked) -> Iterator[Finding]:
    """Driver, number of GPUs, and whether somebody else uses them."""
    wanted = asked.plan.gpus
    query = ["nvidia-smi", "--query-gpu=index,name,memory.used,memory.total,driver_version"]
    status, text = asked.machine.run([*query, "--format=csv,noheader,nounits"])
    if status == 127:
        mend = "install the driver; in a container, start it with --gpus all"
        state: State = "fault" if wanted else "ok"
        seen = "no nvidia-smi" + ("" if wanted else ", and the configuration asks for no GPU")
        yield Finding("gpu driver", state, seen, mend if wanted else "")
        return
    if status:
        yield Finding(
            "gpu driver",
            "fault" if wanted else "warning",
            f"nvidia-smi ended with {status}: {text.strip().splitlines()[-1] if text.strip() else 'no word'}",
            "driver and kernel module differ, or the device is lost: reboot, or reinstall the driver",
        )
        return
    gpus = [[cell.strip() for cell in line.split(",")] for line in text.strip().splitlines()]
    if len(gpus) < wanted:
        yield Finding(
            "gpus",
            "fault",
            f"{len(gpus)} of the {wanted} that the configuration wants",
            "free or add GPUs (CUDA_VISIBLE_DEVICES, --gpus all), or lower tensor-parallel-size "
            "and training.processes",
        )
    busy = [gpu for gpu in gpus if gpu[2].isdigit() and int(gpu[2]) > _BUSY_MIB]
    if busy and wanted:
        held = ", ".join(f"{gpu[0]} ({gpu[2]} MiB)" for gpu in busy)
        yield Finding(
            "gpus free",
            "fault",
            f"memory is taken on GPU {held}",
            "`nvidia-smi` names the processes: end them, or wait; a server that a killed build left is "
            "ended by the next one",
        )
    if len(gpus) >= wanted and not (busy and wanted):
        yield Finding("gpus", "ok", f"{len(gpus)} of {gpus[0][1]}, driver {gpus[0][4]}" if gpus else "none")


def check_disk(asked: Asked) -> Iterator[Finding]:
    """Room for what the plan says will be written."""
    store = asked.config.work / "store"
    needed, free = asked.plan.state_bytes(), asked.machine.free(store)
    left = free - asked.config.hidden_states.disk_reserve
    if needed is None:
        yield Finding(
            "disk",
            "warning",
            f"{size_of(free)} free; what the states take is unknown",
            "set target.shape, or put the target's config.json into target.path",
        )
    elif needed.value > left:
        yield Finding(
            "disk",
            "fault",
            f"{size_of(round(needed.value))} of states to write, {size_of(max(0, left))} free beside "
            "hidden_states.disk_reserve",
            "move `work` to a larger disk, lower the datasets' `samples`, or take the states dataset by "
            "dataset with `make gc` between (docs/gpu-host.md)",
        )
    else:
        yield Finding("disk", "ok", f"{size_of(round(needed.value))} to write, {size_of(left)} free")
    there = nearest_there(store)
    if not os.access(there, os.W_OK):
        yield Finding("disk", "fault", f"{there} can't be written to", "chown it, or run as its owner")


def check_ports(asked: Asked) -> Iterator[Finding]:
    """Servers that should run do; a fixed port of one that is to be started is free."""
    engine = asked.config.engine
    for url in engine.urls:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        if not asked.machine.answers(parts.hostname or "", port):
            yield Finding("server", "fault", f"nobody answers at {url}", "start it, or mend engine.urls")
    words = [] if engine.command is None or engine.urls else words_of(engine.command)
    fixed = [int(after) for word, after in pairwise(words) if word.endswith("port") and after.isdigit()]
    for port in fixed:
        if asked.machine.answers("127.0.0.1", port):
            yield Finding(
                "port", "fault", f"somebody listens on {port}", "end it (`ss -ltnp`), or write {port} there"
            )
    if not fixed and not engine.urls:
        yield Finding("ports", "ok", "a server that is started gets a free one")


def check_engine(asked: Asked) -> Iterator[Finding]:
    """The interpreter of the server's command, with the engine in it; no secret in the command."""
    engine = asked.config.engine
    if engine.kind == "in_process" or engine.command is None or engine.urls:
        yield Finding("engine", "ok", "in this process" if engine.kind == "in_process" else "running servers")
        return
    for secret in secrets_in(engine.command):
        yield Finding(
            "secrets",
            "warning",
            f"engine.command: {secret}",
            "it would stand in logs, manifests and `ps`: export it as a variable, which the server gets",
        )
    program = _program(words_of(engine.command))
    if shutil.which(program) is None:
        yield Finding(
            "engine",
            "fault",
            f"engine.command starts {program}, which is not there",
            f"install {engine.kind} into an environment of its own (`make vllm-env` is the CPU's; for GPUs "
            "see docs/gpu-host.md), or name its interpreter",
        )
        return
    if "python" in Path(program).name:
        module = engine.kind
        test = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
        status, _ = asked.machine.run([program, "-I", "-c", test])
        if status:
            yield Finding(
                "engine",
                "fault",
                f"{program} has no {module}",
                "install it there, or name another interpreter",
            )
            return
    yield Finding("engine", "ok", f"{program}")


def _program(words: list[str]) -> str:
    """The word that is run: behind `env` and what it sets."""
    rest = iter(words)
    for word in rest:
        if Path(word).name != "env" and "=" not in word.split("/")[0]:
            return word
    return words[-1]


def check_docker(asked: Asked) -> Iterator[Finding]:
    """Where there is a Docker: its daemon answers, and gives GPUs to containers where some are wanted."""
    if not asked.machine.has("docker"):
        yield Finding("docker", "ok", "none here; it is only needed for `make image` and `make run`")
        return
    status, text = asked.machine.run(["docker", "info", "--format", "{{json .Runtimes}}"])
    if status:
        yield Finding(
            "docker",
            "warning",
            "the daemon does not answer",
            "start it (`systemctl start docker`) and join its group, if the build is to run in a container",
        )
    elif asked.plan.gpus and "nvidia" not in text:
        yield Finding(
            "docker",
            "warning",
            "it has no NVIDIA runtime",
            "install nvidia-container-toolkit and run `nvidia-ctk runtime configure`, if the build is to run "
            "in a container",
        )
    else:
        yield Finding("docker", "ok", "the daemon answers")


def check_model(asked: Asked) -> Iterator[Finding]:
    """The target's files: all shards that the index names, of the size that they declare; the tokenizer."""
    target = asked.config.target
    folder = target.path
    if not (folder / "config.json").is_file():
        yield Finding(
            "model",
            "fault",
            f"{folder} has no config.json",
            f"hf download {target.hub_id or 'OWNER/NAME'} --local-dir {folder}"
            if target.hub_id
            else "put the target's folder there, or change target.path (the default target: make)",
        )
        return
    faults = list(_model_faults(folder))
    yield from (Finding("model", "fault", fault, f"fetch the file again into {folder}") for fault in faults)
    if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        yield from _code_faults(asked)
    else:
        yield Finding("model", "fault", f"{folder} has no tokenizer", "fetch tokenizer* into it")
    pickles = sorted(file.name for kind in ("*.bin", "*.pt", "*.pth") for file in folder.glob(kind))
    if pickles and not any(folder.glob("*.safetensors")):
        yield Finding(
            "model",
            "fault",
            f"weights as pickles: {', '.join(pickles[:3])}",
            "take a release in safetensors: a pickle runs code when it is read, so none is",
        )
    if not faults:
        count = len(list(folder.glob("*.safetensors")))
        yield Finding("model", "ok", f"{folder}: {count} files of weights, whole")


def _model_faults(folder: Path) -> Iterator[str]:
    files = sorted(folder.glob("*.safetensors"))
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    named = {name for index in indexes for name in _weight_map(index).values()}
    yield from (
        f"{name} is named by the index and not there" for name in sorted(named - {f.name for f in files})
    )
    if not files and not named:
        yield f"{folder} has no *.safetensors"
    for file in [*files, *folder.glob("*.json"), *folder.glob("*.model")]:
        if file.open("rb").read(len(_LFS)) == _LFS:
            yield f"{file.name} is a Git-LFS pointer, not the data (`git lfs pull`)"
        elif file.suffix == ".safetensors" and (fault := _size_fault(file)):
            yield f"{file.name} {fault}"


def _weight_map(index: Path) -> dict[str, str]:
    try:
        found = json.loads(index.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError):
        return {}
    return dict(found)


def _size_fault(file: Path) -> str | None:
    """What is wrong with a safetensors file's size; the tensors themselves are not read."""
    size = file.stat().st_size
    with file.open("rb") as data:
        length = int.from_bytes(data.read(8), "little")
        if size < 8 or length > min(size, 1 << 30):
            return f"is cut off or no safetensors file ({size:,} bytes)"
        try:
            header: dict[str, Any] = json.loads(data.read(length))
        except ValueError:
            return "has a damaged header"
    ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
    declared = 8 + length + max(ends, default=0)
    return None if size == declared else f"has {size:,} bytes, its header declares {declared:,}"


def _code_faults(asked: Asked) -> Iterator[Finding]:
    target = asked.config.target
    code = "tokenizer_config.json" in named_code(target.path)
    if code and not (target.path / "tokenizer.json").exists() and not target.trust_remote_code:
        files = ", ".join(sorted(file.name for file in target.path.glob("*.py"))) or "none there"
        yield Finding(
            "code",
            "fault",
            f"the tokenizer is Python of the target's own ({files})",
            "read it; then set target.revision to its commit and target.trust_remote_code: true",
        )


def check_data(asked: Asked) -> Iterator[Finding]:
    """Each dataset's files are here, or can be had."""
    offline = asked.machine.environment.get("HF_HUB_OFFLINE", "") not in ("", "0")
    token = "HF_TOKEN is set" if asked.machine.environment.get("HF_TOKEN") else "HF_TOKEN is not set"
    good = 0
    for name, dataset in sorted(asked.config.datasets.items()):
        source, where = dataset.source, f"datasets.{name}.source"
        if (asked.config.work / "raw" / name / "source.json").is_file():
            good += 1
        elif source.is_local:
            patterns = source.files if source.hub_id is None else [source.hub_id]
            missing = [pattern for pattern in patterns if not glob.glob(pattern, recursive=True)]
            good += not missing
            for pattern in missing:
                yield Finding(
                    "data", "fault", f"{where}: {pattern} names no file", "put it there, or mend it"
                )
        elif source.revision is None:
            yield Finding(
                "data",
                "fault",
                f"{where}: {source.hub_id} has no revision",
                "pin the commit that `Files and versions` shows; without it nothing is fetched",
            )
        elif offline:
            yield Finding(
                "data",
                "fault",
                f"{where}: {source.hub_id} is to be fetched, and HF_HUB_OFFLINE is set",
                f"HF_HUB_OFFLINE=0 for this host, or bring {asked.config.work}/raw/{name}/{source.revision} "
                "from elsewhere: the fetching job's error names the command",
            )
        elif why := asked.machine.why_not_on_the_hub(source.hub_id or "", source.revision):
            yield Finding(
                "data",
                "fault",
                f"{where}: {source.hub_id}: {why}",
                f"network, terms on the dataset's page, or a token ({token}); then run this again",
            )
        else:
            good += 1
    if good == len(asked.config.datasets):
        yield Finding("data", "ok", f"{good} datasets are here or can be had")


def check_limits(asked: Asked) -> Iterator[Finding]:
    """Limits of the process and the kernel under which servers fail late and oddly."""
    machine, gpus = asked.machine, asked.plan.gpus
    nofile = machine.limit("NOFILE")
    wanted = _NOFILE if gpus else 1_024
    yield _at_least(
        "open files",
        nofile,
        wanted,
        "ulimit -n 65536 (limits.conf: nofile), docker run --ulimit nofile=65536",
    )
    if gpus:
        yield _at_least(
            "locked memory",
            machine.limit("MEMLOCK"),
            64 << 20,
            "ulimit -l unlimited (limits.conf: memlock), docker run --ulimit memlock=-1; NCCL pins memory",
        )
        shm = machine.size("/dev/shm")
        yield _at_least(
            "/dev/shm",
            shm or 0,
            gpus * _SHM_FOR_EACH_GPU,
            "docker run --shm-size 32g or --ipc host; elsewhere mount -o remount,size=32G /dev/shm",
            size_of,
        )
        maps = machine.read("/proc/sys/vm/max_map_count")
        yield _at_least(
            "vm.max_map_count", int(maps or 0), _MAPS, "sysctl -w vm.max_map_count=262144 (and /etc/sysctl.d)"
        )
    yield from _memory(asked)
    pids = machine.read("/sys/fs/cgroup/pids.max") or "max"
    if pids.isdigit():
        yield _at_least(
            "processes",
            int(pids),
            _PIDS if gpus else 512,
            "docker run --pids-limit -1, or the unit's TasksMax",
        )


def _at_least(
    name: str, seen: int, wanted: int, mend: str, words: Callable[[int], str] = "{:,}".format
) -> Finding:
    if seen == -1 or seen >= wanted:
        return Finding(name, "ok", "no limit" if seen == -1 else words(seen))
    return Finding(name, "fault", f"{words(seen)}; expected at least {words(wanted)}", mend)


def _memory(asked: Asked) -> Iterator[Finding]:
    """Memory of the machine and of its control group, swap, huge pages."""
    machine, gpus = asked.machine, asked.plan.gpus
    lines = (line.split() for line in (machine.read("/proc/meminfo") or "").splitlines())
    found = {line[0].rstrip(":"): int(line[1]) << 10 for line in lines if len(line) > 1 and line[1].isdigit()}
    limit = machine.read("/sys/fs/cgroup/memory.max") or "max"
    total = min(found.get("MemTotal", 0), int(limit) if limit.isdigit() else 1 << 62)
    yield _at_least(
        "memory",
        total,
        (256 if gpus else 6) * 10**9,
        "a larger machine, or a higher limit (docker run --memory, the unit's MemoryMax): weights are loaded "
        "through the page cache, and the trainer holds shards",
        size_of,
    )
    if gpus and found.get("SwapTotal", 0):
        yield Finding(
            "swap",
            "warning",
            f"{size_of(found['SwapTotal'])} of swap",
            "swapoff -a: a server that swaps looks alive and answers nothing in time",
        )
    taken = found.get("HugePages_Total", 0) >> 10
    size = found.get("Hugepagesize", 0)
    if taken * size > total // 2:
        yield Finding(
            "huge pages",
            "warning",
            f"{size_of(taken * size)} are set aside as huge pages",
            "sysctl -w vm.nr_hugepages=0",
        )


def check_clock(asked: Asked) -> Iterator[Finding]:
    """A clock that is behind the files makes all of them look newer than what is made from them."""
    now = asked.machine.now()
    newest = max(
        (path.stat().st_mtime for path in (asked.config.work / "store", Path.cwd()) if path.exists()),
        default=0,
    )
    if now < max(_YEAR_2025, newest - 60):
        yield Finding("clock", "fault", "it is behind the files of this folder", "timedatectl set-ntp true")
    else:
        yield Finding("clock", "ok", "not behind the files of this folder")


CHECKS: tuple[Check, ...] = (
    check_gpus,
    check_disk,
    check_ports,
    check_engine,
    check_docker,
    check_model,
    check_data,
    check_limits,
    check_clock,
)


def all_findings(asked: Asked) -> list[Finding]:
    """What all checks saw, in their order."""
    return [finding for check in CHECKS for finding in check(asked)]
