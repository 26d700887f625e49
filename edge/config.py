"""The deployment file: one YAML file that calibration, evaluation and the daemon share.

This room declares the sections, loads a file and resolves its relative paths. How a YAML text becomes typed values,
with every problem found at once, is ``edge.strict``'s job. Whether the named files exist is asked by whoever needs
them, through ``missing_files``.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from edge import strict
from edge.errors import ConfigError

__all__ = [
    "Calibration",
    "Camera",
    "Classification",
    "Csi",
    "Deployment",
    "DetectionTask",
    "Dla",
    "Engine",
    "Evaluation",
    "Folder",
    "Governor",
    "Input",
    "LayerRule",
    "Limits",
    "Model",
    "Monitor",
    "Mqtt",
    "Outbox",
    "Parity",
    "Rtsp",
    "Segmentation",
    "Source",
    "Status",
    "Stream",
    "TestPattern",
    "V4l2",
    "Video",
    "Watch",
    "json_schema",
    "load",
    "missing_files",
]

# Paths of the file, as opposed to texts that happen to look like one: these are resolved against the file's folder.
PathStr: TypeAlias = Annotated[str, Meta(min_length=1, extra={"path": True})]
Name: TypeAlias = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$(?!\n)",
        description="Letters, digits, '_', '.' and '-': it becomes part of MQTT topics and file names.",
        extra={"says": "a name of letters, digits, '_', '.' and '-', starting with a letter or digit"},
    ),
]
Pattern: TypeAlias = Annotated[str, Meta(min_length=1)]
Fraction: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Positive: TypeAlias = Annotated[float, Meta(gt=0)]
Count: TypeAlias = Annotated[int, Meta(ge=1)]
PowerOfTwo: TypeAlias = Annotated[int, Meta(ge=4, le=1 << 20, description="A power of two, as TensorRT asks.")]
IoFormat: TypeAlias = Annotated[
    str,
    Meta(
        pattern=r"^(fp32|fp16|int8):(chw|chw2|chw4|chw16|chw32|hwc8|hwc|dla_linear|dla_hwc4)$(?!\n)",
        extra={
            "says": "a type and a layout such as fp16:chw16 (types: fp32, fp16, int8; layouts: chw, chw2, chw4, chw16,"
            " chw32, hwc8, hwc, dla_linear, dla_hwc4)"
        },
    ),
]


Fps: TypeAlias = Annotated[float, Meta(gt=0, le=1000)]
Size: TypeAlias = tuple[Count, Count]


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A section of the deployment file: immutable, and closed to unknown keys."""


class Input(Section, frozen=True, kw_only=True):
    """How a picture becomes the model's input: ``(pixel / divide_by - mean) / std`` after resizing."""

    resize: Annotated[
        Literal["letterbox", "stretch", "crop"],
        Meta(
            description="letterbox keeps the aspect ratio and pads; stretch does not keep it; crop resizes the short"
            " side and cuts the centre, as classifiers are trained."
        ),
    ] = "letterbox"
    size: Annotated[
        tuple[Count, Count] | None,
        Meta(description="[width, height] in pixels; needed only where the model leaves them dynamic."),
    ] = None
    anchor: Annotated[
        Literal["center", "top-left"], Meta(description="Where a letterboxed picture lies in the input.")
    ] = "center"
    fill: Annotated[int, Meta(ge=0, le=255, description="Grey level of the letterbox padding, before normalising.")] = (
        114
    )
    crop_fraction: Annotated[
        float, Meta(gt=0, le=1, description="For crop: the part of the resized short side that is kept.")
    ] = 0.875
    interpolation: Annotated[Literal["linear", "area", "cubic", "nearest"], Meta(description="OpenCV's method.")] = (
        "linear"
    )
    color: Annotated[Literal["rgb", "bgr", "gray"], Meta(description="Channel order that the model expects.")] = "rgb"
    divide_by: Annotated[float, Meta(gt=0, description="255 for models that expect 0..1, 1 for 0..255.")] = 255.0
    mean: Annotated[list[float], Meta(min_length=1, max_length=3, description="One value, or one per channel.")] = (
        msgspec.field(default_factory=lambda: [0.0])
    )
    std: Annotated[list[Positive], Meta(min_length=1, max_length=3, description="One value, or one per channel.")] = (
        msgspec.field(default_factory=lambda: [1.0])
    )


class Task(Section, frozen=True, kw_only=True, tag_field="type"):
    """What the outputs mean."""

    labels: Annotated[
        list[str] | str,
        Meta(
            description="Class names in the model's order: a list, a text file with one a line, or 'coco80'."
            " Without them a class is called 'class_7'."
        ),
    ] = msgspec.field(default_factory=list)


class DetectionTask(Task, frozen=True, kw_only=True, tag="detection"):
    """Boxes with a class and a score."""

    layout: Annotated[
        Literal["auto", "yolox", "yolov5", "yolov8", "end-to-end", "detr", "fastestdet", "yunet"],
        Meta(description="How the outputs are laid out; auto recognises it from their names and shapes."),
    ] = "auto"
    score: Annotated[Fraction, Meta(description="Detections below it are dropped.")] = 0.25
    nms_iou: Annotated[Fraction, Meta(description="Of two boxes of a class that overlap more, the weaker goes.")] = 0.45
    max_detections: Annotated[int, Meta(ge=1, description="The most that one frame can give.")] = 300
    keep: Annotated[list[str], Meta(description="Labels to keep; empty keeps all.")] = msgspec.field(
        default_factory=list
    )
    activation: Annotated[
        Literal["auto", "none", "sigmoid", "softmax"],
        Meta(description="What turns the class outputs into scores; auto goes by the layout."),
    ] = "auto"


class Segmentation(Task, frozen=True, kw_only=True, tag="segmentation"):
    """Masks: instances from YOLO-seg prototypes, or the connected regions of one probability map."""

    layout: Annotated[
        Literal["auto", "yolo-seg", "map"],
        Meta(description="auto recognises it from the outputs' shapes."),
    ] = "auto"
    score: Annotated[Fraction, Meta(description="Objects below it are dropped.")] = 0.25
    nms_iou: Annotated[Fraction, Meta(description="Of two boxes of a class that overlap more, the weaker goes.")] = 0.45
    mask_threshold: Annotated[Fraction, Meta(description="A pixel above it belongs to the object.")] = 0.5
    min_area: Annotated[int, Meta(ge=1, description="Regions of fewer source pixels are dropped (map).")] = 8
    max_detections: Annotated[int, Meta(ge=1, description="The most that one frame can give.")] = 300
    keep: Annotated[list[str], Meta(description="Labels to keep; empty keeps all.")] = msgspec.field(
        default_factory=list
    )


class Classification(Task, frozen=True, kw_only=True, tag="classification"):
    """One answer about the whole picture, with the runners-up."""

    top_k: Annotated[int, Meta(ge=1, description="How many answers to report.")] = 5
    score: Annotated[Fraction, Meta(description="Answers below it are not reported.")] = 0.0
    activation: Annotated[
        Literal["auto", "none", "sigmoid", "softmax"],
        Meta(description="What turns the outputs into scores; auto applies softmax unless they already sum to 1."),
    ] = "auto"


class LayerRule(Section, frozen=True, kw_only=True):
    """Chooses layers of the ONNX graph; every key that is given must match."""

    name: Annotated[
        str | None, Meta(description="Shell pattern for the node's name, or for the name of one of its outputs.")
    ] = None
    op: Annotated[str | None, Meta(description="Operator, such as Conv.")] = None
    depthwise: Annotated[
        bool | None, Meta(description="Convolutions with one input channel a group (true), or all others (false).")
    ] = None
    attributes: Annotated[
        dict[str, int | float | str | list[int | float]],
        Meta(description="Attributes that the node must have with just this value, such as kernel_shape: [1, 1]."),
    ] = msgspec.field(default_factory=dict)


class Calibration(Section, frozen=True, kw_only=True):
    """How INT8 ranges are found."""

    images: Annotated[
        list[Pattern] | Pattern,
        Meta(description="Folder, glob, video or list file (.txt, one path a line), or several.", extra={"path": True}),
    ]
    count: Annotated[int, Meta(ge=1, description="Images to use, sampled evenly with the seed.")] = 128
    seed: Annotated[int, Meta(ge=0, description="Same seed and images, same sample.")] = 0
    method: Annotated[
        Literal["auto", "entropy", "percentile", "mse", "max"],
        Meta(
            description="auto: tries the others and keeps what agrees best with FP32 on images held out from these;"
            " entropy: least KL divergence, as TensorRT's EntropyCalibration2; percentile: 99.99 % of the values;"
            " mse: least mean squared error; max: the largest |x| seen."
        ),
    ] = "auto"
    ties: Annotated[
        Literal["dla", "none"],
        Meta(
            description="dla: tensors that the DLA needs in one scale, such as a Concat's inputs and output, get one."
            " none: each keeps its own, for engines that run on the GPU alone."
        ),
    ] = "dla"
    tensorrt: Annotated[
        str,
        Meta(
            pattern=r"^\d{1,2}\.\d{1,2}(\.\d{1,2})?$(?!\n)",
            description="TensorRT of the device, which the calibration cache is written for. JetPack 5.1: 8.5.2;"
            " 6.0: 8.6.2; 6.1 and 6.2: 10.3.0.",
            extra={"says": "a version such as 10.3.0"},
        ),
    ] = "10.3.0"
    fp16: Annotated[
        list[LayerRule], Meta(description="Layers that stay in floating point: their inputs get no Q/DQ.")
    ] = msgspec.field(default_factory=list)


class Dla(Section, frozen=True, kw_only=True):
    """The deep learning accelerator of AGX Orin (two cores) and Orin NX (one or two); Orin Nano has none."""

    core: Annotated[int, Meta(ge=0, le=1, description="Which one runs the engine.")] = 0
    gpu_fallback: Annotated[
        bool, Meta(description="Layers that the DLA cannot run go to the GPU; false: such a layer fails the build.")
    ] = True
    if_missing: Annotated[
        Literal["error", "gpu"],
        Meta(description="What to do on a module, or with a TensorRT, that has no DLA: refuse, or build for the GPU."),
    ] = "error"
    sram_kb: Annotated[PowerOfTwo, Meta(description="Managed SRAM for each subgraph.")] = 1024
    local_dram_mb: Annotated[PowerOfTwo, Meta(description="DRAM for the tensors inside each subgraph.")] = 1024
    global_dram_mb: Annotated[PowerOfTwo, Meta(description="DRAM for the weights of each subgraph.")] = 512


class Parity(Section, frozen=True, kw_only=True):
    """What a new TensorRT engine must reach against FP32 in onnxruntime before it replaces the one in use."""

    images: Annotated[int, Meta(ge=1, le=256, description="Pictures of the calibration to compare on.")] = 8
    cosine: Annotated[Fraction, Meta(description="Smallest cosine similarity of any output, over the pictures.")] = 0.8
    relative_error: Annotated[
        Positive | None,
        Meta(description="Largest |difference| of an output over FP32's largest magnitude in it; default: only told."),
    ] = None
    agreement: Annotated[
        Fraction, Meta(description="How close the task's answers must be to FP32's, mean over the pictures, 0..1.")
    ] = 0.5


class Engine(Section, frozen=True, kw_only=True):
    """What runs the model."""

    backend: Annotated[
        Literal["auto", "onnxruntime", "tensorrt"],
        Meta(description="auto: TensorRT where it is installed, else onnxruntime."),
    ] = "auto"
    precision: Annotated[
        Literal["int8", "fp16", "fp32"],
        Meta(description="int8 runs the calibrated model, fp32 the one it was made from; fp16 is for TensorRT."),
    ] = "int8"
    providers: Annotated[
        list[Literal["cpu", "cuda", "tensorrt"]],
        Meta(min_length=1, description="onnxruntime's execution providers, in order of preference."),
    ] = msgspec.field(default_factory=lambda: ["cpu"])
    threads: Annotated[
        Count | None, Meta(description="CPU threads for one inference; default: onnxruntime's own choice.")
    ] = None
    quantization: Annotated[
        Literal["auto", "cache", "ranges", "calibrator", "qdq"],
        Meta(
            description="Where TensorRT's INT8 comes from. cache: our calibration cache; ranges: ranges.json, tensor by"
            " tensor; calibrator: TensorRT calibrates on the pictures itself; qdq: the model with Q/DQ. The first three"
            " end with TensorRT 10. auto: cache with the DLA before TensorRT 11, else qdq, which evaluate has measured."
        ),
    ] = "auto"
    fp32: Annotated[list[LayerRule], Meta(description="Layers that TensorRT keeps in FP32.")] = msgspec.field(
        default_factory=list
    )
    dla: Annotated[Dla | None, Meta(description="Run on a DLA core; default: on the GPU.")] = None
    input_format: Annotated[IoFormat, Meta(description="Type and layout of the engine's inputs, as trtexec.")] = (
        "fp32:chw"
    )
    output_format: Annotated[IoFormat, Meta(description="Type and layout of the engine's outputs, as trtexec.")] = (
        "fp32:chw"
    )
    workspace_mb: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 20)] | None,
        Meta(description="Scratch memory for the builder's tactics; default: half of what is free."),
    ] = None
    optimization_level: Annotated[
        Annotated[int, Meta(ge=0, le=5)] | None,
        Meta(description="How long TensorRT searches (8.6 and later); default: its own, 3."),
    ] = None
    parity: Parity = Parity()
    fallbacks: Annotated[
        list[Literal["norm-fp32", "fp16", "fp32"]],
        Meta(
            description="What to try, in this order, when an engine misses a limit of parity. norm-fp32: Softmax and"
            " normalisations in FP32; fp16, fp32: that precision instead."
        ),
    ] = msgspec.field(default_factory=lambda: ["norm-fp32", "fp16", "fp32"])


class Limits(Section, frozen=True, kw_only=True):
    """What INT8 may cost; ``edge-calibrate evaluate`` exits with 1 when one is exceeded."""

    map_drop: Annotated[
        Fraction | None, Meta(description="Largest allowed loss of COCO mAP 0.50:0.95, where labels are given.")
    ] = None
    agreement: Annotated[
        Fraction | None,
        Meta(description="Smallest allowed share of FP32's objects (answers) that INT8 finds as well."),
    ] = None
    mask_iou: Annotated[
        Fraction | None, Meta(description="Smallest allowed IoU of all of INT8's masks with all of FP32's.")
    ] = None


class Evaluation(Section, frozen=True, kw_only=True):
    """Images, apart from the calibration's, on which INT8 is compared with FP32."""

    images: Annotated[
        list[Pattern] | Pattern,
        Meta(description="As for calibration. An image that calibration used is left out.", extra={"path": True}),
    ]
    labels: Annotated[PathStr | None, Meta(description="COCO JSON with boxes for these images, for mAP.")] = None
    limits: Limits = Limits()


class Model(Section, frozen=True, kw_only=True):
    """One model: where it is, how it sees pictures, what its outputs mean, how it is calibrated and run."""

    name: Name
    path: Annotated[PathStr, Meta(description="The trained FP32 model, ONNX with fixed shapes.")]
    task: DetectionTask | Segmentation | Classification
    artifacts: Annotated[
        PathStr | None,
        Meta(description="Folder for what calibration writes; default: artifacts/<name> beside this file."),
    ] = None
    input: Input = Input()
    calibration: Calibration | None = None
    engine: Engine = Engine()
    evaluation: Evaluation | None = None
    lighter: Annotated[
        str | None,
        Meta(description="Name of the model to run instead when the lowest frame rate does not keep the device cool."),
    ] = None

    @property
    def artifacts_dir(self) -> Path:
        """Folder of the calibration's output."""
        assert self.artifacts is not None, "load() fills it in"
        return Path(self.artifacts)


class Source(Section, frozen=True, kw_only=True, tag_field="type"):
    """Where frames come from."""


class Folder(Source, frozen=True, kw_only=True, tag="folder"):
    """The pictures of a folder, in order of their names."""

    path: PathStr
    fps: Annotated[Fps | None, Meta(description="Pictures a second; default: 10.")] = None
    loop: Annotated[bool, Meta(description="Start again at the end.")] = True
    watch: Annotated[
        bool,
        Meta(description="Give each picture once, also those that come later, and wait for more; loop has no say."),
    ] = False


class Video(Source, frozen=True, kw_only=True, tag="video"):
    """A video file, played at its own rate, the one given, or as fast as it is taken."""

    path: PathStr
    fps: Annotated[Fps | None, Meta(description="Frames a second; default: the video's own rate.")] = None
    loop: Annotated[bool, Meta(description="Start again at the end.")] = True
    pace: Annotated[
        Literal["realtime", "fast"],
        Meta(
            description="realtime: the newest frame wins, as with a camera; fast: every frame, each as soon as the"
            " model has taken the one before."
        ),
    ] = "realtime"


class TestPattern(Source, frozen=True, kw_only=True, tag="pattern"):
    """A moving test picture that is made here."""

    size: Annotated[Size, Meta(description="[width, height] in pixels.")] = (640, 480)
    fps: Fps = 30.0


class Camera(Source, frozen=True, kw_only=True):
    """What all cameras have in common."""

    scale: Annotated[
        Literal["model", "none"] | Size,
        Meta(
            description="Size of the pictures that are handed on, where GStreamer can scale them on the way: model fits"
            " them into the model's input, keeping their shape; or [width, height]."
        ),
    ] = "model"
    stall_s: Annotated[Positive, Meta(description="Without a frame for so long, the camera is opened anew.")] = 5.0
    frozen_s: Annotated[
        Positive | None,
        Meta(description="With nothing but identical frames for so long, the camera is opened anew; null: never."),
    ] = 30.0


class Csi(Camera, frozen=True, kw_only=True, tag="csi"):
    """A camera on the module's CSI connector, by NVIDIA's Argus. Needs an OpenCV with GStreamer: JetPack's."""

    sensor: Annotated[int, Meta(ge=0, le=15, description="sensor-id of nvarguscamerasrc.")] = 0
    size: Annotated[Size, Meta(description="[width, height] of a mode that the sensor has.")] = (1920, 1080)
    fps: Fps = 30.0
    flip: Annotated[int, Meta(ge=0, le=7, description="flip-method of nvvidconv; 2 turns by 180 degrees.")] = 0


class V4l2(Camera, frozen=True, kw_only=True, tag="v4l2"):
    """A USB camera, or whatever else has a /dev/video."""

    device: Annotated[
        str,
        Meta(
            pattern=r"^/dev/[^\s!]+$",
            description="/dev/v4l/by-id/... keeps its name when others are plugged in; /dev/video0 may not.",
            extra={"says": "a device such as /dev/video0, without spaces"},
        ),
    ] = "/dev/video0"
    size: Annotated[Size | None, Meta(description="[width, height] to ask for; default: the camera's own.")] = None
    fps: Annotated[Fps | None, Meta(description="Frames a second to ask for; default: the camera's own.")] = None
    format: Annotated[
        Literal["auto", "mjpeg", "yuyv"], Meta(description="What to ask the camera for; mjpeg saves USB bandwidth.")
    ] = "auto"
    backend: Annotated[
        Literal["auto", "gstreamer", "v4l2"], Meta(description="auto: GStreamer on a Jetson, else OpenCV's V4L2.")
    ] = "auto"


class Rtsp(Camera, frozen=True, kw_only=True, tag="rtsp"):
    """A network camera."""

    url: Annotated[
        str,
        Meta(
            pattern=r"^rtsps?://[^\s!\"]+$",
            description="Without user name and password, which go into username and password_file.",
            extra={"says": "an rtsp:// or rtsps:// address without spaces or quotes"},
        ),
    ]
    username: str | None = None
    password_file: Annotated[
        PathStr | None,
        Meta(
            description="File whose first line is the camera's password; default: the systemd credential"
            " camera_<stream>_password, then the environment variable EDGE_CAMERA_<STREAM>_PASSWORD."
        ),
    ] = None
    transport: Annotated[Literal["tcp", "udp"], Meta(description="tcp loses no packets; udp has less delay.")] = "tcp"
    latency_ms: Annotated[int, Meta(ge=0, le=10000, description="Jitter buffer of GStreamer's rtspsrc.")] = 200
    codec: Annotated[Literal["h264", "h265", "mjpeg"], Meta(description="For GStreamer's decoder.")] = "h264"
    backend: Annotated[
        Literal["auto", "gstreamer", "ffmpeg"],
        Meta(description="auto: GStreamer with the hardware decoder on a Jetson, else OpenCV's FFmpeg."),
    ] = "auto"


class Stream(Section, frozen=True, kw_only=True):
    """A camera, or what stands in for one."""

    name: Name
    source: Folder | Video | TestPattern | Csi | V4l2 | Rtsp
    model: Annotated[str | None, Meta(description="Name of the model to run; default: the first.")] = None


class Monitor(Section, frozen=True, kw_only=True):
    """How the device is watched."""

    period_s: Annotated[float, Meta(ge=0.2, le=60, description="Seconds between readings.")] = 1.0
    jtop: Annotated[
        Literal["auto", "off"],
        Meta(description="auto: jetson-stats adds power mode, engines and power where its service answers."),
    ] = "auto"
    telemetry_s: Annotated[
        Annotated[float, Meta(ge=1)] | None,
        Meta(description="Seconds between readings over MQTT; null: none."),
    ] = 30.0


class Governor(Section, frozen=True, kw_only=True):
    """Trades frame rate for temperature and memory, so that neither the chip throttles nor the kernel kills."""

    enabled: bool = True
    zone: Annotated[
        str | None,
        Meta(description="Thermal zone to govern by, such as tj; default: tj where there is one, else the hottest."),
    ] = None
    set_point_c: Annotated[
        Annotated[float, Meta(gt=0, le=150)] | None,
        Meta(description="Degrees Celsius to stay under; default: 10 under the zone's software-throttle trip point."),
    ] = None
    hysteresis_c: Annotated[
        float, Meta(ge=1, le=20, description="So far under the set point a pause or a lighter model ends.")
    ] = 5.0
    min_fps: Annotated[
        Positive, Meta(description="Lowest frame rate of a model before it gives way to a lighter one or pauses.")
    ] = 1.0
    memory_reserve_mb: Annotated[
        Count | None,
        Meta(
            description="MemAvailable to keep: under it inference pauses, and a process that leaks restarts before."
            " Default: 6 % of the memory, at least 128."
        ),
    ] = None


class Watch(Section, frozen=True, kw_only=True):
    """When a part of the daemon counts as broken."""

    hang_s: Annotated[
        float, Meta(ge=1, le=3600, description="An inference that takes longer hangs, and the process ends with 79.")
    ] = 30.0
    load_s: Annotated[
        float, Meta(ge=1, le=86400, description="The same for loading a model and its first inference.")
    ] = 600.0
    restarts: Annotated[
        int, Meta(ge=0, le=1000, description="How often a part is restarted within within_s before the process ends.")
    ] = 5
    within_s: Annotated[Positive, Meta(description="Seconds over which restarts are counted.")] = 300.0


class Status(Section, frozen=True, kw_only=True):
    """The daemon's own HTTP page: /metrics, /healthz, /readyz, /status."""

    host: Annotated[str, Meta(min_length=1, description="0.0.0.0 lets other machines ask, without any password.")] = (
        "127.0.0.1"
    )
    port: Annotated[
        Annotated[int, Meta(ge=1, le=65535)] | None,
        Meta(description="Each deployment that runs on a device needs its own; null: no page."),
    ] = 9464


class Outbox(Section, frozen=True, kw_only=True):
    """Results that the broker has not acknowledged yet."""

    path: Annotated[
        PathStr | None,
        Meta(description="SQLite file; default: $STATE_DIRECTORY/outbox.db under systemd, else in memory only."),
    ] = None
    max_mb: Annotated[float, Meta(gt=0, description="Beyond it the oldest results are dropped and counted.")] = 64.0


class Mqtt(Section, frozen=True, kw_only=True):
    """The broker, and what we are called there."""

    host: Annotated[str, Meta(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Meta(ge=1, le=65535)] = 1883
    topic: Annotated[
        str,
        Meta(
            pattern=r"^[^/$#+\s][^#+\s]*[^/#+\s]$|^[^/$#+\s]$",
            description="Prefix of every topic: <topic>/<device>/...",
            extra={"says": "a topic without '#', '+', spaces or outer '/'"},
        ),
    ] = "edge"
    protocol: Annotated[
        Literal["5", "3.1.1"], Meta(description="5 says why the broker refuses something; 3.1.1 for older brokers.")
    ] = "5"
    qos: Annotated[Literal[0, 1], Meta(description="1: results are kept until the broker acknowledges them.")] = 1
    keepalive_s: Annotated[int, Meta(ge=5, le=65535)] = 30
    username: str | None = None
    password_file: Annotated[
        PathStr | None,
        Meta(
            description="File whose first line is the password; default: the systemd credential mqtt_password,"
            " then the environment variable EDGE_MQTT_PASSWORD."
        ),
    ] = None
    outbox: Outbox = Outbox()


class Deployment(Section, frozen=True, kw_only=True):
    """A deployment of jetson-edge: which models run on which streams of one device, and where results go."""

    version: Annotated[Literal[1], Meta(description="Version of this file's format.")]
    device: Annotated[Name | None, Meta(description="What the device is called in topics; default: its host name.")] = (
        None
    )
    models: Annotated[list[Model], Meta(min_length=1)]
    streams: list[Stream] = msgspec.field(default_factory=list)
    mqtt: Mqtt = Mqtt()
    monitor: Monitor = Monitor()
    governor: Governor = Governor()
    watch: Watch = Watch()
    status: Status = Status()

    @property
    def device_id(self) -> str:
        """Name of the device in topics and messages."""
        return self.device or socket.gethostname()

    def model(self, name: str | None = None) -> Model:
        """The model of that name, or the first.

        Raises:
            ConfigError: there is none of that name.
        """
        for model in self.models:
            if name is None or model.name == name:
                return model
        known = ", ".join(model.name for model in self.models)
        raise ConfigError([f"there is no model {name!r} in this deployment; it has: {known}"])


def load(path: Path) -> Deployment:
    """Read, check and complete a deployment file. Relative paths become absolute, against the file's folder.

    Raises:
        ConfigError: there is no such file, or with every problem of the file, each as
            ``FILE:LINE: key: what is wrong and what is allowed``.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError([f"{path}: no such deployment file"]) from None
    except IsADirectoryError:
        raise ConfigError([f"{path}: is a folder; name the YAML file in it"]) from None
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path}: is not UTF-8 text ({error.reason} at byte {error.start})"]) from None
    deployment = strict.parse(text, Deployment, source=str(path), check=_cross_check)
    return _resolve(deployment, path.absolute().parent)


def json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of the deployment file, for editors."""
    schema = msgspec.json.schema(Deployment)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "jetson-edge deployment", **schema}


def missing_files(deployment: Deployment, keys: tuple[str, ...] = ("path", "labels", "password_file")) -> list[str]:
    """Say which of the files and folders that the deployment reads are not there, one line each."""
    found: list[str] = []
    for key, value in strict.paths_of(deployment):
        if key.rsplit(".", 1)[-1] in keys and not Path(value).exists() and ".outbox." not in key:
            found.append(f"{key}: {value}: no such file or folder")
    return found


def _cross_check(deployment: Deployment) -> list[tuple[str, str]]:
    """Find what no single key can show: (key, what is wrong)."""
    problems: list[tuple[str, str]] = []
    known = [model.name for model in deployment.models]
    problems += _check_taken("models", known)
    problems += _check_taken("streams", [stream.name for stream in deployment.streams])
    folders = [model.artifacts for model in deployment.models]
    for index, folder in enumerate(folders):
        if folder is not None and os.path.normpath(folder) in map(os.path.normpath, filter(None, folders[:index])):
            problems.append((f"models[{index}].artifacts", f"{folder!r} is the folder of an earlier entry"))
    for index, model in enumerate(deployment.models):
        problems += [(f"models[{index}].{key}", text) for key, text in _check_model(model)]
        if model.lighter == model.name:
            problems.append((f"models[{index}].lighter", "is the model itself"))
        else:
            problems += _check_model_name(f"models[{index}].lighter", model.lighter, known)
    for index, stream in enumerate(deployment.streams):
        problems += _check_model_name(f"streams[{index}].model", stream.model, known)
        source = stream.source
        if isinstance(source, Rtsp) and source.password_file is not None and source.username is None:
            problems.append((f"streams[{index}].source.password_file", "needs source.username as well"))
    mqtt = deployment.mqtt
    if mqtt.password_file is not None and mqtt.username is None:
        problems.append(("mqtt.password_file", "needs mqtt.username as well"))
    return problems


def _check_taken(kind: str, names: list[str]) -> list[tuple[str, str]]:
    return [
        (f"{kind}[{index}].name", f"{name!r} is taken by an earlier entry")
        for index, name in enumerate(names)
        if name in names[:index]
    ]


def _check_model_name(key: str, name: str | None, known: list[str]) -> list[tuple[str, str]]:
    if name is None or name in known:
        return []
    return [(key, f"there is no model {name!r}; allowed: {', '.join(known)}")]


def _check_model(model: Model) -> list[tuple[str, str]]:
    problems: list[tuple[str, str]] = []
    channels = 1 if model.input.color == "gray" else 3
    for key, values in (("mean", model.input.mean), ("std", model.input.std)):
        if len(values) not in (1, channels):
            problems.append((f"input.{key}", f"has {len(values)} values; {model.input.color} takes 1 or {channels}"))
    if model.calibration is not None:
        for index, rule in enumerate(model.calibration.fp16):
            if rule == LayerRule():
                problems.append(
                    (f"calibration.fp16[{index}]", "chooses nothing; give name, op, depthwise or attributes")
                )
    return problems + _check_engine(model.engine)


def _check_engine(engine: Engine) -> list[tuple[str, str]]:
    problems = [
        (f"engine.fp32[{index}]", "chooses nothing; give name, op, depthwise or attributes")
        for index, rule in enumerate(engine.fp32)
        if rule == LayerRule()
    ]
    if engine.backend == "onnxruntime" and engine.precision == "fp16":
        problems.append(("engine.precision", "fp16 is for TensorRT; allowed with onnxruntime: int8, fp32"))
    if engine.dla is None:
        return problems
    if engine.backend == "onnxruntime":
        problems.append(("engine.dla", "is for TensorRT; leave it out with backend: onnxruntime"))
    for key in ("sram_kb", "local_dram_mb", "global_dram_mb"):
        size = getattr(engine.dla, key)
        if size & (size - 1):
            problems.append((f"engine.dla.{key}", f"is {size}; a DLA memory pool is a power of two"))
    if engine.precision == "fp32":
        problems.append(("engine.precision", "is fp32, which no DLA runs; allowed with engine.dla: int8, fp16"))
    return problems


def _resolve(deployment: Deployment, folder: Path) -> Deployment:
    def absolute(value: str) -> str:
        return os.path.normpath(folder / Path(value).expanduser())

    models = []
    for model in deployment.models:
        artifacts = absolute(model.artifacts or f"artifacts/{model.name}")
        task = model.task
        if isinstance(task.labels, str) and task.labels != "coco80":
            task = msgspec.structs.replace(task, labels=absolute(task.labels))
        models.append(msgspec.structs.replace(model, task=task, artifacts=artifacts))
    return strict.map_paths(msgspec.structs.replace(deployment, models=models), absolute)
