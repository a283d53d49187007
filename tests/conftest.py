"""What all tests share: one torch thread, and no hub."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True, scope="session")
def _one_torch_thread() -> None:
    """Tests run beside each other and beside other work; two threads a test would fight for the cores."""
    import torch  # noqa: PLC0415 - not every run needs torch, and importing it takes seconds

    torch.set_num_threads(1)


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
