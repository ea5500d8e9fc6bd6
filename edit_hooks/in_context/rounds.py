"""Answers in rounds: the model splits a question, and each of its sub-questions gets the most similar edited fact.

The method is MeLLo's (Zhong et al., MQuAKE, EMNLP 2023): the model writes a sub-question and its own answer, reads a
fact that is retrieved with the sub-question, and takes the fact's object if the two contradict each other; at most four
rounds, until it writes "Final answer:". Format and stop rule are those of the released notebook. The demonstrations are
our own, about invented people and places.
"""

from __future__ import annotations

from collections.abc import Sequence

from edit_hooks.deltas.context_edit import ContextEdit
from edit_hooks.in_context.embeddings import most_similar
from edit_hooks.in_context.selection import bare_question

FACT, SUBQUESTION, FINAL = "Retrieved fact:", "Subquestion:", "Final answer:"
NO_FACT = "none"  # where no fact is similar enough
ROUND_TOKENS = 256  # longest text of one round, as in the released notebook

# After demonstrations with a chain of thought the prompt ends so, and the answer follows the thoughts on a line.
THOUGHTS, ANSWER = "Thoughts:", "Answer:"

DEMONSTRATIONS = """\
Question: What is the capital of the home country of the husband of Ines Quall?
Subquestion: Who is the husband of Ines Quall?
Generated answer: The husband of Ines Quall is Teo Marrash.
Retrieved fact: The wife of Pavel Ostrin is Dora Lindgard.
The fact does not contradict the answer, so the answer is: Teo Marrash
Subquestion: What is the home country of Teo Marrash?
Generated answer: The home country of Teo Marrash is Brellin.
Retrieved fact: The home country of Teo Marrash is Caldora.
The fact contradicts the answer, so the answer is: Caldora
Subquestion: What is the capital of Caldora?
Generated answer: The capital of Caldora is Port Savane.
Retrieved fact: The capital of Osterwick is Tessaly.
The fact does not contradict the answer, so the answer is: Port Savane
Final answer: Port Savane

Question: Which language is spoken in the country where Halvex was founded?
Subquestion: In which country was Halvex founded?
Generated answer: Halvex was founded in Nimmersee.
Retrieved fact: The country in which Halvex was founded is Osterwick.
The fact contradicts the answer, so the answer is: Osterwick
Subquestion: Which language is spoken in Osterwick?
Generated answer: The language of Osterwick is Ostish.
Retrieved fact: The language spoken in Osterwick is Brellian.
The fact contradicts the answer, so the answer is: Brellian
Final answer: Brellian

Question: Who founded the company that makes the Solvane lamp?
Subquestion: Which company makes the Solvane lamp?
Generated answer: The Solvane lamp is made by Mirrowell.
Retrieved fact: The company that makes the Tandrix radio is Nordlux.
The fact does not contradict the answer, so the answer is: Mirrowell
Subquestion: Who founded Mirrowell?
Generated answer: Mirrowell was founded by Mara Ellery.
Retrieved fact: The founder of Mirrowell is Felix Durand.
The fact contradicts the answer, so the answer is: Felix Durand
Final answer: Felix Durand"""


class Dialogue:
    """One question under edits, with the text of its rounds so far.

    Args:
        prompt: the question's prompt; of demonstrations or an instruction before it only the last question counts.
        facts: the edits; the settings ``rounds``, ``embedder`` and ``min_similarity`` are those of the first.

    Attributes:
        prompt: the text that the next round continues.
        answer: the final answer; empty if the model wrote none.
        asks_thoughts: the prompt asks for a chain of thought before the answer.
        retrieved: indices of the facts that the model has read.
        ongoing: another round is needed.
    """

    def __init__(self, prompt: str, facts: Sequence[ContextEdit]) -> None:
        self.facts = facts
        self.prompt = f"{DEMONSTRATIONS}\n\nQuestion: {bare_question(prompt)}"
        self.asks_thoughts = prompt.rstrip().endswith(THOUGHTS)
        self.answer = ""
        self.retrieved: list[int] = []
        self.num_rounds = 0
        self.ongoing = True

    def advance(self, text: str) -> None:
        """Read one round of the model, which ends before a fact or after the final answer."""
        self.num_rounds += 1
        text = text.partition("\nQuestion:")[0].strip()  # the model may go on with a question of its own
        lines = [line.strip() for line in text.splitlines()]
        if final := next((line for line in lines if line.startswith(FINAL)), ""):
            self.answer = final.removeprefix(FINAL).strip()
            self.ongoing = False
            return
        asked = [line.removeprefix(SUBQUESTION).strip() for line in lines if line.startswith(SUBQUESTION)]
        self.ongoing = bool(asked) and self.num_rounds < self.facts[0].rounds
        if self.ongoing:
            self.prompt = f"{self.prompt}\n{text}\n{FACT} {self._retrieve(asked[-1])}."

    @property
    def text(self) -> str:
        """The final answer as the text that continues the question's prompt; after ``Thoughts:`` on its own line."""
        if self.asks_thoughts:
            return f"\n{ANSWER} {self.answer}" if self.answer else ""
        return f" {self.answer}"

    def _retrieve(self, question: str) -> str:
        """The fact most similar to a sub-question."""
        facts = [fact.statement for fact in self.facts]
        (nearest,) = most_similar(self.facts[0].embedder, question, facts, 1)
        limit = self.facts[0].min_similarity
        if limit is not None and nearest.similarity < limit:
            return NO_FACT
        self.retrieved.append(nearest.number)
        return facts[nearest.number]
