"""Each check of the preflight, on machines that never were."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from eyrie import preflight
from eyrie.config import Config, parse_config
from eyrie.machine import Machine
from eyrie.planning import Assumptions, plan_build
from eyrie.preflight import Asked, Check, Finding, all_findings
from tiny_drafting import save_tiny_target

GIB = 1 << 30
SMI = "{n}, NVIDIA H200, {used}, 143771, 570.1\n"
FILES = {
    "/proc/sys/vm/max_map_count": "1048576",
    "/proc/meminfo": "MemTotal: 2000000000 kB\nSwapTotal: 0 kB\nHugePages_Total: 0\nHugepagesize: 2048 kB",
    "/sys/fs/cgroup/pids.max": "max",
    "/sys/fs/cgroup/memory.max": "max",
}


@dataclass(frozen=True)
class Fake(Machine):
    """A machine with what a test gives it; by default all a GPU host needs."""

    environment: Mapping[str, str] = field(default_factory=dict)
    smi: tuple[int, str] = (0, "".join(SMI.format(n=n, used=4) for n in range(8)))
    others: tuple[int, str] = (0, "nvidia")
    files: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)
    room: int = 10**15
    shm: int = 64 * GIB
    listening: frozenset[int] = frozenset()
    clock: float = 4e9
    hub: str | None = None
    docker: bool = True

    def run(self, command: Sequence[str]) -> tuple[int, str]:
        return self.smi if command[0] == "nvidia-smi" else self.others

    def has(self, command: str) -> bool:
        return self.docker

    def read(self, path: str) -> str | None:
        return {**FILES, **self.files}.get(path)

    def limit(self, name: str) -> int:
        return {"NOFILE": 1 << 20, "MEMLOCK": -1, **self.limits}[name]

    def free(self, folder: Path) -> int:
        return self.room

    def size(self, folder: str) -> int | None:
        return self.shm

    def answers(self, host: str, port: int) -> bool:
        return port in self.listening

    def now(self) -> float:
        return self.clock

    def why_not_on_the_hub(self, hub_id: str, revision: str) -> str | None:
        return self.hub


@pytest.fixture
def host(root: Path, tmp_path: Path) -> dict[str, Any]:
    """A whole configuration for eight GPUs, of a target that is there."""
    data = yaml.safe_load((root / "configs/tiny.yaml").read_text())
    for dataset in data["datasets"].values():
        dataset["source"]["files"] = [str(root / name) for name in dataset["source"]["files"]]
    save_tiny_target(tmp_path / "model")
    data["target"]["path"] = str(tmp_path / "model")
    command = f"env A=1 {sys.executable} -m vllm --port {{port}} --tensor-parallel-size 8"
    return {**data, "work": str(tmp_path / "work"), "engine": {"kind": "vllm", "command": command}}


def asked(data: dict[str, Any], machine: Machine) -> Asked:
    config: Config = parse_config(data)
    return Asked(config, plan_build(config, Assumptions()), machine)


def seen(check: Check, data: dict[str, Any], machine: Machine) -> list[Finding]:
    return list(check(asked(data, machine)))


def faults(findings: list[Finding]) -> list[str]:
    return [f"{one.name}: {one.seen}" for one in findings if one.state != "ok"]


def test_a_good_host_has_nothing_against_it(host: dict[str, Any]) -> None:
    assert faults(all_findings(asked(host, Fake()))) == []


def test_every_fault_has_its_mend(host: dict[str, Any]) -> None:
    files = {
        "/proc/sys/vm/max_map_count": "9",
        "/sys/fs/cgroup/pids.max": "9",
        "/sys/fs/cgroup/memory.max": "9",
        "/proc/meminfo": "MemTotal: 99 kB\nSwapTotal: 5 kB\nHugePages_Total: 9\nHugepagesize: 2048 kB",
    }
    limits = {"NOFILE": 10, "MEMLOCK": 10}
    bad = Fake(smi=(127, ""), others=(1, ""), room=0, shm=1, limits=limits, clock=0.0, files=files)
    shutil.rmtree(host["target"]["path"])
    found = [one for one in all_findings(asked(host, bad)) if one.state != "ok"]
    names = {one.name for one in found}
    assert names >= {
        "gpu driver",
        "disk",
        "engine",
        "docker",
        "model",
        "open files",
        "locked memory",
        "memory",
    }
    assert names >= {"/dev/shm", "vm.max_map_count", "processes", "swap", "huge pages", "clock"}
    assert all(one.mend for one in found)


@pytest.mark.parametrize(
    ("smi", "words"),
    [
        ((127, ""), "no nvidia-smi"),
        (
            (9, "driver/library version mismatch\n"),
            "nvidia-smi ended with 9: driver/library version mismatch",
        ),
        ((0, SMI.format(n=0, used=1)), "1 of the 8"),
        (
            (0, "".join(SMI.format(n=n, used=90_000 * (n == 3)) for n in range(8))),
            "taken on GPU 3 (90000 MiB)",
        ),
    ],
)
def test_gpus(host: dict[str, Any], smi: tuple[int, str], words: str) -> None:
    [fault] = faults(seen(preflight.check_gpus, host, Fake(smi=smi)))
    assert words in fault


def test_no_gpu_is_wanted_where_none_is_asked_for(root: Path) -> None:
    data = yaml.safe_load((root / "configs/tiny.yaml").read_text())
    assert faults(seen(preflight.check_gpus, data, Fake(smi=(127, "")))) == []


def test_disk(host: dict[str, Any]) -> None:
    wanted = asked(host, Fake()).plan.state_bytes()
    assert wanted is not None
    reserve = 1_000_000_000
    assert faults(seen(preflight.check_disk, host, Fake(room=round(wanted.value) + reserve))) == []
    [fault] = faults(seen(preflight.check_disk, host, Fake(room=round(wanted.value) + reserve - 1)))
    assert "of states to write" in fault


def test_ports(host: dict[str, Any]) -> None:
    host["engine"]["command"] += " --nccl-port 5000"
    assert faults(seen(preflight.check_ports, host, Fake())) == []
    assert faults(seen(preflight.check_ports, host, Fake(listening=frozenset({5000})))) == [
        "port: somebody listens on 5000"
    ]
    host["engine"]["urls"] = ["http://127.0.0.1:81"]
    assert faults(seen(preflight.check_ports, host, Fake())) == [
        "server: nobody answers at http://127.0.0.1:81"
    ]


def test_engine(host: dict[str, Any]) -> None:
    assert faults(seen(preflight.check_engine, host, Fake(others=(1, "")))) == [
        f"engine: {sys.executable} has no vllm"
    ]
    host["engine"]["command"] = "env HF_TOKEN=hush /nowhere/python -m vllm --port {port}"
    secret, engine = faults(seen(preflight.check_engine, host, Fake()))
    assert "sets HF_TOKEN" in secret and "hush" not in secret
    assert "/nowhere/python, which is not there" in engine


def _cut(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])


def _pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    )


def _index(folder: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _pickles(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _no_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


def _code(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["a.B", None]}}))
    (folder / "a.py").write_text("")


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (_cut, "its header declares"),
        (_pointer, "is a Git-LFS pointer"),
        (_index, "model-2.safetensors is named by the index and not there"),
        (_pickles, "weights as pickles: pytorch_model.bin"),
        (_no_tokenizer, "has no tokenizer"),
        (_code, "the tokenizer is Python of the target's own (a.py)"),
    ],
)
def test_model(host: dict[str, Any], harm: Callable[[Path], None], words: str) -> None:
    harm(Path(host["target"]["path"]))
    assert any(words in fault for fault in faults(seen(preflight.check_model, host, Fake())))


def test_data(host: dict[str, Any]) -> None:
    source = host["datasets"]["sharegpt"]["source"]
    source["files"] = ["nowhere/*.json"]
    assert faults(seen(preflight.check_data, host, Fake())) == [
        "data: datasets.sharegpt.source: nowhere/*.json names no file"
    ]
    source |= {"hub_id": "a/b", "files": ["x.json"]}
    assert "a/b has no revision" in faults(seen(preflight.check_data, host, Fake()))[0]
    source["revision"] = "0123456789"
    assert faults(seen(preflight.check_data, host, Fake())) == []
    offline = Fake(environment={"HF_HUB_OFFLINE": "1"})
    assert "HF_HUB_OFFLINE is set" in faults(seen(preflight.check_data, host, offline))[0]
    gated = Fake(environment={"HF_TOKEN": "hush"}, hub="GatedRepoError: 403")
    [finding] = [one for one in seen(preflight.check_data, host, gated) if one.state == "fault"]
    assert "GatedRepoError: 403" in finding.seen
    assert "HF_TOKEN is set" in finding.mend and "hush" not in finding.mend


@pytest.mark.parametrize(
    ("machine", "name"),
    [
        (Fake(limits={"NOFILE": 1024}), "open files"),
        (Fake(limits={"MEMLOCK": 1 << 16}), "locked memory"),
        (Fake(shm=64 << 20), "/dev/shm"),
        (Fake(files={"/proc/sys/vm/max_map_count": "65530"}), "vm.max_map_count"),
        (Fake(files={"/sys/fs/cgroup/memory.max": str(GIB)}), "memory"),
        (Fake(files={"/sys/fs/cgroup/pids.max": "100"}), "processes"),
    ],
)
def test_limits(host: dict[str, Any], machine: Machine, name: str) -> None:
    assert [fault.partition(":")[0] for fault in faults(seen(preflight.check_limits, host, machine))] == [
        name
    ]


def test_docker_may_be_absent(host: dict[str, Any]) -> None:
    assert faults(seen(preflight.check_docker, host, Fake(docker=False))) == []
    assert "no NVIDIA runtime" in faults(seen(preflight.check_docker, host, Fake(others=(0, "runc"))))[0]


def test_this_machine_can_be_asked(tmp_path: Path) -> None:
    """The real one's answers have the shapes that the checks rely on."""
    machine = Machine()
    assert machine.run([sys.executable, "-c", "print(1)"]) == (0, "1\n")
    assert machine.run(["/nowhere/at/all"]) == (127, "")
    assert machine.read("/proc/meminfo") and machine.read("/proc/no-such-file") is None
    assert machine.free(tmp_path / "not" / "yet") > 0
    assert machine.limit("NOFILE") != 0 and not machine.answers("127.0.0.1", 1)
