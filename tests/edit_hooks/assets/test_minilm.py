"""The packaged sentence embedder: foreign code is not run, pinned hashes decide, the model card's numbers come out."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel

from edit_hooks import EditingError, load_editor
from edit_hooks.assets import minilm
from edit_hooks.contract.tiny_models import build_model
from edit_hooks.in_context.embeddings import EMBEDDERS, most_similar

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "lake", "lies", "in", "peru", "she", "plays", "harp", "a"]
TEXTS = ["the lake lies in peru", "she plays a harp", "harp", "", "peru " * 400]


def bert_tokenizer() -> Tokenizer:
    """Cuts and pads to 128 as the published file does."""
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.enable_truncation(128)
    tokenizer.enable_padding(length=128)
    return tokenizer


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An importable package whose code must not run, with a BERT of two blocks; returns its model folder."""
    folder = tmp_path / "site" / "fake_minilm" / "model"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("raise RuntimeError('the code of the package was run')\n")
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = BertModel(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
    save_file(dict(model.state_dict()), folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    bert_tokenizer().save(str(folder / "tokenizer.json"))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(minilm, "PACKAGE", "fake_minilm")
    hashes = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in minilm.FILES}
    monkeypatch.setattr(minilm, "FILES", hashes)
    return folder


def test_rows_are_the_means_of_the_token_states_at_unit_length(package: Path) -> None:
    state = torch.get_rng_state()
    rows = minilm.load_minilm()(TEXTS)
    assert torch.equal(torch.get_rng_state(), state) and "fake_minilm" not in sys.modules
    model = BertModel.from_pretrained(package).eval()
    tokenizer = bert_tokenizer()
    tokenizer.no_padding()
    tokenizer.enable_truncation(256)
    for text, row in zip(TEXTS, rows, strict=True):
        ids = torch.tensor([tokenizer.encode(text).ids])
        with torch.no_grad():
            mean = model(input_ids=ids).last_hidden_state[0].mean(0)
        torch.testing.assert_close(row, mean / mean.norm(), atol=1e-5, rtol=0)
    assert len(tokenizer.encode(TEXTS[-1]).ids) == 256


@pytest.mark.parametrize("name", list(minilm.FILES))
def test_a_damaged_file_is_refused_and_named(package: Path, name: str) -> None:
    content = bytearray((package / name).read_bytes())
    content[-1] ^= 1
    (package / name).write_bytes(content)
    with pytest.raises(EditingError, match=rf"sha256 differs.*{name}.*force-reinstall"):
        minilm.load_minilm()
    (package / name).unlink()
    with pytest.raises(EditingError, match=rf"lacks {name}.*force-reinstall"):
        minilm.load_minilm()


def test_what_is_not_installed_is_said_in_one_line_before_any_model_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minilm, "PACKAGE", "no_such_package")
    model = build_model("gpt2")
    for editor in (load_editor("ike"), load_editor("ice", {"embedder": "minilm"})):
        with pytest.raises(EditingError, match=r'pip install "lm-eval-editing\[ike\]"') as caught:
            editor.check_settings(model)
        assert "\n" not in str(caught.value)
    for editor in (load_editor("ice"), load_editor("ike", {"embedder": "words"})):
        editor.check_settings(model)


needs_package = pytest.mark.skipif(
    any(minilm.packaged_file(minilm.PACKAGE, "model", name) is None for name in minilm.FILES),
    reason="needs the packaged sentence embedder (extra: ike)",
)


@needs_package
def test_the_published_model_tells_alike_from_unlike() -> None:
    """Reference values: sentence-transformers 6.2 with the same files, float32."""
    embed = EMBEDDERS["minilm"]()
    rows = embed(
        [
            "Port Elna is the capital of Dravonia.",
            "The capital of Dravonia is Port Elna.",
            "She plays the harp.",
            "A musician performs on a string instrument.",
        ]
    )
    assert rows.shape == (4, 384) and torch.allclose(rows.norm(dim=1), torch.ones(4), atol=1e-5)
    alike = rows @ rows.T
    reference = {(0, 1): 0.9924, (2, 3): 0.5613, (0, 2): 0.0315, (0, 3): 0.0292, (1, 2): 0.0407, (1, 3): 0.0271}
    for (one, other), value in reference.items():
        assert float(alike[one, other]) == pytest.approx(value, abs=1e-3)
    texts = ["Where is the river?", "The queen rules the land.", "Which instrument does she play?"]
    (nearest,) = most_similar("minilm", "Mina Okabe is a famous violinist", texts, 1)
    assert nearest.number == 2


@needs_package
def test_ike_takes_it_by_default() -> None:
    editor = load_editor("ike")
    assert editor.config_class().embedder == "minilm"
