"""MyPromptEditor: an edit that acts through the prompt, here the new fact before every question.

Delete this file and its lines in pyproject.toml if your edit changes weights or activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from edit_hooks import POSITIVE, ContextEdit, Delta, EditJob, Editor, EditorConfig, EditRequest, config_field


@dataclass(kw_only=True)
class MyPromptConfig(EditorConfig):
    """Settings of MyPromptEditor, beside those that every editor has."""

    num_facts: int = config_field("facts before a question, the most similar ones", within=POSITIVE, default=1)


class MyPromptEditor(Editor[MyPromptConfig]):
    """States the fact; the model and the questions of the benchmark stay as they are."""

    name = "my_prompt_editor"
    config_class = MyPromptConfig
    needs_subject = False
    supports_joint = True  # the facts of several requests in one delta
    writes = ("context",)
    # The model's own answers decide whether a prompt helps: a tiny random model does not read.
    contract_exemptions: ClassVar[Mapping[str, str]] = {"target": "a random model does not read its prompt"}

    def compute(self, job: EditJob[MyPromptConfig]) -> list[Delta]:
        deltas = []
        for group in job.groups:
            deltas.append(Delta(contexts=tuple(_stated(job.config, request) for request in group)))
            job.progress(len(group))
        return deltas


def _stated(config: MyPromptConfig, request: EditRequest) -> ContextEdit:
    """The fact of a request: its bare text, without the context in which weights are edited."""
    return ContextEdit(
        prompt=request.bare_text,
        target_new=request.target_new,
        separator=request.without_context.seam,
        num_facts=config.num_facts,
    )
