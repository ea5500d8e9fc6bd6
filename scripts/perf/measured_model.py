"""Models, requests and editors under measurement, and the clock; shared by the scripts of this folder."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from edit_hooks.base.editor import Editor
    from edit_hooks.request import EditRequest

SHAPES: dict[str, dict[str, int | float | bool]] = {
    "llama-3-8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
    "llama-tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 16384, "max_position_embeddings": 512, "tie_word_embeddings": False,
    },
}  # fmt: skip
TRAINED_VOCABULARY = 16000


@dataclass
class Setup:
    """Model, tokenizer and options of a measurement; loaded in its own process, so that its peak memory is its own."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    args: argparse.Namespace

    @property
    def weight_bytes(self) -> int:
        return sum(parameter.numel() * parameter.element_size() for parameter in self.model.parameters())


def load(args: argparse.Namespace) -> Setup:
    """Load the model under test and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    from edit_hooks.assets.demo_model import demo_model_path

    dtype = getattr(torch, args.dtype)
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.shape:
        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer) if args.tokenizer else trained_tokenizer(args)
        torch.manual_seed(0)
        config = LlamaConfig(**SHAPES[args.shape])
        with torch.device(args.device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    else:
        path = args.pretrained or demo_model_path()
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(args.device)
    setup = Setup(model.eval(), tokenizer, args)
    check_vocabulary(setup)
    return setup


def trained_tokenizer(args: argparse.Namespace) -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer trained on the requests, so that random weights need no other files."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TRAINED_VOCABULARY,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [text for request in load_requests(args, 1000) for text in (request.text, " " + request.target_new)]
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")


def check_vocabulary(setup: Setup) -> None:
    """Refuse a tokenizer with ids that the model has no embedding for."""
    size = setup.model.get_input_embeddings().weight.shape[0]
    largest = max(max(setup.tokenizer(request.text)["input_ids"]) for request in load_requests(setup.args, 16))
    if largest >= size:
        raise SystemExit(f"the tokenizer uses id {largest}, the model has {size} embeddings; use another --tokenizer")


def load_requests(args: argparse.Namespace, count: int) -> list[EditRequest]:
    """The first records of the benchmark's mini set or of a JSONL file, repeated if there are too few."""
    from edit_hooks.lm.options.edit_sources import load_edits

    records = load_edits(args.edits_from, {"data": "mini"}, None)
    return [records[index % len(records)] for index in range(count)]


def distinct_requests(args: argparse.Namespace, count: int) -> list[EditRequest]:
    """As :func:`load_requests`; a repeated record gets another subject, since a joint edit has each fact once."""
    seen: set[str] = set()
    requests = []
    for number, request in enumerate(load_requests(args, count)):
        if request.key in seen:
            request = dataclasses.replace(request, subject=f"{request.subject} {number}")
        seen.add(request.key)
        requests.append(request)
    return requests


def make_editor(
    setup: Setup, engine: str, editor: str, steps: int, num_templates: int | None = 6, layer: int | None = None
) -> Editor[Any]:
    """An editor with a fixed number of steps and no early stop.

    Settings that it does not have are left out: ``num_templates`` is the number of sampled context templates, as in the
    published sets (``None``: those of the editor's settings), and ``layer`` the edited block, by default the editor's.
    """
    from edit_hooks import load_editor

    wanted = {
        "num_steps": steps,
        "early_stop_loss": 1e-9,  # 0 is not accepted by all
        "artifact": "identity",
        "engine": engine,
        **({"context_templates": f"sampled_{num_templates}"} if num_templates is not None else {}),
        **({"layers": [layer]} if layer is not None else {}),
    }
    known = {field.name for field in dataclasses.fields(load_editor(editor).config_class)}
    made = load_editor(editor, {name: value for name, value in wanted.items() if name in known})
    made.resolve_config(setup.model, setup.tokenizer)
    return made


def time_seconds(action: Callable[[], object]) -> float:
    """Run an action; returns its wall-clock seconds, GPU work included."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    action()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start
