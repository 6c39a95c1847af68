"""Metrics, calibration intervals, the gate, the comparison with the live version, and the report."""
