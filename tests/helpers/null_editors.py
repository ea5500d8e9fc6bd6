"""An editor that changes nothing."""

from __future__ import annotations

from broken_editors import Sound

from edit_hooks import Delta, EditJob
from edit_hooks.editors.ft_m import FTConfig


class NoChange(Sound):
    """Every edit is the empty one."""

    def compute(self, job: EditJob[FTConfig]) -> list[Delta]:
        return [Delta() for _ in job.requests]
