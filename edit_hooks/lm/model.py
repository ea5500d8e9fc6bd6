"""`edited_hf`: lm-eval's Hugging Face model class with edits.

Documents of editing tasks carry ``edit_requests``. Their requests are answered under the document's edits with an
:class:`~edit_hooks.answers.EditedAnswer`. All other requests go to the parent class: on the unedited model, or in batch
and sequential mode on the edited one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from torch import nn
from transformers import PreTrainedModel

from edit_hooks.answers import (
    EditedAnswer,
    FailedAnswer,
    GeneratedText,
    ModelAnswer,
    ModelResult,
    ScoredContinuation,
)
from edit_hooks.assets.demo_model import demo_dtype, demo_model_path
from edit_hooks.assets.gguf_file import gguf_model_path, is_gguf_file
from edit_hooks.base.checks import position_limit
from edit_hooks.base.editor import Editor
from edit_hooks.base.origin import SettingsOrigin, report_origin
from edit_hooks.base.registry import load_editor
from edit_hooks.deltas.apply import UNEDITED_STATE
from edit_hooks.deltas.delta import Delta
from edit_hooks.deltas.saving.saved import read_edit
from edit_hooks.in_context.combined import EditorWithContext
from edit_hooks.in_context.fact_memory import require_models
from edit_hooks.inference.effects import states
from edit_hooks.inference.items import GenerateItem, Item, ScoreItem
from edit_hooks.inference.token_prompts import score_parts
from edit_hooks.lm.asking.chats import Chats
from edit_hooks.lm.asking.contexts import ContextExamples, edit_context_of, with_edited_texts
from edit_hooks.lm.asking.engine import Engine
from edit_hooks.lm.asking.item_builder import ItemBuilder
from edit_hooks.lm.asking.prompt_edits import PromptEdits
from edit_hooks.lm.asking.served import ServedEngine
from edit_hooks.lm.asking.stored_answers import AnswerStore, read_code
from edit_hooks.lm.banner import about_edits_in, log_banner
from edit_hooks.lm.editing.unusable import warn_of_unusable
from edit_hooks.lm.loading.data_parallel import DataParallelMixin, start_processes
from edit_hooks.lm.loading.devices import describe_devices
from edit_hooks.lm.loading.hflm import LateLoadingHFLM
from edit_hooks.lm.loading.recorded_options import absolute_places, recorded_model, recorded_options
from edit_hooks.lm.loading.versions import installed_versions
from edit_hooks.lm.new_session import RunParts, session_of
from edit_hooks.lm.options.auto import AUTO, found_settings
from edit_hooks.lm.options.edit_sources import read_plan
from edit_hooks.lm.options.editing import FROM_PRETRAINED, EditingOptions, check_known_options, take_sets
from edit_hooks.lm.options.loading import loading_words
from edit_hooks.lm.options.quantization import QUANTIZATION_OPTIONS, check_quantization
from edit_hooks.lm.questions import read_questions, warn_of_questions, warn_of_shortened, with_cut
from edit_hooks.lm.sessions import (
    AnswerJobsOn,
    CaseQuestion,
    Session,
    answer_distinct,
)
from edit_hooks.lm.stock.checks import OrdinaryTasks, has_edit_requests
from edit_hooks.lm.stock.texts import stock_items, stock_text, watched_texts
from edit_hooks.lm.stock.unedited import UneditedStock, counted_pairs
from edit_hooks.modeling.architectures import architecture_of, choose_row, row_of_option, unwrapped
from edit_hooks.modeling.fingerprint.generation_settings import answering_parts, require_followed
from edit_hooks.modeling.fingerprint.identity import ModelIdentity, model_identity
from edit_hooks.modeling.tokens import require_offsets
from edit_hooks.request import EditRequest
from edit_hooks.store.known_models import record_model
from edit_hooks.store.store import Store
from edit_hooks.utils.errors import EditingError, NoUsableRequestError
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.scopes import undone
from edit_hooks.utils.settings.options import settings_file
from edit_hooks.utils.storage.files import names_file
from edit_hooks.utils.storage.hashing import code_fingerprint
from edit_hooks.utils.storage.json_io import within_64_bits

log = get_logger("lm_eval.edited_hf")  # lm-eval sets the verbosity of its own loggers only

OWN_OPTIONS = tuple(field.name for field in dataclasses.fields(EditingOptions))

# Computes the answers of jobs (item, edit) of one kind of item; the requests of one type are all of one kind.
AnswerJobs = Callable[[Any], Sequence[ModelAnswer]]


class EditedHFLM(DataParallelMixin, LateLoadingHFLM):
    """lm-eval's Hugging Face class with an editor.

    Options are those of ``--model hf`` and the fields of :class:`~edit_hooks.lm.options.editing.EditingOptions`.
    Without ``pretrained`` the embedded demo model is used.
    """

    option_names = (*OWN_OPTIONS, *FROM_PRETRAINED, *QUANTIZATION_OPTIONS)  # besides the parameters of `HFLM`

    def __init__(self, pretrained: Any = None, **kwargs: Any) -> None:
        # What the user asks for; of the model, nothing is read yet.
        self._sets = take_sets(kwargs)
        check_known_options(kwargs, HFLM, OWN_OPTIONS)
        own = {name: kwargs.pop(name) for name in OWN_OPTIONS if name in kwargs}
        if kwargs.get("device") is None:  # the parent's default is a GPU, also where there is none
            kwargs["device"] = "cuda" if torch.cuda.is_available() else "cpu"
        if own.get("editor_args") == AUTO:
            own["editor_args"] = found_settings(pretrained, kwargs, own)
        self._settings_file = settings_file(own.get("editor_args"))
        self._loading_words = loading_words(kwargs)
        self.options = EditingOptions(**own)
        self._row = None if self.options.family is None else row_of_option(self.options.family)
        self.editor = self._new_editor()
        self.is_demo = pretrained is None
        if self.is_demo:
            pretrained = str(demo_model_path(demo_dtype(kwargs.get("dtype"))))
        elif is_gguf_file(pretrained):
            pretrained = str(gguf_model_path(pretrained, kwargs.get("dtype")))
        start_processes(tensor_parallel=kwargs.get("tp_plan") is not None)
        planned = read_plan(self.options, self.editor, self.options.data_settings(self.is_demo) | self._sets)
        self._edits_digest = planned.digest  # of the edits without their context

        # lm-eval's class: the model's configuration and tokenizer, no weights.
        super().__init__(pretrained=pretrained, **kwargs)
        self.join_processes()
        if self.backend != "causal":
            raise EditingError("edited_hf edits decoder-only models; this one is an encoder-decoder model.")

        # Questions and their answers.
        server = self.options.server
        self.engine = Engine(self, self.options) if server is None else ServedEngine(self, self.options, server)
        self.chats = Chats(super().apply_chat_template)
        self.items = ItemBuilder(self, self.chats, self.options.max_thought_tokens)
        self.items.check_special_tokens()
        self.prompt_edits = PromptEdits(self.items, self.chats, self.engine)
        self._ordinary, self._unedited_stock = OrdinaryTasks(self), UneditedStock(kwargs)
        self._stock_edit: Delta | None = None  # hooks and contexts under which stock tasks run
        self.begin_evaluation()

        # The run's edits, and what can be refused while no weight is loaded.
        self.edit_context = edit_context_of(self.options.edit_context, self.tokenizer, super().apply_chat_template)
        planned = planned.in_context(self.edit_context)
        self.plan = dataclasses.replace(planned, unusable=self._find_unusable(planned.requests))
        if self._store is not None:  # refuses a path that cannot be a folder
            read_code(None if self.options.load_edit else self.editor)
        self._saved_edit = self._read_saved_edit()
        quantization = {name: kwargs[name] for name in QUANTIZATION_OPTIONS if name in kwargs}
        self._origin = self._check_editor(quantization) if self.options.makes_edits else None
        self._identity: ModelIdentity | None = None
        self._session: Session | None = None  # makes the edits; created at the first question
        if self._model is not None:  # given as an object
            self.check_loaded(self._model)
        if self.rank == 0:
            log_banner(self.options, self.editor.name, pretrained, self.is_demo, self.edits_data)

    def _read_saved_edit(self) -> Delta | None:
        """The edit of ``load_edit``, checked against the names and shapes of the model."""
        if not self.options.load_edit:
            return None
        delta = read_edit(self.options.load_edit, self.outline)
        for memory in {context.memory for context in delta.contexts if context.memory is not None}:
            require_models(memory)
        return delta

    def _check_editor(self, quantization: Mapping[str, Any]) -> SettingsOrigin | None:
        """Refuse settings that do not fit the model; where the settings come from, of editors that change the model."""
        require_offsets(self.tokenizer)
        changes_model = self.editor.writes != ("context",)
        if changes_model:
            check_quantization(self.editor, self.config, quantization)
        outline = self.outline
        if changes_model:
            architecture_of(outline)
        self.editor.check_settings(outline)
        if not changes_model:
            return None
        origin = self.editor.settings_origin(outline)
        origin = origin.of_run(
            pretrained=None if self.is_demo else origin.pretrained,
            settings_file=self._settings_file,
            editor=self.options.editor,
            tune_options=(*self._loading_words, *self.options.facts_to_tune_on(self.is_demo)),
        )
        report_origin(origin, self.rank == 0)
        return origin

    @property
    def outline(self) -> PreTrainedModel:
        """The model without its weights, with the modules that the option ``family`` names."""
        outline = super().outline
        choose_row(outline, self._row)
        return outline

    def check_loaded(self, model: nn.Module) -> None:
        choose_row(model, self._row)
        super().check_loaded(model)
        if self.options.makes_edits:
            self.editor.check_model(model)

    # -- lm-eval's requests ------------------------------------------------------------------------------------------

    def begin_evaluation(self, stock_settings: Iterable[Mapping[str, Any]] = (), tasks: Iterable[str] = ()) -> None:
        """Forget what belongs to one evaluation; a model object may serve several.

        Ordinary ``tasks`` and their generation settings are refused here: lm-eval may ask for likelihoods (so for
        edits) first.
        """
        self.chats.forget()
        self._ordinary.begin_evaluation(tasks)
        for settings in stock_settings:
            if self._stays_outside_weights:
                self.items.check_stock_settings(settings)
        self._examples = ContextExamples()

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Any]:
        """Score continuations.

        Returns:
            `EditedAnswer` for documents with edit requests, lm-eval's pairs for others.
        """
        if self.enable_thinking and any(map(has_edit_requests, requests)):
            raise EditingError(
                "enable_thinking=True: a target right after the prompt would be scored as a thought. Ask tasks that "
                "only generate (qaedit_wild), or drop the option."
            )
        return self._dispatch(requests, super().loglikelihood, self._score, disable_tqdm)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Any]:
        """Continue prompts.

        Returns:
            `EditedAnswer` for documents with edit requests, texts for others.
        """
        return self._dispatch(requests, self._stock_generate, self._generate, disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Score whole texts; in batch and sequential mode on the edited model."""
        self._ordinary.check_whole_texts(requests)
        self._identify()
        return self._answer_ordinary(requests, super().loglikelihood_rolling, disable_tqdm)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Format a chat; :attr:`chats` records its messages."""
        return self.chats.apply_template(chat_history, add_generation_prompt)

    def _dispatch(
        self, requests: list[Instance], stock: Callable[..., list[Any]], answer_jobs: AnswerJobs, disable_tqdm: bool
    ) -> list[Any]:
        with_edits = [request for request in requests if has_edit_requests(request)]
        questions = self._read_questions(with_edits)  # refuses malformed requests while no weight is loaded
        ordinary = [request for request in requests if not has_edit_requests(request)]
        self._ordinary.check(request.task_name for request in ordinary)
        if answer_jobs == self._generate and self._stays_outside_weights:
            self.items.check_stock(ordinary)  # before hours of edits are made
        self._identify()
        self.load()
        if answer_jobs == self._generate and (with_edits or self._stays_outside_weights):
            require_followed(unwrapped(self.model))
        stock_answers = iter(self._answer_ordinary(ordinary, stock, disable_tqdm) if ordinary else ())
        edited_answers = iter(self._answer_under_edits(with_edits, questions, answer_jobs) if with_edits else ())
        return [next(edited_answers if has_edit_requests(request) else stock_answers) for request in requests]

    def _read_questions(self, requests: Sequence[Instance]) -> list[CaseQuestion | FailedAnswer]:
        """The questions of requests; the reason for one that this model cannot be asked."""
        in_prompts = "context" in (self._saved_edit or self.editor).writes and self.options.mode != "none"
        read = read_questions(requests, self.items, self.edit_context, in_prompts=in_prompts)
        if self.rank == 0:
            warn_of_questions(read, self.room, fail_if_all=self.world_size == 1)
            if self.options.makes_edits and not self.plan.groups:
                questions = [question for question in read if isinstance(question, CaseQuestion)]
                edits = {edit.key: edit for question in questions for edit in question.requests}
                self._find_unusable(list(edits.values()), fail_if_all=self.world_size == 1 < len(edits))
        return read

    def _answer_under_edits(
        self, requests: Sequence[Instance], read: Sequence[CaseQuestion | FailedAnswer], answer_jobs: AnswerJobs
    ) -> list[ModelResult]:
        questions = [question for question in read if isinstance(question, CaseQuestion)]
        unedited_only = self.options.mode == "none"
        items = [question.item for question in questions if question.ask_unedited or unedited_only]
        ask = self._kept_in_store(answer_jobs)
        unedited = answer_distinct(  # before any editor code runs
            items, lambda distinct: ask([(item, None) for item in distinct], UNEDITED_STATE)
        )
        stays = self.options.load_edit is not None or self.plan.cumulative  # the weights, while questions are answered
        with self.engine.unedited_states_kept(question.item for question in questions if stays):
            answers = self.session.answer(questions, unedited, ask)
        warn_of_shortened([answer.final for answer in answers], self.room, self.rank)
        edited = [self.session.requests_as_edited(question.requests) for question in questions]
        first = next((edits for edits, answer in zip(edited, answers, strict=True) if answer.edit), [])
        self._examples.record(requests[0], first, self.prompt_edits.is_chat(requests[0].args[0]))
        reported = iter(map(with_cut, map(with_edited_texts, answers, edited), questions))
        return [
            next(reported) if isinstance(question, CaseQuestion) else EditedAnswer(final=question) for question in read
        ]

    def _kept_in_store(self, answer_jobs: AnswerJobs) -> AnswerJobsOn:
        """The function that answers jobs, with the store's answers for those that it has."""
        kept_at = self._answer_store.of_model(self.identity, self._answering_parts, self.device)

        def ask(jobs: Sequence[tuple[Item, Delta | None]], weights: str) -> Sequence[ModelAnswer]:
            with self.engine.keeping_answers(kept_at(weights)):
                return answer_jobs(jobs)

        return ask

    # -- stock tasks under edits -------------------------------------------------------------------------------------

    @property
    def compares_unedited(self) -> bool:
        """Whether ordinary tasks get columns of the unedited model; they are evaluated again in :meth:`unedited`."""
        return self.options.compare_unedited

    def unedited(self) -> contextlib.AbstractContextManager[None]:
        """Scope in which ordinary requests are asked of the unedited model."""
        return self._unedited_stock.scope()

    def _answer_ordinary(
        self, requests: list[Instance], stock: Callable[..., list[Any]], disable_tqdm: bool
    ) -> list[Any]:
        if self._unedited_stock.is_asked:
            compute = functools.partial(stock, requests, disable_tqdm=disable_tqdm)
            return self._unedited_stock.answers(requests, compute, self._store, self._answering_parts, self.device.type)
        with self._stock_tasks():
            answers = stock(requests, disable_tqdm=disable_tqdm)
        self._ordinary.warn_of_broken(answers)
        return answers

    @property
    def _stays_outside_weights(self) -> bool:
        """Whether lm-eval's own tasks are asked under hooks or contexts, and so by this package's decoder."""
        if self._saved_edit is not None:
            return self._saved_edit.runtime_part is not None
        return self.plan.cumulative and self.editor.writes != ("weights",)

    @contextlib.contextmanager
    def _stock_tasks(self) -> Iterator[None]:
        """Scope in which the parent class answers ordinary documents under the edits."""
        with (
            undone(lambda: setattr(self, "_stock_edit", None)),
            self.session.stock_task_scope() as runtime_part,
        ):
            self._stock_edit = runtime_part
            yield

    def _loglikelihood_tokens(
        self, requests: list[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """As in the parent class, except under hook and context edits.

        Those run in this package's engine, because hooks need the end of each prompt.
        """
        if self._stock_edit is None:
            stock = super()._loglikelihood_tokens
            pairs = stock(requests, disable_tqdm=disable_tqdm, override_bs=override_bs)
        else:
            jobs = [(self.items.tokenized_item(*request), self._stock_edit) for request in requests]
            answers = self.prompt_edits.answer(jobs, self.engine.score, self.items.stock_score_item)
            warn_of_shortened(answers, self.room, self.rank)
            pairs = [(answer.logprob, answer.is_greedy) for answer in answers]
        return counted_pairs(pairs, requests)

    def _stock_generate(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """As in the parent class; under hook and context edits in this package's decoder, by the same rules."""
        if self._stock_edit is None:
            stock = super().generate_until

            def generate(some: list[Instance]) -> list[str]:
                return stock(some, disable_tqdm=disable_tqdm or len(some) < len(requests))

            return watched_texts(unwrapped(self.model), requests, generate)
        items = stock_items(self.items, requests, unwrapped(self.model))
        answers = self._generate([(item, self._stock_edit) for item in items])
        warn_of_shortened(answers, self.room, self.rank)
        return [stock_text(self, item, answer) for item, answer in zip(items, answers, strict=True)]

    # -- questions of editing documents ------------------------------------------------------------------------------

    def _score(self, jobs: Sequence[states.Job]) -> list[ModelAnswer]:
        return states.answer_by_kind(jobs, self._score_texts, self.engine.compare_states)

    def _score_texts(self, jobs: Sequence[tuple[ScoreItem, Delta | None]]) -> list[ScoredContinuation]:
        return self.prompt_edits.answer(jobs, lambda prepared: score_parts(prepared, self.engine.score))

    def _generate(self, jobs: Sequence[tuple[GenerateItem, Delta | None]]) -> list[GeneratedText]:
        return self.prompt_edits.generate(jobs, self.engine.generate)

    # -- the run's edits ---------------------------------------------------------------------------------------------

    @property
    def session(self) -> Session:
        """The run's edits; created at the first question, after the weights are loaded."""
        if self._session is None:
            run = RunParts(self.model, self.tokenizer, self.editor, self._store, self.identity, self.quiet)
            self._session = session_of(run, self.options, self.plan, self._saved_edit, shared=self.world_size > 1)
        return self._session

    def _find_unusable(self, requests: Sequence[EditRequest], fail_if_all: bool = True) -> dict[str, str]:
        """Request key -> reason for the requests that the editor cannot use, with a warning; needs no weights.

        Raises:
            NoUsableRequestError: with ``fail_if_all``, if no edit is usable.
        """
        unusable = self.editor.find_unusable(self.tokenizer, requests, position_limit(self.config))
        if fail_if_all and unusable and len(unusable) == len(requests):
            first = next(iter(unusable.values()))
            raise NoUsableRequestError(f"no edit of this run ({len(requests)}) can be used; the first: {first}")
        if self.rank == 0:
            warn_of_unusable("edits", unusable, len(requests))
        return unusable

    def _new_editor(self) -> Editor[Any]:
        """Create the editor of this run; ``icl`` adds an editor of contexts."""
        options = self.options
        editor = load_editor(options.editor, options.overrides)
        if options.icl == "no":
            return editor
        return EditorWithContext(editor, load_editor(*options.context_editor))

    @functools.cached_property
    def _store(self) -> Store | None:
        return None if self.options.store == "off" else Store(self.options.store)

    @functools.cached_property
    def _answer_store(self) -> AnswerStore:
        return AnswerStore(self._store, self.options.engine, self.options.answer)

    @property
    def identity(self) -> ModelIdentity:
        """Identity of the model and its tokenizer, as they were when the last requests came in."""
        return self._identity or self._identify()

    @property
    def _answering_parts(self) -> dict[str, Any]:
        return answering_parts(self.identity, unwrapped(self.model))

    def _identify(self) -> ModelIdentity:
        """Identify the model before it answers requests; the edits of this run do not apply to a changed model."""
        identity = model_identity(self.model, self.tokenizer)
        if self._identity not in (None, identity):
            log.warning("the model or its tokenizer was changed after it answered: its edits are made again.")
            self.editor = self._new_editor()
            self._session = None
        if self._store and self._identity != identity:
            record_model(self._store, identity)
        self._identity = identity
        return identity

    def stream_state(self) -> str | None:
        return self._session.final_state if self._session is not None else None

    # -- results -------------------------------------------------------------------------------------------------------

    def get_model_info(self) -> dict[str, Any]:
        """Return lm-eval's model information and the facts behind an editing result."""
        self.load()
        editing = {
            **recorded_options(self.options),
            **recorded_model(self),
            **absolute_places(self.session.result_metadata()),
            **self._examples.to_json(),
            "editor": self.session.editor_name,
            "editor_writes": list(self.session.writes),
            "settings_origin": self._origin and self._origin.to_json(),
            "edits_data": self.edits_data,
            "edits_digest": self._edits_digest,
            "edits_source": dict(self.plan.origin),
            "demo": self.is_demo,
            "about_checkpoint": about_edits_in(self.pretrained, self.options.mode),
            "num_processes": self.world_size,
            "device": describe_devices(unwrapped(self.model)),
            "model_identity": within_64_bits({"key": self.identity.key, **self._answering_parts}),
            "code_fingerprint": code_fingerprint(__name__, *self.editor.source_modules),
            "versions": installed_versions(),
        }
        if self.compares_unedited:
            self._unedited_stock.warn_if_unused()
        return {**super().get_model_info(), "edited_hf": editing}

    @property
    def edits_data(self) -> str | None:
        """Data of the benchmark that a batch or stream takes its edits from; ``None`` without one.

        The records of the tasks can come from elsewhere (``--metadata``); each task's metadata names their source.
        """
        if self.options.edits is None or names_file(self.options.edits):
            return None
        sets = ", ".join(f"{name}={value}" for name, value in self._sets.items())
        return self.options.data or sets or ("mini" if self.is_demo else "hub")
