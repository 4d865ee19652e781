from __future__ import annotations

import errno
import io
import os
import stat
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from sluice._base.errors import DataError, InputError
from sluice._base.files import canonical_json, sha256_hex
from sluice.runs.checkpoint import load_checkpoint, save_checkpoint

CONFIG = "ab" * 32


def save(folder: Path, release: int) -> Path:
    payload = {"weights": {"w": torch.full((3,), float(release))}, "release": release}
    return save_checkpoint(folder, payload, config_hash=CONFIG, release=release)


def test_a_checkpoint_comes_back_as_it_was(tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    payload = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "noise": {"kind": "seeded", "seed": 3, "calls": 2**70},
        "reference": (0.1, None, True, b"x"),
        "half": torch.ones(2, dtype=torch.bfloat16),
    }
    save_checkpoint(tmp_path, payload, config_hash=CONFIG, release=7)
    loaded = load_checkpoint(tmp_path, config_hash=CONFIG)
    assert (loaded.release, loaded.note) == (7, None)
    assert loaded.payload["noise"] == payload["noise"]
    assert loaded.payload["reference"] == payload["reference"]
    torch.testing.assert_close(loaded.payload["half"], payload["half"], rtol=0, atol=0)
    restored = torch.nn.Linear(2, 2)
    restored.load_state_dict(loaded.payload["model"])
    torch.testing.assert_close(restored.weight, model.weight, rtol=0, atol=0)
    torch.optim.Adam(restored.parameters()).load_state_dict(loaded.payload["optimizer"])


def test_only_the_owner_can_read_it(tmp_path):
    path = save(tmp_path / "checkpoints", 1)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_the_last_two_are_kept_and_the_newest_is_read(tmp_path):
    for release in (0, 1, 9, 10, 11):
        save(tmp_path, release)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "release-0000000010.checkpoint",
        "release-0000000011.checkpoint",
    ]
    assert load_checkpoint(tmp_path, config_hash=CONFIG).release == 11


def test_no_checkpoint_yet(tmp_path):
    assert load_checkpoint(tmp_path / "none", config_hash=CONFIG) is None
    assert load_checkpoint(tmp_path, config_hash=CONFIG) is None


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "zeros", "renumbered", "foreign"])
def test_a_damaged_newest_falls_back_to_the_one_before_and_says_so(tmp_path, damage):
    save(tmp_path, 4)
    newest = save(tmp_path, 5)
    content = newest.read_bytes()
    damaged = {
        "empty": b"",
        "cut": content[:-1],
        "flipped": content[:-100] + bytes([content[-100] ^ 1]) + content[-99:],
        "zeros": bytes(len(content)),
        "renumbered": content.replace(b'"release":5', b'"release":6'),
        "foreign": (tmp_path / "release-0000000004.checkpoint").read_bytes(),
    }[damage]
    newest.write_bytes(damaged)
    loaded = load_checkpoint(tmp_path, config_hash=CONFIG)
    assert loaded.release == 4
    assert float(loaded.payload["weights"]["w"][0]) == 4.0
    assert "release-0000000005.checkpoint is damaged" in loaded.note
    assert "4 releases" in loaded.note


def test_truncation_at_any_byte_is_noticed(tmp_path):
    content = save(tmp_path, 1).read_bytes()
    for length in (*range(300), *range(300, len(content), 61)):
        (tmp_path / "release-0000000001.checkpoint").write_bytes(content[:length])
        with pytest.raises(DataError, match="is damaged"):
            load_checkpoint(tmp_path, config_hash=CONFIG)


def test_two_damaged_ones_are_an_error(tmp_path):
    for release in (1, 2):
        save(tmp_path, release).write_bytes(b"nonsense")
    with pytest.raises(DataError, match=r"no checkpoint in .* can be read: .*0002.*0001"):
        load_checkpoint(tmp_path, config_hash=CONFIG)


def test_a_damaged_one_from_a_lost_future_is_removed_by_the_next_save(tmp_path):
    save(tmp_path, 4)
    save(tmp_path, 6).write_bytes(b"nonsense")
    save(tmp_path, 5)
    assert load_checkpoint(tmp_path, config_hash=CONFIG).note is None


def test_another_configuration_is_refused_not_passed_over(tmp_path):
    save(tmp_path, 1)
    save_checkpoint(tmp_path, {"a": 1}, config_hash="cd" * 32, release=2)
    with pytest.raises(InputError, match="belongs to another configuration"):
        load_checkpoint(tmp_path, config_hash=CONFIG)


@pytest.mark.parametrize(
    ("payload", "place"),
    [
        ({"a": {"b": [1, object()]}}, r"payload\['a'\]\['b'\]\[1\] is a object"),
        ({"a": lambda: 0}, r"payload\['a'\] is a function"),
        ({"a": {(1, 2): 3}}, "has the key"),
    ],
)
def test_what_could_not_be_read_back_is_refused_before_writing(tmp_path, payload, place):
    with pytest.raises(InputError, match=place):
        save_checkpoint(tmp_path, payload, config_hash=CONFIG, release=1)
    assert list(tmp_path.iterdir()) == []


def test_code_in_a_pickle_is_not_run(tmp_path):
    """Even with a right checksum, which anyone can compute."""

    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return (os.mkdir, (str(tmp_path / "ran"),))

    buffer = io.BytesIO()
    torch.save({"a": Evil()}, buffer)
    head = {"configuration": CONFIG, "release": 1, "bytes": len(buffer.getvalue())}
    checksum = sha256_hex(canonical_json(head) + buffer.getvalue())
    content = b"sluice checkpoint 1\n" + canonical_json({**head, "sha256": checksum}) + b"\n" + buffer.getvalue()
    (tmp_path / "release-0000000001.checkpoint").write_bytes(content)
    with pytest.raises(DataError, match="torch cannot read it"):
        load_checkpoint(tmp_path, config_hash=CONFIG)
    assert not (tmp_path / "ran").exists()


def test_a_full_disk_keeps_the_checkpoints_that_are_there(tmp_path, monkeypatch):
    save(tmp_path, 1)
    save(tmp_path, 2)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fdatasync", full)
    with pytest.raises(DataError, match=r"No space left.*free some space"):
        save(tmp_path, 3)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_ordered_dictionaries_become_plain(tmp_path):
    save_checkpoint(tmp_path, OrderedDict(a=OrderedDict(b=1)), config_hash=CONFIG, release=0)
    assert load_checkpoint(tmp_path, config_hash=CONFIG).payload == {"a": {"b": 1}}
