"""``lm-edit train-mend``: training of MEND's hyper-network."""

from __future__ import annotations

import argparse
import logging

from edit_hooks.utils.numbers import INNER_SHARE
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
    add_model_arguments(parser)
    parser.add_argument("--edits", required=True, help="training edits: a benchmark, or a JSON(L) file")
    add_data_arguments(parser)
    parser.add_argument("--validation", help="file of validation edits; default: hold out some training edits")
    parser.add_argument(
        "--validation-share", type=real(INNER_SHARE), default=0.1, help="share of edits held out (default 0.1)"
    )
    parser.add_argument("--num-edits", type=whole(), help="use the first edits only; default: all")
    parser.add_argument("--settings", help=f"settings of training and editor: {SETTINGS_SYNTAX}")
    parser.add_argument("--out", required=True, help="folder of the artifact; an interrupted run resumes there")


def _run(args: argparse.Namespace) -> int:
    from edit_hooks.training.mend_config import training_config
    from edit_hooks.training.mend_trainer import Trainer, check_training_folder
    from edit_hooks.utils.options import parse_editor_args
    from lm_edit.mend_data import load_edit_data

    logging.getLogger("lm_eval.edited_hf").setLevel(logging.INFO)
    out = check_training_folder(args.out)
    settings = parse_editor_args(args.settings)
    data = load_edit_data(
        args.edits,
        data_settings(args),
        validation=args.validation,
        validation_share=args.validation_share,
        num_edits=args.num_edits,
    )
    lm = load_model(args)
    config = training_config(lm.outline, settings)
    trainer = Trainer(lm.model, lm.tokenizer, config, data, out, {"model_name": str(lm.pretrained)})
    progress = trainer.run()
    first, best = progress.losses[0], next(r for r in progress.losses if r["step"] == progress.best_step)
    say(
        f"validation edit loss: unedited {first['edit']:.3f}, after training {best['edit']:.3f}, "
        f"locality {best['locality']:.4f}; best step {progress.best_step} of {progress.step}"
    )
    say(f"use it: lm_eval --model edited_hf --model_args editor=mend,editor_args=artifact:{out} ...")
    return 0


VERBS: dict[str, Verb] = {
    "train-mend": Verb("train MEND's hyper-network for a model, or resume the training", _add_arguments, _run),
}
