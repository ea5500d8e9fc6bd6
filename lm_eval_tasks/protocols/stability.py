"""EVK-Bench: stability of hidden states, at perturbed embeddings of a prompt and at texts.

Source: "Beyond Local Edits: Embedding-Virtualized Knowledge for Broader Evaluation and Preservation of Model Editing",
section 3.1. Edited and unedited model read the same prompt, and the cosine of their hidden states at its last token is
the score (eq. 9).

- Embedding stability (ES): the prompt's input embeddings have Gaussian noise N(0, sigma^2) on the subject's tokens, on
  all others but special tokens (relation), or on all tokens. One instance of each per prompt; both models get the same
  noise, which depends on seed, case and drift only.
- Text stability (TS): the prompt is a text as it is.

Open in the paper and chosen here: the state is the input of the LM head; the prompts are the first 2,000 records, the
texts the first 5,000 attribute prompts in the order of the records; special tokens are in "all" only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from edit_hooks.state_reading import NAMED_STATES, Drift, EmbeddingDrift, State, StateReading
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.settings.numbers import NON_NEGATIVE, SEED, require_number, require_whole
from lm_eval_tasks.common.asking.probes import CaseAnswers, Probe, ProbeAnswers, case_doc, question_doc
from lm_eval_tasks.common.records.cases import Case
from lm_eval_tasks.common.scoring.measures import Measure, case_mean, mean_over, state_cosine
from lm_eval_tasks.common.settings import Setting, Settings, choice_setting, text_setting, whole_setting

DRIFTS: tuple[Drift, ...] = get_args(Drift)
TEXT, TEXTS = "text", "attribute prompts"
INSTANCES = "edit prompt with its subject in it"

NUM_PROMPTS, NUM_TEXTS, SIGMA = 2000, 5000, 0.3  # as published

AUTO, OWN_EDIT, ALL_EDITS = "auto", "own_edit", "all_edits"


def _noise(settings: Settings) -> float | None:
    value = settings.get("evk_noise")
    return None if value is None else require_number("evk_noise", value, NON_NEGATIVE)


def _relative_noise(settings: Settings) -> float | None:
    value = settings.get("evk_relative_noise")
    if value is None:
        return None
    if settings.get("evk_noise") is not None:
        raise EditingError(
            f"evk_noise={settings['evk_noise']} and evk_relative_noise={value} both set the size of the noise. Give "
            "one: evk_noise is absolute, as in the paper, evk_relative_noise in units of the standard deviation of the "
            "model's input embeddings."
        )
    return require_number("evk_relative_noise", value, NON_NEGATIVE)


def _noise_seed(settings: Settings) -> int:
    value = settings.get("evk_noise_seed")
    return 0 if value is None else require_whole("evk_noise_seed", value, SEED)


def _state(settings: Settings) -> State:
    value = settings.get("evk_state")
    if value is None or value == "after_norm":
        return "after_norm"
    if value == "before_norm":
        return "before_norm"
    number = int(value) if isinstance(value, str) and value.isascii() and value.isdecimal() else value
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise EditingError(
            f"evk_state={value!r} is unknown. Accepted: {', '.join(NAMED_STATES)}, or the number of a block."
        )
    return number


PROMPTS_OF = text_setting(
    "evk_prompts", "benchmark whose prompts are perturbed, in place of CounterFact", "name of a benchmark"
)
EVK_NUM_PROMPTS = whole_setting("evk_num_prompts", NUM_PROMPTS, f"at most this many; published: {NUM_PROMPTS}")
EVK_NUM_TEXTS = whole_setting("evk_num_texts", NUM_TEXTS, f"at most this many; published: {NUM_TEXTS}")
EVK_NOISE = Setting(
    "evk_noise", NON_NEGATIVE.text, f"sigma of the noise on embeddings, absolute; published: {SIGMA}", _noise
)
EVK_RELATIVE_NOISE = Setting(
    "evk_relative_noise",
    NON_NEGATIVE.text,
    "in its place, sigma in units of the embeddings' standard deviation",
    _relative_noise,
)
EVK_NOISE_SEED = Setting("evk_noise_seed", SEED.text, "seed of the noise", _noise_seed)
EVK_STATE = Setting(
    "evk_state",
    "after_norm, before_norm, or the number of a block",
    "the state that is compared: input of the LM head, output of the last block, or of another one",
    _state,
)
EVK_UNDER = choice_setting(
    "evk_under",
    "ask each prompt under its case's own edit, or of the edited model as a whole (auto: in streams, batches without "
    "group_size, and under a saved edit)",
    (AUTO, OWN_EDIT, ALL_EDITS),
)
EVK_SETTINGS: tuple[Setting[Any], ...] = (
    PROMPTS_OF,
    EVK_NUM_PROMPTS,
    EVK_NUM_TEXTS,
    EVK_NOISE,
    EVK_RELATIVE_NOISE,
    EVK_NOISE_SEED,
    EVK_STATE,
    EVK_UNDER,
)


# ------------------------------------------------------------------------ documents


def embedding_docs(cases: Sequence[Case], settings: Settings) -> list[dict[str, Any]]:
    """One document per edit prompt, with an instance of each drift."""
    return [_doc(case, perturbed_prompts(case, settings), settings) for case in cases[: EVK_NUM_PROMPTS.read(settings)]]


def perturbed_prompts(case: Case, settings: Settings) -> list[Probe]:
    """The instances of the edit prompt, one of each drift; none if the prompt lacks its subject."""
    request = case.request
    if request.subject_span is None:
        return []
    sigma, relative = sigma_of(settings)
    return [
        _probe(
            drift,
            request.text,
            case,
            settings,
            EmbeddingDrift(
                drift=drift,
                subject_span=request.subject_span,
                sigma=sigma,
                relative=relative,
                seed=f"{EVK_NOISE_SEED.read(settings)} {request.case_id} {drift}",
            ),
        )
        for drift in DRIFTS
    ]


def text_doc(case: Case, prompts: Sequence[str], settings: Settings) -> dict[str, Any]:
    """Document of a case's texts."""
    return _doc(case, [_probe(TEXT, prompt, case, settings, None) for prompt in prompts], settings)


def sigma_of(settings: Settings) -> tuple[float, bool]:
    """Standard deviation of the noise, and whether it is in units of that of the embeddings."""
    absolute, relative = EVK_NOISE.read(settings), EVK_RELATIVE_NOISE.read(settings)
    if relative is not None:
        return relative, True
    return (SIGMA if absolute is None else absolute), False


def _probe(kind: str, prompt: str, case: Case, settings: Settings, noise: EmbeddingDrift | None) -> Probe:
    reading = StateReading(prompt=prompt, state=EVK_STATE.read(settings), noise=noise)
    return Probe(kind=kind, prompt=prompt, targets=[case.request.target_new], states=reading)


def _doc(case: Case, probes: Sequence[Probe], settings: Settings) -> dict[str, Any]:
    if probes and _asks_all_edits(settings):
        return question_doc(str(case.request.case_id), probes, case.extras, separator=case.request.separator)
    return case_doc(case, probes, generate=False)


def _asks_all_edits(settings: Settings) -> bool:
    """Whether the edited model of the run is asked as a whole."""
    under = EVK_UNDER.read(settings)
    if under != AUTO:
        return under == ALL_EDITS
    mode = settings.get("mode")
    return (
        mode in ("sequential", "loaded")
        or (mode == "batch" and settings.get("group_size") is None)
        or settings.get("load_edit") is not None
    )


# -------------------------------------------------------------------------- scoring


def score_embedding_stability(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """ES by drift, and over all instances of the prompt."""
    by_drift = {f"evk_es_{drift}": mean_over(answers.of_kind(drift), INSTANCES, _stability) for drift in DRIFTS}
    return by_drift | {"evk_es": lambda: case_mean([measure() for measure in by_drift.values()], INSTANCES)}


def score_text_stability(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """TS of a case's texts."""
    return {"evk_ts": mean_over(answers.of_kind(TEXT), TEXTS, _stability)}


def _stability(answered: ProbeAnswers) -> float:
    return state_cosine(answered.wanted)
