"""Training of MEND's hyper-network (:mod:`edit_hooks.training.trainer`).

The loss is :class:`~edit_hooks.training.mend.loss.MENDLoss`. One Adam optimizer serves the networks (``lr``) and the
step sizes (``lr_step_sizes``). The released code creates a second optimizer for the step sizes whose gradient the first
has already cleared, so they move at ``lr`` there.

Not copied from EasyEdit: it loads the paraphrase but takes the loss on the edit itself (``edit_loss: edit`` does the
same), never stops early and keeps the last checkpoint, takes the locality loss at the answer's tokens instead of those
that predict them, and restarts the statistics when a run resumes. docs/editors/training.md lists
all settings that differ ("Trainings of the releases").
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from edit_hooks.editors.mend import edited_shapes
from edit_hooks.gradient.artifact import HYPER_NETWORK, read_released_network, save_network
from edit_hooks.gradient.hypernetwork import HyperNetwork
from edit_hooks.modeling.architectures import unwrapped
from edit_hooks.training.mend.config import ARTIFACT_SETTINGS, TrainingConfig
from edit_hooks.training.mend.loss import MENDLoss
from edit_hooks.training.trainer import ImportSource, Trainer


class MENDTrainer(Trainer[TrainingConfig]):
    """Trains a hyper-network into a folder."""

    config_class = TrainingConfig
    kind = HYPER_NETWORK
    title = "MEND"
    resume_format = "lm-eval-editing/mend-resume/1"
    rates = "lr or edit_lr"
    artifact_settings = ARTIFACT_SETTINGS

    @classmethod
    def import_artifact(
        cls,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        config: TrainingConfig,
        weights: Path,
        source: ImportSource,
    ) -> None:
        """Write the artifact of a network under the names of MEND's release.

        Rank and number of hidden layers are those of the file.
        """
        network = read_released_network(weights, edited_shapes(unwrapped(model), config), config.network_settings())
        settings = {name: config.to_dict()[name] for name in ARTIFACT_SETTINGS}
        settings |= {"rank": network.settings.rank, "num_hidden": network.settings.num_blocks - 1}
        save_network(network, source.manifest(settings), source.out)

    def set_up(self, tokenizer: PreTrainedTokenizerBase) -> None:
        config, weight = self.config, self.model.get_input_embeddings().weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        network = HyperNetwork(edited_shapes(self.model, config), config.network_settings(), dtype)
        self.network = network.to(weight.device)
        self.loss = MENDLoss(self.model, tokenizer, self.network, config, self.data.train)
        networks = [p for name, p in self.network.named_parameters() if name != "step_sizes"]
        self.optimizer = torch.optim.Adam(
            [{"params": networks, "lr": config.lr}, {"params": [self.network.step_sizes], "lr": config.lr_step_sizes}]
        )

    def trained_parameters(self) -> list[nn.Parameter]:
        return list(self.network.parameters())

    def state(self) -> dict[str, torch.Tensor]:
        return self.network.state_dict()

    def load_state(self, tensors: dict[str, torch.Tensor]) -> None:
        self.network.load_state_dict(tensors)

    def save_artifact(self) -> None:
        save_network(self.network, self.manifest(), self.out, self.training_digests())
