"""A stand-in for a vLLM server: a tiny model on loopback that loads adapters and answers completions.

It speaks the part of the API that ``server=`` reads, with vLLM's names and shapes; a lock replaces its batching.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from edit_hooks import Delta, edited
from edit_hooks.deltas.saving.export import read_peft


class AdapterServer:
    """Answers from a model folder.

    Attributes:
        adapters: the loaded ones. loaded: all names that were ever loaded. requests: the bodies by path.
        faults: path -> what it replies instead of an answer: a status and a text.
    """

    base = "base"

    def __init__(self, folder: str, max_rank: int = 16) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.tokenizer, self.max_rank = AutoTokenizer.from_pretrained(folder), max_rank
        self.adapters: dict[str, Delta] = {}
        self.loaded: list[str] = []
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.faults: dict[str, tuple[int, str]] = {}
        self._lock = threading.Lock()

    def reply(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        self.requests.append((path, body))
        if path in self.faults:
            return self.faults[path]
        if path == "models":
            return 200, json.dumps({"data": [{"id": self.base}, *({"id": name} for name in self.adapters)]})
        if path == "load_lora_adapter":
            rank = json.loads((Path(body["lora_path"]) / "adapter_config.json").read_text())["r"]
            if rank > self.max_rank:
                return 400, json.dumps({"message": f"LoRA rank {rank} is greater than max_lora_rank {self.max_rank}."})
            self.adapters[body["lora_name"]] = read_peft(body["lora_path"], self.model)
            self.loaded.append(body["lora_name"])
            return 200, f"Success: LoRA adapter '{body['lora_name']}' added successfully."
        if path == "unload_lora_adapter":
            del self.adapters[body["lora_name"]]
            return 200, "Success"
        return 200, json.dumps({"choices": [self._complete(body)]})

    @torch.no_grad()
    def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        name = body["model"]
        scope = contextlib.nullcontext() if name == self.base else edited(self.model, self.adapters[name])
        with self._lock, scope:
            if "prompt_logprobs" in body:
                return {"prompt_logprobs": self._prompt_logprobs(body["prompt"])}
            ids, new = list(body["prompt"]), []
            while len(new) < body["max_tokens"]:
                new.append(int(self.model(torch.tensor([ids + new])).logits[0, -1].argmax()))
                text = self.tokenizer.decode(new, skip_special_tokens=body["skip_special_tokens"])
                is_end = new[-1] == self.tokenizer.eos_token_id and not body["ignore_eos"]
                if is_end or any(stop in text for stop in body["stop"]):
                    break
            return {"text": "", "token_ids": new}

    def _prompt_logprobs(self, ids: list[int]) -> list[dict[str, Any] | None]:
        table: list[dict[str, Any] | None] = [None]
        logprobs = self.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        for row, token in zip(logprobs[:-1], ids[1:], strict=True):
            rank = int((row > row[token]).sum()) + 1
            entries = {str(token): {"logprob": float(row[token]), "rank": rank}}
            best = int(row.argmax())
            entries.setdefault(str(best), {"logprob": float(row[best]), "rank": 1})
            table.append(entries)
        return table


@contextlib.contextmanager
def adapter_server(folder: str, max_rank: int = 16) -> Iterator[tuple[AdapterServer, str]]:
    """A running server and its address."""
    served = AdapterServer(folder, max_rank)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._send({})

        def do_POST(self) -> None:
            self._send(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _send(self, body: dict[str, Any]) -> None:
            status, text = served.reply(self.path.removeprefix("/v1/"), body)
            content = text.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield served, f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
