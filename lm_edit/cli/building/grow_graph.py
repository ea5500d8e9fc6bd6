"""``lm-edit grow-graph``: a knowledge graph for ``build-knowgic``, grown from seed triplets by asking a model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.settings.numbers import NON_NEGATIVE, SEED
from edit_hooks.utils.storage.json_io import json_text, without_half_surrogates
from lm_edit.cli.command import MAX_NAMED, Verb, add_overwrite_argument, check_output_files, say, whole, write_output

if TYPE_CHECKING:
    from judges.backends.base import Outcome
    from judges.model.cost import CostEstimate
    from judges.model.writer import Writer
    from judges.prompt import Chat
    from lm_edit.builders.knowgic.growth import Grower, Growth
    from lm_edit.builders.knowgic.review import Review

LIMITS = ("rounds", "attempts", "chain_questions", "max_chains", "max_facts", "seed")
REPLY_TOKENS = 512  # unless the writer's settings name a limit; reasoning has several sentences


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "seeds",
        help='JSON with "seeds" ([subject, relation, object, new object]) and, if wanted, "facts", "relations" (name '
        '-> prompt, question) and "aliases"',
    )
    parser.add_argument(
        "--writer",
        required=True,
        help="the model whose knowledge the graph holds, which also writes questions and extracts triplets: "
        "openai:MODEL, openai:MODEL@URL, hf:MODEL, FILE.yaml",
    )
    parser.add_argument("-o", "--out", required=True, help="graph to write, for lm-edit build-knowgic")
    add_overwrite_argument(parser)
    parser.add_argument(
        "--review",
        metavar="FILE",
        help="JSONL in which people decide: new triplets are written to it with keep: null, those that failed "
        "validation with keep: false; set true or false, correct triplets and questions, and run the same command "
        "again. Default: all validated triplets are kept",
    )
    parser.add_argument(
        "--rounds", type=whole(), default=3, help="rounds of reasoning and extraction (default: %(default)s)"
    )
    parser.add_argument(
        "--attempts",
        type=whole(),
        default=3,
        help="questions for the first triplet of a relation, and about a chain, before it is discarded (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--chain-questions",
        type=whole(NON_NEGATIVE),
        default=10,
        metavar="N",
        help="in every round, also reason about questions over several facts, of N chains with a new one (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--max-chains",
        type=whole(),
        default=100,
        help="stop when every seed has that many chains (default: %(default)s, as the paper's largest graph)",
    )
    parser.add_argument("--max-facts", type=whole(), metavar="N", help="stop when the graph has that many facts")
    parser.add_argument(
        "--seed",
        type=whole(SEED),
        default=0,
        help="seed of the chains that are asked about, and of the order in which the facts of a round are added, which "
        "decides where a limit cuts (default: %(default)s)",
    )
    parser.add_argument("--dry-run", action="store_true", help="show the next requests without sending one")
    parser.add_argument("--max-calls", type=whole(NON_NEGATIVE), help="budget: maximum number of requests of this run")
    parser.add_argument("--store", help="folder of the writer's replies, or off; default: in the user's cache folder")


def _run(args: argparse.Namespace) -> int:
    from judges.backends.hf import HFBackend
    from judges.model.factory import make_writer
    from lm_edit.builders.knowgic.growth import Grower, GrowthLimits
    from lm_edit.builders.knowgic.seeds import read_seeds

    check_output_files(args, "out", inputs=[args.seeds, args.writer, *filter(None, [args.review])])
    seeds = read_seeds(args.seeds)
    review = _read_review(args)
    overrides = {name: value for name in ("max_calls", "store") if (value := getattr(args, name)) is not None}
    writer = make_writer(args.writer, reply_tokens=REPLY_TOKENS, **overrides)
    if review is not None and writer.settings.store == "off":
        raise EditingError("--review needs stored replies, or every run would send all requests again; drop store off.")
    limits = GrowthLimits(**{name: getattr(args, name) for name in LIMITS})
    requests = _Requests(writer, is_dry=args.dry_run or writer.settings.dry_run)
    grower = Grower(seeds, requests, limits, review, say)
    if isinstance(writer.backend, HFBackend):
        writer.backend.keep_loaded = True
    try:
        growth = grower.grow()
    except _Planned as planned:
        _say_plan(planned, grower, limits)
        return 0
    finally:
        if isinstance(writer.backend, HFBackend):
            writer.backend.release()
    if requests.is_dry:
        say(f"the store has all replies: {growth.stopped}. Nothing was sent or written; run without --dry-run.")
        return 0
    say(f"writer {writer.settings.model}: {requests.num_calls} calls")
    if growth.waiting or growth.num_own_waiting or growth.failures:
        assert review is not None
        _hand_over(args, growth, review)
        return 0
    write_output(args.out, json_text(without_half_surrogates(_content(grower, growth, args, writer)), indent=1) + "\n")
    _say_growth(grower, growth, args, review)
    return 0


def _read_review(args: argparse.Namespace) -> Review | None:
    """The decisions so far; ``None`` without ``--review``."""
    from edit_hooks.utils.storage.outputs import check_output_file
    from lm_edit.builders.knowgic.review import read_review

    if args.review is None:
        return None
    args.review = check_output_file(args.review, inputs=[args.seeds, args.writer], overwrite=True)
    if args.review.resolve() == Path(args.out).resolve():
        raise EditingError(f"--review {args.review} is also the path of the graph; name another file.")
    return read_review(args.review)


class _Planned(Exception):
    """Requests that a dry run does not send."""

    def __init__(self, chats: Sequence[Chat], plan: CostEstimate) -> None:
        super().__init__(str(plan))
        self.chats, self.plan = chats, plan


class _Requests:
    """The writer's replies, within one budget for the whole growth."""

    def __init__(self, writer: Writer, *, is_dry: bool) -> None:
        self.writer, self.is_dry = writer, is_dry
        self.num_calls = self.num_tokens = 0

    def __call__(self, chats: Sequence[Chat]) -> Sequence[Outcome]:
        plan, settings = self.writer.plan(chats), self.writer.settings
        if self.is_dry and plan.num_calls:
            raise _Planned(chats, plan)
        for name, made, more, most in (
            ("max_calls", self.num_calls, plan.num_calls, settings.max_calls),
            ("max_tokens", self.num_tokens, plan.prompt_tokens, settings.max_tokens),
        ):
            if most is not None and more and made + more > most:
                raise EditingError(
                    f"the next step needs {plan}; with the {made} of this run that is more than {name}={most}. All "
                    "replies so far are in the store: run the same command again, with a higher budget if need be."
                )
        written = self.writer.write(chats)
        self.num_calls += written.num_calls
        self.num_tokens += plan.prompt_tokens
        return written.outcomes


def _say_plan(planned: _Planned, grower: Grower, limits: Any) -> None:
    say(f"next, {grower.step}: {planned.plan}")
    say("first request:")
    for line in planned.chats[0][-1]["content"].splitlines():
        say(f"  {line}")
    say(
        "a round needs at least one request of reasoning for each new fact, one for each sentence of the responses, "
        f"one question for each new triplet, one to {limits.attempts} wordings for each new relation, and two to "
        f"{2 * limits.attempts} for each of at most {limits.chain_questions} chains; how many these are depends on the "
        "replies. Nothing was sent."
    )


def _hand_over(args: argparse.Namespace, growth: Growth, review: Review) -> None:
    """Write what waits for people and what failed, and tell them."""
    from lm_edit.builders.knowgic.review import ChainFailure, append_lines

    new = [proposal for proposal in growth.waiting if review.lacks(proposal)]
    if new or growth.failures:
        append_lines(args.review, [*new, *growth.failures])
    say(
        f"round {growth.rounds + 1 if growth.facts else 0}: {len(growth.waiting) + growth.num_own_waiting} triplets "
        f"wait for a decision in {args.review}, {len(new)} of them new. Set keep to true or false (or correct the "
        "triplet, or append lines of your own) and run the same command again; no graph is written before."
    )
    if growth.failures:
        num_chains = sum(isinstance(one, ChainFailure) for one in growth.failures)
        say(
            f"also listed: {len(growth.failures) - num_chains} triplets that failed validation, with keep: false, and "
            f"{num_chains} failed questions about chains. To have a triplet validated again, correct it, or give "
            "another question and statement, and set keep to true; of a chain, change the question. Otherwise leave "
            "them as they are."
        )
    _say_idle(args, review)


def _say_idle(args: argparse.Namespace, review: Review) -> None:
    if idle := review.num_idle():
        say(
            f"lines of failed triplets in {args.review} without effect (corrected but keep: false, or keep: true "
            f"without a correction): {idle}"
        )


def _content(grower: Grower, growth: Growth, args: argparse.Namespace, writer: Writer) -> dict[str, Any]:
    """The graph as ``build-knowgic`` reads it, with its provenance."""
    from edit_hooks.utils.storage.files import sha256_of, user_path

    return {
        **grower.graph().to_json(),
        "provenance": {
            "writer": writer.describe(),
            "seeds_sha256": sha256_of(user_path(args.seeds, "file of seeds")),
            "limits": vars(grower.limits),
            "rounds": growth.rounds,
            "stopped": growth.stopped,
            "reviewed_by_people": args.review is not None,
            "facts": [
                {
                    "fact": list(found.fact),
                    "from": found.candidate.origin,
                    "round": found.round,
                    **({"question_from": "people"} if found.candidate.wordings else {}),
                }
                for found in growth.facts
            ],
            "discarded": [{"fact": list(fact), "reason": reason} for fact, reason in growth.discarded],
            "chain_questions": [
                {"chain": [list(fact) for fact in one.path], "question": one.question, "problem": one.problem or None}
                for one in growth.chain_questions
            ],
            "sentences": growth.num_sentences,
            "unreadable_replies": growth.num_unreadable,
            "unusable_names": growth.num_unusable,
        },
    }


def _say_growth(grower: Grower, growth: Growth, args: argparse.Namespace, review: Review | None) -> None:
    for fact, count in grower.chain_counts().items():
        say(f"chains of {' | '.join(fact)}: {count}")
    for reason, count in growth.reasons().items():
        named = [" | ".join(fact) for fact, why in growth.discarded if why == reason][:MAX_NAMED]
        more = f" and {count - len(named)} more" if count > len(named) else ""
        say(f"discarded, {reason} ({count}): {'; '.join(named)}{more}")
    valid = sum(not one.problem for one in growth.chain_questions)
    say(f"questions about chains: {len(growth.chain_questions)}, {valid} of them answered with the last entity")
    say(
        f"sentences: {growth.num_sentences}; unreadable replies: {growth.num_unreadable}; triplets with an unusable "
        f"name: {growth.num_unusable}"
    )
    if dropped := [edit for edit in grower.seeds.edits if edit not in grower.graph().edits]:
        say(f"dropped seeds: {'; '.join(' | '.join(edit.fact) for edit in dropped)}")
    if review is not None:
        asked = {one.path for one in growth.chain_questions}
        if unmet := review.num_unmet(growth.proposed, growth.rounds, asked):
            say(f"lines of {args.review} without effect (not proposed, or for a later round): {unmet}")
        _say_idle(args, review)
    say(f"facts: {len(growth.facts)}, after {growth.rounds} rounds: {growth.stopped}")
    if review is None:
        say("these facts are unreviewed and contain the model's mistakes; use --review FILE to decide on each.")
    say(f"use it: lm-edit build-knowgic {quote(str(args.out))} --out chains.json")


VERBS: dict[str, Verb] = {
    "grow-graph": Verb("grow a knowledge graph for build-knowgic by asking a model", _add_arguments, _run),
}
