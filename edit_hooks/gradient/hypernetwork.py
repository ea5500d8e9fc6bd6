"""MEND's hyper-network: it maps the gradient of an edit, as token factors, to an update of the same form.

For a linear map y = W x the gradient of a loss is a sum over tokens of outer products, dL/dW = sum_n delta_n x_n^T with
x_n [f] the input and delta_n [d] = dL/dy_n. One network per distinct (d, f) maps (x_n, delta_n) to (x~_n, delta~_n);
matrices of the same shape share it and differ by a scale and a shift ("mode"). The update of matrix l is
-alpha_l sum_n delta~_n x~_n^T with a learned step size alpha_l. ("Fast Model Editing at Scale", eq. 3 and 4.)

The released code adds this update instead of subtracting it, which its training absorbs by turning signs round
(acknowledged upstream); ``sign: plus`` is that behavior, for comparison.

A network block is h + max(0, (U V h + b) * scale + shift) with U, b and shift zero at first, so that an untrained
network returns its input. The maximum is a clamp, whose derivative at zero is one: with a relu the network would never
leave that point. As released, the non-linearity is in both blocks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import safe_open
from torch import nn

from edit_hooks.modeling.tensors import write_tensors
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.files import replacing

FORMAT = "lm-eval-editing/mend/1"


WEIGHTS_NAME, MANIFEST_NAME = "hypernetwork.safetensors", "manifest.json"


TRAINED_ON = "trained_on"


RENAMED = {"normalise": "normalize"}  # settings that older artifacts know under another name


SMALL = 1e-7


Sign = Literal["minus", "plus"]


class Tokens(NamedTuple):
    """Token factors of one matrix: inputs x [n, f] and gradients delta [n, d] of the loss at its outputs."""

    x: torch.Tensor
    delta: torch.Tensor


class Update(NamedTuple):
    """A matrix's update ``left @ right.T``: left [d, n], right [f, n]."""

    left: torch.Tensor
    right: torch.Tensor


@dataclass(frozen=True)
class NetworkSettings:
    """What decides a hyper-network's form and start.

    Attributes:
        rank: rank of a block's linear map, at most its width.
        num_blocks: blocks in a row.
        normalize: inputs are normalized per dimension with statistics of the training edits.
        step_size: start of every matrix's step size.
        sign: ``minus`` subtracts the update as the paper does; ``plus`` adds it as the release does.
        seed: of the random maps V.
    """

    rank: int = 1920
    num_blocks: int = 2
    normalize: bool = True
    step_size: float = 1e-4
    sign: Sign = "minus"
    seed: int = 0


class Block(nn.Module):
    """h -> h + max(0, (U V h + b) * scale_mode + shift_mode)."""

    def __init__(self, width: int, rank: int, num_modes: int, generator: torch.Generator) -> None:
        super().__init__()
        self.U = nn.Parameter(torch.zeros(width, rank))
        self.V = nn.Parameter(torch.randn(rank, width, generator=generator))
        self.bias = nn.Parameter(torch.zeros(width))
        self.scale = nn.Parameter(torch.ones(num_modes, width))
        self.shift = nn.Parameter(torch.zeros(num_modes, width))

    def forward(self, hidden_NW: torch.Tensor, mode: int) -> torch.Tensor:
        mapped_NW = hidden_NW @ self.V.T @ self.U.T + self.bias
        return hidden_NW + (mapped_NW * self.scale[mode] + self.shift[mode]).clamp(min=0)


class FactorNetwork(nn.Module):
    """The network of all matrices R^f -> R^d; its statistics are buffers, so they are saved with it."""

    mean: torch.Tensor
    squares: torch.Tensor
    count: torch.Tensor

    def __init__(self, width_in: int, width_out: int, num_modes: int, settings: NetworkSettings) -> None:
        super().__init__()
        width = width_in + width_out
        generator = torch.Generator().manual_seed(settings.seed)
        rank = min(settings.rank, width)
        self.width_in, self.normalize = width_in, settings.normalize
        self.blocks = nn.ModuleList(Block(width, rank, num_modes, generator) for _ in range(settings.num_blocks))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("squares", torch.zeros(width))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def observe(self, tokens: Tokens) -> None:
        """Add tokens to the statistics (Chan's merge of Welford's recurrences; the released loop, token by token)."""
        new_NW = torch.cat(tokens, 1).to(self.mean)
        if not len(new_NW):
            return
        before, added = float(self.count), len(new_NW)
        mean_W = new_NW.mean(0)
        offset_W = mean_W - self.mean
        self.count += added
        self.mean += offset_W * (added / float(self.count))
        self.squares += ((new_NW - mean_W) ** 2).sum(0) + offset_W**2 * (before * added / float(self.count))

    def forward(self, tokens: Tokens, mode: int) -> Tokens:
        hidden_NW = torch.cat(tokens, 1).to(self.mean.dtype)
        if self.normalize:
            if self.count < 2:
                raise EditingError(
                    "the hyper-network normalizes its input and has seen no two tokens of training edits; train it "
                    "with lm-edit train-mend, or use normalize=false."
                )
            hidden_NW = (hidden_NW - self.mean) / ((self.squares / (self.count - 1)).sqrt() + SMALL)
        for block in self.blocks:
            hidden_NW = block(hidden_NW, mode)
        return Tokens(hidden_NW[:, : self.width_in], hidden_NW[:, self.width_in :])


class HyperNetwork(nn.Module):
    """Networks of all edited matrices, and their step sizes.

    Args:
        shapes: module name -> (d, f), in the order of the step sizes.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, int]], settings: NetworkSettings) -> None:
        super().__init__()
        self.shapes, self.settings = dict(shapes), settings
        groups: dict[tuple[int, int], list[str]] = {}
        for name, shape in self.shapes.items():
            groups.setdefault(shape, []).append(name)
        self.modes = {name: group.index(name) for group in groups.values() for name in group}
        self.networks = nn.ModuleDict(
            {_key(shape): FactorNetwork(shape[1], shape[0], len(group), settings) for shape, group in groups.items()}
        )
        self.step_sizes = nn.Parameter(torch.full((len(self.shapes),), settings.step_size))

    def observe(self, tokens: Mapping[str, Tokens]) -> None:
        """Add an edit's tokens to the statistics of the networks."""
        for name, found in tokens.items():
            self._network(name).observe(informative(found))

    def forward(self, tokens: Mapping[str, Tokens]) -> dict[str, Update]:
        """Updates to be added to the weights, as factors of rank number of tokens."""
        sign = -1.0 if self.settings.sign == "minus" else 1.0
        updates = {}
        for step_size, name in zip(self.step_sizes, self.shapes, strict=True):
            x_NF, delta_ND = self._network(name)(informative(tokens[name]), self.modes[name])
            updates[name] = Update(sign * step_size * delta_ND.T, x_NF.T)
        return updates

    def _network(self, name: str) -> FactorNetwork:
        network = self.networks[_key(self.shapes[name])]
        assert isinstance(network, FactorNetwork)
        return network


def informative(tokens: Tokens) -> Tokens:
    """Without tokens whose input or gradient is zero throughout (padding, and positions the loss does not reach)."""
    kept_N = (tokens.x != 0).any(1) & (tokens.delta != 0).any(1)
    return Tokens(tokens.x[kept_N], tokens.delta[kept_N])


def _key(shape: tuple[int, int]) -> str:
    return f"{shape[1]}_to_{shape[0]}"


def edit_digest(prompt: str, target: str) -> int:
    """63 bits of the SHA-256 of an edit's two texts: by these an artifact knows again what it was trained on."""
    text = json.dumps([prompt.strip(), target.strip()], ensure_ascii=False)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def save_network(
    network: HyperNetwork, manifest: Mapping[str, Any], folder: Path, trained_on: Collection[int] = ()
) -> None:
    """Write the artifact: one safetensors file that holds the manifest too, and a copy of the manifest to read.

    Args:
        manifest: base model, edited matrices, data, steps, losses (JSON-able). The network's form is added.
        trained_on: :func:`edit_digest` of every training edit.
    """
    folder.mkdir(parents=True, exist_ok=True)
    full = {**manifest, "format": FORMAT, "network": asdict(network.settings), "shapes": network.shapes}
    text = json.dumps(full, indent=1)
    tensors = network.state_dict() | {TRAINED_ON: torch.tensor(sorted(trained_on), dtype=torch.int64)}
    write_tensors(folder / WEIGHTS_NAME, tensors, {"format": FORMAT, "manifest": text})
    with replacing(folder / MANIFEST_NAME) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


def artifact_file(path: str | Path) -> Path:
    """The weights file of an artifact given as folder or file."""
    place = Path(path).expanduser()
    place = place / WEIGHTS_NAME if place.is_dir() else place
    if not place.is_file():
        raise EditingError(f"no trained hyper-network at {path}; it is a folder written by lm-edit train-mend.")
    return place


def artifact_digest(path: str | Path) -> str:
    """SHA-256 (hex) of an artifact's weights file, manifest included."""
    digest = hashlib.sha256()
    with artifact_file(path).open("rb") as file:
        while block := file.read(2**22):
            digest.update(block)
    return digest.hexdigest()


def read_manifest(path: str | Path) -> dict[str, Any]:
    """What a trained artifact says about itself.

    Raises:
        EditingError: when there is none or it is something else.
    """
    place = artifact_file(path)
    try:
        with safe_open(place, framework="pt") as file:
            header = file.metadata() or {}
    except Exception as error:
        raise EditingError(f"cannot read the hyper-network in {place}: {error}") from error
    if header.get("format") != FORMAT:
        raise EditingError(f"{place} is no trained hyper-network (format {header.get('format')!r}, want {FORMAT!r}).")
    manifest = json.loads(header["manifest"])
    for part in {"editor", "network"} & set(manifest):
        manifest[part] = {RENAMED.get(name, name): value for name, value in manifest[part].items()}
    return manifest


def load_network(path: str | Path) -> tuple[HyperNetwork, dict[str, Any]]:
    """A trained hyper-network and its manifest, as :func:`save_network` wrote them."""
    manifest = read_manifest(path)
    shapes = {name: (int(d), int(f)) for name, (d, f) in manifest["shapes"].items()}
    network = HyperNetwork(shapes, NetworkSettings(**manifest["network"]))
    with safe_open(artifact_file(path), framework="pt") as file:
        names = [name for name in file.keys() if name != TRAINED_ON]  # noqa: SIM118
        network.load_state_dict({name: file.get_tensor(name) for name in names})
    return network, manifest


def trained_on(path: str | Path) -> frozenset[int]:
    """:func:`edit_digest` of every edit an artifact was trained on."""
    with safe_open(artifact_file(path), framework="pt") as file:
        return frozenset(file.get_tensor(TRAINED_ON).tolist() if TRAINED_ON in file.keys() else ())  # noqa: SIM118
