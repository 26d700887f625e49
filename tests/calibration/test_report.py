"""The calibration report: one page that needs nothing else and shows what it is given."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING

import cv2
import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper

from calibration import images, report
from calibration.calibrate import calibrate
from calibration.histogram import Histogram
from calibration.ranges import Range
from calibration.report import CalibrationReport, Found, Picture, TensorRow, _bars, _source
from edge import config

if TYPE_CHECKING:
    from collections.abc import Callable

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """Text and tags of a page; fails where tags are not nested."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def names(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def row(name: str = "conv1", **values: object) -> TensorRow:
    given: dict[str, object] = {
        "amax": 6.35,
        "scale": 0.05,
        "source": "measured",
        "observed_amax": 12.7,
        "clipped": 0.0012,
        "quantized": True,
        "bars": (100, 10, 0, 1),
    }
    return TensorRow(name, **(given | values))  # type: ignore[arg-type]


def example(**values: object) -> CalibrationReport:
    base = CalibrationReport(
        model="gate",
        summary=(("24", "pictures"), ("74", "layers in INT8")),
        warnings=("128 images were asked for, 24 can be used",),
        folder="/data/gate",
        used=(Picture("day/1.jpg", 640, 480, "ab" * 32),),
        refused=(("day/2.jpg", "is empty (0 bytes)"),),
        image_facts=(("digest", "cd" * 32),),
        model_facts=(("file", "gate.onnx"), ("SHA-256", "ef" * 32)),
        input_facts=(("resize", "letterbox"),),
        method="entropy",
        trials=(),
        reason="",
        found=(),
        missing=(("boxes", "not observed, computed by NonMaxSuppression"),),
        fp16_only=(("scores", "TensorRT has SoftMax in floating point alone"),),
        tensors=(row(), row("conv2", clipped=0.0, amax=12.7)),
        kept=("Conv_41",),
        skipped=(("Conv_7", "no range for x"),),
        files=(("calibration.cache", "01" * 32),),
        provenance=(("made by", "jetson-edge 0.1.0"), ("at", "2026-01-01T00:00:00Z")),
    )
    return replace(base, **values)  # type: ignore[arg-type]


def test_everything_that_is_given_stands_on_the_page() -> None:
    text = Page(report.render(example())).text

    for shown in (
        "Calibration of gate",
        "128 images were asked for, 24 can be used",
        "day/1.jpg",
        "640 \N{MULTIPLICATION SIGN} 480",
        "abababababababab",
        "is empty (0 bytes)",
        "cd" * 32,
        "ef" * 32,
        "letterbox",
        "entropy",
        "conv1",
        "6.35",
        "0.12 %",
        "1 without a range, 1 that stay in FP16",
        "not observed, computed by NonMaxSuppression",
        "TensorRT has SoftMax in floating point alone",
        "Conv_41",
        "no range for x",
        "01" * 32,
        "jetson-edge 0.1.0",
        "2026-01-01T00:00:00Z",
    ):
        assert shown in text


def test_page_needs_no_network_and_no_script() -> None:
    text = report.render(example())

    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in page.tags}
    assert not re.search(r"https?:|url\(|@import|src=|href=", text)
    assert any("default-src 'none'" in str(meta.get("content")) for meta in page.names("meta"))


def test_page_suits_dark_rooms_and_phones() -> None:
    text = report.render(example())

    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text


HOSTILE = "<script>alert(1)</script>\"'&<b>"


def test_names_from_outside_are_escaped_everywhere() -> None:
    hostile = example(
        model=HOSTILE,
        summary=((HOSTILE, HOSTILE),),
        warnings=(HOSTILE,),
        folder=HOSTILE,
        used=(Picture(HOSTILE, 1, 1, HOSTILE),),
        refused=((HOSTILE, HOSTILE),),
        image_facts=((HOSTILE, HOSTILE),),
        model_facts=((HOSTILE, HOSTILE),),
        input_facts=((HOSTILE, HOSTILE),),
        method=HOSTILE,
        reason=HOSTILE,
        trials=((HOSTILE, 0.5, True), (HOSTILE, 0.25, False)),
        found=(Found(HOSTILE, True, (row(HOSTILE),), (HOSTILE, HOSTILE)),),
        missing=((HOSTILE, HOSTILE),),
        fp16_only=((HOSTILE, HOSTILE),),
        tensors=(row(HOSTILE, source=HOSTILE),),
        kept=(HOSTILE,),
        skipped=((HOSTILE, HOSTILE),),
        files=((HOSTILE, HOSTILE),),
        provenance=((HOSTILE, HOSTILE),),
    )

    page = Page(report.render(hostile))

    assert not page.names("script")
    assert page.text.count(HOSTILE) >= 34


def test_method_is_escaped_where_nothing_was_tried() -> None:
    page = Page(report.render(example(method=HOSTILE)))

    assert not page.names("script")
    assert f"Method: {HOSTILE}, as the deployment asks for." in page.text


def test_same_report_gives_the_same_page() -> None:
    assert report.render(example()) == report.render(example())


def test_page_without_trouble_has_no_empty_boxes() -> None:
    text = Page(report.render(example(warnings=(), refused=(), missing=(), fp16_only=(), kept=(), skipped=()))).text

    assert "Warnings" not in text
    assert "Refused" not in text
    assert "Tensors to look at" not in text
    assert "does not run in INT8" not in text
    assert "None: every layer that can run in INT8 does." in text


@pytest.mark.parametrize(
    ("clipped", "shown"), [(0.0, "0"), (0.25, "25.00 %"), (0.0001, "0.01 %"), (0.00001, "10 ppm"), (1e-8, "0.01 ppm")]
)
def test_shares_are_legible_at_every_size(clipped: float, shown: str) -> None:
    page = Page(report.render(example(tensors=(row(clipped=clipped, bars=()),))))

    assert shown in page.text


class TestMethod:
    def test_method_that_the_deployment_names_is_said_to_be_so(self) -> None:
        text = Page(report.render(example())).text

        assert "Method: entropy, as the deployment asks for." in text
        assert "agreement with FP32" not in text

    def test_method_that_was_chosen_comes_with_the_numbers(self) -> None:
        tried = example(
            reason="mse: agreement with FP32 on 8 held-out pictures",
            trials=(("mse", 0.98765, True), ("max", 0.5, False)),
        )

        page = Page(report.render(tried))

        assert "mse: agreement with FP32 on 8 held-out pictures" in page.text
        assert "as the deployment asks for" not in page.text
        (table,) = re.findall(r'<table class="narrow">(.*?)</table>', report.render(tried), re.DOTALL)
        cells = re.findall(r"<td>(.*?)</td><td[^>]*>(.*?)</td>", table)
        assert cells == [("<b>mse</b>, chosen", "0.9877"), ("max", "0.5000")]

    def test_method_that_could_not_be_measured_has_a_reason_and_no_table(self) -> None:
        text = Page(report.render(example(reason="mse, unmeasured: 2 pictures are held out"))).text

        assert "mse, unmeasured: 2 pictures are held out" in text
        assert "agreement with FP32" not in text


class TestFound:
    def test_tensors_are_drawn_and_the_others_named(self) -> None:
        found = Found("dominated by outliers", False, (row("drawn_a"), row("drawn_b")), ("other_c", "other_d"))

        page = Page(report.render(example(tensors=(row("x", bars=()),), found=(found,))))

        assert "4 dominated by outliers" in page.text
        assert [svg["aria-label"] for svg in page.names("svg")] == ["Histogram of drawn_a", "Histogram of drawn_b"]
        assert "and 2 more" in page.text
        assert "other_c, other_d" in page.text

    @pytest.mark.parametrize(("others", "summary"), [(("a",), "1 tensor"), (("a", "b"), "2 tensors")])
    def test_tensors_without_histograms_are_counted_in_words(self, others: tuple[str, ...], summary: str) -> None:
        page = Page(report.render(example(found=(Found("zero on every picture", True, (), others),))))

        assert re.search(rf"\b{summary}\n", page.text)

    def test_nothing_is_left_over_where_all_are_drawn(self) -> None:
        text = report.render(example(found=(Found("of one value", True, (row("stuck"),), ()),)))

        assert "1 of one value" in text
        assert not re.search(r"and 0 more|0 tensors?<", text)


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (Range(amax=2.0, scale=2 / 127, source="measured"), "measured"),
        (Range(amax=2.0, scale=2 / 127, source="measured", method="mse"), "measured (mse)"),
        (Range(amax=1.0, scale=1 / 127, source="zero"), "zero on every picture"),
        (Range(amax=1.0, scale=1 / 127, source="bounded"), "bounded by its operator"),
        (Range(amax=2.0, scale=2 / 127, source="same", of="conv_1", method="mse"), "as conv_1"),
        (Range(amax=2.0, scale=2 / 127, source="tied", of="conv_1", alone=0.123456), "tied to conv_1; 0.1235 alone"),
        (Range(amax=2.0, scale=2 / 127, source="tied", of="a, b", alone=1.0), "tied to a, b; 1 alone"),
        (Range(amax=2.0, scale=2 / 127, source="tied", alone=1.0), "tied; 1 alone"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_source_of_a_range_is_put_in_words(entry: Range, text: str) -> None:
    assert _source(entry) == text


def test_tensor_that_was_not_observed_has_no_largest_value() -> None:
    page = report.render(example(tensors=(row("inferred", source="as conv1", observed_amax=None, bars=()),)))

    (cells,) = re.findall(r"<tr><td><code>inferred</code></td>(.*?)</tr>", page)
    assert re.findall(r"<td[^>]*>(.*?)</td>", cells) == ["6.35", "0.05", "", "0.12 %", "as conv1", "yes"]


class TestHistograms:
    def test_most_clipped_and_widest_tensors_are_drawn(self) -> None:
        clipped = [row(f"c{k}", clipped=0.01 * k, amax=1.0 + k) for k in range(1, 10)]
        wide = [row(f"w{k}", clipped=0.0, amax=100.0 + k, observed_amax=100.0 + k) for k in range(10)]

        drawn = example(tensors=(*clipped, *wide)).drawn

        assert [tensor.name for tensor in drawn[:6]] == ["c9", "c8", "c7", "c6", "c5", "c4"]
        assert [tensor.name for tensor in drawn[6:]] == ["w9", "w8", "w7", "w6", "w5", "w4"]

    def test_tensors_with_the_same_values_are_drawn_once(self) -> None:
        drawn = example(tensors=(row("conv"), row("conv_slice"), row("conv_reshaped"))).drawn

        assert [tensor.name for tensor in drawn] == ["conv"]

    def test_tensor_that_was_always_zero_is_listed_but_not_drawn(self) -> None:
        zero = row("dead", source="zero", observed_amax=0.0, bars=())

        page = Page(report.render(example(tensors=(zero,))))

        assert not page.names("svg")
        assert "dead" in page.text
        assert zero.edge == 64

    def test_outline_has_a_step_for_each_bar(self) -> None:
        """Heights are log(1 + count), the tallest bar fills the box of 64 x 24."""
        assert row(bars=(3, 0)).path == "M0 24V0.0H32.00V24.0H64.00V24Z"

    def test_line_stands_at_the_range(self) -> None:
        page = Page(report.render(example(tensors=(row(amax=3.0, observed_amax=12.0),))))

        (line,) = page.names("line")
        assert line["x1"] == line["x2"] == "16.00"

    def test_range_that_clips_nothing_has_no_line(self) -> None:
        page = Page(report.render(example(tensors=(row(amax=12.0, observed_amax=12.0, clipped=0.0),))))

        assert page.names("svg")
        assert not page.names("line")

    def test_drawings_are_well_formed(self) -> None:
        for drawing in re.findall(r"<svg.*?</svg>", report.render(example()), re.DOTALL):
            ET.fromstring(drawing)  # noqa: S314 - our own text

    @given(st.lists(st.floats(-(2.0**20), 2.0**20, width=32), min_size=1, max_size=300))
    def test_bars_hold_every_value_that_was_counted(self, values: list[float]) -> None:
        histogram = Histogram()
        histogram.add(np.array(values, np.float32))

        bars = _bars(histogram)

        assert sum(bars) == (len(values) if any(values) else 0)
        assert len(bars) <= report.BARS
        if bars:
            assert bars[-1] > 0


def test_report_of_a_real_calibration(tmp_path: Path, data: Path) -> None:
    photos = [path.read_bytes() for path in sorted((data / "images").iterdir())[:3]]
    for index, content in enumerate(photos):
        (tmp_path / f"{index}.jpg").write_bytes(content)
    (tmp_path / "empty <b>.jpg").write_bytes(b"")
    model = config.Model(
        name="yolox",
        path=str(data / "models/yolox_nano.onnx"),
        task=config.DetectionTask(labels="coco80"),
        input=config.Input(anchor="top-left", color="bgr", divide_by=1.0),
        calibration=config.Calibration(
            images=str(tmp_path), method="max", fp16=[config.LayerRule(op="Conv", depthwise=True)]
        ),
    )
    pictures = images.collect(str(tmp_path), count=8)

    result = calibrate(
        model,
        pictures,
        tmp_path / "out",
        report=lambda calibrated: report.render(report.of(calibrated, model, pictures)),
    )

    page = Page((tmp_path / "out/report.html").read_text(encoding="utf-8"))
    assert "Calibration of yolox" in page.text
    assert "8 images were asked for, 3 can be used" in page.text
    assert "empty <b>.jpg" in page.text
    assert pictures.digest in page.text
    assert result.manifest.model_sha256 in page.text
    assert all(name in page.text for name in result.ranges.tensors)
    assert all(layer in page.text for layer in result.placement.kept)
    assert all(reason in page.text for reason in result.ranges.fp16_only.values())
    assert all(str(len(finding.tensors)) + " " + finding.text in page.text for finding in result.findings)
    shown = [svg["aria-label"] for svg in page.names("svg")]
    assert len(shown) >= report.DRAWN
    assert "Histogram of images" in shown


def odd_model(build_model: Callable[..., ir.Model], rng: np.random.Generator) -> ir.Model:
    """A classifier with a tensor of each kind that is worth telling."""
    node = helper.make_node
    gain = np.ones((1, 1, 64, 64), np.float32)
    gain[..., 0, 0] = 100
    nodes = [
        node("Mul", ["images", "gain"], ["spiky"]),
        node("Conv", ["spiky", "w"], ["features"], name="features"),
        node("Sub", ["features", "much"], ["negative"]),
        node("Relu", ["negative"], ["dead"]),
        node("Exp", ["dead"], ["stuck"]),
        node("Mul", ["features", "little"], ["small"]),
        node("Concat", ["features", "small", "stuck"], ["joined"], axis=1),
        node("Conv", ["joined", "w_last"], ["last"], name="last"),
        node("GlobalAveragePool", ["last"], ["pooled"]),
        node("Flatten", ["pooled"], ["flat"]),
        node("Softmax", ["flat"], ["out"]),
    ]
    weights = {
        "gain": gain,
        "w": rng.standard_normal((4, 3, 1, 1)).astype(np.float32),
        "much": np.float32(1e6),
        "little": np.float32(0.01),
        "w_last": rng.standard_normal((3, 12, 1, 1)).astype(np.float32),
    }
    return build_model(nodes, weights, input_shape=(1, 3, 64, 64))


def test_report_of_a_choice_and_of_odd_tensors(
    tmp_path: Path, build_model: Callable[..., ir.Model], rng: np.random.Generator
) -> None:
    ir.save(odd_model(build_model, rng), tmp_path / "odd.onnx")
    (tmp_path / "pictures").mkdir()
    for index in range(30):
        picture = (rng.random((64, 64, 3)) * rng.uniform(50, 256, 3)).astype(np.uint8)
        cv2.imwrite(str(tmp_path / f"pictures/{index:02d}.png"), picture)
    model = config.Model(
        name="odd",
        path=str(tmp_path / "odd.onnx"),
        task=config.Classification(labels=["a", "b", "c"]),
        calibration=config.Calibration(images=str(tmp_path / "pictures"), method="auto"),
    )
    pictures = images.collect(str(tmp_path / "pictures"))

    result = calibrate(
        model, pictures, tmp_path / "out", report=lambda it: report.render(report.of(it, model, pictures))
    )

    made = report.of(result, model, pictures)
    page = Page((tmp_path / "out/report.html").read_text(encoding="utf-8"))
    assert result.choice is not None
    assert made.reason == result.choice.reason
    assert made.reason in page.text
    assert [name for name, _, chosen in made.trials if chosen] == [result.choice.method]
    assert {name: share for name, share, _ in made.trials} == result.choice.agreement
    sources = {tensor.name: tensor.source for tensor in made.tensors}
    assert sources["images"].startswith("measured (")
    assert sources["dead"] == "zero on every picture"
    assert re.fullmatch(r"tied to features; \S+ alone", sources["small"])
    assert all(source in page.text for source in sources.values())
    found = {finding.text: finding for finding in made.found}
    kinds = {finding.kind: found[finding.text] for finding in result.findings}
    assert (kinds["zero"].drawn, kinds["zero"].others) == ((), ("dead",))
    assert [tensor.name for tensor in kinds["constant"].drawn] == ["stuck"]
    assert "spiky" in [tensor.name for tensor in kinds["outliers"].drawn]
    assert "small" in [tensor.name for tensor in kinds["tied"].drawn]
    assert dict(made.fp16_only).keys() == result.ranges.fp16_only.keys() >= {"out"}
    assert all(svg["aria-label"] for svg in page.names("svg"))
