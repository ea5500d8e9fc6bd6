"""Noise on input embeddings: which tokens it perturbs, and what a forward pass under it computes."""

from __future__ import annotations

import pytest
import torch
from value_problems import loaded, relative

from edit_hooks.contract.tiny_models import ALL_MODEL_TYPES, TOKENIZER_KINDS, build_tokenizer
from edit_hooks.modeling.forward.embedding_noise import drift_positions, gaussian_noise, noise_at, noisy_embeddings
from edit_hooks.modeling.tokens import encode

TEXT, SPAN = "The harbour of Port Amelin is located", (15, 26)
IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])


@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
def test_subject_and_relation_partition_the_tokens_with_characters(kind):
    encoding = encode(build_tokenizer(kind), TEXT)
    positions = drift_positions(encoding, SPAN)
    assert positions["all"] == list(range(len(encoding.ids)))
    special = [i for i, (start, end) in enumerate(encoding.offsets) if start == end]
    assert sorted([*positions["subject"], *positions["relation"], *special]) == positions["all"]
    covered = "".join(TEXT[slice(*encoding.offsets[i])] for i in positions["subject"])
    assert covered.strip() == "Port Amelin"


def test_noise_depends_on_the_generator_only():
    draws = [gaussian_noise((400, 8), 0.5, torch.Generator().manual_seed(seed)) for seed in (3, 3, 4)]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    assert draws[0].dtype == torch.float32 and 0.45 < float(draws[0].std()) < 0.55
    wide = gaussian_noise((2, 2), 0.5, torch.Generator().manual_seed(3), torch.float64)
    assert wide.dtype == torch.float64


def test_noise_is_zero_at_other_tokens():
    noise = torch.arange(1.0, 13.0).view(2, 2, 3)
    spread = noise_at([3, 1], 5, noise)
    assert spread.shape == (2, 5, 3) and not spread[:, [0, 2, 4]].any()
    assert torch.equal(spread[:, [3, 1]], noise)


@torch.no_grad()
@pytest.mark.parametrize("model_type", ALL_MODEL_TYPES)
def test_a_noisy_pass_equals_one_from_perturbed_embeddings(model_type):
    model, _ = loaded(model_type)
    noise = 0.1 * torch.randn(2, 4, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    expected = model(inputs_embeds=model.get_input_embeddings()(IDS) + noise).logits
    clean = model(IDS).logits
    with noisy_embeddings(model, noise):
        assert torch.equal(model(IDS).logits, expected)
        assert relative(model(IDS[:, :3]).logits, expected[:, :3]) < 1e-6  # float32 in GPT-J's attention
    with noisy_embeddings(model, None):
        assert torch.equal(model(IDS).logits, clean)
    assert torch.equal(model(IDS).logits, clean) and not torch.equal(clean, expected)
