"""Judges that run in this process: a Hugging Face model, loaded when it is asked and released afterwards."""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from edit_hooks.utils.errors import EditingError
from judges.backends.base import Asked, Fault, Keep, Outcome, Reply
from judges.prompt import Chat
from judges.settings import JudgeSettings

log = logging.getLogger("lm_eval.judges")


DEFAULT_REPLY_TOKENS = 512  # where the settings leave the length open


class LocalModel:
    """A model in this process. It decodes greedily, so the same answers get the same verdicts.

    Args:
        settings: model, revision, dtype, device, batch size, reply length.
        model, tokenizer: a loaded pair to use, which is then neither loaded nor released here.
        edited: the model under edits; ``model`` must not share weights with it.

    Raises:
        EditingError: when ``model`` is the edited model or shares weights with it.
    """

    def __init__(self, settings: JudgeSettings, model: Any = None, tokenizer: Any = None, edited: Any = None) -> None:
        if (model is None) != (tokenizer is None):
            raise EditingError("a loaded judge model comes with its tokenizer.")
        if model is not None and edited is not None and shares_weights(model, edited):
            raise EditingError(
                "the judge model is the edited model, or shares weights with it: its verdicts would change with each "
                "edit. Load the judge separately."
            )
        self.settings = settings
        self._given = model is not None
        self._model, self._tokenizer = model, tokenizer

    @property
    def loaded(self) -> bool:
        """Whether the model is in memory."""
        return self._model is not None

    def check(self) -> None:
        """The model's configuration can be read; weights are not loaded."""
        if self._given:
            return
        from transformers import AutoConfig

        try:
            AutoConfig.from_pretrained(self.settings.model, revision=self.settings.revision)
        except (OSError, ValueError) as error:
            raise EditingError(
                f"judge hf:{self.settings.model} cannot be loaded: {str(error).strip().splitlines()[0]} "
                "Give the id of a causal language model on the hub, or a folder."
            ) from None

    def ask(self, chats: Sequence[Chat], keep: Keep) -> Asked:
        """Greedy replies in batches of prompts of similar length; the model is released afterwards."""
        if not chats:
            return Asked([], 0)
        self._load()
        try:
            prompts = [self._prompt(chat) for chat in chats]
            order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
            outcomes: list[Outcome] = [Fault("not asked")] * len(prompts)
            with tqdm(total=len(prompts), desc="Asking the judge", unit="answer") as bar:
                for batch in self._batches(order):
                    for index, reply in zip(batch, self._replies([prompts[index] for index in batch]), strict=True):
                        outcomes[index] = reply
                        keep(index, reply)
                    bar.update(len(batch))
            return Asked(outcomes, len(prompts))
        finally:
            self.release()

    def release(self) -> None:
        """Free the model's memory, unless it was handed in."""
        if self._given or self._model is None:
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
        log.info("loading the judge %s on %s", settings.model, device)
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(settings.model, revision=settings.revision)
            model = AutoModelForCausalLM.from_pretrained(
                settings.model, revision=settings.revision, dtype=settings.dtype
            )
            self._model = model.to(device).eval()
        except torch.OutOfMemoryError:
            self.release()
            raise EditingError(
                f"judge hf:{settings.model} does not fit on {device} beside the edited model. Give it another device "
                "(device: cpu, cuda:1), or judge the saved samples afterwards: lm-edit judge SAMPLES."
            ) from None

    def _prompt(self, chat: Chat) -> str:
        """The chat in the model's own template, ready for the reply; without a template the bare texts."""
        chat = [message for message in chat if message["content"]]  # many templates know no empty system message
        if not self._tokenizer.chat_template:
            return "\n\n".join(message["content"] for message in chat)
        # enable_thinking: a variable of some templates, which others ignore
        return self._tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )

    def _batches(self, order: Sequence[int]) -> list[Sequence[int]]:
        size = self.settings.batch_size
        return [order[start : start + size] for start in range(0, len(order), size)]

    def _replies(self, prompts: list[str]) -> list[Reply]:
        """Replies of one batch; a batch that does not fit into memory is halved."""
        import torch

        try:
            return self._generate(prompts)
        except torch.OutOfMemoryError:
            if len(prompts) == 1:
                raise EditingError(
                    f"judge hf:{self.settings.model}: a single prompt does not fit into memory. Use a smaller judge, "
                    "another device, or judge the saved samples afterwards: lm-edit judge SAMPLES."
                ) from None
        torch.cuda.empty_cache()
        half = len(prompts) // 2
        return [*self._replies(prompts[:half]), *self._replies(prompts[half:])]

    def _generate(self, prompts: list[str]) -> list[Reply]:
        import torch

        rows = [
            self._tokenizer(text, add_special_tokens=not self._tokenizer.chat_template).input_ids for text in prompts
        ]
        longest = max(map(len, rows))
        pad = self._tokenizer.pad_token_id
        pad = pad if pad is not None else self._tokenizer.eos_token_id or 0
        device = self._model.device
        ids_BT = torch.tensor([[pad] * (longest - len(row)) + row for row in rows], device=device)
        mask_BT = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
        bound = self.settings.max_reply_tokens or DEFAULT_REPLY_TOKENS
        with torch.inference_mode():
            out_BT = self._model.generate(
                input_ids=ids_BT,
                attention_mask=mask_BT,
                max_new_tokens=bound,
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
                pad_token_id=pad,
            )
        return [self._reply(row, out[longest:].tolist(), bound) for row, out in zip(rows, out_BT, strict=True)]

    def _reply(self, prompt: list[int], ids: list[int], bound: int) -> Reply:
        ends = self._model.generation_config.eos_token_id
        ends = set(ends) if isinstance(ends, list) else {ends}
        length = next((place for place, token in enumerate(ids) if token in ends), None)
        text = self._tokenizer.decode(ids[:length], skip_special_tokens=True)
        count = len(ids) if length is None else length + 1
        return Reply(text, "length" if length is None and count >= bound else "stop", len(prompt), count)


def shares_weights(first: Any, second: Any) -> bool:
    """Whether two models are the same object or have a parameter in the same memory."""
    if first is second:
        return True
    places = {parameter.data_ptr() for parameter in first.parameters() if parameter.numel()}
    return any(parameter.data_ptr() in places for parameter in second.parameters() if parameter.numel())
