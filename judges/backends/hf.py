"""Backend for a Hugging Face model in this process, loaded on use and released afterwards."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tqdm import tqdm

from edit_hooks.utils.checkpoints import REPORTED, require_complete
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.logs import get_logger
from judges.backends.base import JUDGE, BackendResult, Fault, OnReply, Outcome, Reply, Role
from judges.prompt import Chat
from judges.settings import JudgeSettings
from judges.thoughts import is_marker, opened_thought

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = get_logger("lm_eval.judges")

DEFAULT_REPLY_TOKENS = 512  # if the settings set no limit


class HFBackend:
    """A causal language model in this process. Decoding is greedy, so equal answers get equal verdicts.

    Args:
        settings: model, revision, dtype, device, batch size, reply length.
        model, tokenizer: a loaded pair; the backend then neither loads nor releases a model.
        edited: the model under edits, to check that ``model`` shares no weights with it.
        role: use of the model, for messages.

    Raises:
        EditingError: if ``model`` is the edited model or shares weights with it.
    """

    def __init__(
        self,
        settings: JudgeSettings,
        model: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        edited: torch.nn.Module | None = None,
        role: Role = JUDGE,
    ) -> None:
        if (model is None) != (tokenizer is None):
            raise EditingError(f"a loaded {role.name} model comes with its tokenizer; pass both or neither.")
        if model is not None and edited is not None and shares_weights(model, edited):
            raise EditingError(
                "the judge model is the edited model, or shares weights with it: its verdicts would change with each "
                "edit. Load the judge separately."
            )
        self.settings, self.role = settings, role
        self.keep_loaded = False
        self._owns_model = model is None
        self._model, self._tokenizer = model, tokenizer

    @property
    def loaded(self) -> bool:
        """Whether the model is in memory."""
        return self._model is not None

    def check(self) -> None:
        """Read the model's configuration, without its weights.

        Raises:
            EditingError: if there is no such model.
        """
        if not self._owns_model:
            return
        from transformers import AutoConfig

        try:
            AutoConfig.from_pretrained(self.settings.model, revision=self.settings.loaded_revision)
        except (OSError, ValueError) as error:
            raise EditingError(
                f"{self.role.name} hf:{self.settings.model} cannot be loaded: {str(error).strip().splitlines()[0]} "
                "Give the id of a causal language model on the hub, or a folder."
            ) from None

    def complete(self, chats: Sequence[Chat], on_reply: OnReply) -> BackendResult:
        """Reply greedily, in batches of prompts of similar length; the model is released afterwards.

        A chat that does not fit into the model's positions together with the longest reply gets a fault.
        With ``keep_loaded`` it stays for the next call, until :meth:`release`.
        """
        if not chats:
            return BackendResult([], 0)
        self._load()
        try:
            prompts = [self._render(chat) for chat in chats]
            replies: dict[int, Outcome] = {index: Fault(self._too_long) for index in self._not_fitting(prompts)}
            order = sorted(set(range(len(prompts))) - set(replies), key=lambda index: len(prompts[index]))
            size = self.settings.batch_size
            with tqdm(total=len(order), desc=self.role.activity, unit=self.role.unit) as bar:
                for start in range(0, len(order), size):
                    batch = order[start : start + size]
                    for index, reply in zip(batch, self._reply([prompts[index] for index in batch]), strict=True):
                        replies[index] = reply
                        if isinstance(reply, Reply):
                            on_reply(index, reply)
                    bar.update(len(batch))
            return BackendResult([replies[index] for index in range(len(prompts))], len(order))
        finally:
            if not self.keep_loaded:
                self.release()

    def release(self) -> None:
        """Free the model's memory; a no-op for a model of the caller."""
        if not self._owns_model or self._model is None:
            return
        self._model = self._tokenizer = None
        gc.collect()
        import torch

        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _load(self) -> None:
        if self._model is not None:
            return
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        settings = self.settings
        device = settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
        log.info("loading the %s %s on %s", self.role.name, settings.model, device)
        try:
            revision = settings.loaded_revision
            self._tokenizer = AutoTokenizer.from_pretrained(settings.model, revision=revision)
            model, report = AutoModelForCausalLM.from_pretrained(
                settings.model, revision=revision, dtype=settings.dtype, **REPORTED
            )
            require_complete(report, f"{self.role.name} hf:{settings.model}")
            self._model = model.to(device).eval()
        except torch.OutOfMemoryError:
            self.release()
            raise EditingError(
                f"{self.role.name} hf:{settings.model} does not fit on {device}{self.role.beside}. Use another device "
                f"(device: cpu, cuda:1), {self.role.otherwise}."
            ) from None

    def _render(self, chat: Chat) -> str:
        """Render a chat with the model's chat template and generation prompt; without a template join the texts."""
        assert self._tokenizer is not None
        chat = [message for message in chat if message["content"]]  # many templates reject an empty system message
        if not self._tokenizer.chat_template:
            return "\n\n".join(message["content"] for message in chat)
        # enable_thinking is a variable of some templates; others ignore it.
        return self._tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )

    @property
    def _max_tokens(self) -> int:
        return self.settings.max_reply_tokens or DEFAULT_REPLY_TOKENS

    @property
    def _too_long(self) -> str:
        return f"the {self.role.name}'s prompt and {self._max_tokens} reply tokens do not fit into its positions"

    def _not_fitting(self, prompts: list[str]) -> list[int]:
        """Indices of the prompts that exceed the model's positions; learned ones end in an IndexError there."""
        assert self._model is not None
        positions = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        if not isinstance(positions, int) or positions < 1:  # some families without a limit write -1
            return []
        room = positions - self._max_tokens
        return [index for index, text in enumerate(prompts) if len(self._tokenize(text)) > room]

    def _tokenize(self, text: str) -> list[int]:
        assert self._tokenizer is not None
        # A chat template writes its special tokens itself.
        ids: list[int] = self._tokenizer(text, add_special_tokens=not self._tokenizer.chat_template).input_ids
        return ids

    @property
    def _unshown(self) -> set[int]:
        """Ids of the special tokens that are no part of a reply's text."""
        assert self._tokenizer is not None
        tokens = self._tokenizer.added_tokens_decoder
        kept = {self.settings.think_end_token}
        return {
            index
            for index, token in tokens.items()
            if token.special and token.content not in kept and not is_marker(token.content)
        }

    def _reply(self, prompts: list[str]) -> list[Outcome]:
        """Reply to one batch; halve it if it does not fit into memory, or if one of its prompts has no reply."""
        import torch

        try:
            replies = self._generate(prompts)
            if replies is not None:
                return replies
            if len(prompts) == 1:
                return [
                    Fault(f"the logits of the {self.role.name} are not finite (NaN or infinity); use another dtype")
                ]
        except torch.OutOfMemoryError:
            if len(prompts) == 1:
                raise EditingError(
                    f"{self.role.name} hf:{self.settings.model}: a single prompt does not fit into memory. Use a "
                    f"smaller {self.role.name}, another device, {self.role.otherwise}."
                ) from None
        torch.cuda.empty_cache()
        half = len(prompts) // 2
        return [*self._reply(prompts[:half]), *self._reply(prompts[half:])]

    def _generate(self, prompts: list[str]) -> list[Outcome] | None:
        """Replies to one batch; ``None`` if a prompt of it has logits that are not finite."""
        import torch
        from transformers import LogitsProcessorList

        assert self._model is not None and self._tokenizer is not None
        tokenizer, device = self._tokenizer, self._model.device
        rows = [self._tokenize(text) for text in prompts]
        longest = max(map(len, rows))
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
        # Left padding, so that all replies begin at the same position.
        ids_BT = torch.tensor([[pad] * (longest - len(row)) + row for row in rows], device=device)
        mask_BT = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
        max_tokens = self._max_tokens
        watch = _FiniteScores()
        with torch.inference_mode():
            out_BT = self._model.generate(
                input_ids=ids_BT,
                attention_mask=mask_BT,
                max_new_tokens=max_tokens,
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
                pad_token_id=pad,
                logits_processor=LogitsProcessorList([watch]),
            )
        if not watch.are_finite:
            return None
        return [
            self._decode(out_T[longest:].tolist(), text, len(row), max_tokens)
            for text, row, out_T in zip(prompts, rows, out_BT, strict=True)
        ]

    def _decode(self, ids: list[int], prompt: str, prompt_tokens: int, max_tokens: int) -> Reply:
        """The reply to a prompt. It keeps the markers of its thought, also one that the chat template has written."""
        assert self._model is not None and self._tokenizer is not None
        end_id = self._model.generation_config.eos_token_id
        end_ids = set(end_id) if isinstance(end_id, list) else {end_id}
        length = next((position for position, token in enumerate(ids) if token in end_ids), None)
        unshown = self._unshown
        shown = [token for token in ids[:length] if token not in unshown]
        text = opened_thought(prompt) + self._tokenizer.decode(shown, skip_special_tokens=False)
        reply_tokens = len(ids) if length is None else length + 1
        finish = "length" if length is None and reply_tokens >= max_tokens else "stop"
        return Reply(text, finish, prompt_tokens, reply_tokens)


class _FiniteScores:
    """A logits processor that changes nothing and records whether the largest score of every row was finite."""

    def __init__(self) -> None:
        self._broken: torch.Tensor | None = None  # on the device: read once, not at every step

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        broken = ~scores.amax(-1).isfinite().all()
        self._broken = broken if self._broken is None else self._broken | broken
        return scores

    @property
    def are_finite(self) -> bool:
        return self._broken is None or not bool(self._broken)


def shares_weights(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    """Return whether two models are the same object or have a parameter in the same memory."""
    if first is second:
        return True
    addresses = {parameter.data_ptr() for parameter in first.parameters() if parameter.numel()}
    return any(parameter.data_ptr() in addresses for parameter in second.parameters() if parameter.numel())
