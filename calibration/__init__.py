"""What runs anywhere: calibration, evaluation, reports and engine builds. May import edge, never the reverse."""
