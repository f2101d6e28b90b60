"""Observed failures of a run, and the rates estimated from them. Pure.

Two separate rates are estimated, per incident and never per pod:

- **lossy failures**: steps were lost (a crash, no memory, a lost node). They determine the save interval.
- **restores** of any kind (also after a graceful eviction or a suspension). They determine the precision.

Exposure is *trained* seconds. Counts and exposure decay with a half-life of seven trained days: a window with a hard
edge would make decisions jump. A suspended week does not count.

Each rate has a Gamma prior of shape `a` and rate `b` (in seconds): after `k` incidents in `E` seconds of exposure its
mean is (a + k) / (b + E). The number of future incidents is then negative-binomial.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

HALF_LIFE_S = 7 * 86400.0
POD_MTBF_S = 30 * 86400.0
"""Prior of one pod: large fleets report days to months."""
LOSSY_WEIGHT_S = 84 * 3600.0
"""Maximum exposure that the prior of lossy failures weighs."""
RESTORE_MEAN_S = 86400.0
RESTORE_SHAPE = 0.5
QUANTILE = 0.95
MAX_RESTORE_COUNT = 100_000
"""Upper bound of a quantile's search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Decayed counts of a run."""

    exposure_s: float = 0.0
    """Trained seconds."""
    lossy: float = 0.0
    restores: float = 0.0

    def after_training(self, seconds: float) -> Evidence:
        kept = 2.0 ** (-max(seconds, 0.0) / HALF_LIFE_S)
        added_s = HALF_LIFE_S / math.log(2) * (1 - kept)
        return Evidence(
            exposure_s=self.exposure_s * kept + added_s,
            lossy=self.lossy * kept,
            restores=self.restores * kept,
        )

    def with_incident(self, *, lossy: bool) -> Evidence:
        """Return the evidence after one more incident: a restore, with or without lost steps."""
        return replace(self, lossy=self.lossy + int(lossy), restores=self.restores + 1)

    def plus(self, other: Evidence) -> Evidence:
        return Evidence(
            exposure_s=self.exposure_s + other.exposure_s,
            lossy=self.lossy + other.lossy,
            restores=self.restores + other.restores,
        )


NONE = Evidence()


@dataclass(frozen=True, slots=True, kw_only=True)
class Gamma:
    """An uncertain rate, with mean `shape / rate_s` incidents per second."""

    shape: float
    rate_s: float

    def posterior(self, count: float, exposure_s: float) -> Gamma:
        return Gamma(shape=self.shape + count, rate_s=self.rate_s + exposure_s)

    @property
    def mean_between_s(self) -> float:
        """Seconds between incidents at the mean rate."""
        return self.rate_s / self.shape

    def quantile(self, seconds: float, q: float = QUANTILE) -> int:
        """Return the smallest n with P(incidents in `seconds` <= n) >= q."""
        if seconds <= 0:
            return 0
        if math.isinf(seconds):
            return MAX_RESTORE_COUNT
        p = self.rate_s / (self.rate_s + seconds)
        log_mass = self.shape * math.log(p)
        total, n = math.exp(log_mass), 0
        while total < q and n < MAX_RESTORE_COUNT:
            n += 1
            log_mass += math.log((self.shape + n - 1) / n) + math.log1p(-p)
            total += math.exp(log_mass)
        return n


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The two estimated rates of a run."""

    lossy: Gamma
    restores: Gamma

    @property
    def mtbf_s(self) -> float:
        return self.lossy.mean_between_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEstimate:
    """The current estimate of a run."""

    rates: Rates
    trained_s: float
    """Exposure that the estimate is based on."""
    step_s: float
    """Duration of an ordinary step; 0: unknown."""


def lossy_prior(pods: int) -> Gamma:
    """Return the prior of a run of `pods` pods: each fails once in 30 days, weighted as at most 84 h of training."""
    mean_s = POD_MTBF_S / max(pods, 1)
    weight_s = min(mean_s, LOSSY_WEIGHT_S)
    return Gamma(shape=weight_s / mean_s, rate_s=weight_s)


def rates(seen: Evidence, *, pods: int) -> Rates:
    restores = Gamma(shape=RESTORE_SHAPE, rate_s=RESTORE_SHAPE * RESTORE_MEAN_S)
    return Rates(
        lossy=lossy_prior(pods).posterior(seen.lossy, seen.exposure_s),
        restores=restores.posterior(seen.restores, seen.exposure_s),
    )
