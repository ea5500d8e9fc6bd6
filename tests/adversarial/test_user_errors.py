"""Mistakes of users through both commands: one printable message each, and no weight is loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from bad_files import write_bad_files
from command_line import run_verb
from lm_eval.utils import simple_parse_args_string
from paths import RECORDS
from task_managers import task_manager

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.printable import MAX_MESSAGE

BAKE = str(RECORDS / "bake_qa.jsonl")
Run = Callable[..., str]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mistakes")
    write_bad_files(root)
    return root


@pytest.fixture(scope="module")
def model_folder(tiny_path: Callable[..., Path]) -> str:
    return str(tiny_path("llama", "byte_bpe_bos"))


@pytest.fixture(autouse=True)
def _no_weights(monkeypatch: pytest.MonkeyPatch, work: Path) -> Iterator[None]:
    """Fail where weights would be read; keep keys and caches of the user out."""
    monkeypatch.setattr(
        "lm_eval.models.huggingface.HFLM._create_model", lambda *_args, **_kwargs: pytest.fail("weights are loaded")
    )
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("LM_EDIT_CACHE", str(work / "cache"))
    monkeypatch.chdir(work)
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(level)


@pytest.fixture
def harness(model_folder: str) -> Run:
    """Run lm-eval with a string of model arguments and return the message of the error it raises."""

    def run(
        arguments: str = "", metadata: Mapping[str, Any] | None = None, task: str = "bake_rq", **options: Any
    ) -> str:
        named = arguments if "pretrained=" in arguments else f"pretrained={model_folder},{arguments}"
        # As lm-eval builds the metadata of its own manager.
        manager = task_manager({"data": BAKE, **simple_parse_args_string(named.rstrip(",")), **(metadata or {})})
        with pytest.raises(EditingError) as caught:
            lm_eval.simple_evaluate(
                model="edited_hf",
                model_args=f"device=cpu,store=off,{named}".rstrip(","),
                tasks=[task],
                task_manager=manager,
                bootstrap_iters=0,
                **options,
            )
        return str(caught.value)

    return run


def checked(message: str) -> str:
    """A message, if it is short, printable and no traceback."""
    assert len(message) <= MAX_MESSAGE
    assert all(character == "\n" or character.isprintable() for character in message)
    assert "Traceback" not in message and message.count("\n") <= 6
    return message


# model_args -> part of the message
OPTIONS = """
editor=rom | Did you mean 'rome'
editor=5 | editor=5 is no text
editor=none | editor=None is no text
editor=a:b | there is no module 'a'
editor=json:loads | not a subclass
edtor=rome | Did you mean 'editor'
mode=sngle | Did you mean 'single'
mode=5 | mode=5 is no text
mode=batch | mode=batch needs edits=
mode=loaded | mode=loaded needs load_edit=
mode=sequential | mode=sequential needs edits=
edits=bake | no meaning in mode=single
num_edits=3 | no meaning in mode=single
checkpoints=3 | no meaning in mode=single
retention=true | no meaning in mode=single
group_size=2 | no meaning in mode=single
mode=sequential,edits=5 | edits=5 is no text
mode=sequential,edits=bakee | Did you mean 'bake'
mode=sequential,edits=bake,data=nowhere | neither mini, hub, a file nor a folder
mode=sequential,edits=bake,data=5 | data=5 is no text
mode=sequential,edits=missing.jsonl | no such file
mode=sequential,edits=empty.json | holds no records
mode=sequential,edits=nul.json | NUL bytes
mode=sequential,edits=latin.jsonl | not UTF-8
mode=sequential,edits=utf16.json | not UTF-8
mode=sequential,edits=gz.jsonl | compressed (gzip)
mode=sequential,edits=csv.json | not valid JSON
mode=sequential,edits=pretty.json | one JSON object per line
mode=sequential,edits=duplicate.jsonl | the key 'prompt' occurs twice
mode=sequential,edits=infinite.jsonl | the number 1e999 is too large
mode=sequential,edits=nan.jsonl | NaN is not a JSON number
mode=sequential,edits=big.jsonl | too many digits
mode=sequential,edits=deep.jsonl | nested too deeply
mode=sequential,edits=deep_list.json | nested too deeply
mode=sequential,edits=surrogate.jsonl | surrogate pair
mode=sequential,edits=folder.jsonl | it is a folder
mode=sequential,edits=pipe.jsonl | a pipe or a device
mode=sequential,edits=numbers.jsonl | a mapping with 'prompt'
mode=sequential,edits=null.jsonl | a mapping with 'prompt'
mode=sequential,edits=typed.jsonl | a string is needed
mode=sequential,edits=unknown.jsonl | Did you mean 'subject'
mode=sequential,edits=no_subject.jsonl | needs the field 'subject'
mode=sequential,edits=escape.jsonl | \\x1b[31m
mode=sequential,edits=huge.jsonl | exactly one {} marks the subject
mode=sequential,edits=request.jsonl,num_edits=9 | has 1 edited cases
mode=sequential,edits=request.jsonl,num_edits=0 | num_edits is 0
mode=sequential,edits=request.jsonl,num_edits=abc | num_edits is 'abc'
mode=sequential,edits=request.jsonl,checkpoints=9 | lie beyond the 1 edited cases
mode=sequential,edits=request.jsonl,checkpoints=x | checkpoints='x'
mode=sequential,edits=request.jsonl,guard=panic | guard='panic'
mode=sequential,edits=request.jsonl,retention=yes | retention='yes'
mode=batch,edits=request.jsonl,group_size=0 | group_size is 0
mode=batch,edits=BAKE,editor=rome | one request at a time
load_edit=missing.safetensors | no such file
load_edit=bad.safetensors | bad.safetensors cannot be read
load_edit=a_file | a_file cannot be read
load_edit=empty | holds no saved edit
load_edit=true | load_edit=True is no text
load_edit=pipe.jsonl | a pipe or a device
load_edit=model | whole model
store=a_file | a_file is a file; name a folder
store=a_file/x | a_file is a file; name a folder
store=5 | store=5 is no text
seed=-1 | seed is -1
seed=abc | seed is 'abc'
seed=1.5 | seed is 1.5
answer=patched | Did you mean 'patch'
engine=fas | Did you mean 'fast'
icl=maybe | icl='maybe'
icl=5 | icl=5
icl_args=k:2 | icl_args has no meaning
icl=true,editor=ike | is a context already
icl=true,mode=none | makes no edit
icl=true,icl_args=kk:2 | unknown editor setting 'kk'
max_batch_tokens=0 | max_batch_tokens is 0
editor_args=missing.yaml | no such file
editor_args=list.yaml | a mapping of settings
editor_args=bomb.yaml | aliases write out
editor_args=self.yaml | an alias refers to itself
editor_args=tag.yaml | could not determine a constructor
editor_args=duplicate.yaml | the key 'lr' occurs twice
editor_args=deep.yaml | nested too deeply
editor_args=long.yaml | digits
editor_args=long_hex.yaml | digits
editor_args=tab.yaml | cannot start any token
editor_args=escape.yaml | unknown editor setting '\\x1b[31mlr'
editor_args=folder.yaml | it is a folder
editor_args=nonsense | write editor_args=
editor_args=5 | a mapping, a YAML file or inline
editor_args=: | not readable
editor_args=lr:1;lr:2 | the key 'lr' occurs twice
editor_args=lrr:1 | Did you mean 'lr'
editor_args=lr:nan | 'lr' is nan
editor_args=lr:fast | 'lr' is 'fast'
editor_args=layers:[99] | blocks 0 to 2
editor_args=layers:[-1] | 'layers' is -1
editor_args=layers:[] | name one layer
editor_args=layers:[a] | 'layers' is ['a']
editor_args=layers:5 | 'layers' is 5
editor_args=num_steps:0 | a positive number
editor_args=num_steps:1.5 | 'num_steps' is 1.5
editor_args=fact_token:x | accepted: 'subject_last'
editor_args=context_templates:[a] | exactly one {}
editor_args=second_moments:missing.safetensors | no such file
editor=memit,editor_args=second_moments:bad.safetensors | bad.safetensors cannot be read
editor_args=second_moments:nowhere | there is no file or folder
editor_args=second_moments:empty | the given source is empty
editor=mend | needs a hyper-network
editor=mend,editor_args=artifact:nowhere | no trained hyper-network
editor=mend,editor_args=artifact:a_file | cannot read the hyper-network
editor=ike,editor_args=embedder:words;pool:nowhere.jsonl | no such file
editor=ike,editor_args=embedder:words;pool:request.jsonl | 'requested_rewrite' is missing
editor=ike,editor_args=embedder:words;pool:csv.json | not valid JSON
editor=rect,editor_args=base:rectt | Did you mean 'rect'
editor=rect,editor_args=base:ike | an editor of weights is needed
editor=rect,editor_args=layers:[99] | blocks 0 to 2
device=gpu | device='gpu' is no device
device=mps | device=mps cannot be used
device=cuda:77 | device=cuda:77 does not exist
dtype=float3 | no precision of weights
dtype=int | no precision of weights
dtype=7 | no precision of weights
softmax_dtype=nope | cannot be used with edits
batch_size=abc | batch_size='abc'
max_length=abc | max_length='abc'
max_length=3 | does not fit into 3 positions
prefix_token_id=abc | prefix_token_id='abc'
backend=seq | backend=seq cannot be used
backend=seq2seq | decoder-only
parallelize=maybe | not a switch
trust_remote_code=x | not a switch
attn_implementation=nope | nope
tokenizer=nowhere | cannot be used with these options
gguf_file=nope.gguf | nope.gguf
editor_args=layers:[0,1] | splits a string of model arguments at every comma
subfolder=nope | holds no nope/config.json
enable_thinking=true | think_end_token
pretrained=/nowhere | is not there
pretrained=a_file | is a file
pretrained=empty | holds no config.json
pretrained=gguf | for its GGUF file name the file: pretrained=gguf/weights.gguf
pretrained=gguf/weights.gguf | cannot be read as a model
pretrained=model | cannot be used with these options
pretrained=5 | names no model
pretrained=no/such-model | no/such-model
"""


def rows(table: str) -> list[tuple[str, str]]:
    parts = [line.partition(" | ") for line in table.strip().split("\n")]
    return [(arguments.strip(), expected.strip()) for arguments, _, expected in parts]


@pytest.mark.parametrize(("arguments", "expected"), rows(OPTIONS))
def test_model_options(harness: Run, arguments: str, expected: str) -> None:
    assert expected in checked(harness(arguments.replace("edits=BAKE", f"edits=bake,data={BAKE}")))


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"data": "nowhere"}, "neither mini, hub"),
        ({"data": 5}, "data=5 is not a place"),
        ({"data": ""}, "not a place"),
        ({"data": "x\0y"}, "NUL byte"),
        ({"data": "a" * 5000}, "cannot be read"),
        ({"data": "empty"}, "looked for BAKE_qa.json"),
        ({"data": "pipe.jsonl"}, "neither mini, hub"),
        ({"data": "empty.json"}, "holds no records"),
        ({"data": "nul.json"}, "NUL bytes"),
        ({"data": "gz.jsonl"}, "compressed (gzip)"),
        ({"data": "csv.json"}, "not valid JSON"),
        ({"data": "duplicate.jsonl"}, "occurs twice"),
        ({"data": "request.jsonl"}, "it is a record of CounterFact (flat), not of BAKE-Q&J"),
        ({"data": "numbers.jsonl", "bad_records": "skip"}, "an object is needed"),
        ({"data": "hub"}, "Use data=mini"),
        ({"bad_records": "ignore"}, "Accepted: error, skip"),
        ({"mode": "sequential", "checkpoints": "x"}, "checkpoints='x'"),
        ({"mode": "sequential", "immediate": "maybe"}, "immediate='maybe'"),
        ({"score_unedited_cases": "maybe"}, "not a switch"),
    ],
)
def test_task_settings(harness: Run, metadata: dict[str, Any], expected: str) -> None:
    assert expected in checked(harness(metadata=metadata))


@pytest.mark.parametrize(
    ("judge", "expected"),
    [
        ("foo", "judge 'foo' is unknown"),
        (5, "judge=5 names no judge"),
        ("missing.yaml", "no such file"),
        ("list.yaml", "a mapping of settings"),
        ("bomb.yaml", "aliases write out"),
        ("folder.yaml", "it is a folder"),
        ("{bad", "not valid JSON"),
        ('{"backend": 1e999}', "too large"),
        ("hf:", "name the judge model"),
        ("hf:/nowhere", "cannot be loaded"),
        ("openai:m@http://u:p@h", "plain address"),
        ("published", "OPENAI_API_KEY"),
        ({"preset": ["x"]}, "Accepted: published"),
        ({"backend": ["x"], "model": "m"}, "Accepted: openai, hf"),
        ({"backend": "hf", "model": "m", "prompt": "nope"}, "no judge prompt 'nope'"),
        ({"backend": "hf", "model": "m", "prompt": "a_file"}, "are all needed"),
        ({"backend": "hf", "model": "m", "batch_size": 0}, "batch_size is 0"),
        ({"backend": "hf", "model": "m", "api_key": "sk-1"}, "from the environment only"),
        ({"backend": "hf", "model": "m", "revision": 5}, "a text is needed"),
        ({"backend": "openai", "model": "m", "store": "a_file"}, "a_file is a file"),
    ],
)
def test_judges(harness: Run, judge: object, expected: str) -> None:
    message = harness(metadata={"judge": judge, "data": "mini"}, task="qaedit_wild_reliability")
    assert expected in checked(message)
    assert "sk-1" not in message


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"gen_kwargs": "do_sample=True,temperature=1.0"}, "decode greedily"),
        ({"gen_kwargs": "top_p=0.3"}, "top_p"),
        ({"gen_kwargs": "max_gen_toks=0"}, "'max_gen_toks' is 0"),
        ({"gen_kwargs": "max_gen_toks=100000"}, "leaves no room"),
        ({"gen_kwargs": "max_gen_toks=abc"}, "'max_gen_toks' is 'abc'"),
        ({"gen_kwargs": "until=5"}, "'until' is 5"),
        ({"apply_chat_template": True}, "no chat template"),
        ({"use_cache": "answers"}, "Leave it out"),
    ],
)
def test_options_of_the_harness(harness: Run, options: dict[str, Any], expected: str) -> None:
    assert expected in checked(harness(metadata={"data": "mini"}, task="qaedit_wild_reliability", limit=1, **options))


# lm-edit arguments -> part of the message; MODEL, HALVED and BAKE stand for options
VERBS = """
editors rom | Did you mean 'rome'
editors a:b | there is no module 'a'
validate bakee | Did you mean 'bake'
validate nowhere.jsonl | there is no such file
validate pipe.jsonl | it is a pipe or a device
validate csv.json | not valid JSON
validate deep.jsonl | nested too deeply
validate big.jsonl | too many digits
validate bake --data nowhere | neither mini, hub
cache prune | --max-size is missing
cache prune --max-size lots | size 'lots'
cache --store a_file | a_file is a file
demo --dtype int8 | Accepted: float32
check-editor rom | Did you mean 'rome'
check-editor rome --models gpt9 | unknown model family
check-editor rome --checks nope | unknown check
edit --editor rom --edits request.jsonl --out o MODEL | Did you mean 'rome'
edit --editor rome --edits nowhere.jsonl --out o MODEL | no such file
edit --editor rome --edits request.jsonl --out full MODEL | is not empty
edit --editor rome --edits request.jsonl --out a_file MODEL | a_file is not a folder
edit --editor rome --edits request.jsonl --out a_file/x MODEL | cannot write to the folder
edit --editor rome --edits request.jsonl --out o --edit-batch-size 2 MODEL | add --sequential
edit --editor rome --edits request.jsonl --out o --num-edits 5 MODEL | has 1 edited cases
edit --editor rome --edits request.jsonl --out o --num-edits 0 MODEL | '0' is not accepted
edit --editor rome --edits no_subject.jsonl --out o MODEL | needs the field 'subject'
edit --editor rome --edits bake --data BAKE --out o --joint MODEL | one request at a time
edit --editor rome --edits request.jsonl --out o --store a_file MODEL | a_file is a file
edit --editor rome --edits request.jsonl --out o --seed -1 MODEL | '-1' is not accepted
edit --editor rome --edits request.jsonl --out o --editor-args layers:[99] MODEL | blocks 0 to 2
edit --editor rome --edits request.jsonl --out o --editor-args bomb.yaml MODEL | aliases write out
edit --editor rome --edits request.jsonl --out o --dtype int8 MODEL | no precision of weights
export missing.safetensors --format peft --out o MODEL | no such file
export bad.safetensors --format peft --out o MODEL | cannot be read
export empty --format peft --out o MODEL | holds no saved edit
export bad.safetensors --format peft --out full MODEL | is not empty
export pipe.jsonl --format merged --out o MODEL | a pipe or a device
stats MODEL | no layers are named
stats --editor rom MODEL | Did you mean 'rome'
stats --editor ft_m MODEL | uses no second moments
stats --editor-args lr:1 MODEL | add --editor
stats --layers 99 MODEL | blocks 0 to 2
stats --layers 1 --max-length 9999 MODEL | documents behind second moments are cut after 9999 tokens
stats --layers 1 --source nowhere MODEL | there is no file or folder
stats --layers 1 --source latin.jsonl MODEL | not UTF-8
stats --layers 1 --folder a_file MODEL | a_file is not a folder
stats --show --folder a_file | a_file is a file
trace --edits nowhere.jsonl MODEL | no such file
trace --edits no_subject.jsonl MODEL | needs the field 'subject'
trace --edits request.jsonl --answer maybe MODEL | accepted: known
trace --edits request.jsonl --out full MODEL | is a folder
trace --edits request.jsonl --store a_file MODEL | a_file is a file
tune --editor rome --edits bake --data BAKE --num-edits 999 MODEL | lower --num-edits
tune --editor rome --edits bake --data BAKE --num-edits 2 --layers x MODEL | --layers x
tune --editor rome --edits bake --data BAKE --num-edits 2 --layers 99 MODEL | blocks 0 to 2
tune --editor rome --edits bake --data BAKE --num-edits 2 --vary lr MODEL | write name=value
tune --editor rome --edits bake --data BAKE --num-edits 2 --vary lr=[;2 MODEL | not readable
tune --editor rome --edits bake --data BAKE --num-edits 2 --vary lrr=1;2 MODEL | Did you mean 'lr'
tune --editor rome --edits bake --data BAKE --num-edits 2 --out full MODEL | is a folder
tune --editor rome --edits bake --data BAKE --num-edits 2 --store a_file MODEL | a_file is a file
tune --editor rome --edits request.jsonl MODEL | has 1 facts after --skip 0
tune --editor rome --edits request.jsonl --num-edits 1 MODEL | add 'locality_prompt' and 'locality_ground_truth'
train mend --edits nowhere.jsonl --out o MODEL | no such file
train mend --edits request.jsonl --out o MODEL | add edits
train mend --edits bake --data BAKE --out a_file MODEL | a_file is not a folder
train mend --edits bake --data BAKE --out o --validation-share 2 MODEL | '2' is not accepted
train serac --edits bake HALVED --out o --settings classifier:minilm;counterfactual:full MODEL | its tokenizer
train serac --edits bake HALVED --out o --settings classifier:full MODEL | classifier 'full' cannot be loaded
train serac --edits bake HALVED --out o --settings artifact:x MODEL | is the output of training
build-qaedit nowhere.jsonl --locality plain.jsonl --writer hf:x --out o.json | no such file
build-qaedit =plain.jsonl --locality plain.jsonl --writer hf:x --out o.json | write NAME=FILE
build-qaedit plain.jsonl --locality plain.jsonl --writer hf:x --out o.json | usable loc and loc_ans
build-qaedit a_file --locality plain.jsonl --writer hf:x --out o.json | not valid JSON
build-qaedit gz.jsonl --locality plain.jsonl --writer hf:x --out o.json | compressed (gzip)
build-qaedit pipe.jsonl --locality plain.jsonl --writer hf:x --out o.json | a pipe or a device
build-qaedit null.jsonl --locality plain.jsonl --writer hf:x --out o.json | the row is no object
build-qaedit deep.jsonl --locality plain.jsonl --writer hf:x --out o.json | nested too deeply
build-qaedit plain.jsonl --locality plain.jsonl --writer nobody --out o.json | a writer is named as a judge is
build-qaedit plain.jsonl --locality plain.jsonl --writer bomb.yaml --out o.json | aliases write out
build-qaedit plain.jsonl --locality plain.jsonl --writer hf:x --store a_file --out o.json | a_file is a file
build-qaedit plain.jsonl --locality plain.jsonl --writer hf:x --seed -1 --out o.json | '-1' is not accepted
judge nowhere --judge em | there is no file or folder
judge empty --judge em | no samples_*.jsonl
judge plain.jsonl | no judge is configured
judge plain.jsonl --judge emm | Did you mean 'em'
judge plain.jsonl --judge em --score x | score 'x' is unknown
judge plain.jsonl --judge published_setting --store a_file | a_file is a file
judge sample.jsonl --judge em | doc_id is missing
judge csv.json --judge em | not valid JSON
judge-quality --pairs nowhere.jsonl | no such file
judge-quality --pairs numbers.jsonl | are needed
judge-quality --pairs folder.jsonl | it is a folder
"""


@pytest.mark.parametrize(("line", "expected"), rows(VERBS))
def test_verbs(capsys: pytest.CaptureFixture[str], model_folder: str, line: str, expected: str) -> None:
    line = line.replace("HALVED", "--data BAKE --validation-share 0.5").replace("BAKE", BAKE)
    arguments = line.replace("MODEL", f"--pretrained {model_folder} --device cpu").split()
    assert run_verb(arguments) == 2
    printed = capsys.readouterr().err
    message = printed[printed.index(f"lm-edit {arguments[0]}: ") :].rstrip("\n")
    assert expected in checked(message.removeprefix(f"lm-edit {arguments[0]}: "))
