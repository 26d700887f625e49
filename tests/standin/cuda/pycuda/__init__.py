"""Stand-in for pycuda, for tests on machines without CUDA."""

VERSION = (2026, 1)
VERSION_STATUS = ""
VERSION_TEXT = ".".join(str(part) for part in VERSION) + VERSION_STATUS
