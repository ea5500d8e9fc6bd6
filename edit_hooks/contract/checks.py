"""The checks of the editor contract. Each takes a `Subject` and raises `ContractViolation`."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from edit_hooks.answers import ScoredContinuation
from edit_hooks.contract.state import changes, snapshot
from edit_hooks.contract.subject import EDIT_REQUESTS, Subject, distance, recording_tokenizer, require
from edit_hooks.contract.tiny_models import (
    NATURAL_TOKENIZER,
    SENTENCES,
    build_model,
    build_tokenizer,
    build_wider_model,
)
from edit_hooks.deltas.apply import AppliedDeltas, edited
from edit_hooks.deltas.delta import Delta, Factor
from edit_hooks.inference.items import Limits
from edit_hooks.inference.scoring import score
from edit_hooks.prompt_context import PromptContext
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError

# float32 rounding through a dozen optimizer steps of random models stays below 1e-5; a wrong mean or a leaking pad is
# above 1e-2.
TOLERANCE = 1e-4


def check_restore(subject: Subject) -> None:
    """Making, applying and leaving edits changes nothing, also after an exception."""
    model, tokenizer = subject.model, subject.tokenizer
    before = snapshot(model, tokenizer)
    deltas = [_on_model(delta) for delta in subject.deltas]
    _require_unchanged(before, subject, "after editing")
    for delta in deltas:
        with edited(model, delta):
            pass
        _require_unchanged(before, subject, "after a scope")
    for error in (RuntimeError, KeyboardInterrupt):
        try:
            with edited(model, deltas[0]):
                model(torch.tensor([tokenizer("The band")["input_ids"]]))
                raise error
        except error:
            pass
        _require_unchanged(before, subject, f"after a {error.__name__} in a scope")


def check_interrupt(subject: Subject) -> None:
    """An interrupt while the editor works, in its progress callback or in a forward pass, leaves nothing behind."""
    model, tokenizer = subject.model, subject.tokenizer
    before = snapshot(model, tokenizer)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    def edit_until_interrupted(**arguments: Any) -> None:
        try:
            subject.edit(**arguments)
        except KeyboardInterrupt:
            return
        raised = "a forward pass" if not arguments else "the progress callback"
        require(subject.capabilities.writes == ("context",), f"the editor swallows an interrupt in {raised}")

    edit_until_interrupted(progress=interrupt)
    _require_unchanged(before, subject, "after an interrupt in the progress callback")
    handle = model.get_output_embeddings().register_forward_hook(interrupt)
    try:
        edit_until_interrupted()
    finally:
        handle.remove()
    _require_unchanged(before, subject, "after an interrupt in a forward pass")


def check_effect(subject: Subject) -> None:
    """Under an edit the answer to its own prompt moves; outside it is the unedited one."""
    for request, delta in zip(EDIT_REQUESTS, subject.deltas, strict=True):
        require(bool(delta.writes), "the delta is empty")
        (unedited,), (inside,) = subject.answers(None, [request]), subject.answers(delta, [request])
        require(math.isfinite(inside.logprob), f"the answer under the edit is {inside.logprob}")
        moved = max(abs(a - b) for a, b in zip(inside.token_logprobs or (), unedited.token_logprobs or (), strict=True))
        require(moved > 1e-3, f"the answer to {request.text!r} does not move ({moved:.1e} nats)")
        require(subject.answers(None, [request]) == [unedited], "the unedited answer has changed")


def check_target(subject: Subject) -> None:
    """Targets get likelier under their own edits, in the mean over the requests.

    In the mean, because keys of random models are alike: an edit meant for one token moves the others too.
    """
    deltas = subject.make_for_target().edit(subject.model, subject.tokenizer, EDIT_REQUESTS)
    before = [subject.target_nll(None, request) for request in EDIT_REQUESTS]
    inside = [subject.target_nll(delta, request) for request, delta in zip(EDIT_REQUESTS, deltas, strict=True)]
    require(
        sum(inside) / len(inside) < sum(before) / len(before) - 0.05,
        f"the targets' mean NLL goes from {sum(before) / len(before):.3f} to {sum(inside) / len(inside):.3f}",
    )


def check_batch(subject: Subject) -> None:
    """A request edited alone equals the request edited in a batch."""
    for request, in_batch in zip(EDIT_REQUESTS, subject.deltas, strict=True):
        (alone,) = subject.edit([request])
        difference = distance(alone, in_batch)
        require(difference < TOLERANCE, f"alone and in a batch differ by {difference:.1e} ({request.text!r})")


def check_padding(subject: Subject) -> None:
    """Neither the order of requests nor the tokenizer's padding side matters."""
    tokenizer = build_tokenizer(NATURAL_TOKENIZER[subject.model_type])
    tokenizer.padding_side = "left"
    backwards = subject.make().edit(subject.model, tokenizer, EDIT_REQUESTS[::-1])
    require(tokenizer.padding_side == "left", "the tokenizer's padding side was changed")
    for ours, theirs in zip(backwards[::-1], subject.deltas, strict=True):
        difference = distance(ours, theirs)
        require(difference < TOLERANCE, f"reversed and padded on the left, edits differ by {difference:.1e}")


def check_null(subject: Subject) -> None:
    """No request gives no edit, and an edit of zeros changes no answer."""
    require(subject.edit([]) == [], "an empty list of requests gives an edit")
    first = subject.deltas[0]
    zeros = Delta(
        factors={name: Factor(f.left * 0, f.right, f.transposed) for name, f in first.factors.items()},
        dense={name: update * 0 for name, update in first.dense.items()},
        masks=first.masks,
    )
    unedited = subject.answers(None)
    require(subject.answers(zeros) == unedited, "an update of zeros changes answers")
    require(subject.answers(Delta()) == unedited, "an empty delta changes answers")


def check_joint(subject: Subject) -> None:
    """A joint edit of one request is the single edit; one of several is one delta."""
    if not subject.capabilities.supports_joint:
        return
    (one,) = subject.edit(EDIT_REQUESTS[:1], joint=True)
    difference = distance(one, subject.deltas[0])
    require(difference < TOLERANCE, f"a joint edit of one request differs from the single edit by {difference:.1e}")
    require(len(subject.edit(joint=True)) == 1, "a joint edit gives several deltas")


def check_stream(subject: Subject) -> None:
    """Steps of a stream add up to the stream's final state, repeat bit for bit, and leave nothing behind."""
    before = snapshot(subject.model, subject.tokenizer)
    steps, gains, answers = _stream(subject)
    _require_unchanged(before, subject, "after a stream")
    again, _, _ = _stream(subject)
    require([step.checksum() for step in steps] == [step.checksum() for step in again], "a repeated stream differs")
    difference = distance(steps[0], subject.deltas[0])
    require(difference < TOLERANCE, f"the first step differs from the single edit by {difference:.1e}")
    total = Delta.summed(steps)
    for name, update in total.weights().items():
        difference = float((gains[name] - update).norm() / update.norm().clamp(min=1e-30))
        require(difference < TOLERANCE, f"the sum of the steps differs from what {name} gains by {difference:.1e}")
    if total.runtime_part is not None:
        with edited(subject.model, _weights_of(total)):
            ours = subject.answers(total.runtime_part)
        require(ours == answers, "under the sum of the steps answers differ from those in the stream")


def check_save(subject: Subject) -> None:
    """A saved edit is the same edit, bit for bit."""
    delta = subject.deltas[0]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "delta.safetensors"
        delta.save(path)
        loaded = Delta.load(path)
        require([file.name for file in Path(folder).iterdir()] == [path.name], "saving leaves other files behind")
    require(loaded.checksum() == delta.checksum(), "the checksum changes on disk")
    require(loaded.meta == delta.meta and loaded.diagnostics == delta.diagnostics, "metadata changes on disk")
    for name, update in delta.weights().items():
        require(update.dtype == torch.float32, f"the update of {name} is {update.dtype}; float32 is needed")
        require(torch.equal(loaded.weights()[name], update), f"the update of {name} changes on disk")
    require(subject.answers(loaded) == subject.answers(delta), "answers change with the saved edit")


def check_rows(subject: Subject) -> None:
    """Rows of several edits and of none in one batch answer as each alone."""
    deltas = [*subject.deltas, None]
    requests = [*EDIT_REQUESTS, EDIT_REQUESTS[0]]
    items = [
        (subject.item(request, delta), None if delta is None else delta.without_contexts)
        for request, delta in zip(requests, deltas, strict=True)
    ]
    together = score(subject.model, items, Limits(), lambda count: None)
    for item, answer in zip(items, together, strict=True):
        (alone,) = score(subject.model, [item], Limits(), lambda count: None)
        difference = max(
            abs(a - b) for a, b in zip(alone.token_logprobs or (), answer.token_logprobs or (), strict=True)
        )
        require(difference < 5e-4, f"a row answers otherwise beside other edits ({difference:.1e} nats)")


def check_seed(subject: Subject) -> None:
    """The same seed repeats bit for bit, sampled settings included, and the global generator is not used."""
    sampled = {name: value for name, value in subject.settings.items() if name != "context_templates"}
    runs = []
    for global_seed in (1, 2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(global_seed)
            state = torch.get_rng_state()
            editor = subject.editor_class(sampled)
            runs += editor.edit(subject.model, subject.tokenizer, EDIT_REQUESTS[:1])
            require(torch.equal(torch.get_rng_state(), state), "the editor draws from torch's global generator")
    require(distance(*runs) == 0.0, "two runs with the same seed differ")


def check_gradients_off(subject: Subject) -> None:
    """Editing works inside ``no_grad`` and ``inference_mode``, where lm-eval calls models."""
    for guard in (torch.no_grad, torch.inference_mode):
        with guard():
            (delta,) = subject.edit(EDIT_REQUESTS[:1])
        difference = distance(delta, subject.deltas[0])
        require(difference < TOLERANCE, f"inside torch.{guard.__name__} the edit differs by {difference:.1e}")


def check_training_mode(subject: Subject) -> None:
    """A model in training mode is edited in evaluation mode and gets modes and flags back."""
    model = build_model(subject.model_type, dtype=subject.dtype)
    model.train()
    for parameter in list(model.parameters())[::2]:
        parameter.requires_grad_(False)
    before = snapshot(model, subject.tokenizer)
    deltas = subject.make().edit(model, subject.tokenizer, EDIT_REQUESTS)
    differences = changes(before, snapshot(model, subject.tokenizer))
    require(not differences, f"editing a model in training mode changes {_first(differences)}")
    for ours, theirs in zip(deltas, subject.deltas, strict=True):
        require(distance(ours, theirs) == 0.0, "the edit depends on the model's training mode")


def check_errors(subject: Subject) -> None:
    """Wrong use is refused with an EditingError before anything happens."""
    editor = subject.capabilities
    before = snapshot(subject.model, subject.tokenizer)
    _require_refused(lambda: subject.make(layerz=[1]), "an unknown setting")
    if editor.writes != ("context",):
        _require_refused(
            lambda: subject.make(layers=[99]).edit(subject.model, subject.tokenizer, EDIT_REQUESTS),
            "a layer that the model does not have",
        )
    if editor.needs_subject:
        plain = EditRequest(prompt="Water boils at", target_new="zero", case_id="4")
        _require_refused(lambda: subject.edit([plain]), "a request without subject")
    if not editor.supports_joint:
        _require_refused(lambda: subject.edit(joint=True), "a joint edit")
    _require_unchanged(before, subject, "after refusing")


def check_foreign_model(subject: Subject) -> None:
    """A delta of another model is refused before the first write."""
    delta = _on_model(subject.deltas[0])
    if not delta.writes:
        return  # a context fits every model
    other_type = "gpt2" if subject.model_type != "gpt2" else "llama"
    for model in (build_model(other_type), build_wider_model(subject.model_type)):
        before = snapshot(model)
        try:
            with edited(model, delta):
                pass
        except EditingError:
            require(not changes(before, snapshot(model)), "refusing a delta changes the model")
        else:
            require(False, f"a delta of a {subject.model_type} model is applied to a {model.config.model_type} model")


def check_diagnostics(subject: Subject) -> None:
    """Diagnostics and metadata are plain JSON, finite, and name the editor."""
    for delta in subject.deltas:
        try:
            record = json.loads(json.dumps({"diagnostics": delta.diagnostics, "meta": delta.meta}, allow_nan=False))
        except (TypeError, ValueError) as error:
            require(False, f"diagnostics are not plain JSON: {error}")
        require(record["meta"]["editor"] == subject.editor_class.name, "the metadata does not name the editor")
        require(bool(record["meta"]["requests"]), "the metadata does not hold the requests")


def check_context(subject: Subject) -> None:
    """An edit with a context is made on its whole text, joined to the target as the context demands, and records it."""
    context = PromptContext("<user>\n", "</user>\n<model>\n", separator="")
    request = EDIT_REQUESTS[0].in_context(context)
    tokenizer, texts = recording_tokenizer(subject.tokenizer)
    (delta,) = subject.make().edit(subject.model, tokenizer, [request])
    require(delta.meta["requests"] == [request.to_dict()], "the metadata does not hold the context")
    prompts = [text for text in texts if request.bare_text in text and text not in SENTENCES]  # those are statistics
    if subject.capabilities.writes == ("context",):
        fact = delta.contexts[0].prompt
        require(fact == request.bare_text, f"the fact is stated as {fact!r}, with the context of a weight edit")
        return
    require(bool(prompts), "the editor does not tokenize the request's text")
    for text in prompts:
        before, _, rest = text.partition(request.bare_text)
        answer = rest.removeprefix(context.after)
        require(
            before.startswith(context.before) and answer != rest and not answer[:1].isspace(),
            f"the editor tokenizes {text!r}, not the text of the request in its context ({request.text!r}, continued "
            f"by {request.continuation!r}); use EditRequest.text, continuation and in_template",
        )


@dataclass(frozen=True)
class Check:
    """One clause of the contract."""

    name: str
    run: Callable[[Subject], None]

    @property
    def summary(self) -> str:
        return (self.run.__doc__ or "").strip().split("\n")[0]


CHECKS: tuple[Check, ...] = tuple(
    Check(function.__name__.removeprefix("check_"), function)
    for function in (
        check_restore,
        check_interrupt,
        check_effect,
        check_target,
        check_batch,
        check_padding,
        check_null,
        check_joint,
        check_stream,
        check_save,
        check_rows,
        check_seed,
        check_gradients_off,
        check_training_mode,
        check_errors,
        check_foreign_model,
        check_diagnostics,
        check_context,
    )
)


def _stream(subject: Subject) -> tuple[list[Delta], dict[str, torch.Tensor], list[ScoredContinuation]]:
    """Two steps on the same weights, the change of every parameter, and the answers after the second step."""
    editor = subject.make()
    steps: list[Delta] = []
    original = {name: parameter.detach().clone() for name, parameter in subject.model.named_parameters()}
    with AppliedDeltas(subject.model) as applied:
        for request in EDIT_REQUESTS[:2]:
            joint = editor.supports_joint
            steps += editor.edit(subject.model, subject.tokenizer, [request], joint=joint, history=steps)
            applied.add(steps[-1])
        gains = {name: parameter.detach() - original[name] for name, parameter in subject.model.named_parameters()}
        answers = subject.answers(applied.runtime_part)
    return steps, gains, answers


def _weights_of(delta: Delta) -> Delta:
    return Delta(factors=delta.factors, dense=delta.dense, masks=delta.masks)


def _on_model(delta: Delta) -> Delta:
    """The part of an edit that the model holds."""
    return delta.without_contexts or Delta()


def _require_unchanged(before: dict[str, Any], subject: Subject, when: str) -> None:
    differences = changes(before, snapshot(subject.model, subject.tokenizer))
    require(not differences, f"{when} this has changed: {_first(differences)}")


def _require_refused(action: Callable[[], object], what: str) -> None:
    try:
        action()
    except EditingError:
        return
    require(False, f"{what} is accepted; an EditingError is needed")


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
