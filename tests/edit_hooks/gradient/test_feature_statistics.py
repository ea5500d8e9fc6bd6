"""Running statistics of features."""

from __future__ import annotations

import torch

from edit_hooks.gradient.feature_statistics import FeatureStatistics


def test_merged_statistics_equal_those_of_all_tokens():
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(n, 5, dtype=torch.float64, generator=generator) * n for n in (1, 7, 2, 11)]
    running = FeatureStatistics.empty(5)
    for part in parts:
        running = running.merge(part)
    whole = torch.cat(parts)
    assert running.count == 21
    torch.testing.assert_close(running.mean_X, whole.mean(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(running.normalize(whole), (whole - whole.mean(0)) / whole.std(0), rtol=1e-10, atol=1e-10)


def test_constant_features_become_zero():
    statistics = FeatureStatistics.empty(2).merge(torch.tensor([[1.0, 2.0], [1.0, 4.0]]))
    assert statistics.normalize(torch.tensor([[1.0, 2.0]], dtype=torch.float64))[0, 0] == 0  # no 0 / 0
