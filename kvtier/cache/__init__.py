"""The one orchestrator: match, lease, load, store, recover."""
