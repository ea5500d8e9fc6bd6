"""Module names of the tiny models, by model type, from their structure alone."""

from __future__ import annotations

from edit_hooks.contract.tiny_models import ALL_MODEL_TYPES, build_outline
from edit_hooks.modeling.architectures import Architecture, architecture_of

ARCHITECTURES: dict[str, Architecture] = {name: architecture_of(build_outline(name)) for name in ALL_MODEL_TYPES}
