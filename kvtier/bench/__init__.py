"""`kvtier bench tiers`: every tier against the physical limit of its medium, measured in the same run."""
