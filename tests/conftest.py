"""Shared fixtures: tiny models and tokenizers, golden models, one thread per process so that runs repeat.

The controlling process of pytest-xdist loads this file, too, and runs no test: heavy imports are inside the fixtures.
"""

from __future__ import annotations

import gc
import logging
import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Folders of tests are in memory where there is room: on a disk, each of the thousands of transactions of a store waits.
if os.path.isdir("/dev/shm"):
    memory = os.statvfs("/dev/shm")
    if memory.f_bavail * memory.f_frsize > 4 << 30 and not memory.f_flag & os.ST_NOEXEC:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")
# The import of submitit else closes the handlers of all loggers. That of absl, which rouge_score imports, then closes
# the file in which pytest captures the output of all further tests.
os.environ.setdefault("SUBMITIT_LOG_LEVEL", "NOCONFIG")

import copy
import functools
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    import torch
    from real_runs import RealRuns
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

gc.disable()  # until the tests are collected, see below
# Two workers, and the commands that tests start, import the same 1,200 files: they are compiled once.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
settings.register_profile(
    "quick",
    deadline=None,
    max_examples=25,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
settings.load_profile("quick")


WIDE = 8  # model families from which on a test takes a part of them
ALWAYS = ("gpt2", "gemma3_text")  # those that differ most: Conv1D and learned positions; rotary, gated, post-norms
ONE_IN = 3
# Tests of what editors compute. How much an edit damages is measured after every edit, in tests of all other folders.
UNMEASURED = ("tests/parity/", "tests/edit_hooks/editors/", "tests/edit_hooks/locate/", "tests/edit_hooks/gradient/")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Mark as slow what a plain run can leave to the nightly one.

    - Tests over all tiny families run on two that differ most and on a third of the others. Which third depends on the
      name of the case, so that tests of one thing run on other families than those of the next.
    - Tests marked `one_in(n)` run on one in n of their cases, chosen by their names, too.
    - Numbers of releases are compared with those of the fast engine, which other tests compare with the plain one, and
      in float64 where there are both.
    """
    from edit_hooks.contract.tiny_models import ALL_MODEL_TYPES

    families: dict[str, dict[pytest.Item, str]] = defaultdict(dict)
    for item in items:
        if isinstance(item, pytest.Function) and item.nodeid.startswith(UNMEASURED):
            item.fixturenames.append("_unmeasured")
        if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
            continue
        params = item.callspec.params
        found = [value for value in params.values() if isinstance(value, str) and value in ALL_MODEL_TYPES]
        if len(found) == 1:
            families[item.nodeid.partition("[")[0]][item] = found[0]
        is_minor = params.get("engine") == "reference" or params.get("dtype") == "float32"
        if is_minor and item.nodeid.startswith("tests/parity/"):
            item.add_marker(pytest.mark.slow)
        if (mark := item.get_closest_marker("one_in")) is not None and zlib.crc32(item.nodeid.encode()) % mark.args[0]:
            item.add_marker(pytest.mark.slow)
    for cases in families.values():
        if len(set(cases.values())) >= WIDE:
            for item, family in cases.items():
                if family not in ALWAYS and zlib.crc32(item.nodeid.encode()) % ONE_IN:
                    item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """The million objects of imported libraries live as long as the process: the garbage collector skips them.

    A tenth of its usual rounds is enough for the cycles that tests leave; all rounds take a twentieth of the time.

    Torch's 90 loggers do not propagate. To each such logger pytest adds its handlers six times per test, a sixth of
    what a short test takes.
    """
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.partition(".")[0] == "torch":
            logger.propagate = True
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _no_report_on_the_machine() -> Iterator[None]:
    """lm-eval describes machine and folder after every run by starting a dozen programs and git; not here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm_eval.evaluator.add_env_info", lambda storage: None)
        patch.setattr("lm_eval.evaluator.get_git_commit_hash", lambda: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def _our_tasks_are_read_once() -> Iterator[None]:
    """lm-eval parses the 330 YAML files of our tasks for every task manager; here once for all tests of a process."""
    from lm_eval.tasks import _index
    from paths import ROOT

    load, folder = _index.load_yaml, ROOT / "lm_eval_tasks"
    read = functools.cache(lambda path, options: load(path, **dict(options)))

    def load_yaml(path: Path, **options: bool) -> object:
        is_ours = folder in path.parents
        return copy.deepcopy(read(path, tuple(options.items()))) if is_ours else load(path, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_index, "load_yaml", load_yaml)
        yield


@pytest.fixture(scope="module")
def collects_new_objects_only() -> None:
    """For tests that collect often: each round over the objects of all tests before them takes 0.1 s or more."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def _unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two forward passes less for every edit."""
    monkeypatch.setattr("edit_hooks.base.editor.Editor._measure", lambda *_: None)


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., PreTrainedModel]:
    """`tiny_model("gpt2", dtype=...)`: a cached tiny model; leave it as found (the contract tests check editors do)."""
    from edit_hooks.contract.tiny_models import build_model

    return functools.cache(build_model)


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Callable[[str], PreTrainedTokenizerFast]:
    """`tiny_tokenizer("byte_bpe")`: a cached tokenizer of one of `TOKENIZER_KINDS`."""
    from edit_hooks.contract.tiny_models import build_tokenizer

    return functools.cache(build_tokenizer)


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_path("llama", "metaspace_bos", torch.bfloat16)`: folder of a saved tiny model, to test `pretrained=`."""
    from edit_hooks.contract.tiny_models import save_tiny

    root = tmp_path_factory.mktemp("tiny")
    return functools.cache(functools.partial(save_tiny, root))


@pytest.fixture(scope="session")
def real_runs(tmp_path_factory: pytest.TempPathFactory, tiny_path: Callable[..., Path]) -> RealRuns:
    """Folders with the files that evaluations of a tiny model wrote; tests change copies."""
    from real_runs import make_real_runs

    return make_real_runs(tmp_path_factory.mktemp("real_runs"), tiny_path("gpt2", "byte_bpe"))


@pytest.fixture(scope="session")
def golden_model_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`golden_model_path("tiny-gpt2")`: folder of a model that the golden numbers were made with."""
    from golden_models import unpack_golden_model

    root = tmp_path_factory.mktemp("golden")
    return functools.cache(lambda name: unpack_golden_model(name, root))


@pytest.fixture(scope="session")
def golden_model(
    golden_model_path: Callable[[str], Path],
) -> Callable[..., tuple[PreTrainedModel, PreTrainedTokenizerFast]]:
    """`golden_model("tiny-llama", torch.float64)` -> (model, tokenizer), cached."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    @functools.cache
    def load(name: str, dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
        path = golden_model_path(name)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        return model, AutoTokenizer.from_pretrained(path)

    return load
