"""``lm-edit editors --pretrained``: memory and time of edits of a model that is not loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import printed_lines
from transformers import LlamaConfig

from edit_hooks.assets import demo_model
from edit_hooks.base.registry import EDITORS
from lm_edit.cli.main import main


@pytest.fixture(scope="module")
def llama_70b(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the configuration alone: there is nothing else to read."""
    folder: Path = tmp_path_factory.mktemp("llama-70b")
    LlamaConfig(
        num_hidden_layers=80,
        hidden_size=8192,
        intermediate_size=28672,
        vocab_size=128256,
        num_attention_heads=64,
        num_key_value_heads=8,
        dtype="bfloat16",
    ).save_pretrained(folder)
    return str(folder)


def test_a_card_that_is_not_here(llama_70b, capsys):
    words = ["editors", "--pretrained", llama_70b, "--bits", "4", "--device-memory", "74.5", "--teraflops", "300"]
    assert main(words) == 0
    first, *lines = printed_lines(capsys)
    assert first.endswith("weights 39.78 GiB, 4.5 bits per weight of the blocks")
    rows = {line.split()[0]: line.split() for line in lines if line.split()[:1] and line.split()[0] in EDITORS}
    assert set(rows) == set(EDITORS)
    assert rows["memit"][1:7] == ["0.00", "12.25", "1.12", "0.00", "52.03", "52.06"] and rows["memit"][-1] == "yes"
    assert rows["ft_m"][1:] == ["needs", "plain", "weights"]
    assert float(rows["rome"][9]) > 1


def test_one_editor_on_a_card_that_is_too_small_and_on_two(llama_70b, capsys):
    words = ["editors", "rome", "--pretrained", llama_70b, "--device-memory", "74.5"]
    assert main(words) == 0
    text = capsys.readouterr().out
    (row,) = [line for line in text.splitlines() if line.startswith("rome ")]
    assert row.split()[-1] == "no" and "give --teraflops" in text and "needs plain" not in text
    assert main([*words, "--devices", "2"]) == 0
    text = capsys.readouterr().out
    (row,) = [line for line in text.splitlines() if line.startswith("rome ")]
    assert row.split()[-1] == "yes" and "on 2 devices: 65.7" in text and "fits: in 74.5 GiB each" in text


def test_a_tiny_model_on_this_machine(tiny_path, capsys):
    """Statistics and the edit are in the same memory here, and its rate is measured."""
    assert main(["editors", "rome", "ft_m", "two_way", "--pretrained", str(tiny_path("llama"))]) == 0
    text = capsys.readouterr().out
    assert "holds at once, statistics and the edit too" in text and "depends on what the model answers" in text
    assert [line.split()[-1] for line in text.splitlines() if line.startswith(("rome", "ft_m"))] == ["yes", "yes"]


def test_a_model_that_cannot_be_planned_is_named(tmp_path, capsys):
    assert main(["editors", "--pretrained", str(tmp_path)]) == 2
    assert "the configuration of" in capsys.readouterr().err


@pytest.mark.model
def test_the_demo_model_has_a_name(capsys):
    if not demo_model.demo_available():
        pytest.skip("needs the extra 'demo'")
    assert main(["editors", "rome", "--pretrained", "demo", "--teraflops", "1"]) == 0
    first, *lines = printed_lines(capsys)
    assert first == "demo: weights 1.00 GiB" and any(line.startswith("rome ") for line in lines)
