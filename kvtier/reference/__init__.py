"""Research references on Hugging Face models, CPU only: what needs a model's attention, to measure and to compare.

Everything here that drops or coarsens KV is lossy and is wired into no engine. Needs torch and transformers; nothing
else in kvtier imports this package but the command line.
"""
