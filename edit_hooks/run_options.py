"""Options of ``edited_hf`` beside those of ``--model hf``: one table for all who read them.

From it follow the fields and checks of the constructor (:mod:`edit_hooks.lm.options.editing`), the identity and name of
a run, the columns in which runs are compared, and the table of the README.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from edit_hooks.prompt_context import AUTO

MODES = ("single", "none", "batch", "sequential", "loaded")
PLANNED = ("batch", "sequential")  # modes with edits of their own, whatever is asked

# edits: they are other edits, or are applied in another way. records: other cases. settings: a part of the resolved
# settings of the editor. answers: also those of the unedited model. nothing: speed, names, and what is reported.
Change = Literal["edits", "records", "settings", "answers", "nothing"]


@dataclass(frozen=True, kw_only=True)
class RunOption:
    """An option of a run.

    Attributes:
        default: value if it is not given.
        changes: what another value changes.
        help: a row of the README's table, in Markdown; "" if the row of the option before describes it.
        modes: modes in which it has a meaning.
        column: column of result tables that holds it; "" for one that changes edits or answers and is listed in
            ``edit_options`` or ``answer_options``.
        column_help: meaning of the column, if it holds the recorded value as it is.
        label: the value in the label of a run, with ``{}`` for it; "": after the name of the column.
        at_default: values in result files that mean the default; a run with one of them is the run without the option.
        tasks_read_it: tasks read it from their metadata: always, or in streams.
        is_text: only a text is accepted.
    """

    name: str
    default: Any
    changes: Change
    help: str = ""
    modes: tuple[str, ...] = MODES
    column: str = ""
    column_help: str = ""
    label: str = ""
    at_default: tuple[Any, ...] = (None,)
    tasks_read_it: Literal["", "always", "streams"] = ""
    is_text: bool = False


RUN_OPTIONS: tuple[RunOption, ...] = (
    RunOption(
        name="editor",
        default="r_rome",
        changes="edits",
        column="editor",
        is_text=True,
        help="see [editors](docs/editors/index.md); default `r_rome`",
    ),
    RunOption(
        name="editor_label",
        default=None,
        changes="nothing",
        column="editor_label",
        is_text=True,
        help="name of the editor in tables of results, in place of its own",
    ),
    RunOption(
        name="model_label",
        default=None,
        changes="nothing",
        column="model_label",
        is_text=True,
        help="another name of the model, which `--only model=` of results finds as well",
    ),
    RunOption(
        name="editor_args",
        default=None,
        changes="settings",
        column="settings",
        label="settings {}",
        help="settings over the shipped ones: a YAML file, or `name:value;name:value`",
    ),
    RunOption(
        name="load_edit",
        default=None,
        changes="edits",
        modes=("loaded",),
        is_text=True,
        help="a saved edit, the folder of a saved stream or an exported adapter, applied to every question",
    ),
    RunOption(
        name="mode",
        default="",
        changes="edits",
        column="mode",
        label="{}",
        at_default=(),  # results have the mode that was run
        tasks_read_it="streams",
        is_text=True,
        help="`single` (each case edited alone on the unedited model, default), `none`, `batch` (all edits at once), "
        "`sequential` (a stream); with `load_edit` it is `loaded` by itself",
    ),
    RunOption(
        name="edits",
        default=None,
        changes="edits",
        modes=PLANNED,
        column="edits",
        is_text=True,
        help="the edits of batch and stream runs: a benchmark's name or a JSON(L) file of facts, objects with "
        "`prompt`, `target_new` and, where the editor needs them, `subject`, `target_true`, `relation_id` "
        "([your own facts](docs/guides/own-facts.md); `lm-edit validate FILE` checks it). They do not depend on "
        "the evaluated documents, so `--limit`, other benchmarks and lm-eval's own tasks (`mmlu`, ...) see the same "
        "edited model",
    ),
    RunOption(
        name="num_edits",
        default=None,
        changes="edits",
        modes=PLANNED,
        column="num_edits",
        column_help="number of edited cases of a batch or stream",
        label="{} edits",
    ),
    RunOption(
        name="edit_batch_size",
        default=None,
        changes="edits",
        modes=("sequential",),
        column="edit_batch_size",
        column_help="cases per step of a stream",
        label="batches of {}",
        at_default=(None, 1),
    ),
    RunOption(
        name="group_size",
        default=None,
        changes="edits",
        modes=("batch",),
        column="group_size",
        column_help="cases per group of a batch",
        label="groups of {}",
    ),
    RunOption(
        name="compare_unedited",
        default=False,
        changes="nothing",
        help="`true`: ask lm-eval's own tasks of the unedited model, too, and report the paired difference; with one "
        "edited model only: `mode=sequential`, `mode=batch` without `group_size`, or `load_edit`",
    ),
    RunOption(
        name="measure_edits",
        default=True,
        changes="nothing",
        help="`false`: skip the report on every edit, the divergence on neutral prompts, whether it wrecks the "
        "model, and the likelihood of its target before and after; useful for very fast editors",
    ),
    RunOption(
        name="max_thought_tokens",
        default=None,
        changes="answers",
        help="with `think_end_token`: longest thought, apart from the answer, whose own limit stays that of the "
        "protocol",
    ),
    RunOption(
        name="checkpoints",
        default=(),
        changes="nothing",
        modes=("sequential",),
        tasks_read_it="streams",
        help="stream: also score after these numbers of cases, directly after each edit, and all earlier cases after "
        "every step",
    ),
    RunOption(name="immediate", default=True, changes="nothing", modes=("sequential",), tasks_read_it="streams"),
    RunOption(name="retention", default=False, changes="nothing", modes=("sequential",), tasks_read_it="streams"),
    RunOption(
        name="guard",
        default="report",
        changes="edits",
        modes=PLANNED,
        at_default=(None, "report"),
        is_text=True,
        help="stream: `report` (default) or `stop` when the edited weights have moved by more than 1.0 of their norm, "
        "or the loss on a plain sentence has risen by more than 3.0, or the model is wrecked",
    ),
    RunOption(name="guard_norm_ratio", default=1.0, changes="edits", modes=PLANNED, at_default=(None, 1.0)),
    RunOption(name="guard_loss_increase", default=3.0, changes="edits", modes=PLANNED, at_default=(None, 3.0)),
    RunOption(
        name="data",
        default=None,
        changes="records",
        column="data",
        tasks_read_it="always",
        is_text=True,
        help="`mini`, `hub`, a set of either (`hub:inter_1k`: the 1,000 rows of QAEdit's sequential tables; "
        "`mini:held_out`: facts to tune on), or a file or folder; default `mini` in the demo, else `hub`",
    ),
    RunOption(
        name="subset",
        default=None,
        changes="records",
        column="data_hash",
        at_default=(None, "all"),
        tasks_read_it="always",
        help="which of these records: `subset=3000,subset_seed=1` takes 3,000 in random order, for tasks and `edits` "
        "alike; see [Settings](docs/reference/task-settings.md)",
    ),
    RunOption(name="subset_seed", default=None, changes="records", column="data_hash", tasks_read_it="always"),
    RunOption(name="data_revision", default=None, changes="records", column="data_revision", tasks_read_it="always"),
    RunOption(
        name="bad_records",
        default=None,
        changes="records",
        column="data_hash",
        at_default=(None, "error"),
        tasks_read_it="always",
    ),
    RunOption(
        name="separator",
        default=AUTO,
        changes="edits",
        at_default=(None, AUTO),
        tasks_read_it="always",
        help="white space between prompt and target, for edits, training and questions: `auto` (default: by script, "
        "one space in English, none in Chinese), `space`, `empty`, `newline`; a record's own field `separator` comes "
        "first",
    ),
    RunOption(
        name="answer",
        default="auto",
        changes="edits",
        at_default=(None, "auto"),
        is_text=True,
        help="`auto` (per-row adapters: low-rank edits of different rows share a batch) or `patch` (updates are "
        "written to the weights, with their rounding)",
    ),
    RunOption(
        name="server",
        default=None,
        changes="edits",
        modes=("single", "none"),
        is_text=True,
        help="address of a vLLM server that answers in place of this process, with an adapter per edit, as "
        "`http://localhost:8000/v1` ([serve edits](docs/guides/serve.md))",
    ),
    RunOption(
        name="edit_context",
        default="bare",
        changes="edits",
        at_default=(None, "bare"),
        help="`bare` (default), `qa` or `chat`: edits are made on the prompt alone, in the QA instruction of the WILD "
        "protocol, or in the model's chat template; questions are asked in a chat with `--apply_chat_template`",
    ),
    RunOption(
        name="icl",
        default=False,
        changes="edits",
        column="icl",
        at_default=(None, "no"),
        help="`true`: put the in-context prompt of `ike` before every question, in addition to the editor; `fact` and "
        "`demonstrations` are its controls; `icl_args` are its settings",
    ),
    RunOption(name="icl_args", default=None, changes="settings", column="settings"),
    RunOption(
        name="family",
        default=None,
        changes="edits",
        is_text=True,
        help="`attention_output`: edit the attention's output map in place of the MLP's, for mixtures of experts; "
        "`package.module:ROW`: the names of the modules of a model in which they are not found "
        "([model families](docs/reference/models.md))",
    ),
    RunOption(
        name="store",
        default=None,
        changes="nothing",
        is_text=True,
        help="folder of finished edits and answers, or `off`; default in the user's cache folder (`LM_EDIT_CACHE`)",
    ),
    RunOption(
        name="seed",
        default=0,
        changes="settings",
        column="seed",
        label="seed {}",
        help="seed of the editor; `engine=reference` selects the plain, slow implementation used in tests; most "
        "tokens per forward pass, by default 4096 on a CPU and what fits into half of the free memory on a GPU, up to "
        "32768",
    ),
    RunOption(name="engine", default="fast", changes="nothing", is_text=True),
    RunOption(name="max_batch_tokens", default=None, changes="nothing"),
)
BY_NAME = {option.name: option for option in RUN_OPTIONS}


def default_of(name: str) -> Any:
    """The default of an option."""
    return BY_NAME[name].default
