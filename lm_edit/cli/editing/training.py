"""``lm-edit train`` and ``import``: training of what an editor learns for a model, and weights from elsewhere."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping
from shlex import quote
from typing import Any

from edit_hooks.utils.settings.numbers import INNER_SHARE
from lm_edit.cli.command import (
    SETTINGS_SYNTAX,
    Verb,
    add_data_arguments,
    add_model_arguments,
    data_settings,
    load_model,
    real,
    say,
    whole,
)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("editor", help="an editor that is trained, by name or as package.module:Class")
    add_model_arguments(parser)
    parser.add_argument("--edits", required=True, help="training edits: a benchmark, or a JSON(L) file of facts")
    add_data_arguments(parser)
    parser.add_argument("--validation", help="file of validation edits; default: hold out some training edits")
    parser.add_argument(
        "--validation-share", type=real(INNER_SHARE), default=0.1, help="share of edit prompts held out (default 0.1)"
    )
    parser.add_argument("--num-edits", type=whole(), help="use the first edits only; default: all")
    parser.add_argument(
        "--settings", help=f"settings of training and editor: {SETTINGS_SYNTAX}; lm-edit editors EDITOR lists them"
    )
    parser.add_argument("-o", "--out", required=True, help="folder of the artifact; an interrupted run resumes there")


def _train(args: argparse.Namespace) -> int:
    from edit_hooks.base.registry import editor_class
    from edit_hooks.training.find import trainer_class
    from edit_hooks.training.settings import resolve_settings
    from edit_hooks.training.trainer import check_training_folder
    from edit_hooks.utils.settings.options import parse_editor_args
    from lm_edit.mend_data import load_edit_data

    logging.getLogger("lm_eval.edited_hf").setLevel(logging.INFO)
    editor = editor_class(args.editor)
    trainer_type = trainer_class(editor)
    out = check_training_folder(args.out)
    settings = parse_editor_args(args.settings)
    data = load_edit_data(
        args.edits,
        data_settings(args),
        validation=args.validation,
        validation_share=args.validation_share,
        num_edits=args.num_edits,
    )
    say(_described(data.report))
    lm = load_model(args)
    config = resolve_settings(trainer_type.config_class, editor, lm.outline, settings)
    trainer_type.check_inputs(config, lm.tokenizer, data)
    trainer = trainer_type(lm.model, lm.tokenizer, config, data, out, {"model_name": str(lm.pretrained)})
    progress = trainer.run()
    first, best = progress.losses[0], next(r for r in progress.losses if r["step"] == progress.best_step)
    say(
        f"validation edit loss: unedited {first['edit']:.3f}, after training {best['edit']:.3f}, "
        f"locality {best['locality']:.4f}; best step {progress.best_step} of {progress.step}"
    )
    _say_use(args.editor, str(out))
    return 0


def _described(report: Mapping[str, Any]) -> str:
    """A line about the edits: their numbers on both sides, and those that are used once or not at all."""
    further = {"repeated": "repeated ones dropped", "left_out_for_validation": "left out as validation edits"}
    parts = [f"{report[name]} {text}" for name, text in further.items() if name in report]
    parts += [f"{count} left out: {reason}" for reason, count in report.get("left_out", {}).items()]
    counts = f"training edits: {report['num_edits']}, validation edits: {report['num_validation']}"
    return counts + (f" ({'; '.join(parts)})" if parts else "")


def _add_import_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("editor", help="an editor that is trained, by name or as package.module:Class")
    add_model_arguments(parser)
    parser.add_argument(
        "--weights",
        required=True,
        help="mend: a safetensors file with the names of MEND's release; serac: a folder with the folders classifier "
        "and counterfactual, as save_pretrained writes them",
    )
    parser.add_argument("--settings", help=f"settings of the editor under which they were trained: {SETTINGS_SYNTAX}")
    parser.add_argument("-o", "--out", required=True, help="new folder of the artifact")


def _import(args: argparse.Namespace) -> int:
    from edit_hooks.base.registry import editor_class
    from edit_hooks.training.find import trainer_class
    from edit_hooks.training.importing import check_import, import_artifact
    from edit_hooks.training.settings import resolve_settings
    from edit_hooks.utils.settings.options import parse_editor_args

    editor = editor_class(args.editor)
    trainer, settings = trainer_class(editor), parse_editor_args(args.settings)
    check_import(args.weights, args.out)
    lm = load_model(args)
    resolve_settings(trainer.config_class, editor, lm.outline, settings)  # before the weights of the model are loaded
    out = import_artifact(args.editor, lm.model, lm.tokenizer, args.weights, args.out, settings, str(lm.pretrained))
    _say_use(args.editor, str(out))
    return 0


def _say_use(editor: str, out: str) -> None:
    use = quote(f"editor={editor},editor_args=artifact:{out}")
    say(f"use it: lm_eval --model edited_hf --model_args {use} ...")


VERBS: dict[str, Verb] = {
    "import": Verb(
        "import the network of an editor (mend, serac) that was trained elsewhere", _add_import_arguments, _import
    ),
    "train": Verb(
        "train the network of an editor (mend, serac) for a model, or resume the training", _add_arguments, _train
    ),
}
