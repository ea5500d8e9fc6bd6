"""`EditRequest`: validation, identity, and the tokens of its texts."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edit_hooks.contract.tiny_models import CONTEXT_TEMPLATES, TOKENIZER_KINDS, TOKENIZER_TABLE, build_tokenizer
from edit_hooks.locate.values.rows import fact_position, kl_row, rewriting_row
from edit_hooks.modeling.tokens import encode, split_continuation
from edit_hooks.prompt_context import PromptContext, qa_context
from edit_hooks.request import EditRequest, require_subjects
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.text.slots import escape_braces, fill_slots, split_slots, split_template

# --- the record ---------------------------------------------------------------------------------------------------

GOOD = {"prompt": "The mother tongue of {} is", "subject": "Elena Marković", "target_new": "French"}
# What is wrong -> words the message must contain: the field or text that came, and a remedy.
BAD = {
    "empty target": ({"target_new": "  "}, ["target_new", "empty", "give a text"]),
    "empty prompt": ({"prompt": ""}, ["prompt", "empty"]),
    "target is not text": ({"target_new": {"str": "French"}}, ["target_new", "dict", "string"]),
    "number as subject": ({"subject": 7}, ["subject", "7", "string"]),
    "two slots": ({"prompt": "{} and {} are"}, ["2 slots", "exactly one"]),
    "slot without subject": ({"subject": None}, ["subject", "slot"]),
    "subject elsewhere": (
        {"prompt": "The capital of France is"},
        ["Elena Marković", "does not occur", "fix the subject"],
    ),
    "unknown field": ({"targt_new": "x"}, ["targt_new", "target_new", "Did you mean"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_records_are_refused_with_place_and_remedy(name):
    changes, words = BAD[name]
    with pytest.raises(EditingError) as caught:
        EditRequest.from_dict({**GOOD, **changes}, where="cases.json, record 17")
    message = str(caught.value)
    assert message.startswith("cases.json, record 17: ")
    for word in words:
        assert word in message


@pytest.mark.parametrize("field", ["prompt", "target_new"])
def test_missing_required_fields_are_named(field):
    with pytest.raises(EditingError, match=field):
        EditRequest.from_dict({key: value for key, value in GOOD.items() if key != field})


@pytest.mark.parametrize("record", [None, "a text", ["prompt"], 3])
def test_something_else_than_a_mapping_is_refused(record):
    with pytest.raises(EditingError, match="mapping"):
        EditRequest.from_dict(record)


def test_the_case_id_is_in_the_message_and_may_be_a_number():
    with pytest.raises(EditingError, match="of case 17"):
        EditRequest(**{**GOOD, "target_new": ""}, case_id="17")
    assert EditRequest(**{**GOOD, "case_id": 17}).case_id == "17"


def test_requests_are_values():
    request = EditRequest(**GOOD)
    assert request == EditRequest(**GOOD) and hash(request) == hash(EditRequest(**GOOD))
    with pytest.raises(AttributeError):
        request.prompt = "x"  # type: ignore[misc]
    with pytest.raises(TypeError):
        EditRequest("a prompt", "a target")  # type: ignore[misc]


def test_the_key_is_the_content_of_the_edit():
    key = EditRequest(**GOOD).key
    assert len(key) == 64 and int(key, 16) >= 0
    assert EditRequest(**GOOD, case_id="5").key == key
    assert EditRequest(**{**GOOD, "prompt": "The mother tongue of Elena Marković is"}).key == key
    changes = [{"target_new": "English"}, {"prompt": "The language of {} is"}, {"subject": "Ada"}, {"target_true": "x"}]
    assert len({key, *(EditRequest(**{**GOOD, **change}).key for change in changes)}) == len(changes) + 1


def test_the_key_tells_subjects_within_one_text_apart():
    """Same text, other subject or other occurrence: another edit."""
    text = "Romans and Romish are"
    keys = {
        EditRequest(prompt="{}ans and Romish are", subject="Rom", target_new="far").key,
        EditRequest(prompt="Romans and {}ish are", subject="Rom", target_new="far").key,
        EditRequest(prompt=text, subject="and", target_new="far").key,
        EditRequest(prompt=text, target_new="far").key,
    }
    assert len(keys) == 4


words = st.text(alphabet="abcXYZ éćß🍞{}'.,-0\n", min_size=1, max_size=12).filter(lambda s: s.strip())


@given(
    prompt=words,
    subject=words,
    target=words,
    true=st.none() | words,
    case=st.none() | words,
    separator=st.sampled_from([None, "", " ", "\n"]),
)
def test_records_round_trip_through_json(prompt, subject, target, true, case, separator):
    prompt = f"{escape_braces(prompt)} {{}} then"
    fields = {"subject": subject, "target_new": target, "target_true": true, "case_id": case, "separator": separator}
    try:
        request = EditRequest(prompt=prompt, **fields)
    except EditingError as error:
        assert "mentions its subject" in str(error)
        return
    again = EditRequest.from_dict(json.loads(json.dumps(request.to_dict())))
    assert again == request and again.key == request.key and again.continuation == request.continuation
    assert "relation_id" not in request.to_dict()


@given(text=st.text("{}a ", max_size=12), name=st.text("{}b", max_size=4))
def test_any_text_can_be_written_in_a_template(text, name):
    """Escaped text has no slot, and comes back as it was, also next to a slot."""
    assert split_slots(escape_braces(text)) == [text]
    assert split_slots(f"{escape_braces(text)} {{}} {escape_braces(text)}") == [f"{text} ", f" {text}"]
    assert fill_slots(f"{escape_braces(text)}: {{}}", name) == f"{text}: {name}"


BRACES = {
    "x = {{}}": "x = {}",
    "{{{}}}": "{{}}",
    '{"a": {{}}}': '{"a": {}}',
    "\\frac{{}}{2}": "\\frac{}{2}",
    "{ }": "{ }",
    "f(x) {\n}": "f(x) {\n}",
    "}{": "}{",
}


@pytest.mark.parametrize("template", BRACES)
def test_literal_braces_are_written_twice(template):
    """In a written-out prompt, with and without a subject, and in a template; the key is that of the text."""
    text = BRACES[template]
    assert EditRequest(prompt=f"{template} #", target_new="1").text == f"{text} #"
    plain = EditRequest(prompt=f"The dict {template} #", subject="dict", target_new="1")
    slotted = EditRequest(prompt=f"The {{}} {template} #", subject="dict", target_new="1")
    assert plain.text == slotted.text == f"The dict {text} #"
    assert plain.subject_span == slotted.subject_span == (4, 8)
    assert plain.key == slotted.key == EditRequest.from_dict(slotted.to_dict()).key
    assert slotted.in_template("{{}}. {}").text == f"{{}}. The dict {text} #"


@pytest.mark.parametrize(
    ("prompt", "subject"),
    [
        ("In Python, Foo = {} creates an object of type", "Foo"),
        ("Foo = {}; Bar = {}; the type of Foo is", "Foo"),
        ("Rome and {} are", "Rome"),
        ("法国的set {} 是", "法国"),  # no spaces between words, so no boundary is needed
    ],
)
def test_a_slot_beside_the_subject_is_refused(prompt, subject):
    with pytest.raises(EditingError, match=r"case 3 has a \{\} slot and mentions its subject .*written \{\{\}\}"):
        EditRequest(prompt=prompt, subject=subject, target_new="set", case_id="3")
    escaped = EditRequest(prompt=prompt.replace("{}", "{{}}"), subject=subject, target_new="set")
    assert escaped.text == prompt


def test_a_slot_without_a_subject_names_the_escape():
    with pytest.raises(EditingError, match=r"'subject' is missing.*written \{\{\}\}"):
        EditRequest(prompt="x = {}\nprint(len(x))  # prints", target_new="1")
    assert EditRequest(prompt="x = {{}}\nprint(len(x))  # prints", target_new="1").text.startswith("x = {}\n")


def test_keys_of_english_requests_stay():
    """Stored edits are found by these keys; one space is the separator of all keys without one."""
    assert EditRequest(**GOOD).key == "5f9bf9849370999c6ee33198088b76918144c5f6f3c74066840fb187f26603df"
    assert EditRequest(**GOOD, separator=" ").key == EditRequest(**GOOD).key
    in_qa = EditRequest(**GOOD, context={"before": "Q: ", "after": "\nA:"})
    assert in_qa.key == "1f1de72e972e86216857bd12163f0cb516618e3bc2b811066a5b0e4cd0c13f32"
    glued = EditRequest(**GOOD, separator="")
    assert glued.key != EditRequest(**GOOD).key and glued.continuation == "French"
    chinese = {"prompt": "法国的首都是", "subject": "法国", "target_new": "罗马"}
    assert EditRequest(**chinese).key == EditRequest(**chinese, separator="").key
    assert EditRequest(**chinese).key != EditRequest(**chinese, separator=" ").key


def test_the_separator_holds_in_every_context():
    request = EditRequest(**{**GOOD, "separator": ""})
    assert request.in_template("He said so. {}").continuation == "French"
    assert request.in_context(qa_context()).continuation == "French"
    assert request.in_context(qa_context()).without_context == request
    header = PromptContext("<user>", "<model>\n", "")
    assert EditRequest(**GOOD).in_context(header).continuation == "French"  # a chat template has the last word
    assert EditRequest(**{**GOOD, "separator": " "}).in_context(header).continuation == "French"


@pytest.mark.parametrize(
    ("prompt", "subject", "start"),
    [
        ("Romans and {} are", "Rom", 11),  # the slot decides, not the first occurrence
        ("Rome and Rome are", "Rome", 0),
        ("Romeo likes Rome more", "Rome", 12),  # whole words first
        ("Romeos like it", "Rome", 0),  # else the first occurrence
        ("{}'s river", "Rome", 0),
        ("I met {}", "Ada {Q} Quillon", 6),
        ("(the set {x}) and {}, they say", "C++", 18),
    ],
)
def test_the_subject_span_is_the_subject(prompt, subject, start):
    request = EditRequest(prompt=prompt, subject=subject, target_new="x")
    assert request.subject_span == (start, start + len(subject))
    assert request.text[slice(*request.subject_span)] == subject
    assert request.text == prompt.replace("{}", subject)


def test_without_a_subject_there_is_no_span():
    request = EditRequest(prompt="Water boils at {x} and freezes at", target_new="zero")
    assert request.subject_span is None and request.text == request.prompt
    with pytest.raises(EditingError, match=r"'rome' needs the field 'subject'.*case 9"):
        require_subjects([EditRequest(**GOOD), EditRequest(prompt="a b", target_new="c", case_id="9")], "rome")


# --- the tokens ---------------------------------------------------------------------------------------------------

SUBJECTS = ("Elena Marković", "Port Amelin", "Ostravia", "C++", "João Sá", "J. R. Brandt", "🍞", "Velm's {Q} gate", "x")
BEFORE = ("", "The capital of ", "(", "They say: “", "Because of Ostravians and ", "A {x} or {0} of ", "Über-")
AFTER = ("", " is", "'s largest city is", ", they say, was", ") and", " — Ostravians — is", "?! The answer: {y} is")
TARGETS = ("French", " Rome", "a new city", "ćevapi", "42", "{z}", "N.Y.")
TOKENIZERS = {kind: build_tokenizer(kind) for kind in TOKENIZER_KINDS}


def decoded(tokenizer, ids):
    """Text of ids; the space that SentencePiece puts before the first word is not text."""
    return tokenizer.decode(ids, skip_special_tokens=True).removeprefix(" ")


requests = st.builds(
    lambda before, subject, after, target: EditRequest(
        prompt=f"{before}{{}}{after}", subject=subject, target_new=target
    ),
    st.sampled_from(BEFORE),
    st.sampled_from(SUBJECTS),
    st.sampled_from(AFTER),
    st.sampled_from(TARGETS),
)
kinds = st.sampled_from(TOKENIZER_KINDS)
templates = st.sampled_from([*CONTEXT_TEMPLATES, "Zoë {braces} ran. {}"])


@given(kind=kinds, request=requests, template=templates)
def test_the_fact_token_completes_the_subject(kind, request, template):
    """Round trip: the text up to the fact token contains the subject, one token less does not."""
    tokenizer = TOKENIZERS[kind]
    row = rewriting_row(tokenizer, request, template)
    upto_subject = template.replace("{}", request.text[: request.subject_span[1]], 1)
    assert decoded(tokenizer, row.ids[: row.position + 1]).startswith(upto_subject)
    assert not decoded(tokenizer, row.ids[: row.position]).startswith(upto_subject)


@given(kind=kinds, request=requests, template=templates)
def test_labels_are_the_target_and_nothing_but_the_target(kind, request, template):
    tokenizer = TOKENIZERS[kind]
    row = rewriting_row(tokenizer, request, template)
    text = template.replace("{}", request.text, 1)
    positions, targets = [p for p, _ in row.labels], [t for _, t in row.labels]
    assert positions == list(range(row.prompt_length - 1, len(row.ids)))  # pre-shifted: read where it is predicted
    assert decoded(tokenizer, [*row.ids, targets[-1]]) == f"{text} {request.target_new}"
    assert list(row.ids[row.prompt_length :]) == targets[:-1]
    assert not set(targets) & set(tokenizer.all_special_ids)
    assert row.ids.count(tokenizer.bos_token_id) == int(TOKENIZER_TABLE[kind].adds_bos)
    assert row.position < row.prompt_length


@given(kind=kinds, request=requests)
def test_fact_tokens_stand_in_order(kind, request):
    """first <= last <= after_last <= last prompt token; the first one reaches past the subject's start."""
    tokenizer = TOKENIZERS[kind]
    rows = {
        fact: rewriting_row(tokenizer, request, "{}", fact)
        for fact in ("subject_first", "subject_last", "subject_first_after_last", "last")
    }
    first, last, after, end = (row.position for row in rows.values())
    assert first <= last <= after <= end
    ids, start = rows["subject_first"].ids, request.subject_span[0]
    assert len(decoded(tokenizer, ids[:first]).rstrip("\ufffd")) <= start
    # SentencePiece may put a separate piece, "▁", before the first word of a text; it belongs to that word.
    assert len(decoded(tokenizer, ids[: first + 1])) > start or start == 0
    assert end == rows["last"].prompt_length - 1
    assert after == min(last + 1, end)


@given(kind=kinds, request=requests)
def test_the_kl_row_reads_at_the_end_of_the_subject(kind, request):
    tokenizer = TOKENIZERS[kind]
    row = kl_row(tokenizer, request)
    assert decoded(tokenizer, row.ids) == f"{request.subject} is a"
    assert decoded(tokenizer, row.ids[: row.position + 1]).startswith(request.subject)
    assert not decoded(tokenizer, row.ids[: row.position]).startswith(request.subject)
    assert row.labels == ()


@given(
    kind=kinds,
    context=st.sampled_from([a + s + b for a in BEFORE for s in SUBJECTS[:4] for b in AFTER]),
    continuation=st.sampled_from([t for target in TARGETS for t in (target, f" {target}", target.strip())]),
)
def test_a_continuation_is_tokenized_in_its_place(kind, context, continuation):
    """Both parts together are the encoding of the joined text; the context part holds no character of the rest."""
    tokenizer = TOKENIZERS[kind]
    context_ids, ids = split_continuation(tokenizer, context, continuation)
    assert context_ids + ids == encode(tokenizer, context + continuation).ids
    assert ids and not set(ids) & set(tokenizer.all_special_ids)
    assert len(decoded(tokenizer, context_ids).rstrip("\ufffd")) <= len(context)


@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
@pytest.mark.parametrize("prompt", ["The city is", "The city is "])
@pytest.mark.parametrize("target", ["Rome", " Rome", "  Rome "])
def test_prompt_and_target_are_joined_by_one_space(kind, prompt, target):
    """Prompt and target are joined by one space, regardless of the spaces in either."""
    tokenizer = TOKENIZERS[kind]
    request = EditRequest(prompt=prompt, subject="city", target_new=target)
    assert request.text + request.continuation == "The city is Rome"
    row = rewriting_row(tokenizer, request, "{}")
    expected = rewriting_row(tokenizer, EditRequest(prompt="The {} is", subject="city", target_new="Rome"), "{}")
    assert row == expected


def test_a_sentencepiece_target_has_no_bare_space_piece(tiny_tokenizer):
    """Encoded alone " Paris" would start with a lone '▁' on some tokenizers; after a prompt it must not."""
    tokenizer = tiny_tokenizer("metaspace_bos")
    row = rewriting_row(tokenizer, EditRequest(prompt="The {} is", subject="city", target_new="Paris"), "{}")
    pieces = tokenizer.convert_ids_to_tokens([token for _, token in row.labels])
    assert pieces[0] == "▁P" and "".join(pieces) == "▁Paris"


def test_the_special_tokens_come_from_the_tokenizer_not_from_a_name(tiny_tokenizer):
    """A BOS family under a neutral name: every position is one further than without BOS."""
    request = EditRequest(**GOOD)
    plain, bos = (rewriting_row(tiny_tokenizer(kind), request, "{}") for kind in ("byte_bpe", "byte_bpe_bos"))
    assert bos.position == plain.position + 1
    assert bos.prompt_length == plain.prompt_length + 1
    assert len(bos.labels) == len(plain.labels)


@pytest.mark.parametrize("template", ["no slot", "{} and {}", ""])
def test_context_templates_need_one_slot(template):
    with pytest.raises(EditingError, match="exactly one"):
        split_template(template)


def test_unknown_positions_and_slow_tokenizers_are_refused(tiny_tokenizer):
    class Slow:
        is_fast = False

    with pytest.raises(EditingError, match="fast tokenizer"):
        encode(Slow(), "text")  # type: ignore[arg-type]
    encoding = encode(tiny_tokenizer("byte_bpe"), "The city")
    with pytest.raises(EditingError, match="no token"):
        fact_position(encoding, (40, 44), 2, "subject_last")
