"""Context templates: short texts put before a prompt so that a key does not depend on one position and context.

Each template is ``TEXT. {}`` with the filled prompt in the slot; the bare template ``{}`` comes first. The texts are
sampled from the model itself (top-5, temperature 1) after five seed words. They are part of an edit's identity: drawn
once per model and seed, kept with the configuration, and replaceable by an explicit list.
"""

from __future__ import annotations

import re
import unicodedata
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from edit_hooks.architectures import head_of, input_device
from edit_hooks.capture import frozen, hooks, keep_rows, on_input
from edit_hooks.errors import EditingError, near_misses
from edit_hooks.locate import encode, split_template

BARE = "{}"
SEED_WORDS = ("The", "Therefore", "Because", "I", "You")
TOP_K = 5


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


def sample_texts(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, per_word: int, length: int, seed: int
) -> list[str]:
    """Short texts the model writes after the seed words, ``per_word`` for each, ``length`` tokens long."""
    generator = torch.Generator().manual_seed(seed)
    with frozen(model), torch.no_grad():
        return _sample(model, tokenizer, [(word, length) for word in SEED_WORDS for _ in range(per_word)], generator)


def _sample(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    wanted: list[tuple[str, int]],
    generator: torch.Generator,
) -> list[str]:
    """One continuation per (seed word, total length in tokens), all drawn together; no token that ends a text."""
    rows = [list(encode(tokenizer, word).ids) for word, _ in wanted]
    specials = sorted(set(tokenizer.all_special_ids))
    while running := [index for index, (_, length) in enumerate(wanted) if len(rows[index]) < length]:
        for index, token in zip(
            running, _next_tokens(model, [rows[i] for i in running], specials, generator), strict=True
        ):
            rows[index].append(token)
    return [_clean(tokenizer.decode(row, skip_special_tokens=True)) for row in rows]


def _next_tokens(model: nn.Module, rows: list[list[int]], specials: list[int], generator: torch.Generator) -> list[int]:
    """One token per row, drawn from the renormalised top five."""
    device = input_device(model)
    width = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, : len(row)], mask[index, : len(row)] = torch.tensor(row), 1
    last = mask.sum(1) - 1
    head = head_of(model)
    with hooks(on_input(head, keep_rows(torch.arange(len(rows)), last))):
        logits = model(input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False).logits[0]
    logits = logits.float()
    logits[:, specials] = -torch.inf
    top = logits.topk(TOP_K, dim=1)
    choice = torch.multinomial(top.values.softmax(1).cpu(), 1, generator=generator)
    return top.indices.cpu().gather(1, choice)[:, 0].tolist()


def _clean(text: str) -> str:
    """Compatibility-normalised, on one line, without braces (they would read as slots)."""
    text = unicodedata.normalize("NFKD", text).replace("{", "").replace("}", "")
    return re.sub(r"\s+", " ", text).strip()
