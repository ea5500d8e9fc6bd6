"""Context templates: short texts in front of a prompt.

Averaged over templates, a key does not depend on one position and context.

A template is ``TEXT. {}`` with the filled prompt in the slot; the bare template ``{}`` comes first. Texts are sampled
from the model itself after five seed words. They are part of an edit's identity: drawn once per model and seed, stored
in the configuration, and replaceable by an explicit list.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from edit_hooks.modeling.forward.sampling import SEED_WORDS, sample_after
from edit_hooks.modeling.tokens import encode
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError, near_misses
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.text.scripts import is_latin, warn_of_english_rule
from edit_hooks.utils.text.slots import escape_braces, split_template

log = get_logger("lm_eval.edited_hf")

BARE = "{}"
BARE_SET = "bare"  # the set without any other template


class TemplateSet(NamedTuple):
    """A published choice of templates.

    Attributes:
        samples: (length in tokens, samples per seed word) pairs. As in the released codes, the length includes BOS and
            the seed word, unless ``new_tokens`` is set: then it counts sampled tokens only.
        words: the seed words.
        seam: text between a sampled text and the prompt.
    """

    samples: tuple[tuple[int, int], ...]
    words: tuple[str, ...] = SEED_WORDS
    seam: str = ". "
    new_tokens: bool = False


TEMPLATE_SETS: dict[str, TemplateSet] = {
    BARE_SET: TemplateSet(()),
    "sampled_6": TemplateSet(((10, 1),)),  # MEMIT, AlphaEdit, EMMET, PMET
    "sampled_6_longer": TemplateSet(((10, 1),), new_tokens=True),  # the later rewrite of AlphaEdit
    "sampled_11": TemplateSet(((5, 1), (10, 1))),  # ROME and BIRD on larger models in the PRUNE release
    "sampled_21": TemplateSet(((5, 2), (10, 2))),  # ROME, R-ROME (20 samples of length 5 and 10)
    "wise_11": TemplateSet(((5, 1), (10, 1)), ("I", "You", "Because", "Yes", "Q: "), " ", new_tokens=True),  # WISE
}


def check_templates(templates: list[str] | str) -> None:
    """Check a template set's name, or a list of templates.

    Raises:
        EditingError: for unknown names, templates without exactly one slot, and lists that do not begin with the bare
            template.
    """
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


def num_templates(templates: Sequence[str] | str) -> int:
    """The number of templates in a list, or of a named set before it is sampled."""
    if not isinstance(templates, str):
        return len(templates)
    chosen = TEMPLATE_SETS[templates]
    return 1 + len(chosen.words) * sum(count for _, count in chosen.samples)


def warn_of_english(templates: Sequence[str], requests: Iterable[EditRequest], editor: str) -> None:
    """Log once if Latin texts stand before facts of another script."""
    texts = [split_template(template)[0] for template in templates]
    if any(map(str.isalpha, "".join(texts))) and is_latin("".join(texts)):
        remedy = "Give texts of your language in context_templates, or context_templates: bare."
        prompts = (request.bare_text for request in requests)
        warn_of_english_rule(log, f"the context templates of {editor}", prompts, remedy)


def resolved_templates(
    templates: list[str] | str, model: nn.Module, tokenizer: PreTrainedTokenizerBase, seed: int
) -> list[str]:
    """The templates of a setting ``context_templates``: as given, or those of a set that the model samples."""
    return sample_templates(model, tokenizer, templates, seed) if isinstance(templates, str) else templates


def sample_templates(model: nn.Module, tokenizer: PreTrainedTokenizerBase, name: str, seed: int) -> list[str]:
    """Sample a named template set.

    The same model, seed and device give the same texts.
    """
    check_templates(name)
    templates = TEMPLATE_SETS[name]
    prompts = [
        (word, length + (len(encode(tokenizer, word).ids) if templates.new_tokens else 0))
        for length, count in templates.samples
        for word in templates.words
        for _ in range(count)
    ]
    texts = sample_after(model, tokenizer, prompts, torch.Generator().manual_seed(seed))
    return [BARE, *(escape_braces(text + templates.seam) + BARE for text in texts)]
