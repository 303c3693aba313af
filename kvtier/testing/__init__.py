"""Fakes as products: virtual clock, memory tier, faulty tier. Used by kvtier's tests and by its users' tests."""
