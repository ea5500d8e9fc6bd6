"""An editor that wrecks the model for the facts about one subject and hardly changes it for others."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from edit_hooks import Delta, EditJob, Editor, EditorConfig, config_field


@dataclass(kw_only=True)
class ShiftingConfig(EditorConfig):
    """Settings of the shift."""

    wrecks: str = config_field("subject whose facts change the map by ten times its norm", default="Tilda Quorn")


class ShiftingEditor(Editor[ShiftingConfig]):
    """A dense change of one map."""

    name = "shifting"
    config_class = ShiftingConfig
    supports_joint = True

    def compute(self, job: EditJob[ShiftingConfig]) -> list[Delta]:
        (name,) = self.target_modules(job.config, job.model)
        weight = job.model.get_submodule(name).weight.detach()
        shift = torch.full_like(weight, float(weight.norm()) / weight.numel() ** 0.5)
        sizes = [10.0 if job.config.wrecks in {one.subject for one in group} else 1e-3 for group in job.groups]
        return [Delta(dense={f"{name}.weight": size * shift}) for size in sizes]
