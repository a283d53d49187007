"""Moving what a step computes on to a device."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def moved(value: T, device: torch.device) -> T:
    """The value with every tensor in it on the device: of dataclasses, lists, and themselves."""
    if device.type == "cpu":
        return value
    return _moved(value, device)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, list):
        return [_moved(item, device) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _moved(getattr(value, f.name), device) for f in fields(value)})
    return value
