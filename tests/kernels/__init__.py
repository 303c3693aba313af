"""Kernel tests that need Triton's interpreter or compiler; `tests/unit/test_kernels.py` runs the interpreted ones.

TRITON_INTERPRET must be set before a kernel is decorated and would disturb every other test that meets Triton, so the
interpreted tests live in files pytest does not collect by itself and run in a process of their own.
"""
