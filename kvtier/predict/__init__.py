"""Forecasts of reuse. Pure: no I/O, no engine."""
