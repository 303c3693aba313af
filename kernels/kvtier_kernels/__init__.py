"""Triton kernels that move, encode, turn and score paged KV; each stands beside its torch reference.

Every public function takes tensors on one device and runs the kernel there; on a CPU only Triton's interpreter runs
kernels (tests), production code asks `dispatch.choose_path` first. Block tables are checked on the host before a kernel
sees them, so none reads or writes out of bounds. Importing this package imports torch and triton.
"""
