"""The prefix tree of segments and what is resident where. Pure; one writer."""
