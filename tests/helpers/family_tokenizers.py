# ruff: noqa: RUF001  # the bars in control tokens are those of the published files
"""Tokenizers with the pre-tokenization, normalization and special tokens of real families, on a small vocabulary.

The pieces are trained on the tiny models' sentences; what decides where tokens begin and end (regular expressions,
prefix spaces, byte fallback, control tokens that swallow white space) is that of the published tokenizer.json files.
The chat templates have the shape of the published ones.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from edit_hooks.contract.tiny_models import BYTE_TOKENS, SENTENCES

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN = LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True)
class Family:
    """One family.

    Attributes:
        pieces: ``byte_level``, ``prepend`` (Llama-2), ``metaspace`` (Mistral) or ``replace`` (Gemma).
        user, header, answer: the turns of the chat template; ``answer`` continues ``header``.
        begin: text at the beginning of a chat.
        separator: white space that belongs between header and answer.
        control: control tokens; those in ``swallowing`` take the white space after them.
        adds_bos: the tokenizer puts BOS before every text.
    """

    pieces: str
    user: str
    header: str
    answer: str
    separator: str
    control: tuple[str, ...] = ()
    begin: str = ""
    bos: str | None = None
    eos: str = "</s>"
    adds_bos: bool = False
    pattern: str | None = None
    swallowing: tuple[str, ...] = ()
    trim_offsets: bool = False

    @property
    def template(self) -> str:
        """The chat template, in Jinja."""
        user = self.user.replace("QUESTION", "{{ m['content'] | trim }}")
        answer = (self.header + self.answer).replace("ANSWER", "{{ m['content'] | trim }}")
        return (
            f"{self.begin}{{% for m in messages %}}{{% if m['role'] == 'user' %}}{user}{{% else %}}{answer}"
            f"{{% endif %}}{{% endfor %}}{{% if add_generation_prompt %}}{self.header}{{% endif %}}"
        )


_LLAMA_3 = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_IM = ("<|im_start|>", "<|im_end|>")
FAMILIES: dict[str, Family] = {
    "gpt2": Family("byte_level", "Q: QUESTION\n", "A:", " ANSWER\n", " ", eos="<|endoftext|>"),
    "pythia": Family("byte_level", "USER: QUESTION ", "ASSISTANT:", " ANSWER", " ", trim_offsets=True),
    "llama-2": Family(
        "prepend", "[INST] QUESTION [/INST]", "", " ANSWER </s>", " ", begin="<s>", bos="<s>", adds_bos=True
    ),
    "llama-3": Family(
        "byte_level",
        "<|start_header_id|>user<|end_header_id|>\n\nQUESTION<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "ANSWER<|eot_id|>",
        "",
        _LLAMA_3,
        begin="<|begin_of_text|>",
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
        adds_bos=True,
        pattern=LLAMA_3,
    ),
    "qwen": Family(
        "byte_level",
        "<|im_start|>user\nQUESTION<|im_end|>\n",
        "<|im_start|>assistant\n",
        "ANSWER<|im_end|>\n",
        "",
        _IM,
        begin="<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n",
        eos="<|im_end|>",
        pattern=QWEN,
    ),
    "qwen-3": Family(  # its generation prompt ends an empty thought, which its answers do not repeat
        "byte_level",
        "<|im_start|>user\nQUESTION<|im_end|>\n",
        "<|im_start|>assistant\n<think>\n\n</think>\n\n",
        "ANSWER<|im_end|>\n",
        "",
        (*_IM, "<think>", "</think>"),
        eos="<|im_end|>",
        pattern=QWEN,
    ),
    "mistral-1": Family(  # glues the answer to the instruction, while the model writes a space
        "metaspace", "[INST] QUESTION [/INST]", "", "ANSWER</s> ", " ", begin="<s>", bos="<s>", adds_bos=True
    ),
    "mistral-3": Family(
        "metaspace",
        "[INST] QUESTION[/INST]",
        "",
        " ANSWER</s>",
        " ",
        ("[INST]", "[/INST]"),
        "<s>",
        "<s>",
        adds_bos=True,
    ),
    "gemma": Family(
        "replace",
        "<start_of_turn>user\nQUESTION<end_of_turn>\n",
        "<start_of_turn>model\n",
        "ANSWER<end_of_turn>\n",
        "",
        ("<start_of_turn>", "<end_of_turn>"),
        begin="<bos>",
        bos="<bos>",
        eos="<eos>",
        adds_bos=True,
    ),
    "phi-3": Family(
        "prepend",
        "<|user|>\nQUESTION<|end|>\n",
        "<|assistant|>\n",
        "ANSWER<|end|>\n",
        "",
        ("<|user|>", "<|assistant|>", "<|end|>"),
        bos="<s>",
        eos="<|end|>",
        swallowing=("<|user|>", "<|assistant|>", "<|end|>"),
    ),
    "deepseek": Family(
        "byte_level",
        "<｜User｜>QUESTION",
        "<｜Assistant｜>",
        "ANSWER<｜end▁of▁sentence｜>",
        "",
        ("<｜User｜>", "<｜Assistant｜>"),
        begin="<｜begin▁of▁sentence｜>",
        bos="<｜begin▁of▁sentence｜>",
        eos="<｜end▁of▁sentence｜>",
        adds_bos=True,
        pattern=LLAMA_3,
    ),
}


def build_family_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a family, with its chat template."""
    family = FAMILIES[name]
    special = list(dict.fromkeys(["<unk>", *filter(None, (family.bos,)), family.eos, *family.control]))
    tokenizer = _byte_level(family, special) if family.pieces == "byte_level" else _byte_fallback(family, special)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False, rstrip=token in family.swallowing) for token in special]
    )
    steps = []
    if family.pieces == "byte_level":
        steps.append(processors.ByteLevel(trim_offsets=family.trim_offsets))
    if family.adds_bos and family.bos:
        ids = [(family.bos, tokenizer.token_to_id(family.bos))]
        steps.append(processors.TemplateProcessing(single=f"{family.bos} $A", special_tokens=ids))
    if steps:
        tokenizer.post_processor = processors.Sequence(steps)
    built = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=family.bos, eos_token=family.eos, model_max_length=128
    )
    built.chat_template = family.template
    return built


def _byte_level(family: Family, special: Sequence[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    if family.pattern is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        tokenizer.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(Regex(family.pattern), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=480,
        special_tokens=list(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def _byte_fallback(family: Family, special: Sequence[str]) -> Tokenizer:
    """SentencePiece BPE as in tokenizer.json files."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>"], show_progress=False)
    trained.train_from_iterator([*SENTENCES, *(f"x {text}" for text in SENTENCES)], trainer)
    learned = json.loads(trained.to_str())["model"]
    pieces = sorted(learned["vocab"], key=learned["vocab"].__getitem__)
    order = dict.fromkeys([*special, *BYTE_TOKENS, "\n", *pieces])
    vocabulary = {piece: index for index, piece in enumerate(order)}
    merges = [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ")) for merge in learned["merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if family.pieces == "prepend":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif family.pieces == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
    strip = [] if family.pieces == "replace" else [decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer
