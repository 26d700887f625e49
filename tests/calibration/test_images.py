"""The picture set: what is found, refused, sampled and warned about."""

from __future__ import annotations

import hashlib
import io
import os
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Pillow

from calibration import images
from calibration.images import _parts, _thumbnail
from edge.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable


def picture(seed: int = 0, *, size_wh: tuple[int, int] = (64, 48), mode: str = "RGB") -> Pillow.Image:
    """A smooth coloured picture that differs from those of other seeds in every part."""
    rng = np.random.default_rng(seed)
    coarse = Pillow.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    return coarse.resize(size_wh, Pillow.Resampling.BICUBIC).convert(mode)


def encoded(image: Pillow.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def film(path: Path, seeds: Iterable[int], *, fps: float = 10) -> Path:
    """A video of the pictures of some seeds."""
    codec = {".avi": "MJPG", ".mkv": "MJPG", ".mp4": "mp4v"}[path.suffix]
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*codec), fps, (64, 48))
    assert writer.isOpened()
    for seed in seeds:
        writer.write(np.asarray(picture(seed))[..., ::-1].copy())
    writer.release()
    return path


def decoded(path: Path) -> list[np.ndarray]:
    capture = cv2.VideoCapture(str(path))
    return [capture.retrieve()[1] for _ in iter(capture.grab, False)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of twenty different pictures, 00.png to 19.png."""
    for index in range(20):
        write(tmp_path / f"set/{index:02d}.png", encoded(picture(index)))
    return tmp_path / "set"


def reasons(found: images.ImageSet) -> dict[str, str]:
    return {refusal.path.name: refusal.reason for refusal in found.refused}


def names(found: images.ImageSet) -> list[str]:
    return [file.path.name for file in found.used]


# What is refused


def test_each_unusable_file_is_refused_with_its_reason(folder: Path) -> None:
    jpeg = encoded(picture(50, size_wh=(200, 200)), "JPEG", quality=95)
    write(folder / "empty.jpg", b"")
    write(folder / "truncated.jpg", jpeg[: len(jpeg) // 2])
    write(folder / "truncated.png", encoded(picture(51))[:-40])
    write(folder / "text.jpg", b"<html>404 not found</html>" * 10)
    write(folder / "icon.png", encoded(picture(52, size_wh=(15, 200))))
    write(folder / "twin.png", (folder / "03.png").read_bytes())

    found = images.collect(str(folder))

    why = reasons(found)
    assert sorted(why) == ["empty.jpg", "icon.png", "text.jpg", "truncated.jpg", "truncated.png", "twin.png"]
    assert "empty" in why["empty.jpg"]
    assert "truncated" in why["truncated.jpg"]
    assert "truncated" in why["truncated.png"]
    assert "is not a picture" in why["text.jpg"]
    assert why["icon.png"] == "is too small (15 x 200 pixels; expected at least 16 a side)"
    assert why["twin.png"] == f"has the same content as {folder / '03.png'}"
    assert len(found) == 20


def test_reason_does_not_repeat_the_path(folder: Path) -> None:
    path = write(folder / "empty.jpg", b"")

    found = images.collect(str(folder))

    assert str(path) not in reasons(found)["empty.jpg"]


def test_pipe_is_refused_without_waiting_for_a_writer(folder: Path) -> None:
    os.mkfifo(folder / "pipe.jpg")

    found = images.collect(str(folder))

    assert reasons(found) == {"pipe.jpg": "is not a regular file"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_file_without_permission_is_refused(folder: Path) -> None:
    write(folder / "secret.png", encoded(picture(60))).chmod(0)

    found = images.collect(str(folder))

    assert reasons(found) == {"secret.png": "cannot be read (permission denied)"}


def test_large_share_of_refused_files_is_the_first_warning(folder: Path) -> None:
    for index in range(2):
        write(folder / f"bad{index}.jpg", b"")

    found = images.collect(str(folder), count=50)

    assert found.warnings[0].startswith("2 of 22 images were refused (9 %), such as ")
    assert len(found.warnings) == 2


def test_one_refused_file_in_twenty_is_listed_but_not_warned_about(folder: Path) -> None:
    (folder / "19.png").write_bytes(b"")

    found = images.collect(str(folder))

    assert len(found.refused) == 1
    assert found.warnings == ()


def test_no_usable_picture_is_an_error_that_says_why(tmp_path: Path) -> None:
    write(tmp_path / "a.jpg", b"")

    with pytest.raises(DataError, match=r"no usable image; 1 of 1 files were refused, such as .*a\.jpg: .*empty"):
        images.collect(str(tmp_path))


# What is converted


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "1"])
def test_other_png_modes_become_three_channels(tmp_path: Path, mode: str) -> None:
    write(tmp_path / "a.png", encoded(picture(mode="RGB").convert(mode)))

    (image,) = images.collect(str(tmp_path))

    assert image.shape == (48, 64, 3)
    assert image.dtype == np.uint8


def test_cmyk_jpeg_keeps_its_colours(tmp_path: Path) -> None:
    write(tmp_path / "a.jpg", encoded(Pillow.new("RGB", (64, 48), (250, 10, 10)).convert("CMYK"), "JPEG", quality=95))

    (image,) = images.collect(str(tmp_path))

    blue, green, red = image.reshape(-1, 3).mean(axis=0)
    assert red > 200
    assert max(blue, green) < 60


def test_sixteen_bit_picture_keeps_its_upper_bits(tmp_path: Path) -> None:
    levels = np.full((32, 40), 0x80FF, np.uint16)
    write(tmp_path / "a.png", encoded(Pillow.fromarray(levels)))

    (image,) = images.collect(str(tmp_path))

    assert np.abs(image.astype(int) - 0x80).max() <= 1


def test_size_is_that_of_the_upright_picture(tmp_path: Path) -> None:
    upright = Pillow.Exif()
    upright[0x0112] = 6
    write(tmp_path / "a.jpg", encoded(picture(size_wh=(64, 48)), "JPEG", exif=upright))

    found = images.collect(str(tmp_path))

    assert found.used[0].size_wh == (48, 64)
    assert found.load(0).shape == (64, 48, 3)


# What is named


def test_folder_includes_subfolders_and_passes_over_hidden_and_other_files(folder: Path) -> None:
    write(folder / "night/cam1/x.JPG", encoded(picture(70), "JPEG"))
    write(folder / ".thumbnails/y.png", encoded(picture(71)))
    write(folder / "._00.png", b"mac")
    write(folder / "notes.md", b"notes")

    found = images.collect(str(folder))

    assert "x.JPG" in names(found)
    assert found.found == 21
    assert found.refused == ()


def test_linked_folder_is_followed_and_a_loop_ends(folder: Path, tmp_path: Path) -> None:
    write(tmp_path / "elsewhere/x.png", encoded(picture(80)))
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    (folder / "loop").symlink_to(folder)

    found = images.collect(str(folder))

    assert found.found == 21
    assert found.refused == ()


def test_globs_name_files_and_folders(folder: Path) -> None:
    write(folder / "night/x.png", encoded(picture(70)))

    assert images.collect(str(folder / "0*.png")).found == 10
    assert images.collect(str(folder / "**/*.png")).found == 21
    assert images.collect(str(folder.parent / "s*")).found == 21


def test_folder_whose_name_looks_like_a_glob_is_a_folder(tmp_path: Path) -> None:
    write(tmp_path / "set [1]/a.png", encoded(picture()))

    assert images.collect(str(tmp_path / "set [1]")).found == 1


def test_list_names_paths_relative_to_itself(folder: Path, tmp_path: Path) -> None:
    text = f"\ufeff# chosen by hand\r\nset/00.png\r\n\r\n{folder}/01.png\r\nset/gone.png\r\n"
    listing = write(tmp_path / "list.txt", text.encode())

    found = images.collect(str(listing))

    assert names(found) == ["00.png", "01.png"]
    assert reasons(found) == {"gone.png": "no such file"}


def test_file_named_twice_counts_once(folder: Path) -> None:
    found = images.collect([str(folder), str(folder / "*.png"), str(folder / "00.png")])

    assert found.found == 20
    assert found.refused == ()


def test_relative_pattern_gives_absolute_paths(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)

    found = images.collect("set")

    assert found.used[0].path == folder / "00.png"


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("missing", "missing: no such file or folder; give a folder"),
        ("missing/*.png", r"missing/\*\.png: matches no file; give a folder"),
        ("missing.txt", r"missing\.txt: the list cannot be read \(No such file or directory\); give a folder"),
        ("nothing", r"nothing: holds no pictures \(nothing found; looked for \.bmp, "),
        ("texts", r"texts: holds no pictures \(1 other files found; looked for \.bmp, "),
        ("blank.txt", r"blank\.txt: the list names no pictures"),
        ("latin.txt", r"latin\.txt: is not UTF-8 text"),
    ],
)
def test_pattern_that_names_no_picture_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nothing").mkdir()
    write(tmp_path / "texts/a.md", b"text")
    write(tmp_path / "blank.txt", b"\n# nothing\n")
    write(tmp_path / "latin.txt", b"caf\xe9.jpg\n")

    with pytest.raises(DataError, match=f"^{message}"):
        images.collect(pattern)


def test_no_pattern_is_an_error() -> None:
    with pytest.raises(DataError, match="no images are named"):
        images.collect([])


def test_count_below_one_is_a_programming_mistake(folder: Path) -> None:
    with pytest.raises(ValueError, match="count is 0"):
        images.collect(str(folder), count=0)


# Sampling


def test_sample_takes_one_picture_of_each_part_of_the_list(folder: Path) -> None:
    found = images.collect(str(folder), count=5)

    assert [int(name[:2]) // 4 for name in names(found)] == [0, 1, 2, 3, 4]
    assert found.warnings == ()


def test_refused_picture_is_replaced_from_its_own_part(folder: Path) -> None:
    chosen = names(images.collect(str(folder), count=5))
    (folder / chosen[2]).write_bytes(b"")

    again = names(images.collect(str(folder), count=5))

    assert [int(name[:2]) // 4 for name in again] == [0, 1, 2, 3, 4]
    assert again[:2] + again[3:] == chosen[:2] + chosen[3:]


def test_parts_without_a_usable_picture_are_made_up_for_by_others(folder: Path) -> None:
    for index in range(8):
        (folder / f"{index:02d}.png").write_bytes(b"")

    found = images.collect(str(folder), count=10)

    assert len(found) == 10
    assert len(found.refused) == 8


def test_too_few_pictures_are_warned_about_with_both_numbers(folder: Path) -> None:
    found = images.collect(str(folder), count=128)

    assert found.warnings == ("128 images were asked for, 20 can be used (20 found, 0 refused)",)


def test_excluded_contents_are_left_out_and_replaced(folder: Path) -> None:
    calibration = images.collect(str(folder), count=5)

    found = images.collect(str(folder), count=15, exclude={file.sha256 for file in calibration.used})

    assert not set(names(found)) & set(names(calibration))
    assert found.excluded == 5
    assert found.refused == ()
    assert found.warnings == ()


def test_excluding_everything_is_an_error(folder: Path) -> None:
    everything = {file.sha256 for file in images.collect(str(folder)).used}

    with pytest.raises(DataError, match="all 20 images are left out because they were used elsewhere"):
        images.collect(str(folder), exclude=everything)


@given(total=st.integers(1, 300), data=st.data(), seed=st.integers(0, 1000))
def test_parts_are_equal_disjoint_and_cover_the_list(total: int, data: st.DataObject, seed: int) -> None:
    wanted = data.draw(st.integers(1, total))

    parts = _parts(total, wanted, seed)

    assert sorted(index for part in parts for index in part) == list(range(total))
    assert all(max(a) < min(b) for a, b in pairwise(parts))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_seed_changes_the_sample_and_nothing_else_does(folder: Path, tmp_path: Path) -> None:
    # The same pictures, created in another order: a file system may list them in that order.
    for path in sorted(folder.iterdir(), key=lambda path: path.read_bytes()[::-1]):
        write(tmp_path / "copy" / path.name, path.read_bytes())

    first = images.collect(str(folder), count=7)

    assert names(images.collect(str(tmp_path / "copy"), count=7)) == names(first)
    assert any(names(images.collect(str(folder), count=7, seed=seed)) != names(first) for seed in range(1, 4))


def test_sample_is_the_same_in_every_release() -> None:
    """The order within the parts comes from SHA-256 of "seed/index": these values must never change."""
    assert [list(part) for part in _parts(8, 2, 0)] == [[0, 2, 1, 3], [4, 6, 7, 5]]


# The set


def test_digest_depends_on_contents_only(folder: Path, tmp_path: Path) -> None:
    for index, path in enumerate(sorted(folder.iterdir(), reverse=True)):
        write(tmp_path / f"renamed/{index}.png", path.read_bytes())

    digest = images.collect(str(folder)).digest

    assert images.collect(str(tmp_path / "renamed")).digest == digest
    assert images.collect(str(folder), count=19).digest != digest


def test_digest_is_the_hash_of_the_sorted_hashes(folder: Path) -> None:
    hashes = sorted(hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir())

    assert images.collect(str(folder)).digest == hashlib.sha256("\n".join(hashes).encode()).hexdigest()


def test_pictures_are_loaded_in_order_of_used(folder: Path) -> None:
    found = images.collect(str(folder), count=3)

    for index, image in enumerate(found):
        assert np.array_equal(image, found.load(index))
        assert np.array_equal(image[..., ::-1], np.asarray(Pillow.open(found.used[index].path)))


def test_file_that_changed_since_the_check_is_an_error(folder: Path) -> None:
    found = images.collect(str(folder))
    (folder / "00.png").write_bytes(encoded(picture(99)))
    (folder / "01.png").unlink()

    with pytest.raises(DataError, match=r"00\.png: was changed while it was in use"):
        found.load(0)
    with pytest.raises(DataError, match=r"01\.png: cannot be read any more \(No such file or directory\)"):
        found.load(1)


def test_progress_rises_to_the_end_whatever_is_refused(folder: Path) -> None:
    for index in range(5, 12):
        (folder / f"{index:02d}.png").write_bytes(b"")

    for count in (None, 3, 10, 18):
        calls: list[tuple[int, int]] = []
        images.collect(str(folder), count=count, on_progress=lambda done, total, to=calls: to.append((done, total)))

        wanted = count or 20
        done = [step for step, _ in calls]
        assert done == sorted(done)
        assert calls[-1] == (wanted, wanted)
        assert {total for _, total in calls} == {wanted}


# Diversity


def test_frames_of_one_scene_are_warned_about(tmp_path: Path) -> None:
    scene = np.asarray(picture(3, size_wh=(160, 120)), np.float64)
    rng = np.random.default_rng(0)
    for index in range(12):
        noisy = np.clip(scene + rng.normal(0, 10, scene.shape), 0, 255).astype(np.uint8)
        write(tmp_path / f"{index}.jpg", encoded(Pillow.fromarray(noisy), "JPEG", quality=80))

    found = images.collect(str(tmp_path))

    assert found.distinct == 1
    assert found.warnings[0].startswith("the images are nearly identical: only 1 of 12 differ")


def test_different_photographs_are_distinct(data: Path) -> None:
    found = images.collect(str(data / "images"))

    assert found.distinct == len(found) >= 36
    assert found.warnings == ()


def test_single_picture_is_not_called_identical(tmp_path: Path) -> None:
    write(tmp_path / "a.png", encoded(picture()))

    assert images.collect(str(tmp_path)).warnings == ()


@given(width=st.integers(16, 90), height=st.integers(16, 90), seed=st.integers(0, 9))
def test_thumbnail_is_the_mean_of_each_cell(width: int, height: int, seed: int) -> None:
    image = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)

    thumbnail = _thumbnail(image).reshape(16, 16)

    rows, columns = [side * np.arange(17) // 16 for side in (height, width)]
    for y in range(16):
        for x in range(16):
            cell = image[rows[y] : rows[y + 1], columns[x] : columns[x + 1]]
            assert thumbnail[y, x] == pytest.approx(cell.mean(), abs=1e-3)


# Videos


def test_video_gives_its_frames_in_their_order_under_their_numbers(tmp_path: Path) -> None:
    path = film(tmp_path / "clip.mp4", range(20))

    found = images.collect(str(path), count=20)

    assert names(found) == [f"clip.mp4#frame={index}" for index in range(20)]
    assert [(file.file, file.frame) for file in found.used] == [(path, index) for index in range(20)]
    assert {file.size_wh for file in found.used} == {(64, 48)}
    assert found.warnings == ()
    for image, expected in zip(found, decoded(path), strict=True):
        assert np.array_equal(image, expected)


def test_hash_of_a_frame_is_that_of_its_shape_and_pixels(tmp_path: Path) -> None:
    path = film(tmp_path / "clip.mp4", range(3))

    found = images.collect(str(path), count=3)

    expected = [hashlib.sha256(b"(48, 64, 3)" + image.tobytes()).hexdigest() for image in decoded(path)]
    assert [file.sha256 for file in found.used] == expected


def test_videos_are_named_directly_by_glob_and_in_lists_beside_pictures(folder: Path, tmp_path: Path) -> None:
    for index, name in enumerate(("a.mp4", "b.mkv", "c.avi")):
        film(tmp_path / name, range(100 * index + 100, 100 * index + 105))
    listing = write(tmp_path / "list.txt", b"c.avi\nset/00.png\n")

    found = images.collect([str(folder), str(tmp_path / "a.mp4"), str(tmp_path / "b*"), str(listing)], count=35)

    assert found.found == 35
    assert len({file.file for file in found.used}) == 23


def test_folder_gives_pictures_only(folder: Path) -> None:
    film(folder / "clip.mp4", range(5))

    assert images.collect(str(folder), count=25).found == 20


def test_folder_of_videos_is_an_error_that_says_to_name_them(tmp_path: Path) -> None:
    film(tmp_path / "clip.mp4", range(3))
    write(tmp_path / "notes.md", b"notes")

    with pytest.raises(DataError, match=r"holds no pictures \(2 other files, 1 of them videos, which must be named"):
        images.collect(str(tmp_path))


def test_count_is_spread_over_frames_and_pictures_alike(folder: Path, tmp_path: Path) -> None:
    film(tmp_path / "clip.mp4", range(100, 160))

    found = images.collect([str(folder), str(tmp_path / "clip.mp4")], count=8)

    frames = [file.frame for file in found.used if file.frame is not None]
    assert [frame // 10 for frame in frames] == [0, 1, 2, 3, 4, 5]
    assert len(found) == 8
    again = images.collect([str(folder), str(tmp_path / "clip.mp4")], count=8)
    other = images.collect([str(folder), str(tmp_path / "clip.mp4")], count=8, seed=1)
    assert again == found
    assert names(other) != names(found)


def test_video_without_a_count_gives_one_frame_a_second_and_says_so(tmp_path: Path) -> None:
    film(tmp_path / "clip.mp4", range(30), fps=9.5)

    found = images.collect(str(tmp_path / "*.mp4"))

    assert [file.frame for file in found.used] == [0, 10, 20]
    (warning,) = found.warnings
    assert warning.startswith("videos give at most one frame a second, 3 of 30 frames, since no count limits")


def test_frames_that_repeat_are_refused_and_replaced_in_few_readings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Fifty times the same frame, then ten others.
    path = film(tmp_path / "clip.avi", [0] * 50 + list(range(1, 11)))
    opened: list[str] = []
    capture = cv2.VideoCapture
    monkeypatch.setattr(cv2, "VideoCapture", lambda name, api: opened.append(name) or capture(name, api))

    found = images.collect(str(path), count=11)

    assert [file.frame for file in found.used][1:] == list(range(50, 60))
    assert set(reasons(found).values()) == {f"has the same content as {found.used[0].path}"}
    assert len(opened) < 10


def test_excluded_frames_are_left_out(tmp_path: Path) -> None:
    path = film(tmp_path / "clip.mp4", range(20))
    calibration = images.collect(str(path), count=5)

    found = images.collect(str(path), count=15, exclude={file.sha256 for file in calibration.used})

    assert sorted(names(found) + names(calibration)) == sorted(f"clip.mp4#frame={index}" for index in range(20))


def test_unusable_video_is_refused_with_its_reason(folder: Path, tmp_path: Path) -> None:
    whole = film(tmp_path / "whole.mp4", range(20)).read_bytes()
    write(tmp_path / "cut.mp4", whole[: len(whole) // 2])
    write(tmp_path / "text.mp4", b"<html>404 not found</html>" * 10)
    write(tmp_path / "empty.mkv", b"")
    film(tmp_path / "none.avi", [])
    os.mkfifo(tmp_path / "pipe.ts")
    listing = write(tmp_path / "list.txt", b"cut.mp4\ntext.mp4\nempty.mkv\nnone.avi\npipe.ts\ngone.mov\n")

    found = images.collect([str(folder), str(listing)], count=26)

    why = reasons(found)
    assert why.pop("cut.mp4") == why.pop("text.mp4")
    assert why == {
        "empty.mkv": "is empty (0 bytes)",
        "none.avi": "holds no frame that can be read",
        "pipe.ts": "is not a regular file",
        "gone.mov": "no such file",
    }
    assert (len(found), found.found) == (20, 26)
    with pytest.raises(DataError, match=r"no usable image; 1 of 1 files were refused, such as .*: is not a video"):
        images.collect(str(tmp_path / "cut.mp4"))


@pytest.mark.parametrize("name", ["clip.avi", "clip.mkv"])
def test_video_that_breaks_off_is_used_as_far_as_it_goes_with_a_warning(tmp_path: Path, name: str) -> None:
    path = film(tmp_path / name, range(40))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    found = images.collect(str(path), count=10)

    assert len(found) == 10
    assert max(file.frame or 0 for file in found.used) < 25
    assert found.warnings[0].startswith(f"{path}: breaks off after ")
    assert "of about 40 frames" in found.warnings[0]


def test_iterating_reads_each_video_through_once(tmp_path: Path) -> None:
    for index in range(2):
        film(tmp_path / f"{index}.mp4", range(100 * index, 100 * index + 20))
    found = images.collect(str(tmp_path / "*.mp4"), count=20)

    seen = 0
    for image in found:
        assert image.shape == (48, 64, 3)
        seen += 1
        (tmp_path / f"{found.used[seen - 1].file.name}").unlink(missing_ok=True)  # could not be opened again

    assert seen == 20


def test_frames_are_loaded_in_any_order_and_by_several_threads(tmp_path: Path) -> None:
    path = film(tmp_path / "clip.mp4", range(40))
    found = images.collect(str(path), count=25)
    expected = [decoded(path)[file.frame or 0] for file in found.used]
    indices = [*range(25), 20, 3, *range(25), 24, 0]

    with ThreadPoolExecutor(4) as pool:
        loaded = list(pool.map(found.load, indices))

    assert all(np.array_equal(image, expected[index]) for image, index in zip(loaded, indices, strict=True))


def test_video_that_changed_since_the_check_is_an_error(tmp_path: Path) -> None:
    path = film(tmp_path / "clip.mp4", range(20))
    found = images.collect(str(path), count=20)

    film(path, range(100, 110))
    with pytest.raises(DataError, match=r"clip\.mp4#frame=5: was changed while it was in use"):
        found.load(5)
    with pytest.raises(DataError, match=r"clip\.mp4: ends after 10 frames, .* it was changed while it was in use"):
        found.load(15)
    path.unlink()
    with pytest.raises(DataError, match=r"clip\.mp4#frame=0: cannot be read any more \(No such file or directory\)"):
        next(iter(found))
