"""Decoding whatever files hold, and the pre-processing that both commands share."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Pillow

from edge import config
from edge.errors import DataError, ModelError
from edge.image import Preprocessor, decode, place
from edge.types import TensorSpec

RESIZE = ["letterbox", "stretch", "crop"]


def encoded(picture: Pillow.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def gradient(mode: str = "RGB") -> Pillow.Image:
    """40 x 20: red rises to the right, green downwards, blue is 64."""
    y, x = np.mgrid[:20, :40]
    return Pillow.fromarray(np.stack([x * 6, y * 12, np.full_like(x, 64)], -1).astype(np.uint8)).convert(mode)


def preprocessor(shape: tuple[int, ...], dtype: Any = np.float32, **section: Any) -> Preprocessor:
    return Preprocessor(config.Input(**section), TensorSpec("images", shape, np.dtype(dtype)))


class TestDecode:
    def test_channels_are_bgr(self) -> None:
        image = decode(encoded(gradient(), "PNG"), name="x")

        assert image.shape == (20, 40, 3)
        assert image.dtype == np.uint8
        assert image[19, 39].tolist() == [64, 228, 234]

    def test_grey_becomes_three_equal_channels(self) -> None:
        image = decode(encoded(gradient("L"), "PNG"), name="x")

        assert np.array_equal(image[..., 0], np.asarray(gradient("L")))
        assert np.array_equal(image[..., 0], image[..., 2])

    def test_alpha_is_dropped(self) -> None:
        picture = gradient("RGBA")
        picture.putalpha(10)

        assert np.array_equal(decode(encoded(picture, "PNG"), name="x"), decode(encoded(gradient(), "PNG"), name="x"))

    def test_sixteen_bits_keep_the_upper_eight(self) -> None:
        values = np.arange(20 * 40, dtype=np.uint16).reshape(20, 40) * 80
        image = decode(encoded(Pillow.fromarray(values), "PNG"), name="x")

        assert np.abs(image[..., 0].astype(int) - (values >> 8)).max() <= 1

    def test_cmyk_looks_as_pillow_shows_it(self) -> None:
        data = encoded(gradient("CMYK"), "JPEG", quality=95)
        expected = np.asarray(Pillow.open(io.BytesIO(data)).convert("RGB"))[..., ::-1].astype(int)

        assert np.abs(decode(data, name="x").astype(int) - expected).mean() < 6

    @pytest.mark.parametrize("orientation", range(1, 9))
    def test_exif_orientation_is_applied(self, orientation: int) -> None:
        exif = Pillow.Exif()
        exif[0x0112] = orientation
        data = encoded(gradient(), "JPEG", quality=95, exif=exif)
        from PIL import ImageOps

        expected = np.asarray(ImageOps.exif_transpose(Pillow.open(io.BytesIO(data))))[..., ::-1].astype(int)

        image = decode(data, name="x")

        assert image.shape == expected.shape
        assert np.abs(image.astype(int) - expected).mean() < 3

    @pytest.mark.parametrize("kind", ["BMP", "JPEG", "PNG", "TIFF", "WEBP"])
    def test_common_formats(self, kind: str) -> None:
        assert decode(encoded(gradient(), kind), name="x").shape == (20, 40, 3)

    @pytest.mark.parametrize(
        ("data", "reason"),
        [
            (b"", r"a\.jpg: is empty \(0 bytes\)"),
            (b"hello, world", r"a\.jpg: is not a picture that can be read \(starts with 68 65 6c"),
            (b"\xff\xd8\xff", r"a\.jpg: is truncated \(3 bytes"),
        ],
    )
    def test_what_is_no_picture_is_refused(self, data: bytes, reason: str) -> None:
        with pytest.raises(DataError, match=reason):
            decode(data, name="a.jpg")

    @pytest.mark.parametrize("share", [0.2, 0.5, 0.9, 0.99])
    @pytest.mark.parametrize("kind", ["JPEG", "PNG"])
    def test_truncated_files_are_refused(self, kind: str, share: float) -> None:
        data = encoded(gradient(), kind)

        with pytest.raises(DataError, match="is truncated"):
            decode(data[: int(len(data) * share)], name="x")

    @pytest.mark.parametrize("share", [0.3, 0.7])
    def test_a_thumbnail_does_not_hide_a_truncated_photograph(self, data: Path, share: float) -> None:
        exif = Pillow.Exif()
        exif[0x927C] = encoded(gradient(), "JPEG")  # a JPEG, with an end marker, inside the EXIF segment
        photo = encoded(Pillow.open(data / "images" / "000000000089.jpg"), "JPEG", exif=exif)

        with pytest.raises(DataError, match="is truncated"):
            decode(photo[: int(len(photo) * share)], name="x")

    def test_bytes_after_the_end_are_ignored(self) -> None:
        assert decode(encoded(gradient(), "JPEG") + b"camera maker's data", name="x").shape == (20, 40, 3)

    def test_every_photograph_of_the_test_data_decodes(self, data: Path) -> None:
        for path in sorted((data / "images").glob("*.jpg")):
            with Pillow.open(path) as picture:
                assert decode(path.read_bytes(), name=path.name).shape == (picture.height, picture.width, 3)


sizes = st.integers(1, 3000)


class TestPlace:
    @given(sizes, sizes, st.integers(8, 1300), st.integers(8, 1300), st.sampled_from(RESIZE), st.data())
    def test_a_box_mapped_in_and_out_comes_back(
        self, width: int, height: int, model_w: int, model_h: int, resize: Any, data: st.DataObject
    ) -> None:
        letterbox = place(config.Input(resize=resize), (width, height), (model_w, model_h))
        x = sorted(data.draw(st.tuples(st.floats(0, width), st.floats(0, width))))
        y = sorted(data.draw(st.tuples(st.floats(0, height), st.floats(0, height))))
        box = np.array([[x[0], y[0], x[1], y[1]]], np.float32)

        back = letterbox.to_source(letterbox.to_model(box))

        assert np.abs(back - box).max() <= 0.5

    @given(sizes, sizes, st.integers(8, 1300), st.integers(8, 1300), st.sampled_from(["center", "top-left"]))
    def test_a_letterboxed_picture_lies_inside_and_touches_two_sides(
        self, width: int, height: int, model_w: int, model_h: int, anchor: Any
    ) -> None:
        letterbox = place(config.Input(anchor=anchor), (width, height), (model_w, model_h))
        x0, y0, x1, y1 = letterbox.to_model(np.array([0, 0, width, height], np.float32))

        assert -0.01 <= x0 <= x1 <= model_w + 0.01
        assert -0.01 <= y0 <= y1 <= model_h + 0.01
        assert x1 - x0 == pytest.approx(model_w, abs=0.6) or y1 - y0 == pytest.approx(model_h, abs=0.6)

    @given(sizes, sizes, st.integers(8, 600), st.floats(0.5, 1))
    def test_a_crop_covers_the_whole_input(self, width: int, height: int, side: int, fraction: float) -> None:
        letterbox = place(config.Input(resize="crop", crop_fraction=fraction), (width, height), (side, side))
        x0, y0, x1, y1 = letterbox.to_model(np.array([0, 0, width, height], np.float32))

        assert x0 <= 0.01
        assert y0 <= 0.01
        assert x1 >= side - 0.01
        assert y1 >= side - 0.01

    def test_hand_worked_letterbox(self) -> None:
        letterbox = place(config.Input(), (640, 480), (416, 416))

        assert letterbox.scale_xy == (0.65, 0.65)
        assert letterbox.offset_xy == (0.0, 52.0)

    def test_clipping_keeps_boxes_in_the_picture(self) -> None:
        letterbox = place(config.Input(), (640, 480), (416, 416))

        assert letterbox.clip(np.array([[-5, -5, 700, 481]], np.float32)).tolist() == [[0, 0, 640, 480]]


class TestPreprocessor:
    def test_letterbox_pads_with_the_fill(self) -> None:
        image = np.full((48, 96, 3), 200, np.uint8)

        array, _ = preprocessor((1, 3, 64, 64), divide_by=1)(image)

        assert array.dtype == np.float32
        assert array[0, :, 32, 32].tolist() == [200, 200, 200]
        assert array[0, :, 5, 32].tolist() == [114, 114, 114]
        assert array[0, :, 60, 32].tolist() == [114, 114, 114]

    def test_top_left_pads_below_and_right_only(self) -> None:
        image = np.full((48, 96, 3), 200, np.uint8)

        array, _ = preprocessor((1, 3, 64, 64), divide_by=1, anchor="top-left")(image)

        assert array[0, 0, 0, 0] == 200
        assert array[0, 0, 31, 63] == 200
        assert array[0, 0, 33, 0] == 114

    @pytest.mark.parametrize(("color", "expected"), [("rgb", [30, 20, 10]), ("bgr", [10, 20, 30])])
    def test_channel_order(self, color: str, expected: list[int]) -> None:
        image = np.full((8, 8, 3), (10, 20, 30), np.uint8)

        array, _ = preprocessor((1, 3, 8, 8), color=color, divide_by=1)(image)

        assert array[0, :, 0, 0].tolist() == expected

    def test_mean_and_std_follow_the_channel_order(self) -> None:
        image = np.full((8, 8, 3), (10, 20, 30), np.uint8)

        array, _ = preprocessor((1, 3, 8, 8), divide_by=1, mean=[30, 10, 0], std=[1, 2, 5])(image)

        assert array[0, :, 0, 0].tolist() == [0, 5, 2]

    @pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
    @pytest.mark.parametrize("resize", RESIZE)
    @pytest.mark.parametrize("layout", ["nchw", "nhwc"])
    def test_equals_the_plain_formula(self, data: Path, resize: Any, layout: str, dtype: Any) -> None:
        image = decode((data / "images" / "000000000086.jpg").read_bytes(), name="x")
        mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
        shape = (1, 3, 96, 128) if layout == "nchw" else (1, 96, 128, 3)

        array, letterbox = preprocessor(shape, dtype, resize=resize, mean=mean, std=std)(image)

        height, width = image.shape[:2]
        wh = (round(width * letterbox.scale_xy[0]), round(height * letterbox.scale_xy[1]))
        resized = cv2.resize(image, wh, interpolation=cv2.INTER_LINEAR)
        left, top = map(int, letterbox.offset_xy)
        canvas = np.full((96, 128, 3), 114, np.uint8)
        for y in range(96):
            for x in range(128):
                if 0 <= y - top < wh[1] and 0 <= x - left < wh[0]:
                    canvas[y, x] = resized[y - top, x - left]
        expected = (canvas[..., ::-1] / 255 - mean) / std
        found = array[0].transpose(1, 2, 0) if layout == "nchw" else array[0]
        assert np.abs(found.astype(np.float64) - expected).max() < (2e-3 if dtype == np.float16 else 1e-6)

    def test_grey_input(self) -> None:
        image = np.full((8, 8, 3), (0, 255, 0), np.uint8)

        array, _ = preprocessor((1, 1, 8, 8), color="gray", divide_by=1)(image)

        assert array[0, 0, 0, 0] == 150  # ITU-R BT.601: 0.587 * 255

    def test_integer_inputs_are_rounded_and_clipped(self) -> None:
        image = np.full((8, 8, 3), 255, np.uint8)

        array, _ = preprocessor((1, 3, 8, 8), np.int8, divide_by=1)(image)

        assert array.dtype == np.int8
        assert array.max() == 127

    def test_a_one_pixel_picture_and_a_sliver_fit(self) -> None:
        for shape in ((1, 1, 3), (1, 3000, 3), (3000, 1, 3)):
            array, _ = preprocessor((1, 3, 64, 64))(np.zeros(shape, np.uint8))

            assert array.shape == (1, 3, 64, 64)

    @pytest.mark.parametrize("shape", [(1, 3, 64), (2, 3, 64, 64), (1, 4, 64, 64), (3, 64, 64)])
    def test_tensors_that_are_no_picture_are_refused(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(ModelError, match=r"input 'images' is .*; expected \[1, 3, H, W\] or \[1, H, W, 3\]"):
            preprocessor(shape)
