"""Observations: what may be added up, and the file that holds one."""

from __future__ import annotations

import hashlib
import itertools
import random
import zipfile
from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibration import observation
from calibration.histogram import Histogram
from calibration.observation import Group, Identity, Observation
from edge import config
from edge.errors import DataError

TENSORS = ("images", "stem", "out")
HELD = [1, 5, 9, 15, 16, 17, 21, 22, 23, 26]
"""Of the first 30 pictures."""
IDENTITY = Identity(model_sha256="a" * 64, input=config.Input(), shape=(1, 3, 8, 8))


def picture(number: int) -> str:
    return hashlib.sha256(f"picture {number}".encode()).hexdigest()


def observed(
    numbers: Iterable[int], *, identity: Identity = IDENTITY, tensors: Iterable[str] = TENSORS, version: str = "1.20.0"
) -> Observation:
    """Of pictures whose activations are made of their number: zeros of both signs and widely different ranges."""
    result = Observation.empty(identity, list(tensors))
    for number in numbers:
        group = result.group(picture(number))
        rng = np.random.default_rng(number)
        for histogram in group.histograms.values():
            values = rng.standard_normal(50) * 2.0 ** rng.integers(-20, 20)
            histogram.add(np.float32([*values, 0.0, -0.0] if number % 2 else [0.0]))
        group.sha256.add(picture(number))
        result.onnxruntime.add(version)
    return result


def content(path: Path, one: Observation) -> bytes:
    observation.save(path, one)
    return path.read_bytes()


def test_one_picture_in_so_many_is_held_out() -> None:
    held = sum(observation.group_of(picture(number)) == "held" for number in range(2000))

    assert held == pytest.approx(2000 / observation.HELD_SHARE, rel=0.1)


def test_the_group_of_a_picture_never_changes() -> None:
    """Files that were written earlier rest on it."""
    groups = [observation.group_of(picture(number)) for number in range(30)]

    assert [number for number, group in enumerate(groups) if group == "held"] == HELD


@given(st.sets(st.integers(0, 40), min_size=1), st.integers(0, 2**32), st.integers(0, 5))
def test_order_and_split_leave_no_trace(
    tmp_path_factory: pytest.TempPathFactory, numbers: set[int], seed: int, cut: int
) -> None:
    path = tmp_path_factory.mktemp("observation") / "h.npz"
    shuffled = sorted(numbers)
    random.Random(seed).shuffle(shuffled)  # noqa: S311

    merged = observation.merge(observed(shuffled[:cut]), observed(shuffled[cut:]), names=("a", "b"))

    assert content(path, merged) == content(path, observed(sorted(numbers)))


def test_files_are_merged_as_one(tmp_path: Path) -> None:
    parts = [tmp_path / f"{letter}.npz" for letter in "abc"]
    for start, path in enumerate(parts):
        observation.save(path, observed(range(start, 12, 3)))

    assert content(tmp_path / "x", observation.merge_files(parts)) == content(tmp_path / "y", observed(range(12)))
    assert observation.merge_files(parts[:1]).images == 4


def test_files_that_cannot_be_merged_are_named(tmp_path: Path) -> None:
    parts = [tmp_path / f"{letter}.npz" for letter in "abc"]
    for path, numbers in zip(parts, ([1, 2], [3], [2]), strict=True):
        observation.save(path, observed(numbers))

    with pytest.raises(DataError, match=r"a\.npz \+ .*b\.npz and .*c\.npz cannot be added up: 1 picture"):
        observation.merge_files(parts)


def test_files_merge_to_the_same_bytes_in_any_order_and_stay_as_they_are(tmp_path: Path) -> None:
    parts = [tmp_path / f"{letter}.npz" for letter in "abc"]
    for start, path in enumerate(parts):
        observation.save(path, observed(range(start, 12, 3)))
    before = [path.read_bytes() for path in parts]

    merged = {content(tmp_path / "x", observation.merge_files(order)) for order in itertools.permutations(parts)}
    observation.save(tmp_path / "ab", observation.merge_files(parts[:2]))
    merged.add(content(tmp_path / "x", observation.merge_files([parts[2], tmp_path / "ab"])))

    assert merged == {content(tmp_path / "y", observed(range(12)))}
    assert [path.read_bytes() for path in parts] == before


def test_files_of_another_pre_processing_are_named_with_what_differs(tmp_path: Path) -> None:
    a, b = tmp_path / "a.npz", tmp_path / "b.npz"
    observation.save(a, observed([1]))
    observation.save(b, observed([2], identity=msgspec.structs.replace(IDENTITY, input=config.Input(divide_by=1.0))))

    with pytest.raises(DataError) as caught:
        observation.merge_files([a, b])

    assert str(caught.value) == f"{a} and {b} cannot be added up: input.divide_by is 255.0 in {a} and 1.0 in {b}"


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("damage", ["absent", "cut off"])
def test_one_bad_file_of_several_is_named(tmp_path: Path, place: int, damage: str) -> None:
    parts = [tmp_path / f"{letter}.npz" for letter in "abc"]
    for number, path in enumerate(parts):
        observation.save(path, observed([number]))
    if damage == "absent":
        parts[place].unlink()
    else:
        parts[place].write_bytes(parts[place].read_bytes()[:-10])

    with pytest.raises(DataError) as caught:
        observation.merge_files(parts)

    assert str(caught.value).startswith(f"{parts[place]}: ")


def test_merging_leaves_its_sources_alone(tmp_path: Path) -> None:
    first, second = observed(range(6)), observed(range(6, 9))
    before = content(tmp_path / "h.npz", first)

    merged = observation.merge(first, second, names=("a", "b"))
    merged.fit.histograms["out"].add(np.float32([1]))

    assert content(tmp_path / "h.npz", first) == before
    assert (first.images, second.images, merged.images) == (6, 3, 9)


def test_merged_histograms_are_those_of_all_pictures() -> None:
    one = observed(range(12))

    merged = one.merged()

    assert list(merged) == list(TENSORS)
    for name in TENSORS:
        assert merged[name].total == one.fit.histograms[name].total + one.held.histograms[name].total
        assert merged[name].amax == max(one.fit.histograms[name].amax, one.held.histograms[name].amax)
    assert one.held.histograms["out"].total > 0


def test_versions_of_onnxruntime_are_recorded_and_do_not_matter() -> None:
    merged = observation.merge(observed([1], version="1.18.0"), observed([2], version="1.20.1"), names=("a", "b"))

    assert merged.onnxruntime == {"1.18.0", "1.20.1"}


def test_differences_name_each_field() -> None:
    other = Identity(
        model_sha256="b" * 64,
        model_data={"weights.bin": "c" * 64},
        input=config.Input(divide_by=1.0, color="bgr"),
        shape=(1, 3, 16, 16),
        bins=4096,
    )

    assert observation.difference(IDENTITY, IDENTITY) == []
    assert observation.difference(IDENTITY, other, places=("in A", "in B")) == [
        "model_sha256 is aaaaaaaaaaaa... in A and bbbbbbbbbbbb... in B",
        "shape is (1, 3, 8, 8) in A and (1, 3, 16, 16) in B",
        "bins is 2048 in A and 4096 in B",
        "input.color is rgb in A and bgr in B",
        "input.divide_by is 255.0 in A and 1.0 in B",
        "model_data.weights.bin is absent in A and cccccccccccc... in B",
    ]


def test_another_model_or_pre_processing_is_not_added_up() -> None:
    other = msgspec.structs.replace(IDENTITY, input=config.Input(divide_by=1.0))

    with pytest.raises(DataError, match=r"^A and B cannot be added up: input\.divide_by is 255\.0 in A and 1\.0 in B$"):
        observation.merge(observed([1]), observed([2], identity=other), names=("A", "B"))


def test_other_tensors_are_not_added_up() -> None:
    with pytest.raises(DataError, match=r"2 tensors are in only one of them, such as 'new'"):
        observation.merge(observed([1]), observed([2], tensors=("images", "stem", "new")), names=("A", "B"))


def test_a_picture_counts_once() -> None:
    with pytest.raises(DataError) as caught:
        observation.merge(observed(range(9)), observed(range(4, 12)), names=("A", "B"))

    common = sorted(picture(number) for number in range(4, 9))
    assert "A and B cannot be added up: 5 pictures are in both and would count twice" in str(caught.value)
    assert common[0][:12] in str(caught.value)
    assert str(caught.value).endswith("and 2 more)")


def test_a_picture_of_the_other_group_is_refused() -> None:
    one = observed([HELD[0]])

    with pytest.raises(ValueError, match=f"picture {picture(HELD[0])} is in the group 'fit', where it does not belong"):
        Observation(one.identity, Group({picture(HELD[0])}, one.held.histograms), one.fit, one.onnxruntime)


def test_files_hold_everything(tmp_path: Path) -> None:
    identity = msgspec.structs.replace(IDENTITY, model_data={"w": "e" * 64}, input=config.Input(mean=[1.0, 2.0, 3.0]))
    one = observed(range(12), identity=identity)

    observation.save(tmp_path / "h.npz", one)
    loaded = observation.load(tmp_path / "h.npz")

    assert (loaded.identity, loaded.onnxruntime) == (identity, {"1.20.0"})
    assert (loaded.fit.sha256, loaded.held.sha256) == (one.fit.sha256, one.held.sha256)
    assert loaded.tensors == list(TENSORS)
    assert content(tmp_path / "again.npz", loaded) == content(tmp_path / "h.npz", one)


def test_an_observation_of_nothing_has_a_file(tmp_path: Path) -> None:
    observation.save(tmp_path / "h.npz", Observation.empty(IDENTITY, []))

    assert observation.load(tmp_path / "h.npz").images == 0


def test_a_loaded_observation_can_grow(tmp_path: Path) -> None:
    observation.save(tmp_path / "h.npz", observed([1]))
    loaded = observation.load(tmp_path / "h.npz")

    loaded.fit.histograms["out"].add(np.float32([1e6]))

    assert loaded.fit.histograms["out"].amax == 1e6


def test_numpy_can_read_the_columns(tmp_path: Path) -> None:
    """For those who want to look at them."""
    one = observed(range(12))
    observation.save(tmp_path / "h.npz", one)

    with np.load(tmp_path / "h.npz") as archive:
        assert archive["fit.names"].tolist() == list(TENSORS)
        assert np.array_equal(archive["held.counts"][2], one.held.histograms["out"].counts)


def test_files_do_not_tell_when_they_were_written(tmp_path: Path) -> None:
    observation.save(tmp_path / "h.npz", observed([1]))

    with zipfile.ZipFile(tmp_path / "h.npz") as archive:
        assert {member.date_time for member in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}


def test_files_are_replaced_at_once(tmp_path: Path) -> None:
    observation.save(tmp_path / "h.npz", observed([1]))
    observation.save(tmp_path / "h.npz", observed([1, 2]))

    assert [path.name for path in tmp_path.iterdir()] == ["h.npz"]


class TestOtherFiles:
    @pytest.fixture
    def members(self, tmp_path: Path) -> dict[str, np.ndarray]:
        """Of a sound file."""
        observation.save(tmp_path / "sound.npz", observed(range(6)))
        with np.load(tmp_path / "sound.npz") as archive:
            return {name: archive[name] for name in archive.files}

    def refused(self, path: Path, message: str) -> None:
        with pytest.raises(DataError, match=message) as caught:
            observation.load(path)
        assert str(caught.value).startswith(f"{path}: ")

    def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        self.refused(tmp_path / "h.npz", r"cannot be read \(no such file or directory\)")

    @pytest.mark.parametrize("data", [b"", b"no archive", b"PK\x03\x04broken", b"PK\x05\x06" + bytes(18)])
    def test_what_is_no_archive(self, tmp_path: Path, data: bytes) -> None:
        (tmp_path / "h.npz").write_bytes(data)

        self.refused(tmp_path / "h.npz", "is not a file of observed histograms")

    @pytest.mark.parametrize("missing", ["header", "fit.counts", "held.names"])
    def test_a_missing_member(self, tmp_path: Path, members: dict[str, np.ndarray], missing: str) -> None:
        del members[missing]
        np.savez(tmp_path / "h.npz", **members)  # type: ignore[arg-type]

        self.refused(tmp_path / "h.npz", missing.rpartition(".")[2])

    @pytest.mark.parametrize(
        ("member", "value"),
        [
            ("header", np.frombuffer(b"{", np.uint8)),
            ("header", np.frombuffer(b'{"schema": "edge.histograms/2"}', np.uint8)),
            ("header", np.zeros(3)),
            ("header", np.array([{}], object)),
            ("fit.counts", np.zeros((3, 2047), np.int64)),
            ("fit.counts", np.zeros((3, 2048), np.int32)),
            ("fit.names", np.array(["images", "stem", "other"])),
            ("held.zeros", np.zeros(2, np.int64)),
        ],
    )
    def test_a_wrong_member(
        self, tmp_path: Path, members: dict[str, np.ndarray], member: str, value: np.ndarray
    ) -> None:
        np.savez(tmp_path / "h.npz", **members | {member: value})  # type: ignore[arg-type]

        self.refused(tmp_path / "h.npz", "is not a file of observed histograms")

    def test_a_picture_in_the_wrong_group(self, tmp_path: Path, members: dict[str, np.ndarray]) -> None:
        header = msgspec.json.decode(members["header"].tobytes())
        header["fit"], header["held"] = header["held"], header["fit"]
        members["header"] = np.frombuffer(msgspec.json.encode(header), np.uint8)
        np.savez(tmp_path / "h.npz", **members)  # type: ignore[arg-type]

        self.refused(tmp_path / "h.npz", "where it does not belong")

    def test_a_member_that_is_no_array(self, tmp_path: Path) -> None:
        with zipfile.ZipFile(tmp_path / "h.npz", "w") as archive:
            archive.writestr("header", "{}")

        self.refused(tmp_path / "h.npz", "is not a file of observed histograms")

    def test_any_damage(self, tmp_path: Path) -> None:
        """A bit that flips is found, or changes nothing; a file that is cut off is always found."""
        sound = observed(range(3), tensors=("x",))
        path = tmp_path / "h.npz"
        observation.save(path, sound)
        data = path.read_bytes()
        expected = content(tmp_path / "expected.npz", sound)
        rng = random.Random(0)  # noqa: S311

        for _ in range(200):
            place = rng.randrange(len(data) - 1)
            path.write_bytes(data[:place])
            self.refused(path, "is not a file of observed histograms")
            flipped = bytearray(data)
            flipped[place] ^= 1 << rng.randrange(8)
            path.write_bytes(flipped)
            try:
                loaded = observation.load(path)
            except DataError:
                continue
            assert content(tmp_path / "loaded.npz", loaded) == expected


def test_a_histogram_of_an_unseen_tensor_is_empty() -> None:
    assert Observation.empty(IDENTITY, ["x"]).merged()["x"].total == Histogram().total
