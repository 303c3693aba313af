"""Traces, virtual clock, replay and rival policies: drives the same predict/ and place/ objects as production."""
