"""Question-answer pairs and locality pairs from the files of other data sets.

Files are JSON lists, JSONL, TriviaQA's objects with a list ``Data``, or CSV with a header. Names of fields are compared
without case. The layouts of NQ-open, TriviaQA and SimpleQA are among those that are read.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.files import read_text, user_path
from edit_hooks.utils.storage.json_io import parse_json, read_rows
from edit_hooks.utils.text.slots import SLOT
from lm_eval_tasks.qaedit.texts import same_text

QUESTION_FIELDS = ("question", "problem")
ANSWER_FIELDS = ("answer", "answers")
LOCALITY_PREFIX = "nq question:"  # of the questions in ZsRE's files; the released QAEdit is without it

MAX_REASONS = 3  # that one error message lists

_TRIVIA_FILE = re.compile(r'\s*\{\s*"Data"\s*:')  # the release of TriviaQA, one object over many lines

PairT = TypeVar("PairT")


class QuestionFile(NamedTuple):
    """A file of questions, and the name of their origin for the records."""

    path: Path
    origin: str


class QuestionAnswer(NamedTuple):
    """A question and its answer.

    Attributes:
        where: file, record number and line, for messages.
        row: number of the record in its file, from 0.
    """

    question: str
    answer: str
    file: QuestionFile
    where: str
    row: int


class LocalityPair(NamedTuple):
    """An unrelated question and its answer."""

    question: str
    answer: str


@dataclass
class Reading(Generic[PairT]):
    """The usable pairs of some files.

    Attributes:
        pairs: in the order of the files.
        left_out: (location, reason) of every other row.
    """

    pairs: list[PairT] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)


class UnusableError(Exception):
    """A row or a reply that cannot be used; the message is the reason, the same for the same cause."""


def parse_question_file(text: str) -> QuestionFile:
    """The file and origin in ``NAME=FILE`` or ``FILE``; the origin of the latter is the file's stem.

    Raises:
        EditingError: for an empty part.
    """
    name, separator, file = text.partition("=")
    if not separator or user_path(text, "file of questions").is_file():
        name, file = "", text
    elif not name.strip():
        raise EditingError(f"{text!r} has no name before '='; write NAME=FILE or FILE.")
    if not file.strip():
        raise EditingError(f"{text!r} names no file of questions; write NAME=FILE or FILE.")
    path = user_path(file, "file of questions")
    return QuestionFile(path, name.strip() or path.stem)


def read_questions(files: Sequence[QuestionFile]) -> Reading[QuestionAnswer]:
    """Read the pairs of question and answer; of questions that :func:`same_text` equates the first.

    Raises:
        EditingError: for files that cannot be read, and for a file without a usable row.
    """
    reading: Reading[QuestionAnswer] = Reading()
    seen: set[str] = set()
    for file in files:
        found = Reading[QuestionAnswer]()
        is_csv = _is_csv(file.path)
        for row, (where, record) in enumerate(_rows(file.path, "file of questions", QUESTION_FIELDS, ANSWER_FIELDS)):
            try:
                question, answer = _pair(record, is_csv)
                if (key := same_text(question)) in seen:
                    raise UnusableError("an earlier row has the same question")
                seen.add(key)
                found.pairs.append(QuestionAnswer(question, answer, file, where, row))
            except UnusableError as reason:
                found.left_out.append((where, str(reason)))
        _require_pairs(found, file.path, "question and answer")
        reading.pairs += found.pairs
        reading.left_out += found.left_out
    return reading


def read_locality(path: Path) -> Reading[LocalityPair]:
    """Read the locality pairs of a file of ZsRE: ``loc`` without its prefix, and ``loc_ans``.

    Questions that :func:`same_text` equates count once.

    Raises:
        EditingError: for a file that cannot be read, and for one without a usable row.
    """
    reading: Reading[LocalityPair] = Reading()
    seen: set[str] = set()
    for where, record in _rows(path, "file of locality questions", ("loc",), ("loc_ans",)):
        try:
            fields = _fields(record)
            question = _text(_value(fields, ("loc",), "question"), "question").removeprefix(LOCALITY_PREFIX).strip()
            answer = _text(_value(fields, ("loc_ans",), "answer"), "answer")
            if not question:
                raise UnusableError("the question is empty")
            if (key := same_text(question)) in seen:
                raise UnusableError("an earlier row has the same question")
            seen.add(key)
            reading.pairs.append(LocalityPair(question, answer))
        except UnusableError as reason:
            reading.left_out.append((where, str(reason)))
    _require_pairs(reading, path, "loc and loc_ans")
    return reading


def is_encodable(text: str) -> bool:
    """Whether a text has a UTF-8 form: half of a surrogate pair has none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_csv(path: Path) -> bool:
    return path.suffix.lower() == ".csv"


def _rows(path: Path, what: str, *needed: Sequence[str]) -> list[tuple[str, Any]]:
    """The records of a file, each after its location.

    Args:
        needed: names of columns; a CSV file has one of each.
    """
    if _is_csv(path):
        rows = list(_csv_rows(path, what, needed))
    elif _TRIVIA_FILE.match(text := read_text(path, what)):
        data = parse_json(text, str(path), halves="keep")["Data"]
        if not isinstance(data, list):
            raise EditingError(f"{path}: 'Data' is a {type(data).__name__}; a list of records is needed.")
        rows = [(f"{path.name}, record {number}", record) for number, record in enumerate(data)]
    else:
        return read_rows(path, what)
    if not rows:
        raise EditingError(f"{path} holds no records.")
    return rows


def _csv_rows(path: Path, what: str, needed: Sequence[Sequence[str]]) -> Iterator[tuple[str, Any]]:
    reader = csv.DictReader(io.StringIO(read_text(path, what)), strict=True)
    end = 0
    try:
        columns = [name.strip().lower() for name in reader.fieldnames or ()]
        if repeated := [name for name, count in Counter(columns).items() if count > 1]:
            raise EditingError(f"{path}: the column {repeated[0]!r} occurs twice; keep one of them.")
        if any(not set(names) & set(columns) for names in needed):
            wanted = " and ".join(" or ".join(map(repr, names)) for names in needed)
            raise EditingError(f"{path} has the columns {', '.join(columns) or 'none'}; {wanted} are needed.")
        end = reader.line_num
        for number, row in enumerate(reader):
            yield f"{path.name}, record {number} (line {end + 1})", row
            end = reader.line_num
    except csv.Error as error:
        raise EditingError(f"{path}, line {end + 1}: not valid CSV ({error}). Fix or re-download it.") from None


def _require_pairs(reading: Reading[Any], path: Path, what: str) -> None:
    if not reading.pairs:
        reasons = Counter(reason for _, reason in reading.left_out).most_common(MAX_REASONS)
        listed = "; ".join(f"{reason} ({count})" for reason, count in reasons)
        raise EditingError(f"{path}: none of the {len(reading.left_out)} rows has a usable {what}: {listed}.")


def _pair(record: Any, is_csv: bool) -> tuple[str, str]:
    fields = _fields(record)
    question = _text(_value(fields, QUESTION_FIELDS, "question"), "question")
    if SLOT in question:
        raise UnusableError("the question holds {}, which marks the subject of an edit request")
    value = _value(fields, ANSWER_FIELDS, "answer")
    if is_csv and isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        try:
            value = parse_json(value, "answer", halves="keep")
        except EditingError:
            raise UnusableError("the answer begins like a list or an object and is no JSON") from None
    if isinstance(value, list):
        if not value:
            raise UnusableError("the answer is empty")
        value = value[0]
    elif isinstance(value, Mapping):
        value = _value(_fields(value), ("value",), "answer")
    return question, _text(value, "answer")


def _fields(record: Any) -> dict[str, Any]:
    """Fields by name in lower case."""
    if not isinstance(record, Mapping):
        raise UnusableError("the row is no object")
    if None in record:  # as csv.DictReader keeps them
        raise UnusableError("the row has more cells than the header")
    return {str(name).strip().lower(): value for name, value in record.items()}


def _value(fields: Mapping[str, Any], names: Sequence[str], what: str) -> Any:
    """The first of some fields that is there."""
    value = next((fields[name] for name in names if fields.get(name) is not None), None)
    if value is None:
        raise UnusableError(f"there is no {what}")
    return value


def _text(value: Any, what: str) -> str:
    """A non-empty text without outer white space."""
    if not isinstance(value, str):
        raise UnusableError(f"the {what} is no text")
    if not value.strip():
        raise UnusableError(f"the {what} is empty")
    if not is_encodable(value):
        raise UnusableError(f"the {what} holds half of a surrogate pair")
    return value.strip()
