"""Context templates: short texts put before a prompt so that a key does not depend on one position and context.

Each template is ``TEXT. {}`` with the filled prompt in the slot; the bare template ``{}`` comes first. The texts are
sampled from the model itself (top-5, temperature 1) after five seed words. They are part of an edit's identity: drawn
once per model and seed, kept with the configuration, and replaceable by an explicit list.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from edit_hooks.modeling.hooks import frozen
from edit_hooks.modeling.sampling import SEED_WORDS, _sample
from edit_hooks.modeling.tokens import encode, split_template
from edit_hooks.utils.errors import EditingError, near_misses

BARE = "{}"


class TemplateSet(NamedTuple):
    """A published choice of templates.

    Attributes:
        samples: (length in tokens, samples per seed word) pairs; the length counts BOS and seed word, as the released
            codes do, unless ``new_tokens`` says that it counts what is drawn only.
        words: the seed words.
        seam: what joins a text and the prompt.
    """

    samples: tuple[tuple[int, int], ...]
    words: tuple[str, ...] = SEED_WORDS
    seam: str = ". "
    new_tokens: bool = False


TEMPLATE_SETS: dict[str, TemplateSet] = {
    "bare": TemplateSet(()),
    "sampled_6": TemplateSet(((10, 1),)),  # MEMIT, AlphaEdit, EMMET, PMET
    "sampled_11": TemplateSet(((5, 1), (10, 1))),  # ROME and BIRD on larger models in the PRUNE release
    "sampled_21": TemplateSet(((5, 2), (10, 2))),  # ROME, R-ROME (20 samples of length 5 and 10)
    "wise_11": TemplateSet(((5, 1), (10, 1)), ("I", "You", "Because", "Yes", "Q: "), " ", new_tokens=True),  # WISE
}


def check_templates(templates: list[str] | str) -> None:
    """Refuse unknown set names, templates without exactly one slot, and lists that do not begin with the bare one."""
    if isinstance(templates, str):
        if templates not in TEMPLATE_SETS:
            raise EditingError(
                f"unknown template set {templates!r}.{near_misses(templates, TEMPLATE_SETS)} "
                f"Known: {', '.join(TEMPLATE_SETS)}; or give a list of texts with one {{}} each."
            )
        return
    for template in templates:
        split_template(template)
    if not templates or templates[0] != BARE:
        raise EditingError("the list of context templates must begin with the bare template '{}'.")


def sample_templates(model: nn.Module, tokenizer: PreTrainedTokenizerBase, name: str, seed: int) -> list[str]:
    """Draw a named template set; the same model, seed and device give the same texts, global RNGs are not touched."""
    check_templates(name)
    generator = torch.Generator().manual_seed(seed)
    chosen = TEMPLATE_SETS[name]
    wanted = [
        (word, length + (len(encode(tokenizer, word).ids) if chosen.new_tokens else 0))
        for length, count in chosen.samples
        for word in chosen.words
        for _ in range(count)
    ]
    with frozen(model), torch.no_grad():
        texts = _sample(model, tokenizer, wanted, generator)
    return [BARE, *(f"{text}{chosen.seam}{{}}" for text in texts)]
