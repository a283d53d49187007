"""The drafter's own backward passes: gradients as autograd has them, however often a weight is used."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from eyrie.eagle3.fused import Weight, gated_unit, product, rms_norm

ROWS, HIDDEN, INNER, EPS = 7, 12, 20, 1e-5


def leaf(*shape: int) -> torch.Tensor:
    """Random numbers that gradients are wanted of."""
    return (torch.randn(*shape) * 0.5).requires_grad_()


def gradients(loss: torch.Tensor, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """What the loss gives the leaves."""
    return list(torch.autograd.grad(loss, leaves))


def plain_norm(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The norm in autograd's own operations."""
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * scale


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same numbers each time."""
    torch.manual_seed(0)


def test_gated_unit_is_that_of_autograd() -> None:
    """Result and all gradients, with the weights used twice."""
    x, scale = leaf(ROWS, HIDDEN), leaf(HIDDEN)
    weights = [leaf(INNER, HIDDEN), leaf(INNER, HIDDEN), leaf(HIDDEN, INNER)]
    outer = torch.randn(ROWS, HIDDEN)

    def plain(x: torch.Tensor) -> torch.Tensor:
        gate, up, down = weights
        normed = plain_norm(x, scale)
        return x + (functional.silu(normed @ gate.t()) * (normed @ up.t())) @ down.t()

    casts = [Weight(weight, torch.float32) for weight in weights]
    ours = gated_unit(gated_unit(x, scale, EPS, *casts), scale, EPS, *casts)
    expected = plain(plain(x))
    torch.testing.assert_close(ours, expected)
    leaves = [x, scale, *weights]
    for own, other in zip(
        gradients((ours * outer).sum(), leaves), gradients((expected * outer).sum(), leaves), strict=True
    ):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)


def test_a_use_that_the_loss_does_not_depend_on_adds_nothing() -> None:
    """Also not to the loss after it."""
    x, weight = leaf(ROWS, HIDDEN), leaf(INNER, HIDDEN)
    cast = Weight(weight, torch.float32)
    first, _, last = (product(part, cast) for part in (x, x * 2, x * 3))
    torch.testing.assert_close(
        gradients(first.sum() + last.sum(), [weight])[0], 4 * x.detach().sum(0).expand(INNER, -1)
    )


def test_each_loss_gets_its_own_sum() -> None:
    """A gradient that was taken is not given out again."""
    x, weight = leaf(ROWS, HIDDEN), leaf(INNER, HIDDEN)
    cast = Weight(weight, torch.float32)
    out = product(x, cast)
    for _ in range(2):
        (found,) = torch.autograd.grad(out.sum(), [weight], retain_graph=True)
        torch.testing.assert_close(found, x.detach().sum(0).expand(INNER, -1))


def test_frozen_weights_get_no_gradient_and_pass_on_that_of_their_input() -> None:
    """As the head's, where it is not trained."""
    x, scale = leaf(ROWS, HIDDEN), leaf(HIDDEN)
    weights = [leaf(*shape).detach() for shape in ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))]
    casts = [Weight(weight, torch.float32) for weight in weights]
    gated_unit(x, scale, EPS, *casts).sum().backward()
    assert x.grad is not None
    assert all(weight.grad is None for weight in weights)
    assert all(cast.gradient.taken() is None for cast in casts)


def test_bfloat16_products_have_float32_results_and_gradients() -> None:
    """Near those of float32."""
    x, scale = leaf(ROWS, HIDDEN), leaf(HIDDEN)
    weights = [leaf(INNER, HIDDEN), leaf(INNER, HIDDEN), leaf(HIDDEN, INNER)]
    leaves = [x, scale, *weights]
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        out = gated_unit(x, scale, EPS, *(Weight(weight, dtype) for weight in weights))
        assert out.dtype == torch.float32
        found.append(gradients(out.square().sum(), leaves))
    for exact, rounded in zip(*found, strict=True):
        assert rounded.dtype == torch.float32
        torch.testing.assert_close(rounded, exact, rtol=0.1, atol=0.1 * float(exact.abs().max()))


def test_norm_is_that_of_autograd() -> None:
    """Result and gradients."""
    x, scale, outer = leaf(ROWS, HIDDEN), leaf(HIDDEN), torch.randn(ROWS, HIDDEN)
    own = gradients((rms_norm(x, scale, EPS) * outer).sum(), [x, scale])
    for one, other in zip(own, gradients((plain_norm(x, scale) * outer).sum(), [x, scale]), strict=True):
        torch.testing.assert_close(one, other)
