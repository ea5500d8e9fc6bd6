"""The parts of lm-eval's result and sample files that this package reads, with their types.

Parts that are not here may be anything: lm-eval and other packages add some.
"""

from __future__ import annotations

from lm_edit.results.files.shape import (
    COUNT,
    FINITE,
    FLAG,
    NUMBER,
    SCALAR,
    TEXT,
    WHOLE,
    anything,
    each,
    either,
    fields,
    listed,
    maybe,
)

_OPTION = maybe(either(FINITE, FLAG, TEXT))  # of a task or of `edited_hf`
_OBJECT = each(anything)

_METRIC = fields(
    {
        "metric": either(TEXT, anything),  # stock tasks may have a function, saved as a text
        "higher_is_better": maybe(FLAG),
        "aggregation": maybe(TEXT),
        "population": maybe(TEXT),
        "role": maybe(TEXT),
        "chance": maybe(FINITE),
        "rate": maybe(FLAG),
        "from": maybe(TEXT),
    }
)
_DATA_SOURCE = fields(
    {
        "data": maybe(TEXT),
        "sha256": maybe(TEXT),
        "commit": maybe(TEXT),
        "revision": maybe(TEXT),
        "hub_id": maybe(TEXT),
        "subset": maybe(either(TEXT, COUNT)),
        "subset_seed": maybe(COUNT),
        "records": maybe(COUNT),
    }
)
_TASK = fields(
    {
        "metadata": maybe(
            fields(
                {
                    "config_source": maybe(TEXT),
                    "data_source": maybe(_DATA_SOURCE),
                    "data_revision": _OPTION,
                    "judge": maybe(either(TEXT, _OBJECT)),
                    "own_judges": maybe(each(either(TEXT, _OBJECT))),
                }
            )
        ),
        "settings": maybe(_OBJECT),
        "metric_list": maybe(listed(_METRIC)),
        "other_metrics": maybe(listed(_METRIC)),
        "filter_list": maybe(
            listed(fields({"name": maybe(TEXT), "filter": maybe(listed(fields({"function": maybe(TEXT)})))}))
        ),
        "generation_kwargs": maybe(_OBJECT),
        "decodings": maybe(listed(_OBJECT)),
        "output_type": maybe(TEXT),
    }
)
_IDENTITY = fields(
    {
        "weights": maybe(TEXT),
        "model": maybe(fields({"class": TEXT})),
        "config": maybe(_OBJECT),
        "generation": maybe(_OBJECT),
        "adapters": maybe(either(_OBJECT, listed(anything))),
        "tokenizer": maybe(fields({"class": TEXT})),
        "hooks": maybe(listed(anything)),
    }
)
_EDITED_HF = fields(
    {
        "editor": maybe(TEXT),
        "editor_label": maybe(TEXT),
        "model_label": maybe(TEXT),
        "mode": TEXT,
        "pretrained": TEXT,
        "peft": maybe(TEXT),
        "answer_options": maybe(_OBJECT),
        "load_edit": maybe(TEXT),
        "loaded_edit": maybe(fields({"checksum": maybe(TEXT)})),
        "data": maybe(TEXT),
        "data_revision": _OPTION,
        "bad_records": maybe(TEXT),
        "subset": maybe(either(TEXT, COUNT)),
        "subset_seed": maybe(COUNT),
        "icl": maybe(TEXT),
        "edit_context": maybe(either(fields({"name": TEXT}, ("name",)), TEXT)),
        "seed": maybe(COUNT),
        "answer": maybe(TEXT),
        "edits": maybe(TEXT),
        "edits_data": maybe(TEXT),
        "edits_digest": maybe(TEXT),
        "num_edits": maybe(COUNT),
        "edit_batch_size": maybe(COUNT),
        "group_size": maybe(COUNT),
        "max_thought_tokens": maybe(COUNT),
        "guard": maybe(TEXT),
        "guard_norm_ratio": maybe(FINITE),
        "guard_loss_increase": maybe(FINITE),
        "editor_config": maybe(fields({"seed": maybe(COUNT)})),
        "drawn_settings": maybe(_OBJECT),
        "editor_writes": maybe(listed(TEXT)),
        "settings_origin": maybe(
            fields({**dict.fromkeys(("guesses", "given", "shipped"), maybe(listed(TEXT))), "moved": maybe(FLAG)})
        ),
        "about_checkpoint": maybe(TEXT),
        "demo": maybe(FLAG),
        "model_identity": maybe(_IDENTITY),
        "steps": maybe(listed(_OBJECT)),
        "versions": maybe(each(maybe(TEXT))),
    },
    required=("mode",),
)
_CONFIG = fields(
    {
        "model": maybe(TEXT),
        "model_args": maybe(either(_OBJECT, TEXT)),
        "model_dtype": maybe(TEXT),
        "limit": maybe(FINITE),
        "samples": maybe(each(maybe(listed(either(WHOLE, TEXT))))),
        "bootstrap_iters": maybe(COUNT),
        "place_digests": maybe(each(TEXT)),
        "edited_hf": maybe(_EDITED_HF),
    }
)
RESULT_FILE = fields(
    {
        "results": each(each(SCALAR)),
        "groups": maybe(each(anything)),
        "configs": each(_TASK),
        "versions": each(maybe(either(TEXT, FINITE))),
        "config": _CONFIG,
        "n-samples": each(fields({"original": COUNT, "effective": COUNT}, ("effective",))),
        "n-shot": maybe(each(maybe(COUNT))),
        "higher_is_better": maybe(each(maybe(each(maybe(FLAG))))),
        "group_subtasks": maybe(each(maybe(listed(TEXT)))),
        "task_hashes": maybe(each(TEXT)),
        "chat_template_sha": maybe(TEXT),
        "system_instruction_sha": maybe(TEXT),
        "lm_eval_version": maybe(TEXT),
        "transformers_version": maybe(TEXT),
        "total_evaluation_time_seconds": maybe(either(NUMBER, TEXT)),
        "anomalies": maybe(listed(fields({"kind": TEXT, "text": TEXT}, ("kind", "text")))),
        "unedited_comparison": maybe(
            fields({"tasks": listed(TEXT), "not_compared": each(TEXT)}, ("tasks", "not_compared"))
        ),
        "merged_from": maybe(listed(TEXT)),
    },
    required=("results", "configs", "versions", "config", "n-samples"),
)

SAMPLE = fields(
    {
        "doc_id": COUNT,
        "arguments": each(each(anything)),
        "resps": listed(anything),
        "filter": TEXT,
        "metrics": listed(TEXT),
        "doc_hash": TEXT,
        "prompt_hash": TEXT,
        "target_hash": TEXT,
        "unscored_reason": maybe(each(maybe(TEXT))),
        "edit": maybe(_OBJECT),
        "unedited": maybe(_OBJECT),
    },
    required=("doc_id",),
)
EDITING_DOCUMENT = fields(
    {
        "case_id": maybe(either(TEXT, WHOLE)),
        "category": maybe(TEXT),
        "unusable": maybe(TEXT),
        "edit_requests": maybe(
            listed(
                fields(
                    {"prompt": TEXT, "subject": maybe(TEXT), "target_new": TEXT, "target_true": maybe(TEXT)},
                    required=("prompt", "target_new"),
                )
            )
        ),
        "probes": listed(
            fields(
                {
                    "kind": TEXT,
                    "prompt": TEXT,
                    "targets": listed(TEXT),
                    "generate": FLAG,
                    "gold": TEXT,
                    "question": TEXT,
                    "ask": TEXT,
                    "ask_generation": maybe(TEXT),
                    "num_draws": COUNT,
                },
                required=("kind", "prompt"),
            )
        ),
    }
)
