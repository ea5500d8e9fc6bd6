"""Training on the rows of facts with a gate and a locality term.

A fact has trained rows and locality prompts. The loss of row k, l_k, is the mean NLL over the tokens of its target, or
for a row with a teacher the mean over these tokens of KL(teacher || model): the teacher is the unedited model with
other text before the same target. With p0 the model before the edit, a step minimizes

    sum_k 1[l_k > learned_nll] l_k / (number of rows) + locality_weight * mean over drawn z of KL(p0(.|z) || p(.|z))

and the edit ends when every row is learned. The gate leaves alone what is learned.

The softmax is over the tokens that are likely before the edit, and the targets: the loss of a step then reads about a
thousand rows of the head. In a joint edit every pass takes a step on each fact, or on ``batch_size`` facts, before any
fact has its next one (breadth first).

Shapes: L labels, Z drawn locality prompts, U tokens of the reduced vocabulary, V vocabulary.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from edit_hooks.base.config import EditorConfig, config_field
from edit_hooks.base.job import EditJob
from edit_hooks.deltas.delta import Delta
from edit_hooks.gradient.diagnostics import loss_diagnostics
from edit_hooks.gradient.gated.row_pool import POOLS, RowPool
from edit_hooks.gradient.labeled_rows import LabeledRow
from edit_hooks.gradient.side_by_side import make_adam, split_edits
from edit_hooks.gradient.stepping.kept_training import KeptTraining
from edit_hooks.gradient.weight_copies import WeightCopies
from edit_hooks.modeling.device.run_ahead import upload
from edit_hooks.modeling.forward.lm_head import WHOLE_VOCAB
from edit_hooks.utils.progress import Rounds
from edit_hooks.utils.settings.numbers import NON_NEGATIVE, POSITIVE

# In the metadata of a delta: by fact the texts of its rows. In the diagnostics of an edit of one fact: those texts.
TRAINED_PROMPTS = "trained_prompts"


@dataclass(kw_only=True)
class GatedConfig(EditorConfig):
    """Settings of the training."""

    num_steps: int = config_field("passes over the facts at most", within=POSITIVE, default=14)
    lr: float = config_field("Adam learning rate", within=POSITIVE, default=1e-4)
    learned_nll: float = config_field(
        "a row with a lower NLL per token is learned: it is not trained, and the edit ends when all rows are",
        within=NON_NEGATIVE,
        default=0.3,
    )
    locality_weight: float = config_field(
        "factor of the divergence on prompts of other names", within=NON_NEGATIVE, default=3.0
    )
    locality_prompts: int = config_field("of them, how many each step draws", within=POSITIVE, default=6)
    max_prompts: int = config_field(
        "prompts kept at most, drawn from those of all parts; five steps draw 24", within=POSITIVE, default=30
    )
    target_tokens: int = config_field(
        "reduced vocabulary: most likely tokens at each label before the edit", within=POSITIVE, default=64
    )
    locality_tokens: int = config_field(
        "reduced vocabulary: most likely tokens after each locality prompt before the edit", within=POSITIVE, default=32
    )
    batch_size: int = config_field("facts per step of a joint edit", within=POSITIVE, default=8)


class TrainedRow(NamedTuple):
    """A row that an edit is trained on.

    Attributes:
        name: its kind; a fact may have several rows of one kind, and has one of the kind ``fact``, which is the first.
        prompt: its text before the target.
        row: prompt and target as tokens.
        teacher: the target after the text of a teacher, with as many labels.
        bare: its text without a context, if it is asked with other names, too.
    """

    name: str
    prompt: str
    row: LabeledRow
    teacher: LabeledRow | None = None
    bare: str = ""


@dataclass
class GatedFact:
    """The rows of a fact, its locality prompts, and its training so far.

    Attributes:
        trained: the trained rows, that of the fact first.
        asked: text of a locality prompt -> its row, with one label.
        draws: endless positions of locality prompts, each as often as the others.
        notes: diagnostics about the rows.
        tokens_U: the reduced vocabulary. target_L: the labels of the trained rows in it. before_ZU: log-probabilities
            after each locality prompt before the edit. teacher_LU: those of the teachers, by the position of the row.
        losses: l_k of the trained rows at every evaluation. divergences: the KL term.
    """

    trained: Sequence[TrainedRow]
    asked: Mapping[str, LabeledRow]
    draws: Iterator[int]
    notes: Mapping[str, Any] = field(default_factory=dict)
    tokens_U: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    target_L: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    before_ZU: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    teacher_LU: dict[int, torch.Tensor] = field(default_factory=dict)
    losses: list[list[float]] = field(default_factory=list)
    divergences: list[float] = field(default_factory=list)

    @property
    def rows(self) -> list[LabeledRow]:
        """All rows: trained ones, locality prompts, teachers."""
        teachers = [one.teacher for one in self.trained if one.teacher is not None]
        return [*(one.row for one in self.trained), *self.asked.values(), *teachers]

    @property
    def prompts(self) -> list[str]:
        """The texts of the trained rows and of the locality prompts."""
        return [*(one.prompt for one in self.trained), *self.asked]

    @property
    def counts(self) -> list[int]:
        """Number of labels of every trained row."""
        return [len(one.row.labels) for one in self.trained]

    def is_learned(self, config: GatedConfig) -> bool:
        """Whether every row was learned at the last evaluation."""
        return max(self.losses[-1]) < config.learned_nll


def draw_positions(count: int, generator: random.Random) -> Iterator[int]:
    """The numbers below ``count`` in random order, again and again."""
    while count:
        yield from generator.sample(range(count), count)


def batches_of(job: EditJob[Any], names: Sequence[str], facts: Sequence[GatedFact]) -> list[list[int]]:
    """Facts whose edits train side by side: with as many trained rows, and with locality prompts or without."""
    if job.config.engine == "reference":
        return [[index] for index in range(len(facts))]
    trained_bytes = WeightCopies(job.model, names, train_bias=False).edit_bytes
    alike: dict[tuple[int, bool], list[int]] = {}
    for index, fact in enumerate(facts):
        alike.setdefault((len(fact.trained), bool(fact.asked)), []).append(index)
    batches = []
    for indices in alike.values():
        lengths = []
        for index in indices:
            fact = facts[index]
            asked = [len(row.ids) for row in fact.asked.values()]
            drawn = sum(asked) / max(len(asked), 1) * job.config.locality_prompts
            lengths.append(sum(len(one.row.ids) for one in fact.trained) + round(drawn))
        for batch in split_edits(job.model, lengths, trained_bytes):
            batches.append([indices[position] for group in batch for position in group])
    return batches


class GatedTraining:
    """Training of one joint edit of all facts, or of independent edits of one fact each, side by side."""

    def __init__(self, job: EditJob[Any], names: Sequence[str], facts: Sequence[GatedFact], *, joint: bool) -> None:
        self.job, self.config, self.facts, self.joint = job, job.config, list(facts), joint
        self.pool: RowPool = POOLS[self.config.engine](job.model, [row for fact in facts for row in fact.rows], names)
        ends = list(itertools.accumulate(len(fact.rows) for fact in facts))
        self.starts = dict(zip(map(id, facts), [0, *ends], strict=False))
        for fact in facts:
            self._read_unedited(fact)
        self.copies = WeightCopies(job.model, names, train_bias=False, num_edits=1 if joint else len(facts))
        self.num_steps = 0
        self.optimizer = make_adam(list(self.copies.leaves.values()), self.config.lr, 0.0, self.config.engine)

    @torch.no_grad()
    def _read_unedited(self, fact: GatedFact) -> None:
        """The reduced vocabulary of a fact, and the distributions before the edit."""
        start = self.starts[id(fact)]
        logits_LV = self.pool.logits_before(range(start, start + len(fact.rows)), WHOLE_VOCAB)
        targets = torch.tensor([token for one in fact.trained for _, token in one.row.labels]).to(logits_LV.device)
        taught = {k: count for k, count in enumerate(fact.counts) if fact.trained[k].teacher is not None}
        own_LV, asked_ZV, teacher_LV = logits_LV.split([len(targets), len(fact.asked), sum(taught.values())])
        sizes = (self.config.target_tokens, self.config.locality_tokens, self.config.target_tokens)
        parts = zip((own_LV, asked_ZV, teacher_LV), sizes, strict=True)
        likely = [part.topk(min(count, part.shape[1]), 1).indices.flatten() for part, count in parts]
        fact.tokens_U = torch.cat([targets, *likely]).unique()
        fact.target_L = torch.searchsorted(fact.tokens_U, targets)
        fact.before_ZU = asked_ZV[:, fact.tokens_U].log_softmax(1)
        by_row = teacher_LV[:, fact.tokens_U].log_softmax(1).split(list(taught.values()))
        fact.teacher_LU = dict(zip(taught, by_row, strict=True))

    def train(self) -> list[Delta]:
        """Train; the delta of the joint edit, or those of the facts in their order."""
        return [self._train_joint()] if self.joint else self._train_side_by_side()

    def _train_joint(self) -> Delta:
        size = self.config.batch_size
        chunks = [self.facts[start : start + size] for start in range(0, len(self.facts), size)]
        kept = KeptTraining(self.job.model, self.optimizer, [fact.rows for fact in self.facts])
        done = self._resume(kept.resume())
        rounds = Rounds(len(self.facts), self.config.num_steps, self.job.progress)
        rounds.next(done // len(chunks))
        while done < self.config.num_steps * len(chunks):
            position = done % len(chunks)
            if position == 0 and done and all(fact.is_learned(self.config) for fact in self.facts):
                break
            losses = self._losses(chunks[position])
            if not all(fact.is_learned(self.config) for fact in chunks[position]):
                self.optimizer.zero_grad()
                torch.stack(losses).mean().backward()
                self._step()
            done += 1
            if done % len(chunks) == 0:
                rounds.next()
            kept.after_step(functools.partial(self._record, done))
        rounds.end()
        return self._delta(0, self.facts, self.num_steps)

    def _record(self, done: int) -> dict[str, Any]:
        """The progress of a joint edit, besides its tensors, after ``done`` chunks."""
        history = [[fact.losses, fact.divergences] for fact in self.facts]
        return {"done": done, "num_steps": self.num_steps, "history": history}

    def _resume(self, record: Mapping[str, Any]) -> int:
        """Go on from a record, unless it is empty; the number of chunks done."""
        if not record:
            return 0
        self.num_steps = record["num_steps"]
        for fact, (losses, divergences) in zip(self.facts, record["history"], strict=True):
            fact.losses, fact.divergences = losses, divergences
            for _ in itertools.islice(fact.draws, len(divergences) * self.config.locality_prompts):
                pass  # drawn by the evaluations with a divergence
        return int(record["done"])

    def _train_side_by_side(self) -> list[Delta]:
        running, deltas = self.facts, dict[int, Delta]()
        for _ in range(self.config.num_steps):
            losses = self._losses(running)
            keep = [not fact.is_learned(self.config) for fact in running]
            if any(keep):
                self.optimizer.zero_grad()
                torch.stack(list(itertools.compress(losses, keep))).sum().backward()
            if not all(keep):
                deltas |= self._deltas(running, keep)
                self.copies.select(torch.tensor(keep), self.optimizer)
                running = list(itertools.compress(running, keep))
            if not running:
                break
            self._step()
        deltas |= self._deltas(running, [False] * len(running))
        return [deltas[id(fact)] for fact in self.facts]

    def _step(self) -> None:
        self.optimizer.step()
        self.num_steps += 1

    def _deltas(self, running: Sequence[GatedFact], keep: Sequence[bool]) -> dict[int, Delta]:
        """The deltas of the edits that end now."""
        ended = [index for index, kept in enumerate(keep) if not kept]
        self.job.progress(len(ended))
        found = {}
        for index in ended:
            fact = running[index]
            num_steps = len(fact.losses) - fact.is_learned(self.config)
            found[id(fact)] = self._delta(index, [fact], num_steps)
        return found

    def _delta(self, index: int, facts: Sequence[GatedFact], num_steps: int) -> Delta:
        """The delta of an edit; it has every prompt, so that those of an evaluation can be counted."""
        delta = self.copies.delta(index, self._diagnostics(facts, num_steps))
        delta.meta[TRAINED_PROMPTS] = [fact.prompts for fact in facts]
        return delta

    def _losses(self, facts: Sequence[GatedFact]) -> list[torch.Tensor]:
        """The loss of every fact, with newly drawn locality prompts; records its parts.

        Before the first step the divergence is 0, its least value, and so is its gradient: no prompt is run.
        """
        chosen, count = [], self.config.locality_prompts if self.num_steps else 0
        for fact in facts:
            drawn = itertools.islice(fact.draws, count)
            trained = len(fact.trained)
            chosen.append([self.starts[id(fact)] + row for row in (*range(trained), *(trained + z for z in drawn))])
        with self.copies.used_by_model():
            logits = self.pool.logits(chosen, [fact.tokens_U for fact in facts])
        parts = [
            self._parts(fact, rows, own.log_softmax(1)) for fact, rows, own in zip(facts, chosen, logits, strict=True)
        ]
        values = iter(torch.stack([part.detach() for own in parts for part in own]).tolist())  # one read for all facts
        return [
            self._gated(fact, own, list(itertools.islice(values, len(own))))
            for fact, own in zip(facts, parts, strict=True)
        ]

    def _parts(self, fact: GatedFact, rows: Sequence[int], logprobs_LU: torch.Tensor) -> list[torch.Tensor]:
        """The losses l_k, and behind them the divergence if locality prompts were drawn."""
        target_L = fact.target_L.to(logprobs_LU.device)  # a selection of tokens may be on another device than all
        found = []
        parts = zip(logprobs_LU[: len(target_L)].split(fact.counts), target_L.split(fact.counts), strict=True)
        for k, (own_LU, own_L) in enumerate(parts):
            if k in fact.teacher_LU:
                found.append(_divergence(fact.teacher_LU[k], own_LU))
            else:
                found.append(-own_LU.gather(1, own_L[:, None]).mean())
        if len(rows) > len(fact.trained):
            first = self.starts[id(fact)] + len(fact.trained)
            drawn = torch.tensor([row - first for row in rows[len(fact.trained) :]])
            before_ZU = fact.before_ZU[upload(drawn, fact.before_ZU.device)]
            found.append(_divergence(before_ZU, logprobs_LU[len(target_L) :]))
        return found

    def _gated(self, fact: GatedFact, parts: Sequence[torch.Tensor], values: list[float]) -> torch.Tensor:
        """The loss of a fact, of its parts and their values, which are recorded."""
        count, bound = len(fact.trained), self.config.learned_nll
        loss_K = torch.stack(list(parts[:count]))
        is_open_K = torch.tensor([value > bound for value in values[:count]])
        loss = loss_K[upload(is_open_K.nonzero()[:, 0], loss_K.device)].sum() / count
        fact.losses.append(values[:count])
        if len(parts) > count:
            fact.divergences.append(values[count])
            loss = loss + self.config.locality_weight * parts[count]
        return loss

    def _diagnostics(self, facts: Sequence[GatedFact], num_steps: int) -> dict[str, Any]:
        """Means over the facts; the NLLs are over the reduced vocabulary."""
        evaluations = max(len(fact.losses) for fact in facts)
        losses = [_mean([_mean(fact.losses[number]) for fact in facts]) for number in range(evaluations)]
        learned = all(fact.is_learned(self.config) for fact in facts)
        final: dict[str, list[float]] = defaultdict(list)
        for fact in facts:
            for one, loss in zip(fact.trained, fact.losses[-1], strict=True):
                final[one.name].append(loss)
        row_nlls = {name: _mean(own) for name, own in final.items()}
        return loss_diagnostics(losses, num_steps, stopped_early=learned) | {
            "initial_nll": _mean([fact.losses[0][0] for fact in facts]),
            "final_nll": row_nlls["fact"],
            "row_nlls": row_nlls,
            **({**facts[0].notes, TRAINED_PROMPTS: facts[0].prompts} if len(facts) == 1 else {}),
            "locality_kl": _mean([fact.divergences[-1] if fact.divergences else 0.0 for fact in facts]),
        }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _divergence(teacher_LU: torch.Tensor, logprobs_LU: torch.Tensor) -> torch.Tensor:
    """Mean over the labels of KL(teacher || model), of log-probabilities."""
    teacher_LU = teacher_LU.to(logprobs_LU.device)
    return nn.functional.kl_div(logprobs_LU, teacher_LU, reduction="batchmean", log_target=True)
