"""Damaged entries of every cache are computed again: never a crash, never believed."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import DAMAGE, flipped, replace_by_a_folder, restore
from lm_runs import answers, assert_same_answers, build, run

from edit_hooks import EditingError
from edit_hooks.answers import GeneratedText
from edit_hooks.contract.tiny_models import SENTENCES, build_tokenizer
from edit_hooks.deltas.delta import Delta, Factor
from edit_hooks.edit_report import Cost, Effects
from edit_hooks.locate.moments.null_space import null_space_of
from edit_hooks.locate.moments.second_moments import MomentSettings, second_moments
from edit_hooks.store.answer_cache import AnswerCache
from edit_hooks.store.layout import MARKER
from edit_hooks.store.store import Description, Store
from edit_hooks.utils.progress import Finished
from judges.backends.base import Reply
from judges.base import Item
from judges.model.verdict_store import VerdictStore
from lm_edit.cli.main import main

DESCRIPTION = Description(what="test", model={"weights": "m"}, code="c", inputs={"a": [1, "x"]})


def small_delta() -> Delta:
    delta = Delta(factors={"layer": Factor(torch.tensor([[1.0], [2.0]]), torch.ones(3, 1), transposed=True)})
    delta.meta |= {"state_after": "s1", "batch": ["k1", "k2"]}
    delta.diagnostics |= {"final_loss": 0.25}
    delta.effects = Effects(first_token_kl=float("inf"), wrecked=True, target_nlls=((1.0, 0.5), (2.0, 0.25)))
    delta.cost, delta.warnings, delta.unusable = Cost(seconds=1.5), ["ill-conditioned"], {"k3": "too long"}
    return delta


def content_of(delta: Delta) -> tuple[Any, ...]:
    return delta.checksum(), delta.meta, delta.report(), delta.unusable, delta.factors["layer"].transposed


def test_every_byte_of_an_edit(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save_delta(DESCRIPTION, small_delta())
    (path,) = tmp_path.rglob("*.safetensors")
    right = content_of(Delta.load(path))
    believed = refused = 0
    for content in flipped(path.read_bytes()):
        path.write_bytes(content)
        loaded = store.load_delta(DESCRIPTION)
        assert loaded is None or content_of(loaded) == right
        believed, refused = believed + (loaded is not None), refused + (loaded is None)
    assert believed < 20 < refused  # what is left intact is padding, and the name of the header's checksum


def test_an_edit_that_the_user_names_is_refused(tmp_path: Path, tiny_path: Any) -> None:
    path = tmp_path / "edit.safetensors"
    small_delta().save(path)
    content = path.read_bytes()
    for damaged in flipped(content, every=7):
        path.write_bytes(damaged)
        try:
            assert content_of(Delta.load(path))[0] == small_delta().checksum()
        except EditingError as error:
            assert str(path) in str(error)
    path.write_bytes(content.replace(b"0.25", b"0.35"))
    with pytest.raises(EditingError, match="checksum of the header differs"):
        build(str(tiny_path("gpt2")), load_edit=str(path), editor_args={}).session  # noqa: B018


def test_every_byte_of_a_json_result(tmp_path: Path) -> None:
    store = Store(tmp_path)
    content = {"context_templates": ["{}", "naïve. {}"], "loss": 0.125, "none": None}
    store.save_json("configurations", DESCRIPTION, content)
    (path,) = tmp_path.rglob("*.json")
    for damaged in flipped(path.read_bytes()):
        path.write_bytes(damaged)
        assert store.load_json("configurations", DESCRIPTION) in (None, content)


@dataclasses.dataclass(frozen=True)
class Question:
    prompt: str


def refuse(missing: Sequence[int], _finished: Finished) -> None:
    raise AssertionError(f"these answers are stored: {missing}")


def test_every_kind_of_damage_to_the_answers(tmp_path: Path) -> None:
    questions = [Question(f"q{number}") for number in range(3)]

    def answer(missing: Sequence[int], finished: Finished) -> None:
        finished(
            range(len(missing)), [GeneratedText(raw=questions[one].prompt.upper(), token_ids=(1,)) for one in missing]
        )

    def ask(compute: Callable[[Sequence[int], Finished], None]) -> list[Any]:
        return AnswerCache(tmp_path, {}).get(questions, [{}] * len(questions), compute)

    right = ask(answer)
    path = tmp_path / "answers.sqlite"
    whole = path.read_bytes()
    for damaged in flipped(whole, every=101, dense=100):
        path.write_bytes(damaged)
        assert ask(answer) == right
        assert ask(refuse) == right  # stored again
        for other in set(tmp_path.iterdir()) - {path}:
            other.unlink()
    for damage in DAMAGE.values():
        restore(path, whole)
        damage(path)
        assert ask(answer) == right
        assert ask(refuse) == right


def test_an_index_that_points_to_another_row_is_not_believed(tmp_path: Path) -> None:
    """Damage may give a key the answer of another one, with its intact checksum."""
    questions = [Question("q0"), Question("q1")]

    def compute(missing: Sequence[int], finished: Finished) -> None:
        finished(range(len(missing)), [GeneratedText(raw=questions[one].prompt, token_ids=()) for one in missing])

    right = AnswerCache(tmp_path, {}).get(questions, [{}, {}], compute)
    connection = sqlite3.connect(tmp_path / "answers.sqlite")
    with connection:
        (first, a), (second, b) = connection.execute("SELECT key, answer || '|' || checksum FROM answers").fetchall()
        for key, row in ((first, b), (second, a)):
            answer, _, checksum = row.rpartition("|")
            connection.execute("UPDATE answers SET answer = ?, checksum = ? WHERE key = ?", (answer, checksum, key))
    connection.close()
    assert AnswerCache(tmp_path, {}).get(questions, [{}, {}], compute) == right


def test_every_kind_of_damage_to_the_verdicts(tmp_path: Path) -> None:
    items = [Item(f"q{number}", "gold", "answer") for number in range(2)]
    store = VerdictStore(tmp_path, {"model": "m"}, "hash")
    for item in items:
        store.write(item, Reply("A"))
    path = tmp_path / "verdicts.sqlite"
    whole = path.read_bytes()
    right = dict.fromkeys(items, Reply("A"))
    for damaged in flipped(whole, every=151, dense=100):
        path.write_bytes(damaged)
        stored = VerdictStore(tmp_path, {"model": "m"}, "hash").read(items)
        assert stored.items() <= right.items()
        for other in set(tmp_path.iterdir()) - {path}:
            other.unlink()
    for damage in DAMAGE.values():
        restore(path, whole)
        damage(path)
        fresh = VerdictStore(tmp_path, {"model": "m"}, "hash")
        assert fresh.read(items).items() <= right.items()
        fresh.write(items[0], Reply("A"))
        assert VerdictStore(tmp_path, {"model": "m"}, "hash").read(items[:1]) == {items[0]: Reply("A")}


# ------------------------------------------------------------------ second moments and projectors


@pytest.fixture
def statistics(tiny_model: Any, tmp_path: Path) -> Any:
    model, tokenizer = tiny_model("gpt2"), build_tokenizer("byte_bpe")

    def compute() -> tuple[torch.Tensor, dict[str, Any], torch.Tensor]:
        settings = MomentSettings(list(SENTENCES), max_length=16)
        moment = second_moments(model, tokenizer, [1], settings, folder=tmp_path / "stats", quiet=True)[1]
        projector = null_space_of(moment, None, 0.3, None)
        return moment.matrix_FF, moment.report, projector.basis_FR

    return compute


@pytest.mark.parametrize("kind", ["matrix", "manifest", "projector"])
def test_damaged_statistics(statistics: Any, kind: str, tmp_path: Path) -> None:
    matrix_FF, report, basis_FR = statistics()
    (manifest,) = tmp_path.rglob("*.json")
    matrix = manifest.with_suffix(".safetensors")
    (projector,) = set(tmp_path.rglob("*.safetensors")) - {matrix}
    path = {"matrix": matrix, "manifest": manifest, "projector": projector}[kind]
    whole = path.read_bytes()

    def check(damage: str) -> None:
        again_FF, again_report, again_FR = statistics()
        assert torch.equal(again_FF, matrix_FF) and torch.equal(again_FR, basis_FR), damage
        assert {**again_report, "seconds": 0} == {**report, "seconds": 0}, damage

    for number, content in enumerate(flipped(whole, every=max(1, len(whole) // 12))):
        path.write_bytes(content)
        check(f"flip {number}")
    for name, damage in DAMAGE.items():
        restore(path, whole)
        damage(path)
        check(name)
    path.write_bytes(whole[:-9])
    assert main(["stats", "--show", "--folder", str(tmp_path / "stats")]) == 0


# ------------------------------------------------------------------ whole runs


def test_runs_on_a_damaged_store_give_the_same_answers(tiny_path: Any, tmp_path: Path) -> None:
    model = str(tiny_path("gpt2"))
    settings = {"editor": "r_rome", "editor_args": {"num_steps": 1}}

    def answer() -> Any:
        return answers(run(build(model, tmp_path, **settings), ["bake_ls"], limit=2))

    right = answer()
    store = tmp_path / "store"
    names = {path.relative_to(store) for path in store.rglob("*") if path.is_file()}
    kinds = {name.parts[0] for name in names}
    assert kinds == {MARKER, "answers.sqlite", "deltas", "json"}
    methods = list(DAMAGE.values())
    for round_number in range(2):
        for number, name in enumerate(sorted(names)):
            if (store / name).is_file():
                methods[(number + 2 * round_number) % len(methods)](store / name)
        assert_same_answers(answer(), right, tolerance=0)
    replace_by_a_folder(store / MARKER)
    for folder in ("deltas", "json"):  # a file in the place of a folder
        (store / folder).rename(tmp_path / folder)
        (store / folder).write_text("")
    assert_same_answers(answer(), right, tolerance=0)


def test_a_json_result_nested_too_deeply_is_computed_again(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save_json("kind", DESCRIPTION, 1)
    (path,) = tmp_path.rglob("*.json")
    path.write_text("[" * 100_000)
    assert store.load_json("kind", DESCRIPTION) is None
    store.save_json("kind", DESCRIPTION, 2)
    assert store.load_json("kind", DESCRIPTION) == 2 and json.loads(path.read_text())["content"] == 2
