"""Questions about speed, memory and accuracy, each a command: ``python -m benchmarks.NAME [--json FILE]``."""
