"""``lm-edit``: every verb from its arguments to what it prints, its exit code and what it writes."""

import json
import os
import subprocess
import sys

import pytest
from paths import RECORDS, ROOT
from tiny import CONTEXT_TEMPLATES, REQUESTS, save_tiny

from edit_hooks import Delta, EditingError
from edit_hooks.base.registry import EDITORS
from edit_hooks.lm.model import EditedHFLM
from edit_hooks.store.store import Description, Store
from edit_hooks.utils.files import parse_size
from lm_edit.cli.main import main

BAKE = RECORDS / "bake_qa.jsonl"


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("tiny"), "llama"))


@pytest.fixture
def edits(tmp_path):
    path = tmp_path / "requests.jsonl"
    lines = [json.dumps({"case_id": f"c{number}", **request}) for number, request in enumerate(REQUESTS)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


@pytest.fixture
def settings(tmp_path):
    path = tmp_path / "fast.yaml"
    path.write_text(json.dumps({"num_steps": 3, "context_templates": CONTEXT_TEMPLATES}))
    return str(path)


def lines_of(capsys):
    return capsys.readouterr().out.strip().split("\n")


def test_help_is_quick_and_imports_nothing_heavy():
    code = (
        "import sys, lm_edit.cli.main as cli\n"
        "try:\n    cli.main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print({'torch', 'transformers', 'lm_eval', 'numpy'} & set(sys.modules))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip().split("\n")[-1] == "set()", done.stdout + done.stderr
    assert "validate" in done.stdout


def test_editors_are_listed_with_capabilities_and_settings(capsys):
    assert main(["editors"]) == 0
    table = lines_of(capsys)
    assert [line.split()[0] for line in table[1 : 1 + len(EDITORS)]] == list(EDITORS)
    memit = next(line for line in table if line.startswith("memit ")).split()
    assert memit[1:3] == ["yes", "yes"]
    assert main(["editors", "rome"]) == 0
    settings = {line.split()[0]: line for line in lines_of(capsys)[2:]}
    assert "float" in settings["lr"] and "0.5" in settings["lr"] and settings["seed"].endswith("at random")


def test_mistakes_are_one_message_and_exit_code_2(capsys):
    assert main(["editors", "rom"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "Did you mean 'rome'" in captured.err and "Traceback" not in captured.err
    assert main(["validate", "bakee"]) == 2
    assert "Did you mean 'bake'" in capsys.readouterr().err
    assert main(["edit", "--editor", "rome", "--edits", "x.jsonl", "--out", "y", "--edit-batch-size", "2"]) == 2
    assert "--sequential" in capsys.readouterr().err


def test_validate_lists_every_bad_record(tmp_path, edits, capsys):
    assert main(["validate", edits]) == 0
    assert lines_of(capsys)[-1] == f"{len(REQUESTS)} good, 0 bad, 0 repeated"
    with open(edits, "a", encoding="utf-8") as file:
        for record in ({"prompt": "{} is", "target_new": "x"}, dict(REQUESTS[0]), {"prompt": "a", "target_new": ""}):
            file.write(json.dumps(record) + "\n")
    assert main(["validate", edits]) == 1
    found = lines_of(capsys)
    assert sum(line.startswith("bad: ") for line in found) == 2 and found[-1] == "5 good, 2 bad, 1 repeated"
    assert any("line 5" in line and "'subject' is missing" in line for line in found)


def test_validate_checks_a_benchmarks_own_file(tmp_path, capsys):
    assert main(["validate", "bake", "--data", str(BAKE)]) == 0
    assert lines_of(capsys)[-1].startswith("4 good, 0 bad")
    broken = tmp_path / "broken.jsonl"
    rows = BAKE.read_text(encoding="utf-8").splitlines()
    broken.write_text("\n".join([rows[0], rows[1].replace('"requested_rewrite"', '"rewrite"')]) + "\n")
    assert main(["validate", "bake", "--data", str(broken)]) == 1
    found = lines_of(capsys)
    assert found[-1].startswith("1 good, 1 bad") and any("requested_rewrite" in line for line in found)


@pytest.mark.parametrize(
    ("editor", "options", "files", "names"),
    [
        ("r_rome", [], len(REQUESTS), 1),
        ("r_rome", ["--sequential", "--num-edits", "3"], 3, 1),
        ("ft_m", ["--joint"], 1, 4),
    ],
)
def test_edits_are_made_saved_and_exported(
    model_path, edits, settings, tmp_path, capsys, editor, options, files, names
):
    arguments = ["--editor-args", settings if editor == "r_rome" else "num_steps:2;lr:0.01"]
    model = ["--pretrained", model_path, "--device", "cpu"]
    make = ["edit", *model, "--editor", editor, "--edits", edits, "--store", str(tmp_path / "store"), *arguments]
    out = tmp_path / "edits"
    assert main([*make, *options, "--out", str(out)]) == 0
    assert lines_of(capsys)[-1] == f"{files} edits written to {out}, 0 failed"
    paths = sorted(out.glob("*.safetensors"))
    index = json.loads((out / "edits.json").read_text())
    assert [entry["file"] for entry in index["edits"]] == [path.name for path in paths] and len(paths) == files
    assert all(len(entry["requests"]) == names for entry in index["edits"])
    assert index["edits"][0]["requests"][0]["case_id"] == "c0" and index["editor"] == editor
    assert main([*make, *options, "--out", str(out)]) == 2  # never over earlier ones
    assert "not empty" in capsys.readouterr().err
    form = "merged" if editor == "ft_m" else "peft"
    chosen = [str(path) for path in (paths if "--sequential" in options else paths[:1])]
    assert main(["export", *chosen, *model, "--format", form, "--out", str(tmp_path / "export")]) == 0
    expected = "model.safetensors" if form == "merged" else "adapter_model.safetensors"
    assert (tmp_path / "export" / expected).is_file()


def test_an_edit_of_the_command_line_is_the_edit_of_an_evaluation(model_path, edits, settings, tmp_path, capsys):
    out, store = tmp_path / "edits", tmp_path / "store"
    model = ["--pretrained", model_path, "--device", "cpu", "--store", str(store)]
    main(["edit", *model, "--editor", "r_rome", "--editor-args", settings, "--edits", edits, "--out", str(out)])
    lm = EditedHFLM(pretrained=model_path, device="cpu", editor_args=settings, store=str(store))
    made = lm.session.edits([(request,) for request in _requests(edits)])
    saved = [Delta.load(path).checksum() for path in sorted(out.glob("*.safetensors"))]
    assert saved == [delta.checksum() for delta in made]


def _requests(path):
    from edit_hooks.lm.edit_sources import load_edits

    return load_edits(path, {}, None)


def test_dense_edits_are_no_adapter_and_other_models_are_refused(model_path, edits, tmp_path, capsys):
    out = tmp_path / "edits"
    model = ["--pretrained", model_path, "--device", "cpu"]
    editor = ["--editor", "ft_m", "--editor-args", "num_steps:1", "--store", "off"]
    main(["edit", *model, *editor, "--edits", edits, "--num-edits", "1", "--out", str(out)])
    (path,) = out.glob("*.safetensors")
    assert main(["export", str(path), *model, "--format", "peft", "--out", str(tmp_path / "a")]) == 2
    assert "merged" in capsys.readouterr().err
    other = ["--pretrained", str(save_tiny(tmp_path, "llama", seed=1)), "--device", "cpu"]
    assert main(["export", str(path), *other, "--format", "merged", "--out", str(tmp_path / "b")]) == 2
    assert "another model" in capsys.readouterr().err
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()


def test_the_store_is_shown_and_pruned(tmp_path, capsys):
    store = Store(tmp_path / "store")
    description = Description(what="test", model="m", code="c", inputs={"number": 1})
    store.save_delta(description, Delta())
    store.save_json("verdicts", description, {"label": "yes"})
    (store.root / "answers.sqlite").write_bytes(b"x" * 100)
    leftover = store.root / "deltas" / ".half.safetensors.tmp"
    leftover.write_text("somebody else's")
    assert main(["cache", "--store", str(store.root)]) == 0
    found = lines_of(capsys)
    assert [line.split()[:2] for line in found[2:]] == [
        ["answers", "1"],
        ["deltas", "1"],
        ["verdicts", "1"],
        ["total", "3"],
    ]
    assert main(["cache", "prune", "--store", str(store.root)]) == 2
    assert "--max-size" in capsys.readouterr().err
    assert main(["cache", "prune", "--max-size", "1MB", "--store", str(store.root)]) == 0 and len(store.size()) == 3
    assert main(["cache", "prune", "--max-size", "0", "--store", str(store.root)]) == 0 and not store.size()
    assert leftover.exists()


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("2 GiB", 2**31), ("0", 0), ("1.5kb", 1500), ("7", 7)])
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "5XB", "-1", "1e3"])
def test_sizes_that_are_none(text):
    with pytest.raises(EditingError, match="not readable"):
        parse_size(text)
