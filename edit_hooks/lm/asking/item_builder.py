"""Questions as token ids.

Special tokens, truncation and stop strings follow lm-eval's rules. The targets of editing documents are split off at
the end of the prompt, because their metrics count tokens: lm-eval moves white space at the end of the prompt, such as
the line break of a chat template, into the target. Stock tasks keep lm-eval's tokens.

As in lm-eval, a stop string may be a special token (``<|im_end|>``): it is looked for in the text with special tokens.
The answer is the text without them, cut before the first stop string that is left in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, NamedTuple, TypeVar, get_args

from lm_eval.api.instance import Instance
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

from edit_hooks.decoding import Decoding, TokenPrompts
from edit_hooks.inference.items import GenerateItem, Item, ScoreItem, StateItem, TokenContexts, TokenNoise
from edit_hooks.lm.asking.chats import Chats
from edit_hooks.lm.loading.hflm import LateLoadingHFLM
from edit_hooks.modeling.architectures import num_layers
from edit_hooks.modeling.forward.embedding_noise import drift_positions, embedding_std
from edit_hooks.modeling.tokens import encode, split_continuation, tokens_in_span
from edit_hooks.request import require_text
from edit_hooks.state_reading import StateReading
from edit_hooks.utils.errors import EditingError, UnusableRequestError
from edit_hooks.utils.settings.options import check_generation_kwargs

GREEDY_ONLY = {"until", "max_gen_toks", "do_sample", "temperature"}
EDITING = "editing benchmarks decode greedily"
STOCK = (
    "under edits outside the weights (hooks, contexts) lm-eval's own tasks are decoded greedily. Set --gen_kwargs "
    "do_sample=false,temperature=0, or use an editor that changes weights"
)

ItemT = TypeVar("ItemT", ScoreItem, GenerateItem)


class BuiltItem(NamedTuple, Generic[ItemT]):
    """An item, and the number of tokens that its prompt lost at the beginning to fit."""

    item: ItemT
    num_cut: int

    @property
    def cut(self) -> bool:
        """Whether the prompt lost its beginning."""
        return self.num_cut > 0


class ItemBuilder:
    """Builds items with the tokenizer and the limits of an lm-eval model.

    Args:
        chats: the prompts that the model's chat template made.
        max_thought_tokens: longest thought of an answer, in addition to the answer; ``None``: they share a length.
    """

    def __init__(self, lm: LateLoadingHFLM, chats: Chats, max_thought_tokens: int | None = None) -> None:
        self._lm, self._chats = lm, chats
        self._embedding_std: float | None = None  # of the model before any edit
        self._max_thought_tokens = max_thought_tokens

    def check_special_tokens(self) -> None:
        """Refuse an ``add_bos_token`` that the tokenizer does not follow, so that edits would ignore it.

        Also a budget for thoughts whose end is unknown.
        """
        lm = self._lm
        if self._max_thought_tokens is not None and lm.think_end_token is None:
            raise EditingError(
                "max_thought_tokens bounds the thought before think_end_token; give think_end_token as well."
            )
        if lm.add_bos_token is None or not lm.tokenizer.is_fast:
            return
        if encode(lm.tokenizer, "A").ids != encode(lm.tokenizer, "A", lm.add_bos_token).ids:
            raise EditingError(
                f"add_bos_token={lm.add_bos_token}: this tokenizer does not follow it, so edits and questions would "
                "begin differently; drop it, or give a tokenizer that is saved with the setting."
            )

    def from_instance(self, request: Instance) -> tuple[Item, int]:
        """Build the item of an lm-eval request; the second entry is the number of tokens that its prompt lost to fit.

        Raises:
            UnusableRequestError: for continuations without a token, texts without room, and half surrogate pairs.
            EditingError: for generation settings out of range, and sampling.
        """
        if request.request_type == "loglikelihood":
            context, continuation = request.args
            if reading := request.doc.get("asked", {}).get("states"):
                return self.state_item(context, StateReading.from_json(reading)), 0
            if rule := request.doc.get("asked", {}).get("token_prompts"):
                return self.token_prompt_item(context, continuation, rule)
            return self.score_item(context, continuation)
        decoding = request.doc.get("asked", {}).get("decoding")
        if decoding is None:
            return self.generate_item(*request.args)
        context, gen_kwargs = request.args
        return self.decoded_item(context, gen_kwargs, Decoding.from_json(decoding))

    def score_item(self, context: str, continuation: str) -> BuiltItem[ScoreItem]:
        """Build an item for scoring a target; its tokens are those past the end of the context."""
        lm = self._lm
        require_text(context + continuation)
        if context == "":
            ids, target = [lm.prefix_token_id], lm.tok_encode(continuation, add_special_tokens=False)
        else:
            ids, target = split_continuation(lm.tokenizer, context, continuation, lm.add_bos_token)
        return self._fitted(ids, target, (context, continuation))

    def state_item(self, context: str, reading: StateReading) -> StateItem:
        """Build an item for a hidden state.

        Noise on subject or relation acts on the tokens of the prompt in its context, noise on all tokens on those of
        the context, too. A relative sigma is in units of the embeddings of the model as it is at the first such item,
        which is before any edit: an edit of the embeddings must not change the noise.
        """
        lm = self._lm
        require_text(context)
        if isinstance(reading.state, int) and reading.state >= (count := num_layers(lm.config)):
            raise EditingError(f"a question reads block {reading.state}, but the model has blocks 0 to {count - 1}.")
        encoding = encode(lm.tokenizer, context, lm.add_bos_token)
        ids = tuple(encoding.ids or [lm.prefix_token_id])
        if len(ids) > lm.max_length:
            raise UnusableRequestError(f"prompt of {len(ids)} tokens does not fit into {lm.max_length} positions.")
        if (noise := reading.noise) is None:
            return StateItem(ids, reading.state)
        start = context.rfind(reading.prompt)
        if start < 0:
            raise UnusableRequestError(f"prompt {reading.prompt!r} is not part of the text that the model reads.")
        span = start + noise.subject_span[0], start + noise.subject_span[1]
        positions = tuple(drift_positions(encoding, span)[noise.drift])
        if noise.drift == "relation":  # without the words and special tokens of a chat template
            in_prompt = tokens_in_span(encoding, (start, start + len(reading.prompt)))
            positions = tuple(sorted({*positions}.intersection(in_prompt)))
        if not positions:
            raise UnusableRequestError(f"prompt {reading.prompt!r} has no token of the {noise.drift} to perturb.")
        sigma = noise.sigma
        if noise.relative:
            if self._embedding_std is None:
                self._embedding_std = embedding_std(lm.model)
            sigma *= self._embedding_std
        return StateItem(ids, reading.state, TokenNoise(positions, sigma, noise.seed))

    def token_prompt_item(self, context: str, continuation: str, rule: TokenPrompts) -> BuiltItem[ScoreItem]:
        """Build an item in which every target token has a prompt of its own, as in MEMIT's evaluation of ZsRE.

        The target is tokenized without the prompt. The prompt of a token is the context and the decoded tokens before
        it, tokenized together. The wanted id is the first one of the token's own text, tokenized alone: another id than
        the token's where a character has several tokens. A token without any text counts as the end of text, the
        padding of the release's batches.

        The release knows targets after a space. By itself, a target without one can begin with other tokens than after
        its prompt (the mark of a text's start, as ``▁`` of Llama 2), so it has the tokens of the whole text.
        """
        lm = self._lm
        if rule not in get_args(TokenPrompts):
            accepted = ", ".join(get_args(TokenPrompts))
            raise EditingError(f"a document asks for token_prompts={rule!r}; {accepted} are accepted.")
        require_text(context + continuation)
        space = continuation[: len(continuation) - len(continuation.lstrip())]
        if not space:
            return self._glued_token_prompts(context, continuation, rule)
        target = lm.tok_encode(continuation, add_special_tokens=False)
        if not target:
            raise UnusableRequestError(f"continuation {continuation!r} has no token.")
        contexts, wanted, num_cut = [], [], 0
        for number, token in enumerate(target):
            prefix = lm.tokenizer.decode(target[:number]) if number else ""
            if number and (rule == "extra_space" or not prefix.startswith(space)):
                prefix = space + prefix
            ids = encode(lm.tokenizer, context + prefix, lm.add_bos_token).ids or [lm.prefix_token_id]
            piece = lm.tok_encode(lm.tokenizer.decode([token]), add_special_tokens=False)
            contexts.append(tuple(ids[-lm.max_length :]))
            wanted.append(piece[0] if piece else lm.eot_token_id)
            num_cut = max(num_cut, len(ids) - lm.max_length)
        by_token = TokenContexts(rule, tuple(contexts))
        return BuiltItem(ScoreItem(contexts[0], tuple(wanted), (context, continuation), by_token), num_cut)

    def _glued_token_prompts(self, context: str, continuation: str, rule: TokenPrompts) -> BuiltItem[ScoreItem]:
        """The prompts of the tokens of a target that follows its prompt without a space."""
        whole = self.score_item(context, continuation)
        ids, target = whole.item.context, whole.item.continuation
        by_token = TokenContexts(rule, tuple((*ids, *target[:number]) for number in range(len(target))))
        return whole._replace(item=replace(whole.item, by_token=by_token))

    def stock_score_item(self, context: str, continuation: str) -> BuiltItem[ScoreItem]:
        """Build the item of a stock task from texts, with the tokens that lm-eval scores."""
        lm = self._lm
        if context == "":
            ids, target = [lm.prefix_token_id], lm.tok_encode(continuation, add_special_tokens=False)
        else:
            ids, target = lm.encode_pair(context, continuation)
        return self._fitted(ids, target, (context, continuation))

    def tokenized_item(
        self, texts: tuple[str, str] | None, context: Sequence[int], continuation: Sequence[int]
    ) -> ScoreItem:
        """Build the item of a stock task from lm-eval's tokens; ``texts`` is ``None`` for rolling windows."""
        return self._fitted(context, continuation, texts).item

    def _fitted(self, ids: Sequence[int], target: Sequence[int], texts: tuple[str, str] | None) -> BuiltItem[ScoreItem]:
        """Create the item; long contexts are cut at the start, as in lm-eval."""
        if not target:
            context, continuation = texts or ("", "")
            raise UnusableRequestError(f"continuation {continuation!r} has no token besides those of {context!r}.")
        if not ids:  # without BOS; no token is left that the first token of the target could be predicted from
            context, continuation = texts or ("", "")
            raise UnusableRequestError(
                f"prompt {context!r} has no token of its own: the tokenizer merges it into {continuation!r}."
            )
        room = self._lm.max_length + 1 - len(target)
        if room < 1:
            raise UnusableRequestError(
                f"continuation of {len(target)} tokens does not fit into {self._lm.max_length} positions."
            )
        return BuiltItem(ScoreItem(tuple(ids[-room:]), tuple(target), texts), max(0, len(ids) - room))

    def decoded_item(self, context: str, gen_kwargs: Mapping[str, Any], decoding: Decoding) -> BuiltItem[GenerateItem]:
        """Build an item from the settings of a question, and those of its task where it has none."""
        own = {"do_sample", "temperature", "top_k", "top_p"}  # said by ``decoding`` itself
        of_task = self._without_prompt(context, {name: gen_kwargs[name] for name in gen_kwargs if name not in own})
        item = replace(
            of_task,
            stops=of_task.stops if decoding.until is None else tuple(stop for stop in decoding.until if stop),
            max_new_tokens=decoding.max_new_tokens or of_task.max_new_tokens,
            ignore_end=decoding.ignore_end,
            sampling=decoding.sampling,
            max_thought_tokens=decoding.max_thought_tokens or of_task.max_thought_tokens,
        )
        if decoding.max_total_tokens is not None:
            length = decoding.max_total_tokens - len(encode(self._lm.tokenizer, context, self._lm.add_bos_token).ids)
            if length < 1:
                raise UnusableRequestError(f"prompt {context!r} has no room in {decoding.max_total_tokens} tokens.")
            item = replace(item, max_new_tokens=length, think_end=None, max_thought_tokens=None, with_prompt=True)
        if decoding.length_of is not None:
            target = self._tokens_of(decoding.length_of, None if decoding.length_of_alone else context)
            item = replace(
                item,
                stops=(),
                max_new_tokens=len(target),
                ignore_end=True,
                think_end=None,
                max_thought_tokens=None,
                target=target,
                forced=decoding.teacher_forced,
            )
        return self.fitted_prompt(context, item)

    def _tokens_of(self, text: str, context: str | None) -> tuple[int, ...]:
        """The tokens of a text after a context, or by itself."""
        lm = self._lm
        require_text(text)
        if context is None:
            ids = encode(lm.tokenizer, text, add_special_tokens=False).ids
        else:
            ids = split_continuation(lm.tokenizer, context, text, lm.add_bos_token)[1]
        if not ids:
            raise UnusableRequestError(f"answer {text!r} has no token after {context or ''!r}.")
        return tuple(ids)

    def generate_item(self, context: str, gen_kwargs: Mapping[str, Any]) -> BuiltItem[GenerateItem]:
        """Build an item for greedy decoding from the generation settings of an lm-eval task."""
        return self.fitted_prompt(context, self._without_prompt(context, gen_kwargs))

    def stock_generate_item(self, context: str, gen_kwargs: Mapping[str, Any]) -> BuiltItem[GenerateItem]:
        """Build the item of a stock task, whose thought is part of the answer (:mod:`~edit_hooks.lm.stock.texts`)."""
        return self.fitted_prompt(context, self._of_settings(gen_kwargs, STOCK))

    def check_stock(self, requests: Sequence[Instance]) -> None:
        """Raise EditingError for generation requests of stock tasks that edits outside the weights cannot answer."""
        for request in requests:
            require_text(request.args[0])
        for context, gen_kwargs in {str(request.args[1]): request.args for request in requests}.values():
            self.stock_generate_item(context, gen_kwargs)

    def check_stock_settings(self, gen_kwargs: Mapping[str, Any]) -> None:
        """Raise EditingError for generation settings of a stock task, before its requests are known."""
        self._of_settings(gen_kwargs, STOCK)

    def with_thought(self, item: GenerateItem) -> GenerateItem:
        """Separate the thought of an item of a stock task from its answer, as for editing documents."""
        if item.think_end is not None or item.text is None:
            return item
        end = self._think_end(item.text)
        return item if end is None else replace(item, think_end=end, max_thought_tokens=self._max_thought_tokens)

    def _without_prompt(self, context: str, gen_kwargs: Mapping[str, Any]) -> GenerateItem:
        """The settings of a task as an item; its prompt is set once its length is known (:meth:`fitted_prompt`)."""
        end = self._think_end(context)
        budget = None if end is None else self._max_thought_tokens
        return replace(self._of_settings(gen_kwargs), think_end=end, max_thought_tokens=budget)

    def _of_settings(self, gen_kwargs: Mapping[str, Any], why: str = EDITING) -> GenerateItem:
        """Generation settings as an item.

        Args:
            why: why the settings must be those of greedy decoding.
        """
        lm = self._lm
        check_generation_kwargs(gen_kwargs)
        try:
            settings = normalize_gen_kwargs(dict(gen_kwargs), lm.max_gen_toks)
        except (TypeError, ValueError) as error:
            raise EditingError(f"generation_kwargs {dict(gen_kwargs)!r} cannot be used: {error}.") from None
        sampling = settings.get("do_sample") or settings.get("temperature", 0.0) not in (0, 0.0)
        if sampling or (other := set(settings) - GREEDY_ONLY):
            setting = "sampling" if sampling else ", ".join(sorted(other))
            raise EditingError(f"generation_kwargs ask for {setting}; {why}.")
        end = lm.tok_decode(lm.eot_token_id, skip_special_tokens=False)
        stops = handle_stop_sequences(settings.get("until"), eos=end)
        stops = tuple(stop for stop in stops if stop and stop != end)
        return GenerateItem((), stops, int(settings["max_gen_toks"]))

    def fitted_prompt(self, context: str, item: GenerateItem) -> BuiltItem[GenerateItem]:
        """Give an item a prompt; a long one is cut at the start, as in lm-eval."""
        lm = self._lm
        require_text(context)
        room = lm.max_length - item.most_tokens
        if room < 1:
            if item.target is not None:
                raise UnusableRequestError(
                    f"an answer of {len(item.target)} tokens leaves no room in {lm.max_length} positions."
                )
            thought = f" with max_thought_tokens={item.max_thought_tokens}" if item.max_thought_tokens else ""
            raise EditingError(
                f"max_gen_toks={item.max_new_tokens}{thought} leaves no room in {lm.max_length} positions."
            )
        ids = encode(lm.tokenizer, context, lm.add_bos_token).ids or [lm.prefix_token_id]
        return BuiltItem(replace(item, context=tuple(ids[-room:]), text=context), max(0, len(ids) - room))

    def is_cut_past(self, context: str, num_cut: int, position: int) -> bool:
        """Whether the first ``num_cut`` tokens of a prompt reach beyond a position in its text."""
        if not num_cut:
            return False
        offsets = encode(self._lm.tokenizer, context, self._lm.add_bos_token).offsets
        return any(end > position for _, end in offsets[:num_cut])

    def _think_end(self, context: str) -> int | str | None:
        """The token id or text that ends the thought of an answer to a prompt.

        ``None`` without thoughts, and if the prompt itself ends the thought: at its end, or in the turn of a chat that
        the answer continues. Some chat templates write an empty thought there (``enable_thinking=false``; Qwen3 before
        every ``gen_prefix``). A text that is one token is searched as a token, since decoding drops special tokens.
        """
        lm = self._lm
        end = lm.think_end_token
        if end is None:
            return None
        text = (lm.tok_decode(end, skip_special_tokens=False) if isinstance(end, int) else end).strip()
        turn = self._chats.last_turn(context)
        beginning = text.replace("/", "", 1)  # </think>: <think>; a turn that opens another thought has not ended it
        if beginning not in (text, ""):
            turn = turn.rpartition(beginning)[2]
        if context.rstrip().endswith(text) or text in turn:
            return None
        if isinstance(end, int):
            return end
        ids = lm.tok_encode(end, add_special_tokens=False)
        return ids[0] if len(ids) == 1 else end
