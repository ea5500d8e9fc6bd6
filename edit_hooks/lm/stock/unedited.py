"""The unedited model's answers to the requests of lm-eval's own tasks, for ``compare_unedited=true``.

The store keeps the answers of a whole call, not of single requests: the last bits of a sum depend on the rows that
share a batch, and an edit of weights without effect must give a difference of exactly 0. Under hook and context edits
the edited column comes from this package's engine, whose batches are not lm-eval's: there log-likelihoods differ in
their last bits (by about 1e-6 of their value in float32) where the edit has no effect.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lm_eval.api.instance import Instance

from edit_hooks.answers import LoglikelihoodPair, is_broken
from edit_hooks.lm.loading.versions import installed_versions
from edit_hooks.store.store import Description, Store
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.scopes import undone
from edit_hooks.utils.storage.hashing import code_fingerprint, key_of

log = get_logger("lm_eval.edited_hf")

KIND = "ordinary_answers"


class UneditedStock:
    """Scope in which ordinary requests are asked of the unedited model, and the store of its answers.

    Args:
        settings: the options of lm-eval's model class; any of them may change an answer, except the text of the
            device, which lm-eval replaces if there is no GPU.

    Attributes:
        is_asked: whether the scope is open.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        plain = (str, int, float, bool, type(None))
        self.settings = {
            name: value if isinstance(value, plain) else type(value).__name__
            for name, value in settings.items()
            if name != "device"
        }
        self.is_asked = self._was_asked = False

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Ask ordinary requests of the unedited model."""
        with undone(lambda: setattr(self, "is_asked", False)):
            self.is_asked = self._was_asked = True
            yield

    def warn_if_unused(self) -> None:
        """Log that the scope was never open, in a run that was to compare both models."""
        if not self._was_asked:
            log.warning(
                "compare_unedited=True has no effect: no task without edits was evaluated on both models. Such tasks "
                "are lm-eval's own; lm_eval_editing_autoload, which start-up imports, evaluates them twice."
            )

    def answers(
        self,
        requests: Sequence[Instance],
        compute: Callable[[], list[Any]],
        store: Store | None,
        model: Mapping[str, Any],
        device: str,
    ) -> list[Any]:
        """Answers to requests of one type, from the store if it has those to this very list.

        Args:
            model: what the unedited model's answers depend on.
            device: type of the device that computes.
        """
        if store is None or any(map(_is_sampled, requests)):
            return compute()
        kind = requests[0].request_type
        description = Description(
            what="unedited answers of ordinary tasks",
            model=model,
            code=code_fingerprint(__name__),
            inputs={
                "type": kind,
                "device": device,
                "lm_eval": installed_versions()["lm-eval"],
                "settings": self.settings,
                "requests": key_of([list(request.args) for request in requests]),
            },
        )
        stored = store.load_json(KIND, description)
        if stored is None:
            answers = compute()
            if not any(map(is_broken, answers)):  # of a model that can hardly be used; their kind is not in JSON
                store.save_json(KIND, description, [_to_json(answer) for answer in answers])
            return answers
        return [LoglikelihoodPair(*answer) if isinstance(answer, list) else answer for answer in stored]


def counted_pairs(
    pairs: Sequence[tuple[float, bool]], requests: Sequence[tuple[Any, Sequence[int], Sequence[int]]]
) -> list[tuple[float, bool]]:
    """The answers to requests (texts, context, continuation) with the numbers of tokens of the continuations."""
    return [
        LoglikelihoodPair(logprob, is_greedy, len(continuation))
        for (logprob, is_greedy), (_, _, continuation) in zip(pairs, requests, strict=True)
    ]


def _to_json(answer: Any) -> Any:
    return [*answer, answer.num_tokens] if isinstance(answer, LoglikelihoodPair) else answer


def _is_sampled(request: Instance) -> bool:
    """Whether an answer is drawn at random; such a draw must not be the same in every later run."""
    if request.request_type != "generate_until":
        return False
    settings = request.args[1]
    return bool(settings.get("do_sample")) or settings.get("temperature", 0.0) not in (0, 0.0)
