"""Products of few rows are the library's, whatever side they are multiplied from."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from eyrie.skinny import SKINNY_ROWS, use_skinny_products


@pytest.mark.parametrize("least_rows", [1, 2])
@pytest.mark.parametrize("shape", [(1, 8), (1, 1, 8), (2, 3, 8), (SKINNY_ROWS, 8), (SKINNY_ROWS + 1, 8)])
def test_the_product_is_the_librarys(shape: tuple[int, ...], least_rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(8, 5, bias=False)
    x = torch.randn(shape, generator=generator)
    expected = nn.functional.linear(x, linear.weight)
    use_skinny_products(nn.Sequential(linear), least_rows)
    with torch.inference_mode():
        product = linear(x)
    assert product.shape == expected.shape
    torch.testing.assert_close(product, expected, rtol=1e-6, atol=1e-6)


def test_a_layer_with_a_bias_is_left_alone() -> None:
    linear = nn.Linear(8, 5)
    x = torch.ones(1, 8)
    expected = linear(x)
    use_skinny_products(nn.Sequential(linear))
    torch.testing.assert_close(linear(x), expected, rtol=0, atol=0)
