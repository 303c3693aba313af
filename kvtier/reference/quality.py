"""What an encoding costs: KL of the continuation, agreement of the most likely token, perplexity ratio; with intervals.

Protocol: prefill a prefix, round its KV to bfloat16 (the reference), pass it through a codec block by block exactly as
a tier would, continue teacher-forced with both caches, compare the two distributions at every position.
Intervals are bootstrapped over blocks of 32 positions; they cover neither other models nor other texts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvtier.codec.form import RowForm
from kvtier.codec.protocol import RowCodec
from kvtier.reference.prefix_model import PrefixModel

_RESAMPLES = 1000
_BLOCK_POSITIONS = 32


class Comparison(NamedTuple):
    """Per position: KL(reference ‖ test) in nats, whether the most likely token agrees, log-likelihoods of the text."""

    kl: npt.NDArray[np.float64]
    agrees: npt.NDArray[np.bool_]
    reference_nll: npt.NDArray[np.float64]
    test_nll: npt.NDArray[np.float64]

    @staticmethod
    def joined(parts: list[Comparison]) -> Comparison:
        """The positions of several texts, one after the other."""
        return Comparison(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    def kl_interval(self) -> tuple[float, float]:
        """95 % bootstrap interval of the mean KL."""
        return block_interval(self.kl)

    @property
    def perplexity_ratio(self) -> float:
        """Perplexity of the text under the test cache over that under the reference."""
        return float(np.exp(self.test_nll.mean() - self.reference_nll.mean()))


class Passage(NamedTuple):
    """A text prepared for comparisons: prefix KV, what follows, and the reference distribution there."""

    name: str
    kv: torch.Tensor
    following: torch.Tensor
    reference: torch.Tensor


def prepare(model: PrefixModel, name: str, ids: torch.Tensor, prefix_tokens: int, positions: int) -> Passage:
    """Prefill `prefix_tokens` of `ids` and score the `positions` after them. Raises ValueError if ids are too few."""
    if len(ids) < prefix_tokens + positions:
        raise ValueError(f"{name}: {len(ids)} tokens; {prefix_tokens} + {positions} are needed")
    kv = model.prefill(ids[:prefix_tokens])
    following = ids[prefix_tokens : prefix_tokens + positions]
    return Passage(name, kv, following, model.log_probabilities(following, kv))


def compare(passage: Passage, test: torch.Tensor) -> Comparison:
    """Compare log-probabilities under another cache with the passage's own."""
    reference = passage.reference
    kl = (reference.exp() * (reference - test)).sum(dim=-1).clamp(min=0)
    agrees = reference.argmax(dim=-1) == test.argmax(dim=-1)
    target = passage.following[1:, None]
    nll = [-x[:-1].gather(1, target)[:, 0] for x in (reference, test)]
    return Comparison(kl.double().numpy(), agrees.numpy(), nll[0].double().numpy(), nll[1].double().numpy())


def form_of(model: PrefixModel, block_tokens: int) -> RowForm:
    """The row form an engine would have for this model with blocks of `block_tokens`."""
    return RowForm(layers=model.layers, heads=model.heads, tokens=block_tokens, head_dim=model.head_dim, axes="lhtkd")


def through_codec(kv: torch.Tensor, codec: RowCodec, *, know_positions: bool = True) -> tuple[torch.Tensor, int]:
    """The prefix after a trip through the codec, block by block, and the encoded bytes it took.

    Tokens that do not fill a last block stay as they are (no tier would hold them) and are not counted.
    """
    form = codec.form
    result = kv.clone()
    target = memoryview(bytearray(codec.encoded_bytes))
    row = np.empty(form.row_bytes, dtype=np.uint8)
    numbers = torch.from_numpy(form.numbers(row).view(np.int16)).view(torch.bfloat16)
    total = 0
    for start in range(0, kv.shape[3] - form.tokens + 1, form.tokens):
        numbers.copy_(kv[:, :, :, start : start + form.tokens])
        first = start if know_positions or start == 0 else None
        total += codec.encode(row.data, target, first)
        codec.decode(target, row.data)
        result[:, :, :, start : start + form.tokens] = numbers.float()
    return result, total


def block_interval(values: npt.NDArray[np.float64], seed: int = 0) -> tuple[float, float]:
    """95 % interval of the mean, resampling blocks of 32 positions."""
    blocks = np.array_split(values, max(1, len(values) // _BLOCK_POSITIONS))
    sums, counts = np.array([b.sum() for b in blocks]), np.array([len(b) for b in blocks])
    drawn = np.random.default_rng(seed).integers(0, len(blocks), size=(_RESAMPLES, len(blocks)))
    means = sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)
