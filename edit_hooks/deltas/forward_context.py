"""Facts about a forward pass that a hook cannot see at its module.

Shapes: R rows, T tokens of the pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from edit_hooks.utils.errors import EditingError


@dataclass(frozen=True)
class ForwardContext:
    """Layout of one forward pass.

    Attributes:
        attended_RT: bool, the columns that hold real tokens.
        prompt_end_R: column of the last prompt token; unused while decoding.
        prefill: the pass holds the rows' prompts (and, in teacher forcing, their continuations); otherwise it holds one
            new token per row.
    """

    attended_RT: torch.Tensor
    prompt_end_R: torch.Tensor
    prefill: bool

    @property
    def prompt_RT(self) -> torch.Tensor:
        """bool, the columns that hold prompt tokens."""
        columns_T = torch.arange(self.attended_RT.shape[1], device=self.attended_RT.device)
        return self.attended_RT & (columns_T <= self.prompt_end_R[:, None])

    @property
    def text_end_R(self) -> torch.Tensor:
        """Column of the last real token of each row."""
        columns_T = torch.arange(self.attended_RT.shape[1], device=self.attended_RT.device)
        return torch.where(self.attended_RT, columns_T, -1).amax(1)

    def to(self, device: torch.device) -> ForwardContext:
        """A copy on a module's device; with a device map, modules of one model are on different devices."""
        return ForwardContext(self.attended_RT.to(device), self.prompt_end_R.to(device), self.prefill)

    @classmethod
    def for_prefill(cls, mask_RT: torch.Tensor, prompt_length_R: torch.Tensor | None) -> ForwardContext:
        """A prefill pass with padding on either side.

        Args:
            mask_RT: attention mask of the pass.
            prompt_length_R: number of prompt tokens of each row, or of all rows ([1]); ``None``: all tokens.

        Raises:
            EditingError: for a wrong number of lengths, and for lengths that the mask has no tokens for.
        """
        attended_RT = mask_RT.bool()
        start_R = attended_RT.long().argmax(1)
        length_R = attended_RT.sum(1) if prompt_length_R is None else prompt_length_R.to(mask_RT.device)
        if len(length_R) not in (1, len(mask_RT)):
            raise EditingError(
                f"{len(length_R)} prompt lengths for a batch of {len(mask_RT)} rows; give one per row, or one for all."
            )
        if (length_R > attended_RT.sum(1)).any() or (length_R < 1).any():
            raise EditingError("prompt lengths are longer than the rows' attended tokens, or zero; is a mask missing?")
        return cls(attended_RT, (start_R + length_R - 1).expand(len(mask_RT)), prefill=True)

    @classmethod
    def for_step(cls, num_rows: int, device: torch.device) -> ForwardContext:
        """A decoding step."""
        ones = torch.ones(num_rows, 1, dtype=torch.bool, device=device)
        return cls(ones, torch.zeros(num_rows, dtype=torch.long, device=device), prefill=False)
