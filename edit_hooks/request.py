"""`EditRequest`: one wanted change, validated on construction."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

from edit_hooks.prompt_context import (
    BARE,
    SPACE,
    PromptContext,
    content_after,
    content_of,
    require_separator,
    resolved_separator,
    statement,
)
from edit_hooks.utils.errors import EditingError, UnusableRequestError, unknown_keys_error
from edit_hooks.utils.text.readable import readable
from edit_hooks.utils.text.scripts import mention_of, near_occurrence
from edit_hooks.utils.text.slots import ESCAPE_HINT, SLOT, fill_slots, split_slots, split_template

_CONTENT = ("prompt", "target_new", "target_true")  # fields whose line breaks and indentation count


@dataclass(frozen=True, kw_only=True)
@readable
class EditRequest:
    """One wanted change of a model's knowledge.

    Args:
        prompt: text that should be continued by ``target_new``; either a template with exactly one ``{}`` for the
            subject, or a plain text. Literal braces are written ``{{}}`` in both (:mod:`edit_hooks.utils.text.slots`).
            Spaces at the edges are dropped, line breaks and indentation are kept (:mod:`edit_hooks.prompt_context`).
        target_new: the answer wanted after the edit; white space as in ``prompt``.
        subject: the words whose representation is located; must occur in the prompt. ``None`` if the benchmark marks
            none; editors that need one refuse the request.
        target_true: the answer before the edit, if known.
        case_id: identity of the benchmark record. Not part of what is edited, so not part of ``key``.
        relation_id: identity of the relation (Wikidata P-number or the like), for editors that use it.
        context: text around the prompt in which the edit is made; ``None`` for the prompt alone. A context without a
            separator of its own gets that of the edit.
        separator: white space between prompt and target, ``""`` for none; ``None``: by the scripts of the texts.

    Editors read :attr:`text`, :attr:`subject_span` and :attr:`continuation`, which include the context.

    Raises:
        EditingError: for empty or non-string fields, a subject that does not occur in the prompt, templates with more
            than one slot, and prompts with a slot that mention the subject, too; the message names the field.
    """

    prompt: str
    target_new: str
    subject: str | None = None
    target_true: str | None = None
    case_id: str | None = None
    relation_id: str | None = None
    context: PromptContext | None = None
    separator: str | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("context", "separator"):
                continue
            required = field.name in ("prompt", "target_new")
            if value is None and not required:
                continue
            if field.name == "case_id" and isinstance(value, int):
                value = str(value)
            if not isinstance(value, str):
                raise EditingError(
                    f"field {field.name!r}{self._case} is {value!r} ({type(value).__name__}); a string is needed."
                )
            value = content_of(value) if field.name in _CONTENT else value.strip()
            if not value and required:
                raise EditingError(f"field {field.name!r}{self._case} is empty; give a text or drop the record.")
            object.__setattr__(self, field.name, value or None)
        self._check_subject()
        self._settle_seam()

    @property
    def label(self) -> str:
        """Name of the edit in messages: its case, or its text if the record has no ``case_id``."""
        return repr(self.text) if self.case_id is None else f"case {self.case_id}"

    @property
    def _case(self) -> str:
        return f" of case {self.case_id}" if self.case_id is not None else ""

    def _check_subject(self) -> None:
        num_slots = len(self._parts) - 1
        if self.subject is None:
            if num_slots:
                raise EditingError(
                    f"prompt {self.prompt!r}{self._case} has a {{}} slot but the field 'subject' is missing; give the "
                    f"subject, or write the prompt out ({ESCAPE_HINT})."
                )
            return
        if num_slots and any(mention_of(self.subject).search(part) for part in self._parts):
            raise EditingError(
                f"prompt {self.prompt!r}{self._case} has a {{}} slot and mentions its subject {self.subject!r}, too, "
                f"so that either can be meant. If the braces are part of the text: {ESCAPE_HINT}. If they stand for "
                "the subject, write it out there."
            )
        if num_slots > 1:
            raise EditingError(
                f"prompt {self.prompt!r}{self._case} has {num_slots} slots; exactly one {{}} marks the subject "
                f"({ESCAPE_HINT})."
            )
        if num_slots == 0 and self.subject not in self.bare_text:
            raise EditingError(
                f"subject {self.subject!r} does not occur in prompt {self.prompt!r}{self._case}; "
                f"{near_occurrence(self.subject, self.bare_text)}give the prompt with {{}} or fix the subject."
            )

    def _settle_seam(self) -> None:
        """Drop the formatting before the targets, and give the context its separator."""
        if self.separator is not None:
            require_separator(self.separator, f"field 'separator'{self._case}")
        context = None if self.context is None else PromptContext.of(self.context)
        for name in ("target_new", "target_true"):
            if (target := getattr(self, name)) is not None:
                object.__setattr__(self, name, self._settled(target))
        if context is not None and context.separator is None:
            text = context.wrap(self.bare_text)
            context = replace(context, separator=resolved_separator(text, self.target_new, self.separator))
        object.__setattr__(self, "context", context)

    @functools.cached_property
    def _parts(self) -> list[str]:
        """The texts around the slot, literal braces unescaped; one text without a slot."""
        return split_slots(self.prompt)

    @functools.cached_property
    def subject_span(self) -> tuple[int, int] | None:
        """Character offsets (start, end) of the subject in :attr:`text`, if there is one.

        In a plain prompt it is the first occurrence bounded by non-word characters, else the first occurrence.
        """
        if self.subject is None:
            return None
        start = len(self._parts[0])
        if len(self._parts) == 1:
            whole = re.search(rf"(?<!\w){re.escape(self.subject)}(?!\w)", self.bare_text)
            start = whole.start() if whole else self.bare_text.index(self.subject)
        start += len(self._context.before)
        return start, start + len(self.subject)

    @functools.cached_property
    def bare_text(self) -> str:
        """The prompt with the subject filled in, without the context."""
        return (self.subject or "").join(self._parts)  # not str.format: other braces are plain text

    @functools.cached_property
    def text(self) -> str:
        """The text that the target continues: the prompt with the subject filled in, in its context."""
        return self._context.wrap(self.bare_text)

    @property
    def continuation(self) -> str:
        """``target_new`` as it continues :attr:`text`, with the white space between them."""
        return self.continued_by(self.target_new)

    def continued_by(self, target: str) -> str:
        """Another target as it continues :attr:`text`."""
        return self.seam + self._settled(target)

    def _settled(self, target: str) -> str:
        """A target without the formatting before it, as it continues the bare prompt."""
        return content_after(self.prompt + (self.separator or ""), target)

    @functools.cached_property
    def seam(self) -> str:
        """The white space between :attr:`text` and ``target_new``, which other targets get as well."""
        if self.context is not None and self.context.separator is not None:
            return self.context.separator
        return resolved_separator(self.bare_text, self.target_new, self.separator)

    def in_context(self, context: PromptContext) -> EditRequest:
        """The same edit, made in a context.

        Raises:
            EditingError: the request has a context already, or the context drops white space of the prompt.
        """
        if context == BARE:
            return self
        if self.context is not None:
            raise EditingError(
                f"the edit request {self.bare_text!r}{self._case} has a context already; drop its field 'context' or "
                "use edit_context=bare."
            )
        if context.strips and self.bare_text != self.bare_text.strip():
            raise EditingError(
                f"the chat template drops the white space around {self.bare_text!r}{self._case}, so the edit would be "
                "made on another text than questions show. Use edit_context=bare or edit_context=qa, or drop the line "
                "breaks at the edges of the prompt."
            )
        return replace(self, context=context)

    def in_template(self, template: str) -> EditRequest:
        """The same edit with a context template (``"TEXT {}"``) around its prompt, inside its context."""
        context = replace(self._context, separator=self.seam)
        return replace(self, context=context.around(*split_template(template)))

    @property
    def without_context(self) -> EditRequest:
        """The same edit of the prompt alone."""
        return replace(self, context=None)

    @property
    def _context(self) -> PromptContext:
        return self.context or BARE

    @functools.cached_property
    def key(self) -> str:
        """SHA-256 (hex) of all that can change the edit: every field except ``case_id``."""
        content = {**self.to_dict(), "prompt": self.bare_text, "subject_span": self.subject_span}
        for name in ("case_id", "separator"):
            content.pop(name, None)
        if self.context is None and self.seam != SPACE:  # one space is the seam of keys from before there were others
            content["separator"] = self.seam
        return hashlib.sha256(
            json.dumps(content, sort_keys=True, ensure_ascii=False).encode(errors="surrogatepass")
        ).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able mapping without absent fields; inverse of :meth:`from_dict`."""
        record = {**asdict(self), "context": self.context and self.context.to_dict()}
        return {name: value for name, value in record.items() if value is not None}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any], where: str = "") -> EditRequest:
        """Create a request from a mapping.

        Args:
            where: file and record number, a prefix of error messages.

        Raises:
            EditingError: for unknown and missing fields, and for invalid values.
        """
        prefix = f"{where}: " if where else ""
        if not isinstance(record, Mapping):
            raise EditingError(
                f"{prefix}an edit request is {record!r}; a mapping with 'prompt' and 'target_new' is needed."
            )
        known = {field.name for field in fields(cls)}
        if unknown := set(map(str, record)) - known:
            raise EditingError(f"{prefix}{unknown_keys_error('edit request field', unknown, known)}")
        if missing := {"prompt", "target_new"} - set(record):
            raise EditingError(f"{prefix}edit request without {', '.join(sorted(missing))!r}; got {sorted(record)}.")
        try:
            return cls(**record)
        except EditingError as error:
            raise EditingError(f"{prefix}{error}") from None


def prompt_of(record: Mapping[str, Any]) -> str:
    """The prompt of a saved edit request with its subject, for readers of files that may hold anything."""
    return fill_slots(str(record.get("prompt") or ""), str(record.get("subject") or SLOT))


def statement_of(record: Mapping[str, Any]) -> str:
    """Prompt and target of a saved edit request as one text, likewise."""
    separator = record["separator"] if isinstance(record.get("separator"), str) else None
    return statement(prompt_of(record), str(record.get("target_new")), separator)


def require_text(text: str) -> None:
    """Refuse a text that no tokenizer can encode: half of a surrogate pair has no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        shown = text[max(0, error.start - 20) : error.start + 1]
        raise UnusableRequestError(
            f"{shown!r} ends in half of a surrogate pair, which no tokenizer can encode; repair the text."
        ) from None


def require_subjects(requests: Sequence[EditRequest], editor: str) -> None:
    """Refuse requests without a subject on behalf of an editor that needs one."""
    for request in requests:
        if request.subject is None:
            raise UnusableRequestError(
                f"editor {editor!r} needs the field 'subject', which is missing in {request.label} "
                f"(prompt {request.prompt!r}); add it to the record or use an editor that needs none (ft_m)."
            )


RequestGroup = tuple[EditRequest, ...]


class InTurn(tuple[EditRequest, ...]):
    """A group whose requests are written one after another in their order, also where a joint edit is possible.

    Only the order decides between requests that contradict each other, as in an edit that is taken back.
    """


@readable
class EditedCases(NamedTuple):
    """The edits of each case of a batch or stream.

    Attributes:
        cases: in their order; cases may share edits.
        origin: where they were read, with ``sha256`` of the whole file, for the results (JSON-able).
    """

    cases: list[RequestGroup]
    origin: Mapping[str, Any]


def describe_texts(requests: Sequence[EditRequest]) -> dict[str, Any]:
    """What is unusual about the white space of requests, for results; nothing about plain English ones.

    Returns:
        ``separators``: the white space between prompt and target -> its number of requests, if any has another one than
        a space; ``outer_white_space``: the number of requests with line breaks, tabs or an indentation at an edge.
    """
    counts = Counter(request.seam for request in requests)
    texts = [(request.prompt, request.target_new, request.target_true or "") for request in requests]
    num_kept = sum(any(text != text.strip() for text in own) for own in texts)
    found: dict[str, Any] = {"separators": dict(sorted(counts.items()))} if set(counts) - {SPACE} else {}
    return found | ({"outer_white_space": num_kept} if num_kept else {})


def with_separator(request: EditRequest, separator: str | None) -> EditRequest:
    """The request with a separator, unless it has one of its own."""
    return request if separator is None or request.separator is not None else replace(request, separator=separator)


def require_compatible(group: RequestGroup, where: str = "") -> None:
    """Refuse a group that wants two answers to one prompt at once; in turn, the last one stands.

    Raises:
        EditingError: names the prompt and both answers.
    """
    if isinstance(group, InTurn):
        return
    targets: dict[str, str] = {}
    for request in group:
        other = targets.setdefault(request.text, request.target_new)
        if other != request.target_new:
            raise EditingError(
                f"{where + ': ' if where else ''}a document wants two answers to {request.text!r}, {other!r} and "
                f"{request.target_new!r}, in one edit. Drop one, or set 'edit_in_turn': true, so that they are written "
                "one after another."
            )
