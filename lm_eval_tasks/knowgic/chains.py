"""Chains of questions: indirect fact recovery (IFR) and connected knowledge preservation (CKP).

Source: ThinkEdit: Evaluating Knowledge Preservation and Consistency in LLM Editing with Thought-based Knowledge Graphs
(arXiv:2506.01386), section 4.2. For a chain i of n_i questions, R_i is the product of the questions' probabilities, on
the edited and on the unedited model. Over the chains of all edits,

    IFR = sum_i (R_i_post / R_i_pre) / sqrt(n_i)  /  sum_i 1 / sqrt(n_i),

and CKP is the mean of p_post / p_pre over the questions of the broader context. Chains with R_i_pre = 0 and questions
with p_pre = 0 are inactive: they are left out of the means and counted. A probability is the share of sampled responses
with the answer or one of its other names (``_sampled``), or exp of the answer's mean log-probability per token
(``_prob``). Products and ratios are computed from log-probabilities, since exp of these can be 0 where their ratio is
not.

A fact is deep edited up to n steps (section 4) if it cannot be deduced from retained knowledge by any sequence of at
most n steps: with sampled responses, if R_post = 0 for every such chain of the edit. A likelihood is never 0, so the
columns ``deep_edited_*`` and the counts of chains that are active after the edit are for sampled responses only.

All questions of an edit are in one document, each once, whatever the number of chains that it is in. Every occurrence
is scored with its own answer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from edit_hooks.decoding import Decoding, Sampling
from edit_hooks.prompt_context import SPACE
from judges.match import has_answer
from lm_eval_tasks.common.asking.answers import Answer
from lm_eval_tasks.common.asking.probes import CaseAnswers, Probe, ProbeAnswers, case_doc
from lm_eval_tasks.common.scoring import measures
from lm_eval_tasks.common.scoring.columns import SEPARATOR
from lm_eval_tasks.common.scoring.measures import Excluded, Failed, Measure, Unscored, all_true
from lm_eval_tasks.common.scoring.primitives import first_word
from lm_eval_tasks.common.settings import Settings
from lm_eval_tasks.knowgic.aliases import Aliases, find_aliases
from lm_eval_tasks.knowgic.benchmark import KNOWGIC
from lm_eval_tasks.knowgic.case import ChainCase, Hop
from lm_eval_tasks.knowgic.forms import (
    CLOZE,
    KNOWGIC_DRAWS,
    KNOWGIC_MAX_TOKENS,
    KNOWGIC_PROMPTING,
    KNOWGIC_TEMPERATURE,
    OBJECT,
    RELATION,
    SEQUENTIAL,
    YES_NO,
    Form,
)
from lm_eval_tasks.protocols.fluency import GENERATION_SEED

CHAIN, CONTEXT = "chain", "context"  # kinds of probes: questions of a chain, and of the broader context only
MAX_STEPS = 5  # of the published chains; longer ones share a column
SAMPLED, PROB = "sampled", "prob"
MAX_LOG_RATIO = 690.0  # a larger ratio, or a sum of such, leaves the range of a float (e^709)

# Of one fact: its probe's number and its answer
Place = tuple[int, str]


# ------------------------------------------------------------------------ documents


def sampled_doc(case: ChainCase, settings: Settings) -> dict[str, Any]:
    """Sampled responses to the questions of the file."""
    return _chain_doc(case, settings, OBJECT, SAMPLED)


def prob_doc(case: ChainCase, settings: Settings) -> dict[str, Any]:
    """Likelihoods of the answers to the questions of the file."""
    return _chain_doc(case, settings, OBJECT, PROB)


def cloze_sampled_doc(case: ChainCase, settings: Settings) -> dict[str, Any]:
    """Sampled continuations of the statements."""
    return _chain_doc(case, settings, CLOZE, SAMPLED)


def cloze_prob_doc(case: ChainCase, settings: Settings) -> dict[str, Any]:
    """Likelihoods of the objects after the statements."""
    return _chain_doc(case, settings, CLOZE, PROB)


def relation_prob_doc(case: ChainCase, settings: Settings) -> dict[str, Any]:
    """Likelihoods of the relations between subjects and objects."""
    return _chain_doc(case, settings, RELATION, PROB)


def yes_no_sampled_doc(case: ChainCase, settings: Settings) -> dict[str, Any]:
    """Sampled responses to questions for yes or no."""
    return _chain_doc(case, settings, YES_NO, SAMPLED)


def yes_no_prob_doc(case: ChainCase, settings: Settings) -> dict[str, Any]:
    """Likelihoods of yes against no."""
    return _chain_doc(case, settings, YES_NO, PROB)


def _chain_doc(case: ChainCase, settings: Settings, form: Form, protocol: str) -> dict[str, Any]:
    """The document of an edit: one probe for each distinct prompt, asked of both models.

    ``chains`` and ``context`` place every fact: the number of its probe, and its answer.
    """
    numbers: dict[str, int] = {}  # of the probes, by prompt
    accepted: list[list[str]] = []  # the answers of each probe

    is_sequential = KNOWGIC_PROMPTING.read(settings) == SEQUENTIAL

    def place(hop: Hop, earlier: Sequence[Hop] = ()) -> Place:
        prompt, answer = form.prompt(hop, settings, earlier if is_sequential else ()), form.answer(hop)
        if (number := numbers.setdefault(prompt, len(numbers))) == len(accepted):
            accepted.append([])
        if answer not in accepted[number]:
            accepted[number].append(answer)
        return number, answer

    chains = [[place(hop, chain[:step]) for step, hop in enumerate(chain)] for chain in case.chains]
    num_of_chains = len(numbers)
    context = [place(hop) for hop in case.context]
    probes = [
        _probe(CHAIN if number < num_of_chains else CONTEXT, prompt, accepted[number], form, protocol, settings)
        for prompt, number in numbers.items()
    ]
    doc = case_doc(case, probes, generate=protocol == SAMPLED)
    aliases: Aliases = {}
    if protocol == SAMPLED and not form.competitor:
        aliases = find_aliases(KNOWGIC.data_settings(settings))
    names = {answer for answers in accepted for answer in answers}
    return doc | {
        "columns": "_".join(filter(None, (form.name, protocol))),
        "competitor": form.competitor,
        "chains": [[list(place) for place in chain] for chain in chains],
        "context": [list(place) for place in context],
        "aliases": {name: list(found) for name in sorted(names) if (found := aliases.get(name.casefold()))},
    }


def _probe(kind: str, prompt: str, answers: Sequence[str], form: Form, protocol: str, settings: Settings) -> Probe:
    if protocol == PROB:
        competitors = [form.competitor] if form.competitor else []
        separator = SPACE if form.competitor else None  # behind a wording of ours
        targets = [*answers, *competitors]
        return Probe(kind=kind, prompt=prompt, targets=targets, separator=separator, gold=answers[0], ask="both")
    sampling = Sampling(temperature=KNOWGIC_TEMPERATURE.read(settings), seed=GENERATION_SEED.read(settings))
    return Probe(
        kind=kind,
        prompt=prompt,
        generate=True,
        gold=answers[0],
        ask="both",
        decoding=Decoding(max_new_tokens=KNOWGIC_MAX_TOKENS.read(settings), until=tuple(form.stops), sampling=sampling),
        num_draws=KNOWGIC_DRAWS.read(settings),
    )


# -------------------------------------------------------------------------- scoring


def score_chains(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """All columns of an edit. Those of a mean have the form that ``pooled_mean`` aggregates."""
    scores = ChainScores(doc, answers)
    chains: Sequence[Sequence[Place]] = [[tuple(place) for place in chain] for chain in doc["chains"]]
    context: Sequence[Place] = [tuple(place) for place in doc["context"]]
    known: list[Place] = list(dict.fromkeys(place for chain in chains for place in chain))
    found: dict[str, Measure] = {
        "ifr": lambda: scores.recovery(chains),
        "ifr_clipped": lambda: scores.recovery(chains, clip=True),
        "ifr@known": lambda: scores.recovery(
            [chain for chain in chains if all_true(chain, scores.knows)], noun="chains that the unedited model knows"
        ),
        "ckp": lambda: scores.preservation(context),
        "ckp_clipped": lambda: scores.preservation(context, clip=True),
        "ckp@distinct": lambda: scores.preservation(list(dict.fromkeys(context))),
        "known": lambda: _pooled((scores.knows(place) for place in known), "questions"),
        "ifr_chains": lambda: len(chains),
        "ifr_active": lambda: scores.num_active(chains),
        "ifr_active_after": lambda: scores.num_active(chains, edited=True),
        "ckp_questions": lambda: len(context),
        "ckp_active": lambda: scores.num_active([place] for place in context),
        "deep_edited": lambda: scores.deep_edited(chains),
    }
    by_length = {
        str(steps): ([chain for chain in chains if len(chain) == steps], f"chains of length {steps}")
        for steps in range(1, MAX_STEPS + 1)
    }
    by_length["longer"] = ([chain for chain in chains if len(chain) > MAX_STEPS], f"chains of over {MAX_STEPS} steps")
    for length, (some, noun) in by_length.items():
        found |= {
            f"ifr_{length}": _if_any(some, functools.partial(scores.recovery, some, noun=noun)),
            f"ifr_{length}_active": _if_any(some, functools.partial(scores.num_active, some)),
            f"ifr_{length}_active_after": _if_any(some, functools.partial(scores.num_active, some, edited=True)),
        }
    for steps in range(1, MAX_STEPS + 1):
        short, noun = [chain for chain in chains if len(chain) <= steps], f"chains of at most {steps} steps"
        found[f"deep_edited_{steps}"] = _if_any(short, functools.partial(scores.deep_edited, short, noun))
    return {_column(name, doc["columns"]): measure for name, measure in found.items()}


def _if_any(chains: Sequence[Any], measure: Measure) -> Measure:
    """The measure of some chains; it excludes a record without them."""

    def measured() -> Any:
        if not chains:
            raise Excluded
        return measure()

    return measured


def _column(name: str, protocol: str) -> str:
    """The column of a score, whose protocol is named before its population."""
    score, at, population = name.partition(SEPARATOR)
    return f"{score}_{protocol}{at}{population}"


class ChainScores:
    """Probabilities of the facts of one edit on both models, and the means of their ratios.

    Args:
        doc, answers: the document and its answers.
    """

    def __init__(self, doc: Mapping[str, Any], answers: CaseAnswers) -> None:
        self.answers = answers
        self.aliases: Mapping[str, Sequence[str]] = doc["aliases"]
        self.competitor: str = doc["competitor"]
        self.found: dict[tuple[Place, bool], float] = {}

    def log_probability(self, place: Place, *, edited: bool) -> float:
        """The log-probability of a fact's answer on one of the models; -inf for no response.

        Columns of the unedited model never need the other one: a failed edit leaves them as they are.
        """
        if (place, edited) not in self.found:
            probe, answer = self.answers.probes[place[0]], place[1]
            estimate = self._log_share if probe.probe.generate else self._log_likelihood
            self.found[place, edited] = estimate(probe, answer, unedited=not edited)
        return self.found[place, edited]

    def _log_share(self, answered: ProbeAnswers, answer: str, *, unedited: bool) -> float:
        """The share of responses with the answer or another name of it; for yes or no, that begin with yes."""
        texts = [measures.generated_text(one, unedited=unedited).text for one in answered.generations]
        if self.competitor:
            share = sum(first_word(text) == answer.lower() for text in texts) / len(texts)
        else:
            share = share_with_answer(texts, [answer, *self.aliases.get(answer, ())])
        return math.log(share) if share else -math.inf

    def _log_likelihood(self, answered: ProbeAnswers, answer: str, *, unedited: bool) -> float:
        """The answer's mean log-probability per token; with a competitor, log of its share of both."""
        wanted = measures.nll(self._scored(answered, answer), unedited=unedited)
        if not self.competitor:
            return -wanted
        lead = wanted - measures.nll(self._scored(answered, self.competitor), unedited=unedited)
        return -max(lead, 0.0) - math.log1p(math.exp(-abs(lead)))

    @staticmethod
    def _scored(answered: ProbeAnswers, answer: str) -> Answer:
        return answered.targets[answered.probe.targets.index(answer)]

    def log_product(self, chain: Sequence[Place], *, edited: bool) -> float:
        """log R of a chain on one of the models; -inf for R = 0."""
        return math.fsum(self.log_probability(place, edited=edited) for place in chain)

    def recovery(
        self, chains: Sequence[Sequence[Place]], *, clip: bool = False, noun: str = "chains"
    ) -> dict[str, float]:
        """IFR over the active ones of some chains, and the sum of their weights."""
        weighted = [
            (ratio, 1 / math.sqrt(len(chain))) for chain in chains if (ratio := self._ratio(chain, clip)) is not None
        ]
        return _weighted(weighted, noun)

    def preservation(self, context: Sequence[Place], *, clip: bool = False) -> dict[str, float]:
        """CKP over the active ones of some facts, and their number."""
        if not context:
            raise Unscored("the record has no broader context")
        ratios = (self._ratio([place], clip) for place in context)
        return _weighted([(ratio, 1.0) for ratio in ratios if ratio is not None], "questions of the broader context")

    def _ratio(self, chain: Sequence[Place], clip: bool) -> float | None:
        """R after the edit divided by R before it; ``None`` for an inactive chain."""
        before = self.log_product(chain, edited=False)
        if before == -math.inf:
            return None
        after = self.log_product(chain, edited=True)
        log_ratio = min(after - before, 0.0) if clip else after - before
        if log_ratio > MAX_LOG_RATIO:
            raise Failed(f"a ratio is e^{log_ratio:.0f}, which is too large to average")
        return math.exp(log_ratio)

    def num_active(self, chains: Iterable[Sequence[Place]], *, edited: bool = False) -> int:
        """Number of chains with R > 0 on the unedited, or on the edited model."""
        return sum(self.log_product(chain, edited=edited) > -math.inf for chain in chains)

    def deep_edited(self, chains: Sequence[Sequence[Place]], noun: str = "chains") -> float:
        """1 if no chain is active on the edited model, 0 if one is.

        Raises:
            Unscored: if no chain is active on the unedited model: it could not deduce the fact either, so nothing is
                left for the edit to remove.
        """
        if not self.num_active(chains):
            raise Unscored(f"the unedited model answers none of the {noun}")
        return float(not self.num_active(chains, edited=True))

    def knows(self, place: Place) -> float:
        """1 if the unedited model has the answer: in one response or more, as its argmax, or before the competitor."""
        probe, answer = self.answers.probes[place[0]], place[1]
        if probe.probe.generate:
            return float(self.log_probability(place, edited=False) > -math.inf)
        if self.competitor:
            return float(self.log_probability(place, edited=False) > math.log(0.5))
        return measures.tf_exact(self._scored(probe, answer), unedited=True)


def share_with_answer(texts: Sequence[str], names: Sequence[str]) -> float:
    """The share of responses with an answer, given this and its other names; the rule of the sampled scores."""
    return sum(has_answer(text, names) for text in texts) / len(texts)


def _pooled(values: Iterator[float], noun: str) -> dict[str, float]:
    return _weighted([(value, 1.0) for value in values], noun)


def _weighted(weighted: Sequence[tuple[float, float]], noun: str) -> dict[str, float]:
    """Weighted mean and sum of the weights."""
    if not weighted:
        raise Unscored(f"the unedited model answers none of the {noun}")
    weight = math.fsum(weight for _, weight in weighted)
    return {"value": math.fsum(value * weight for value, weight in weighted) / weight, "weight": weight}
