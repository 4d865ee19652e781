"""What a run writes into ``public/``: test scores over releases, the model, the certificate, plots."""

from __future__ import annotations

import json

from sluice._base.files import read_bytes, sha256_hex, sha256_of_file, write_atomically
from sluice.runs.certificate import certified_head, write_certificate
from sluice.runs.evaluations import Evaluation, read_evaluations
from sluice.runs.folder import RunFolder
from sluice.runs.ledger import Ledger, read_ledger

CLASSES = "classes.json"
"""Accuracy by class, in ``public/``."""


class PublicFiles:
    """The public files of one run. Each is replaced as a whole.

    Guarantee:
        What is written depends on the released weights, on the ledger and on test records, and on nothing else.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._evaluations = {each.release: each for each in read_evaluations(folder)}

    def keep_up_to(self, release: int) -> None:
        """Drop what was written after the checkpoint from which the run resumes."""
        self._evaluations = {number: each for number, each in self._evaluations.items() if number <= release}

    def has(self, release: int) -> bool:
        """Whether the evaluation after this release is written."""
        return release in self._evaluations

    def add(self, evaluation: Evaluation) -> None:
        self._evaluations[evaluation.release] = evaluation
        lines = [json.dumps(each.as_json()) + "\n" for each in self._evaluations.values()]
        write_atomically(self._folder.accuracy_path, "".join(lines).encode("ascii"), public=True)

    def publish_model(self, weights: bytes, ledger: Ledger) -> None:
        """The weights, encoded as safetensors, and before them the hashes of what is said of them on test records."""
        for path in (self._folder.accuracy_path, self._folder.public / CLASSES):
            if path.exists():
                publish(self._folder, path.name, read_bytes(path), ledger)
        publish(self._folder, self._folder.weights_path.name, weights, ledger)

    def publish_certificate(self) -> None:
        """The certificate, with its pages and plots."""
        write_certificate(self._folder)


def publish(folder: RunFolder, name: str, content: bytes, ledger: Ledger) -> None:
    """Put a file into ``public/``; its hash is in the ledger, once, before the file is in place."""
    digest = sha256_hex(content)
    if read_ledger(ledger.path).published.get(name) != digest:
        ledger.append_published(name, sha256=digest)
    write_atomically(folder.public / name, content, public=True)


def is_published(folder: RunFolder) -> bool:
    """Whether the run is over: the weights in the ledger are in place, and a certificate of all that is in the ledger too."""
    contents = read_ledger(folder.ledger_path)
    logged = contents.published.get(folder.weights_path.name)
    return (
        logged is not None
        and folder.certificate_path.is_file()
        and folder.weights_path.is_file()
        and sha256_of_file(folder.weights_path) == logged
        and certified_head(folder) == contents.head
    )
