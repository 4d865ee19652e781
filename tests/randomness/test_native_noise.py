"""The kernel in C: the same keystream, errors below the bounds of docs/noise.md, and the same bits as torch operations."""

from __future__ import annotations

import ctypes
import math
import platform
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sluice._base import native
from sluice._base.errors import DataError
from sluice.randomness.keystream import LONGEST, Keystream
from sluice.randomness.native import kernels
from sluice.randomness.noise import SecureNoise, SeededNoise, noisy_sum
from sluice.randomness.rounded_normal import Digits, Entries, rounded_normals, settle

ROUNDING = 2.0**-53
KEY = bytes(range(32))
INTEL = platform.machine() in ("x86_64", "AMD64")

#: Eight blocks of the keystream at once or sixteen, with and without fused multiply-adds.
VARIANTS = {"as used": None, "plain": (), **({"avx2": ("-march=native", "-mno-avx512f")} if INTEL else {})}


@pytest.fixture(autouse=True)
def _needs_the_kernel() -> None:
    if kernels.library() is None:
        pytest.skip("no C compiler was found")


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS)
def built(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """The kernel as it is used, and as other processors would have it."""
    library = kernels.library()
    if request.param is not None:
        compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))))
        library = ctypes.CDLL(str(native._built(Path(kernels.__file__).parent / "noise.c", compiler, request.param)))
        kernels._declare(library)
    assert library is not None
    for function in (library.keystream, library.radii, library.waves):
        function.restype = None
    return library


@contextmanager
def without_the_kernel() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "library", lambda: None)
        yield


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def keystream(built: ctypes.CDLL, key: bytes, nonce: bytes, *, place: int, count: int) -> bytes:
    result = np.empty(count, dtype=np.uint64)
    stream = (ctypes.c_uint8 * 44)(*key, *nonce)
    built.keystream(stream, ctypes.c_int64(place), ctypes.c_int64(count), ctypes.c_void_p(result.ctypes.data))
    return result.tobytes()


def on(function: Callable[..., None], digits: Sequence[int], outputs: int) -> list[np.ndarray]:
    given_digits = np.array(digits, dtype=np.int64)
    results = [np.empty(len(digits)) for _ in range(outputs)]
    arrays = (ctypes.c_void_p(array.ctypes.data) for array in (given_digits, *results))
    function(ctypes.c_int64(len(digits)), *arrays)
    return results


def bits(tensor: Tensor) -> Tensor:
    """Tells zeros apart by their signs."""
    return tensor.detach().contiguous().view(torch.int64 if tensor.dtype is torch.float64 else torch.int32)


def test_keystream_of_the_rfc(built: ctypes.CDLL) -> None:
    """RFC 8439, appendix A.1, test vector 1, and section 2.3.2, whose block has number 1."""
    expected = "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
    assert keystream(built, bytes(32), bytes(12), place=0, count=4).hex() == expected
    nonce = bytes.fromhex("000000090000004a00000000")
    expected = (
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )
    assert keystream(built, KEY, nonce, place=8, count=8).hex() == expected


@pytest.mark.parametrize("number", [0, 1, 2**32 + 5, 2**95 + 2**70 + 3])
def test_keystream_is_that_of_the_library(built: ctypes.CDLL, number: int) -> None:
    expected = Keystream(key=KEY, number=number).read(5000, np.uint64).tobytes()
    nonce = number.to_bytes(12, "little")
    for place, count in ((0, 5000), (1, 4000), (7, 1), (8, 129), (513, 3), (1024, 1024)):
        found = keystream(built, KEY, nonce, place=place, count=count)
        assert found == expected[8 * place : 8 * (place + count)]
    for block in (0xFFFFFFF0, 0xFFFFFFF8):
        stream = Keystream(key=KEY, number=number)
        stream.hand_over(64 * block)
        found = keystream(built, KEY, nonce, place=8 * block, count=64)
        assert found == stream.read(64, np.uint64).tobytes()


def edges() -> tuple[list[int], list[int]]:
    """Digits of radii and of angles: random ones, and those beside every place where the arithmetic changes."""
    source = np.random.default_rng(0)
    low, high = kernels.SMALLEST_RADIUS_DIGITS, kernels.LARGEST_RADIUS_DIGITS
    root = math.isqrt(2**125)
    radii = [low, low + 1, high, high - 1, *range(root - 3, root + 4), *(root >> shift for shift in range(1, 18))]
    radii += [(1 << power) + step for power in range(46, 63) for step in (-1, 0, 1, 1 << (power - 30))]
    radii += [2**63 - (1 << power) + step for power in range(33, 62) for step in (-1, 0, 1)]
    radii += [int(2**63 * x) for x in np.exp(-source.exponential(size=1000)) if low < 2**63 * x < high]
    radii += [*source.integers(low, 2**52, 300).tolist(), *source.integers(2**63 - 2**40, high, 300).tolist()]
    angles = [min(max((k << 60) + step, -(2**63)), 2**63 - 1) for k in range(-8, 9) for step in (-1024, -1, 0, 1, 1023)]
    angles += source.integers(-(2**63), 2**63 - 1, 1500).tolist()
    return radii, angles


def test_radii_keep_their_bound(built: ctypes.CDLL) -> None:
    radii, _ = edges()
    (found,) = on(built.radii, radii, 1)
    worst = 0.0
    with mpmath.workprec(200):
        for digits, computed in zip(radii, found, strict=True):
            exact = mpmath.sqrt(-2 * mpmath.log(mpmath.mpf(digits) / 2**63))
            radius, error = float(exact), abs(float(mpmath.mpf(float(computed)) - exact)) / ROUNDING
            far = digits < math.isqrt(2**125)
            worst = max(worst, error / (2.71 / radius + 2.36 * radius if far else 3.2 * radius))
    assert 0.05 < worst < 1


def test_waves_keep_their_bound(built: ctypes.CDLL) -> None:
    _, angles = edges()
    worst = 0.0
    with mpmath.workprec(200):
        for digits, cosine, sine in zip(angles, *on(built.waves, angles, 2), strict=True):
            # Also where no digit after these is drawn, or only ones are.
            for end in (digits, digits + 1):
                angle = mpmath.pi * end / 2**63
                for computed, exact in ((cosine, mpmath.cos(angle)), (sine, mpmath.sin(angle))):
                    worst = max(worst, abs(float(mpmath.mpf(float(computed)) - exact)) / ROUNDING)
    assert 1 < worst < 4.5


def test_normals_keep_the_error_bound(built: ctypes.CDLL) -> None:
    radii, angles = edges()
    count = min(len(radii), len(angles))
    radii, angles = radii[:count], [angles[(7 * k) % len(angles)] for k in range(count)]
    (lengths,), (cosines, sines) = on(built.radii, radii, 1), on(built.waves, angles, 2)
    worst = 0.0
    with mpmath.workprec(200):
        for place in range(count):
            for end in (0, 1):
                radius = mpmath.sqrt(-2 * mpmath.log(mpmath.mpf(radii[place] + end) / 2**63))
                angle = mpmath.pi * (angles[place] + end) / 2**63
                for wave, exact in ((cosines, mpmath.cos(angle)), (sines, mpmath.sin(angle))):
                    error = mpmath.mpf(float(lengths[place] * wave[place])) - radius * exact
                    worst = max(worst, abs(float(error)))
    assert kernels.ERROR_BOUND / 10 < worst < kernels.ERROR_BOUND


def settled_by(built: ctypes.CDLL, pairs: np.ndarray, *, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Which pairs the kernel settles by the bound of their own, and as which integers."""
    draw = kernels._Draw(scale=scale, largest=kernels.LARGEST_RADIUS_DIGITS)
    found, certain = np.empty(pairs.shape), np.empty(len(pairs), dtype=np.uint8)
    arrays = (ctypes.c_void_p(array.ctypes.data) for array in (pairs, found, certain))
    built.settle_pairs(ctypes.byref(draw), ctypes.c_int64(len(pairs)), *arrays)
    return certain.astype(bool), found


@pytest.mark.parametrize("power", [20, 30, 34, 40])
def test_pairs_with_a_bound_of_their_own_are_settled_right(built: ctypes.CDLL, power: int) -> None:
    """Whatever digits follow: few or none of them, or nothing but ones."""
    source = np.random.default_rng(power)
    radii, angles = edges()
    radii += [2**32 - 1, 2**32, 2**32 + 1, *(int(2.0**each) for each in source.uniform(32, 45, 1000))]
    pairs = np.array([(digits, angles[(7 * k) % len(angles)]) for k, digits in enumerate(radii)], dtype=np.int64)
    scale = 2.0**power
    certain, found = settled_by(built, pairs, scale=scale)
    assert not certain[(pairs[:, 0] < 2**32) | (pairs[:, 0] > kernels.LARGEST_RADIUS_DIGITS)].any()
    assert certain.mean() > (0.9 if power == 20 else 0.3)
    assert certain[pairs[:, 0] < 2**45].any()
    with mpmath.workprec(200):
        for (radius_digits, angle_digits), integers in zip(pairs[certain].tolist(), found[certain], strict=True):
            for end in (0, 1):
                radius = scale * mpmath.sqrt(-2 * mpmath.log(mpmath.mpf(radius_digits + end) / 2**63))
                angle = mpmath.pi * (angle_digits + end) / 2**63
                exact = [int(mpmath.nint(radius * wave)) for wave in (mpmath.cos(angle), mpmath.sin(angle))]
                assert exact == integers.tolist()


def test_the_known_answer_is_that_of_torch(built: ctypes.CDLL) -> None:
    assert kernels._works(built)
    with without_the_kernel():
        tensors, stream = kernels.known_question()
        Entries(tensors).add_rounded_normals(scale=2.0**20, step=2.0**-15, digits=stream)
    assert kernels.answer(tensors) == kernels._KNOWN_ANSWER


@pytest.mark.parametrize(
    ("scale", "count"),
    [(0.4, 300_001), (5.0, 300_000), (2.0**15, 1_000_000), (2.0**26.7, 2_000_003), (2.0**40, 100_001)],
)
def test_the_same_integers_as_torch(scale: float, count: int) -> None:
    streams = [Keystream(key=KEY, number=9) for _ in range(2)]
    compiled = rounded_normals(count, scale=scale, digits=streams[0])
    with without_the_kernel():
        by_torch = rounded_normals(count, scale=scale, digits=streams[1])
    assert torch.equal(bits(compiled), bits(by_torch))
    # Whatever is read next is the same too.
    assert streams[0].read(3, np.uint64).tolist() == streams[1].read(3, np.uint64).tolist()


def test_digits_that_settle_come_after_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the place of every block is known before anything is drawn."""
    count, number = 200_001, 4
    after = Keystream(key=KEY, number=number)
    after.read(count + 1, np.uint64)
    expected = after.read(2, np.uint64).tolist()

    def settle(radius: int, angle: int, *, scale: float, digits: Keystream) -> tuple[int, int]:
        first = digits.read(2, np.uint64).tolist()
        assert seen or first == expected
        seen.append((radius, angle))
        return 0, 0

    monkeypatch.setattr("sluice.randomness.rounded_normal.settle", settle)
    listed = []
    for path in ("compiled", "torch"):
        seen: list[tuple[int, int]] = []
        if path == "torch":
            monkeypatch.setattr(kernels, "library", lambda: None)
        rounded_normals(count, scale=2.0**35, digits=Keystream(key=KEY, number=number))
        listed.append(seen)
    # The kernel's bound is the smaller one, so what it leaves open torch leaves open too, in the same order.
    compiled, by_torch = listed
    assert 0 < len(compiled) < len(by_torch)
    assert compiled == [pair for pair in by_torch if pair in set(compiled)]


# Streams found by search.
@pytest.mark.parametrize(
    ("number", "radius", "by_kernel"),
    [(55584615, 9938103, False), (18113380, 6521463885, True), (84179255, 2**63 - 1486334178, False)],
)
def test_radii_beyond_the_error_bound_are_settled(
    number: int, radius: int, by_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def watched(radius_digits: int, angle_digits: int, *, scale: float, digits: Digits) -> tuple[int, int]:
        seen.append(radius_digits)
        return settle(radius_digits, angle_digits, scale=scale, digits=digits)

    monkeypatch.setattr("sluice.randomness.rounded_normal.settle", watched)
    found = rounded_normals(128, scale=2.0**20, digits=Keystream(key=KEY, number=number))
    assert seen == ([] if by_kernel else [radius])
    with without_the_kernel():
        assert torch.equal(rounded_normals(128, scale=2.0**20, digits=Keystream(key=KEY, number=number)), found)
    assert radius in seen


@pytest.mark.parametrize("scale", [2.0**20, 2.0**26, 2.0**34])
def test_few_pairs_are_left_to_interval_arithmetic(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes as long for one as the kernel for ten thousand."""
    seen = []

    def watched(radius_digits: int, angle_digits: int, *, scale: float, digits: Digits) -> tuple[int, int]:
        seen.append(radius_digits)
        return settle(radius_digits, angle_digits, scale=scale, digits=digits)

    monkeypatch.setattr("sluice.randomness.rounded_normal.settle", watched)
    count = 2_000_000
    rounded_normals(count, scale=scale, digits=Keystream(key=KEY, number=3))
    assert len(seen) < 2 + count * scale * kernels.ERROR_BOUND


@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("place", [0, 1, 511, 512, 65_535, 65_536, 149_998, 149_999])
def test_one_entry_that_is_not_finite_ends_a_release(
    value: float, dtype: torch.dtype, place: int, threads: None
) -> None:
    for count in (1, 2):
        torch.set_num_threads(count)
        raw = [torch.zeros(3), torch.full((150_000,), torch.finfo(dtype).max, dtype=dtype)]
        noisy_sum(raw, noise_multiplier=1.0, sensitivity=1.0, noise=SecureNoise())
        raw[1][place] = value
        with pytest.raises(DataError, match="NaN or infinite"):
            noisy_sum(raw, noise_multiplier=1.0, sensitivity=1.0, noise=SecureNoise())


def raw_tensors(sizes: Sequence[int], *, step: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(sizes))
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    tensors = []
    for place, size in enumerate(sizes):
        values = torch.randn(size, generator=generator, dtype=torch.float64) * 10.0 ** (place % 5 - 2)
        values[: size // 3] = (values[: size // 3] / step).floor().add(0.5) * step
        tensors.append(values.to(dtypes[place % 4]))
    return tensors


def released(raw: Sequence[Tensor], *, seed: int) -> list[Tensor]:
    copies = [tensor.clone(memory_format=torch.preserve_format) for tensor in raw]
    return noisy_sum(copies, noise_multiplier=1.25, sensitivity=0.5, noise=SeededNoise(seed))


@settings(max_examples=30)
@given(sizes=st.lists(st.integers(0, 40) | st.integers(1000, 3000), min_size=1, max_size=9), seed=st.integers(0, 99))
def test_releases_have_the_same_bits_as_torch(sizes: list[int], seed: int) -> None:
    raw = raw_tensors(sizes, step=2.0**-20)
    compiled = released(raw, seed=seed)
    with without_the_kernel():
        by_torch = released(raw, seed=seed)
    for one, other in zip(compiled, by_torch, strict=True):
        assert one.dtype is other.dtype
        assert torch.equal(bits(one.double()), bits(other.double()))


@pytest.mark.parametrize("number", [0, 1, 2])
def test_large_releases_have_the_same_bits_as_torch(number: int) -> None:
    special = torch.tensor([-0.0, 0.0, 1e-40, -1e-40, 3e38, -3e38, 1e-7, 2.0**-149])
    image = torch.randn(64, 8, 5, 5).to(memory_format=torch.channels_last)
    raw = [
        *(torch.randn(65_536 * number + 1), torch.randn(100_001, dtype=torch.float64)),
        *(special, special.double() * 1e60, image, torch.randn(300, 200).t(), torch.tensor(2.5), torch.zeros(0, 3)),
    ]
    compiled = released(raw, seed=number)
    with without_the_kernel():
        by_torch = released(raw, seed=number)
    for one, other in zip(compiled, by_torch, strict=True):
        assert one.stride() == other.stride()
        assert torch.equal(bits(one), bits(other))


def test_threads_do_not_change_a_bit(threads: None) -> None:
    raw, found = [torch.randn(150_000), torch.randn(77, dtype=torch.float64), torch.randn(300_000)], []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        found.append(released(raw, seed=5))
    for other in found[1:]:
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(found[0], other, strict=True))


def test_secure_noise_differs_from_call_to_call() -> None:
    first, second = (SecureNoise().rounded_normal(1000, scale=2.0**30) for _ in range(2))
    assert (first != second).all()


def test_no_part_of_a_stream_is_used_twice() -> None:
    stream = Keystream(key=KEY, number=0)
    stream.read(1, np.uint8)
    with pytest.raises(AssertionError, match="read from"):
        stream.hand_over(64)
    stream = Keystream(key=KEY, number=0)
    stream.hand_over(1000)
    with pytest.raises(AssertionError, match="read from"):
        stream.hand_over(64)
    rest = Keystream(key=KEY, number=0).read(1100, np.uint8)[1000:]
    assert (stream.read(100, np.uint8) == rest).all()


def test_what_a_stream_cannot_hold_is_left_to_torch() -> None:
    assert kernels.available(LONGEST // 8 - 2)
    assert not kernels.available(LONGEST // 8)


@pytest.mark.parametrize("tensor", [torch.zeros(3).half(), torch.zeros(3, 2).t(), torch.zeros(3, dtype=torch.int64)])
def test_other_memory_is_refused(tensor: Tensor) -> None:
    with pytest.raises(AssertionError, match="compiled kernel"):
        kernels.Vector([tensor], [0, *accumulate([tensor.numel()])])


@pytest.mark.parametrize("reason", ["asked not to", "wrong answer"])
def test_torch_takes_over(reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    expected = SeededNoise(1).rounded_normal(100, scale=50.0)
    kernels.library.cache_clear()
    try:
        if reason == "asked not to":
            monkeypatch.setenv("SLUICE_NATIVE", "0")
        else:
            monkeypatch.setattr(kernels, "_KNOWN_ANSWER", "another")
        assert kernels.library() is None
        assert torch.equal(SeededNoise(1).rounded_normal(100, scale=50.0), expected)
    finally:
        kernels.library.cache_clear()
    assert ("wrong results" in caplog.text) == (reason == "wrong answer")
