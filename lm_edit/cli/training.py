"""``lm-edit train-mend``: editors that have to be trained."""

from __future__ import annotations

import argparse
import logging

from lm_edit.cli.command import Verb, model_arguments, model_options


def _train_arguments(parser: argparse.ArgumentParser) -> None:
    model_arguments(parser)
    parser.add_argument("--edits", required=True, help="training edits: bake, qaedit, or a JSON(L) file")
    parser.add_argument("--data", help="where the benchmark's records are: mini, hub, a file or a folder")
    parser.add_argument("--validation", help="file of validation edits; held out of the training edits when absent")
    parser.add_argument("--validation-share", type=float, default=0.1, help="share of edits held out (default 0.1)")
    parser.add_argument("--num-edits", type=int, help="use only the first so many edits")
    parser.add_argument("--settings", help="settings of training and editor: name:value;name:value, or a YAML file")
    parser.add_argument("--out", required=True, help="folder of the artifact; a run that was stopped goes on there")


def _train(given: argparse.Namespace) -> int:
    from edit_hooks.lm.model import EditedHFLM
    from edit_hooks.training.mend_config import training_config
    from edit_hooks.training.mend_trainer import Trainer
    from edit_hooks.utils.options import parse_editor_args
    from lm_edit.mend_data import load_edit_data

    logging.getLogger("lm_eval.edited_hf").setLevel(logging.INFO)
    settings = parse_editor_args(given.settings)
    source = {"data": given.data} if given.data else {"pretrained": given.pretrained}
    data = load_edit_data(
        given.edits,
        source,
        validation=given.validation,
        validation_share=given.validation_share,
        num_edits=given.num_edits,
    )
    lm = EditedHFLM(**model_options(given), mode="none")
    config = training_config(lm.model, settings)
    trainer = Trainer(lm.model, lm.tokenizer, config, data, given.out, {"model_name": str(lm.pretrained)})
    progress = trainer.run()
    first, best = progress.losses[0], next(r for r in progress.losses if r["step"] == progress.best_step)
    print(f"validation edit loss: unedited {first['edit']:.3f}, after training {best['edit']:.3f}, ", end="")
    print(f"locality {best['locality']:.4f}; best step {progress.best_step} of {progress.step}")
    print(f"use it: lm_eval --model edited_hf --model_args editor=mend,editor_args=artifact:{given.out} ...")
    return 0


VERBS: dict[str, Verb] = {
    "train-mend": Verb("train MEND's hyper-network for a model, or go on training it", _train_arguments, _train),
}
