"""What runs on the device: configuration, engines, tasks, sources, publishing and the daemon."""

__version__ = "0.1.0"
