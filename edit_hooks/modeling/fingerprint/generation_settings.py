"""The generation configuration of a checkpoint (``generation_config.json``): what of it decides a greedy answer.

Every entry counts unless it is listed here with a reason, so an entry that a later release of transformers adds counts
from the start.
"""

from __future__ import annotations

import json
from typing import Any

from edit_hooks.modeling.fingerprint.identity import ModelIdentity
from edit_hooks.utils.errors import EditingError

# Entries that change the scores of next tokens, and that this package's decoder follows -> value without effect.
FOLLOWED: dict[str, Any] = {
    "sequence_bias": None,
    "encoder_repetition_penalty": 1.0,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "min_length": 0,
    "min_new_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "remove_invalid_values": False,
    "exponential_decay_length_penalty": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
# Those of them that are about the end of a text; a text of a given length has none.
ABOUT_THE_END = ("min_length", "min_new_tokens", "forced_eos_token_id", "exponential_decay_length_penalty")
# Entries that change how a text is generated, and that this package's decoder does not follow -> value without effect.
NOT_FOLLOWED: dict[str, Any] = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "guidance_scale": 1.0,
    "watermarking_config": None,
    "penalty_alpha": 0.0,
    "dola_layers": None,
    "constraints": None,
    "force_words_ids": None,
    "token_healing": False,
    "stop_strings": None,
    "max_time": None,
}
_OF_SAMPLING = "read where tokens are drawn; lm-eval's requests are greedy unless a task asks for sampling itself"
_OF_BEAMS = "read by beam search only"
_OF_SPEED = "the same text in less time or memory"
_OF_OUTPUT = "what generate returns besides the text"
# Entries that change no greedy answer -> why.
NO_EFFECT = {
    "eos_token_id": "a part of the identity of its own",
    "bos_token_id": "prompts are tokenized by the tokenizer",
    "pad_token_id": "padding is masked",
    "decoder_start_token_id": "of encoder-decoder models",
    "max_length": "every request has a length",
    "transformers_version": "of the release that wrote the file; the installed release is a part of its own",
    "_from_model_config": "where the entries were read from",
    "_commit_hash": "where the entries were read from",
    "renormalize_logits": "subtracts the same number from all scores",
    **dict.fromkeys(
        ("do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"),
        _OF_SAMPLING,
    ),
    **dict.fromkeys(("early_stopping", "length_penalty", "diversity_penalty", "low_memory"), _OF_BEAMS),
    **dict.fromkeys(
        (
            "use_cache",
            "cache_implementation",
            "cache_config",
            "max_cache_len",
            "return_legacy_cache",
            "prefill_chunk_size",
            "compile_config",
            "disable_compile",
            "continuous_batching_config",
            "use_mtp",
            "is_assistant",
            "num_assistant_tokens",
            "num_assistant_tokens_schedule",
            "assistant_confidence_threshold",
            "prompt_lookup_num_tokens",
            "max_matching_ngram_size",
            "assistant_early_exit",
            "assistant_lookbehind",
            "target_lookbehind",
            "assistant_ensemble_weight",
            "speculation_type",
        ),
        _OF_SPEED,
    ),
    **dict.fromkeys(
        (
            "output_attentions",
            "output_hidden_states",
            "output_scores",
            "output_logits",
            "return_dict_in_generate",
        ),
        _OF_OUTPUT,
    ),
}


def generation_settings(model: Any) -> dict[str, Any]:
    """The entries of a model's generation configuration that can change a greedy answer; empty for most models."""
    config = getattr(model, "generation_config", None)
    neutral = FOLLOWED | NOT_FOLLOWED
    return {
        name: value
        for name, value in sorted((config.to_dict() if config is not None else {}).items())
        if name not in NO_EFFECT and value is not None and value != [] and value != neutral.get(name)
    }


def answering_parts(identity: ModelIdentity, model: Any) -> dict[str, Any]:
    """What an answer of a model depends on: the parts of its identity, and :func:`generation_settings` if it has any.

    Edits do not depend on the latter, so their keys are those of the identity alone.
    """
    settings = {name: json.loads(json.dumps(value, default=str)) for name, value in generation_settings(model).items()}
    return identity.to_dict() | ({"generation": settings} if settings else {})


def require_followed(model: Any) -> None:
    """Raise EditingError for a generation configuration that this package's decoder does not follow."""
    found = {name: value for name, value in generation_settings(model).items() if name in NOT_FOLLOWED}
    if found:
        entries = ", ".join(f"{name}={value!r}" for name, value in found.items())
        raise EditingError(
            f"the checkpoint's generation_config has {entries}, which greedy decoding under edits does not follow, so "
            "edited and unedited answers would come from different rules. Remove it from generation_config.json in a "
            f"copy of the checkpoint. Followed are end tokens and {', '.join(FOLLOWED)}."
        )
