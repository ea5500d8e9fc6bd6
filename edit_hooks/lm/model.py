"""`edited_hf`: the harness's Hugging Face model class, answering each document's requests under that document's edits.

Documents of editing tasks carry ``edit_requests``; their requests are answered here, with token-level detail. All other
requests go to the parent class on the untouched model. Weights are loaded when the first question is asked, so every
mistake in options, tasks and data shows before that.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import transformers
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from tqdm import tqdm

from edit_hooks.assets.demo_model import DEMO_NAME, demo_model_path
from edit_hooks.base.editor import Editor
from edit_hooks.base.registry import load_editor
from edit_hooks.deltas.delta import Delta
from edit_hooks.deltas.saved import editor_of, load_edit, requests_of
from edit_hooks.in_context.combined import EditorWithContext
from edit_hooks.inference.decoding import generate
from edit_hooks.inference.items import GenerateItem, Limits, ScoreItem
from edit_hooks.inference.reference import generate_reference, score_reference
from edit_hooks.inference.scoring import score
from edit_hooks.lm.data_parallel import DataParallelMixin, start_processes
from edit_hooks.lm.edit_sources import load_edits
from edit_hooks.lm.independent import IndependentEdits
from edit_hooks.lm.options import EditingOptions, check_known_options
from edit_hooks.lm.plan import EditPlan, chunked
from edit_hooks.lm.prompt_edits import Built, PromptEditAdapter
from edit_hooks.lm.sessions import (
    Question,
    SavedEditSession,
    Session,
    SingleEditSession,
    StreamSession,
    UneditedSession,
    ask_once,
)
from edit_hooks.lm.stream import EditStream, Guard
from edit_hooks.modeling.architectures import architecture_of
from edit_hooks.modeling.fingerprint import model_fingerprint
from edit_hooks.request import EditRequest, require_subjects
from edit_hooks.store.answer_cache import AnswerStore, tokenizer_fingerprint
from edit_hooks.store.store import Store
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.hashing import code_fingerprint

log = logging.getLogger("lm_eval.edited_hf")  # the harness sets the verbosity of its own loggers only


OWN_OPTIONS = tuple(field.name for field in dataclasses.fields(EditingOptions))


GREEDY_ONLY = {"until", "max_gen_toks", "do_sample", "temperature"}


class EditedHFLM(DataParallelMixin, PromptEditAdapter, HFLM):
    """The harness's Hugging Face class with an editor.

    Every option of ``--model hf`` works; our own are the fields of
    :class:`~edit_hooks.lm.options.EditingOptions`. Without ``pretrained`` the embedded demo model is used.
    """

    def __init__(self, pretrained: Any = None, **kwargs: Any) -> None:
        check_known_options(kwargs, HFLM, OWN_OPTIONS)
        own = {name: kwargs.pop(name) for name in OWN_OPTIONS if name in kwargs}
        if kwargs.get("device") is None:  # the parent's default is a GPU, also where there is none
            kwargs["device"] = "cuda" if torch.cuda.is_available() else "cpu"
        self.options = EditingOptions(**own)
        self.editor = self._new_editor()
        self.is_demo = pretrained is None
        if self.is_demo:
            pretrained = str(demo_model_path(_demo_dtype(kwargs.get("dtype"))))
        start_processes(tensor_parallel=kwargs.get("tp_plan") is not None)
        self._load_arguments: dict[str, Any] | None = None
        self._in_constructor = True
        self._session: Session | None = None
        self.plan = self._new_plan()
        try:
            super().__init__(pretrained=pretrained, **kwargs)
        finally:
            self._in_constructor = False
        self._join_processes()
        if self.backend != "causal":
            raise EditingError("edited_hf edits decoder-only models; this one is an encoder-decoder model.")
        if self.options.mode not in ("none", "loaded") and self.editor.writes != ("context",):
            architecture_of(self.config)
        self._banner(pretrained)

    # -- loading late ------------------------------------------------------------------------------------------------

    def _create_model(self, *args: Any, **kwargs: Any) -> None:
        """Remember how to load instead of loading: tasks and their data are checked by the harness after this."""
        self._load_arguments = {"args": args, "kwargs": kwargs}
        self._model = None

    @property
    def model(self) -> Any:
        """The model; the first use after the constructor loads the weights."""
        if self._model is None and self._in_constructor:
            return _NotLoaded()
        if self._model is None and self._load_arguments is not None:
            arguments, self._load_arguments = self._load_arguments, None
            super()._create_model(*arguments["args"], **arguments["kwargs"])
            inner = super().model
            inner.eval()
            inner.tie_weights()
            if not hasattr(inner, "hf_device_map"):
                inner.to(self.device)
            _refuse_offloaded(inner)
        return super().model

    @property
    def max_length(self) -> int:
        """As in the parent class, from the config, so that it needs no weights."""
        if self._max_length:
            return self._max_length
        from lm_eval.models.utils import resolve_max_length

        return resolve_max_length(self.config, self.tokenizer, default=self._DEFAULT_MAX_LENGTH)

    # -- the harness's requests --------------------------------------------------------------------------------------

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Any]:
        """Stock pairs for ordinary documents; mappings with token detail for documents with edit requests."""
        return self._dispatch(requests, super().loglikelihood, self._score, disable_tqdm)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Any]:
        """Stock texts for ordinary documents; mappings with raw text and token ids for documents with edit requests."""
        return self._dispatch(requests, self._stock_generate, self._generate, disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Perplexities: on the untouched model, in batch and sequential mode on the edited one."""
        with self._answering_stock():
            return super().loglikelihood_rolling(requests, disable_tqdm)

    def _dispatch(self, requests: list[Instance], stock: Any, own: Any, disable_tqdm: bool) -> list[Any]:
        self.model  # noqa: B018  # loads
        mine = [index for index, request in enumerate(requests) if _is_editing(request)]
        others = [index for index, request in enumerate(requests) if not _is_editing(request)]
        answers: list[Any] = [None] * len(requests)
        if others:
            with self._answering_stock():
                plain = stock([requests[index] for index in others], disable_tqdm=disable_tqdm)
            for index, answer in zip(others, plain, strict=True):
                answers[index] = answer
        if mine:
            for index, answer in zip(mine, self._under_edits([requests[i] for i in mine], own), strict=True):
                answers[index] = answer
        return answers

    def _under_edits(self, requests: list[Instance], ask: Any) -> list[dict[str, Any]]:
        asked = [
            Question(
                item=self._item(request),
                requests=tuple(
                    EditRequest.from_dict(record, where=str(request.task_name))
                    for record in request.doc["edit_requests"]
                ),
                ask_unedited=bool(request.doc.get("ask_unedited")),
            )
            for request in requests
        ]
        no_edits = self.options.mode == "none"
        wanted = [question.item for question in asked if question.ask_unedited or no_edits]
        unedited = self._unedited(wanted, ask)  # before any editor code runs
        return self.session.answer(asked, unedited, ask)

    def _unedited(self, items: Sequence[Any], ask: Any) -> dict[Any, dict[str, Any]]:
        """Answers of the untouched model, from the store where it has them."""

        def ask_plain(missing: Sequence[Any]) -> list[dict[str, Any]]:
            return ask([(item, None) for item in missing])

        store = self._store
        if store is None:
            return ask_once(items, ask_plain)
        identity = {
            "model": self._model_fingerprint,
            "tokenizer": tokenizer_fingerprint(self.tokenizer),
            "engine": self.options.engine,
            "device": str(self.device),
            "attention": getattr(self.model.config, "_attn_implementation", None),
            "torch": torch.__version__,
        }
        return AnswerStore(store.root, identity).ask(items, ask_plain)

    @functools.cached_property
    def _store(self) -> Store | None:
        return None if self.options.store == "off" else Store(self.options.store)

    @functools.cached_property
    def _model_fingerprint(self) -> str:
        """Taken at the first question, on the untouched weights."""
        return model_fingerprint(self.model)

    @property
    def session(self) -> Session:
        """How this run edits; made at the first question, when the weights are there."""
        if self._session is None:
            self._session = self._new_session()
        return self._session

    def _new_session(self) -> Session:
        options = self.options
        if options.mode == "none":
            return UneditedSession()
        if options.load_edit:
            return self._loaded(options.load_edit)
        store = self._store
        if store:
            store.remove_leftovers()
        arguments = (self.model, self.tokenizer, self.editor)
        if not self.plan.cumulative:
            return SingleEditSession(IndependentEdits(*arguments, store, self._quiet), self.plan)
        guard = Guard(options.guard, options.guard_norm_ratio, options.guard_loss_increase)
        stream = EditStream(*arguments, self.plan, store, guard, self._quiet, shared=self.world_size > 1)
        return StreamSession(stream, options.immediate and options.mode == "sequential", options.retention)

    def _new_plan(self) -> EditPlan:
        """The edits of batch and sequential runs, read and checked before any weight is loaded."""
        options = self.options
        if options.edits is None:
            return EditPlan()
        settings = {"data": options.data} if options.data else {"pretrained": None if self.is_demo else True}
        requests = load_edits(options.edits, settings, options.num_edits)
        if self.editor.needs_subject:
            require_subjects(requests, self.editor.name)
        size = options.group_size or options.edit_batch_size or (len(requests) if options.mode == "batch" else 1)
        if size > 1 and not options.group_size and not self.editor.supports_joint:
            raise EditingError(
                f"editor {options.editor!r} writes one request at a time, steps of {size} edits are asked for; use "
                "mode=sequential,edit_batch_size=1 or an editor that writes batches."
            )
        return EditPlan(chunked(requests, size), not options.group_size, options.checkpoints)

    def _new_editor(self) -> Editor:
        """The editor of this run, with ``icl`` together with the one that makes contexts."""
        options = self.options
        editor = load_editor(options.editor, options.overrides)
        if options.icl == "no":
            return editor
        return EditorWithContext(editor, load_editor(*options.context_editor))

    def _loaded(self, path: str) -> SavedEditSession:
        delta = load_edit(path, self.model, self._model_fingerprint)
        report = {"editor": editor_of(delta), "loaded_from": path, "checksum": delta.checksum()}
        return SavedEditSession(self.model, delta, report, requests_of(delta))

    def _stream_state(self) -> str | None:
        """Fingerprint of the stream's final weights, if this rank has made the stream; all ranks must agree."""
        return self._session.stream.final_state if isinstance(self._session, StreamSession) else None

    @property
    def _quiet(self) -> bool:
        return self.rank != 0 or not log.isEnabledFor(logging.INFO)

    # -- one question ------------------------------------------------------------------------------------------------

    def _item(self, request: Instance) -> ScoreItem | GenerateItem:
        if request.request_type == "loglikelihood":
            return self._score_item(*request.args).item
        return self._generate_item(*request.args)

    def _score_item(self, context: str, continuation: str) -> Built[ScoreItem]:
        """Token ids by the harness's own rule; too long contexts lose their beginning, as in the harness."""
        if context == "":
            ids = [self.prefix_token_id]
            target = self.tok_encode(continuation, add_special_tokens=False)
        else:
            ids, target = self._encode_pair(context, continuation)
        if not target:
            raise EditingError(f"continuation {continuation!r} has no token of its own after {context!r}.")
        room = self.max_length + 1 - len(target)
        if room < 1:
            raise EditingError(f"continuation of {len(target)} tokens does not fit into {self.max_length} positions.")
        return Built(ScoreItem(tuple(ids[-room:]), tuple(target), (context, continuation)), cut=len(ids) > room)

    def _generate_item(self, context: str, gen_kwargs: Mapping[str, Any]) -> GenerateItem:
        settings = normalize_gen_kwargs(dict(gen_kwargs), self.max_gen_toks)
        sampling = settings.get("do_sample") or settings.get("temperature", 0.0) not in (0, 0.0)
        if sampling or (other := set(settings) - GREEDY_ONLY):
            what = "sampling" if sampling else ", ".join(sorted(other))
            raise EditingError(f"editing benchmarks decode greedily; generation_kwargs ask for {what}.")
        end = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        stops = handle_stop_sequences(settings.get("until"), eos=end)
        stops = tuple(stop for stop in stops if stop and stop != end)
        return self._greedy_item(context, stops, int(settings["max_gen_toks"])).item

    def _greedy_item(self, context: str, stops: tuple[str, ...], max_new_tokens: int) -> Built[GenerateItem]:
        """Token ids of a prompt; too long ones lose their beginning, as in the harness."""
        room = self.max_length - max_new_tokens
        if room < 1:
            raise EditingError(f"max_gen_toks={max_new_tokens} leaves no room in {self.max_length} positions.")
        ids = self.tok_encode(context) or [self.prefix_token_id]
        return Built(GenerateItem(tuple(ids[-room:]), stops, max_new_tokens, context), cut=len(ids) > room)

    # -- asking ------------------------------------------------------------------------------------------------------

    def _score(self, jobs: Sequence[tuple[ScoreItem, Delta | None]]) -> list[dict[str, Any]]:
        return self._told(jobs, self._score_told)

    def _generate(self, jobs: Sequence[tuple[GenerateItem, Delta | None]]) -> list[dict[str, Any]]:
        return self._told(jobs, self._generate_told)

    def _score_told(self, jobs: Sequence[tuple[ScoreItem, Delta | None]]) -> list[dict[str, Any]]:
        with tqdm(total=len(jobs), desc="Scoring under edits", unit="prompt", disable=self._quiet) as bar:
            if self.options.engine == "reference":
                return score_reference(self.model, jobs, bar.update)
            return score(self.model, self._as_asked(jobs), self._limits(), bar.update)

    def _generate_told(self, jobs: Sequence[tuple[GenerateItem, Delta | None]]) -> list[dict[str, Any]]:
        with tqdm(total=len(jobs), desc="Decoding under edits", unit="prompt", disable=self._quiet) as bar:
            if self.options.engine == "reference":
                return generate_reference(self.model, self.tokenizer, jobs, bar.update)
            return generate(self.model, self.tokenizer, self._as_asked(jobs), self._limits(), bar.update)

    def _as_asked(self, jobs: Sequence[tuple[Any, Delta | None]]) -> list[tuple[Any, Delta | None]]:
        """With ``answer=patch`` low-rank edits are turned into dense ones, which are written into the weights."""
        if self.options.answer != "patch":
            return list(jobs)
        dense: dict[int, Delta] = {}
        for _, delta in jobs:
            if delta is not None and id(delta) not in dense:
                dense[id(delta)] = Delta(dense=delta.weights(), hook_edit=delta.hook_edit)
        return [(item, None if delta is None else dense[id(delta)]) for item, delta in jobs]

    def _limits(self) -> Limits:
        """The harness's batch size, when it is a number above its default of one, bounds the rows of a batch."""
        size = self.batch_size_per_gpu
        rows = size if isinstance(size, int) and size > 1 else Limits.max_rows
        return Limits(max_tokens=self.options.max_batch_tokens, max_rows=rows)

    # -- caches and stamps -------------------------------------------------------------------------------------------

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Refuse ``--use_cache``: the harness keys answers by the prompt alone, blind to edits and models."""
        database = getattr(cache_hook, "dbdict", None)
        if database is not None:
            path, is_new = Path(database.filename), len(database) == 0
            database.close()
            if is_new:
                path.unlink(missing_ok=True)
            raise EditingError(
                "--use_cache stores answers under the prompt alone and would serve one edit's answer to another. "
                "Leave it out: edited_hf keeps finished edits in its own store (model_args store=<folder>)."
            )
        super().set_cache_hook(cache_hook)

    def get_model_info(self) -> dict[str, Any]:
        """The harness's model information plus everything that makes an editing result reproducible."""
        self.model  # noqa: B018  # loads
        options = {name: value for name, value in dataclasses.asdict(self.options).items() if name != "editor_args"}
        stamp = {
            **options,
            **self.session.stamp(),
            "editor": self._editor_name,
            "editor_writes": self._editor_writes,
            "data": self.data,
            "demo": self.is_demo,
            "num_processes": self.world_size,
            "model_fingerprint": self._model_fingerprint,
            "code_fingerprint": code_fingerprint(),
            "versions": _versions(),
        }
        return {**super().get_model_info(), "edited_hf": stamp}

    @property
    def data(self) -> str:
        """The data the tasks use unless ``--metadata`` says otherwise: the sample sets in demo mode, else the hub."""
        return self.options.data or ("mini" if self.is_demo else "hub")

    @property
    def _editor_name(self) -> str | None:
        """Who made the edits; ``None`` for the unedited model and for saved edits that do not say."""
        if isinstance(self._session, SavedEditSession):
            return self._session.report["editor"]
        return None if self.options.mode in ("none", "loaded") else self.editor.name

    @property
    def _editor_writes(self) -> list[str]:
        """What the edits of this run change: weights, hooks, context; context editors are not compared with others."""
        if isinstance(self._session, SavedEditSession):
            return self._session.delta.writes
        return [] if self.options.mode in ("none", "loaded") else list(self.editor.writes)

    def _banner(self, pretrained: Any) -> None:
        edits = {"none": "no editing", "loaded": f"saved edit {self.options.load_edit}"}.get(
            self.options.mode, f"editor {self.editor.name}"
        )
        name = DEMO_NAME if self.is_demo else getattr(pretrained, "name_or_path", pretrained)
        lines = [f"edited_hf: {name}; {edits}; mode {self.options.mode}; data {self.data}."]
        if self.is_demo:
            lines.append(
                "Demo: no pretrained=... given, so the embedded model and the embedded sample data (data=mini) are "
                "used. Numbers are for trying things out, not for comparing with published tables."
            )
        if self.rank == 0:
            for line in lines:
                log.warning(line) if self.is_demo else log.info(line)


class _NotLoaded:
    """Stands for the model inside the parent's constructor, which only moves it to a device."""

    def to(self, *_args: Any, **_kwargs: Any) -> _NotLoaded:
        return self


def _refuse_offloaded(model: Any) -> None:
    """Weights that a device map put on disk or into CPU memory come and go with each forward pass: no editing those."""
    offloaded = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if offloaded:
        raise EditingError(
            f"{len(offloaded)} weights do not fit the devices and were offloaded ({offloaded[0]}, ...), but edits need "
            "them in place. Allow more memory (max_memory_per_gpu=, without a GPU max_cpu_memory=), use more devices "
            "or a smaller dtype, or drop parallelize=True."
        )


def _is_editing(request: Instance) -> bool:
    return isinstance(request.doc, Mapping) and "edit_requests" in request.doc


def _demo_dtype(dtype: Any) -> Any:
    """The demo model is kept in float32 or bfloat16."""
    name = str(dtype or "float32").removeprefix("torch.")
    name = {"auto": "float32", "bf16": "bfloat16", "fp32": "float32"}.get(name, name)
    if name not in ("float32", "bfloat16"):
        raise EditingError(f"dtype={dtype} is not offered for the demo model; accepted: float32, bfloat16.")
    return name


def _versions() -> dict[str, str]:
    def installed(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return "not installed"

    return {
        "lm-eval-editing": installed("lm-eval-editing"),
        "lm-eval": installed("lm-eval"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
