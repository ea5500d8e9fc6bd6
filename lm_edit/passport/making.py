"""Make the passport of a saved edit: part by part, on one loaded model."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edit_hooks.assets.demo_name import DEMO_NAME
from edit_hooks.deltas.apply import edited
from edit_hooks.deltas.delta import Delta
from edit_hooks.deltas.saving.saved import editor_of, load_edit, requests_of
from edit_hooks.inference.effects.edit_effects import EditEffects
from edit_hooks.inference.effects.neutral_prompts import NEUTRAL_PROMPTS, verdict
from edit_hooks.lm.loading.versions import installed_versions
from edit_hooks.lm.model import EditedHFLM
from edit_hooks.request import statement_of
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.storage.files import names_file, read_text, user_path
from lm_edit.passport.asking import Asking, TaskColumn, mean_score
from lm_edit.passport.facts import EditFacts, read_facts
from lm_edit.passport.lasting import embedded_texts, merged, quantized, require_weights, trained
from lm_edit.passport.parts import ABILITY_COLUMNS, CHAT_COLUMNS, LASTING_COLUMNS, QUESTIONS
from lm_edit.passport.record import Part, Passport, PassportScore
from lm_edit.passport.subjects import recover_subjects
from lm_eval_tasks.common.records.dataset import MINI

ABILITY_BATCH = 8  # rows at once; stock tasks have one at a time by default

log = get_logger("lm_eval.edited_hf")

# Part -> what it asks; the order of a passport.
PARTS: dict[str, str] = {
    "efficacy": QUESTIONS["efficacy"].question,
    "chat": "Does the model give the new answer in its chat template?",
    "generalizes": QUESTIONS["generalizes"].question,
    "reverses": QUESTIONS["reverses"].question,
    "questions": QUESTIONS["questions"].question,
    "hops": QUESTIONS["hops"].question,
    "divergence": "How far did the edit move the next token after prompts that have nothing to do with it?",
    "neighbors": QUESTIONS["neighbors"].question,
    "abilities": "What can the model still do besides, compared with the unedited one?",
    "trained": "Does the fact survive further LoRA training on unrelated text?",
    "quantized": "Does the fact survive 4-bit quantization?",
    "merged": "Does the fact survive another adapter on top?",
    "subjects": "Are the edited subjects recovered from the update?",
}
# Chapter -> its parts; a chapter may be named in place of its parts.
CHAPTERS: dict[str, tuple[str, ...]] = {
    "holds": ("efficacy", "chat", "generalizes", "reverses", "questions", "hops"),
    "broke": ("divergence", "neighbors", "abilities"),
    "lasts": ("trained", "quantized", "merged"),
    "gives-away": ("subjects",),
}


@dataclass(frozen=True, kw_only=True)
class PassportOptions:
    """What to measure.

    Attributes:
        facts: file or benchmark with the questions about the edit's facts; ``None`` for the edit's own requests.
        parts: names of :data:`PARTS`.
        merge_with: another adapter or saved edit.
        text: file of unrelated texts, one per line, for the steps of ``trained``; ``None`` for the embedded sentences.
        steps: of training.
        limit: most facts to ask about.
        ability_rows: rows per ability task.
        seed: of training and of the decomposition behind ``subjects``.
    """

    facts: str | None = None
    parts: Sequence[str] = tuple(PARTS)
    merge_with: str | None = None
    text: str | None = None
    steps: int = 50
    limit: int = 100
    ability_rows: int = 4
    seed: int = 0


def chosen_parts(names: Sequence[str]) -> list[str]:
    """The parts of names of parts and chapters, in the order of a passport.

    Raises:
        EditingError: for an unknown name.
    """
    known = {**CHAPTERS, **{part: (part,) for part in PARTS}}
    if unknown := [name for name in names if name not in known]:
        raise EditingError(
            f"part {unknown[0]!r} is unknown. Accepted: {', '.join(CHAPTERS)}, or single parts: {', '.join(PARTS)}."
        )
    wanted = {part for name in names for part in known[name]}
    return [part for part in PARTS if part in wanted]


def make_passport(
    edit: str | Path, options: PassportOptions, model_options: Mapping[str, Any], folder: Path
) -> Passport:
    """Measure the parts of a saved edit, a folder of a stream or a LoRA adapter.

    Args:
        model_options: of :class:`EditedHFLM`, with those of a benchmark's records (``data``, ...).
        folder: new or empty; gets the result files and samples behind the scores.

    Raises:
        EditingError: for an edit that does not fit the model, and facts that are not the edit's. What a single part
            cannot do is the reason why that part is unscored.
    """
    began = time.perf_counter()
    texts = (
        embedded_texts() if options.text is None else read_text(user_path(options.text, "file of texts")).split("\n")
    )
    lm = EditedHFLM(**{**model_options, "mode": "none", "store": "off"})
    lm.load()
    maker = _Maker(lm, edit, options, folder, texts)
    parts = [maker.part(name) for name in options.parts]
    return Passport(
        edit=maker.describe_edit(),
        model={
            "name": DEMO_NAME if lm.is_demo else _shared_name(str(lm.pretrained)),
            "type": lm.config.model_type,
            "dtype": str(lm.model.dtype),
            "device": str(lm.device),
            "weights": lm.identity.to_dict()["weights"],
        },
        facts=maker.facts.describe(),
        parts=parts,
        settings={
            **{name: value for name, value in dataclasses.asdict(options).items() if name not in ("facts", "parts")},
            "parts": list(options.parts),
            "text": "embedded sentences" if options.text is None else Path(options.text).name,
            "merge_with": None if options.merge_with is None else Path(options.merge_with).name,
        },
        versions=installed_versions(),
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        seconds=time.perf_counter() - began,
    )


def _shared_name(pretrained: str) -> str:
    """Hub id of a model, or the name of its folder: passports are passed on."""
    return Path(pretrained).name if names_file(pretrained) or Path(pretrained).exists() else pretrained


class _Maker:
    """The model, the edit and its facts, and a method per part.

    Args:
        lm: the unedited model.
        texts: for training.
    """

    def __init__(
        self, lm: EditedHFLM, edit: str | Path, options: PassportOptions, folder: Path, texts: Sequence[str]
    ) -> None:
        self.lm, self.edit, self.options, self.texts = lm, user_path(edit, "saved edit"), options, texts
        self.delta: Delta = load_edit(self.edit, lm.model, lm.identity).delta
        self.saved = requests_of(self.delta)
        other = options.merge_with
        self.other = None if other is None else load_edit(user_path(other, "saved edit"), lm.model, lm.identity)
        settings = lm.options.data_settings(lm.is_demo)
        self.facts: EditFacts = read_facts(self.saved, options.facts, settings, options.limit)
        self.file = folder / "facts.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        self.facts.write(self.file)
        self.asking = Asking(folder)
        self.effects = EditEffects(lm.model, lm.tokenizer)  # of the unedited model

    def describe_edit(self) -> dict[str, Any]:
        """What the passport is of."""
        requests = [request.to_dict() for request in (self.saved or {}).values()]
        shown = [statement_of(request) for request in requests[: self.options.limit]]
        return {
            "name": self.edit.name,
            "editor": editor_of(self.delta),
            "writes": list(self.delta.writes),
            "parameters": len(self.delta.parameter_names),
            "num_requests": len(requests) if self.saved is not None else None,
            "statements": shown,
            "checksum": self.delta.checksum(),
        }

    def part(self, name: str) -> Part:
        """Measure one part; an :class:`EditingError` is the reason why it is unscored."""
        began = time.perf_counter()
        measure: Callable[[], Part] = getattr(self, f"_{name}", None) or functools.partial(self._ask, name)
        log.info("passport: %s", name)
        try:
            part = measure()
        except EditingError as error:
            part = self._part(name, unscored=str(error))
        return dataclasses.replace(part, seconds=time.perf_counter() - began)

    def _part(self, name: str, scores: Sequence[PassportScore] = (), **more: Any) -> Part:
        return Part(name=name, question=PARTS[name], scores=scores, **more)

    # -- questions ---------------------------------------------------------------------------------------------------

    def _view(self, **options: Any) -> EditedHFLM:
        """The loaded model as the model of another run."""
        own = {"batch_size": self.lm.batch_size, "max_length": self.lm.max_length, "device": str(self.lm.device)}
        own |= {"family": self.lm.options.family}
        return EditedHFLM(self.lm.model, tokenizer=self.lm.tokenizer, store="off", **{**own, **options})

    @functools.cached_property
    def _edited(self) -> EditedHFLM:
        return self._view(load_edit=str(self.edit))

    def _ask(self, name: str, **options: Any) -> Part:
        """A part of columns of tasks."""
        questions = QUESTIONS[name]
        if questions.needs and not any(getattr(self.facts.cases[one], questions.needs) for one in self.facts.chosen):
            kind = {"paraphrases": "rewordings", "neighbors": "prompts of other facts"}[questions.needs]
            return self._part(name, unscored=f"the facts have no {kind}; give some with --facts")
        columns = questions.of_benchmark.get(self.facts.benchmark, ())
        if not columns and not questions.columns:
            known = ", ".join(questions.of_benchmark)
            return self._part(name, unscored=f"the facts have no such questions; records of {known} have (--facts)")
        scores = self._asked(self._edited, questions.columns, **options) if questions.columns else []
        if columns:
            scores += self.asking.scores(self._edited, columns, self.facts.settings, chosen=self.facts.chosen)
        return self._part(name, scores)

    def _asked(self, lm: EditedHFLM, columns: Sequence[TaskColumn], **options: Any) -> list[PassportScore]:
        """Columns of tasks that read facts of any source."""
        settings = {"data": str(self.file), **options.pop("settings", {})}
        return self.asking.scores(lm, columns, settings, chosen=self.facts.chosen, **options)

    def _efficacy(self) -> Part:
        part = self._ask("efficacy")
        return dataclasses.replace(part, scores=[self._target_nll(), *part.scores])

    def _target_nll(self) -> PassportScore:
        """Likelihood of the new answers, without which shares of held facts say little."""
        if self.delta.contexts:
            return PassportScore(
                name="target_nll", value=None, n=0, note="the edit acts through prompts, which tasks build"
            )
        before, after = self.effects.target_nlls(self.facts.requests, None, self.delta)
        return mean_score("target_nll", after, before=before)

    def _chat(self) -> Part:
        if not self.lm.tokenizer.chat_template:
            return self._part("chat", unscored="the model's tokenizer has no chat template")
        return self._part("chat", self._asked(self._edited, CHAT_COLUMNS, chat=True))

    # -- damage ------------------------------------------------------------------------------------------------------

    def _divergence(self) -> Part:
        if self.delta.contexts:
            return self._part("divergence", unscored="the edit acts through prompts and leaves these as they are")
        effects = verdict(self.effects.divergence(self.delta))
        score = PassportScore(
            name="first_token_kl",
            value=effects.first_token_kl,
            n=len(NEUTRAL_PROMPTS),
            note="a mean over fixed prompts",
        )
        return self._part("divergence", [score], details={"wrecked": effects.wrecked, "prompts": list(NEUTRAL_PROMPTS)})

    def _abilities(self) -> Part:
        settings = {"data": MINI} if self.lm.is_demo else {"pretrained": True}  # then the published rows
        view = self._view(load_edit=str(self.edit), compare_unedited=True, batch_size=ABILITY_BATCH)
        scores = self.asking.scores(view, ABILITY_COLUMNS, settings, limit=self.options.ability_rows)
        return self._part("abilities", scores, details={"rows_per_task": self.options.ability_rows})

    # -- changes of the edited model ---------------------------------------------------------------------------------

    def _trained(self) -> Part:
        options = self.options
        change = functools.partial(
            trained, self.lm.model, self.lm.tokenizer, self.texts, steps=options.steps, seed=options.seed
        )
        return self._after("trained", change)

    def _quantized(self) -> Part:
        return self._after("quantized", lambda: quantized(self.lm.model))

    def _merged(self) -> Part:
        if (other := self.other) is None:
            return self._part("merged", unscored="no other adapter was named (--merge-with)")
        return self._after("merged", lambda: merged(self.lm.model, other))

    def _after(self, name: str, change: Callable[[], contextlib.AbstractContextManager[dict[str, Any]]]) -> Part:
        """The same questions before and after a change of the edited model."""
        require_weights(self.delta, "the edit")
        before = self._before_changes
        with edited(self.lm.model, self.delta), change() as details:
            after = self._lasting_scores(self._view(mode="none"), None)
        scores = [dataclasses.replace(new, before=old.value) for new, old in zip(after, before, strict=True)]
        return self._part(name, scores, compared_with="edited model", details=details)

    @functools.cached_property
    def _before_changes(self) -> list[PassportScore]:
        return self._lasting_scores(self._edited, self.delta)

    def _lasting_scores(self, lm: EditedHFLM, delta: Delta | None) -> list[PassportScore]:
        """Target likelihood, efficacy, rewordings and free answers of the model as it is now.

        Args:
            delta: the edit, if it is not in the model's weights now.
        """
        (nlls,) = self.effects.target_nlls(self.facts.requests, delta)
        columns = [
            column
            for column in LASTING_COLUMNS
            if not column.metric.startswith("paraphrase")
            or any(self.facts.cases[one].paraphrases for one in self.facts.chosen)
        ]
        return [mean_score("target_nll", nlls), *self._asked(lm, columns, settings={"generate": False})]

    # -- leaks -------------------------------------------------------------------------------------------------------

    def _subjects(self) -> Part:
        requests = list((self.saved or {}).values()) or self.facts.requests
        others = [case.request.subject for case in self.facts.cases if case.request.subject]
        recovery = recover_subjects(
            self.lm.model,
            self.lm.tokenizer,
            self.delta,
            [request.subject for request in requests if request.subject],
            others,
            self.options.seed,
        )
        score = mean_score("subject_recovered", recovery.found)
        score = dataclasses.replace(score, **_share_interval(score), is_share=True, chance=recovery.chance)
        return self._part("subjects", [score], details=recovery.details)


def _share_interval(score: PassportScore) -> dict[str, Any]:
    """Wilson's interval of a share of successes."""
    from lm_edit.results.statistics.intervals import wilson_interval

    found = wilson_interval(round((score.value or 0.0) * score.n), score.n)
    return {"low": found.low, "high": found.high, "method": found.method, "note": ""}


@contextlib.contextmanager
def result_folder(output: Path | None) -> Iterator[Path]:
    """The folder of result files: below the output, or a temporary one."""
    import tempfile

    if output is not None:
        yield output / "runs"
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)
