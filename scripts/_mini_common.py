"""Shared parts of the builders of the embedded sample sets: the unedited demo model, fact tables, files.

The builders turn plain facts from ``scripts/facts`` into candidate records, put their questions to the unedited demo
model (float32, CPU, greedy) and keep the records that qualify, each with the measurements in its field ``provenance``.
They are deterministic: a second run writes the same file.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # run from a clone that is not installed
    sys.path.insert(0, str(ROOT))

from edit_hooks.assets.demo_model import (  # noqa: E402
    DEMO_NAME,
    DEMO_SHA256,
    demo_model_path,
)
from judges.match import normalize  # noqa: E402

FACTS = ROOT / "scripts" / "facts"
BUILDER_VERSION = 1  # increase it when the same facts give other records
NLL_TOLERANCE = 0.02  # another CPU, thread count or torch version moves the fourth decimal; a changed prompt far more
NLL_DIGITS = 3
# An argmax at a near tie, and greedy text after it, may differ on another CPU. These fields are not compared; the
# conditions for a record to qualify are checked again instead.
NEAR_TIE_FIELDS = (
    ".true_is_greedy",
    ".first_token",
    ".answer",
    ".rephrase_answer",
    ".rephrase_is_true",
    ".locality_answer",
)


class Scored(NamedTuple):
    """A target after a prompt: mean NLL per token, whether every teacher-forced argmax matches, the first argmax."""

    nll: float
    is_greedy: bool
    first_argmax: str


class Oracle:
    """The unedited demo model, with a cache of its scores."""

    def __init__(self, num_threads: int = 2, batch_size: int = 48) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(num_threads)
        path = demo_model_path("float32")
        self.tokenizer: Any = AutoTokenizer.from_pretrained(path)
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.batch_size = batch_size
        self._scores: dict[tuple[str, str], Scored] = {}

    def score(self, pairs: Iterable[tuple[str, str]], label: str = "scoring") -> None:
        """Score (prompt, target) pairs in batches of similar length; :meth:`get` returns the results."""
        missing = sorted({pair for pair in pairs if pair not in self._scores}, key=lambda pair: (len(pair[0]), pair))
        for batch in progress(list(_batches(missing, self.batch_size)), label):
            self._score_batch(batch)

    def get(self, prompt: str, target: str) -> Scored:
        """The score of one pair, from the cache or from the model."""
        if (prompt, target) not in self._scores:
            self._score_batch([(prompt, target)])
        return self._scores[prompt, target]

    def _score_batch(self, pairs: Sequence[tuple[str, str]]) -> None:
        import torch

        rows = [self._join(prompt, target) for prompt, target in pairs]
        width = max(len(ids) for ids, _ in rows)
        # Padding on the right needs no mask: a causal model's earlier positions do not see it.
        ids_BT = torch.tensor([ids + [self.tokenizer.pad_token_id] * (width - len(ids)) for ids, _ in rows])
        positions = [(row, at - 1) for row, (ids, start) in enumerate(rows) for at in range(start, len(ids))]
        targets_N = torch.tensor([rows[row][0][at + 1] for row, at in positions])
        with torch.inference_mode():
            hidden_BTD = self.model.model(input_ids=ids_BT, use_cache=False).last_hidden_state
            hidden_ND = hidden_BTD[[row for row, _ in positions], [at for _, at in positions]]
            logprobs_NV = self.model.lm_head(hidden_ND).log_softmax(-1)
        values_N = logprobs_NV.gather(1, targets_N[:, None])[:, 0].tolist()
        argmax_N = logprobs_NV.argmax(-1).tolist()
        for row, pair in enumerate(pairs):
            of_row = [number for number, (owner, _) in enumerate(positions) if owner == row]
            self._scores[pair] = Scored(
                nll=-sum(values_N[number] for number in of_row) / len(of_row),
                is_greedy=all(argmax_N[number] == int(targets_N[number]) for number in of_row),
                first_argmax=self.tokenizer.decode([argmax_N[of_row[0]]]).strip(),
            )

    def _join(self, prompt: str, target: str) -> tuple[list[int], int]:
        """Token ids of prompt, one space and target, and the index at which the target starts."""
        prompt_ids = self.tokenizer(prompt).input_ids
        ids = self.tokenizer(f"{prompt} {target}").input_ids
        if ids[: len(prompt_ids)] != prompt_ids or len(ids) == len(prompt_ids):
            raise ValueError(f"the seam between {prompt!r} and {target!r} is not at a token border; reword the prompt")
        return ids, len(prompt_ids)

    def generate(
        self, prompts: Sequence[str], stops: Sequence[str], max_new_tokens: int, label: str, batch_size: int = 24
    ) -> list[str]:
        """Greedy continuations without special tokens; a few tokens may follow the first stop string."""
        import torch

        def finished(ids_BT: torch.Tensor, _: object) -> torch.Tensor:
            """Mask of rows that contain a stop string, so that a batch ends with its longest answer."""
            texts = self.tokenizer.batch_decode(ids_BT[:, start:], skip_special_tokens=True)
            return torch.tensor([any(stop in text for stop in stops) for text in texts])

        self.tokenizer.padding_side = "left"
        answers: list[str] = []
        for batch in progress(list(_batches(prompts, batch_size)), label):
            encoded = self.tokenizer(batch, return_tensors="pt", padding=True)
            start = encoded["input_ids"].shape[1]
            with torch.inference_mode():
                ids = self.model.generate(
                    **encoded, max_new_tokens=max_new_tokens, do_sample=False, stopping_criteria=[finished]
                )
            answers += self.tokenizer.batch_decode(ids[:, start:], skip_special_tokens=True)
        return answers


def mentions(answer: str, target: str) -> bool:
    """True if the answer contains the target, also in a word ("180 degrees", "Incas"), or is a part ("Gutenberg")."""
    answer_words, true = normalize(answer), normalize(target)
    return true in answer_words or (bool(answer_words) and set(answer_words.split()) <= set(true.split()))


def provenance(table: Path, **measured: Any) -> dict[str, Any]:
    """Origin of a record and measurements of the unedited model."""
    return {
        "facts": table.relative_to(ROOT).as_posix(),
        "builder_version": BUILDER_VERSION,
        "model": DEMO_NAME,
        "model_sha256": DEMO_SHA256,
        "dtype": "float32",
        **measured,
    }


def rounded(value: float) -> float:
    """An NLL with the digits of the files."""
    return round(value, NLL_DIGITS)


def differences(stored: Any, measured: Any, where: str = "provenance") -> Iterator[str]:
    """Differences of two provenance objects: numbers beyond the tolerance, and any other values."""
    if isinstance(stored, dict) and isinstance(measured, dict):
        for key in sorted({*stored, *measured}):
            yield from differences(stored.get(key), measured.get(key), f"{where}.{key}")
    elif isinstance(stored, list) and isinstance(measured, list) and len(stored) == len(measured):
        for number, (left, right) in enumerate(zip(stored, measured, strict=True)):
            yield from differences(left, right, f"{where}[{number}]")
    elif isinstance(stored, float) and isinstance(measured, float):
        if abs(stored - measured) > NLL_TOLERANCE:
            yield f"{where}: stored {stored}, measured {measured}"
    elif stored != measured and not where.endswith(NEAR_TIE_FIELDS):
        yield f"{where}: stored {stored!r}, measured {measured!r}"


def progress(items: Sequence[Any], label: str) -> Iterable[Any]:
    """The items under a progress bar on stderr."""
    from tqdm import tqdm

    return tqdm(items, desc=label, file=sys.stderr)


def read_tsv(path: Path) -> list[dict[str, str]]:
    """Rows of a table with a header line; padded and empty cells are errors."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    for number, row in enumerate(rows, start=2):
        for name, value in row.items():
            if not isinstance(name, str) or not isinstance(value, str) or not value or value != value.strip():
                raise ValueError(f"{path}, line {number}, column {name!r}: {value!r} is empty, padded or out of place")
    return rows


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """All records of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def write_jsonl(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Write under a temporary name, then rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records), encoding="utf-8")
    temporary.replace(path)


def arguments(
    description: str, output: Path, argv: Sequence[str] | None = None, *more: argparse.ArgumentParser
) -> argparse.Namespace:
    """The command line of the builders; ``more`` are parsers of options that only one has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, parents=more
    )
    parser.add_argument("--output", type=Path, default=output, help="file to write or check (default: %(default)s)")
    parser.add_argument("--check", action="store_true", help="measure the shipped records again and write nothing")
    parser.add_argument("--sample", type=int, metavar="N", help="with --check: only N records, evenly spread")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    options = parser.parse_args(argv)
    if options.sample is not None and (not options.check or options.sample < 1):
        parser.error("--sample needs --check and a number of at least 1")
    return options


def check_or_build(
    options: argparse.Namespace,
    check: Callable[[Oracle, Path, int | None], int],
    build: Callable[[Oracle], list[dict[str, Any]]],
) -> int:
    """What the command line of every builder does: measure shipped records again, or write new ones.

    Returns:
        The exit code, 1 if a check finds differences.
    """
    oracle = Oracle(num_threads=options.threads)
    if options.check:
        return check(oracle, options.output, options.sample)
    records = build(oracle)
    write_jsonl(options.output, records)
    print(f"{options.output}: {len(records)} records")
    return 0


def spread(records: Sequence[Any], num: int | None) -> list[Any]:
    """``num`` of the records, evenly spread over the file; all for ``None``."""
    if num is None or num >= len(records):
        return list(records)
    return [records[number * len(records) // num] for number in range(num)]


def report(problems: Sequence[str], num_records: int, path: Path) -> int:
    """Print the result of a check; returns the exit code."""
    for problem in problems:
        print(problem)
    print(f"{path}: {num_records} records checked, {len(problems)} differences")
    return 1 if problems else 0


def _batches(items: Sequence[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), size):
        yield list(items[start : start + size])
