"""Where bytes live: the Tier protocol and its implementations."""
