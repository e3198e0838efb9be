"""Token ids of prompts, made once for all methods: for long prompts this takes as long as a small model does.

Also where the token ids of a reply end.
"""

from collections.abc import Sequence
from typing import Any

import torch

TOGETHER = 256
"""Prompts tokenized per call: more would only take memory."""


class Prompts:
    """A tokenizer that remembers, with its own special tokens but for a text that begins with one already."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self._known: dict[str, torch.Tensor] = {}

    def ids(self, texts: Sequence[str]) -> list[torch.Tensor]:
        """The tokens of each text, int32 [tokens]."""
        new = [text for text in dict.fromkeys(texts) if text not in self._known]
        begin = getattr(self.tokenizer, "bos_token", None)
        for special in (True, False):
            own = [text for text in new if special != bool(begin and text.startswith(begin))]
            for at in range(0, len(own), TOGETHER):
                part = own[at : at + TOGETHER]
                found = self.tokenizer(part, add_special_tokens=special).input_ids
                self._known |= {
                    text: torch.tensor(ids, dtype=torch.int32) for text, ids in zip(part, found, strict=True)
                }
        return [self._known[text] for text in texts]

    def padded(self, texts: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Input ids and attention mask [rows, columns], padded at the left."""
        rows = self.ids(texts)
        width = max(map(len, rows))
        ids = torch.full((len(rows), width), int(self.tokenizer.pad_token_id))
        mask = torch.zeros_like(ids)
        for at, row in enumerate(rows):
            ids[at, width - len(row) :] = row
            mask[at, width - len(row) :] = 1
        return ids, mask


def until(tokens: list[int], ends: set[int]) -> list[int]:
    """A reply without its end: the part before the first of `ends`."""
    stop = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[:stop]
