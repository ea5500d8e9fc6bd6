"""MEND's hyper-network: identity at the start, gradients, statistics, shared networks."""

from __future__ import annotations

import pytest
import torch

from edit_hooks import EditingError
from edit_hooks.gradient.hypernetwork import HyperNetwork, NetworkSettings, TokenFactors

SHAPES = {"a": (3, 5), "b": (5, 3), "c": (3, 5)}


def random_tokens(num=7, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: TokenFactors(*(torch.randn(num, width, generator=generator, dtype=dtype) for width in (f, d)))
        for name, (d, f) in SHAPES.items()
    }


def test_an_untrained_network_returns_its_normalized_input():
    network = HyperNetwork(SHAPES, NetworkSettings(rank=4)).double()
    tokens = random_tokens()
    network.observe(tokens)
    updates = network(tokens)
    # a and c share a network and its statistics; b has its own.
    for name, partners in (("a", "ac"), ("b", "b"), ("c", "ac")):
        seen = torch.cat([torch.cat(tokens[partner], 1) for partner in partners])
        normal = (torch.cat(tokens[name], 1) - seen.mean(0)) / (seen.std(0) + 1e-7)
        width = SHAPES[name][1]
        torch.testing.assert_close(updates[name].right.T, normal[:, :width], atol=1e-8, rtol=1e-8)
        torch.testing.assert_close(updates[name].left.T, -1e-4 * normal[:, width:], atol=1e-8, rtol=1e-8)
    plain = HyperNetwork(SHAPES, NetworkSettings(rank=4, normalize=False)).double()
    for name, (left, right) in plain(tokens).items():
        assert torch.equal(right.T, tokens[name].x)
        torch.testing.assert_close(left.T, -1e-4 * tokens[name].delta, atol=1e-12, rtol=1e-6)


def test_training_can_leave_the_identity():
    """The derivative of the clamp at zero is one; with a relu all of these would stay zero."""
    network = HyperNetwork(SHAPES, NetworkSettings(rank=4, normalize=False)).double()
    sum((left.sum() + right.sum()) for left, right in network(random_tokens()).values()).backward()
    for name, parameter in network.named_parameters():
        if name.endswith(("U", "bias", "shift")) or name == "step_sizes":
            assert float(parameter.grad.abs().max()) > 0, name


def test_gradients_match_finite_differences():
    """Away from the kink of the clamp."""
    network = HyperNetwork({"a": (2, 3), "b": (2, 3)}, NetworkSettings(rank=2, normalize=False, step_size=0.3)).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)
    tokens = {
        name: TokenFactors(*(torch.randn(4, width, generator=generator, dtype=torch.float64) + 2 for width in (3, 2)))
        for name in "ab"
    }
    parameters = list(network.parameters())

    def outputs(*values):
        named = dict(zip((name for name, _ in network.named_parameters()), values, strict=True))
        updates = torch.func.functional_call(network, named, (tokens,))
        return tuple(left @ right.T for left, right in updates.values())

    assert torch.autograd.gradcheck(outputs, tuple(parameters))


def test_statistics_do_not_depend_on_how_tokens_are_split():
    whole, parts = (HyperNetwork(SHAPES, NetworkSettings(rank=4)).double() for _ in range(2))
    tokens = random_tokens(num=9)
    whole.observe(tokens)
    for rows in (slice(0, 1), slice(1, 6), slice(6, 9)):
        parts.observe({name: TokenFactors(x[rows], delta[rows]) for name, (x, delta) in tokens.items()})
    empty = {name: TokenFactors(torch.zeros_like(x), delta) for name, (x, delta) in tokens.items()}
    parts.observe(empty)  # tokens without input or gradient do not count
    for (name, ours), theirs in zip(parts.state_dict().items(), whole.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-8, rtol=1e-8, msg=name)
    with pytest.raises(EditingError, match="fewer than two tokens"):
        HyperNetwork(SHAPES, NetworkSettings(rank=4)).double()(tokens)


def test_matrices_of_one_shape_share_a_network_but_not_a_mode():
    network = HyperNetwork(SHAPES, NetworkSettings(rank=4))
    assert network.modes == {"a": 0, "b": 0, "c": 1} and len(network.networks) == 2
    # Two blocks each: U and V, the bias, and a scale and a shift per mode.
    width, rank = 8, 4
    expected = sum(2 * (2 * width * rank + width + 2 * num_modes * width) for num_modes in (2, 1))
    assert sum(p.numel() for p in network.networks.parameters()) == expected
