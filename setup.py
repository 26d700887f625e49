"""Package metadata of jetson-edge. Tool settings live in pyproject.toml."""

import re
from pathlib import Path

from setuptools import Extension, find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"', (HERE / "edge/__init__.py").read_text(), re.MULTILINE)[1]

CPU = ["onnxruntime>=1.18", "opencv-python-headless>=4.8"]
# The Jetson's own TensorRT and OpenCV come from JetPack's apt packages: PyPI's tensorrt is not built for the
# Jetson and PyPI's OpenCV shadows the only one that has GStreamer, so neither is named here.
JETSON = ["pycuda>=2022.2", "jetson-stats>=4.2.9"]
# What edge-calibrate build needs beside those: not OpenCV, see above.
BUILD = ["onnx>=1.16", "onnx-ir>=0.1.10", "onnxruntime>=1.18", "rich>=13"]
CALIBRATION = [*CPU, *BUILD, "jinja2>=3.1", "pycocotools>=2.0.8"]
DEMO = [*CALIBRATION, "amqtt>=0.11"]
DEV = [
    *DEMO,
    "hypothesis>=6.100",
    "jetson-stats>=7.2",  # its service and client run in the tests, over an emulated sysfs
    "jsonschema>=4.20",
    "mypy>=1.13",
    "pillow>=10",
    "pytest>=8",
    "ruff>=0.9",
    "types-PyYAML",
    "types-jsonschema",
]

# optional: without a compiler the package installs all the same, and numpy counts (calibration/kernel.py).
KERNEL = Extension("calibration._kernel", ["calibration/kernel.c"], extra_compile_args=["-O3"], optional=True)

setup(
    name="jetson-edge",
    version=VERSION,
    description="Vision models on NVIDIA Jetson Orin: INT8 calibration, TensorRT engines, a daemon",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=find_packages(include=["edge", "edge.*", "calibration", "calibration.*"]),
    package_data={
        "edge": ["py.typed", "publish/schemas/*.json", "labels/*.txt"],
        "calibration": ["py.typed", "templates/*.j2"],
    },
    ext_modules=[KERNEL],
    install_requires=[
        "click>=8.1",
        "msgspec>=0.19",
        "numpy>=1.23",
        "paho-mqtt>=2.0",
        "prometheus-client>=0.20",
        "pyyaml>=6.0",
    ],
    extras_require={
        "cpu": CPU,
        "jetson": JETSON,
        "build": BUILD,
        "calibration": CALIBRATION,
        "demo": DEMO,
        "dev": DEV,
    },
    entry_points={
        "console_scripts": [
            "edge-calibrate = calibration.cli:main",
            "edge-daemon = edge.cli:main",
        ]
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Environment :: Console",
        "Intended Audience :: Developers",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Image Recognition",
        "Typing :: Typed",
    ],
)
