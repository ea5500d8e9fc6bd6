"""The devices that computed a result, for result files: lm-eval records its default, ``cuda:0``, on a CPU, too."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def describe_devices(model: nn.Module) -> dict[str, Any]:
    """Types of the devices that hold the weights, names of the GPUs among them, and their number.

    Returns:
        ``{"type": "cuda", "name": "NVIDIA H100 80GB HBM3", "count": 1}``; several types or names are joined by ``+``,
        and devices without a name, as CPUs, have ``None``.
    """
    devices = dict.fromkeys(tensor.device for tensor in (*model.parameters(), *model.buffers()))
    names = {torch.cuda.get_device_name(device) for device in devices if device.type == "cuda"}
    return {
        "type": "+".join(sorted({device.type for device in devices})),
        "name": "+".join(sorted(names)) or None,
        "count": len(devices),
    }
