"""Context edits: text put before the question, or between its sub-questions, and the model that answers.

The context becomes part of the prompt and the item is rebuilt by lm-eval's rules, so chat templates, special tokens and
truncation are those of any prompt. A question in the scope of a fact with a counterfactual model (SERAC) is answered by
that model; the choice is made once per prompt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from torch import nn

from edit_hooks.answers import ContextReport, GeneratedText, ScoredContinuation
from edit_hooks.base.checks import position_limit
from edit_hooks.deltas.context_edit import ContextPrompt
from edit_hooks.deltas.delta import Delta
from edit_hooks.in_context.fact_choice import REPLY_TOKENS, answer_prompt, choice_prompt, read_choice
from edit_hooks.in_context.fact_memory import load_memory
from edit_hooks.in_context.rounds import DEMONSTRATIONS, FACT, ROUND_TOKENS, Dialogue
from edit_hooks.in_context.selection import select_facts
from edit_hooks.inference.items import GenerateItem, ScoreItem
from edit_hooks.lm.asking.chats import Chats
from edit_hooks.lm.asking.engine import Engine
from edit_hooks.lm.asking.item_builder import BuiltItem, ItemBuilder, ItemT
from edit_hooks.modeling.architectures import unwrapped
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.logs import get_logger

log = get_logger("lm_eval.edited_hf")

# (prompt, continuation) -> item
ScoreItemBuilder: TypeAlias = Callable[[str, str], BuiltItem[ScoreItem]]
AnswerT = TypeVar("AnswerT", ScoredContinuation, GeneratedText)


class PlacedItem(NamedTuple, Generic[ItemT]):
    """An item with the edit's context before its question.

    Attributes:
        model: the counterfactual model that answers; ``None``: the run's model.
    """

    item: ItemT
    report: ContextReport
    model: nn.Module | None = None


class FactChoice(NamedTuple):
    """The reply by which the model chose among the facts of a question.

    Attributes:
        facts_cut: facts were truncated, because they and the question do not fit.
    """

    reply: GeneratedText
    facts_cut: bool


# By the object that is the edit, and the question's prompt.
FactChoices: TypeAlias = dict[tuple[Delta, str], FactChoice]


class PromptEdits:
    """Puts the contexts of edits before questions.

    Args:
        builder: builds items from texts.
        chats: the prompts that the model's chat template made; contexts are put into them.
        engine: answers the items; counterfactual models take the place of its model.
    """

    def __init__(self, builder: ItemBuilder, chats: Chats, engine: Engine) -> None:
        self._builder, self._chats, self._engine = builder, chats, engine

    def is_chat(self, prompt: str) -> bool:
        """Whether the model's chat template made a prompt."""
        return prompt in self._chats

    def answer(
        self,
        jobs: Sequence[tuple[ItemT, Delta | None]],
        answer_jobs: Callable[[Sequence[tuple[ItemT, Delta | None]]], Sequence[AnswerT]],
        score_item: ScoreItemBuilder | None = None,
    ) -> list[AnswerT]:
        """Answer items under edits, with context edits as part of the prompts.

        Args:
            score_item: tokenizes a longer prompt and its continuation by the rule of the items; by default that of
                editing documents.
        """
        without_contexts: dict[Delta, Delta | None] = {}  # one object per edit, so that its items share batches
        prepared: list[tuple[ItemT, Delta | None]] = []
        reports: list[ContextReport | None] = []
        numbers: dict[nn.Module | None, list[int]] = {}  # of the jobs that each model answers
        choices = self._choices(jobs)
        for number, (item, delta) in enumerate(jobs):
            report, model = None, None
            if delta is not None and delta.contexts:
                if delta not in without_contexts:
                    without_contexts[delta] = delta.without_contexts
                item, report, model = self.with_context(item, delta, score_item, choices)
                delta = without_contexts[delta]
            prepared.append((item, delta))
            reports.append(report)
            numbers.setdefault(model, []).append(number)
        answers: dict[int, AnswerT] = {}
        for model, own in numbers.items():
            with self._engine.answering_with(model):
                answers.update(zip(own, answer_jobs([prepared[number] for number in own]), strict=True))
        return [
            answers[number] if report is None else dataclasses.replace(answers[number], context=report)
            for number, report in enumerate(reports)
        ]

    def generate(
        self,
        jobs: Sequence[tuple[GenerateItem, Delta | None]],
        generate_jobs: Callable[[Sequence[tuple[GenerateItem, Delta | None]]], Sequence[GeneratedText]],
    ) -> list[GeneratedText]:
        """Generate answers under edits; those of contexts with rounds, sub-question by sub-question.

        Answers of a given length are not split into rounds.
        """
        dialogues: dict[int, tuple[GenerateItem, Delta]] = {}
        for number, (item, delta) in enumerate(jobs):
            if delta is not None and delta.contexts and delta.contexts[0].rounds and item.target is None:
                dialogues[number] = (item, delta)
        rest = [job for number, job in enumerate(jobs) if number not in dialogues]
        direct = iter(self.answer(rest, generate_jobs) if rest else ())
        in_rounds = dict(zip(dialogues, self._in_rounds(list(dialogues.values()), generate_jobs), strict=True))
        return [in_rounds[number] if number in in_rounds else next(direct) for number in range(len(jobs))]

    def _in_rounds(
        self,
        jobs: Sequence[tuple[GenerateItem, Delta]],
        generate_jobs: Callable[[Sequence[tuple[GenerateItem, Delta | None]]], Sequence[GeneratedText]],
    ) -> list[GeneratedText]:
        """The final answers of dialogues, whose rounds are generated together."""
        dialogues = [self._dialogue(item, delta) for item, delta in jobs]
        last: dict[int, GeneratedText] = {}
        cut: set[int] = set()
        without_fact: set[int] = set()  # or without the whole question, which stands before the facts
        while ongoing := [number for number, dialogue in enumerate(dialogues) if dialogue.ongoing]:
            prepared: list[tuple[GenerateItem, Delta | None]] = []
            for number in ongoing:
                item, delta = jobs[number]
                item = self._builder.with_thought(item)  # its words are no part of the dialogue
                item = dataclasses.replace(item, stops=(FACT,), max_new_tokens=ROUND_TOKENS)
                prompt = dialogues[number].prompt
                built = self._builder.fitted_prompt(prompt, item)
                prepared.append((built.item, delta.without_contexts))
                if built.cut:
                    cut.add(number)
                if self._builder.is_cut_past(prompt, built.num_cut, len(DEMONSTRATIONS)):
                    without_fact.add(number)
            for number, text in zip(ongoing, generate_jobs(prepared), strict=True):
                if text.is_finite:
                    dialogues[number].advance(text.text)
                else:
                    dialogues[number].ongoing = False
                last[number] = text
        return [
            dataclasses.replace(
                last[number],
                raw=dialogue.text,
                stops=item.stops,
                token_ids=None,  # those of the last round are not the answer's
                context=ContextReport(
                    facts=len(dialogue.retrieved),
                    cut=number in cut,
                    fact_cut=number in without_fact,
                    rounds=dialogue.num_rounds,
                ),
            )
            for number, ((item, _), dialogue) in enumerate(zip(jobs, dialogues, strict=True))
        ]

    def _dialogue(self, item: GenerateItem, delta: Delta) -> Dialogue:
        if item.text is None or self.is_chat(item.text):
            raise EditingError("an editor that asks sub-questions needs plain prompts; drop --apply_chat_template.")
        return Dialogue(item.text, delta.contexts)

    def _choices(self, jobs: Sequence[tuple[ItemT, Delta | None]]) -> FactChoices:
        """The replies of the model to the questions whose fact it chooses, generated together."""
        asked: dict[tuple[Delta, str], tuple[GenerateItem, Delta | None]] = {}
        cut: dict[tuple[Delta, str], bool] = {}
        for item, delta in jobs:
            prompt = _prompt_of(item)
            if delta is None or not delta.contexts or delta.contexts[0].choice is None or prompt is None:
                continue
            question = self.question_of(prompt)
            context = select_facts(delta.contexts, question).prompt
            if context is None or (delta, question) in asked:
                continue
            text = choice_prompt(context.facts[::-1], question)
            reply = GenerateItem((), (), REPLY_TOKENS, text)
            built = self._builder.fitted_prompt(text, self._builder.with_thought(reply))
            asked[delta, question] = (built.item, delta.without_contexts)
            cut[delta, question] = self._builder.is_cut_past(text, built.num_cut, text.index("Facts:"))
        replies = self._engine.generate(list(asked.values())) if asked else []
        return {key: FactChoice(reply, cut[key]) for key, reply in zip(asked, replies, strict=True)}

    def _with_chosen(
        self,
        item: ItemT,
        prompt: str,
        placed: ContextPrompt,
        choice: FactChoice,
        report: ContextReport,
        score_item: ScoreItemBuilder | None,
    ) -> PlacedItem[ItemT]:
        """Rebuild an item with the fact that the model chose; unchanged if it chose none."""
        rule = placed.facts[-1].choice
        assert rule is not None
        text = choice.reply.text
        report = dataclasses.replace(report, reply=text, no_choice=not choice.reply.is_finite)
        report = dataclasses.replace(report, cut=choice.facts_cut, fact_cut=choice.facts_cut)
        fact = read_choice(text, placed.facts[::-1], rule) if choice.reply.is_finite else None
        if fact is None:
            return PlacedItem(item, report)
        asked = answer_prompt(fact, self.question_of(prompt))
        longer = self._as_question(asked, prompt)
        built = self._rebuild(item, longer, score_item)
        start = max(longer.rfind(asked), 0) + asked.index("Fact: ")
        is_lost = self._builder.is_cut_past(longer, built.num_cut, start)
        report = dataclasses.replace(
            report, facts=1, stated=fact, cut=report.cut or built.cut, fact_cut=report.fact_cut or is_lost
        )
        return PlacedItem(built.item, report)

    def with_context(
        self,
        item: ItemT,
        delta: Delta,
        score_item: ScoreItemBuilder | None = None,
        choices: FactChoices | None = None,
    ) -> PlacedItem[ItemT]:
        """Rebuild an item with the edit's context before the question.

        Demonstrations that do not fit are left out, those farthest from the question first. A prompt that is too long
        even then is cut at its beginning by lm-eval's rule, and the report records it: the facts are lost first.

        Args:
            choices: replies of the model that chooses the facts; by default it is asked now.
        """
        prompt = _prompt_of(item)
        if prompt is None:
            log.warning("texts without a prompt (rolling log-likelihoods) are answered without the edits' contexts.")
            return PlacedItem(item, ContextReport())
        question = self.question_of(prompt)
        chosen = select_facts(delta.contexts, question, self._device_of(delta))
        context = chosen.prompt
        report = ContextReport(best_fact=chosen.best_fact, scope_score=chosen.scope_score, similarity=chosen.similarity)
        if context is None:
            return PlacedItem(item, report)
        if context.facts[-1].choice is not None:
            made = self._choices([(item, delta)]) if choices is None else choices
            return self._with_chosen(item, prompt, context, made[delta, question], report, score_item)
        for shown in range(len(context.demonstrations), -1, -1):
            longer = self.before_question(context.text(shown, question), prompt)
            built = self._rebuild(item, longer, score_item)
            if not built.cut:
                break
        model = self._counterfactual(context)
        if model is not None:
            built = fitted_to(model, built)
        report = dataclasses.replace(
            report,
            facts=context.num_facts(question),
            demonstrations=shown,
            left_out=len(context.demonstrations) - shown,
            cut=built.cut,
            fact_cut=context.has_fact(question) and self._is_fact_cut(context, question, longer, built),
        )
        return PlacedItem(built.item, report, model)

    def _is_fact_cut(self, context: ContextPrompt, question: str, prompt: str, built: BuiltItem[ItemT]) -> bool:
        """Whether what was cut off a prompt reaches into its facts; where they are unknown, whether anything was."""
        start = prompt.rfind((context.text(0, question) + question).strip())
        return self._builder.is_cut_past(prompt, built.num_cut, max(start, 0))

    def _device_of(self, delta: Delta) -> str:
        """Where the models of an edit's memory run."""
        return "cpu" if delta.contexts[0].memory is None else str(self._engine.device)

    def _counterfactual(self, context: ContextPrompt) -> nn.Module | None:
        """The model that answers in place of the run's, if the fact names one."""
        fact = context.facts[-1]
        if fact.memory is None:
            return None
        return load_memory(fact.memory, fact.embedder, str(self._engine.device)).counterfactual

    def _rebuild(self, item: ItemT, prompt: str, score_item: ScoreItemBuilder | None) -> BuiltItem[ItemT]:
        if isinstance(item, GenerateItem):
            return self._builder.fitted_prompt(prompt, item)
        assert item.texts is not None
        if item.by_token is not None:
            return self._builder.token_prompt_item(prompt, item.texts[1], item.by_token.rule)
        return (score_item or self._builder.score_item)(prompt, item.texts[1])

    def before_question(self, text: str, prompt: str) -> str:
        """Put text before a prompt; in a chat, before the last user message."""
        return self._as_question(text + self.question_of(prompt), prompt)

    def _as_question(self, text: str, prompt: str) -> str:
        """A prompt with text in place of its question: of the last user message of a chat, else of the whole."""
        if not self._chats:
            return text
        if prompt not in self._chats:
            raise EditingError(
                f"prompt {prompt[:80]!r}... was not made by this model's chat template, so the position of a "
                "context in it is unknown; run without --apply_chat_template."
            )
        messages, add_generation_prompt = self._chats[prompt]
        messages = [dict(message) for message in messages]
        last = max(number for number, message in enumerate(messages) if message["role"] == "user")
        messages[last]["content"] = text
        return self._chats.template(messages, add_generation_prompt)

    def question_of(self, prompt: str) -> str:
        """Return the last user message of a chat; any other prompt unchanged."""
        return self._chats.question_of(prompt)


def _prompt_of(item: ScoreItem | GenerateItem) -> str | None:
    """The prompt of an item as text; ``None`` for items of tokens alone."""
    return item.text if isinstance(item, GenerateItem) else item.texts and item.texts[0]


def fitted_to(model: nn.Module, built: BuiltItem[ItemT]) -> BuiltItem[ItemT]:
    """The item with its beginning cut to the positions of another model, which may have fewer.

    Raises:
        EditingError: the answer alone does not fit, or the model lacks an added token of the prompt.
    """
    limit, item = position_limit(unwrapped(model).config), built.item
    num_tokens = unwrapped(model).get_input_embeddings().weight.shape[0]
    if lacking := [token for token in item.context if token >= num_tokens]:
        raise EditingError(
            f"the counterfactual model has {num_tokens} tokens and lacks token {lacking[0]} of a prompt; ask without "
            "such tokens (those of a chat template?), or train with another counterfactual model."
        )
    if limit is None:
        return built
    length = item.most_tokens if isinstance(item, GenerateItem) else len(item.continuation) - 1
    if length >= limit:
        raise EditingError(
            f"an answer of {length} tokens leaves no room in the counterfactual model's {limit} positions."
        )
    if isinstance(item, ScoreItem) and item.by_token is not None:
        contexts = item.by_token.ids  # each of them followed by one token
        by_token = dataclasses.replace(item.by_token, ids=tuple(ids[-limit:] for ids in contexts))
        more = max(0, *(len(ids) - limit for ids in contexts))
        return BuiltItem(dataclasses.replace(item, by_token=by_token), built.num_cut + more)
    room = limit - length
    more = max(0, len(item.context) - room)
    return BuiltItem(dataclasses.replace(item, context=item.context[-room:]), built.num_cut + more)
