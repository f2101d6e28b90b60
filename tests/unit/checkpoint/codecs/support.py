"""Helpers of the codec tests."""

from dataclasses import dataclass

import numpy as np
from deltashard_checkpoint.codecs.decoder import decode_rows
from deltashard_checkpoint.codecs.encoding import section_bytes
from deltashard_checkpoint.codecs.quantizer import Encoded, encode_rows
from deltashard_checkpoint.vocabulary import ENCODINGS


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Encoded rows and the frame fields that describe them."""

    encoding: str
    shape: tuple[int, int]
    sections: tuple[np.ndarray, np.ndarray, np.ndarray]
    encoded: Encoded

    def restored(self, dtype: str = "float32"):
        return decode_rows(
            ENCODINGS[self.encoding], *self.sections, self.encoded.exponent,
            rows=self.shape[0], columns=self.shape[1], exceptions=self.encoded.exceptions, dtype=dtype,
        )  # fmt: skip

    def scales_and_biases(self):
        """Return (scales, biases) as float16 bits or float32."""
        scale_dtype = np.float32 if self.encoding == "q8" else np.uint16
        return self.sections[0].view(scale_dtype), self.sections[1].view(scale_dtype)


def store(encoding, weights, *, dtype=None, search=None) -> Stored:
    sections = tuple(
        np.full(size, 0xAA, np.uint8) for size in section_bytes(ENCODINGS[encoding], *weights.shape)
    )
    encoded = encode_rows(ENCODINGS[encoding], weights, *sections, dtype=dtype, search=search)
    return Stored(encoding=encoding, shape=weights.shape, sections=sections, encoded=encoded)


def odd_rows(columns: int, seed: int = 0) -> np.ndarray:
    """Return float32 [64, columns]: ordinary rows and one of each kind that breaks simple quantizers."""
    rng = np.random.default_rng(seed)
    x = rng.normal(0, 0.05, (64, columns)).astype(np.float32)
    x[5] = 0
    x[6] = 0.1
    x[7, 0] = np.nan
    x[8, -1] = np.inf
    x[9] = -np.inf
    x[10] = 1e-40 * rng.random(columns)
    x[11] *= 1e38
    x[12] = 1e-7 * rng.random(columns)
    x[13] = 1 + 1e-5 * rng.random(columns)
    x[14, 0] = -0.0
    x[15] = -0.0
    x[16] = 70000
    x[17] *= 1e30
    x[18, 0], x[18, -1] = 3e38, -3e38
    x[19] = np.nan
    return x
