"""Sentiment of film reviews from bags of words, with differential privacy.

python examples/text_classifier.py                      # needs the data set imdb: sluice data get imdb
python examples/text_classifier.py --synthetic --quick  # made-up texts, no data needed
"""

import argparse

import torch
import torch.nn.functional as F

from sluice import ClippingBiasGate, GlobalScaling, PrivacyEngine
from sluice.data import BagExamples, DataSplits, Sequences, bag_of_words, load
from sluice.experiments.run import accuracy
from sluice.models import create_model


def made_up_reviews(texts: int = 2000, words: int = 300) -> DataSplits:
    """Texts of 40 words; those of class 1 use the even words somewhat more often than the odd ones."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(2, (texts,), generator=generator)
    ranks = torch.randint(words // 2, (texts, 40), generator=generator) * 2
    is_typical = torch.rand((texts, 40), generator=generator) < 0.6
    ids = 51 + ranks + torch.where(is_typical, 1 - labels[:, None], labels[:, None])
    sequences = Sequences(ids=ids.flatten().to(torch.int32), offsets=torch.arange(0, 40 * texts + 1, 40))
    whole = BagExamples(bag_of_words(sequences, words), labels)
    return DataSplits(
        name="made-up reviews",
        kind="features",
        classes=("bad", "good"),
        train=whole.subset(range(texts * 3 // 4)),
        test=whole.subset(range(texts * 3 // 4, texts)),
    )


parser = argparse.ArgumentParser()
parser.add_argument("--synthetic", action="store_true", help="made-up texts instead of imdb")
parser.add_argument("--quick", action="store_true", help="15 releases instead of 200")
options = parser.parse_args()
releases = 15 if options.quick else 200

reviews = made_up_reviews() if options.synthetic else load("imdb", text_as="bag-of-words")
model = create_model("bag-of-words", reviews.train.input_shape, len(reviews.classes))

engine = PrivacyEngine()
engine.make_private_with_epsilon(
    module=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.5 if options.synthetic else 2.0, momentum=0.9),
    data_loader=reviews.train,
    sample_rate=min(1024, len(reviews.train) // 4) / len(reviews.train),
    target_epsilon=3.0,
    target_delta=1e-5,
    releases=releases,
    max_grad_norm=1.0,
    scaling=GlobalScaling(bound=0.3),
    gate=ClippingBiasGate(beta=3.0),
)
for release in engine.releases(F.cross_entropy):  # the same training as the ordinary loop, at full speed
    if release % (releases // 5) == 0:
        print(f"release {release}: test accuracy {accuracy(model, reviews.test):.3f}")
print(f"epsilon {engine.get_certified_epsilon(1e-5):.2f} at delta 1e-5")
