"""Norm, gated unit and matrix product with backward passes of their own, which keep less than autograd would.

Each keeps what it was given and computes anew what is cheap; a product keeps its input in the numbers it
multiplied, and casts a weight once however often it is used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional


class _RmsNorm(torch.autograd.Function):
    """x [N, H] times a scale [H] over its root mean square."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        inverse = (x.square().mean(-1, keepdim=True) + eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        normed = x * inverse
        product = outer[0] * normed
        grad_weight = product.sum(0) if ctx.needs_input_grad[1] else None
        # d normed / d x takes away the gradient's part along the normed state.
        along = product.mul_(weight).mean(-1, keepdim=True)
        grad = (outer[0] * weight).sub_(normed.mul_(along)).mul_(inverse)
        return grad, grad_weight, None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [N, H] over its root mean square, times a scale [H]."""
    return _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]


class _Gated(torch.autograd.Function):
    """silu(gate) * up, of one tensor [N, 2 * I] that holds both."""

    @staticmethod
    def forward(ctx: Any, both: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(both)
        gate, up = both.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> torch.Tensor:
        (both,) = ctx.saved_tensors
        gate, up = both.chunk(2, dim=-1)
        grad = torch.empty_like(both)
        grad_gate, grad_up = grad.chunk(2, dim=-1)
        torch.sigmoid(gate, out=grad_up)
        activated = gate * grad_up
        # The slope of silu is sigmoid + silu * (1 - sigmoid).
        torch.addcmul(activated, grad_up, 1 - activated, out=grad_gate)
        grad_gate.mul_(up).mul_(outer[0])
        torch.mul(activated, outer[0], out=grad_up)
        return grad


def gated(both: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up [N, I] of gate and up side by side, [N, 2 * I]."""
    return _Gated.apply(both)  # type: ignore[no-untyped-call]


class Weight:
    """A weight [out, in], cast once for all products that take it."""

    def __init__(self, weight: torch.Tensor, dtype: torch.dtype) -> None:
        self.weight, self.cast = weight, weight.detach().to(dtype)


class _Product(torch.autograd.Function):
    """x [N, in] times a weight [out, in], in the cast weight's numbers; out and gradients in float32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, cast: torch.Tensor) -> torch.Tensor:
        inputs = x.to(cast.dtype)
        ctx.save_for_backward(inputs, cast)
        return (inputs @ cast.t()).float()

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, cast = ctx.saved_tensors
        gradient = outer[0].to(cast.dtype)
        grad_x = (gradient @ cast).float() if ctx.needs_input_grad[0] else None
        grad_weight = (gradient.t() @ inputs).float() if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None


def product(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """x [N, in] times a linear layer's weight, in float32."""
    return _Product.apply(x, weight.weight, weight.cast)  # type: ignore[no-untyped-call]
