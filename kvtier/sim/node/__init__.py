"""One serving node in virtual time: tiers, links, a GPU, requests that wait. Drives the same `place` objects as
production; docs/simulator.md says what is modelled and what is not."""
