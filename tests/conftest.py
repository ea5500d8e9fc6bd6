"""Shared fixtures: tiny models and tokenizers, golden models, one thread per process so that runs repeat."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from golden_models import unpack_golden_model
from hypothesis import HealthCheck, settings
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from edit_hooks.contract.tiny_models import build_model, build_tokenizer, save_tiny

torch.set_num_threads(1)
settings.register_profile(
    "quick",
    deadline=None,
    max_examples=25,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
settings.load_profile("quick")


@pytest.fixture(autouse=True, scope="session")
def _no_report_on_the_machine() -> Iterator[None]:
    """lm-eval describes the machine after every run by starting a dozen programs (seconds each time); not here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm_eval.evaluator.add_env_info", lambda storage: None)
        yield


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., PreTrainedModel]:
    """`tiny_model("gpt2", dtype=...)`: a cached tiny model; leave it as found (the contract tests check editors do)."""
    return functools.cache(build_model)


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Callable[[str], PreTrainedTokenizerFast]:
    """`tiny_tokenizer("byte_bpe")`: a cached tokenizer of one of `TOKENIZER_KINDS`."""
    return functools.cache(build_tokenizer)


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_path("llama", "metaspace_bos", torch.bfloat16)`: folder of a saved tiny model, to test `pretrained=`."""
    root = tmp_path_factory.mktemp("tiny")
    return functools.cache(functools.partial(save_tiny, root))


@pytest.fixture(scope="session")
def golden_model_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`golden_model_path("tiny-gpt2")`: folder of a model that the golden numbers were made with."""
    root = tmp_path_factory.mktemp("golden")
    return functools.cache(lambda name: unpack_golden_model(name, root))


@pytest.fixture(scope="session")
def golden_model(
    golden_model_path: Callable[[str], Path],
) -> Callable[..., tuple[PreTrainedModel, PreTrainedTokenizerFast]]:
    """`golden_model("tiny-llama", torch.float64)` -> (model, tokenizer), cached."""

    @functools.cache
    def load(name: str, dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
        path = golden_model_path(name)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        return model, AutoTokenizer.from_pretrained(path)

    return load
