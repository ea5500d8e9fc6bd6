"""The checks of the editor contract. Each takes a `Subject` and raises `ContractViolation`."""

from __future__ import annotations

import copy
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from edit_hooks.contract.batch_checks import check_generation, check_rows
from edit_hooks.contract.state import random_states, snapshot
from edit_hooks.contract.stream_checks import check_stream
from edit_hooks.contract.subject import (
    EDIT_REQUESTS,
    TOLERANCE,
    Subject,
    distance,
    first_names,
    largest_difference,
    recording_tokenizer,
    require,
    require_unchanged,
)
from edit_hooks.contract.tiny_models import (
    NUM_LAYERS,
    SENTENCES,
    build_model,
    build_tokenizer,
    build_wider_model,
    natural_tokenizer,
)
from edit_hooks.deltas.apply import edited
from edit_hooks.deltas.delta import Delta, Factor
from edit_hooks.deltas.placement import beside_weights
from edit_hooks.modeling.architectures import architecture_of, head_of
from edit_hooks.modeling.fingerprint.guard import changes
from edit_hooks.prompt_context import PromptContext
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError


def check_restore(subject: Subject) -> None:
    """Making, applying and leaving edits changes nothing, also after an exception."""
    model, tokenizer = subject.model, subject.tokenizer
    before = snapshot(model, tokenizer)
    deltas = [_on_model(delta) for delta in subject.deltas]
    require_unchanged(before, subject, "after editing")
    for delta in deltas:
        with edited(model, delta):
            pass
        require_unchanged(before, subject, "after a scope")
    for error in (RuntimeError, KeyboardInterrupt):
        try:
            with edited(model, deltas[0]):
                model(torch.tensor([tokenizer("The band")["input_ids"]], device=subject.device))
                raise error
        except error:
            pass
        require_unchanged(before, subject, f"after a {error.__name__} in a scope")


def check_interrupt(subject: Subject) -> None:
    """An interrupt while the editor works, in its progress callback or in a forward pass, leaves nothing behind."""
    model = subject.model
    before = snapshot(model, subject.tokenizer)
    raised: list[KeyboardInterrupt] = []

    def interrupt(*_: Any) -> None:
        raised.append(KeyboardInterrupt())
        raise raised[-1]

    def edit_until_interrupted(where: str, module: nn.Module | None = None) -> bool:
        """Edit with an interrupt in the progress callback, or in a module; return whether it was raised."""
        raised.clear()
        handle = None if module is None else module.register_forward_hook(interrupt)
        try:
            subject.edit(progress=interrupt if module is None else None)
        except KeyboardInterrupt:
            pass
        else:
            require(not raised, f"the editor swallows an interrupt in {where}")
        finally:
            if handle is not None:
                handle.remove()
        require_unchanged(before, subject, f"after an interrupt in {where}")
        return bool(raised)

    if not edit_until_interrupted("the progress callback"):
        require(False, "progress is never called; call job.progress with the number of requests finished")
    # An editor in closed form may need no logits; one of contexts may not run the model at all.
    first_block = model.get_submodule(architecture_of(model).block_name(0))
    for module in (head_of(model), first_block):
        if edit_until_interrupted("a forward pass", module):
            return


def check_effect(subject: Subject) -> None:
    """Under an edit the answer to its own prompt moves; outside it is the unedited one."""
    before = subject.answers(None)
    for request, delta, unedited in zip(EDIT_REQUESTS, subject.deltas, before, strict=True):
        require(bool(delta.writes), "the delta is empty")
        (inside,) = subject.answers(delta, [request])
        require(math.isfinite(inside.logprob), f"the answer under the edit is {inside.logprob}")
        moved = largest_difference(inside, unedited)
        require(moved > 1e-3, f"the answer to {request.text!r} does not move ({moved:.1e} nats)")
    require(subject.answers(None) == before, "the unedited answers have changed")


def check_target(subject: Subject) -> None:
    """Targets get likelier under their own edits, in the mean over the requests.

    In the mean, because keys of random models are alike: an edit meant for one token moves the others too.
    """

    def mean_nll(deltas: Sequence[Delta | None]) -> float:
        """Of the targets, each under its own edit."""
        return sum(subject.target_nlls(deltas)) / len(EDIT_REQUESTS)

    aim = mean_nll([None] * len(EDIT_REQUESTS)) - 0.05
    if mean_nll(subject.deltas) < aim:
        return  # with few steps already
    after = mean_nll(subject.make_for_target().edit(subject.model, subject.tokenizer, EDIT_REQUESTS, measure=False))
    require(after < aim, f"the targets' mean NLL goes from {aim + 0.05:.3f} to {after:.3f}")


def check_batch(subject: Subject) -> None:
    """A request edited alone equals the request edited in a batch."""
    for request, in_batch in zip(EDIT_REQUESTS, subject.deltas, strict=True):
        (alone,) = subject.edit([request])
        difference = distance(alone, in_batch)
        require(difference < TOLERANCE, f"alone and in a batch differ by {difference:.1e} ({request.text!r})")


def check_padding(subject: Subject) -> None:
    """Neither the order of requests nor the tokenizer's padding side matters."""
    tokenizer = build_tokenizer(natural_tokenizer(subject.model_type))
    tokenizer.padding_side = "left"
    reported: list[int] = []
    backwards = subject.make().edit(
        subject.model, tokenizer, EDIT_REQUESTS[::-1], progress=reported.append, measure=False
    )
    require(
        sum(reported) == len(EDIT_REQUESTS),
        f"{len(EDIT_REQUESTS)} requests are reported as {reported} finished; call job.progress(len(group)) after each",
    )
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
    """A joint edit of one request is the single edit; one of several is one delta, which depends on each of them."""
    if not subject.capabilities.supports_joint:
        return
    (one,) = subject.edit(EDIT_REQUESTS[:1], joint=True)
    difference = distance(one, subject.deltas[0])
    require(difference < TOLERANCE, f"a joint edit of one request differs from the single edit by {difference:.1e}")
    reported: list[int] = []
    both = subject.edit(EDIT_REQUESTS[:2], joint=True, progress=reported.append)
    require(len(both) == 1, "a joint edit gives several deltas")
    for request, alone in zip(EDIT_REQUESTS[:2], subject.deltas[:2], strict=True):
        require(
            distance(both[0], alone) > TOLERANCE,
            f"a joint edit of two requests is the edit of {request.text!r} alone; the other one is dropped",
        )
    require(sum(reported) == 2, f"a joint edit of two requests reports {reported} finished ones")


def check_save(subject: Subject) -> None:
    """A saved edit is the same edit, bit for bit."""
    delta = subject.deltas[0]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "delta.safetensors"
        delta.save(path)
        loaded = Delta.load(path)
        require([file.name for file in Path(folder).iterdir()] == [path.name], "saving leaves other files behind")
    require(loaded.checksum() == delta.checksum(), "the checksum changes on disk")
    require(loaded.meta == delta.meta and loaded.report() == delta.report(), "metadata changes on disk")
    # From factors on another device, the product would round differently.
    saved, read = (beside_weights(subject.model, one).weights() for one in (delta, loaded))
    for name, update in saved.items():
        require(update.dtype == torch.float32, f"the update of {name} is {update.dtype}; float32 is needed")
        require(torch.equal(read[name], update), f"the update of {name} changes on disk")
    require(subject.answers(loaded) == subject.answers(delta), "answers change with the saved edit")


def check_seed(subject: Subject) -> None:
    """The same seed repeats bit for bit, sampled settings included, and the global generator is not used."""
    sampled = {name: value for name, value in subject.settings.items() if name != "context_templates"}
    runs = []
    for global_seed in (1, 2):
        with torch.random.fork_rng(devices=range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)):
            torch.manual_seed(global_seed)
            states = random_states()
            editor = subject.editor_class(sampled)
            runs += editor.edit(subject.model, subject.tokenizer, EDIT_REQUESTS[:1], measure=False)
            untouched = all(map(torch.equal, random_states(), states))
            require(untouched, "the editor draws from torch's global generator")
    require(distance(*runs) == 0.0, "two runs with the same seed differ")


def check_repeat(subject: Subject) -> None:
    """One editor object repeats an edit bit for bit: calls leave nothing in it, nor in its configuration."""
    model, tokenizer = subject.model, subject.tokenizer
    editor = subject.make()
    before = copy.deepcopy(editor.resolve_config(model, tokenizer).to_dict())
    first, second = (editor.edit(model, tokenizer, EDIT_REQUESTS[:1], measure=False)[0] for _ in range(2))
    after = editor.resolve_config(model, tokenizer).to_dict()
    changed = [name for name in before if before[name] != after[name]]
    require(
        not changed,
        f"the editor changes {first_names(changed)} of job.config, which later edits use and metadata record; work on "
        "a copy (dataclasses.replace)",
    )
    difference = distance(second, first)
    require(
        difference == 0.0,
        f"a second edit of the same request by one editor object differs by {difference:.1e}; state belongs into "
        "Delta.stream_state, not into the object",
    )


def check_layers(subject: Subject) -> None:
    """Edits are in the blocks that ``layers`` names, and follow it to another block."""
    if subject.capabilities.writes == ("context",):
        return
    layers = subject.capabilities.default_config(subject.model).edited_layers
    for delta in subject.deltas:
        _require_in_blocks(subject, delta, layers)
    others = [layer for layer in range(NUM_LAYERS) if layer not in layers] or layers
    moved = subject.make(layers=others[-1:])
    try:
        (delta,) = moved.edit(subject.model, subject.tokenizer, EDIT_REQUESTS[:1])
    except EditingError:
        return  # an artifact or another setting was made for certain blocks; refusing does not ignore `layers`
    _require_in_blocks(subject, delta, moved.default_config(subject.model).edited_layers)


def _require_in_blocks(subject: Subject, delta: Delta, layers: Sequence[int]) -> None:
    """Parameters of blocks are in these blocks; a hook edit, which may read others, names a module in one of them."""
    arch = architecture_of(subject.model)

    def blocks(names: Sequence[str]) -> set[int]:
        prefixes = {layer: f"{arch.block_name(layer)}." for layer in range(NUM_LAYERS)}
        return {layer for layer, prefix in prefixes.items() for name in names if name.startswith(prefix)}

    written = blocks(delta.parameter_names)
    hooked = set() if delta.hook_edit is None else blocks([*_texts_in(delta.hook_edit.settings)])
    require(
        written <= set(layers) and (not hooked or bool(hooked & set(layers))),
        f"with layers={list(layers)} the edit is in {'block' if len(written | hooked) == 1 else 'blocks'} "
        f"{', '.join(map(str, sorted(written | hooked)))}; use job.config.edited_layers",
    )


def _texts_in(value: Any) -> Iterator[str]:
    """All strings in JSON-able values."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, tuple, Mapping)):
        for member in value.values() if isinstance(value, Mapping) else value:
            yield from _texts_in(member)


def check_gradients_off(subject: Subject) -> None:
    """Editing works inside ``no_grad`` and ``inference_mode``, where lm-eval calls models."""
    for guard in (torch.no_grad, torch.inference_mode):
        with guard():
            (delta,) = subject.edit(EDIT_REQUESTS[:1])
        difference = distance(delta, subject.deltas[0])
        require(difference < TOLERANCE, f"inside torch.{guard.__name__} the edit differs by {difference:.1e}")


def check_training_mode(subject: Subject) -> None:
    """A model in training mode is edited in evaluation mode and gets modes and flags back."""
    model = subject.new_model()
    model.train()
    for parameter in list(model.parameters())[::2]:
        parameter.requires_grad_(False)
    before = snapshot(model, subject.tokenizer)
    deltas = subject.make().edit(model, subject.tokenizer, EDIT_REQUESTS)
    differences = changes(before, snapshot(model, subject.tokenizer))
    require(
        not differences,
        f"editing a model in training mode changes {first_names(differences)}; compute inside "
        "`with frozen(job.model)`, which switches to evaluation mode (no dropout) and back",
    )
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
    require_unchanged(before, subject, "after refusing")


def check_foreign_model(subject: Subject) -> None:
    """A delta of another model is refused before the first write."""
    delta = _on_model(subject.deltas[0])
    if not delta.writes:
        return  # a context fits every model
    other_type = "gpt2" if subject.model_type != "gpt2" else "llama"
    for model in (build_model(other_type), build_wider_model(subject.model_type)):
        model.to(subject.device)
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
        check_generation,
        check_seed,
        check_repeat,
        check_layers,
        check_gradients_off,
        check_training_mode,
        check_errors,
        check_foreign_model,
        check_diagnostics,
        check_context,
    )
)


def _on_model(delta: Delta) -> Delta:
    """The part of an edit that the model holds."""
    return delta.without_contexts or Delta()


def _require_refused(action: Callable[[], object], what: str) -> None:
    try:
        action()
    except EditingError:
        return
    require(False, f"{what} is accepted; an EditingError is needed")
