"""What each option of lm-eval's Hugging Face class does on editing documents: honored, without effect, or refused.

docs/reference/harness-options.md shows :data:`PARENT_OPTIONS`, and a test compares its names with the signature of
lm-eval's class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from edit_hooks.utils.errors import EditingError

Effect = Literal["honored", "no effect", "refused"]


@dataclass(frozen=True)
class ParentOption:
    """One option of lm-eval's class.

    Attributes:
        effect: on the answers to editing documents; options without effect cannot change a number.
        note: what it does there, or why it is refused.
        accepted: values of a refused option that do no harm, as texts; ``None`` is always among them.
    """

    effect: Effect
    note: str
    accepted: tuple[str, ...] = ()


def _honored(note: str) -> ParentOption:
    return ParentOption("honored", note)


def _refused(note: str, *accepted: str) -> ParentOption:
    return ParentOption("refused", note, accepted)


PARENT_OPTIONS: dict[str, ParentOption] = {
    "pretrained": _honored("the model that is edited; without it the demo model"),
    "backend": _refused("edits are for decoder-only models", "default", "causal"),
    "revision": _honored("as for hf"),
    "subfolder": _honored("as for hf"),
    "tokenizer": _honored("for edits, questions and the chat template"),
    "truncation": _refused("prompts that do not fit are always cut at their beginning", "false"),
    "logits_cache": ParentOption("no effect", "identical questions are computed once in any case"),
    "max_length": _honored(
        "prompts are cut at their beginning to fit; a warning counts them, and their samples have `context.cut`; those "
        "that lose the text of a context edit are unscored; beyond a table of positions (GPT-2, OPT, GPT-J) refused"
    ),
    "device": _honored("without it a GPU if there is one, else the CPU"),
    "dtype": _honored("of the weights; the demo model has float32 and bfloat16"),
    "softmax_dtype": _refused("log-probabilities are computed in float32", "float32", "torch.float32"),
    "mixed_precision_dtype": _refused("edits would be computed in another precision than answers; use dtype"),
    "batch_size": _honored("a number above 1 bounds the rows of a pass; max_batch_tokens bounds its tokens"),
    "max_batch_size": ParentOption("no effect", "bounds batch_size=auto, and max_batch_tokens bounds passes here"),
    "trust_remote_code": _honored("as for hf"),
    "use_fast_tokenizer": _refused("subjects and targets are located by the character offsets of fast ones", "true"),
    "add_bos_token": _honored("for edits and questions; refused if the tokenizer does not follow it"),
    "prefix_token_id": _honored("the context of an empty prompt"),
    "parallelize": _honored("blocks on several devices; offloaded weights are refused"),
    "max_memory_per_gpu": _honored("with parallelize"),
    "max_cpu_memory": _honored("with parallelize"),
    "offload_folder": ParentOption("no effect", "offloaded weights are refused, since edits need them in place"),
    "tp_plan": _refused("edits need whole weights on a device; use parallelize=True"),
    "peft": _honored(
        "the adapter is part of the unedited model, which is that of peft: the vocabulary is not cut to the "
        "tokenizer's length, as `hf` does, and weights that the adapter has trained are not tied again. Refused: "
        "adapters around the model (prompt and prefix tuning)"
    ),
    "delta": _honored(
        "the weights are part of the unedited model; refused where embedding and head are tied, since lm-eval would "
        "add the difference twice"
    ),
    "autogptq": _refused("transformers reads GPTQ and AWQ checkpoints by pretrained= alone", "false"),
    "gptqmodel": _refused("transformers reads GPTQ and AWQ checkpoints by pretrained= alone", "false"),
    "gguf_file": _refused("name the file itself, pretrained=path/to/model.gguf, which is de-quantized once"),
    "think_end_token": _honored("the answer follows the last such token; without one a generation is unscored"),
    "enable_thinking": _honored("option of the chat template; true cannot be combined with likelihood metrics"),
    "chat_template_args": _honored("options of the chat template, for edits (edit_context=chat) and questions"),
}


def check_parent_options(options: Mapping[str, Any], parent_names: set[str]) -> None:
    """Refuse options of lm-eval's class that editing documents cannot honor.

    Args:
        parent_names: names of its options; one that :data:`PARENT_OPTIONS` lacks is refused, too.

    Raises:
        EditingError: before anything is loaded.
    """
    for name, value in options.items():
        if name not in parent_names or value is None:
            continue
        option = PARENT_OPTIONS.get(name)
        if option is None:
            raise EditingError(
                f"{name}={value!r}: this release of lm-eval has an option that edited_hf does not know, so it might be "
                "ignored on editing documents. Drop it, or update lm-eval-editing."
            )
        if option.effect == "refused" and str(value).lower() not in option.accepted:
            accepted = f" Accepted: {', '.join(option.accepted)}." if option.accepted else ""
            raise EditingError(f"{name}={value} cannot be used with edits: {option.note}.{accepted}")
