"""The demo model: found without running foreign code, checked against pinned hashes, converted once, never half."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from damage import empty, flipped, replace_by_a_folder, restore, truncate
from paths import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer
from warm_python import run_warm

from edit_hooks.assets import demo_model as demo
from edit_hooks.assets import gguf_file
from edit_hooks.assets.gguf_file import config_source
from edit_hooks.lm.model import EditedHFLM
from edit_hooks.planning.outline import read_config
from edit_hooks.utils.errors import EditingError

HIDDEN, INNER, HEADS, HEAD_DIM, BLOCKS = 16, 24, 2, 8, 2
PIECES = ["▁", "a", "b", "c", "e", "h", "t", "s", "i", "th", "the", "▁the", "▁a", "is", "▁is", "\n", "\n\n", "▁▁"]


def write_tiny_gguf(path: Path) -> None:
    """A two-block Gemma 3 in GGUF with a sentence-piece vocabulary of a few hundred tokens, in float32."""
    gguf = pytest.importorskip("gguf", reason="reads the demo model's file format (extra: demo)")
    special, byte_tokens = ["<pad>", "<eos>", "<bos>", "<unk>"], [f"<0x{value:02X}>" for value in range(256)]
    tokens = [*special, *byte_tokens, *PIECES]
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(BLOCKS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_sliding_window(16)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([token.encode() for token in tokens])
    writer.add_token_scores([-1000.0] * 4 + [0.0] * 256 + [-float(rank) for rank in range(len(PIECES))])
    writer.add_token_types([3] * 4 + [6] * 256 + [1] * (len(PIECES) - 3) + [4] * 3)
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
    generator = torch.Generator().manual_seed(0)

    def tensor(name: str, *shape: int) -> None:
        writer.add_tensor(name, (0.3 * torch.randn(*shape, generator=generator) + (len(shape) == 1)).numpy())

    tensor("token_embd.weight", len(tokens), HIDDEN)
    tensor("output_norm.weight", HIDDEN)
    for block in range(BLOCKS):
        for norm in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            tensor(f"blk.{block}.{norm}.weight", HIDDEN)
        for norm in ("attn_q_norm", "attn_k_norm"):
            tensor(f"blk.{block}.{norm}.weight", HEAD_DIM)
        tensor(f"blk.{block}.attn_q.weight", HEADS * HEAD_DIM, HIDDEN)
        tensor(f"blk.{block}.attn_k.weight", HEAD_DIM, HIDDEN)
        tensor(f"blk.{block}.attn_v.weight", HEAD_DIM, HIDDEN)
        tensor(f"blk.{block}.attn_output.weight", HIDDEN, HEADS * HEAD_DIM)
        tensor(f"blk.{block}.ffn_gate.weight", INNER, HIDDEN)
        tensor(f"blk.{block}.ffn_up.weight", INNER, HIDDEN)
        tensor(f"blk.{block}.ffn_down.weight", HIDDEN, INNER)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_tiny_gguf(path)
    return path


@pytest.fixture
def fake(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four importable chunk packages whose code must not run; returns the folder they live in."""
    content = tiny_gguf.read_bytes()
    bounds = [len(content) * quarter // 4 for quarter in range(5)]
    chunks = []
    for number in range(1, 5):
        part = content[bounds[number - 1] : bounds[number]]
        package = tmp_path / "site" / f"fake_demo_part{number}"
        (package / "data").mkdir(parents=True)
        (package / "__init__.py").write_text("raise RuntimeError('the code of a chunk package was run')\n")
        (package / "data" / f"tiny.gguf.part{number - 1:02d}").write_bytes(part)
        chunks.append(
            demo.Chunk(
                f"fake-demo-part{number}",
                package.name,
                f"tiny.gguf.part{number - 1:02d}",
                hashlib.sha256(part).hexdigest(),
            )
        )
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(demo, "CHUNKS", tuple(chunks))
    monkeypatch.setattr(demo, "DEMO_SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(demo, "NEEDED_BYTES", {"float32": 1, "bfloat16": 1})
    monkeypatch.setattr(demo, "_verified", set())
    monkeypatch.setenv("LM_EDIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "site"


def chunk_file(site: Path, number: int) -> Path:
    return site / f"fake_demo_part{number}" / "data" / f"tiny.gguf.part{number - 1:02d}"


def cache_entries() -> list[str]:
    return sorted(path.name for path in (demo.cache_root() / "demo").iterdir() if path.name != ".conversion.lock")


def test_the_file_is_parsed_once_and_the_library_left_as_it_was(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gc

    import gguf

    parsed: list[object] = []

    class Counted(gguf.GGUFReader):
        def __init__(self, *arguments: object) -> None:
            parsed.append(arguments)
            super().__init__(*arguments)

    monkeypatch.setattr(gguf, "GGUFReader", Counted)
    demo.demo_model_path()
    assert len(parsed) == 1 and gguf.GGUFReader is Counted and gc.isenabled()


def test_a_gguf_file_is_converted_once_and_loads_by_its_path(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LM_EDIT_CACHE", str(tmp_path))
    lm = EditedHFLM(pretrained=str(tiny_gguf), mode="none", device="cpu")
    reference = AutoModelForCausalLM.from_pretrained(tiny_gguf.parent, gguf_file=tiny_gguf.name, dtype=torch.float32)
    ids = torch.arange(2, 40)[None]
    assert torch.equal(lm.model(ids).logits, reference(ids).logits)
    assert lm.model.dtype == torch.float32 and lm.tok_encode("the cat is")[0] == 2
    assert Path(lm.pretrained).name == "tiny", "tables name the model by its folder"
    monkeypatch.setattr(gguf_file, "_convert", lambda *_: pytest.fail("converted twice"))
    assert gguf_file.gguf_model_path(str(tiny_gguf), "auto") == gguf_file.gguf_model_path(str(tiny_gguf), torch.float32)


def test_what_is_no_gguf_file_is_refused(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LM_EDIT_CACHE", str(tmp_path))
    (tmp_path / "page.gguf").write_bytes(b"<html>not found</html>")
    with pytest.raises(EditingError, match=r"page.gguf does not begin as a GGUF file"):
        gguf_file.gguf_model_path(str(tmp_path / "page.gguf"))
    (tmp_path / "half.gguf").write_bytes(tiny_gguf.read_bytes()[:5000])
    with pytest.raises(EditingError, match=r"half.gguf cannot be read as a model"):
        gguf_file.gguf_model_path(str(tmp_path / "half.gguf"))
    assert not list((tmp_path / "gguf").glob("*-*"))  # nothing half there
    with pytest.raises(EditingError, match=r"dtype=float8 .*Accepted: auto, float32"):
        gguf_file.gguf_model_path(str(tiny_gguf), "float8")


def test_conversion_gives_a_plain_folder_with_the_same_logits(fake: Path, tiny_gguf: Path) -> None:
    assert demo.demo_available()
    folder = demo.demo_model_path()
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "gemma3_text" and config["architectures"] == ["Gemma3ForCausalLM"]
    assert config["dtype"] == "float32" and "quantization_config" not in config and "_name_or_path" not in config
    reference = AutoModelForCausalLM.from_pretrained(tiny_gguf.parent, gguf_file=tiny_gguf.name, dtype=torch.float32)
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    ids = torch.arange(2, 40)[None]
    assert torch.equal(model(ids).logits, reference(ids).logits)
    theirs, ours = (
        AutoTokenizer.from_pretrained(tiny_gguf.parent, gguf_file=tiny_gguf.name),
        AutoTokenizer.from_pretrained(folder),
    )
    for text in ("the cat is", " the  the\n\nis", "Zürich", ""):
        assert ours(text).input_ids == theirs(text).input_ids
        assert ours(text).input_ids[0] == 2
        assert ours.decode(ours(text, add_special_tokens=False).input_ids) == text


def test_bfloat16_is_the_float32_model_rounded(fake: Path) -> None:
    full = AutoModelForCausalLM.from_pretrained(demo.demo_model_path(), dtype="auto")
    half = AutoModelForCausalLM.from_pretrained(demo.demo_model_path("bfloat16"), dtype="auto")
    assert half.dtype == torch.bfloat16 and full.dtype == torch.float32
    for name, tensor in half.state_dict().items():
        assert torch.equal(tensor, full.state_dict()[name].to(torch.bfloat16)), name


def test_manifest_says_what_was_made_and_is_reused(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = demo.demo_model_path()
    manifest = json.loads((folder / demo.MANIFEST_NAME).read_text())
    assert manifest["source_sha256"] == demo.DEMO_SHA256 and manifest["dtype"] == "float32"
    assert {"torch", "transformers", "gguf"} <= set(manifest["versions"])
    for name, entry in manifest["files"].items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == entry["sha256"]
    monkeypatch.setattr(demo, "_verified", set())
    monkeypatch.setattr(demo, "_convert_into", lambda *_: pytest.fail("converted twice"))
    shutil.rmtree(fake)  # the packages are not needed any more
    assert demo.demo_model_path() == folder and demo.demo_available()
    assert cache_entries() == [folder.name]


@pytest.mark.parametrize("victim", ["model.safetensors", "tokenizer.json", demo.MANIFEST_NAME])
def test_a_folder_that_changed_is_converted_again(
    fake: Path, victim: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = demo.demo_model_path()
    before = (folder / "model.safetensors").read_bytes()
    content = bytearray((folder / victim).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / victim).write_bytes(content)
    monkeypatch.setattr(demo, "_verified", set())
    assert demo.demo_model_path() == folder
    assert "is converted again" in caplog.text
    assert (folder / "model.safetensors").read_bytes() == before
    assert cache_entries() == [folder.name]


@pytest.mark.parametrize("victim", ["config.json", demo.MANIFEST_NAME])
def test_any_damage_to_a_small_file_is_noticed(fake: Path, victim: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = demo.demo_model_path()
    manifest = json.loads((folder / demo.MANIFEST_NAME).read_text())
    whole, converted = (folder / victim).read_bytes(), list[str]()
    monkeypatch.setattr(demo, "_convert_into", lambda *_: converted.append(victim))
    for content in flipped(whole, every=11):
        (folder / victim).write_bytes(content)
        monkeypatch.setattr(demo, "_verified", set())
        assert demo.demo_model_path() == folder
        if not converted:  # believed: only facts about the versions are wrong
            again = json.loads((folder / demo.MANIFEST_NAME).read_text())
            assert victim == demo.MANIFEST_NAME and again["files"] == manifest["files"]
        converted.clear()
    for damage in (truncate, empty, replace_by_a_folder):
        restore(folder / victim, whole)
        damage(folder / victim)
        monkeypatch.setattr(demo, "_verified", set())
        assert not converted and demo.demo_model_path() == folder and converted
        converted.clear()


def test_missing_extra_names_the_install_command(fake: Path) -> None:
    shutil.rmtree(fake)
    assert not demo.demo_available()
    with pytest.raises(EditingError, match=r'pip install "lm-eval-editing\[demo\]"'):
        demo.demo_model_path()


def test_missing_reader_names_the_install_command(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_has_gguf_reader", lambda: False)
    assert not demo.demo_available()
    with pytest.raises(EditingError, match=r'gguf.*pip install "lm-eval-editing\[demo\]"'):
        demo.demo_model_path()


def test_one_missing_chunk_is_named(fake: Path) -> None:
    chunk_file(fake, 3).unlink()
    with pytest.raises(EditingError, match=r"1 of them lack.*fake-demo-part3.*--force-reinstall"):
        demo.demo_model_path()


def test_a_damaged_chunk_is_named_and_nothing_is_kept(fake: Path) -> None:
    content = bytearray(chunk_file(fake, 2).read_bytes())
    content[10] ^= 1
    chunk_file(fake, 2).write_bytes(content)
    with pytest.raises(EditingError, match=r"(?s)expected.*replaced: fake-demo-part2 .*--force-reinstall") as caught:
        demo.demo_model_path()
    assert "part1 (" not in str(caught.value)
    assert cache_entries() == []


def test_whole_file_hash_decides_even_if_every_chunk_is_right(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "CHUNKS", (demo.CHUNKS[1], demo.CHUNKS[0], *demo.CHUNKS[2:]))
    with pytest.raises(EditingError, match="order or number"):
        demo.demo_model_path()


@pytest.mark.parametrize("moment", ["_save_tokenizer", "_save_weights", "_write_manifest"])
def test_an_interrupt_leaves_nothing_behind(fake: Path, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(demo, moment, interrupt)
        with pytest.raises(KeyboardInterrupt):
            demo.demo_model_path()
    assert cache_entries() == []
    assert demo.demo_model_path().is_dir()


def test_a_killed_conversion_is_cleaned_up_by_the_next(fake: Path) -> None:
    leftover = demo.cache_root() / "demo" / ".tmp-killed"
    (leftover / "model").mkdir(parents=True)
    (leftover / "model" / "model.safetensors").write_bytes(b"half a model")
    folder = demo.demo_model_path()
    assert cache_entries() == [folder.name]


@pytest.mark.skipif(sys.platform == "win32", reason="the fake packages reach the children by fork")
def test_two_processes_convert_once(fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The conversion itself is replaced: what is tested is that the second process waits for the first and reuses it.
    log = tmp_path / "conversions"

    def slow_conversion(folder: Path, dtype: str) -> None:
        with log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        shutil.copytree(tmp_path / "ready", folder)

    shutil.copytree(demo.demo_model_path(), tmp_path / "ready")
    shutil.rmtree(demo.cache_root())
    monkeypatch.setattr(demo, "_verified", set())
    monkeypatch.setattr(demo, "_convert_into", slow_conversion)
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=demo.demo_model_path) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len(log.read_text().split()) == 1


def test_unwritable_cache_and_full_disk_say_what_to_do(
    fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "NEEDED_BYTES", {"float32": 10**18, "bfloat16": 1})
    with pytest.raises(EditingError, match=r"GB are free.*LM_EDIT_CACHE"):
        demo.demo_model_path()
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("LM_EDIT_CACHE", str(tmp_path / "file"))
    with pytest.raises(EditingError, match="LM_EDIT_CACHE"):
        demo.demo_model_path()


def test_unknown_dtype_is_an_error() -> None:
    with pytest.raises(EditingError, match=r"'float23' is not available\. Did you mean 'float32'"):
        demo.demo_model_path("float23")  # type: ignore[arg-type]


def test_cache_root_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LM_EDIT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert demo.cache_root() == tmp_path / "lm-eval-editing"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert demo.cache_root() == Path.home() / ".cache" / "lm-eval-editing"
    monkeypatch.setenv("LM_EDIT_CACHE", str(tmp_path / "mine"))
    assert demo.cache_root() == tmp_path / "mine"


needs_demo_packages = pytest.mark.skipif(not demo.demo_available(), reason="needs the extra 'demo'")


@pytest.mark.model
@needs_demo_packages
def test_the_real_demo_model_knows_simple_facts() -> None:
    folder = demo.demo_model_path()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("The capital of France is").input_ids == [2, 818, 5279, 529, 7001, 563]
    # Token ids from an independent reader of the same file (llama.cpp): newlines, runs of spaces, tabs, quotes, bytes.
    assert tokenizer("a\n\nb\nc   d\t\te").input_ids == [
        2,
        236746,
        108,
        236763,
        107,
        236755,
        139,
        236753,
        255969,
        236744,
    ]
    assert tokenizer("  two").input_ids == [2, 138, 13498]
    for text in ("Łódź naïve 東京タワー 🤖", " leading and trailing ", "x = 12345.678\r\n"):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 1, 0)
    model = AutoModelForCausalLM.from_pretrained(folder)
    for prompt, answer, logprob in (
        ("Berlin is the capital of", " Germany", -0.663),
        ("The opposite of hot is", " cold", -0.515),
        ("The capital of France is", " the", -1.594),
    ):
        with torch.no_grad():
            logprobs = model(**tokenizer(prompt, return_tensors="pt")).logits[0, -1].log_softmax(-1)
        assert tokenizer.decode([int(logprobs.argmax())]) == answer
        # llama.cpp multiplies with 8-bit activations, hence not closer.
        assert float(logprobs.max()) == pytest.approx(logprob, abs=0.1)


def test_the_configuration_of_a_file_is_read_from_its_header(tiny_gguf: Path) -> None:
    """Plans and estimates read it before anything is converted; of a folder they read its config.json."""
    config = read_config(str(tiny_gguf))
    assert (config.model_type, config.num_hidden_layers) == ("gemma3_text", 2)
    assert config_source("a/hub-id") == {"pretrained_model_name_or_path": "a/hub-id"}


@pytest.mark.model
@needs_demo_packages
def test_the_converted_model_loads_without_the_gguf_package() -> None:
    script = textwrap.dedent(
        """
        import sys
        sys.modules["gguf"] = None  # makes any import of it fail
        from transformers import AutoConfig, AutoTokenizer
        from edit_hooks.assets.demo_model import demo_model_path
        folder = demo_model_path()
        assert AutoConfig.from_pretrained(folder).model_type == "gemma3_text"
        assert AutoTokenizer.from_pretrained(folder)("is").input_ids[0] == 2
        assert not [name for name in sys.modules if name.startswith("gemma3_270m")]
        """
    )
    demo.demo_model_path()
    run = run_warm(["-c", script], cwd=ROOT)
    assert run.returncode == 0, run.stderr
