"""Post-processing editors: the configuration of the base editor, and refused combinations."""

from __future__ import annotations

import pytest
from model_shapes import MODELS, model_like

from edit_hooks import EditingError, load_editor


def test_a_wrapper_uses_the_file_of_its_base() -> None:
    model = model_like(MODELS["gpt2-xl"])
    resolved = load_editor("rect").default_config(model)
    assert resolved.layers == [13, 14, 15, 16, 17] and resolved.base_settings["moment_weight"] == 20000
    resolved = load_editor("prune", {"base": "rome", "layers": [3]}).default_config(model)
    assert resolved.layers == [3] and resolved.base_settings["layers"] == [3]


def test_unusable_bases_are_refused() -> None:
    with pytest.raises(EditingError, match="itself has another editor as its base"):
        load_editor("rect", {"base": "prune"})
    with pytest.raises(EditingError, match="changes hooks; an editor of weights"):
        load_editor("rect", {"base": "grace"})
    with pytest.raises(EditingError, match=r"lrr.*Did you mean 'lr'"):
        load_editor("rect", {"base_settings": {"lrr": 0.1}})
    with pytest.raises(EditingError, match="Did you mean 'memit'"):
        load_editor("prune", {"base": "memitt"})
