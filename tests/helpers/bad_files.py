"""Files that no reader can use, by name, for tests of error messages."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

FILES: dict[str, bytes] = {
    "a_file": b"x",
    "bad.safetensors": b"xx",
    "big.jsonl": b'{"prompt": ' + b"9" * 5000 + b"}",
    "bomb.yaml": b"a: &a [x,x,x,x,x,x,x,x,x]\n"
    + b"".join(b"%c: &%c [%s]\n" % (98 + i, 98 + i, b",".join([b"*%c" % (97 + i)] * 9)) for i in range(9)),
    "csv.json": b"a,b\n1,2\n",
    "deep.jsonl": b'{"a": ' * 100_000,
    "deep.yaml": b"a: " + b"[" * 400 + b"]" * 400,
    "deep_list.json": b"[" * 100_000,
    "duplicate.jsonl": b'{"prompt": "a", "prompt": "b", "target_new": "c"}\n',
    "duplicate.yaml": b"lr: 1\nlr: 2\n",
    "empty.json": b"",
    "escape.jsonl": json.dumps({"prompt": "\x1b[31m{}\u202e", "target_new": "y"}).encode(),
    "escape.yaml": b'"\\e[31mlr": 1\n',
    "full/file": b"x",
    "gguf/weights.gguf": b"GGUF",
    "gz.jsonl": gzip.compress(b'{"prompt": "a"}'),
    "huge.jsonl": json.dumps({"prompt": "{} " * 300_000, "target_new": "y", "subject": "s"}).encode(),
    "infinite.jsonl": b'{"prompt": "a", "target_new": "c", "x": 1e999}\n',
    "latin.jsonl": b'{"prompt": "caf\xe9"}',
    "list.yaml": b"[1]",
    "long.yaml": b"num_steps: " + b"9" * 5000,
    "long_hex.yaml": b"num_steps: 0x" + b"9" * 5000,
    "model/config.json": b"{}",
    "nan.jsonl": b'{"x": NaN}',
    "no_subject.jsonl": b'{"prompt": "a is", "target_new": "y"}\n',
    "null.jsonl": b"null\n",
    "nul.json": b"\0\0\0",
    "numbers.jsonl": b"1\n2\n",
    "plain.jsonl": b'{"question": "q", "gold": "g", "answer": "a"}\n',
    "pretty.json": b'{\n "prompt": "a"\n}',
    "request.jsonl": b'{"prompt": "{} is", "subject": "x", "target_new": "y", "target_true": "z"}\n',
    "sample.jsonl": b'{"resps": [["x"]], "doc": {}}\n',
    "self.yaml": b"a: &a [*a]",
    "surrogate.jsonl": b'{"prompt": "\\ud800", "target_new": "c"}',
    "tab.yaml": b"a:\n\t- b",
    "tag.yaml": b"a: !!python/object/apply:os.system [ls]",
    "twice.jsonl": b'{"prompt": "a is", "target_new": "y"}\n' * 2,
    "typed.jsonl": b'{"prompt": 5, "target_new": "y"}\n',
    "unknown.jsonl": b'{"prompt": "a", "target_new": "y", "sbject": "a"}\n',
    "utf16.json": '{"prompt": "a"}'.encode("utf-16"),
}
FOLDERS = ("empty", "folder.jsonl", "folder.yaml")


def write_bad_files(root: Path) -> None:
    """Write all of them, two folders with the names of files, and a pipe that nobody writes to."""
    for name, content in FILES.items():
        path = root / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    for name in FOLDERS:
        (root / name).mkdir()
    os.mkfifo(root / "pipe.jsonl")
