"""Adapters of ``peft=``: the model that peft itself loads, or a refusal with the reason.

lm-eval's class differs from peft in two points. It resizes the embedding to the length of the tokenizer, which drops
trained rows and unused tokens of the vocabulary, and it ties the weights again when the adapter has wrapped one of
them, which loses the adapter's copy or ends in a KeyError.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from edit_hooks.deltas.saving.peft_rules import check_expressions
from edit_hooks.deltas.schema import of_file
from edit_hooks.modeling.architectures import input_device, unwrapped
from edit_hooks.utils.errors import EditingError

if TYPE_CHECKING:  # an optional dependency
    from peft import PeftModel

PREFIX = "base_model.model."  # of peft's tensor names
# A few tokens, among which an adapter's own (those that switch it on) are put.
PROBE_TOKENS = (0, 1, 2, 3)


def load_adapter(model: PreTrainedModel, source: str, revision: str | None, num_tokens: int) -> PeftModel:
    """Put an adapter into a model.

    The vocabulary has the rows with which the adapter was saved. Without such rows it grows if the tokenizer has more
    tokens, and never shrinks: unused tokens of a padded vocabulary are part of every distribution.

    Args:
        source: folder or hub id of the adapter.
        num_tokens: of the tokenizer.

    Raises:
        EditingError: for files that do not belong together, and adapters that peft cannot put into this model.
    """
    from peft import PeftConfig, PeftModel, load_peft_weights

    config = PeftConfig.from_pretrained(source, revision=revision).to_dict()
    lists = {name: sorted(value) for name, value in config.items() if isinstance(value, set)}
    with of_file(f"the configuration of {source}"):
        check_expressions({**config, **lists}, [name for name, _ in model.named_modules()])
    stored = load_peft_weights(source, device="cpu", revision=revision)
    rows, known = model.get_input_embeddings().weight.shape[0], set(_stored_rows(model, stored))
    if len(known) > 1:
        raise EditingError(
            f"the adapter {source} has vocabularies of {' and '.join(map(str, sorted(known)))} tokens; its tensors do "
            "not belong together."
        )
    wanted = known.pop() if known else max(rows, num_tokens)
    if wanted != rows:
        model.resize_token_embeddings(wanted, mean_resizing=False)
    wrapped = PeftModel.from_pretrained(model, source, revision=revision)
    _require_complete(wrapped, stored, source)
    return wrapped


def _stored_rows(model: PreTrainedModel, stored: Mapping[str, torch.Tensor]) -> Iterator[int]:
    """The sizes of the vocabulary in an adapter's tensors."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    names = [name for name, module in model.named_modules() if any(module is end for end in ends)]
    for key, tensor in stored.items():
        for name in names:
            part = key.removeprefix(PREFIX).removeprefix(f"{name}.")
            if part == key.removeprefix(PREFIX):
                continue
            if part in ("weight", "base_layer.weight", "modules_to_save.weight") or part.endswith("lora_B.weight"):
                yield tensor.shape[0]
            elif part.endswith("lora_embedding_A"):
                yield tensor.shape[1]


def _require_complete(model: PeftModel, stored: Mapping[str, torch.Tensor], source: str) -> None:
    """Refuse a peft model whose adapter and tensors do not belong together; peft only warns.

    Raises:
        EditingError: the adapter has parameters that are not in the file, or the file some that the adapter lacks.
    """
    from peft import get_peft_model_state_dict
    from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING

    (config,) = model.peft_config.values()
    prefix = PEFT_TYPE_TO_PREFIX_MAPPING.get(config.peft_type)
    if not prefix:  # prompt tuning: one tensor, which peft requires
        return
    loaded = get_peft_model_state_dict(model, save_embedding_layers=False)
    missing = loaded.keys() - stored.keys()
    # Embeddings are saved beside the adapter whenever peft finds that it touches them.
    foreign = {name for name in stored.keys() - loaded.keys() if prefix in name}
    if differing := sorted(missing | foreign):
        what = "lacks" if differing[0] in loaded else "is of another base model: it has"
        raise EditingError(f"the adapter {source} {what} {differing[0]} (and {len(differing) - 1} more differ).")


@torch.no_grad()
def refuse_outer_adapters(model: nn.Module) -> None:
    """Refuse adapters that act in the wrapper around a model, as virtual tokens before the prompt.

    Edits and questions run the model inside, whose modules hold all other adapters.

    Raises:
        EditingError: the wrapper and the model inside give different logits.
    """
    inner = unwrapped(model)
    if inner is model:
        return
    configs: Mapping[str, Any] = getattr(model, "peft_config", {})
    own = [token for config in configs.values() for token in getattr(config, "alora_invocation_tokens", None) or ()]
    ids_1T = torch.tensor([[*PROBE_TOKENS, *own, *PROBE_TOKENS]], device=input_device(inner))
    is_training = model.training
    try:
        model.eval()
        outside, inside = (one(input_ids=ids_1T).logits for one in (model, inner))
    finally:
        model.train(is_training)
    if outside.shape != inside.shape or not torch.allclose(outside, inside, equal_nan=True):
        kinds = ", ".join(
            sorted({str(getattr(config.peft_type, "value", config.peft_type)) for config in configs.values()})
        )
        raise EditingError(
            f"the adapter ({kinds}) acts around the model rather than in its modules, as virtual tokens before every "
            "prompt do, so edits cannot be made under it. Merge it, if it can be merged, or use --model hf for the "
            "unedited model on lm-eval's own tasks."
        )
