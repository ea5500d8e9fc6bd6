"""Run `edited_hf` on tiny models through lm-eval, and compare the answers of two runs."""

from __future__ import annotations

import math
import random

import lm_eval
import numpy
import torch
from lm_eval.api.instance import Instance
from paths import RECORDS
from task_managers import task_manager

from edit_hooks import EditRequest
from edit_hooks.answers import EditedAnswer, GeneratedText, ScoredContinuation
from edit_hooks.lm.model import EditedHFLM

FAST = {"context_templates": ["{}", "Then they said. {}"], "num_steps": 6}
BAKE = ["bake_es", "bake_ls", "bake_rq"]
# Random models hardly ever write a stop, and twelve tokens of an answer differ where fifty do.
SHORT = {"max_gen_toks": 12}
# Names in tasks and groups whose questions have a decoding of their own, which would refuse that.
OWN_DECODING = ("knowgic", "mquake", "fluency", "consistency")


def build(model_path, tmp_path=None, **options):
    options = {"editor_args": dict(FAST), "store": "off", "device": "cpu", **options}
    if tmp_path is not None:
        options["store"] = str(tmp_path / "store")
    return EditedHFLM(pretrained=model_path, **options)


def run(lm, tasks, data="bake_qa.jsonl", settings=None, **options):
    manager = task_manager({"data": str(RECORDS / data), **(settings or {})})
    has_own = any(name in task for task in tasks for name in OWN_DECODING)
    options = {"gen_kwargs": None if has_own else dict(SHORT), "bootstrap_iters": 0, **options}
    return lm_eval.simple_evaluate(model=lm, tasks=tasks, task_manager=manager, **options)


def seed_as_lm_eval_does():
    """Seed the global generators as simple_evaluate does, so that only changes by edits remain."""
    random.seed(0)
    numpy.random.seed(1234)
    torch.manual_seed(1234)


def answers(results):
    """Every raw answer of a run, in order."""
    return [
        response
        for task in sorted(results["samples"])
        for sample in sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
        for responses in sample["resps"]
        for response in responses
    ]


def flat(answer):
    """The numbers of an answer that must agree between ways of computing it."""
    final = answer.final if isinstance(answer, EditedAnswer) else answer
    if isinstance(final, GeneratedText):
        return final.raw, final.token_ids
    return final.logprob, final.token_ids, final.token_argmax


def assert_same_answers(first, second, tolerance=1e-4):
    assert len(first) == len(second) > 0
    for left, right in zip(first, second, strict=True):
        left, right = (answer.final if isinstance(answer, EditedAnswer) else answer for answer in (left, right))
        if isinstance(left, ScoredContinuation):
            assert math.isclose(left.logprob, right.logprob, rel_tol=tolerance, abs_tol=tolerance)
            assert left.token_argmax == right.token_argmax
        else:
            assert (left.raw, left.token_ids, left.stop) == (right.raw, right.token_ids, right.stop)


def instance(doc, context, argument, kind="loglikelihood"):
    return Instance(request_type=kind, doc=doc, arguments=(context, argument), idx=0, metadata=("test", 0, 1))


def case(subject="Port Elna", target="Dravonia", unedited=True):
    request = EditRequest(prompt="{} is the capital of", subject=subject, target_new=target)
    return {"edit_requests": [request.to_dict()], "ask_unedited": unedited, "case_id": subject}
