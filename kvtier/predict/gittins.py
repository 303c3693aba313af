"""Worth: the Gittins index of a subject that may return.

Keeping a block for a while and then giving up earns (chance to return meanwhile) / (expected time held). The index is
the best ratio over all times to give up: expected hits per block second with the best stopping time. At a given price
of room, "keep while the index exceeds the price" is optimal for one renewal, so no horizon has to be chosen.
"""

from __future__ import annotations

import numpy as np

from kvtier.predict.hazard import BUCKETS, EDGES, LAST_EDGE_S, WIDTHS, Float, Int

_GIVE_UP = 0.02  # do not look past the age that only this share survives
_COLUMN = np.arange(BUCKETS)


def index_at_edges(hazards: Float, bucket: Int) -> tuple[Float, Float]:
    """The index at the start and at the end of each subject's bucket (< BUCKETS).

    `hazards` is (n, BUCKETS) as HazardModel.hazards gives it. The worth inside the bucket is the linear interpolation.
    """
    ahead = bucket[:, None] <= _COLUMN
    survival = np.exp(-np.cumsum(hazards * ahead, axis=1))
    before = np.empty_like(survival)
    before[:, 0] = 1.0
    before[:, 1:] = survival[:, :-1]
    held_s = np.cumsum((before + survival) * (0.5 * WIDTHS) * ahead, axis=1)
    ratio = np.zeros_like(survival)
    np.divide(1.0 - survival, held_s, out=ratio, where=ahead & (before >= _GIVE_UP))
    first: Float = ratio.max(axis=1)
    # From the end of the bucket on: the same sums, less what lies inside it, given survival of it.
    row = np.arange(len(bucket))
    survived, used_s = survival[row, bucket][:, None], held_s[row, bucket][:, None]
    ahead[row, bucket] = False
    ratio[:] = 0.0
    np.divide(survived - survival, held_s - used_s, out=ratio, where=ahead & (before >= _GIVE_UP * survived))
    second: Float = ratio.max(axis=1)
    last = bucket == BUCKETS - 1
    second[last] = first[last] * (EDGES[BUCKETS - 1] / LAST_EDGE_S)
    return first, second


def return_probability(hazards: Float, age_s: Float, horizon_s: float) -> Float:
    """P(return within `horizon_s` | not returned up to `age_s`), the hazard spread evenly over each bucket."""
    total = np.concatenate([np.zeros((len(hazards), 1)), np.cumsum(hazards, axis=1)], axis=1)
    probability: Float = 1.0 - np.exp(-(_at(total, age_s + horizon_s) - _at(total, age_s)))
    return probability


def _at(total: Float, age_s: Float) -> Float:
    """The integrated hazard up to an age; beyond the last edge it goes on per log-age as in the last bucket."""
    bucket = np.clip(np.searchsorted(EDGES, age_s, side="right") - 1, 0, BUCKETS - 1)
    row = np.arange(len(total))
    share = np.minimum((age_s - EDGES[bucket]) / WIDTHS[bucket], 1.0)
    low, high = total[row, bucket], total[row, bucket + 1]
    beyond = np.log(np.maximum(age_s, LAST_EDGE_S) / LAST_EDGE_S) / np.log(EDGES[-1] / EDGES[-2])
    result: Float = low + (high - low) * (share + beyond)
    return result
