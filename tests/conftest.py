"""What all tests share: one torch thread, no hub, and signals that arrive."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

from workspace import Workspace, tiny_workspace

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ROOT = Path(__file__).resolve().parent.parent


# How long an example takes says how busy the machine is.
settings.register_profile("eyrie", deadline=None)
settings.load_profile("eyrie")


def pytest_configure() -> None:
    """Heed signals: a shell has what it runs in the background ignore some, which tests would hand on."""
    defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    for number, handler in defaults.items():
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture(autouse=True, scope="session")
def _one_torch_thread() -> None:
    """Tests run beside each other and beside other work; two threads a test would fight for the cores."""
    import torch  # noqa: PLC0415 - not every run needs torch, and importing it takes seconds

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A finished tiny build, which no test changes."""
    workspace = tiny_workspace(tmp_path_factory.mktemp("built"))
    workspace.build()
    return workspace


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root."""
    return ROOT


@pytest.fixture(scope="session")
def default_target() -> Path:
    """The default target's folder; the test is skipped where it was not fetched."""
    path = ROOT / "models" / "smollm2-135m-instruct"
    if not (path / "SOURCE.json").exists():
        pytest.skip("the default target is not there: `make test` fetches it")
    return path
