"""``editor_args=auto``: layers and step of an editor for a model that no settings are shipped for.

Three looks at the model, on a dozen facts that are embedded for this purpose:

- a short causal trace (:mod:`edit_hooks.locate.tracing.causal_trace`): the blocks whose MLPs carry a fact at its
  subject;
- the norms of the MLPs' outputs there: a block whose output is many times that of the others is a sink, and an edit of
  it wrecks the model, so it is no candidate;
- a search (:mod:`lm_edit.tuning.search`) over the blocks that are left, those by depth, and the step.

All of it in the text in which the run makes its edits (``edit_context``), as the chat template of an instruct model.
The result is stored under the identity of the model, with the evidence. ``lm-edit tune`` searches more.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedTokenizerBase

from edit_hooks.base.registry import load_editor
from edit_hooks.lm.asking.contexts import edit_context_of
from edit_hooks.lm.model import EditedHFLM
from edit_hooks.locate.context_templates import BARE as BARE_TEMPLATE
from edit_hooks.locate.tracing.causal_trace import TraceSettings, trace_facts
from edit_hooks.locate.values.key_reader import read_rows
from edit_hooks.locate.values.rows import rewriting_row
from edit_hooks.modeling.architectures import num_layers, unwrapped
from edit_hooks.modeling.support import editable_blocks
from edit_hooks.prompt_context import BARE, PromptContext
from edit_hooks.self_check.run import require_support
from edit_hooks.store.store import Description, Store
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.storage.hashing import code_fingerprint
from edit_hooks.utils.storage.locks import locked
from lm_edit.tuning.cases import in_context, load_cases
from lm_edit.tuning.search import search
from lm_edit.tuning.settings_file import SearchRecord, write_settings
from lm_eval_tasks.common.records.cases import Case

log = get_logger("lm_eval.edited_hf")

KIND = "auto_settings"
FACTS = {"data": "mini:held_out"}  # of BAKE: no sample that is evaluated has them
NUM_FACTS, NUM_TRACED = 12, 4
NUM_CANDIDATES = 4  # with a dozen facts about 25 edits, and some to find the step
SHORT_TRACE = TraceSettings(samples=2, answer="predicted")
SINK = 10.0  # times the median norm of the MLPs' outputs
APART = 2  # blocks between two candidates of one block
FEWER_TEMPLATES = {"sampled_21": "sampled_6"}  # a third of the time of an edit


class Evidence(NamedTuple):
    """What the looks at a model have shown, JSON-able.

    Attributes:
        effects: average indirect effect of each block's MLPs at the subject's last token; empty if nothing is traced.
        norms: mean norm of each editable block's MLP output there, by block.
        sinks: blocks that are no candidates.
        layers: the candidates.
    """

    effects: list[float]
    norms: dict[int, float]
    sinks: list[int]
    layers: list[list[int]]


def auto_settings(
    pretrained: object,
    options: Mapping[str, Any],
    editor: str,
    seed: int,
    store: Store | None,
    edit_context: str = "bare",
) -> dict[str, Any] | str:
    """The settings of an editor for a model: none if settings are shipped, else stored or found now.

    Args:
        pretrained, options: of lm-eval's Hugging Face class, for the unedited model.
        store: where settings are kept; ``None``: they are found again in every run.
        edit_context: in which edits are made and questions asked while settings are searched.

    Returns:
        The settings, or with a store the YAML file that holds them.

    Raises:
        EditingError: the search finds nothing that takes; and as :func:`lm_edit.tuning.search.search`.
    """
    lm = EditedHFLM(pretrained=pretrained, **options, mode="none")
    made = load_editor(editor, {"seed": seed})
    if made.writes == ("context",) or not made.settings_origin(lm.outline).is_guess:
        log.info("editor_args=auto: settings of %s are shipped for this model, or it has none to find.", editor)
        return {}
    require_support(lm.model)
    context = edit_context_of(edit_context, lm.tokenizer, lm.chats.template)
    inputs = {"editor": made.key_identity, "seed": seed, "context": context.to_dict()}
    description = Description(
        what="auto settings", model=lm.identity.to_dict(), code=code_fingerprint(__name__), inputs=inputs
    )
    if store is None:
        return _find(lm, editor, seed, context, None)["settings"]
    path = store.root / KIND / f"{description.key}.yaml"
    waiting = f"another process finds the settings of {editor}."
    with locked(store.root / KIND / f"{description.key}.lock", waiting, store.root):
        found = store.load_json(KIND, description)
        if found is None or not path.is_file():
            found = _find(lm, editor, seed, context, path)
            store.save_json(KIND, description, found)
    for line in found["evidence"]:
        log.info("editor_args=auto: %s", line)
    return str(path)


def _find(lm: EditedHFLM, editor: str, seed: int, context: PromptContext, path: Path | None) -> dict[str, Any]:
    """Find settings; the record for the store: ``settings``, and ``evidence`` in lines."""
    bare = [case for case in load_cases("bake", FACTS) if case.neighbors][:NUM_FACTS]
    cases = in_context(bare, context)
    evidence = look(lm.model, lm.tokenizer, editor, cases, seed)
    shared: dict[str, Any] = {"seed": seed}
    templates = getattr(load_editor(editor, shared).default_config(lm.model), "context_templates", None)
    if isinstance(templates, str) and templates in FEWER_TEMPLATES:
        shared["context_templates"] = FEWER_TEMPLATES[templates]
    vary = {"layers": evidence.layers} if evidence.layers else {}
    outcome = search(
        lm.model, lm.tokenizer, editor, shared, vary, cases, num=NUM_CANDIDATES, seed=seed, announce=log.info
    )
    if not outcome.found:
        raise EditingError(
            f"editor_args=auto: no settings of {editor} among {len(outcome.trials)} make an edit of this model take. "
            "Try lm-edit tune with other candidates (--layers, --vary), or another editor."
        )
    best = outcome.trials[0]
    if path is not None:
        asked = "" if context == BARE else ", edited and asked in edit_context"
        facts = f"{len(best.facts)} facts of bake (data={FACTS['data']}{asked})"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_settings(path, best, SearchRecord(editor, str(lm.pretrained), facts, cases, seed))
    settings = {name: value for name, value in best.settings.items() if name != "seed"}
    lines = [*_describe(evidence), *(f"{trial.score:.3f}: {_text(trial.settings)}" for trial in outcome.trials[:5])]
    return {"settings": settings, "evidence": [*lines, f"chosen: {_text(best.settings)}"]}


def look(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, editor: str, cases: Sequence[Case], seed: int = 0
) -> Evidence:
    """Trace a few facts, measure norms, and name candidate blocks; none for an editor that edits most blocks."""
    requests = [case.request for case in cases if case.request.subject is not None][:NUM_TRACED]
    trace = trace_facts(model, tokenizer, requests, SHORT_TRACE, quiet=True)
    effects: list[float] = trace.effects["mlp"].get("subject_last", {}).get("mean", [])
    blocks = editable_blocks(model)
    rows = [rewriting_row(tokenizer, request, BARE_TEMPLATE, "subject_last") for request in requests]
    outputs = read_rows(model, rows, blocks, blocks[-1]).outputs_RD if blocks else {}
    norms = {block: float(outputs[block].float().norm(dim=1).mean()) for block in blocks}
    sinks = [block for block in blocks if norms[block] > SINK * statistics.median(norms.values())]
    own = load_editor(editor, {"seed": seed}).default_config(unwrapped(model)).layers or []
    layers = candidate_layers(effects, [block for block in blocks if block not in sinks], own, num_layers(model))
    return Evidence([round(effect, 4) for effect in effects], norms, sinks, layers)


def candidate_layers(
    effects: Sequence[float], blocks: Sequence[int], own: Sequence[int], depth: int
) -> list[list[int]]:
    """Two places by their effect and the editor's own, each of as many neighboring blocks as it edits.

    Args:
        blocks: those that may be edited.
    """
    size = len(own)
    if not effects or not size or size > depth // 2:
        return []
    runs = [
        list(range(last - size + 1, last + 1))
        for last in blocks
        if all(block in blocks for block in range(last - size + 1, last + 1))
    ]
    best = sorted(runs, key=lambda run: sum(effects[block] for block in run), reverse=True)
    chosen = best[:1] + [run for run in best[1:] if abs(run[-1] - best[0][-1]) > APART][:1]
    return chosen + ([list(own)] if list(own) in runs and list(own) not in chosen else [])


def _describe(evidence: Evidence) -> list[str]:
    """The evidence in lines."""
    lines = []
    if evidence.effects:
        peaks = sorted(range(len(evidence.effects)), key=lambda block: evidence.effects[block], reverse=True)[:3]
        text = ", ".join(f"block {block} ({evidence.effects[block]:+.3f})" for block in peaks)
        lines.append(f"largest effects of MLPs at the subject, {NUM_TRACED} facts traced: {text}")
    for block in evidence.sinks:
        lines.append(f"block {block} is left out: its MLP's output has norm {evidence.norms[block]:.3g} there")
    lines.append(f"candidate blocks: {', '.join(map(str, evidence.layers)) or 'those of the editor'}")
    return lines


def _text(settings: Mapping[str, Any]) -> str:
    return "; ".join(f"{name}:{value}" for name, value in settings.items() if name != "seed")
