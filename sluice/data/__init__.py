"""Data sets: by name, from a file, or the user's own, always as records that can be read by index.

>>> from sluice.data import load
>>> digits = load("digits")
>>> x, y = digits.train.batch([0, 1, 2])
>>> tuple(x.shape), x.dtype
((3, 1, 8, 8), torch.float32)
"""

from sluice.data.catalog import names
from sluice.data.examples import DataSplits, Examples, TensorExamples
from sluice.data.loading import load, load_sequences, load_word_index
from sluice.data.own import DatasetExamples, wrap
from sluice.data.splitting import hold_out
from sluice.data.text import BagExamples, BagsOfWords, LabelledSequences, Sequences, bag_of_words, padded
from sluice.data.transforms import ToFloat, ToIds, standardised, to_float, to_ids
from sluice.data.unlabelled import ranked, read_records, unlabelled
from sluice.data.weighted import WeightedBagExamples, WeightedBags, text_digests

__all__ = [
    "BagExamples",
    "BagsOfWords",
    "DataSplits",
    "DatasetExamples",
    "Examples",
    "LabelledSequences",
    "Sequences",
    "TensorExamples",
    "ToFloat",
    "ToIds",
    "WeightedBagExamples",
    "WeightedBags",
    "bag_of_words",
    "hold_out",
    "load",
    "load_sequences",
    "load_word_index",
    "names",
    "padded",
    "ranked",
    "read_records",
    "standardised",
    "text_digests",
    "to_float",
    "to_ids",
    "unlabelled",
    "wrap",
]
