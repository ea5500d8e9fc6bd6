"""Demonstrations before the questions: eight of a relation, 16 of questions, five with a chain of thought.

Those of the paper are files of its repository, which ``data=hub`` downloads. Those of the embedded sample are our own
sentences, for the relations of the sample.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.storage.files import read_text, require_folder, sha256_of, user_path
from edit_hooks.utils.storage.json_io import read_json
from edit_hooks.utils.storage.pinned_file import PinnedFile
from lm_eval_tasks.common.records.dataset import HUB, choose_data
from lm_eval_tasks.common.settings import Settings, text_setting

logger = get_logger("lm_eval.editing_tasks")

REPOSITORY, COMMIT = "princeton-nlp/MQuAKE", "fb43dadc2d8cd19d08ce81c63d957b59deb3f3cd"
RELATIONS, QUESTIONS, THOUGHTS = "rel-prompts.json", "multihop-prompts.txt", "multihop-cot-prompts.txt"
PUBLISHED_SHA256 = {
    RELATIONS: "5186c6bd07a60d3f561b17200c1e86c5f21215bbc3883d9a9c99d57da7871910",
    QUESTIONS: "1d6f48038599dec1ea63080c07f946f47f57c3227a3428b0efdca88cf566de17",
    THOUGHTS: "f74ad1cca21841d83a63b868d2e694c164aaaf8636a659e193fc99f41005cafa",
}
OWN, PUBLISHED = "own", "published"
EMBEDDED = Path(__file__).parent / "data" / "demonstrations"

DEMONSTRATIONS = text_setting(
    "demonstrations",
    f"demonstrations before the questions: {', '.join(PUBLISHED_SHA256)}",
    f"{PUBLISHED} (default with data=hub), {OWN} (default otherwise), or a folder with these files",
)


@dataclass(frozen=True)
class Demonstrations:
    """Texts that precede a question.

    Attributes:
        origin: source and checksums, for the documents.
        of_relations: relation id -> lines of question and answer.
        questions: lines of question and answer, single and multi-hop.
        thoughts: blocks of question, thoughts and answer.
    """

    origin: str
    of_relations: Mapping[str, str]
    questions: str
    thoughts: str

    def relation_prompt(self, relation_id: str, question: str) -> str | None:
        """The prompt for a single fact; ``None`` if there are no demonstrations of its relation."""
        lines = self.of_relations.get(relation_id)
        return None if lines is None else f"{lines}\nQ: {question} A:"

    def question_prompt(self, question: str) -> str:
        """The prompt for a multi-hop question, answered directly."""
        return f"{self.questions}\nQ: {question} A:"

    def thought_prompt(self, question: str) -> str:
        """The prompt for a multi-hop question with a chain of thought."""
        return f"{self.thoughts}\n\nQuestion: {question}\nThoughts:"


def find_demonstrations(settings: Settings) -> Demonstrations:
    """The demonstrations of a run.

    Raises:
        EditingError: for files that are missing, cannot be downloaded or have another layout.
    """
    place = DEMONSTRATIONS.read(settings)
    if place is None:
        from_hub = settings.get("mquake_set") or choose_data(settings).partition(":")[0] == HUB
        place = PUBLISHED if from_hub else OWN
    return _load(place if place in (OWN, PUBLISHED) else str(user_path(place, "demonstrations")))


@functools.cache
def _load(place: str) -> Demonstrations:
    """Read the demonstrations once per process."""
    paths = {name: _locate(place, name) for name in PUBLISHED_SHA256}
    relations = read_json(paths[RELATIONS], "file of demonstrations")
    if not isinstance(relations, dict) or not all(isinstance(lines, str) and lines for lines in relations.values()):
        raise EditingError(f"{paths[RELATIONS]}: an object relation id -> lines of question and answer is needed.")
    texts = {name: read_text(paths[name], "file of demonstrations").strip() for name in (QUESTIONS, THOUGHTS)}
    for name, text in texts.items():
        if not text:
            raise EditingError(f"{paths[name]} is empty; it needs demonstrations of multi-hop questions.")
    digests = ", ".join(f"{name} {sha256_of(path)[:12]}" for name, path in paths.items())
    origin = f"{REPOSITORY} at {COMMIT[:12]}" if place == PUBLISHED else place
    return Demonstrations(
        f"{origin} ({digests})",
        {relation: lines.strip() for relation, lines in relations.items()},
        texts[QUESTIONS],
        texts[THOUGHTS],
    )


def _locate(place: str, name: str) -> Path:
    if place == PUBLISHED:
        sha256 = PUBLISHED_SHA256[name]
        file = PinnedFile(repository=REPOSITORY, commit=COMMIT, path=f"prompts/{name}", sha256=sha256)
        try:
            return file.fetch()
        except EditingError as error:
            raise EditingError(f"{error} Or set demonstrations=own, or demonstrations=/your/folder.") from None
    if place == OWN:
        return EMBEDDED / name
    return require_folder(place, "demonstrations") / name
