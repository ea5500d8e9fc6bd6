"""lm-eval's Hugging Face model class with late loading, and its internals in use.

:data:`PRIVATE_MEMBERS` names everything beyond lm-eval's documented interface that this room overrides, reads or sets,
so that a test can name the member that a new release no longer has.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from lm_eval.api.model import CacheHook
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import resolve_max_length
from lm_eval.utils import simple_parse_args_string
from torch import nn
from transformers import PreTrainedModel

from edit_hooks.lm.loading.adapters import load_adapter, refuse_outer_adapters
from edit_hooks.lm.loading.checkpoint import CompleteLoading
from edit_hooks.lm.options.loading import check_model_options
from edit_hooks.lm.options.quantization import take_quantization
from edit_hooks.modeling.adapter_layers import has_adapter_layers
from edit_hooks.modeling.architectures import unwrapped
from edit_hooks.modeling.forward.positions import Room, has_position_table, num_positions
from edit_hooks.modeling.weights import keep_layout, refuse_compiled, refuse_offloaded
from edit_hooks.utils.errors import EditingError, first_line
from edit_hooks.utils.logs import get_logger

log = get_logger("lm_eval.edited_hf")
LmT = TypeVar("LmT", bound="LateLoadingHFLM")

# `module:object` -> member -> why it is needed; the owner of a function is its module
PRIVATE_MEMBERS: dict[str, dict[str, str]] = {
    "lm_eval.models.huggingface:HFLM": {
        "_DEFAULT_MAX_LENGTH": "read: the context length of models whose config has none",
        "AUTO_MODEL_CLASS": "set and called: complete checkpoints only; the model without weights",
        "_create_model": "overridden: weights are loaded at the first question",
        "_loglikelihood_tokens": "overridden: stock tasks under hook and context edits",
        "_max_length": "read: the context length set by the user",
        "_model": "set and read: the model, None before it is loaded",
        "_rank": "set: data parallelism over several machines and on CPUs",
        "_world_size": "set: as _rank",
        "accelerator": "read: index and number of processes",
        "all_gather": "overridden: ranks with whole models do not pad their requests",
        "backend": "read: encoder-decoder models are refused",
        "barrier": "overridden: ranks with whole models do not wait for each other",
        "batch_size_per_gpu": "read: bounds the rows of a batch",
        "config": "read: the model's config before its weights are loaded",
        "gather_object": "overridden: results are merged in document order",
        "get_model_info": "overridden: facts about the edits in result files",
        "max_gen_toks": "read: default length of generations",
        "max_length": "overridden: needs no weights",
        "model": "overridden: loads the weights",
        "prefix_token_id": "read: context of an empty prompt",
        "tok_decode": "read: text of the end token",
        "tok_encode": "read: token ids by lm-eval's rules",
    },
    "lm_eval.api.model:TemplateLM": {
        "_encode_pair": "read: the token boundary between context and continuation",
        "chat_template": "overridden: names of templates that would not be applied are refused",
    },
    "lm_eval.api.model:LM": {
        "create_from_arg_obj": "overridden: options of lm-eval's own among the model's",
        "create_from_arg_string": "overridden: as create_from_arg_obj",
        "set_cache_hook": "overridden: --use_cache is refused",
    },
    "lm_eval.api.model:CacheHook": {"dbdict": "read: the database that --use_cache has opened"},
    "lm_eval.models.utils": {
        "handle_stop_sequences": "called: stop strings as in lm-eval",
        "normalize_gen_kwargs": "called: generation settings as in lm-eval",
        "postprocess_generated_text": "called: texts of stock tasks as in lm-eval",
        "resolve_max_length": "called: context length as in lm-eval",
    },
}


class LateLoadingHFLM(HFLM):
    """`HFLM` that loads its weights at the first use of :attr:`model`.

    Mistakes in options, tasks and data therefore show before any weight is read.
    """

    AUTO_MODEL_CLASS: Any  # of transformers; set by the parent class

    @classmethod
    def create_from_arg_string(cls: type[LmT], arg_string: str, additional_config: dict[str, Any] | None = None) -> LmT:
        """As :meth:`create_from_arg_obj`, from ``name=value,name=value``."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(
        cls: type[LmT], arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> LmT:
        """Create the model from ``--model_args``.

        Args:
            additional_config: lm-eval's own options, as ``--device``, with their defaults. One that is also among
                the arguments (``device``, ``batch_size``) is left out; the parent class would get it twice.
        """
        own = {name: value for name, value in (additional_config or {}).items() if name not in arg_dict}
        return super().create_from_arg_obj(arg_dict, own)

    def __init__(self, pretrained: Any, **kwargs: Any) -> None:
        self._load_arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._in_constructor = True
        name = getattr(pretrained, "name_or_path", pretrained)
        check_model_options(pretrained, kwargs)
        try:
            with _as_user_error(f"pretrained={name} cannot be used with these options"):
                super().__init__(pretrained=pretrained, **kwargs)
        finally:
            self._in_constructor = False
        if self._model is not None:  # given as an object
            _prepare(self._model)
        self._check_max_length()

    def _check_max_length(self) -> None:
        """Refuse a ``max_length`` beyond a table of positions, which ends in an error within a pass.

        Raises:
            EditingError: as described; before weights are loaded.
        """
        positions = num_positions(self.config)
        if positions is None or self.max_length <= positions:
            return
        if has_position_table(self.outline):
            raise EditingError(
                f"max_length={self.max_length}, but the model has a table of {positions} positions. Use at most "
                f"max_length={positions}, its default."
            )
        if self.rank == 0:
            log.warning(
                "max_length=%d is beyond the %d positions of the model's config, for which it was trained; answers to "
                "longer prompts may be of no use.",
                self.max_length,
                positions,
            )

    @property
    def room(self) -> Room:
        """The tokens of a prompt and its answer."""
        positions = num_positions(self.config)
        return Room(self.max_length, is_full=positions is not None and self.max_length >= positions)

    @property
    def quiet(self) -> bool:
        """Whether progress bars are hidden: on all ranks but the first, and above log level INFO."""
        return self.rank != 0 or not log.isEnabledFor(logging.INFO)

    def _create_model(self, *args: Any, **kwargs: Any) -> None:
        """Store the arguments; :attr:`model` loads."""
        kwargs["quantization_config"] = take_quantization(kwargs)
        if kwargs.get("delta") and kwargs.get("peft"):
            raise EditingError("peft= and delta= cannot be combined; add the delta to the model and save it first.")
        if kwargs.get("delta") and getattr(self.config.get_text_config(), "tie_word_embeddings", False):
            raise EditingError(
                "delta= on a model whose embedding and head are tied: lm-eval would add the difference twice. Add it "
                "to the model, save that, and name it in pretrained=."
            )
        self._load_arguments = (args, kwargs)
        self._model = None

    @property
    def model(self) -> PreTrainedModel:
        """The model; the first use after the constructor loads the weights."""
        if self._in_constructor:  # the parent's would tie weights that an adapter has replaced
            return _NotLoaded()
        if self._model is None and self._load_arguments is not None:
            args, kwargs = self._load_arguments
            try:
                self._load(*args, **kwargs)
            except BaseException:
                self._model = None  # a refused model must not be there at the next use
                raise
            self._load_arguments = None
        return super().model

    def _load(self, *args: Any, **kwargs: Any) -> None:
        """Load as the parent class does, and refuse incomplete checkpoints and adapters."""
        model_class = self.AUTO_MODEL_CLASS
        peft = kwargs.get("peft")
        self.AUTO_MODEL_CLASS = CompleteLoading(model_class, may_be_kept=not peft and not kwargs.get("delta"))
        try:
            with _as_user_error(f"the weights of pretrained={self.pretrained} cannot be loaded"):
                super()._create_model(*args, **{**kwargs, "peft": None})
        finally:
            self.AUTO_MODEL_CLASS = model_class
        _prepare(super().model)
        if peft:
            with _as_user_error(f"peft={peft} cannot be put into pretrained={self.pretrained}"):
                self._model = load_adapter(super().model, peft, kwargs.get("revision"), len(self.tokenizer)).eval()
        inner = super().model
        # Quantized weights are placed while they are quantized.
        if not hasattr(inner, "hf_device_map") and kwargs.get("quantization_config") is None:
            inner.to(self.device)
        refuse_offloaded(inner)
        self.check_loaded(inner)

    @property
    def outline(self) -> PreTrainedModel:
        """The model without its weights, on the meta device: modules, names and shapes for early checks.

        The model itself once it is loaded.
        """
        if self._load_arguments is None:
            return self.model
        arguments = self._load_arguments[1]
        kept = {name: arguments[name] for name in ("trust_remote_code", "attn_implementation") if name in arguments}
        with torch.device("meta"), _as_user_error(f"pretrained={self.pretrained} cannot be used with these options"):
            return self.AUTO_MODEL_CLASS.from_config(copy.deepcopy(self.config), **kept)

    def check_loaded(self, model: nn.Module) -> None:
        """Check a model right after loading, before anything runs on it."""
        refuse_compiled(model)
        keep_layout(model)
        refuse_outer_adapters(model)

    def load(self) -> None:
        """Load the weights unless they are loaded."""
        self.model  # noqa: B018  # the property loads

    @property
    def max_length(self) -> int:
        """Context length, as in the parent class, but from the config alone."""
        return self._max_length or resolve_max_length(self.config, self.tokenizer, default=self._DEFAULT_MAX_LENGTH)

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Token ids of a context and its continuation, encoded together."""
        return self._encode_pair(context, continuation)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Format a chat as in the parent class; a tokenizer without a template is refused."""
        if self.tokenizer.chat_template is None:
            raise EditingError(
                "this model's tokenizer has no chat template; drop --apply_chat_template or name an instruction-tuned "
                "model."
            )
        return super().apply_chat_template(chat_history, add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template that is applied, as in the parent class.

        Raises:
            EditingError: for the name of another than the default: lm-eval's classes record it and apply the default.
        """
        named = self.tokenizer.chat_template
        if isinstance(chat_template, str) and isinstance(named, dict) and chat_template != "default":
            raise EditingError(
                f"--apply_chat_template {chat_template}: the tokenizer's template 'default' is applied whatever the "
                "name. Leave the name out, or name a tokenizer (tokenizer=<folder>) that has this template alone."
            )
        template: str | None = super().chat_template(chat_template)
        return template

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Refuse ``--use_cache``, whose keys contain the prompt but not the edits."""
        database = cache_hook.dbdict
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


@contextlib.contextmanager
def _as_user_error(failure: str) -> Iterator[None]:
    """Turn errors of lm-eval, transformers and the hub client into one sentence about what the user asked for."""
    try:
        yield
    except EditingError:
        raise
    except torch.OutOfMemoryError as error:
        raise EditingError(f"{failure}: {first_line(error)} Use a smaller dtype or more devices.") from error
    except Exception as error:  # each library has its own types
        raise EditingError(f"{failure}: {first_line(error)} (LM_EDIT_DEBUG=1 shows where).") from error


def _prepare(model: PreTrainedModel) -> None:
    """Do to a model what the parent's constructor does to one that it loads."""
    model.eval()
    if not has_adapter_layers(unwrapped(model)):  # they may have taken the place of a tied weight
        model.tie_weights()


class _NotLoaded:
    """Placeholder inside the parent's constructor, which moves the model to a device."""

    def to(self, *_args: object, **_kwargs: object) -> _NotLoaded:
        return self
