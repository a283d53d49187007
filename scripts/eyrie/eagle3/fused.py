"""Norm, matrix product and gated unit with backward passes of their own, which keep less than autograd would.

Each keeps what it was given and computes anew what is cheap; a product keeps its input in the numbers it
multiplied, and casts a weight once however often it is used. A weight's gradients of all its uses add up in
one place, in the product that makes them: nothing of a weight's size is made twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional


def _inverse_root_mean_square(x: torch.Tensor, eps: float) -> torch.Tensor:
    return (x.square().mean(-1, keepdim=True) + eps).rsqrt_()


def _norm_gradients(
    x: torch.Tensor, weight: torch.Tensor, inverse: torch.Tensor, outer: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of x [N, H] and of the scale [H] of a norm."""
    normed = x * inverse
    product = outer * normed
    grad_weight = product.sum(0)
    # d normed / d x takes away the gradient's part along the normed state.
    along = product.mul_(weight).mean(-1, keepdim=True)
    return (outer * weight).sub_(normed.mul_(along)).mul_(inverse), grad_weight


class _RmsNorm(torch.autograd.Function):
    """x [N, H] times a scale [H] over its root mean square."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        inverse = _inverse_root_mean_square(x, eps)
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        return *_norm_gradients(x, weight, inverse, outer[0]), None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [N, H] over its root mean square, times a scale [H]."""
    return _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]


class _Sum:
    """Where the gradients of a weight's uses add up."""

    def __init__(self) -> None:
        self._total: torch.Tensor | None = None

    def add(self, outer: torch.Tensor, inputs: torch.Tensor) -> None:
        """Add outer [N, out], transposed, times inputs [N, in]."""
        if self._total is None:
            self._total = (outer.t() @ inputs).float()
        elif inputs.dtype == torch.float32:
            self._total.addmm_(outer.t(), inputs)
        else:
            self._total.add_((outer.t() @ inputs).float())

    def taken(self) -> torch.Tensor | None:
        """The sum, which is then forgotten."""
        total, self._total = self._total, None
        return total


class _Used(torch.autograd.Function):
    """A stand-in for a weight: an empty tensor that its uses depend on.

    So autograd comes here once, after the backward passes of all uses that the loss depends on.
    """

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, gradient: _Sum) -> torch.Tensor:
        ctx.gradient = gradient
        return weight.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.gradient.taken(), None


class Weight:
    """A weight [out, in], cast once for all products that take it."""

    def __init__(self, weight: torch.Tensor, dtype: torch.dtype) -> None:
        self.cast = weight.detach().to(dtype)
        self.gradient = _Sum()
        self.stand_in: torch.Tensor = _Used.apply(weight, self.gradient)  # type: ignore[no-untyped-call]


class _Product(torch.autograd.Function):
    """x [N, in] times a weight [out, in], in the cast weight's numbers; out and gradients in float32."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, stand_in: torch.Tensor, cast: torch.Tensor, gradient: _Sum
    ) -> torch.Tensor:
        inputs = x.to(cast.dtype)
        ctx.save_for_backward(inputs, cast)
        ctx.gradient = gradient
        return (inputs @ cast.t()).float()

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, cast = ctx.saved_tensors
        grad = outer[0].to(cast.dtype)
        if ctx.needs_input_grad[1]:
            ctx.gradient.add(grad, inputs)
        grad_x = (grad @ cast).float() if ctx.needs_input_grad[0] else None
        return grad_x, outer[0].new_empty(0), None, None


def product(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """x [N, in] times a linear layer's weight, in float32."""
    return _Product.apply(x, weight.stand_in, weight.cast, weight.gradient)  # type: ignore[no-untyped-call]


class _GatedUnit(torch.autograd.Function):
    """x + down(silu(gate(n)) * up(n)), where n is the norm of x; out and gradients in float32.

    Of what is on the way gate(n) and up(n) alone are kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        scale: torch.Tensor,
        eps: float,
        weights: tuple[Weight, Weight, Weight],
        *stand_ins: torch.Tensor,
    ) -> torch.Tensor:
        """x: [N, H]. scale: [H], the norm's. weights: gate and up [I, H], and down [H, I]."""
        gate_weight, up_weight, down_weight = (weight.cast for weight in weights)
        inverse = _inverse_root_mean_square(x, eps)
        normed = (x * inverse).mul_(scale).to(gate_weight.dtype)
        gate, up = (normed @ gate_weight.t()).float(), (normed @ up_weight.t()).float()
        ctx.save_for_backward(x, scale, inverse, gate, up)
        ctx.products = [(weight.cast, weight.gradient) for weight in weights]
        inner = functional.silu(gate).mul_(up).to(down_weight.dtype)
        if inner.dtype == x.dtype:
            return torch.addmm(x, inner, down_weight.t())
        return x + (inner @ down_weight.t()).float()

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, scale, inverse, gate, up = ctx.saved_tensors
        (gate_weight, gate_sum), (up_weight, up_sum), (down_weight, down_sum) = ctx.products
        dtype = gate_weight.dtype
        chance = torch.sigmoid(gate)
        activated = gate * chance
        grad = outer[0].to(dtype)
        if ctx.needs_input_grad[6]:
            down_sum.add(grad, (activated * up).to(dtype))
        grad_inner = (grad @ down_weight).float()
        # The slope of silu is sigmoid + silu * (1 - sigmoid).
        slope = chance.mul_(1 - activated).add_(activated)
        grad_gate = slope.mul_(up).mul_(grad_inner).to(dtype)
        grad_up = activated.mul_(grad_inner).to(dtype)
        del chance, slope, activated, grad_inner
        normed = (x * inverse).mul_(scale).to(dtype)
        if ctx.needs_input_grad[4]:
            gate_sum.add(grad_gate, normed)
        if ctx.needs_input_grad[5]:
            up_sum.add(grad_up, normed)
        grad_normed = grad_gate @ gate_weight
        grad_normed = grad_normed.addmm_(grad_up, up_weight).float()
        grad_x, grad_scale = _norm_gradients(x, scale, inverse, grad_normed)
        empty = outer[0].new_empty(0)
        return grad_x.add_(outer[0]), grad_scale, None, None, empty, empty, empty


def gated_unit(
    x: torch.Tensor, scale: torch.Tensor, eps: float, gate: Weight, up: Weight, down: Weight
) -> torch.Tensor:
    """x [N, H] plus the gated unit of its norm: x + down(silu(gate(norm(x))) * up(norm(x)))."""
    weights = (gate, up, down)
    stand_ins = (weight.stand_in for weight in weights)
    return _GatedUnit.apply(x, scale, eps, weights, *stand_ins)  # type: ignore[no-untyped-call]
