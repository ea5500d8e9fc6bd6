"""Fluency: n-gram entropy of sampled texts, as in the evaluation of ROME and MEMIT.

Source: the released code of Meng et al., Mass-Editing Memory in a Transformer (ICLR 2023), and EasyEdit's copy of it.
The model continues each prompt by top-k sampling with k = 5 to 100 tokens, the prompt included; end tokens do not stop
it. The entropy is that of prompt and continuation together, averaged over the prompts of a case.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from edit_hooks.decoding import Decoding, Sampling
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.settings.numbers import SEED, require_whole
from edit_hooks.utils.text.scripts import warn_of_english_rule
from lm_eval_tasks.common.asking.answers import why_without_tokens
from lm_eval_tasks.common.asking.probes import CaseAnswers, Probe, ProbeAnswers, case_doc
from lm_eval_tasks.common.records.cases import Case
from lm_eval_tasks.common.scoring import measures
from lm_eval_tasks.common.scoring.measures import Measure, Unscored, mean_over
from lm_eval_tasks.common.scoring.text_metrics import (
    Tokenizer,
    n_gram_entropy,
    normalize_generation,
    split_words,
    split_words_released,
)
from lm_eval_tasks.common.settings import Setting, Settings, switch_setting

logger = get_logger("lm_eval.editing_tasks")

FLUENCY = "fluency"
PROMPTS = "generation prompts"  # for the reason of a case without such prompts

TOP_K = 5
TOTAL_TOKENS = 100


def _generation_seed(settings: Settings) -> int:
    value = settings.get("generation_seed")
    return 0 if value is None else require_whole("generation_seed", value, SEED)


GENERATION_SEED = Setting("generation_seed", SEED.text, "seed of sampled texts", _generation_seed)
RELEASED_TOKENIZER = switch_setting(
    "released_tokenizer",
    "also count the words of nltk's word_tokenize, as published; needs its data punkt_tab",
    default=False,
)
FLUENCY_SETTINGS = (GENERATION_SEED, RELEASED_TOKENIZER)


# ------------------------------------------------------------------------ documents


def fluency_doc(case: Case, settings: Settings, prompts: Sequence[str]) -> dict[str, Any]:
    """Document of sampled continuations of these prompts, by both models.

    Raises:
        EditingError: if :data:`RELEASED_TOKENIZER` is on and its data are not installed.
    """
    if RELEASED_TOKENIZER.read(settings):
        split_words_released("")  # before the first edit
    return case_doc(case, text_probes(prompts, settings), generate=True)


def edit_prompt_doc(case: Case, settings: Settings) -> dict[str, Any]:
    """Document of a sampled continuation of the edit prompt, as for KnowEdit."""
    return fluency_doc(case, settings, [case.request.text])


def text_probes(prompts: Sequence[str], settings: Settings) -> list[Probe]:
    """A probe per prompt, with the published decoding; a repeated prompt is sampled separately.

    Records of CounterFact repeat prompts (ten texts of three prompts, say), and the release samples each of them.
    The n-th occurrence in a case is draw n of its prompt, for both models.
    """
    seed, seen = GENERATION_SEED.read(settings), Counter[str]()
    probes = []
    for prompt in prompts:
        decoding = Decoding(
            max_total_tokens=TOTAL_TOKENS,
            until=(),
            ignore_end=True,
            sampling=Sampling(top_k=TOP_K, seed=seed, draw=seen[prompt]),
        )
        probes.append(Probe(kind=FLUENCY, prompt=prompt, generate=True, ask="both", decoding=decoding))
        seen[prompt] += 1
    return probes


# -------------------------------------------------------------------------- scoring


def score_fluency(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """N-gram entropy under both tokenizers, of the edited and the unedited model, and the difference."""
    probes = answers.of_kind(FLUENCY)

    def entropies(metric: str, tokenize: Tokenizer) -> dict[str, Measure]:
        def entropy(answered: ProbeAnswers, unedited: bool) -> float:
            return n_gram_entropy(generated_whole(answered, unedited=unedited), tokenize)

        def change(answered: ProbeAnswers) -> float:
            return entropy(answered, False) - entropy(answered, True)

        return {
            metric: mean_over(probes, PROMPTS, partial(entropy, unedited=False)),
            f"{metric}_unedited": mean_over(probes, PROMPTS, partial(entropy, unedited=True)),
            f"{metric}_change": mean_over(probes, PROMPTS, change),
        }

    return entropies("fluency_entropy", split_words) | entropies("ngram_entropy", split_words_released)


def generated_whole(answered: ProbeAnswers, *, unedited: bool = False) -> str:
    """Prompt and continuation as one text.

    Raises Unscored for model classes other than `edited_hf`, whose texts have another length and other draws, and for
    answers in rounds.
    """
    answer = measures.generated_text(answered.generation, unedited=unedited)
    if answer.token_ids is None:
        raise Unscored(why_without_tokens(answer, "the tokens of a text, nor draw them as defined here"))
    text = normalize_generation(answered.probe.prompt + answer.raw)
    warn_of_english_rule(logger, "words of fluency and consistency", [text], "The values compare only with their like.")
    return text
